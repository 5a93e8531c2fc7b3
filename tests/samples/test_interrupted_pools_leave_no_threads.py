"""Threads in the background end with what they were made for, however that ends."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable

import pytest

from penstock.samples.threads import DaemonThreads

NAME = "interrupted-pool"


def alive() -> int:
    """Threads of the pool, once those that end have ended."""
    deadline_s = time.monotonic() + 10
    while (
        found := sum(each.name == NAME for each in threading.enumerate())
    ) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return found


def test_an_interrupt_between_two_threads_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    start: Callable[[threading.Thread], None] = threading.Thread.start
    started = 0

    def interrupted(thread: threading.Thread) -> None:
        nonlocal started
        start(thread)
        started += 1
        if started == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            DaemonThreads(NAME, 3)
    gc.collect()
    assert alive() == 0


def test_a_pool_that_nobody_closes_ends_once_it_has_done_what_it_was_given() -> None:
    pool = DaemonThreads(NAME, 2)
    done = [pool.submit(time.sleep, 0.01) for _ in range(5)]
    del pool
    gc.collect()
    assert alive() == 0
    assert all(each.done() for each in done)
