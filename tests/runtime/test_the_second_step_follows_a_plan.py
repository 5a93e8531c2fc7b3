"""The first step makes the optimizer's state. The second one, in which it is there, is foreseen: it follows a
plan of its own, or least recent use from where it turns out another one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import penstock
from tests.support.runs import (
    HARDWARE,
    OPTIMIZERS,
    Bits,
    Program,
    Step,
    bits,
    differences,
    in_memory,
    offload,
    state_bits,
)

BUDGET = "3MiB"

MORE_OPTIMIZERS = {
    "sgd, weight decay": lambda weights: torch.optim.SGD(weights, 1e-2, momentum=0.9, weight_decay=0.1),
    "sgd, nesterov": lambda weights: torch.optim.SGD(weights, 1e-2, momentum=0.9, nesterov=True),
    "sgd, fused": lambda weights: torch.optim.SGD(weights, 1e-2, momentum=0.9, fused=True),
    "sgd, foreach": lambda weights: torch.optim.SGD(weights, 1e-2, momentum=0.9, foreach=True),
    "sgd, all foreach": lambda weights: torch.optim.SGD(
        weights, 1e-2, momentum=0.9, weight_decay=0.1, nesterov=True, foreach=True
    ),
    "asgd": lambda weights: torch.optim.ASGD(weights, 1e-2),
    "asgd, foreach": lambda weights: torch.optim.ASGD(weights, 1e-2, foreach=True),
    "adam, amsgrad": lambda weights: torch.optim.Adam(weights, 1e-2, amsgrad=True),
    "adafactor, foreach": lambda weights: torch.optim.Adafactor(weights, 1e-2, foreach=True),
    "rmsprop": lambda weights: torch.optim.RMSprop(weights, 1e-2, momentum=0.9, centered=True),
    "nadam": lambda weights: torch.optim.NAdam(weights, 1e-2),
}
# It copies the weights in the first step, and averages them from the second one on.
NOT_FORESEEN = {"asgd, averaging": lambda weights: torch.optim.ASGD(weights, 1e-2, t0=-1)}
ALL_OPTIMIZERS = OPTIMIZERS | MORE_OPTIMIZERS | NOT_FORESEEN


def trained(
    steps: int, optimizer: str = "adamw", parts: int = 1, late: int = 0, evaluates: bool = False
) -> Program:
    """Eight layers of 256 KiB each: with AdamW 2 MiB of weights, 6 MiB more with gradients and state.

    parts       of each batch, whose gradients add up
    late        the first so many layers get a gradient from the second step on
    evaluates   in a step of its own, after the first one
    """

    def program(step: Step) -> Bits:
        torch.manual_seed(3)
        model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.ReLU())])
        update = ALL_OPTIMIZERS[optimizer](list(model.parameters()))
        found: Bits = []
        for number in range(steps):
            x = torch.randn(64, 256, generator=torch.Generator().manual_seed(number))
            with step():
                for part in x.chunk(parts):
                    if number == 0:
                        with torch.no_grad():
                            part = model[: 2 * late](part)
                        loss = model[2 * late :](part).square().mean()
                    else:
                        loss = model(part).square().mean()
                    loss.backward()
                    found += bits([loss])
                update.step()
                update.zero_grad()
            if evaluates and number == 0:
                with step(), torch.no_grad():
                    found += bits([model(x)])
        return found + bits(model.parameters()) + state_bits(update)

    return program


def after_each(program: Program, spill_dir: Path) -> tuple[Bits, list[penstock.Trace], penstock.Offload]:
    """What a run of the program gives, its trace after each step, and the run."""
    traces: list[penstock.Trace] = []
    torch.manual_seed(7)
    with offload(device_budget=BUDGET, spill_dir=spill_dir, smallest_bytes=4096, hardware=HARDWARE) as run:

        @contextlib.contextmanager
        def step(kind: str | None = None) -> Iterator[None]:
            with run.step(kind):
                yield
            assert run.trace is not None
            traces.append(run.trace)

        return program(step), traces, run


@pytest.mark.parametrize(
    ("optimizer", "parts"), [*((name, 1) for name in OPTIMIZERS | MORE_OPTIMIZERS), ("adamw", 2), ("sgd", 2)]
)
def test_the_second_step_is_as_foreseen(optimizer: str, parts: int, tmp_path: Path) -> None:
    program = trained(2, optimizer, parts)
    found, (foreseen, recorded), run = after_each(program, tmp_path)
    assert differences(in_memory(program), found) == []
    assert run.timeline is not None, "the second step was recorded, and has followed a plan to its end"
    report = run.report()
    assert (report.profiled_steps, report.trace_mismatches, report.policy) == (2, 0, "optimal")
    assert report.predicted_evicted_bytes + report.recomputed_bytes > 0

    assert foreseen.kernel_name == recorded.kernel_name
    for column in ("kernel_phase", "kernel_workspace_bytes", "tensor_bytes", "tensor_kind", "tensor_movable"):
        assert np.array_equal(getattr(foreseen, column), getattr(recorded, column)), column
    for column in ("tensor_persistent", "tensor_birth", "tensor_recompute"):
        assert np.array_equal(getattr(foreseen, column), getattr(recorded, column)), column
    for column in ("inputs", "outputs"):
        before, after = getattr(foreseen, column), getattr(recorded, column)
        assert np.array_equal(before.starts, after.starts) and np.array_equal(before.values, after.values)


@pytest.mark.parametrize(
    ("optimizer", "late"), [*((name, 3) for name in OPTIMIZERS), *((name, 0) for name in NOT_FORESEEN)]
)
def test_a_second_step_that_is_another_one_keeps_its_bits(optimizer: str, late: int, tmp_path: Path) -> None:
    """Some of the state is made in it, or the optimizer goes on by other operators."""
    program = trained(8, optimizer, late=late)
    found, traces, run = after_each(program, tmp_path)
    assert differences(in_memory(program), found) == []
    report = run.report()
    assert report.trace_mismatches >= 1 and report.policy == "optimal"
    assert traces[0].kernel_name != traces[-1].kernel_name
    assert run.timeline is not None, "the steps after it followed a plan"


def test_state_that_was_zero_in_the_first_step_is_not_planned_to_leave_compressed(tmp_path: Path) -> None:
    _, (foreseen,), run = after_each(trained(1), tmp_path)
    assert run.plan is not None and foreseen.tensor_density.min() < 0.6, "half of what ReLU makes is zero"
    state = {int(tensor) for tensor in np.flatnonzero(foreseen.tensor_kind == 2)}
    leaving = [evict for evict in run.plan.evictions if evict.tensor in state]
    assert leaving and {evict.codec for evict in leaving} == {"raw"}


def test_the_foreseen_step_counts_as_one_of_those_that_are_recorded(tmp_path: Path) -> None:
    _, _, run = after_each(trained(8), tmp_path)
    report = run.report()
    assert (report.profiled_steps, report.trace_mismatches) == (4, 0)
    assert report.policy == "optimal" and report.predicted_evicted_bytes > 0


def test_an_evaluation_in_between_does_not_end_what_is_foreseen(tmp_path: Path) -> None:
    program = trained(2, evaluates=True)
    found, (foreseen, _, recorded), run = after_each(program, tmp_path)
    assert differences(in_memory(program), found) == []
    assert run.report().trace_mismatches == 1, "the evaluation"
    assert run.timeline is not None and recorded.kernel_name == foreseen.kernel_name
