"""On an accelerator, of what a region of torch.compile uses only what it writes is copied out again."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch._inductor import config as inductor

from penstock.capture import regions
from penstock.options import IoOptions
from penstock.runtime.storages import AWAY, ManagedStorage
from penstock.storage.spill import SpillSpace
from tests.support.checked import CheckedRun, checked_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler"),
    pytest.mark.skipif(
        not hasattr(torch._higher_order_ops.wrap, "InductorCompiledCallable"),
        reason="this torch tells no graph of a region: all that it is given counts as written",
    ),
]

WIDTH = 32


@pytest.fixture
def run(tmp_path: Path) -> Iterator[CheckedRun]:
    torch._dynamo.reset()
    options = IoOptions(paths=["posix buffered"], page_cache_budget=1 << 20)
    with (
        inductor.patch("wrap_inductor_compiled_regions", True),
        SpillSpace(tmp_path, options) as spill,
        checked_run(spill, 1 << 20) as run,
    ):
        yield run


def leave(run: CheckedRun, tensor: torch.Tensor, release: bool = False) -> ManagedStorage:
    managed = run.clock.storages.find(tensor.untyped_storage())
    assert managed is not None
    with run.engine.lock:
        run.engine.evict(managed, release=release)
    run.engine.drain()
    assert managed.state == AWAY if release else managed.clean
    return managed


def compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return torch.compile(function, fullgraph=True)  # type: ignore[no-any-return]


def test_what_the_graph_reads_stays_clean_and_what_it_writes_does_not(run: CheckedRun) -> None:
    """A running mean is written by a view of it, at the end of the graph."""

    @compiled
    def forward(x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        y = (x @ weight.t()).sin()
        mean[0].mul_(0.5).add_(y.detach().mean(0))
        return y + x

    x, weight = torch.ones(WIDTH, WIDTH), torch.full((WIDTH, WIDTH), 0.25, requires_grad=True)
    mean = torch.ones(2, WIDTH)
    for _ in range(3):  # the first time it is compiled
        x_copy, weight_copy, mean_copy = (leave(run, tensor) for tensor in (x, weight, mean))
        before = mean.clone()
        y = forward(x, weight, mean)
        assert weight_copy.clean and x_copy.clean and not mean_copy.clean
        y.sum().backward()
        assert weight_copy.clean and x_copy.clean
        expected = before[0] * 0.5 + (x @ weight.detach().t()).sin().mean(0)
        leave(run, mean, release=True)
        leave(run, weight, release=True)
        assert torch.allclose(mean[0], expected) and torch.equal(mean[1], before[1])
        assert bool((weight == 0.25).all())


def test_a_result_in_the_memory_of_an_input_is_written(run: CheckedRun) -> None:
    """A gradient is made where the forward's result was, which nobody else has: that copy is of no worth."""

    @compiled
    def forward(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (x @ weight) * scale

    x, weight, scale = (torch.randn(WIDTH, WIDTH, requires_grad=True) for _ in range(3))
    reused = 0
    for _ in range(3):
        before = set(run.clock.storages.all())
        y = forward(x, weight, scale)
        kept = [managed for managed in run.clock.storages.all() if managed not in before]
        for managed in kept:
            with run.engine.lock:
                run.engine.evict(managed, release=False)
        run.engine.drain()
        x.grad = weight.grad = scale.grad = None
        (3 * y).sum().backward()
        assert scale.grad is not None
        managed = run.clock.storages.find(scale.grad.untyped_storage())
        reused += managed in kept
        expected = 3 * (x.detach() @ weight.detach())
        leave(run, scale.grad, release=True)
        assert torch.allclose(scale.grad, expected)
    assert reused


def test_where_no_graph_tells_all_is_written(run: CheckedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    @compiled
    def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x @ weight).sin()

    x, weight = torch.ones(WIDTH, WIDTH), torch.ones(WIDTH, WIDTH)
    forward(x, weight)
    monkeypatch.setattr(regions, "_analyse", lambda module, inputs: None)
    regions._graphs.clear()
    managed = leave(run, weight)
    forward(x, weight)
    assert not managed.clean


def test_what_was_compiled_before_the_run_gets_what_is_away(spill: SpillSpace) -> None:
    """As one kernel, which may write all that it is given."""
    torch._dynamo.reset()
    scaled = torch.compile(lambda weight, x: (weight * x).sin())
    weight, x = torch.rand(WIDTH, WIDTH), torch.rand(WIDTH)
    expected = scaled(weight, x)
    with checked_run(spill, 1 << 20) as run:
        given = weight * 1
        managed = leave(run, given, release=True)
        assert torch.equal(scaled(given, x), expected)
        assert managed.state != AWAY and not managed.clean
