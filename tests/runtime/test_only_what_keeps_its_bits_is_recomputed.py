"""Kernels that may give other bits when they run again never do: their results move."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.capture.operators import describe
from tests.support.forced import recompute_everything
from tests.support.runs import HARDWARE, PAGED, Bits, Step, bits, differences, offloaded, run_in_memory

BUDGET = 1 << 30
WIDTH = 128


@pytest.fixture(params=["its device's", "its own"])
def generator(request: pytest.FixtureRequest) -> torch.Generator | None:
    return torch.Generator() if request.param == "its own" else None


@pytest.fixture(params=[(), (torch.Tag.nondeterministic_seeded,)], ids=["untagged", "tagged"])
def dropout(request: pytest.FixtureRequest, generator: torch.Generator | None) -> Any:
    """As flash attention's forward: its backward reads what it was given, and what it made."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * (torch.rand(x.shape, generator=generator) < 0.5)

    def save(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        x, output = ctx.saved_tensors
        return gradient * ((output != 0) | (x == 0))

    name = f"penstock_tests::dropout_{next(_numbers)}"
    made = torch.library.custom_op(name, forward, mutates_args=(), tags=request.param)
    made.register_fake(torch.empty_like)
    made.register_autograd(backward, setup_context=save)
    return made


_numbers = itertools.count()


def training(dropout: Any, generator: torch.Generator | None) -> Callable[[Step], Bits]:
    def program(step: Step) -> Bits:
        if generator is not None:
            generator.manual_seed(3)
        layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)]
        weights = [weight for layer in layers for weight in layer.parameters()]
        x = torch.randn(4 * WIDTH, WIDTH)
        found: Bits = []
        for _ in range(3):
            with step():
                made = x
                for layer in layers:
                    made = dropout(torch.nn.functional.gelu(layer(made)))
                made.square().mean().backward()
                found += bits(weight.grad for weight in weights)
                for weight in weights:
                    weight.grad = None
        return found

    return program


@pytest.mark.parametrize("planned", [False, True], ids=["by this run", "by others"])
def test_operators_of_others(
    planned: bool, dropout: Any, generator: torch.Generator | None, tmp_path: Path
) -> None:
    """No plan of a run runs them again, and no run does as a plan says that was made of another trace."""
    program = training(dropout, generator)
    expected = run_in_memory(program)
    torch.manual_seed(7)
    with penstock.offload(device_budget=BUDGET, spill_dir=tmp_path, hardware=HARDWARE, planning=PAGED) as run:
        assert differences(expected, program(run.step)) == []
        trace = run.trace
    assert trace is not None
    theirs = {
        int(trace.outputs[kernel][0]): kernel
        for kernel, name in enumerate(trace.kernel_name)
        if name.startswith("penstock_tests::")
    }
    assert len(theirs) == 3
    if planned:
        producers = trace.tensor_recompute.copy()
        producers[list(theirs)] = list(theirs.values())
        trace = replace(trace, tensor_recompute=producers)
    plan = recompute_everything(trace, BUDGET)
    assert plan.recomputations
    assert planned == any(entry.tensor in theirs for entry in plan.recomputations)
    found, report = offloaded(program, BUDGET, tmp_path, plan=plan)
    assert differences(expected, found) == []
    assert report.recomputed_bytes > 0
    assert bool(report.unrecomputed) == planned


rows = torch.arange(WIDTH) % 7
UNORDERED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cumsum": lambda x: x.cumsum(0),
    "index_add": lambda x: x.index_add(0, rows, x),
    "index_put": lambda x: x.index_put((rows,), x, accumulate=True),
    "put": lambda x: x.put(rows, x[0], accumulate=True),
    "scatter_add": lambda x: x.scatter_add(0, rows[:, None].expand(-1, WIDTH), x),
    "scatter_reduce": lambda x: x.scatter_reduce(0, rows[:, None].expand(-1, WIDTH), x, "prod"),
    "convolution_backward": lambda x: torch.nn.grad.conv1d_input((1, WIDTH, WIDTH), x[:, :, None], x[None]),
}


@pytest.mark.parametrize("fake", [True, False])
@pytest.mark.parametrize("name", UNORDERED)
def test_sums_in_any_order(name: str, fake: bool) -> None:
    weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))

    def step() -> None:
        UNORDERED[name](weight.exp()).sin().sum().backward()

    trace = penstock.trace(step, fake=fake)
    for operator, again in ((name, False), ("exp", True), ("sin", True)):
        kernel = trace.kernel_name.index(operator)
        assert (trace.tensor_recompute[trace.outputs[kernel][0]] == kernel) == again


def test_an_operator_of_torch_is_tried_again_where_it_failed() -> None:
    facts = describe(torch.ops.aten.index_add.default)
    assert facts.is_repeatable and not facts.can_run_again
