"""What is told as the least budget is enough: the allocator's segments are counted."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import penstock
from penstock.errors import BudgetTooSmall
from penstock.runtime.devices.reserved import LARGE_SEGMENT_BYTES
from tests.device.test_refusals_say_what_helps import training
from tests.support.runs import ACCELERATED, Bits, Program, Step, bits, differences, offloaded, run_in_memory

MIB = 1 << 20
STEPS = 3


class Kernels:
    """Tensors of so many MiB, and in each step kernels by what they use, of which each makes one tensor.

    done   kernels that have run
    """

    def __init__(self, sizes: list[float], used: list[tuple[int, ...]]) -> None:
        self.sizes, self.used = sizes, used
        self.done = 0

    def __call__(self, step: Step) -> Bits:
        self.done = 0
        tensors = []
        for number, size in enumerate(self.sizes):
            tensors.append(torch.full((int(size * MIB) // 4,), number + 1.0, device="emu"))
            self.done += 1
        for _ in range(STEPS):
            with step():
                for used in self.used:
                    made = torch.cat([tensors[one] for one in used])
                    self.done += 1
                    tensors[used[0]].add_(made[: len(tensors[used[0]])])
                    self.done += 1
                    del made
        return bits(tensors)


def mlp(width: int, foreach: bool) -> Program:
    def program(step: Step) -> Bits:
        with torch.device("emu"):
            model = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(width, width), nn.ReLU())])
        optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
        for _ in range(STEPS):
            with step():
                model(torch.randn(64, width, device="emu")).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return bits(model.parameters())

    return program


PROGRAMS: dict[str, Program] = {
    "large": Kernels([16, 16, 16], [(0,), (1,), (2,)]),
    "less than any segment": Kernels([1.5, 1.5, 1.5], [(0,), (1,), (2,)]),
    "rounded up to segments": Kernels([10.5, 10.5, 10.5], [(0, 1), (1, 2)]),
    "of all sizes": Kernels([10.5, 3.3, 25.7, 0.25], [(0,), (1, 3), (2,), (3,)]),
    "small": Kernels([0.5] * 9, [(0, 1), (4, 5), (8,)]),
    "small beside large": Kernels([16, *[0.25] * 80, 16], [(0,), tuple(range(1, 81)), (81,)]),
    "mlp": mlp(768, False),
    "mlp, foreach": mlp(768, True),
    "mlp of large weights": mlp(1700, False),
    "attention": training("gpt"),  # whose kernels make many tensors
    "convolutions": training("conv"),
}


class Ran(NamedTuple):
    bits: Bits
    report: penstock.Report


def inside(emu: Any, program: Program, budget_bytes: int, spill_dir: Path | str) -> Ran:
    """With no more reserved at any time than the budget."""
    emu.configure(order="lazy")
    gc.collect()
    torch.accelerator.empty_cache()
    emu.reset_high_water()
    before_bytes, most_bytes = torch.accelerator.memory_reserved(), 0

    def measured(step: Step) -> Bits:
        nonlocal most_bytes
        try:
            return program(step)
        finally:
            most_bytes = emu.high_water_bytes() - before_bytes

    options: dict[str, Any] = {"device": "emu", "hardware": ACCELERATED, "smallest_bytes": "64KiB"}
    try:
        return Ran(*offloaded(measured, budget_bytes, spill_dir, host_budget="320MiB", **options))
    finally:
        assert most_bytes <= budget_bytes


def in_memory(emu: Any, program: Program) -> Bits:
    emu.configure(order="eager")
    return run_in_memory(program)


def refused(emu: Any, program: Program, budget_bytes: int, spill_dir: Path | str) -> Iterator[int]:
    """Budgets that are asked for, one after the other, until one is enough."""
    while True:
        try:
            inside(emu, program, budget_bytes, spill_dir)
            return
        except BudgetTooSmall as error:
            assert error.minimum_bytes > budget_bytes, budget_bytes
            budget_bytes = error.minimum_bytes
            yield budget_bytes


def check_least(emu: Any, program: Program, spill_dir: Path | str) -> int:
    """The program runs in the least that a report of it tells. Returns that."""
    expected = in_memory(emu, program)
    roomy = inside(emu, program, 1 << 30, spill_dir)
    least_bytes = roomy.report.minimum_bytes
    tight = inside(emu, program, least_bytes, spill_dir)
    assert differences(expected, roomy.bits) == differences(expected, tight.bits) == []
    return least_bytes


def check_refusals(emu: Any, kernels: Kernels, least_bytes: int, spill_dir: Path | str) -> None:
    """Nobody knows what later kernels need, nor what a kernel makes before it has what it uses; and of that
    the allocator may tell the segment alone."""
    done, budget_bytes = [], 0
    for asked_bytes in refused(emu, kernels, MIB, spill_dir):
        done.append(kernels.done)
        budget_bytes = asked_bytes
    assert done == sorted(done) and set(Counter(done).values()) <= {1, 2, 3}
    assert budget_bytes <= least_bytes + LARGE_SEGMENT_BYTES


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_told_is_enough(emu: Any, name: str, tmp_path: Path) -> None:
    program = PROGRAMS[name]
    least_bytes = check_least(emu, program, tmp_path)
    if isinstance(program, Kernels):
        check_refusals(emu, program, least_bytes, tmp_path)


SIZES = st.integers(1, 96).map(lambda eighths: eighths / 8) | st.sampled_from([0.25, 1.0, 2.0, 20.0])


@settings(
    max_examples=5,
    phases=[Phase.generate],
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(sizes=st.lists(SIZES, min_size=3, max_size=8), data=st.data())
def test_what_is_told_of_any_kernels_is_enough(emu: Any, sizes: list[float], data: st.DataObject) -> None:
    used = st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=4, unique=True).map(tuple)
    kernels = Kernels(sizes, data.draw(st.lists(used, min_size=2, max_size=6)))
    with TemporaryDirectory() as spill_dir:
        check_refusals(emu, kernels, check_least(emu, kernels, spill_dir), spill_dir)
