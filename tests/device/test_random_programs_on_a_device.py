"""Random programs on an accelerator, scheduled at random, its work in any order: the bits of the plain run.

``PENSTOCK_PROGRAMS=1000`` runs so many.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.errors import BudgetTooSmall
from tests.device.test_training_on_a_device_keeps_every_bit import TIERS, scheduled_at_random
from tests.support.accelerator import orders, peak_reserved_bytes, reset_peak, wanted
from tests.support.programs import Program, Values, begin, make_program, run_step
from tests.support.runs import ACCELERATED, Bits, bits, differences, in_memory, offload

DEVICE = wanted("emu")
MIB = 1 << 20
SCALE = 16  # matrices of up to 256 KiB
PROGRAMS = int(os.environ.get("PENSTOCK_PROGRAMS", "200"))
PARTS = 10
Configure = Callable[..., None]
ORDERS = orders(DEVICE, "lazy", "stepped", "random", "newest")


def run(program: Program, values: Values, step: Any) -> Bits:
    found: Bits = []
    for kind in program.order:
        with step(str(kind)):
            results = run_step(program, values, kind)
        found += bits(results)
        del results
    return found + bits(values[number] for number in sorted(values))


def check(configure: Configure, seed: int, spill_dir: Path) -> int:
    """Bytes that moved in the last step."""
    configure(order="eager")
    program = make_program(seed, SCALE)
    expected = in_memory(lambda step: run(program, begin(program, DEVICE), step))
    rng = random.Random(seed)
    budget_bytes = rng.choice([2, 4, 4, 6, 8, 32]) * MIB
    order, tier = rng.choice(ORDERS), rng.choice(list(TIERS))
    is_late = rng.random() < 0.5  # the run begins when the values are there
    while True:
        configure(order=order, seed=seed, host_delay_us=rng.choice([0, 0, 30]))
        there: Values = {}
        torch.accelerator.empty_cache()
        if is_late:
            there = begin(program, DEVICE)
        before_bytes = torch.accelerator.memory_reserved()
        reset_peak(DEVICE)
        text = f"program {seed}, {order}, {tier}, {budget_bytes >> 20} MiB, {is_late=}"
        options: dict[str, Any] = {"hardware": ACCELERATED, "host_budget": TIERS[tier], "smallest_bytes": 1}
        try:
            with (
                scheduled_at_random(seed),
                offload(device=DEVICE, device_budget=budget_bytes, spill_dir=spill_dir, **options) as opened,
            ):
                found = run(program, there or begin(program, DEVICE), opened.step)
                report = opened.report()
                peak_bytes = peak_reserved_bytes(DEVICE)
        except BudgetTooSmall as error:
            assert budget_bytes < error.minimum_bytes <= 32 * MIB, text
            budget_bytes += 2 * MIB
            continue
        except Exception as error:
            raise AssertionError(text) from error
        assert differences(expected, found) == [], text
        assert report.peak_bytes <= budget_bytes, text
        assert peak_bytes <= budget_bytes + before_bytes, text
        return report.evicted_bytes


def test_a_few_programs(configure: Configure, tmp_path: Path) -> None:
    assert sum(check(configure, seed, tmp_path) for seed in range(8)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_many_programs(configure: Configure, part: int, tmp_path: Path) -> None:
    assert sum(check(configure, seed, tmp_path) for seed in range(100 + part, 100 + PROGRAMS, PARTS)) > 0
