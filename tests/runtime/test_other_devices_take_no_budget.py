"""Tensors that lie on no device take nothing of a CPU's budget."""

from __future__ import annotations

from pathlib import Path

import torch

import penstock
from penstock.runtime.report import NO_POLICY
from tests.support.runs import Bits, Step, bits, differences, in_memory, offload

MIB = 1 << 20


def program(step: Step) -> Bits:
    weights = [torch.full((MIB // 4,), float(number)) for number in range(6)]
    for _ in range(3):
        with step():
            large = torch.zeros(4096, 4096, device="meta", requires_grad=True)  # as a weight that is divided
            small = [torch.zeros(1000, device="meta") + 1 for _ in range(2000)]
            (large @ large + small[0][0]).relu().sum().backward()
            for weight in weights:
                weight.add_(weight.mul(2))
    return bits(weights)


def test_no_budget_and_no_plan_counts_what_is_on_no_device(tmp_path: Path) -> None:
    torch.manual_seed(7)
    with offload(device_budget="4MiB", spill_dir=tmp_path, smallest_bytes=4096) as run:
        found = program(run.step)
        report, trace = run.report(), run.trace
    assert differences(in_memory(program), found) == []
    assert trace is not None and int(trace.tensor_bytes.max()) == MIB
    assert report.policy != NO_POLICY and report.evicted_bytes > 0
    assert report.minimum_bytes <= report.peak_bytes <= 4 * MIB


def test_traces_of_real_runs_have_no_bytes_of_them() -> None:
    on_cpu, nowhere = torch.ones(1000), torch.ones(MIB, device="meta", requires_grad=True)

    def step() -> None:
        nowhere.grad = None
        (nowhere * 2).sum().backward()
        on_cpu.mul_(2)

    trace = penstock.trace(step, fake=False)
    assert trace.tensor_bytes.sum() == on_cpu.nbytes
