"""Between the copy engine and the native queue lie few calls of Python, there and back."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import pytest

import penstock
from penstock.storage.native import PosixTransport
from penstock.storage.paths import TRANSPORTS
from penstock.storage.transfer import Transfer
from tests.support.families import iterate, small_gpt
from tests.support.runs import PAGED

ENGINE = "penstock.runtime.copy_engine"
MOST = 6


class Counting(PosixTransport):
    """there   frames from the eviction that a write is of to `submit`
    back    from the native queue to the engine, of each write that it is told of"""

    def __init__(self, there: list[int], back: list[int]) -> None:
        self._there, self._back = there, back
        super().__init__()

    def submit(self, transfers: Sequence[Transfer], /) -> None:
        frames = frames_to(sys._getframe(1), "evict")
        if frames is not None and transfers[0].kind == "write":
            self._there.append(frames)
        for transfer in transfers:
            if transfer.kind == "write":
                self._count_back(transfer)
        super().submit(transfers)

    def _count_back(self, transfer: Transfer) -> None:
        on_done = transfer.on_done

        def counted(ended: Transfer) -> None:
            transfer.on_done = on_done
            outside = sys._getframe()
            depths: list[int] = []

            def note(frame: FrameType, event: str, _: object) -> None:
                if event == "call" and frame.f_globals["__name__"] == ENGINE:
                    depths.append(depth(frame) - depth(outside))

            sys.setprofile(note)
            try:
                on_done(ended)
            finally:
                sys.setprofile(None)
            self._back.extend(depths[:1])

        transfer.on_done = counted


def depth(frame: FrameType | None) -> int:
    count = 0
    while frame is not None:
        frame, count = frame.f_back, count + 1
    return count


def frames_to(frame: FrameType | None, name: str) -> int | None:
    """How many there are from ``frame`` up to that function of the engine; None where it is none of them."""
    count = 1
    while frame is not None and (frame.f_code.co_name, frame.f_globals["__name__"]) != (name, ENGINE):
        frame, count = frame.f_back, count + 1
    return count if frame is not None else None


def test_an_eviction_is_at_most_six_frames_from_the_native_queue_and_six_back(
    tmp_path: Path, hardware: penstock.Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    there: list[int] = []
    back: list[int] = []
    monkeypatch.setitem(TRANSPORTS, "posix", lambda: Counting(there, back))
    model, optimizer = small_gpt()
    with penstock.offload(
        model,
        optimizer,
        device_budget="500KiB",
        planning=PAGED,
        spill_dir=tmp_path,
        hardware=hardware,
        io=penstock.IoOptions(paths="posix direct"),
    ) as run:
        for step in range(4):
            with run.step():
                iterate(model, optimizer, step)
    assert there and back
    assert max(there) <= MOST and max(back) <= MOST, (max(there), max(back))
