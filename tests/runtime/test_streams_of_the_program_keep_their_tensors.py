"""No memory is handed out again while a stream of the program's may still use it."""

from __future__ import annotations

import pytest
import torch

from penstock.runtime.storages import AWAY
from penstock.storage.spill import SpillSpace
from tests.support.checked import CheckedDriver, CheckedRun, Violation, checked_run


def use_elsewhere(run: CheckedRun, tells: bool) -> None:
    """A tensor is used on another stream, after it was away, and dies before that is done."""
    tensor = torch.arange(256.0).mul_(2)
    side = run.driver.make_stream("side")
    if tells:
        tensor.record_stream(run.driver.name_stream(side))
    managed = run.clock.storages.find(tensor.untyped_storage())
    assert managed is not None
    with run.engine.lock:
        run.engine.evict(managed, release=True)
    run.engine.drain()
    assert managed.state == AWAY
    event = run.driver.make_event()
    event.record(run.driver.current_stream())
    side.wait_event(event)
    tensor.view(16, 16)  # it comes back
    run.engine.drain()
    with run.driver.on(side):
        made = tensor.add(1)
        del managed, tensor
        side.synchronize()
        assert made[255].item() == 511


@pytest.mark.parametrize("seed", range(3))
def test_a_tensor_dies_when_they_are_done(spill: SpillSpace, seed: int) -> None:
    with checked_run(spill, 1 << 20, seed=seed) as run:
        use_elsewhere(run, tells=True)


def test_else_the_program_races(spill: SpillSpace) -> None:
    with pytest.raises(Violation, match="freed while kernel add"), checked_run(spill, 1 << 20) as run:
        use_elsewhere(run, tells=False)


def test_record_stream_is_no_write(spill: SpillSpace) -> None:
    with checked_run(spill, 1 << 20) as run:
        tensor = torch.arange(256.0).mul_(2)
        managed = run.clock.storages.find(tensor.untyped_storage())
        assert managed is not None
        with run.engine.lock:
            run.engine.evict(managed, release=False)
        run.engine.drain()
        assert managed.clean
        tensor.record_stream(run.driver.name_stream(run.driver.make_stream("side")))
        assert managed.clean


@pytest.mark.parametrize("seed", range(3))
def test_what_another_stream_made_before_the_run_leaves_when_they_are_done(
    spill: SpillSpace, seed: int
) -> None:
    made: list[torch.Tensor] = []

    def make_driver(seed: int, **options: bool) -> CheckedDriver:
        driver = CheckedDriver(seed, **options)
        side = driver.make_stream("side")
        with driver.mode, driver.on(side):
            made.append(torch.arange(256.0).mul_(2))
        side.synchronize()
        return driver

    with checked_run(spill, 1 << 20, seed=seed, make_driver=make_driver) as run:
        (tensor,) = made
        run.clock.set_kind(tensor, 0)
        managed = run.clock.storages.find(tensor.untyped_storage())
        assert managed is not None
        with run.engine.lock:
            run.engine.evict(managed, release=False)
        run.engine.drain()
        found = tensor.add(1)
        with run.engine.lock:
            run.engine.evict(managed, release=True)  # it has a copy, and leaves at once
        assert managed.state == AWAY
        assert found[255].item() == 511
        assert tensor.add(1)[255].item() == 511
