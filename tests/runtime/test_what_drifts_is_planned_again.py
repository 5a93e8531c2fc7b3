"""A machine that changes while a run goes on is planned for again, in the background, with the same bits."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import penstock
from penstock.core.hardware import Hardware
from penstock.core.trace import Trace
from penstock.runtime import replanning
from penstock.runtime.devices import Moved
from penstock.runtime.drift import (
    LEAST_BYTES,
    MOST_OVERHEAD,
    SKIPPED_STEPS,
    WINDOW,
    Drift,
    with_rates_of,
    without_copies,
)
from penstock.runtime.step_planner import StepPlanner
from penstock.storage.paths import TRANSPORTS
from tests.support.runs import HARDWARE, Bits, Program, Step, bits, differences, in_memory, offload, offloaded
from tests.support.slow_disk import Rate, SlowDisk

FAST = 300e6  # bytes per second
GIVEN = replace(HARDWARE, disk_read_bytes_per_s=FAST, disk_write_bytes_per_s=FAST)
PAUSE_S = 0.05  # of the program itself: so long that what the disk does is little
MOST_STEPS = 500  # planning takes half a second: so many steps take longer


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Rate:
    rate = Rate(FAST)
    monkeypatch.setitem(TRANSPORTS, "posix", lambda: SlowDisk(rate))
    return rate


def training(goes_on: Callable[[int], bool], pause_s: Callable[[int], float] = lambda _: 0.0) -> Program:
    """Steps of some linear layers, as long as ``goes_on`` says so of their number.

    pause_s   that the program takes for itself in the middle of the step of this number
    """

    def program(step: Step) -> Bits:
        model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.Tanh())))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for number in itertools.takewhile(goes_on, itertools.count()):
            x = torch.randn(256, 256, generator=torch.Generator().manual_seed(number))
            with step():
                loss = model(x).square().mean()
                time.sleep(pause_s(number))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return bits(model.parameters())

    return program


@pytest.fixture(scope="module")
def budget_bytes(tmp_path_factory: pytest.TempPathFactory) -> int:
    _, report = offloaded(training(lambda number: number < 4), "1GiB", tmp_path_factory.mktemp("spill"))
    return int(0.45 * report.peak_bytes)


def planners() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "penstock-planning"]


@pytest.mark.slow
def test_a_disk_that_becomes_three_times_slower_is_planned_for(
    disk: Rate, budget_bytes: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    steps = 0
    run: penstock.Offload

    def goes_on(number: int) -> bool:
        nonlocal steps
        steps = number
        if number == 12:
            disk.bytes_per_s = FAST / 3
        rates = run.hardware.disk_write_bytes_per_s, run.hardware.disk_read_bytes_per_s
        return number < MOST_STEPS and max(rates) > 0.5 * FAST

    torch.manual_seed(7)
    with (
        caplog.at_level(logging.INFO, logger="penstock"),
        penstock.offload(
            device_budget=budget_bytes,
            spill_dir=tmp_path,
            hardware=GIVEN,
            planning=penstock.PlanOptions(smallest_bytes=4096, recompute=False),
            io=penstock.IoOptions(paths="posix direct"),
        ) as run,
    ):
        found = training(goes_on)(run.step)
        report, trace, plan, hardware = run.report(), run.trace, run.plan, run.hardware
    assert differences(in_memory(training(lambda number: number < steps)), found) == []
    assert report.replans >= 1
    messages = [record.getMessage() for record in caplog.records if "have drifted" in record.getMessage()]
    assert len(messages) == report.replans
    assert report.planned_rates_bytes_per_s["disk_write"] == hardware.disk_write_bytes_per_s < 0.5 * FAST
    assert hardware.disk_read_bytes_per_s < 0.5 * FAST
    assert f"planned again {report.replans} times" in str(report)
    assert report.planned_rates_from["disk_write"] == report.planned_rates_from["disk_read"] == "steps"
    assert "(steps), disk_read" in str(report) or "(steps), disk_write" in str(report)

    # What is in force is as good as a plan that is made for such a disk from the start.
    assert trace is not None and plan is not None
    fresh = penstock.plan(trace, hardware, compress=True, device_budget=budget_bytes, time_limit_s=2.0)
    assert plan.predicted_step_s <= 1.1 * fresh.predicted_step_s
    assert report.predicted_step_s == pytest.approx(plan.predicted_step_s)


@pytest.mark.slow
def test_kernels_that_become_slower_are_recorded_and_planned_for_again(
    disk: Rate, budget_bytes: int, tmp_path: Path
) -> None:
    run: penstock.Offload
    steps = 0

    def has_seen_it() -> bool:
        if run.trace is None or run.trace.kernel_time_s.max() < 2 * PAUSE_S:
            return False
        report = run.report()
        return report.replans > 0 and report.profiled_steps > 5

    def goes_on(number: int) -> bool:
        nonlocal steps
        steps = number
        return number < MOST_STEPS // 4 and not has_seen_it()

    disk.bytes_per_s = 1e12
    torch.manual_seed(7)
    with penstock.offload(
        device_budget=budget_bytes,
        spill_dir=tmp_path,
        hardware=HARDWARE,
        planning=penstock.PlanOptions(smallest_bytes=4096, recompute=False),
        io=penstock.IoOptions(paths="posix direct"),
    ) as run:
        found = training(goes_on, lambda number: PAUSE_S * (1 + number // 15))(run.step)
        report = run.report()
    assert differences(in_memory(training(lambda number: number < steps)), found) == []
    assert report.replans >= 1 and report.profiled_steps > 5
    assert report.ideal_s >= 2 * PAUSE_S


@pytest.mark.slow
def test_a_machine_that_is_never_the_same_is_not_planned_for_all_the_time(
    disk: Rate, budget_bytes: int, tmp_path: Path
) -> None:
    def goes_on(number: int) -> bool:
        disk.bytes_per_s = FAST / (1 + 3 * (number // 10 % 2))
        return number < 50

    found, report = offloaded(
        training(goes_on), budget_bytes, tmp_path, hardware=GIVEN, paths="posix direct", recompute=False
    )
    assert differences(in_memory(training(lambda number: number < 50)), found) == []
    assert report.replans <= 2, "after 8 steps and 16 more; the next one after 32 more"


def test_planning_ends_with_the_run(disk: Rate, budget_bytes: int, tmp_path: Path) -> None:
    disk.bytes_per_s = FAST / 3

    def goes_on(number: int) -> bool:
        if planners():
            raise KeyError("the program's own")
        return number < MOST_STEPS

    with pytest.raises(KeyError, match="own"):
        offloaded(
            training(goes_on), budget_bytes, tmp_path, hardware=GIVEN, paths="posix direct", recompute=False
        )
    assert not planners()


def test_a_plan_that_was_given_stays(disk: Rate, budget_bytes: int, tmp_path: Path) -> None:
    options = {"hardware": GIVEN, "smallest_bytes": 4096, "paths": "posix direct", "recompute": False}
    with offload(device_budget=budget_bytes, spill_dir=tmp_path, **options) as run:
        training(lambda number: number < 6)(run.step)
        plan = run.plan
    assert plan is not None
    disk.bytes_per_s = FAST / 3
    with offload(device_budget=budget_bytes, spill_dir=tmp_path, plan=plan, **options) as run:
        training(lambda number: number < 25)(run.step)
        assert run.plan is plan and run.report().replans == 0 and not planners()


# -- what lasts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("helps", [True, False])
def test_a_plan_that_lasts_is_looked_for_once_more_with_more_time(
    helps: bool,
    disk: Rate,
    budget_bytes: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It comes into force if it is better than the plan in force, which here is a bad one, or the best."""
    monkeypatch.setattr(replanning, "LASTS_S", 0.0)
    monkeypatch.setattr(replanning, "NEAR_BOUND", 0.0)
    monkeypatch.setattr(Drift, "measured_hardware", lambda drift: None)
    monkeypatch.setattr(Drift, "calibrate", lambda drift, trace: None)
    monkeypatch.setattr(Drift, "add_step", lambda drift, *of_a_step: None)
    searched: list[float] = []
    plan_of = StepPlanner._plan

    def planned(planner: StepPlanner, trace: Trace, hardware: Hardware, time_limit_s: float) -> penstock.Plan:
        if time_limit_s < replanning.SEARCH_S:
            made = penstock.plan(trace, hardware, "evict_all", device_budget=budget_bytes)
        else:
            searched.append(time_limit_s)
            made = plan_of(planner, trace, hardware, 0.5) if helps else run.plan
        assert made is not None
        return made

    monkeypatch.setattr(StepPlanner, "_plan", planned)
    run: penstock.Offload
    steps, last = 0, MOST_STEPS

    def goes_on(number: int) -> bool:
        nonlocal steps, last
        steps = number
        if searched and not planners():
            last = min(last, number + 4)
        return number < last

    torch.manual_seed(7)
    options = {"hardware": GIVEN, "smallest_bytes": 4096, "paths": "posix direct", "recompute": False}
    with (
        caplog.at_level(logging.INFO, logger="penstock"),
        offload(device_budget=budget_bytes, spill_dir=tmp_path, **options) as run,
    ):
        found = training(goes_on)(run.step)
        report, plan = run.report(), run.plan
    assert differences(in_memory(training(lambda number: number < steps)), found) == []
    assert searched == [replanning.SEARCH_S] and report.replans == int(helps)
    assert plan is not None and (plan.policy == "optimal") == helps
    messages = [record.getMessage() for record in caplog.records]
    assert sum(message.startswith(replanning.SEARCHED) for message in messages) == int(helps)


# -- what has drifted ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def planned(
    budget_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> tuple[penstock.Trace, penstock.Plan]:
    """One whose simulated step is that of the run: nothing compressed."""
    spill_dir = tmp_path_factory.mktemp("spill")
    with penstock.offload(
        device_budget=budget_bytes,
        spill_dir=spill_dir,
        hardware=GIVEN,
        planning=penstock.PlanOptions(smallest_bytes=4096, compress=False, recompute=False),
    ) as run:
        training(lambda number: number < 6)(run.step)
        assert run.trace is not None and run.plan is not None
        return run.trace, run.plan


def moves(trace: penstock.Trace, plan: penstock.Plan, **factors: float) -> list[Moved]:
    """What the simulator moves, with every link ``factors`` times as fast."""
    return [
        Moved(
            span.stream,
            span.start_s / factors.get(span.stream, 1.0),
            span.end_s / factors.get(span.stream, 1.0),
            span.index,
            span.size_bytes,
        )
        for span in penstock.simulate(trace, plan, GIVEN).spans
        if span.stream.startswith("disk")
    ]


def test_rates_that_are_as_predicted_have_not_drifted(
    planned: tuple[penstock.Trace, penstock.Plan],
) -> None:
    drift = Drift(*planned, GIVEN)
    for number in range(50):
        noise = (0.92, 1.0, 1.08, 0.3)[number % 4]  # one step in four is disturbed
        drift.add_step(moves(*planned, disk_write=noise, disk_read=noise), 1e-3, 1.0 + 0.08 * (number % 2))
        assert drift.measured_hardware() is None and not drift.kernels_have_drifted


def test_a_rate_that_has_drifted_is_measured(planned: tuple[penstock.Trace, penstock.Plan]) -> None:
    drift = Drift(*planned, GIVEN)
    measured = []
    for _ in range(SKIPPED_STEPS + WINDOW):
        measured.append(drift.measured_hardware())
        drift.add_step(moves(*planned, disk_write=1 / 3), 1e-3, 1.0)
    assert measured == [None] * (SKIPPED_STEPS + WINDOW)
    found = drift.measured_hardware()
    assert found is not None
    assert found.disk_write_bytes_per_s == pytest.approx(FAST / 3)
    assert found.disk_read_bytes_per_s == pytest.approx(FAST)
    assert Drift(*planned, found).measured_hardware() is None


def test_codecs_are_measured_too(planned: tuple[penstock.Trace, penstock.Plan]) -> None:
    drift = Drift(*planned, replace(GIVEN, compress_bytes_per_s=1e9, expand_bytes_per_s=2e9))
    for _ in range(SKIPPED_STEPS + WINDOW):
        coded = [Moved("compress", 0.0, 2e-3, 1, 1_000_000), Moved("expand", 3e-3, 3.5e-3, 1, 1_000_000)]
        drift.add_step(coded, 1e-2, 1.0)
    found = drift.measured_hardware()
    assert found is not None
    assert found.compress_bytes_per_s == pytest.approx(5e8)
    assert found.expand_bytes_per_s == pytest.approx(2e9)


def test_what_a_copy_costs_the_thread_of_the_kernels_is_measured_too(
    planned: tuple[penstock.Trace, penstock.Plan],
) -> None:
    moved = moves(*planned, disk_write=1 / 3)
    for given_s, expected_s in ((1e-4, 3e-4), (0.0, 0.0)):  # 0: on a GPU, or where it is not known
        drift = Drift(*planned, replace(GIVEN, copy_overhead_s=given_s))
        for _ in range(SKIPPED_STEPS + WINDOW):
            drift.add_step(moved, 1e-3, 1.0, 3e-4 * len(moved))
        found = drift.measured_hardware()
        assert found is not None and found.copy_overhead_s == pytest.approx(expected_s)


def test_what_is_hardly_used_decides_nothing(planned: tuple[penstock.Trace, penstock.Plan]) -> None:
    drift = Drift(*planned, GIVEN)
    for _ in range(SKIPPED_STEPS + WINDOW):
        drift.add_step(moves(*planned, disk_write=1 / 3), 1e3, 1.0)
    assert drift.measured_hardware() is None


def test_kernels_that_take_longer_than_at_first_have_drifted(
    planned: tuple[penstock.Trace, penstock.Plan],
) -> None:
    drift = Drift(*planned, GIVEN)
    for _ in range(SKIPPED_STEPS + WINDOW):
        drift.add_step((), 1.0, 1.0)
    for _ in range(WINDOW):
        assert not drift.kernels_have_drifted
        drift.add_step((), 1.2, 1.2)
    assert drift.kernels_have_drifted


def followed(
    planned: tuple[penstock.Trace, penstock.Plan], hardware: penstock.Hardware, late_s: float
) -> Drift:
    """Steps that take so much longer than predicted, and the kernels in them."""
    drift = Drift(*planned, hardware)
    timeline = penstock.simulate(*planned, hardware)
    for _ in range(SKIPPED_STEPS + WINDOW):
        assert drift.calibrate(planned[0]) is None
        kernels_s = timeline.busy_s("compute") + late_s
        drift.add_step(moves(*planned), timeline.step_s + late_s, kernels_s)
    return drift


def test_what_steps_take_longer_is_put_down_to_copies_and_then_to_kernels(
    planned: tuple[penstock.Trace, penstock.Plan],
) -> None:
    trace, plan = planned
    moved_bytes = sum(move.size_bytes for move in moves(*planned))
    predicted_s = penstock.simulate(trace, plan, GIVEN).step_s
    hardware = replace(GIVEN, byte_overhead_s=predicted_s / 2 / moved_bytes)
    predicted = penstock.simulate(trace, plan, hardware)
    predicted_s = predicted.step_s
    for share, slower, cost in (
        (0.5, False, True),
        (0.02, False, False),
        (10.0, True, True),
        (-0.2, True, False),
    ):
        drift = followed(planned, hardware, share * predicted_s)
        found = drift.calibrate(trace)
        assert drift.calibrate(trace) is None, "once"
        assert (drift.kernels_have_drifted, drift.copies_cost_more) == (slower, cost), share
        if abs(share) < 0.03:
            assert found is None
            continue
        assert found is not None
        now = penstock.simulate(found[0], plan, found[1])
        assert now.busy_s("compute") == pytest.approx(
            predicted.busy_s("compute") + share * predicted_s, rel=0.1
        )  # copies that are abandoned cost something, too
        if not slower:
            np.testing.assert_allclose(found[0].kernel_time_s, trace.kernel_time_s, rtol=1e-9)
        assert found[1].byte_overhead_s <= MOST_OVERHEAD * hardware.byte_overhead_s * 1.001
    found = followed(planned, GIVEN, predicted_s).calibrate(trace)
    assert found is not None and found[1] == GIVEN, "a GPU loses nothing to copies"


def test_kernels_of_a_recorded_step_are_timed_without_what_they_lose_to_copies(
    planned: tuple[penstock.Trace, penstock.Plan],
) -> None:
    trace, kernel_s = planned[0], float(planned[0].kernel_time_s.sum())
    kernels = [(0.0, kernel_s, 0)]
    moved = [Moved("disk_read", kernel_s / 2, 1.5 * kernel_s, 0, 1000)]  # half beside kernels
    hardware = replace(GIVEN, byte_overhead_s=0.2 * kernel_s / 1000)
    found = without_copies(trace, kernels, moved, hardware)
    assert found.kernel_time_s.sum() == pytest.approx(0.9 * kernel_s)
    assert without_copies(trace, kernels, moved, GIVEN) is trace


def test_the_rates_of_a_step_are_those_of_its_copies(planned: tuple[penstock.Trace, penstock.Plan]) -> None:
    """A disk that is three times slower to write, and as fast to read, than it was taken to be."""
    moved = many(moves(*planned, disk_write=1 / 3))
    found = with_rates_of(GIVEN, moved, step_s=1.0)
    assert found.disk_write_bytes_per_s == pytest.approx(FAST / 3, rel=0.01)
    assert found.disk_read_bytes_per_s == pytest.approx(FAST, rel=0.01)
    again = with_rates_of(found, moved, step_s=1.0)
    assert again.disk_write_bytes_per_s == pytest.approx(FAST / 3, rel=0.1)  # but for the latency


def test_what_both_directions_cost_each_other_is_not_counted_twice() -> None:
    """Half of the time the disk reads, too, at half of its rate each way."""
    hardware = replace(GIVEN, duplex=0.5)
    size_bytes = int(FAST)  # takes a second alone
    written = [
        Moved("disk_write", 0.0, 1.0, 0, size_bytes),
        Moved("disk_write", 1.0, 2.0, 1, size_bytes // 2),
    ]
    read = [Moved("disk_read", 1.0, 2.0, 2, size_bytes // 2)]
    found = with_rates_of(hardware, written + read, step_s=2.0)
    assert found.disk_write_bytes_per_s == pytest.approx(FAST, rel=1e-3)
    assert found.disk_read_bytes_per_s == pytest.approx(FAST, rel=1e-3)


def test_a_few_bytes_say_nothing_of_a_disk(planned: tuple[penstock.Trace, penstock.Plan]) -> None:
    moved = moves(*planned, disk_write=1 / 3)
    assert with_rates_of(GIVEN, moved[:2], step_s=1e-3) == GIVEN  # too few bytes
    assert with_rates_of(GIVEN, many(moved), step_s=1e9) == GIVEN  # too little of the step


def many(moved: list[Moved]) -> list[Moved]:
    """The same copies again and again, until they are enough to tell rates."""
    step_s = max(move.finished_s for move in moved)
    links = ("disk_read", "disk_write")
    fewest = min(sum(move.size_bytes for move in moved if move.link == link) for link in links)
    times = range(1 + LEAST_BYTES // fewest)
    return [
        move._replace(started_s=move.started_s + time * step_s, finished_s=move.finished_s + time * step_s)
        for time in times
        for move in moved
    ]
