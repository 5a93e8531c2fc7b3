"""A stream gets so many bytes of copies at a time, and what is needed now before what can wait. Who polls
reports their ends, or a thread where nobody does."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock._native import DEMAND, PREFETCH
from penstock.errors import PenstockError
from penstock.runtime.devices import Copy, queues
from penstock.runtime.devices.queues import StreamQueue

WAIT_S = 30.0


class _Event:
    """Reached when the test says so."""

    def __init__(self, reached: bool = False) -> None:
        self.reached = threading.Event()
        if reached:
            self.reached.set()

    def synchronize(self) -> None:
        assert self.reached.wait(WAIT_S)

    def query(self) -> bool:
        return self.reached.is_set()

    def elapsed_time(self, later: _Event) -> float:
        return 0.0


class _Copies:
    """issued      sizes, as the stream got them
    over        sizes and errors, as they ended
    reporters   threads that said so
    """

    def __init__(self) -> None:
        self.reporters: list[int] = []
        self.issued: queue.Queue[tuple[int, _Event]] = queue.Queue()
        self.over: queue.Queue[tuple[int, PenstockError | None]] = queue.Queue()
        self.waited: list[_Event] = []
        stream = SimpleNamespace(wait_event=self.waited.append)
        self.queue = StreamQueue(
            "test",
            "host_to_device",
            stream,
            self._issue,
            lambda event: None,
            SimpleNamespace(profiler_range=lambda text: contextlib.nullcontext(), use_device=lambda: None),  # type: ignore[arg-type]
        )

    def _issue(self, copy: Copy, stream: Any) -> None:
        if copy.size_bytes == 13:
            raise RuntimeError("the stream takes none of 13 bytes")
        copy.begun, copy.over = _Event(), _Event()
        self.issued.put((copy.size_bytes, copy.over))

    def put(self, size_bytes: int, priority: int = PREFETCH, at_once: bool = False) -> Copy:
        def on_end(copy: Copy) -> None:
            self.reporters.append(threading.get_ident())
            self.over.put((size_bytes, copy.error))

        managed = SimpleNamespace(index=-1, kind=-1, size_bytes=size_bytes)
        copy = Copy(managed, torch.UntypedStorage(size_bytes), False, priority, on_end)  # type: ignore[arg-type]
        copy.ready, copy.at_once = [], at_once
        self.queue.put(copy)
        return copy

    def next_ends(self) -> int:
        """The next that the stream got is over; which it was."""
        size_bytes, event = self.issued.get(timeout=WAIT_S)
        event.reached.set()
        assert self.over.get(timeout=WAIT_S) == (size_bytes, None)
        return size_bytes


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Copies]:
    monkeypatch.setattr(queues, "STREAM_BYTES", 5)
    made = _Copies()
    yield made
    made.queue.close(WAIT_S)


def test_what_is_needed_now_overtakes_what_was_asked_for_before(copies: _Copies) -> None:
    for size_bytes in (4, 6, 7, 8):  # two are enough for the stream
        copies.put(size_bytes)
    copies.put(9, DEMAND)
    assert copies.issued.qsize() == 2
    assert [copies.next_ends() for _ in range(5)] == [4, 6, 9, 7, 8]


def test_one_that_kernels_wait_for_begins_at_once(copies: _Copies) -> None:
    first, _, last = [copies.put(size_bytes) for size_bytes in (6, 7, 8)]
    assert first.over is not None and last.over is None
    event = copies.queue.issue_now(last)
    assert event is last.over is not None and copies.queue.issue_now(last) is event
    assert [copies.next_ends() for _ in range(3)] == [6, 8, 7]


def test_one_that_waits_can_be_given_another_event_to_wait_for(copies: _Copies) -> None:
    first, second = copies.put(6), copies.put(7)
    event = _Event(reached=True)
    assert not copies.queue.add_wait(first, lambda: event)
    assert not copies.queue.add_wait(second, lambda: None)
    assert copies.queue.add_wait(second, lambda: event)
    assert copies.waited == []
    assert [copies.next_ends() for _ in range(2)] == [6, 7]
    assert copies.waited == [event]


def test_one_that_the_stream_refuses_fails_alone(copies: _Copies) -> None:
    copies.put(6)
    refused = copies.put(13)
    copies.put(7)
    assert copies.next_ends() == 6
    size_bytes, error = copies.over.get(timeout=WAIT_S)
    assert size_bytes == 13 and "takes none of 13 bytes" in str(error)
    assert copies.queue.issue_now(refused) is None
    assert copies.next_ends() == 7


def test_what_waits_is_seen_to_before_the_thread_ends(copies: _Copies) -> None:
    for size_bytes in (6, 7, 8):
        copies.put(size_bytes)
    closing = threading.Thread(target=copies.queue.close, args=(WAIT_S,))
    closing.start()
    assert [copies.next_ends() for _ in range(3)] == [6, 7, 8]
    closing.join(WAIT_S)
    assert not closing.is_alive()
    with pytest.raises(PenstockError, match="the run is closed"):
        copies.put(1)


@pytest.fixture
def polled(copies: _Copies, monkeypatch: pytest.MonkeyPatch) -> _Copies:
    """The program polls, as often as it takes for the thread to stay away."""
    monkeypatch.setattr(queues, "POLLED_WITHIN_S", 1000.0)
    copies.queue.poll()
    return copies


def test_who_polls_reports_what_is_over(polled: _Copies) -> None:
    polled.put(6)
    polled.put(7)
    assert not polled.queue.poll()
    for size_bytes in (6, 7):
        _, event = polled.issued.get(timeout=WAIT_S)
        event.reached.set()
        assert polled.queue.poll() and polled.over.get_nowait() == (size_bytes, None)
    assert set(polled.reporters) == {threading.get_ident()}


def test_the_thread_reports_where_the_program_waits(polled: _Copies) -> None:
    polled.put(6)
    polled.queue.wait_on_thread()
    polled.next_ends()
    polled.put(7)  # it still waits
    polled.next_ends()
    assert threading.get_ident() not in polled.reporters


def test_the_thread_reports_where_the_program_polls_no_more(
    polled: _Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    polled.put(6)
    monkeypatch.setattr(queues, "POLLED_WITHIN_S", 0.01)
    polled.put(8, at_once=True)  # so that it looks
    assert [polled.next_ends() for _ in range(2)] == [6, 8]
    polled.put(7)
    polled.next_ends()
    assert threading.get_ident() not in polled.reporters


def test_the_thread_reports_what_another_thread_waits_for(polled: _Copies) -> None:
    """Also where the stream is full."""
    polled.put(6)
    polled.put(8, at_once=True)
    assert [polled.next_ends() for _ in range(2)] == [6, 8]
    assert threading.get_ident() not in polled.reporters
