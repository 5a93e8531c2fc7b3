"""Wherever Ctrl-C comes while files are open, none of them is open afterwards."""

from __future__ import annotations

import contextlib
import dis
import gc
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

import penstock
from penstock import samples

SOURCES = str(Path(penstock.__file__).parent)
LOOKS = ("CALL", "RESUME", "JUMP_BACKWARD")  # how instructions begin after which CPython looks for signals
Place = tuple[CodeType, int]  # an instruction


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def left() -> set[str]:
    """Descriptors that are open when nobody needs one any more."""
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "penstock-free":  # closes what a new file has replaced
            thread.join()
    return descriptors()


def traced(
    action: Callable[[], object], visit: Callable[[Place], None], only: CodeType | None = None
) -> None:
    """``visit`` each instruction of penstock's, or of ``only`` one function, before it is carried out."""

    def inside(frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode":
            visit((frame.f_code, frame.f_lasti))
        return inside

    def called(frame: FrameType, _: str, __: Any) -> Any:
        code = frame.f_code
        if code is only or (only is None and code.co_filename.startswith(SOURCES)):
            frame.f_trace_opcodes = True
            return inside
        return None

    sys.settrace(called)
    try:
        action()
    finally:
        sys.settrace(None)


def places_with_files_open(action: Callable[[], object]) -> list[Place]:
    """Where Ctrl-C may come meanwhile."""
    found: dict[Place, None] = {}
    before = len(descriptors())
    after: dict[CodeType, set[int]] = {}

    def visit(place: Place) -> None:
        code, offset = place
        if code not in after:
            # As if the call had been interrupted, not what follows: that has the same handler.
            entries = getattr(dis.Bytecode(code), "exception_entries", ())
            pairs = itertools.pairwise(dis.get_instructions(code))
            after[code] = {
                later.offset
                for one, later in pairs
                if one.opname.startswith(LOOKS)
                and all((e.start <= one.offset < e.end) == (e.start <= later.offset < e.end) for e in entries)
            }
        if place not in found and offset in after[code] and len(descriptors()) > before:
            found[place] = None

    traced(action, visit)
    return list(found)


def interrupted(action: Callable[[], object], place: Place) -> None:
    def visit(now: Place) -> None:
        if now == place:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        traced(action, visit, only=place[0])


@pytest.fixture
def settled() -> Iterator[None]:
    """What is there already is no garbage."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("name", ["save", "load", "mount"])
def test_of_any_call(name: str, tmp_path: Path, settled: None) -> None:
    state, file, store = {"one": torch.arange(10)}, tmp_path / "state", tmp_path / "store"
    actions: dict[str, Callable[[], object]] = {
        "save": lambda: penstock.save(state, file),
        "load": lambda: penstock.load(file),
        "mount": lambda: samples.mount(store).close(),
    }
    penstock.save(state, file)
    samples.pack([("one", b"a sample")], store)
    action = actions[name]
    action()
    before = left()
    places = places_with_files_open(action)
    assert len(places) > 100
    for code, offset in places:
        interrupted(action, (code, offset))
        assert descriptors() <= before or left() <= before, (
            f"{code.co_filename}: {code.co_name}, instruction {offset}"
        )
    penstock.save(state, file, wait=False).wait(60)  # no lock was left taken
