"""The checked accelerator finds the faults that it is there for: each is put in, and must be found."""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from penstock._native import DEMAND
from penstock.errors import PenstockError
from penstock.runtime.copy_engine import CopyEngine
from penstock.runtime.devices.accelerator import AcceleratorDevice
from penstock.runtime.storages import AWAY, LEAVING
from penstock.storage.spill import SpillSpace
from tests.support.checked import (
    CheckedDriver,
    CheckedEvent,
    CheckedRun,
    CheckedStream,
    Violation,
    checked_run,
)

TRIES = 12


class DeafEvent(CheckedEvent):
    """Takes no notice of streams whose name begins so."""

    to = ""

    def record(self, stream: CheckedStream) -> None:
        if stream.name.startswith(self.to):
            self.times, self.after = {}, None
        else:
            super().record(stream)


class NoWaitForKernels(CheckedDriver):
    def make_event(self, timed: bool = False) -> CheckedEvent:
        event = DeafEvent(self)
        event.to = "compute"
        return event


class NoWaitForCopies(CheckedDriver):
    def make_event(self, timed: bool = False) -> CheckedEvent:
        event = DeafEvent(self)
        event.to = "stream"
        return event


class DeafStream(CheckedStream):
    def wait_event(self, event: CheckedEvent) -> None:
        pass


class KernelsWaitForNothing(CheckedDriver):
    def make_stream(self, name: str = "") -> CheckedStream:
        if not name:
            return super().make_stream()
        stream = DeafStream(self, name)
        self._streams.append(stream)
        return stream


class OverTooEarly(AcceleratorDevice):
    """Says that a copy out is complete when it has begun."""

    def copy_out(self, wanted: Any) -> None:
        begun = copy.copy(wanted)
        begun.on_end = lambda ended: None
        super().copy_out(begun)
        wanted.on_end(wanted)


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
                self._start_copy_in(managed, DEMAND)

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
    "kernels do not wait for copies on the device": (
        {"make_driver": KernelsWaitForNothing},
        None,
        "wait for|emptied|not there",
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


class HeldEvent(CheckedEvent):
    """The host learns of no copy while it is held."""

    def __init__(self, driver: CheckedDriver) -> None:
        super().__init__(driver)
        self.free = driver.free  # type: ignore[attr-defined]

    def query(self) -> bool:
        return self.free.is_set() and super().query()

    def synchronize(self) -> None:
        assert self.free.wait(30)
        super().synchronize()


class HeldDriver(CheckedDriver):
    def __init__(self, seed: int = 0, **options: Any) -> None:
        super().__init__(seed, **options)
        self.free = threading.Event()
        self.free.set()

    def make_event(self, timed: bool = False) -> CheckedEvent:
        return HeldEvent(self)


def test_kernels_go_on_before_the_host_has_seen_a_copy(spill: SpillSpace) -> None:
    """They wait on the device. Host memory is nobody else's until the host has seen the copies end."""
    with checked_run(spill, 8 * 1024, timeout_s=5.0, make_driver=HeldDriver) as run:
        free = run.driver.free  # type: ignore[attr-defined]
        tensors = [torch.full((256,), float(index)) for index in range(4)]
        for tensor in tensors[:2]:
            evict(run, tensor, "host", True, 0)
        run.engine.drain()
        free.clear()
        try:
            assert tensors[0].add(tensors[1]).sum() == 256  # what comes
            device, managed = run.device, run.clock.storages.find(tensors[0].untyped_storage())
            assert managed is not None
            slot = managed.slot
            with run.engine.lock:
                run.engine.will_write(managed)
                device.free_slot(managed, slot)
                managed.slot = None
            taken = device._copies.slab.try_allocate(slot.block.size_bytes)
            assert taken is not None and taken.offset != slot.block.offset
            evict(run, tensors[2], "host", True, 0)
            evict(run, tensors[3], "host", True, 0)
            room = torch.zeros(1024 + 512)  # what leaves
            assert room.sum() == 0
        finally:
            free.set()
        run.engine.drain()
        again = device._copies.slab.try_allocate(slot.block.size_bytes)
        assert again is not None and again.offset == slot.block.offset
        del room


def test_what_is_packed_for_nothing_is_gone_at_once(spill: SpillSpace) -> None:
    with checked_run(spill, 8 * 1024) as run:
        tensor = (torch.arange(256) % 4 == 0).float()
        tensor.mul_(1)  # what it was made of is gone
        with run.engine.lock:  # it is written before the engine hears that it is packed
            evict(run, tensor, "host", True, 4)
            managed = run.clock.storages.find(tensor.untyped_storage())
            assert managed is not None
            run.engine.will_write(managed)
        run.engine.drain()
        assert managed.packed_bytes == 0
        assert run.device.memory.managed_bytes == run.driver.allocated_bytes()


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


@pytest.mark.parametrize("waits", [True, False])
def test_memory_of_the_dead_is_handed_out_behind_their_copies(waits: bool) -> None:
    driver = CheckedDriver(lag=0)
    host = torch.empty(4096, dtype=torch.uint8)
    driver.page_lock(host.data_ptr(), 4096)
    copies = driver.make_stream()
    with driver.mode:
        content = torch.ones(4096, dtype=torch.uint8)
    ready, copied = driver.make_event(), driver.make_event()
    ready.record(driver.current_stream())
    copies.wait_event(ready)
    driver.copy(host, content, copies)
    copied.record(copies)
    if waits:
        driver.current_stream().wait_event(copied)
    del content  # the copy has not run
    driver.synchronize()
    if waits:
        driver.check()
    else:
        with pytest.raises(Violation, match=r"is freed while the copy from storage 1 on .* may still use it"):
            driver.check()
