"""The step that makes the optimizer's state is planned for: the next one follows that plan up to the
optimizer, and is planned for itself."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import penstock
from tests.support.runs import Bits, Program, Step, bits, differences, in_memory, offload, offloaded

BUDGET = "3MiB"


def trained(steps: int) -> Program:
    """Eight layers of 256 KiB each, with Adam: 2 MiB of weights, 6 MiB more with gradients and state."""

    def program(step: Step) -> Bits:
        torch.manual_seed(3)
        model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.ReLU())])
        optimizer = torch.optim.Adam(model.parameters())
        for number in range(steps):
            x = torch.randn(64, 256, generator=torch.Generator().manual_seed(number))
            with step():
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return bits(model.parameters())

    return program


def plans(steps: int, spill_dir: Path) -> list[penstock.Plan | None]:
    """In force after each of the steps."""
    found = []
    torch.manual_seed(7)
    with offload(device_budget=BUDGET, spill_dir=spill_dir, smallest_bytes=4096) as run:

        class Noted:
            def __enter__(self) -> None:
                self.step = run.step()
                self.step.__enter__()

            def __exit__(self, *raised: object) -> None:
                self.step.__exit__(*raised)
                found.append(run.plan)

        trained(steps)(Noted)
    return found


def test_each_of_the_first_steps_has_a_plan_of_its_own(tmp_path: Path) -> None:
    first, second = plans(2, tmp_path)
    assert first is not None and second is not None and first.trace is not None and second.trace is not None
    assert first.evictions and second.evictions
    assert {evict.codec for evict in first.evictions} == {"raw"}, "state is zeros as it is made"
    assert first.trace.kernel_name != second.trace.kernel_name, "state is made in the first alone"


def test_the_second_step_ran_other_operators_and_is_the_one_that_is_seen_again(tmp_path: Path) -> None:
    steps = 8
    found, report = offloaded(trained(steps), BUDGET, tmp_path)
    assert differences(in_memory(trained(steps)), found) == []
    assert (report.profiled_steps, report.trace_mismatches) == (5, 1)
    assert report.policy == "optimal" and report.predicted_evicted_bytes > 0
