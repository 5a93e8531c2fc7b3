"""Micro-batches layer by layer: the bits of one part after the other, fewer bytes read, clear errors."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.runtime import step_planner
from tests.support.runs import HARDWARE, Bits, bits, differences, offload, state_bits

SAMPLES, SIZE, WIDTH = 6, 2, 96
Accumulate = Callable[..., torch.Tensor]


class Block(nn.Module):
    def __init__(self, norm: type[nn.Module] = nn.LayerNorm, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = norm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = self.norm(x.flatten(0, -2)).view_as(x)
        return x + self.down(F.gelu(self.up(flat)))


class Words(nn.Module):
    """Its head has the weights of its embedding, so that their gradient comes from both ends."""

    def __init__(
        self, checkpointed: bool = False, norm: type[nn.Module] = nn.LayerNorm, width: int = WIDTH
    ) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.words = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(norm, width) for _ in range(4))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x @ self.words.weight.T


class Crossed(nn.Module):
    """What its encoder gives, every block of its decoder uses."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, WIDTH)
        self.both = nn.Transformer(WIDTH, 4, 2, 2, 4 * WIDTH, dropout=0.0, batch_first=True)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        return self.both(x, x.roll(1, 1)) @ self.words.weight.T


class Wandering(nn.Module):
    """The data say in which order its blocks run."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in (0, 1, 2) if x[0, 0] > 0 else (0, 2, 1):
            x = self.blocks[number](x)
        return x


class Keeping(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = super().forward(x)
        return self.kept


def batch_of(number: int) -> torch.Tensor:
    return torch.randint(0, 64, (SAMPLES, 24), generator=torch.Generator().manual_seed(number))


def words_loss(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(words).flatten(0, -2).float(), words.roll(-1, -1).flatten())


def plain(batch: torch.Tensor, loss: Callable[[Any], torch.Tensor], **_: Any) -> torch.Tensor:
    """One part after the other, without penstock."""
    losses = []
    for part in batch.split(SIZE):
        weighted = loss(part) * (len(part) / len(batch))
        weighted.backward()
        losses.append(weighted.detach())
    return torch.stack(losses).sum()


def train(
    build: Callable[[], nn.Module],
    accumulate: Accumulate,
    step: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    *,
    blocks: Callable[[nn.Module], Any] = lambda model: model,
    steps: int = 4,
) -> Bits:
    torch.manual_seed(7)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    found: Bits = []
    for number in range(steps):
        with step():
            loss = accumulate(batch_of(number), partial(words_loss, model), blocks=blocks(model))
            found += bits([loss, *(parameter.grad for parameter in model.parameters())])
            optimizer.step()
            optimizer.zero_grad()
    return found + bits(model.parameters()) + bits(model.buffers()) + state_bits(optimizer)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., penstock.Offload]]:
    with contextlib.ExitStack() as stack:

        def open_run(budget: int | str = "1GiB", **options: Any) -> penstock.Offload:
            options = {"micro_batch": SIZE, "micro_batch_order": "layer", "hardware": HARDWARE} | options
            return stack.enter_context(offload(device_budget=budget, spill_dir=tmp_path, **options))

        yield open_run
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("penstock-part")]


@pytest.mark.parametrize(
    "build",
    [Words, partial(Words, norm=nn.BatchNorm1d), partial(Words, checkpointed=True), Crossed],
    ids=["tied", "batch-norm", "checkpointed", "encoder-decoder"],
)
def test_layers_give_the_bits_of_one_part_after_the_other(
    build: Callable[[], nn.Module], opened: Callable[..., penstock.Offload]
) -> None:
    expected = train(build, plain)
    run = opened("3MiB", smallest_bytes="16KiB")
    assert differences(expected, train(build, run.accumulate, run.step)) == []
    report = run.report()
    assert report.loaded_bytes > 0 and report.peak_bytes <= report.device_budget_bytes
    assert (report.micro_batch_order, report.micro_batches) == ("layer", 3)
    assert "3 in the last batch, layer by layer" in str(report)
    assert report.trace_mismatches <= 1 and run.trace is not None
    assert run.trace.notes["micro_batch_order"] == "layer"


def test_what_a_thread_of_torch_knows_the_parts_know(opened: Callable[..., penstock.Offload]) -> None:
    class Counting(torch.overrides.TorchFunctionMode):
        calls = 0

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Counting.calls += 1
            return function(*args, **(kwargs or {}))

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return 2 * x if x.is_floating_point() else x  # so that gradients show who was asked

    def accumulate(inner: Accumulate) -> Accumulate:
        def outer(*args: Any, **options: Any) -> torch.Tensor:
            packed = torch.autograd.graph.saved_tensors_hooks(doubled, lambda x: x)
            with torch.autocast("cpu", torch.bfloat16), packed, Counting():
                return inner(*args, **options)

        return outer

    expected, plain_calls = train(Words, accumulate(plain)), Counting.calls
    Counting.calls = 0
    run = opened()
    assert differences(expected, train(Words, accumulate(run.accumulate), run.step)) == []
    assert Counting.calls >= plain_calls > 0


def test_blocks_can_be_given(opened: Callable[..., penstock.Offload]) -> None:
    """One block that runs four times, too."""

    class Recurrent(Words):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([self.blocks[0]] * 4)

    expected = train(Recurrent, plain)
    run = opened()
    found = train(Recurrent, run.accumulate, run.step, blocks=lambda model: [model.blocks[0]])
    assert differences(expected, found) == []


SLOW = replace(HARDWARE, disk_read_bytes_per_s=30e6, disk_write_bytes_per_s=30e6)


def test_blocks_can_be_compiled(opened: Callable[..., penstock.Offload]) -> None:
    def build(whole: bool = False) -> nn.Module:
        torch._dynamo.reset()
        model = Words()
        for part in [model] if whole else model.blocks:
            part.compile(backend="aot_eager")
        return model

    with opened(micro_batch_order="part") as run:
        expected = train(build, run.accumulate, run.step)
    run = opened()
    assert differences(expected, train(build, run.accumulate, run.step)) == []
    with pytest.raises(penstock.InvalidArgument, match="compile block by block"):
        train(partial(build, whole=True), run.accumulate, run.step)


def test_weights_are_read_once_and_not_for_each_part(
    opened: Callable[..., penstock.Offload], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_planner, "PLANNING_LIMITS_S", (0.2, 10.0))  # plans are compared
    read_bytes = {}
    options = {"micro_batch": 1, "hardware": SLOW, "recompute": False, "compress": False}
    for order in ("part", "layer"):
        with opened("5MiB", micro_batch_order=order, **options) as run:
            model = Words(width=256)
            for number in range(2):
                with run.step():
                    run.accumulate(batch_of(number), partial(words_loss, model), blocks=model)
                    model.zero_grad()
            run.report()  # there is a plan then
            assert run.trace is not None and run.plan is not None
            read_bytes[order] = penstock.simulate(run.trace, run.plan, run.hardware).moved_bytes("disk_read")
    assert 0 < read_bytes["layer"] < 0.6 * read_bytes["part"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "budget", "machine"),
    [("layer", "2MiB", SLOW), ("part", "1GiB", HARDWARE)],
    ids=["short", "roomy"],
)
def test_auto_takes_what_is_predicted_to_be_faster(
    order: str, budget: str, machine: penstock.Hardware, opened: Callable[..., penstock.Offload]
) -> None:
    expected = train(Words, plain)
    with opened(budget, micro_batch_order="auto", hardware=machine) as run:
        assert differences(expected, train(Words, run.accumulate, run.step)) == []
        assert run.report().micro_batch_order == order
        plan = run.plan
    with opened(budget, micro_batch=None, micro_batch_order=None, plan=plan) as again:
        assert differences(expected, train(Words, again.accumulate, again.step)) == []
        assert again.report().micro_batch_order == order and again.report().trace_mismatches <= 1
    with pytest.raises(penstock.InvalidArgument, match="leave one of them out"):
        opened(budget, micro_batch=None, micro_batch_order="auto", plan=plan)


class Noisy(Words):
    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(words), 0.1)


@pytest.mark.parametrize("order", ["layer", "auto"])
def test_random_numbers_keep_the_order_of_parts_or_are_named(
    order: str, opened: Callable[..., penstock.Offload], caplog: pytest.LogCaptureFixture
) -> None:
    expected = train(Noisy, plain, steps=2)
    run = opened("3MiB", micro_batch_order=order, hardware=SLOW)
    with caplog.at_level(logging.WARNING, "penstock"):
        found = train(Noisy, run.accumulate, run.step, steps=2)
    warned = [record.message for record in caplog.records if "draws random numbers" in record.message]
    if order == "layer":
        assert len(warned) == 1 and "in the order of layers instead of parts" in warned[0]
    else:
        assert not warned and run.report().micro_batch_order == "part"
        assert differences(expected, found) == []


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_of_one_part_ends_all(where: str, opened: Callable[..., penstock.Offload]) -> None:
    run = opened("3MiB", smallest_bytes="16KiB")
    model = Words()
    calls = []

    def loss(part: torch.Tensor) -> torch.Tensor:
        calls.append(threading.get_ident())
        if len(calls) == 2:
            hook = partial(fail, hook=None)
            if where == "forward":
                hook = model.blocks[2].register_forward_pre_hook(lambda *_: fail())
            else:
                hook = model.blocks[2].up.weight.register_hook(lambda _: fail())
            hooks.append(hook)
        return words_loss(model, part)

    def fail() -> None:
        hooks.pop().remove()
        raise ValueError("of one part")

    hooks: list[Any] = []
    with pytest.raises(ValueError, match="of one part"), run.step():
        run.accumulate(batch_of(0), loss, blocks=model)
    assert len(set(calls)) > 1 and threading.get_ident() not in calls
    model.zero_grad()
    with run.step():  # and the next one runs
        found = run.accumulate(batch_of(0), partial(words_loss, model), blocks=model)
    again = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    expected = plain(batch_of(0), partial(words_loss, model))
    assert (
        differences(
            bits([expected, *(parameter.grad for parameter in model.parameters())]), bits([found, *again])
        )
        == []
    )


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_all_parts(opened: Callable[..., penstock.Offload]) -> None:
    run = opened()
    model = Words()

    def loss(part: torch.Tensor) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGINT)
        return words_loss(model, part)

    with pytest.raises(KeyboardInterrupt), run.step():
        run.accumulate(batch_of(0), loss, blocks=model)
    with run.step():
        run.accumulate(batch_of(0), partial(words_loss, model), blocks=model)


def test_parts_that_part_ways_are_refused(opened: Callable[..., penstock.Offload]) -> None:
    run = opened()
    model = Wandering()
    x = torch.ones(SAMPLES, WIDTH)
    with run.step():
        run.accumulate(x, lambda part: model(part).square().mean(), blocks=model)
    x[SIZE:] = -1
    with (
        pytest.raises(penstock.InvalidArgument, match="pass the model's blocks in different orders"),
        run.step(),
    ):
        run.accumulate(x, lambda part: model(part).square().mean(), blocks=model)


def test_what_a_block_keeps_of_a_part_is_refused(opened: Callable[..., penstock.Offload]) -> None:
    run = opened()
    model = nn.Sequential(Keeping(), Keeping())
    with pytest.raises(penstock.InvalidArgument, match=r"Keeping\.kept holds"), run.step():
        run.accumulate(
            torch.ones(SAMPLES, WIDTH), lambda part: model(part).sum() + model[0].kept.sum(), blocks=model
        )


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (None, "give it as `blocks`"),
        ([], "give it as `blocks`"),
        (nn.Linear(2, 2), "no ModuleList or Sequential of several modules of one type"),
        (nn.ModuleList([nn.Linear(2, 2)]), "runs none of the blocks"),
    ],
    ids=["none", "empty", "no-list", "other"],
)
def test_blocks_that_are_none_are_refused(
    blocks: Any, message: str, opened: Callable[..., penstock.Offload]
) -> None:
    run = opened()
    model = Words()
    with pytest.raises(penstock.InvalidArgument, match=message), run.step():
        run.accumulate(batch_of(0), partial(words_loss, model), blocks=blocks)


def test_auto_cannot_trace_a_loss_that_reads_values(opened: Callable[..., penstock.Offload]) -> None:
    run = opened(micro_batch_order="auto")
    model = Words()
    message = 'or give micro_batch_order as "part" or "layer"'
    with pytest.raises(penstock.InvalidArgument, match=message), run.step():
        run.accumulate(batch_of(0), lambda part: words_loss(model, part) * part.sum().item(), blocks=model)


def test_a_loop_cannot_be_reordered(opened: Callable[..., penstock.Offload]) -> None:
    with pytest.raises(penstock.InvalidArgument, match=r"call run.accumulate\(batch, loss, blocks=model\)"):
        opened().micro_batches(batch_of(0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_batch_order": "block"}, "choose part, layer, auto"),
        ({"micro_batch": None}, "give micro_batch, too"),
    ],
)
def test_an_order_is_one_of_parts(
    options: dict[str, Any], message: str, opened: Callable[..., penstock.Offload]
) -> None:
    with pytest.raises(penstock.InvalidArgument, match=message):
        opened(**options)


def test_whole_batches_are_accumulated_too(opened: Callable[..., penstock.Offload]) -> None:
    run = opened(micro_batch=None, micro_batch_order=None)
    model = Words()
    with run.step():
        found = run.accumulate(batch_of(0), partial(words_loss, model))
    assert found.item() == words_loss(model, batch_of(0)).item()
