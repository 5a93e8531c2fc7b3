"""Random programs on the checked accelerator: the bits of the plain run, never more than the budget, no race.

Sixty by default; ``PENSTOCK_PROGRAMS=10000`` runs so many.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest
import torch

from penstock.capture.recorder import make_trace
from penstock.core.trace import Trace
from penstock.runtime.recording import Recording
from penstock.runtime.schedule import (
    Action,
    DropAction,
    EvictAction,
    KeepRecipeAction,
    PrefetchAction,
    RecomputeAction,
    ReleaseAction,
    Schedule,
    unplanned,
)
from penstock.storage.spill import SpillSpace
from tests.support.checked import checked_run
from tests.support.programs import begin, make_program, run_step

PROGRAMS = int(os.environ.get("PENSTOCK_PROGRAMS", "60"))
PARTS = 10


def bits(tensors: list[torch.Tensor]) -> list[bytes]:
    return [tensor.contiguous().clone().numpy().tobytes() for tensor in tensors]


def random_schedule(trace: Trace, rng: random.Random, packs: bool = True) -> Schedule:
    """Any actions at any kernel: a plan is advice, and this one is bad. packs: some leave compressed."""
    schedule = unplanned(trace)
    before: list[list[Action]] = [[] for _ in range(schedule.kernels)]
    tensors = len(schedule.uses)
    producers = {
        tensor: kernel for tensor, kernel in enumerate(trace.tensor_recompute.tolist()) if kernel >= 0
    }
    results = sorted(producers)  # many of which have zeros: only they are worth compressing
    for _ in range(rng.randint(0, 3 * schedule.kernels)):
        tensor = rng.choice(results) if results and rng.random() < 0.5 else rng.randrange(tensors)
        prefetch = PrefetchAction(tensor, rng.random() < 0.5)
        packing = rng.choice([("raw", 0, 0), ("csr", 1, 64), ("csr", 4, 256)])
        packing = packing if packs else ("raw", 0, 0)
        evict = EvictAction(tensor, rng.choice(["host", "disk"]), *packing)
        action = rng.choice([evict, ReleaseAction(tensor), prefetch])
        before[rng.randrange(schedule.kernels)].append(action)
    for tensor in rng.sample(results, rng.randint(0, len(results))):
        producer = producers[tensor]
        if rng.random() < 0.9:
            before[producer].append(KeepRecipeAction())
        alive = range(producer + 1, max(schedule.uses[tensor], default=producer) + 1)
        for kernel in sorted(rng.sample(alive, min(rng.randint(1, 3), len(alive)))):
            before[kernel].append(
                rng.choice([DropAction(tensor), DropAction(tensor), RecomputeAction(tensor)])
            )
    away = [(rng.randrange(tensors), rng.choice(["host", "disk"])) for _ in range(rng.randint(0, 3))]
    return replace(schedule, before=tuple(map(tuple, before)), away_at_start=tuple(away))


def run_plainly(seed: int) -> list[bytes]:
    program = make_program(seed)
    values = begin(program)
    found: list[bytes] = []
    for kind in program.order:
        found += bits(run_step(program, values, kind))
    return found + bits([values[number].detach() for number in sorted(values)])


def run_inside(
    seed: int, spill: SpillSpace, budget_bytes: int, **options: object
) -> tuple[list[bytes], int, int]:
    """The bits, the largest kernel, and how many bytes moved."""
    program, rng = make_program(seed), random.Random(seed)
    host_bytes = rng.choice([0, 1 << 12, 1 << 16])
    with checked_run(spill, budget_bytes, seed=seed, host_bytes=host_bytes, **options) as run:  # type: ignore[arg-type]
        values = begin(program)
        found: list[bytes] = []
        known: dict[int, Schedule] = {}
        for kind in program.order:
            recording = Recording() if kind not in known else None
            likely = [known[kind]] if kind in known else list(known.values())
            run.engine.begin_step()
            run.device.begin_step()
            run.clock.begin_step(likely, recording)
            results = run_step(program, values, kind)
            run.clock.end_step()
            if recording is not None and recording.kernels:
                trace = make_trace(recording.kernels, recording.tensors, measured=True)
                known[kind] = random_schedule(trace, rng)
            found += bits(results)
            del results
        found += bits([values[number].detach() for number in sorted(values)])
        moved = sum(copy.size_bytes for copy in run.engine.moved)
        return found, run.driver.kernel_bytes, moved


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_random_programs(part: int, spill: SpillSpace) -> None:
    moved = 0
    for seed in range(part, PROGRAMS, PARTS):
        expected = run_plainly(seed)
        found, kernel_bytes, _ = run_inside(seed, spill, 1 << 30)
        assert found == expected, f"program {seed}, everything in memory"
        rng = random.Random(seed)
        budget_bytes = kernel_bytes + rng.choice([0, 0, 512, 2048, 8192])
        try:
            found, _, moved_bytes = run_inside(seed, spill, budget_bytes)
        except Exception as error:
            raise AssertionError(f"program {seed} in {budget_bytes} bytes") from error
        assert found == expected, f"program {seed} in {budget_bytes} bytes"
        moved += moved_bytes
    assert moved > 0
    assert spill.used_bytes == 0
