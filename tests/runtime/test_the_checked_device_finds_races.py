"""The checked accelerator finds the faults that it is there for: each is put in, and must be found."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from penstock.errors import PenstockError
from penstock.runtime.copy_engine import DEMAND, CopyEngine
from penstock.runtime.devices.accelerator import AcceleratorDevice
from penstock.runtime.storages import AWAY, LEAVING
from penstock.storage.spill import SpillOptions, SpillSpace
from tests.support.checked import (
    CheckedDriver,
    CheckedEvent,
    CheckedRun,
    CheckedStream,
    Violation,
    checked_run,
)

TRIES = 12


@pytest.fixture(scope="module")
def spill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpillSpace]:
    directory = tmp_path_factory.mktemp("spill")
    with SpillSpace(directory, SpillOptions(paths=["posix buffered"], page_cache_bytes=64 << 20)) as space:
        yield space


class DeafEvent(CheckedEvent):
    """Takes no notice of streams whose name begins so."""

    to = ""

    def record(self, stream: CheckedStream) -> None:
        if stream.name.startswith(self.to):
            self.times, self.after = {}, None
        else:
            super().record(stream)


class NoWaitForKernels(CheckedDriver):
    def make_event(self) -> CheckedEvent:
        event = DeafEvent(self)
        event.to = "compute"
        return event


class NoWaitForCopies(CheckedDriver):
    def make_event(self) -> CheckedEvent:
        event = DeafEvent(self)
        event.to = "stream"
        return event


class OverTooEarly(AcceleratorDevice):
    """Says that a copy out is complete when it has begun."""

    def copy_out(self, managed: Any, storage: Any, done: Any) -> None:
        super().copy_out(managed, storage, lambda error, moved: None)
        done(None, [])


def ignore_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    release = CopyEngine._release

    def careless(self: CopyEngine, managed: Any) -> None:
        pins, managed.pins = managed.pins, 0
        try:
            release(self, managed)
        finally:
            managed.pins = pins

    monkeypatch.setattr(CopyEngine, "_release", careless)


def ignore_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(self: CopyEngine, managed: Any) -> None:
        if managed.state != LEAVING:
            managed.clean = False

    monkeypatch.setattr(CopyEngine, "will_write", careless)


def do_not_wait_for_what_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(self: CopyEngine, wanted: Any) -> None:
        for managed in wanted:
            if managed.state == AWAY:
                self.make_room(managed.size_bytes)
                self._bring(managed, DEMAND)

    monkeypatch.setattr(CopyEngine, "demand", careless)


def make_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CopyEngine, "make_room", lambda *_, **__: None)


def demand_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CopyEngine, "demand", lambda *_: None)


MUTANTS: dict[str, tuple[dict[str, Any], Callable[[pytest.MonkeyPatch], None] | None, str]] = {
    "copies do not wait for kernels": ({"make_driver": NoWaitForKernels}, None, "wait for|who had it before"),
    "the host does not wait for copies": (
        {"make_driver": NoWaitForCopies},
        None,
        "emptied|wait for|given back",
    ),
    "copies are over too early": ({"make_device": OverTooEarly}, None, "emptied|changed its size"),
    "pins are ignored": ({}, ignore_pins, "not there|changed|setStorage|emptied"),
    "writes are ignored": ({}, ignore_writes, "did not wait for|nothing has copied"),
    "kernels do not wait for what comes": ({}, do_not_wait_for_what_comes, "wait for|not there|emptied"),
    "kernels do not demand what is away": ({}, demand_nothing, "not there"),
    "no room is made": ({}, make_no_room, "allowed"),
}


def evict(run: CheckedRun, tensor: torch.Tensor, tier: str, release: bool, packs: int) -> None:
    with run.engine.lock:
        managed = run.clock.storages.find(tensor.untyped_storage())
        assert managed is not None
        run.engine.evict(managed, tier, release=release, packs=packs)


def prefetch(run: CheckedRun, tensor: torch.Tensor) -> None:
    with run.engine.lock:
        managed = run.clock.storages.find(tensor.untyped_storage())
        assert managed is not None
        run.engine.prefetch(managed)


def work(spill: SpillSpace, seed: int, **options: Any) -> None:
    """Many tensors that are used and written in turn, in the room of a few, with evictions that a plan
    might have asked for."""
    with checked_run(spill, 6 * 1024, seed=seed, host_bytes=1 << 16, timeout_s=5.0, **options) as run:
        # Most is zero, so that compression is worth it.
        tensors = [(torch.arange(256) % 4 == 0).float().mul_(index) for index in range(12)]
        expected = [float(index) for index in range(12)]
        for turn in range(60):
            target, source = turn % 12, (7 * turn + seed) % 12
            how = ("host", "disk")[turn % 2], turn % 3 > 0, (0, 4)[turn % 5 > 2]
            evict(run, tensors[source], *how)
            half = tensors[source] * 0.5
            tensors[target].mul_(1)  # it is there, and has no copy
            evict(run, tensors[target], *how)
            tensors[target].add_(half)
            if turn % 7 == 0:
                prefetch(run, tensors[(turn + 5) % 12])
            expected[target] += expected[source] * 0.5
        assert [4 * float(tensor.mean()) for tensor in tensors] == pytest.approx(expected, rel=1e-5)


def test_without_a_fault_nothing_is_found(spill: SpillSpace) -> None:
    for seed in range(TRIES):
        work(spill, seed)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_found(name: str, spill: SpillSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    options, change, text = MUTANTS[name]
    if change is not None:
        change(monkeypatch)
    found: list[str] = []
    for seed in range(TRIES):
        try:
            work(spill, seed, **options)
        except (Violation, RuntimeError, PenstockError) as error:
            found.append(f"{type(error).__name__}: {error}")
            if isinstance(error, Violation):
                break
    assert found and re.search(f"Violation: .*({text})", found[-1]), found
