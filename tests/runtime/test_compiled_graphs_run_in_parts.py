"""torch.compile of a whole model: what does not fit is divided, each part a kernel, with its bits."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import penstock
from tests.support.runs import HARDWARE, PAGED, Bits, Step, bits, budgets, differences, offloaded

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler"),
]

MIB = 1 << 20


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Inductor adds up an embedding's gradient in any order otherwise."""
    torch._dynamo.reset()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = (
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
            nn.LayerNorm(width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(torch.nn.functional.gelu(self.up(x))).sin())  # type: ignore[no-any-return]


class Blocks(nn.Module):
    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.blocks = nn.ModuleList(Block(width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def large() -> Blocks:
    torch.manual_seed(3)
    return Blocks(6, 256)  # 1 MiB of weights a block


def in_parts(model: Any, part_bytes: int) -> Callable[..., Any]:
    return torch.compile(model, backend="penstock", options={"part_bytes": part_bytes})  # type: ignore[no-any-return]


def train(model: Blocks, compiled: Callable[..., Any], step: Step, first: int = 0, last: int = 5) -> Bits:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: Bits = []
    for number in range(first, last):
        with step():
            x = torch.randn(256, model.width, generator=torch.Generator().manual_seed(number))
            loss = compiled(x).square().mean()
            loss.backward()
            found += bits([loss, *(p.grad for p in model.parameters())])
            optimizer.step()
            optimizer.zero_grad()
    return found + bits(model.parameters())


def without_a_run(kind: str | None = None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def regions(run: penstock.Offload) -> int:
    assert run.trace is not None
    return sum("inductor_compiled_code" in name for name in run.trace.kernel_name)


@pytest.mark.parametrize("budget_bytes", [10 * MIB, 16 * MIB])
def test_as_in_memory_in_the_same_parts(budget_bytes: int, tmp_path: Path) -> None:
    model = large()
    expected = train(model, in_parts(model, budget_bytes // 8), without_a_run)
    torch._dynamo.reset()
    with penstock.offload(
        device_budget=budget_bytes, spill_dir=tmp_path, hardware=HARDWARE, planning=PAGED
    ) as run:
        model = large()
        found = train(model, torch.compile(model), run.step)
        report = run.report()
        assert regions(run) >= 12, "a part a block, forward and backward"
    assert differences(expected, found) == []
    assert report.peak_bytes <= budget_bytes
    assert report.loaded_bytes > 0


def test_what_fits_stays_whole_and_needs_more(tmp_path: Path) -> None:
    minima = []
    for budget_bytes, least, most in ((1 << 30, 2, 2), (16 * MIB, 12, 100)):
        torch._dynamo.reset()
        with penstock.offload(
            device_budget=budget_bytes, spill_dir=tmp_path, hardware=HARDWARE, planning=PAGED
        ) as run:
            model = large()
            train(model, torch.compile(model), run.step)
            assert least <= regions(run) <= most
            minima.append(run.report().minimum_bytes)
    assert minima[1] < minima[0] / 3


def test_compiled_before_the_run(tmp_path: Path) -> None:
    model = large()
    compiled = in_parts(model, 2 * MIB)
    train(model, compiled, without_a_run, 0, 1)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    expected = train(model, compiled, without_a_run, 1, 5)
    model.load_state_dict(kept)
    with penstock.offload(
        model, device_budget=16 * MIB, spill_dir=tmp_path, hardware=HARDWARE, planning=PAGED
    ) as run:
        found = train(model, compiled, run.step, 1, 5)
        assert regions(run) >= 12
    assert differences(expected, found) == []


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (
            lambda x: x @ x,
            r"graph of torch.compile's region .* is not divided, as it is one kernel \(aten.mm.default\)",
        ),
        (lambda x: x[x > 0] * 2, "is not divided, as sizes in it depend on values of tensors"),
        (
            lambda x: torch._foreach_add([x, x.t()], 1)[0],
            r"as it works on lists of tensors \(aten._foreach_add",
        ),
        (lambda x: ((x @ x) @ x) @ x, r"part \d of \d of the forward graph of torch.compile's region"),
    ],
    ids=["one kernel", "unknown sizes", "lists", "a part"],
)
def test_what_cannot_be_divided_says_why(
    function: Callable[[torch.Tensor], torch.Tensor], reason: str, tmp_path: Path
) -> None:
    x = torch.randn(1024, 1024)  # 4 MiB
    with (
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
        penstock.offload(device_budget=6 * MIB, spill_dir=tmp_path, hardware=HARDWARE, planning=PAGED) as run,
        pytest.raises(penstock.BudgetTooSmall, match=reason) as caught,
        run.step(),
        torch.no_grad(),
    ):
        torch.compile(function, fullgraph=True)(x)
    assert caught.value.minimum_bytes > 6 * MIB


# -- graphs of many kinds ----------------------------------------------------------------------


class Kind(NamedTuple):
    """A program that is compiled: its model, and its loss on a batch."""

    model: Callable[[], nn.Module]
    loss: Callable[[Callable[..., Any], int], torch.Tensor]


def draw(number: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(number))


class Checkpointed(Blocks):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Broken(Blocks):
    """A graph break; two results, one a view of the other; and a table that all blocks read."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__(count, width)
        self.register_buffer("table", torch.arange(width).float().cos())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        table = self.table.expand(len(x), -1).sin()
        for number, block in enumerate(self.blocks):
            x = block(x * table)
            if number == 1:
                torch._dynamo.graph_break()
        return x, x.t()[:8]


def images() -> nn.Module:
    """Convolutions, whose strides Inductor chooses, and running statistics."""
    layers: list[nn.Module] = []
    for before in (3, 16, 16, 16):
        layers += [nn.Conv2d(before, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 64, 4))


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)  # type: ignore[no-any-return]


def language(model: Callable[..., Any], number: int) -> torch.Tensor:
    words = torch.randint(0, 97, (4, 32), generator=torch.Generator().manual_seed(number))
    return model(words, labels=words).loss  # type: ignore[no-any-return]


def autocast(model: Callable[..., Any], number: int) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(draw(number, 128, 64)).float().square().mean()  # type: ignore[no-any-return]


def two_results(model: Callable[..., Any], number: int) -> torch.Tensor:
    one, other = model(draw(number, 128, 64))
    return one.square().mean() + other.square().mean()  # type: ignore[no-any-return]


KINDS = {
    "lengths that change": Kind(
        lambda: Blocks(4, 64), lambda model, number: model(draw(number, 64 + 8 * number, 64)).square().mean()
    ),
    "checkpointed, autocast": Kind(lambda: Checkpointed(4, 64), autocast),
    "a graph break, views": Kind(lambda: Broken(4, 64), two_results),
    "images": Kind(images, lambda model, number: model(draw(number, 8, 3, 8, 8)).square().mean()),
    "llama": Kind(llama, language),
}


def program(kind: Kind, compile_model: Callable[[nn.Module], Any]) -> Callable[[Step], list[torch.Tensor]]:
    """Steps that train, and one that evaluates; what they leave."""

    def run(step: Step) -> list[torch.Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(5)
        model = kind.model()
        compiled = compile_model(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        found = []
        for number in range(4):
            with step("training"):
                loss = kind.loss(compiled, number)
                loss.backward()
                found += [loss, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        with step("evaluation"), torch.no_grad():
            found.append(kind.loss(compiled, 4))
        return [*found, *model.state_dict().values()]

    return run


def in_memory(program: Callable[[Step], list[torch.Tensor]]) -> list[torch.Tensor]:
    torch.manual_seed(7)
    return program(without_a_run)


@pytest.mark.compiled
@pytest.mark.parametrize("name", KINDS)
def test_graphs_of_many_kinds(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    divided = program(kind, lambda model: in_parts(model, 1 << 17))
    whole = in_memory(program(kind, torch.compile))
    expected = in_memory(divided)
    tolerance = 2e-2 if "autocast" in name else 1e-4
    for one, other in zip(whole, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)

    def divided_bits(step: Step) -> Bits:
        return bits(divided(step))

    (budget_bytes,) = budgets(divided_bits, tmp_path, 0.3)
    found, report = offloaded(divided_bits, budget_bytes, tmp_path)
    assert differences(bits(expected), found) == []
    assert report.peak_bytes <= budget_bytes
    assert report.loaded_bytes + report.recomputed_bytes > 0
