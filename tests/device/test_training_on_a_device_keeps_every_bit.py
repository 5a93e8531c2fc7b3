"""Training on an accelerator inside a budget: the bits of the plain run, in whatever order work is done.

``PENSTOCK_SEEDS=20`` has the slow ones try so many seeds for each model, order and budget.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import itertools
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import penstock
from penstock.core.trace import Trace
from penstock.errors import BudgetTooSmall
from penstock.runtime import step_planner
from penstock.runtime.schedule import Schedule
from tests.runtime.test_random_programs_keep_every_bit import random_schedule
from tests.support.accelerator import orders, peak_reserved_bytes, reset_peak, wanted
from tests.support.families import FAMILIES, Family, _Gpt
from tests.support.runs import (
    ACCELERATED,
    PAGED,
    Bits,
    Program,
    Step,
    Way,
    bits,
    differences,
    in_memory,
    offloaded,
    state_bits,
    training,
)

DEVICE = wanted("emu")
MIB = 1 << 20
SEGMENT_BYTES = 2 * MIB
ROOMY_BYTES = 96 * MIB  # more than any of these programs needs
STEPS = 4
SEEDS = int(os.environ.get("PENSTOCK_SEEDS", "4"))
TIERS = {"host": "128MiB", "disk": "64MiB"}  # the latter is all staging
ORDERS = orders(DEVICE, "lazy", "stepped", "random", "newest")
Configure = Callable[..., None]


def digests(found: Bits) -> Bits:
    return [hashlib.sha256(one).digest() for one in found]


@functools.cache
def expected(program: Program) -> Bits:
    return digests(in_memory(program))


@functools.cache
def family(name: str) -> Program:
    return training(FAMILIES[name], STEPS, DEVICE)


def inside(
    program: Program, budget_bytes: int, tier: str, spill_dir: Path, **options: Any
) -> tuple[Bits, penstock.Report]:
    """On a device where nothing is cached, since the cap counts it. It must not hold more than the budget."""
    gc.collect()
    torch.accelerator.empty_cache()
    reset_peak(DEVICE)
    before_bytes = torch.accelerator.memory_reserved()
    peak_bytes = 0

    def measured(step: Step) -> Bits:
        nonlocal peak_bytes
        found = program(step)
        peak_bytes = peak_reserved_bytes(DEVICE) - before_bytes
        return digests(found)

    found, report = offloaded(
        measured,
        budget_bytes,
        spill_dir,
        device=f"{DEVICE}:0",
        hardware=ACCELERATED,
        host_budget=TIERS[tier],
        **options,
    )
    assert peak_bytes <= budget_bytes
    return found, report


def inside_at_least(program: Program, budget_bytes: int, *args: Any, **options: Any) -> penstock.Report:
    """In the first budget from this one on that holds the segments of the allocator, which no plan counts."""
    while True:
        try:
            found, report = inside(program, budget_bytes, *args, **options)
        except BudgetTooSmall as error:
            assert budget_bytes < error.minimum_bytes <= ROOMY_BYTES
            budget_bytes = (budget_bytes // SEGMENT_BYTES + 1) * SEGMENT_BYTES
        else:
            assert differences(expected(program), found) == [], f"budget {budget_bytes}"
            assert report.peak_bytes <= budget_bytes
            return report


@contextlib.contextmanager
def scheduled_at_random(seed: int, packs: bool = True) -> Iterator[None]:
    """Any actions at any kernel: a plan is advice, and these give the same bits."""
    rng = random.Random(seed)

    def scheduled(trace: Trace, plan: Any, host_bytes: int) -> Schedule:
        return random_schedule(trace, rng, packs)

    with mock.patch.object(step_planner, "scheduled", scheduled):
        yield


@functools.cache
def range_of(program: Program) -> tuple[int, int]:
    """The smallest budget that a plan can keep, and the bytes that all tensors take at most."""
    plain = expected(program)
    gc.collect()
    before_bytes = torch.accelerator.memory_allocated()  # of libraries' workspaces: beside every budget
    torch.accelerator.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as spill_dir:
        found, report = inside(program, ROOMY_BYTES, "host", Path(spill_dir))
    assert differences(plain, found) == []
    return report.minimum_bytes, torch.accelerator.max_memory_allocated() - before_bytes


def check(
    configure: Configure,
    program: Program,
    order: str,
    seed: int,
    tier: str,
    share: float,
    policy: str,
    spill_dir: Path,
    host_delay_us: int = 0,
) -> penstock.Report:
    """``policy`` may be "at random"."""
    configure(order="eager")
    least, most = range_of(program)
    configure(order=order, seed=seed, host_delay_us=host_delay_us)
    budget_bytes = int(least + share * (most - least))
    if policy == "at random":
        with scheduled_at_random(seed):
            return inside_at_least(program, budget_bytes, tier, spill_dir)
    return inside_at_least(program, budget_bytes, tier, spill_dir, policy=policy)


SETTINGS = [
    ("lazy", "host", 0.0, "evict_all"),
    ("stepped", "disk", 0.5, "at random"),
    ("random", "disk", 0.0, "evict_all"),
    ("newest", "host", 0.0, "at random"),
]


@pytest.mark.parametrize(("order", "tier", "share", "policy"), SETTINGS)
@pytest.mark.parametrize("name", FAMILIES)
def test_families(
    configure: Configure, name: str, order: str, tier: str, share: float, policy: str, tmp_path: Path
) -> None:
    check(configure, family(name), order, 1, tier, share, policy, tmp_path)


# Of the bytes between the least and what all tensors take.
SHARES = {"least": 0.0, "middle": 0.5, "generous": 1.5}
WAYS = [
    Way("adamw, foreach"),
    Way("adamw, one by one", clipped=True),
    Way("adamw, fused", clipped=True, autocast=True),
    Way("adamw, foreach", parts=2, autocast=True),
    Way("adamw, fused", parts=3),
    Way("sgd", parts=2, clipped=True),
    Way("sgd", autocast=True),
    Way("adafactor", clipped=True, parts=2),
    Way("adafactor", autocast=True),
]


def check_drawn(
    configure: Configure,
    program_of: Callable[[Way], Program],
    name: str,
    order: str,
    budget: str,
    spill_dir: Path,
) -> None:
    """One way of training after the other, and the rest drawn from the seed. Something has to move."""
    ways = random.Random(f"{name}, {order}, {budget}").sample(WAYS, len(WAYS))
    moved_bytes = 0
    for seed in range(SEEDS):
        rng = random.Random(f"{name}, {order}, {budget}, {seed}")
        way = ways[seed % len(ways)]
        tier, policy = rng.choice(list(TIERS)), rng.choice(["at random", "evict_all", "optimal", "g10"])
        delay_us = rng.choice([0, 0, 30])
        try:
            report = check(
                configure, program_of(way), order, seed, tier, SHARES[budget], policy, spill_dir, delay_us
            )
        except Exception as error:
            raise AssertionError(f"seed {seed}: {way}, {tier}, {policy}, {delay_us} us") from error
        moved_bytes += report.evicted_bytes + report.recomputed_bytes
    # All of "dynamic" fits into one segment, and no plan is for its next step.
    assert moved_bytes > 0 or budget == "generous" or name == "dynamic"


COPIES = 4


@functools.cache
def several(name: str, way: Way) -> Program:
    """Some models of a family, trained together: one alone would fit into a segment of the allocator."""
    one = FAMILIES[name]

    def loss(models: Any, step: int) -> torch.Tensor:
        return torch.stack([one.loss(model, step) for model in models]).sum()

    family = Family(lambda: torch.nn.ModuleList(one.make() for _ in range(COPIES)), loss, one.backward)
    return training(family, STEPS, DEVICE, way)


@pytest.mark.slow
@pytest.mark.parametrize("budget", SHARES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", FAMILIES)
def test_families_in_all_orders(
    configure: Configure, name: str, order: str, budget: str, tmp_path: Path
) -> None:
    check_drawn(configure, functools.partial(several, name), name, order, budget, tmp_path)


# -- a model larger than its budget ------------------------------------------------------------------


def _gpt(cast: torch.dtype | None = None, **how: bool) -> Program:
    """A GPT with its AdamW, some 14 MiB of tensors of under 1 MiB, built on the device."""

    def program(step: Step) -> Bits:
        with torch.device(DEVICE):
            model = _Gpt(width=128, blocks=4, dropout=0.1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **how)
        found: Bits = []
        for number in range(STEPS):
            words = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(number))
            with step():
                words = words.to(DEVICE)
                with torch.autocast(DEVICE, cast, enabled=cast is not None):
                    loss = F.cross_entropy(model(words).flatten(0, 1), words.roll(-1, 1).flatten())
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                found += bits([loss, *(p.grad for p in model.parameters())])
                optimizer.step()
                optimizer.zero_grad()
        return found + bits(model.parameters()) + state_bits(optimizer)

    return program


MODELS = {
    "plain": _gpt(foreach=False),
    "foreach": _gpt(foreach=True),
    "fused": _gpt(fused=True),
    "bf16": _gpt(torch.bfloat16),
}


@pytest.mark.parametrize(
    ("name", "order", "tier"),
    [("plain", "lazy", "host"), ("foreach", "stepped", "disk"), ("fused", "random", "host")]
    + [("bf16", "newest", "disk"), ("foreach", "lazy", "host")],
)
def test_a_model_above_its_budget(
    configure: Configure, name: str, order: str, tier: str, tmp_path: Path
) -> None:
    if DEVICE == "cuda" and name == "bf16":
        pytest.skip("cuBLAS takes 32 MiB beside products of bfloat16")
    configure(order="eager")
    plain = expected(MODELS[name])
    configure(order=order, seed=2, host_delay_us=20)
    found, report = inside(MODELS[name], 8 * MIB, tier, tmp_path)
    assert differences(plain, found) == []
    assert report.evicted_bytes > 2 * MIB and report.peak_bytes <= 8 * MIB


def test_a_small_result_beside_a_large_one_has_room(configure: Configure, tmp_path: Path) -> None:
    """Of a kernel that cannot run again, in a step that is not planned. All is reserved for large tensors."""

    def program(step: Step) -> Bits:
        with step():
            large = [torch.full((MIB,), float(number), device=DEVICE) for number in range(8)]
            found = F.dropout(large[0].requires_grad_(), 0.5)  # of 4 MiB, and a mask of 1 MiB
            return bits([found, *large])

    configure(order="eager")
    plain = expected(program)
    configure(order="lazy")
    found, _ = inside(program, 41 * MIB, "host", tmp_path)  # of which two segments of the allocator take 40
    assert differences(plain, found) == []


def test_what_was_there_before_comes_below_the_budget(configure: Configure, tmp_path: Path) -> None:
    """With the segments that small tensors keep. What the run is not told of is beside the budget in the step
    that meets it."""
    configure(order="lazy")
    with torch.device(DEVICE):
        model = _Gpt(width=128, blocks=4)
    others = [torch.zeros(900 << 8, device=DEVICE) for _ in range(6)]  # that the run is not told of
    optimizer = torch.optim.AdamW(model.parameters())
    before_bytes = torch.accelerator.memory_reserved()
    assert before_bytes > 8 * MIB
    with penstock.offload(
        model,
        optimizer,
        device=DEVICE,
        device_budget=8 * MIB,
        spill_dir=tmp_path,
        hardware=ACCELERATED,
        host_budget=TIERS["host"],
        planning=PAGED,
    ) as run:
        peaks = []
        for _ in range(5):
            with run.step():
                words = torch.randint(0, 64, (4, 32)).to(DEVICE)
                F.cross_entropy(model(words).flatten(0, 1), words.roll(-1, 1).flatten()).backward()
                for other in others:
                    other.add_(1)
                optimizer.step()
                optimizer.zero_grad()
            peaks.append(torch.accelerator.max_memory_reserved())
        assert run.report().peak_bytes <= 8 * MIB
    assert peaks[0] <= before_bytes + 8 * MIB
    assert max(peaks[1:]) <= 8 * MIB
    assert all(bool((other == 5).all()) for other in others)


def test_segments_of_what_was_there_before_are_beside_the_budget(
    configure: Configure, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a tensor that cannot leave keeps each of them. That is said, and the budget holds beside them."""
    configure(order="lazy")
    sizes = [960 << 8, 63 << 8] * 16  # two of each fill a segment
    filled = [torch.zeros(size, device=DEVICE) for size in sizes]
    weights = torch.nn.ParameterList(filled[::2])
    torch.accelerator.empty_cache()
    before_bytes = torch.accelerator.memory_reserved()
    assert before_bytes >= 16 * MIB
    with penstock.offload(
        weights,
        device=DEVICE,
        device_budget=4 * MIB,
        spill_dir=tmp_path,
        hardware=ACCELERATED,
        host_budget=TIERS["host"],
    ) as run:
        for _ in range(5):
            with run.step():
                for weight in weights:
                    weight.detach().add_(1)
            assert torch.accelerator.max_memory_reserved() <= before_bytes
        report = run.report()
    assert report.peak_bytes <= 4 * MIB
    assert len([record for record in caplog.records if "stay reserved beside" in record.getMessage()]) == 1
    assert all(bool((weight == 5).all()) for weight in weights)


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_above_its_budget_in_all_orders(
    configure: Configure, name: str, order: str, tmp_path: Path
) -> None:
    configure(order="eager")
    plain = expected(MODELS[name])
    policies = itertools.cycle(["optimal", "evict_all", "g10"])
    for seed, (tier, budget) in enumerate(itertools.product(TIERS, (6, 8, 12))):
        configure(order=order, seed=seed, host_delay_us=(0, 50)[seed % 2])
        policy = next(policies)
        found, report = inside(MODELS[name], budget * MIB, tier, tmp_path, policy=policy)
        assert differences(plain, found) == [], f"seed {seed}, {tier}, {budget} MiB, {policy}"
        assert report.peak_bytes <= budget * MIB
