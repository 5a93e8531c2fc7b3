"""What a run says of itself counts everything that moved, and reads well wherever it is shown."""

from __future__ import annotations

import logging
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock import samples
from penstock.runtime import arena
from tests.support.families import FAMILIES, iterate, small_gpt
from tests.support.runs import PAGED, offload


def test_what_the_arena_moves_by_itself_counts(tmp_path: Path, hardware: penstock.Hardware) -> None:
    """In a first step nobody knows what a kernel will take: the allocator makes room too."""
    model, optimizer = small_gpt()
    with penstock.offload(
        model, optimizer, device_budget="300KiB", spill_dir=tmp_path, hardware=hardware, planning=PAGED
    ) as run:
        before = arena.stats()
        with run.step():
            iterate(model, optimizer, 0)
        after, report = arena.stats(), run.report()
    planned_bytes = sum(report.moved_bytes_by_kind.values())
    assert report.evicted_bytes - planned_bytes == after.swapped_out_bytes - before.swapped_out_bytes > 0
    assert report.disk_written_bytes == report.evicted_bytes


def test_every_step_is_timed(tmp_path: Path, hardware: penstock.Hardware) -> None:
    """Also the first one, and those of a program that never runs the same step twice."""
    model, optimizer = small_gpt()
    with penstock.offload(
        model, optimizer, device_budget="1GiB", spill_dir=tmp_path, hardware=hardware
    ) as run:
        for step in range(3):
            with run.step():
                for part in range(step + 1):
                    iterate(model, optimizer, part)
            assert run.report().step_s > 0


def test_an_optimizer_outside_of_a_step_is_named_once(
    tmp_path: Path, hardware: penstock.Hardware, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = small_gpt()
    with (
        caplog.at_level(logging.WARNING, logger="penstock"),
        penstock.offload(
            model, optimizer, device_budget="1GiB", spill_dir=tmp_path, hardware=hardware
        ) as run,
    ):
        with run.step():
            iterate(model, optimizer, 0)
        assert not caplog.records
        for step in range(3):
            iterate(model, optimizer, step)
    iterate(model, optimizer, 0)  # after the run it is nobody's business
    (record,) = caplog.records
    assert "SGD.step() ran outside `with run.step():`" in record.getMessage()


def test_what_no_plan_predicted_is_not_shown_as_nothing(tmp_path: Path, hardware: penstock.Hardware) -> None:
    model, optimizer = small_gpt()
    keep = penstock.PlanOptions(policy="keep", smallest_bytes=PAGED.smallest_bytes)
    with penstock.offload(
        model, optimizer, device_budget="300KiB", spill_dir=tmp_path, hardware=hardware, planning=keep
    ) as run:
        with run.step():
            iterate(model, optimizer, 0)
        table = str(run.report()).splitlines()[2:6]
    assert len(table) == 4 and all("no plan" in line for line in table)


def test_what_runs_between_steps_can_run_in_the_minimum(tmp_path: Path, hardware: penstock.Hardware) -> None:
    """Torch makes tensors inside of `allclose`, one after another."""

    def train(budget_bytes: int) -> penstock.Report:
        with penstock.offload(
            device_budget=budget_bytes, spill_dir=tmp_path, hardware=hardware, planning=PAGED
        ) as run:
            model, optimizer = small_gpt()
            first, second = torch.ones(1 << 18), torch.ones(1 << 18)
            for number in range(3):
                with run.step():
                    iterate(model, optimizer, number)
                assert torch.allclose(first, second)
            return run.report()

    least_bytes = train(1 << 30).minimum_bytes
    assert least_bytes > 2 << 20  # both and more
    assert train(least_bytes).peak_bytes <= least_bytes
    with pytest.raises(penstock.BudgetTooSmall):
        train(least_bytes - 4096)


def test_too_small_a_budget_is_one_traceback(tmp_path: Path, hardware: penstock.Hardware) -> None:
    model, optimizer = small_gpt()
    with (
        penstock.offload(
            model, optimizer, device_budget="64KiB", spill_dir=tmp_path, hardware=hardware
        ) as run,
        pytest.raises(penstock.BudgetTooSmall) as error,
        run.step(),
    ):
        iterate(model, optimizer, 0)
    assert "".join(traceback.format_exception(error.value)).count("Traceback") == 1


def test_a_directory_that_is_not_there_is_one_traceback(tmp_path: Path) -> None:
    with pytest.raises(penstock.SpillError, match="nowhere") as error:
        penstock.offload(device_budget="1GiB", spill_dir=tmp_path / "nowhere")
    assert "".join(traceback.format_exception(error.value)).count("Traceback") == 1


def test_values_are_one_line(tmp_path: Path, hardware: penstock.Hardware) -> None:
    model, optimizer = small_gpt()
    with penstock.offload(
        model,
        optimizer,
        device_budget="400KiB",
        spill_dir=tmp_path,
        hardware=hardware,
        planning=PAGED,
        io=penstock.IoOptions(endurance="600TBW"),
    ) as run:
        for step in range(5):
            with run.step():
                iterate(model, optimizer, step)
        report = run.report()
        assert run.trace is not None and run.plan is not None and run.timeline is not None
        handle = penstock.save({"x": torch.ones(3)}, tmp_path / "state", wait=False)
        handle.wait()
        samples.pack([("one", b"a sample")], tmp_path / "store")
        with samples.mount(tmp_path / "store") as store:
            values = (run, run.trace, run.plan, run.timeline, run.hardware, report, handle)
            for value in (*values, store, samples.Loader(store, 1)):
                assert 20 < len(repr(value)) < 250 and "\n" not in repr(value), repr(value)
    assert f"{run.trace.kernels} kernels" in repr(run.trace)
    assert f"{len(run.plan.evictions)} evictions" in repr(run.plan)
    assert "400.0 KiB" in repr(report) and "saved" in repr(handle)
    assert "an endurance of 600.00 TB lasts" in str(report)


def test_a_notebook_shows_a_table(tmp_path: Path, hardware: penstock.Hardware) -> None:
    with penstock.offload(device_budget="1GiB", spill_dir=tmp_path, hardware=hardware) as run:
        with run.step():
            FAMILIES["gpt"].loss(FAMILIES["gpt"].make(), 0).backward()
        shown = run.report()._repr_html_()
    assert shown.count("<tr>") == 5 and "<th>measured</th>" in shown
    assert "the step&#x27;s" in shown, "what a reason says is text"


def test_a_report_is_of_one_kind_of_step(tmp_path: Path, hardware: penstock.Hardware) -> None:
    torch.manual_seed(0)
    model = FAMILIES["gpt"].make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    closing = []
    options: dict[str, Any] = {"smallest_bytes": 4096, "policy": "g10", "hardware": hardware}
    with offload(model, optimizer, device_budget="450KiB", spill_dir=tmp_path, **options) as run:
        run.at_close(lambda: closing.append(run.closed))
        for step in range(5):
            with run.step():
                assert run.in_step
                FAMILIES["gpt"].loss(model, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            with run.step("evaluation"), torch.no_grad():
                FAMILIES["gpt"].loss(model, step)
        assert not run.in_step and not run.closed
        training, evaluation = run.report(), run.report("evaluation")
        with pytest.raises(penstock.PenstockError, match="'test'"):
            run.report("test")
    assert run.closed and closing == [False]
    assert training.operators > evaluation.operators
    assert training.operators > evaluation.operators
    assert training.steps == evaluation.steps == 10
    assert training.evicted_bytes > 0 and training.predicted_peak_bytes > evaluation.predicted_peak_bytes
