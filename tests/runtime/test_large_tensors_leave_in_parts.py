"""Large weights, their gradients and optimizer state are divided: each part leaves memory by itself, and an
elementwise operator needs one part of each tensor at once. The bits stay those of the plain run."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import penstock
from penstock.capture import slices
from penstock.capture.slices import run_in_parts
from tests.runtime.test_trace_matches_the_real_run import differences
from tests.support.runs import HARDWARE, OPTIMIZERS, PAGED, Bits, bits, state_bits

ROWS, WIDTH = 8192 + 77, 128
WEIGHT_BYTES = ROWS * WIDTH * 4  # more than two parts, and no multiple of anything
MIB = 1 << 20


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(slices, "DIVISIBLE_BYTES", 4 * MIB)
    monkeypatch.setattr(slices, "PART_BYTES", 2 * MIB)
    monkeypatch.setattr(slices, "SLICE_BYTES", 2 * MIB)
    torch.manual_seed(3)
    yield
    penstock.close()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.embedding(words)).relu()).logsumexp(-1).mean()


def words(number: int) -> torch.Tensor:
    return torch.randint(0, ROWS, (3, 4), generator=torch.Generator().manual_seed(number))


def iterate(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, clips: bool = True) -> None:
    model(words(number)).backward()
    if clips:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()


def offload(tmp_path: Path, share: float, *known: Any) -> penstock.Offload:
    """With a budget of so many weights."""
    return penstock.offload(
        *known, device_budget=int(share * WEIGHT_BYTES), spill_dir=tmp_path, hardware=HARDWARE, planning=PAGED
    )


def step_of(run: penstock.Offload | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if run is None else run.step()


def train(optimizer_name: str, run: penstock.Offload | None, steps: int = 6) -> Bits:
    torch.manual_seed(5)
    model = Model()
    optimizer = OPTIMIZERS[optimizer_name](list(model.parameters()))
    for number in range(steps):
        with step_of(run):
            iterate(model, optimizer, number)
    return bits(model.parameters()) + state_bits(optimizer)


@pytest.mark.parametrize("name", ["adamw, one by one", "adamw, foreach", "adamw, fused", "sgd"])
def test_optimizers_train_in_less_than_their_weight_and_its_state(name: str, tmp_path: Path) -> None:
    expected = train(name, None)
    with offload(tmp_path, 2.2) as run:
        found = train(name, run)
        report = run.report()
    assert found == expected
    assert report.minimum_bytes < 2.1 * WEIGHT_BYTES
    assert report.peak_bytes <= 2.2 * WEIGHT_BYTES


def test_divided_weights_meet_sparse_tensors(tmp_path: Path) -> None:
    def training(run: penstock.Offload | None) -> Bits:
        torch.manual_seed(5)
        model = nn.Embedding(ROWS, WIDTH, sparse=True)
        mask = torch.eye(ROWS, WIDTH).to_sparse_csr()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found: Bits = []
        for number in range(4):
            with step_of(run):
                model(words(number)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                found += bits([(model.weight.detach() * mask).values()])
        return found + bits(model.parameters())

    expected = training(None)
    with offload(tmp_path, 1.5) as run:
        assert training(run) == expected


def test_whole_tensors_would_need_twice_as_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "DIVISIBLE_BYTES", 1 << 40)
    with offload(tmp_path, 2.2) as run, pytest.raises(penstock.BudgetTooSmall):
        train("adamw, fused", run)


def test_a_fake_trace_has_the_parts_of_the_run(tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Model()
        return model, torch.optim.AdamW(model.parameters(), fused=True)

    model, optimizer = made()
    fake = penstock.trace(lambda: iterate(model, optimizer, 0))
    real = penstock.trace(lambda: iterate(*pair, 0), fake=False) if (pair := made()) else None
    assert real is not None
    assert not differences(fake, real)
    model, optimizer = made()
    with offload(tmp_path, 8) as run:
        for _ in range(4):
            with run.step():
                iterate(model, optimizer, 0)
        recorded = run.trace
    assert recorded.kernel_name == fake.kernel_name
    assert np.array_equal(recorded.tensor_bytes, fake.tensor_bytes)
    assert [list(used) for used in recorded.inputs] == [list(used) for used in fake.inputs]
    assert max(fake.tensor_bytes) < WEIGHT_BYTES / 1.5


def test_a_trace_for_a_device_that_empties_storages_has_whole_tensors() -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    trace = penstock.trace(lambda: iterate(model, optimizer, 0), device="h100")
    assert max(trace.tensor_bytes) == WEIGHT_BYTES


def test_state_from_before_the_run_is_divided_too(tmp_path: Path) -> None:
    def resumed(run_of: Any) -> Bits:
        torch.manual_seed(5)
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        iterate(model, optimizer, 0)
        with run_of(model, optimizer) as run:
            for number in range(1, 5):
                with step_of(run):
                    iterate(model, optimizer, number)
        return bits(model.parameters()) + state_bits(optimizer)

    expected = resumed(lambda *_: contextlib.nullcontext())
    found = resumed(lambda *known: offload(tmp_path, 2.2, *known))
    assert found == expected


def test_a_second_run_finds_the_parts_of_the_first(tmp_path: Path) -> None:
    torch.manual_seed(5)
    plain = Model()
    ours = copy.deepcopy(plain)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True) for model in (plain, ours)]
    for number in range(6):
        iterate(plain, optimizers[0], number)
    for begin in (0, 3):
        with offload(tmp_path, 2.2) as run:
            for number in range(begin, begin + 3):
                with run.step():
                    iterate(ours, optimizers[1], number)
    assert bits(ours.parameters()) == bits(plain.parameters())
    assert state_bits(optimizers[1]) == state_bits(optimizers[0])


def test_divided_tensors_are_read_and_written_by_any_way(tmp_path: Path) -> None:
    torch.manual_seed(5)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    with offload(tmp_path, 2.2) as run:
        for number in range(4):
            with run.step():
                iterate(model, optimizer, number)
        weight = model.embedding.weight
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        copied = copy.deepcopy(weight)
        as_array = weight.detach().numpy().copy()
        with torch.no_grad():
            weight[ROWS // 2].fill_(7.0)
            weight.view(-1)[-3:] = 8.0
        penstock.save({"weight": weight}, tmp_path / "one.safetensors")
        with run.step():
            iterate(model, optimizer, 4)
        after = weight.detach().numpy().copy()
    buffer.seek(0)
    loaded = torch.load(buffer)["embedding.weight"]
    assert np.array_equal(as_array, loaded.numpy()) and np.array_equal(as_array, copied.detach().numpy())
    saved = penstock.load(tmp_path / "one.safetensors")["weight"].detach()
    as_array[ROWS // 2] = 7.0
    as_array.reshape(-1)[-3:] = 8.0
    assert np.array_equal(saved.numpy(), as_array)
    assert np.array_equal(after, weight.detach().numpy())
    assert not np.array_equal(after, as_array)


def test_divided_storages_get_other_memory(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.rand(ROWS, WIDTH))
    expected = weight.detach().clone()
    with offload(tmp_path, 3) as run:
        with run.step():
            weight.data.mul_(2)
            weight.sum()
        weight.untyped_storage().share_memory_()
        assert torch.equal(weight.detach(), expected * 2)
        other = nn.Parameter(torch.rand(ROWS, WIDTH))
        with run.step():
            other.sum()
        other.untyped_storage().resize_(0)
        other.untyped_storage().resize_(WEIGHT_BYTES)
        with torch.no_grad():
            other.copy_(expected)
        assert torch.equal(other.detach(), expected)


def test_a_kernel_needs_the_parts_that_it_uses(tmp_path: Path) -> None:
    """Rows of a weight larger than the budget's rest are used without the others."""
    with offload(tmp_path, 1.5) as run, run.step():
        weight = nn.Parameter(torch.rand(ROWS, WIDTH))
        weight.detach()
        other = torch.rand(ROWS, WIDTH)
        total = 0.0
        for row in range(0, ROWS, 1000):
            total += float(weight.detach()[row].sum() + other[row].sum())
    report = run.report()
    expected = float(sum(weight.detach()[row].sum() + other[row].sum() for row in range(0, ROWS, 1000)))
    assert total == pytest.approx(expected)
    assert report.peak_bytes <= 1.5 * WEIGHT_BYTES


def test_gradients_add_up_in_parts(tmp_path: Path) -> None:
    def accumulated(run: penstock.Offload | None) -> Bits:
        torch.manual_seed(5)
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, foreach=True)
        for number in range(4):
            with step_of(run):
                for part in range(3):
                    model(words(3 * number + part)).backward()
                optimizer.step()
                optimizer.zero_grad()
        return bits(model.parameters()) + state_bits(optimizer)

    expected = accumulated(None)
    with offload(tmp_path, 2.4) as run:
        assert accumulated(run) == expected


def random_program(random: Random, run: penstock.Offload | None) -> Bits:
    """Some steps that use a few large weights, their views, copies and gradients, in any way."""
    torch.manual_seed(9)
    weights = [nn.Parameter(torch.rand(1100 * (i + 2), 500)) for i in range(2)]  # of 4.2 and 6.3 MiB
    others: list[torch.Tensor] = []
    found: list[torch.Tensor] = []

    def any_tensor() -> torch.Tensor:
        tensor: torch.Tensor = random.choice([weight.detach() for weight in weights] + others)
        return tensor

    def alike(tensor: torch.Tensor) -> torch.Tensor:
        same = [other for other in [*(w.detach() for w in weights), *others] if other.shape == tensor.shape]
        return random.choice(same)

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        begin = random.randrange(len(tensor) - 1)
        return tensor[begin : random.randrange(begin + 1, len(tensor))]

    def keep(tensor: torch.Tensor) -> None:
        others.append(tensor)
        if len(others) > 3:
            del others[random.randrange(len(others))]

    def descend() -> None:
        weight = random.choice(weights)
        (weight[random.randrange(len(weight))] * weight.sum(0)).sum().backward()
        keep(weight.grad.sign() if weight.grad is not None else weight.detach().neg())
        weight.grad = None

    def zero_a_column() -> None:
        any_tensor().t()[random.randrange(500)].zero_()

    def write_from_outside() -> None:
        rows(any_tensor()).numpy()[...] = 0.25

    actions: list[Callable[[], object]] = [
        lambda: any_tensor().mul_(0.5),
        lambda: (tensor := any_tensor()).add_(alike(tensor), alpha=0.25),
        lambda: (tensor := any_tensor()).copy_(alike(tensor)),
        lambda: rows(any_tensor()).add_(1),
        zero_a_column,
        lambda: keep(any_tensor().clone()),
        lambda: keep(any_tensor().abs().sqrt()),
        lambda: keep(any_tensor().to(torch.bfloat16).float()),
        lambda: keep(torch.zeros_like(any_tensor())),
        lambda: keep(copy.deepcopy(any_tensor())),
        lambda: keep((tensor := any_tensor()) + alike(tensor)),
        lambda: torch._foreach_mul_([any_tensor(), any_tensor()], 0.75),
        lambda: found.append(rows(any_tensor()).sum(0)),
        lambda: found.append(any_tensor().exp().sum()),
        lambda: torch.save(any_tensor(), io.BytesIO()),
        descend,
        write_from_outside,
    ]
    for _ in range(4):
        with step_of(run):
            for _ in range(12):
                random.choice(actions)()
    return bits([*found, *weights, *others])


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_keep_every_bit(seed: int, tmp_path: Path) -> None:
    expected = random_program(Random(seed), None)
    with penstock.offload(
        device_budget=14 * MIB, spill_dir=tmp_path, hardware=HARDWARE, planning=PAGED
    ) as run:
        found = random_program(Random(seed), run)
    assert found == expected


# -- operators --------------------------------------------------------------------------------


@functools.cache
def drawn(dtype: torch.dtype) -> list[torch.Tensor]:
    """Three operands of two whole segments and a rest, for those who write to none of them."""
    torch.manual_seed(3)
    count = 2 * 2 * MIB // dtype.itemsize + 12_345
    made = [torch.randn(count) * torch.randn(count).mul(3).exp() for _ in range(3)]
    return [value.to(dtype) for value in made]


ATEN = torch.ops.aten
CALLS: dict[str, Any] = {
    "abs": lambda a, b, c: (ATEN.abs.default, (a,), {}),
    "add": lambda a, b, c: (ATEN.add.Tensor, (a, b), {"alpha": 0.37}),
    "add_": lambda a, b, c: (ATEN.add_.Tensor, (a, b), {}),
    "add a scalar": lambda a, b, c: (ATEN.add_.Tensor, (a, torch.tensor(1e-8)), {}),
    "sub": lambda a, b, c: (ATEN.sub.Tensor, (a, b), {"alpha": 0.37}),
    "mul": lambda a, b, c: (ATEN.mul.Tensor, (a, b), {}),
    "mul_": lambda a, b, c: (ATEN.mul_.Tensor, (a, 0.999), {}),
    "div": lambda a, b, c: (ATEN.div.Tensor, (a, torch.tensor(0.31415)), {}),
    "div_": lambda a, b, c: (ATEN.div_.Tensor, (a, b), {}),
    "addcmul_": lambda a, b, c: (ATEN.addcmul_.default, (a, b, c), {"value": 0.001}),
    "addcdiv_": lambda a, b, c: (ATEN.addcdiv_.default, (a, b, c), {"value": -0.01}),
    "lerp_": lambda a, b, c: (ATEN.lerp_.Scalar, (a, b, 0.1), {}),
    "lerp by a tensor": lambda a, b, c: (ATEN.lerp_.Tensor, (a, b, c), {}),
    "sqrt": lambda a, b, c: (ATEN.sqrt.default, (a.abs(),), {}),
    "neg": lambda a, b, c: (ATEN.neg.default, (a,), {}),
    "sign": lambda a, b, c: (ATEN.sign.default, (a,), {}),
    "reciprocal": lambda a, b, c: (ATEN.reciprocal.default, (a,), {}),
    "maximum": lambda a, b, c: (ATEN.maximum.default, (a, b), {}),
    "minimum": lambda a, b, c: (ATEN.minimum.default, (a, b), {}),
    "copy_": lambda a, b, c: (ATEN.copy_.default, (a, b), {}),
    "clone": lambda a, b, c: (ATEN.clone.default, (a,), {}),
    "to": lambda a, b, c: (ATEN._to_copy.default, (a,), {"dtype": torch.bfloat16}),
    "zero_": lambda a, b, c: (ATEN.zero_.default, (a,), {}),
    "fill_": lambda a, b, c: (ATEN.fill_.Scalar, (a, 2.0), {}),
    "_foreach_add_": lambda a, b, c: (ATEN._foreach_add_.List, ([a], [b]), {"alpha": 0.37}),
    "_foreach_sqrt": lambda a, b, c: (ATEN._foreach_sqrt.default, ([a.abs()],), {}),
    "_foreach_div_": lambda a, b, c: (ATEN._foreach_div_.ScalarList, ([a], [0.3]), {}),
    "_foreach_mul_": lambda a, b, c: (ATEN._foreach_mul_.Tensor, ([a], torch.tensor(0.3)), {}),
    "_foreach_addcdiv_": lambda a, b, c: (ATEN._foreach_addcdiv_.ScalarList, ([a], [b], [c], [-0.1]), {}),
    "_foreach_lerp_": lambda a, b, c: (ATEN._foreach_lerp_.Scalar, ([a], [b], 0.1), {}),
    "_foreach_copy_": lambda a, b, c: (ATEN._foreach_copy_.default, ([a], [b]), {}),
}  # fmt: skip


def fused(kind: str) -> Any:
    def call(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Any:
        step, square = torch.tensor(3.0), c.abs()
        rates = {"lr": 0.01, "weight_decay": 0.01, "maximize": False}
        if kind == "sgd":
            rest = {"momentum": 0.9, "dampening": 0.1, "nesterov": True, "is_first_step": False}
            return ATEN._fused_sgd_.default, ([a], [b], [c]), rates | rest
        if kind == "adagrad":
            return (
                ATEN._fused_adagrad_.default,
                ([a], [b], [square], [step]),
                rates | {"lr_decay": 0.1, "eps": 1e-8},
            )
        operator = {"adam": ATEN._fused_adam_.default, "adamw": ATEN._fused_adamw_.default}[kind]
        more = {"beta1": 0.9, "beta2": 0.999, "amsgrad": False, "eps": 1e-8}
        return operator, ([a], [b], [c], [square], [], [step]), rates | more

    return call


CALLS |= {f"fused {kind}": fused(kind) for kind in ("adam", "adamw", "sgd", "adagrad")}
# These run whole, as segments would have other bits; of 16-bit elements, or always.
WHOLE = {"lerp by a tensor"}
WHOLE_NARROW = {"add", "sub", "_foreach_add_", "fused sgd"}


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_segments_give_the_same_bits(name: str, dtype: torch.dtype, threads: int) -> None:
    operator, args, kwargs = copy.deepcopy(CALLS[name](*drawn(dtype)))
    whole = copy.deepcopy((args, kwargs))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    calls = []

    def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        calls.append(operator)
        return operator(*args, **kwargs)

    try:
        expected = operator(*whole[0], **whole[1])
        found = run_in_parts(operator, args, kwargs, run, lambda tensor: True)
    finally:
        torch.set_num_threads(before)
    runs_whole = name in WHOLE or (name in WHOLE_NARROW and dtype.itemsize == 2)
    assert (len(calls) == 1) == runs_whole
    assert type(found) is type(expected)
    if runs_whole:
        return  # torch's own fused SGD of 16-bit elements has other bits each time, on two threads
    for one, other in zip(leaves((found, args)), leaves((expected, whole[0])), strict=True):
        assert one.shape == other.shape and one.dtype is other.dtype
        assert one.detach().view(-1).view(torch.uint8).equal(other.detach().view(-1).view(torch.uint8))


def leaves(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize(
    ("operator", "args", "kwargs"),
    [
        (ATEN.add.Tensor, (torch.rand(1000, 4), torch.rand(4)), {}),
        (ATEN.mul.Tensor, (torch.rand(40, 100).t(), torch.rand(100, 40)), {}),
        (ATEN.div.Tensor_mode, (torch.rand(4000), 0.3), {"rounding_mode": "floor"}),
        (ATEN._to_copy.default, (torch.rand(4000),), {"device": "meta"}),
        (ATEN._foreach_norm.Scalar, ([torch.rand(4000)],), {}),
        (ATEN.exp.default, (torch.rand(4000),), {}),
    ],
    ids=["broadcast", "strides", "rounding", "device", "reduction", "not exact"],
)
def test_what_has_no_segments_runs_whole(operator: Any, args: Any, kwargs: Any) -> None:
    calls = []

    def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        calls.append(operator)
        return operator(*args, **kwargs)

    run_in_parts(operator, args, kwargs, run, lambda tensor: True)
    assert calls == [operator]
