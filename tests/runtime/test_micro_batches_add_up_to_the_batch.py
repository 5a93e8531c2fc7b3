"""A batch in parts: the bits of plain PyTorch with the same parts; and one error for each mistake."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import penstock
from penstock.capture import tracer
from penstock.capture.datasheets import DataSheet
from tests.support.runs import (
    HARDWARE,
    Bits,
    Program,
    Step,
    bits,
    differences,
    in_memory,
    offload,
    state_bits,
)

SAMPLES = 24


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    scale: float


@dataclasses.dataclass
class Slotted:
    __slots__ = ("x",)
    x: torch.Tensor


class Encoding(UserDict):  # type: ignore[type-arg]
    """As transformers.BatchEncoding: entries are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., penstock.Offload]]:
    with contextlib.ExitStack() as stack:

        def open_run(budget: int | str = "1GiB", **options: Any) -> penstock.Offload:
            run = offload(device_budget=budget, spill_dir=tmp_path, **({"hardware": HARDWARE} | options))
            return stack.enter_context(run)

        yield open_run


def batch_of(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(number)
    return torch.randn(SAMPLES, 64, generator=drawn), torch.randint(0, 8, (SAMPLES,), generator=drawn)


def training(split: Callable[..., Any], steps: int = 5) -> Callable[[Step], Bits]:
    """Some steps of a small model. ``split`` gives parts, each with its weight."""

    def program(step: Step) -> Bits:
        model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.GELU(), torch.nn.Linear(512, 8))
        optimizer = torch.optim.AdamW(model.parameters())
        found: Bits = []
        for number in range(steps):
            batch = batch_of(number)
            with step():

                def loss(part: Any) -> torch.Tensor:
                    return F.cross_entropy(model(part[0]), part[1])

                for part in split(batch, loss):
                    (loss(part) * part.weight).backward()
                found += bits(parameter.grad for parameter in model.parameters())
                optimizer.step()
                optimizer.zero_grad()
        return found + bits(model.parameters()) + state_bits(optimizer)

    return program


class Plain(tuple):  # type: ignore[type-arg]
    weight: float


def by_hand(size: int) -> Callable[..., Any]:
    def split(batch: tuple[torch.Tensor, ...], _: Any) -> Iterator[Plain]:
        count = len(batch[0])
        for begin in range(0, count, size):
            part = Plain(tensor[begin : begin + size] for tensor in batch)
            part.weight = len(part[0]) / count
            yield part

    return split


@pytest.mark.parametrize("size", [8, 10, SAMPLES])
def test_parts_give_the_bits_of_plain_pytorch_with_the_same_parts(
    size: int, opened: Callable[..., penstock.Offload]
) -> None:
    expected = in_memory(training(by_hand(size)))
    torch.manual_seed(7)
    run = opened("450KiB", micro_batch=size, smallest_bytes=4096)
    assert differences(expected, training(run.micro_batches)(run.step)) == []
    report = run.report()
    assert report.loaded_bytes + report.recomputed_bytes > 0
    assert report.peak_bytes <= report.device_budget_bytes
    assert (report.micro_batch, report.micro_batches) == (size, -(-SAMPLES // size))
    assert f"micro-batches: {size} samples in each" in str(report)
    assert report.trace_mismatches <= 1 and run.plan is not None


def test_gradients_of_parts_are_close_to_those_of_the_whole_batch(
    opened: Callable[..., penstock.Offload],
) -> None:
    found = []
    for split in (by_hand(SAMPLES), opened(micro_batch=7).micro_batches):
        torch.manual_seed(7)
        model = torch.nn.Linear(64, 8)

        def loss(part: Any, model: torch.nn.Module = model) -> torch.Tensor:
            return F.cross_entropy(model(part[0]), part[1])

        for part in split(batch_of(0), loss):
            (loss(part) * part.weight).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for whole, parts in zip(*found, strict=True):
        torch.testing.assert_close(parts, whole)


def test_batches_stay_whole_where_nobody_asked(opened: Callable[..., penstock.Offload]) -> None:
    run = opened()
    (part,) = run.micro_batches(torch.arange(6.0))
    assert part.weight == 1 and part.tolist() == list(range(6))
    assert run.micro_batch is None


def test_a_step_that_cannot_run_whole_is_divided(opened: Callable[..., penstock.Offload]) -> None:
    def wide(split: Callable[..., Any]) -> Callable[[Step], None]:
        def program(step: Step) -> None:
            model = torch.nn.Sequential(torch.nn.Linear(16, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1))
            x = torch.randn(512, 16)
            for _ in range(3):
                with step():
                    loss = lambda part: model(part).square().mean()  # noqa: E731
                    for part in split(x, loss):
                        (loss(part) * part.weight).backward()
                    model.zero_grad()

        return program

    with opened("8MiB") as whole, pytest.raises(penstock.BudgetTooSmall):
        wide(whole.micro_batches)(whole.step)
    with opened("8MiB", micro_batch="auto") as run:
        wide(run.micro_batches)(run.step)
        report = run.report()
        assert 1 <= report.micro_batch < 512 and run.micro_batch == report.micro_batch
        assert report.peak_bytes <= 8 << 20
        assert run.trace is not None and run.trace.notes["micro_batch"] == str(report.micro_batch)
        plan = run.plan
    with opened("8MiB", plan=plan) as again:  # the plan is for divided steps
        wide(again.micro_batches)(again.step)
        assert again.micro_batch == report.micro_batch and again.report().trace_mismatches == 0
    with pytest.raises(penstock.InvalidArgument, match="leave one of them out"):
        opened("8MiB", plan=plan, micro_batch=report.micro_batch + 1)


def test_not_even_one_sample_fits(opened: Callable[..., penstock.Offload]) -> None:
    run = opened("1MiB", micro_batch="auto")
    x, weight = torch.randn(8, 1024), torch.randn(1024, requires_grad=True)

    def loss(part: torch.Tensor) -> torch.Tensor:  # 4 MiB for each sample
        return torch.einsum("bi,j->bij", part, weight).square().mean()

    with run.step(), pytest.raises(penstock.BudgetTooSmall, match="even one sample at a time") as raised:
        run.micro_batches(x, loss)
    assert raised.value.minimum_bytes > 1 << 20


def test_choosing_leaves_nothing_behind(opened: Callable[..., penstock.Offload]) -> None:
    run = opened(micro_batch="auto")
    model = torch.nn.Linear(64, 8)
    drawn = torch.get_rng_state()
    calls: list[str] = []

    def loss(part: Any) -> torch.Tensor:
        calls.append(type(part).__name__)
        return F.cross_entropy(F.dropout(model(part["x"])), part["y"])

    with run.step():
        for part in run.micro_batches(dict(zip("xy", batch_of(0), strict=True)), loss):
            assert all(parameter.grad is None for parameter in model.parameters())
            assert torch.equal(torch.get_rng_state(), drawn)
            assert calls and run.micro_batch == len(part["x"])


# -- parts are like the batch ----------------------------------------------------------------------


def test_parts_are_like_the_batch(opened: Callable[..., penstock.Offload]) -> None:
    run = opened(micro_batch=2)
    x, y = torch.arange(10.0).reshape(5, 2), torch.arange(5)

    def of(batch: Any) -> list[Any]:
        found = list(run.micro_batches(batch))
        assert [part.weight for part in found] == [0.4, 0.4, 0.2]
        assert all(isinstance(part, type(batch)) for part in found)
        return found

    assert torch.equal(torch.cat(of(x)), x)
    assert [len(part[1]) for part in of((x, y))] == [2, 2, 1]
    assert of([x, {"y": y, "name": "odd"}])[2][1] == {"y": torch.tensor([4]), "name": "odd"}
    assert torch.equal(of(Pair(x, y))[1].y, torch.tensor([2, 3]))
    assert of(Frozen(x, 0.5))[0].scale == 0.5 and len(of(Frozen(x, 0.5))[2].x) == 1
    assert len(of(Slotted(x))[2].x) == 1
    assert torch.equal(of(Encoding({"input": y}))[1].input, torch.tensor([2, 3]))
    assert of(OrderedDict(x=x, y=y))[0]["y"].tolist() == [0, 1]
    assert of({"y": y, "names": list("abcde"), "kind": "odd"})[1]["names"] == ["c", "d"]
    assert of({"y": y, "array": np.arange(5)})[2]["array"].tolist() == [4]
    assert of({"y": y, "scale": torch.tensor(3.0)})[2]["scale"] == 3
    grouped = defaultdict(list, y=y)
    assert list(run.micro_batches(grouped))[2]["y"].tolist() == [4]
    assert grouped["y"] is y


def test_a_batch_of_transformers_is_divided(opened: Callable[..., penstock.Offload]) -> None:
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({"input_ids": torch.arange(12).reshape(3, 4), "labels": [1, 2, 3]})
    first, last = opened(micro_batch=2).micro_batches(batch)
    assert type(first) is transformers.BatchEncoding
    assert first.input_ids.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]] and last["labels"] == [3]
    assert batch.input_ids.shape == (3, 4) and dict(**last).keys() == {"input_ids", "labels"}


# -- what is not exact -----------------------------------------------------------------------------

LOSSES: dict[str, tuple[Callable[[torch.nn.Module, Any], torch.Tensor], str]] = {
    "mean": (lambda model, part: F.cross_entropy(model(part[0]), part[1]), ""),
    "sum": (
        lambda model, part: F.mse_loss(model(part[0]), torch.zeros(len(part[0]), 8), reduction="sum"),
        "adds up over the samples",
    ),
    "ignored targets": (
        lambda model, part: F.cross_entropy(model(part[0]), part[1], ignore_index=int(part[1][0])),
        "targets that are not ignored",
    ),
    "batch norm": (
        lambda model, part: F.cross_entropy(torch.nn.BatchNorm1d(8)(model(part[0])), part[1]),
        "takes its statistics from the samples of each part",
    ),
    "batch norm in evaluation": (
        lambda model, part: F.cross_entropy(torch.nn.BatchNorm1d(8).eval()(model(part[0])), part[1]),
        "",
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_not_exact_is_said_once(
    name: str, opened: Callable[..., penstock.Offload], caplog: pytest.LogCaptureFixture
) -> None:
    loss, said = LOSSES[name]
    run = opened(micro_batch=8)
    model = torch.nn.Linear(64, 8)
    with caplog.at_level(logging.WARNING, logger="penstock"):
        for number in range(3):
            with run.step():
                for part in run.micro_batches(batch_of(number)):
                    (loss(model, part) * part.weight).backward()
    warnings = [text for text in caplog.messages if "micro-batches" in text]
    assert len(warnings) == bool(said)
    assert all(said in text and "micro-batches of 8 samples give other results" in text for text in warnings)


def test_a_batch_that_stays_whole_is_exact(
    opened: Callable[..., penstock.Offload], caplog: pytest.LogCaptureFixture
) -> None:
    run = opened(micro_batch=SAMPLES)
    model = torch.nn.Linear(64, 8)
    with run.step():
        for part in run.micro_batches(batch_of(0)):
            LOSSES["batch norm"][0](model, part).backward()
    assert not [text for text in caplog.messages if "micro-batches" in text]


# -- mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [0, -1, True, 2.5, "all"])
def test_a_micro_batch_is_a_number_or_auto(wrong: Any, opened: Callable[..., penstock.Offload]) -> None:
    with pytest.raises(penstock.InvalidArgument, match='give 1 or more, or "auto"'):
        opened(micro_batch=wrong)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (torch.zeros(3), "a micro-batch of 4 samples is larger than the batch, which has 3: give 3 or fewer"),
        (("a", 1), "a batch of type tuple has no tensor to divide"),
        (torch.tensor(1.0), "a batch of type Tensor has no tensor to divide"),
        ((torch.zeros(8), torch.zeros(9)), "have first dimensions of 8 and 9"),
        (torch.zeros(0, 2), "the batch has no samples"),
    ],
)
def test_batches_that_cannot_be_divided_are_named(
    batch: Any, said: str, opened: Callable[..., penstock.Offload]
) -> None:
    with pytest.raises(penstock.InvalidArgument, match=said):
        opened(micro_batch=4).micro_batches(batch)


def test_the_last_batch_of_an_epoch_may_be_smaller(opened: Callable[..., penstock.Offload]) -> None:
    run = opened(micro_batch=4)
    assert len(list(run.micro_batches(torch.zeros(8)))) == 2
    (part,) = run.micro_batches(torch.zeros(3))
    assert part.weight == 1


def test_auto_needs_the_loss(opened: Callable[..., penstock.Offload]) -> None:
    run = opened(micro_batch="auto")
    with pytest.raises(penstock.InvalidArgument, match=r"run.micro_batches\(batch, loss\)"):
        run.micro_batches(torch.zeros(8))
    weight = torch.zeros(2, requires_grad=True)
    with pytest.raises(penstock.InvalidArgument, match="or give micro_batch as a number"):
        run.micro_batches(torch.zeros(8, 2), lambda part: (part @ weight).mean() * part.sum().item())


def test_auto_traces_what_a_compiled_model_was_before(opened: Callable[..., penstock.Offload]) -> None:
    model = torch.nn.Linear(64, 8)
    compiled = torch.compile(model, backend="eager")
    run = opened(micro_batch="auto")

    def loss(part: Any) -> torch.Tensor:
        return F.cross_entropy(compiled(part[0]), part[1])

    for number in range(2):
        with run.step():
            for part in run.micro_batches(batch_of(number), loss):
                (loss(part) * part.weight).backward()
    assert run.micro_batch == SAMPLES


@torch.library.custom_op("penstock_tests::slow_copy", mutates_args=())
def slow_copy(x: torch.Tensor) -> torch.Tensor:
    """Takes 150 ms, which no estimate knows."""
    time.sleep(0.15)
    return x.clone()


@slow_copy.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_auto_chooses_once_more_by_what_the_first_step_measured(
    opened: Callable[..., penstock.Offload], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel takes as long for one sample as for all: larger parts are faster, though they move more."""
    # Estimates of a busy processor would say that it takes longer for more samples.
    sheet = DataSheet({32: 1e11}, bytes_per_s=1e12, launch_s=5e-6, efficiency=1.0)
    monkeypatch.setattr(tracer, "measure_cpu", lambda: sheet)

    def program(split: Callable[..., Any]) -> Program:
        def trained(step: Step) -> Bits:
            torch.manual_seed(1)
            model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

            def loss(part: Any) -> torch.Tensor:
                return model(slow_copy(part[0])).square().mean()

            found: Bits = []
            for _ in range(4):
                with step():
                    for part in split((torch.randn(512, 256),), loss):
                        (loss(part) * part.weight).backward()
                    found += bits(weight.grad for weight in model.parameters())
                    optimizer.step()
                    optimizer.zero_grad()
            return found + bits(model.parameters())

        return trained

    sizes: list[int] = []
    slow_disk = dataclasses.replace(HARDWARE, disk_read_bytes_per_s=5e7, disk_write_bytes_per_s=5e7)
    run = opened("6MiB", micro_batch="auto", hardware=slow_disk, recompute=False)

    def dividing(batch: Any, loss: Any) -> Any:
        found = list(run.micro_batches(batch, loss))
        sizes.append(len(found[0][0]))
        return found

    found = program(dividing)(run.step)
    assert sizes[0] < sizes[1] == sizes[2] == sizes[3] == run.micro_batch
    again = iter(sizes)

    def as_divided(batch: Any, loss: Any) -> Any:
        return by_hand(next(again))(batch, loss)

    assert differences(found, in_memory(program(as_divided))) == []


def test_auto_leaves_out_sizes_with_which_the_loss_fails(opened: Callable[..., penstock.Offload]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 4096), torch.nn.BatchNorm1d(4096))  # not of one sample
    run = opened("4MiB", micro_batch="auto")

    def loss(part: Any) -> torch.Tensor:
        return model(part).square().mean()

    parts = list(run.micro_batches(torch.randn(512, 64), loss))
    assert 2 <= len(parts[0]) == run.micro_batch < 512


def test_a_field_called_weight_is_refused(opened: Callable[..., penstock.Offload]) -> None:
    class Weighted(NamedTuple):
        x: torch.Tensor
        weight: torch.Tensor

    with pytest.raises(penstock.InvalidArgument, match="give the field another name"):
        list(opened(micro_batch=4).micro_batches(Weighted(torch.zeros(8), torch.zeros(8))))
