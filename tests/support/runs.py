"""Run a training program in memory and inside budgets, and compare what it computes bit by bit."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

import penstock
from tests.support.families import FAMILIES, Family

HARDWARE = penstock.Hardware(
    device_bytes=1 << 40,
    disk_bytes=8 << 30,
    disk_read_bytes_per_s=2e9,
    disk_write_bytes_per_s=2e9,
    disk_read_latency_s=1e-4,
    disk_write_latency_s=1e-4,
    disk_shares_bus=False,
    name="given",
)
# Of an accelerator: with a bus between device and host.
ACCELERATED = replace(
    HARDWARE, host_bytes=4 << 30, device_to_host_bytes_per_s=2e9, host_to_device_bytes_per_s=2e9
)
EVERYTHING = 4096  # bytes: the arena's smallest block, so that every tensor of a small model pages
PAGED = penstock.PlanOptions(smallest_bytes=EVERYTHING)

Bits = list[bytes]
Step = Callable[..., contextlib.AbstractContextManager[None]]
# Given what opens a step, trains, and returns the bits of all that must be equal.
Program = Callable[[Step], Bits]


def bits(tensors: Iterable[torch.Tensor | None]) -> Bits:
    """What the tensors hold, and their shapes. A kernel copies them first: NumPy sees what is there."""
    found = []
    for tensor in tensors:
        if tensor is None:
            found.append(b"none")
            continue
        tensor = tensor.detach().clone().cpu()
        if tensor.layout is not torch.strided:
            tensor = tensor.coalesce().to_dense()
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        if tensor.dtype is torch.bfloat16:
            tensor = tensor.view(torch.int16)
        found.append(repr(tuple(tensor.shape)).encode() + tensor.numpy().tobytes())
    return found


def state_bits(optimizer: torch.optim.Optimizer) -> Bits:
    """The bits of an optimizer's state."""
    found: Bits = []

    def collect(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.extend(bits([value]))
        elif isinstance(value, dict):
            for part in value.values():
                collect(part)
        elif isinstance(value, (list, tuple)):
            for part in value:
                collect(part)
        elif isinstance(value, (int, float)):
            found.append(repr(value).encode())

    collect(optimizer.state_dict()["state"])
    return found


OPTIMIZERS: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=1e-2),
    "adamw, one by one": lambda weights: torch.optim.AdamW(weights, lr=1e-2, foreach=False),
    "adamw, foreach": lambda weights: torch.optim.AdamW(weights, lr=1e-2, foreach=True),
    "adamw, fused": lambda weights: torch.optim.AdamW(weights, lr=1e-2, fused=True),
    "sgd": lambda weights: torch.optim.SGD(weights, lr=1e-2, momentum=0.9),
    "adafactor": lambda weights: torch.optim.Adafactor(weights, lr=1e-2),
}


class Way(NamedTuple):
    """How a model is trained.

    optimizer      a key of OPTIMIZERS
    clipped        gradients, to a norm of 1
    parts          micro-batches of a step, whose gradients add up
    autocast       to bfloat16
    """

    optimizer: str = "adamw"
    clipped: bool = False
    parts: int = 1
    autocast: bool = False


AS_USUAL = Way()


def training(family: Family, steps: int, device: str = "cpu", way: Way = AS_USUAL) -> Program:
    """Some steps of a model, built on the CPU."""

    def program(step: Step) -> Bits:
        model = family.make().to(device).train()
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = OPTIMIZERS[way.optimizer](weights)
        found: Bits = []
        for number in range(steps):
            with step():
                for part in range(number * way.parts, (number + 1) * way.parts):
                    with torch.autocast(device, torch.bfloat16) if way.autocast else contextlib.nullcontext():
                        loss = family.loss(model, part)
                    family.backward(loss)
                    found += bits([loss])
                found += bits(weight.grad for weight in weights)
                if way.clipped:
                    torch.nn.utils.clip_grad_norm_(weights, 1.0)
                optimizer.step()
                optimizer.zero_grad()
        return found + bits(model.parameters()) + bits(model.buffers()) + state_bits(optimizer)

    return program


@functools.cache
def family_training(name: str, steps: int, device: str = "cpu") -> Program:
    """Some steps of a model of `tests.support.families`, with AdamW."""
    return training(FAMILIES[name], steps, device)


_plain: WeakKeyDictionary[Program, Bits] = WeakKeyDictionary()
_range: WeakKeyDictionary[Program, dict[str, tuple[int, int]]] = WeakKeyDictionary()


def run_in_memory(program: Program) -> Bits:
    """Run the program without penstock."""
    torch.manual_seed(7)
    return program(lambda kind=None: contextlib.nullcontext())


def in_memory(program: Program) -> Bits:
    """As `run_in_memory`, once for all who ask: torch's settings are the usual ones."""
    if program not in _plain:
        _plain[program] = run_in_memory(program)
    return _plain[program]


def offload(*known: Any, **options: Any) -> penstock.Offload:
    """`penstock.offload`, where what goes into a group of options is given by its own name."""
    return penstock.offload(*known, **penstock.options.grouped(options))


def offloaded(
    program: Program, budget: int | str, spill_dir: Path | str, **options: Any
) -> tuple[Bits, penstock.Report]:
    """Run the program inside a budget, with everything paging; model and optimizer are built inside."""
    torch.manual_seed(7)
    options = {"hardware": HARDWARE, "smallest_bytes": EVERYTHING} | options
    with offload(device_budget=budget, spill_dir=spill_dir, **options) as run:
        found = program(run.step)
        return found, run.report()


class _SeenEnough(Exception):
    """Ends a program."""


def budgets(program: Program, spill_dir: Path | str, *shares: float, **options: Any) -> list[int]:
    """Budgets from the smallest one that the first three steps can run in (0) to their in-memory peak (1),
    which are found once."""
    known = _range.setdefault(program, {})
    if (how := repr(sorted(options.items()))) not in known:
        begun = itertools.count()

        def first_steps(step: Step) -> Bits:
            def begin(*kind: str | None) -> contextlib.AbstractContextManager[None]:
                if next(begun) == 3:
                    raise _SeenEnough
                return step(*kind)

            with contextlib.suppress(_SeenEnough):
                program(begin)
            return []

        _, report = offloaded(first_steps, "1GiB", spill_dir, **options)
        known[how] = report.minimum_bytes, report.peak_bytes
    least, most = known[how]
    return [int(least + share * (most - least)) for share in shares]


def differences(expected: Bits, found: Bits) -> list[int]:
    """Positions at which the two differ."""
    assert len(expected) == len(found)
    return [index for index, pair in enumerate(zip(expected, found, strict=True)) if pair[0] != pair[1]]


def check_same(
    program: Program, spill_dir: Path | str, *shares: float, **options: Any
) -> list[tuple[int, penstock.Report]]:
    """The program computes the same bits inside the budgets as in memory, and keeps them; the reports."""
    expected = in_memory(program)
    reports = []
    for budget_bytes in budgets(program, spill_dir, *shares):
        found, report = offloaded(program, budget_bytes, spill_dir, **options)
        assert differences(expected, found) == [], f"budget {budget_bytes}"
        assert report.peak_bytes <= budget_bytes
        assert report.loaded_bytes > 0 or report.recomputed_bytes > 0
        reports.append((budget_bytes, report))
    return reports
