"""Optimizers, and what else programs do in a step: the same bits as in memory, inside the budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.families import FAMILIES
from tests.support.runs import Bits, Program, Step, bits, check_same, state_bits

STEPS = 6
GPT = FAMILIES["gpt"]

Parameters = Iterable[nn.Parameter]


def model_and_loss() -> tuple[nn.Module, Callable[[int], torch.Tensor]]:
    model = GPT.make()
    return model, lambda number: GPT.loss(model, number)


# -- optimizers --------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "sgd_foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adam_amsgrad_foreach": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, foreach=True),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "rmsprop_foreach": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True, foreach=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str, tmp_path: Path) -> None:
    def program(step: Step) -> Bits:
        model, loss_of = model_and_loss()
        optimizer = OPTIMIZERS[name](model.parameters())
        found: Bits = []
        for number in range(STEPS):
            with step():
                loss = loss_of(number)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found += bits([loss])
        return found + bits(model.parameters()) + state_bits(optimizer)

    check_same(program, tmp_path, 0.15)


def test_lbfgs_with_a_closure(tmp_path: Path) -> None:
    def program(step: Step) -> Bits:
        model, loss_of = model_and_loss()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, history_size=3)
        found: Bits = []
        for number in range(4):

            def closure(number: int = number) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(number)
                loss.backward()
                return loss

            with step():
                found += bits([optimizer.step(closure)])
        return found + bits(model.parameters()) + state_bits(optimizer)

    check_same(program, tmp_path, 0.3)


@pytest.mark.parametrize("foreach", [False, True])
def test_scheduler_accumulation_and_clipping(foreach: bool, tmp_path: Path) -> None:
    def program(step: Step) -> Bits:
        model, loss_of = model_and_loss()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        found: Bits = []
        for number in range(STEPS):
            with step():
                for part in range(3):
                    loss = loss_of(3 * number + part) / 3
                    loss.backward()
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=foreach)
                found += bits([loss, norm])
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()
        return found + bits(model.parameters()) + state_bits(optimizer)

    check_same(program, tmp_path, 0.15)


@pytest.mark.parametrize("where", ["start", "middle", "not to none"])
def test_zero_grad_anywhere(where: str, tmp_path: Path) -> None:
    def program(step: Step) -> Bits:
        model, loss_of = model_and_loss()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for number in range(STEPS):
            with step():
                if where == "start":
                    optimizer.zero_grad()
                loss = loss_of(number)
                if where == "middle":
                    optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if where == "not to none":
                    optimizer.zero_grad(set_to_none=False)
        return bits(model.parameters()) + bits(p.grad for p in model.parameters()) + state_bits(optimizer)

    check_same(program, tmp_path, 0.15)


def test_averaged_weights(tmp_path: Path) -> None:
    def program(step: Step) -> Bits:
        model, loss_of = model_and_loss()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        for number in range(STEPS):
            with step():
                loss_of(number).backward()
                optimizer.step()
                optimizer.zero_grad()
                average.update_parameters(model)
        return bits(model.parameters()) + bits(average.parameters())

    check_same(program, tmp_path, 0.15)


def test_a_gradient_scaler(tmp_path: Path) -> None:
    def program(step: Step) -> Bits:
        model, loss_of = model_and_loss()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        for number in range(STEPS):
            with step():
                scaler.scale(loss_of(number)).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        return bits(model.parameters()) + [repr(scaler.get_scale()).encode()]

    check_same(program, tmp_path, 0.2)


# -- what programs do --------------------------------------------------------------------------


def trained(
    build: Callable[[], nn.Module],
    loss: Callable[[nn.Module, int], torch.Tensor],
    optimizer: Callable[[Parameters], torch.optim.Optimizer] = lambda p: torch.optim.AdamW(p, lr=1e-2),
    backward: Callable[[torch.Tensor], Any] = torch.Tensor.backward,
) -> Program:
    def program(step: Step) -> Bits:
        model = build()
        optimize = optimizer(model.parameters())
        found: Bits = []
        for number in range(STEPS):
            with step():
                value = loss(model, number)
                backward(value)
                found += bits([value, *(p.grad for p in model.parameters())])
                optimize.step()
                optimize.zero_grad()
        return found + bits(model.parameters())

    return program


def vectors(number: int, width: int = 64) -> torch.Tensor:
    return torch.randn(64, width, generator=torch.Generator().manual_seed(number))


class Layers(nn.Module):
    """Four layers, run by ``call``."""

    def __init__(self, call: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda m, x: m(x)) -> None:
        super().__init__()
        self.call = call
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Dropout(0.1), nn.Linear(96, 64)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + self.call(layer, x)
        return x


def square_loss(model: nn.Module, number: int) -> torch.Tensor:
    return model(vectors(number).requires_grad_()).square().mean()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool, tmp_path: Path) -> None:
    def call(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(module, x, use_reentrant=reentrant)

    check_same(trained(lambda: Layers(call), square_loss), tmp_path, 0.15)


def test_functional_gradients_and_vmap(tmp_path: Path) -> None:
    def program(step: Step) -> Bits:
        model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 1))
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}

        def loss(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(model, weights, (x,)).square().sum()

        per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
        found: Bits = []
        for number in range(STEPS):
            with step():
                gradients = per_sample(weights, vectors(number))
                weights = {name: weights[name] - 0.01 * gradients[name].mean(0) for name in weights}
                found += bits(gradients.values())
        return found + bits(weights.values())

    check_same(program, tmp_path, 0.2)


def test_double_backward(tmp_path: Path) -> None:
    def loss(model: nn.Module, number: int) -> torch.Tensor:
        x = vectors(number).requires_grad_()
        value = model(x).square().mean()
        (slope,) = torch.autograd.grad(value, x, create_graph=True)
        return value + (slope.square().sum() - 1).square()

    check_same(trained(Layers, loss), tmp_path, 0.15)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        square = x * x
        ctx.save_for_backward(x, square)
        ctx.kept = x.detach().abs()  # not by autograd's means
        return square * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        x, square = ctx.saved_tensors
        return gradient * 3 * square + 0 * x + 0 * ctx.kept


def test_custom_functions(tmp_path: Path) -> None:
    def call(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return Cube.apply(torch.tanh(module(x)))  # type: ignore[no-any-return]

    check_same(trained(lambda: Layers(call), square_loss), tmp_path, 0.15)


def test_sparse_gradients(tmp_path: Path) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(512, 32, sparse=True)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.words(words))

    def loss(model: nn.Module, number: int) -> torch.Tensor:
        words = torch.randint(0, 512, (8, 64), generator=torch.Generator().manual_seed(number))
        return model(words).square().mean()

    check_same(trained(Words, loss, lambda p: torch.optim.SparseAdam(list(p), lr=1e-2)), tmp_path, 0.2)


def test_sparse_weights(tmp_path: Path) -> None:
    """One that learns, and one of a layout that has no optimizer."""

    class Linked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            dense = torch.randn(64, 64) * (torch.rand(64, 64) < 0.2)
            self.links = nn.Parameter(dense.to_sparse_coo())
            self.rows = nn.Parameter(dense.to_sparse_csr(), requires_grad=False)
            self.mix = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = torch.tanh(self.mix(torch.sparse.mm(self.links, x) + self.rows @ x))
            return x

    def program(step: Step) -> Bits:
        model = Linked()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found: Bits = []
        for number in range(STEPS):
            with step():
                loss = square_loss(model, number)
                loss.backward()
                found += bits([loss, model.links.grad, model.mix.weight.grad])
                optimizer.step()
                optimizer.zero_grad()
        return found + bits([model.links, model.mix.weight])

    check_same(program, tmp_path, 0.15)


def test_complex_numbers_and_their_views(tmp_path: Path) -> None:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filter = nn.Parameter(torch.randn(4, 33, dtype=torch.complex64))
            self.mix = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for row in self.filter:
                spectrum = torch.fft.rfft(self.mix(x)) * row
                parts = torch.view_as_real(spectrum)
                x = (
                    torch.tanh(torch.fft.irfft(torch.view_as_complex(parts * 0.5).conj()))
                    + spectrum.real.mean()
                )
            return x

    check_same(trained(Spectral, square_loss), tmp_path, 0.15)


def test_in_place_and_views(tmp_path: Path) -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            buffer = torch.zeros(4, *x.shape)
            for index, layer in enumerate(self.layers):
                x = F.relu(layer(x).mul_(0.5), inplace=True)
                buffer[index].copy_(x)
                x = x.t().contiguous().t()
            left, right = buffer.chunk(2)
            return left.add(right.flip(0)).sum(0)

    check_same(trained(InPlace, square_loss), tmp_path, 0.15)


def test_frozen_weights_are_never_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Low-rank adapters beside large weights that do not learn: these leave once and are only read again."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(256, 256)
            self.base.requires_grad_(False)
            self.down = nn.Linear(256, 4, bias=False)
            self.up = nn.Linear(4, 256, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.base(x) + self.up(self.down(x)))

    def loss(model: nn.Module, number: int) -> torch.Tensor:
        return model(vectors(number, 256)).square().mean()

    program = trained(lambda: nn.Sequential(*(Adapted() for _ in range(6))), loss)
    for _, report in check_same(program, tmp_path, 0.15):
        assert report.loaded_bytes > 256 * 256 * 4
        assert report.moved_bytes_by_kind["weight"] < 256 * 256 * 4


def test_an_edit_of_a_saved_tensor_raises_autograds_own_error(tmp_path: Path) -> None:
    def program(step: Step) -> Bits:
        weight = torch.randn(64, 64, requires_grad=True)
        for number in range(4):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"), step():
                hidden = torch.tanh(weight @ weight)
                loss = (hidden * weight).sum()
                hidden.mul_(2)
                loss.backward()
            with step():
                other = torch.tanh(weight @ weight) @ vectors(number).t()
                other.square().mean().backward()
        return bits([weight.grad])

    check_same(program, tmp_path, 0.3)


def test_an_edit_of_a_weight_before_backward_raises_autograds_own_error(tmp_path: Path) -> None:
    def program(step: Step) -> Bits:
        model, loss_of = model_and_loss()
        for _ in range(3):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"), step():
                loss = loss_of(0)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(1.0)
                loss.backward()
            with step():
                loss_of(1).backward()
        return bits(model.parameters()) + bits(p.grad for p in model.parameters())

    check_same(program, tmp_path, 0.3)
