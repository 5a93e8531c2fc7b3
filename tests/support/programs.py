"""Random programs of random operators, views, in-place writes, deletions and autograd.

A program is made from a seed alone. It is a list of steps, each a list of instructions over named values;
run twice, it does the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

Values = dict[int, torch.Tensor]
Instruction = Callable[[Values], None]

PARAMETERS = 4


class Program(NamedTuple):
    """parameters   their sizes; steps   instructions of each kind of step; order   kinds, as they are run"""

    seed: int
    parameters: list[int]
    steps: list[list[Instruction]]
    order: list[int]


def make_program(seed: int, scale: int = 1) -> Program:
    """All sizes are multiples of ``scale``."""
    rng = random.Random(seed)
    parameters = [rng.choice([4, 8, 12, 16]) * scale for _ in range(PARAMETERS)]
    kinds = [_make_step(rng, parameters, scale) for _ in range(rng.choice([1, 1, 2]))]
    order = [rng.randrange(len(kinds)) if step > 1 else 0 for step in range(rng.randint(2, 5))]
    return Program(seed, parameters, kinds, order)


def begin(program: Program, device: str = "cpu") -> Values:
    """The values with which the program begins: parameters, by number from 0 on."""
    torch.manual_seed(program.seed)
    generator = torch.Generator().manual_seed(program.seed)
    values: Values = {}
    for number, size in enumerate(program.parameters):
        made = torch.randn(size, size, generator=generator).to(device)
        values[number] = made.requires_grad_(number % 2 == 0)
    return values


def run_step(program: Program, values: Values, kind: int) -> list[torch.Tensor]:
    """Gives what the step computed. Of its values only parameters stay."""
    for instruction in program.steps[kind]:
        instruction(values)
    results = [value.detach() for number, value in sorted(values.items()) if number >= PARAMETERS]
    for number in [number for number in values if number >= PARAMETERS]:
        del values[number]
    return results


def _make_step(rng: random.Random, parameters: list[int], scale: int) -> list[Instruction]:
    """All values are square; their sizes are known while the step is made."""
    sizes = dict(enumerate(parameters))
    leaves = set(range(0, PARAMETERS, 2))  # those that autograd knows: nothing writes to them
    step: list[Instruction] = []
    fresh = PARAMETERS
    for _ in range(rng.randint(5, 30)):
        draw = rng.random()
        numbers = sorted(sizes)
        first = rng.choice(numbers)
        alike = [number for number in numbers if sizes[number] == sizes[first]]
        second = rng.choice(alike)
        writable = [number for number in numbers if number not in leaves]
        if draw < 0.12 and len(numbers) > PARAMETERS:
            gone = rng.choice([number for number in numbers if number >= PARAMETERS])
            step.append(_delete(gone))
            del sizes[gone]
        elif draw < 0.55:
            make = rng.choice(_MAKERS)
            step.append(_make(make, fresh, first, second, rng.randrange(1000)))
            sizes[fresh] = sizes[first]
            fresh += 1
        elif draw < 0.62:
            size = rng.choice([4, 8, 12, 16]) * scale
            step.append(_new(fresh, size, rng.randrange(1000)))
            sizes[fresh] = size
            fresh += 1
        elif draw < 0.85:
            target = rng.choice(writable)
            alike = [number for number in numbers if sizes[number] == sizes[target]]
            step.append(_write(rng.choice(_WRITERS), target, rng.choice(alike), rng.randrange(1000)))
        elif draw < 0.9:
            step.append(_lists([rng.choice(writable) for _ in range(3)], rng.choice(_LIST_WRITERS)))
        else:
            step.append(_train(rng.choice(sorted(leaves)), rng.randint(1, 4), rng.random() < 0.3))
    return step


# -- instructions ------------------------------------------------------------------------------------


def _delete(gone: int) -> Instruction:
    def instruction(values: Values) -> None:
        del values[gone]

    return instruction


def _new(number: int, size: int, seed: int) -> Instruction:
    def instruction(values: Values) -> None:
        made = torch.randn(size, size, generator=torch.Generator().manual_seed(seed))
        values[number] = made.to(values[0].device)

    return instruction


def _make(make: Callable[..., torch.Tensor], number: int, first: int, second: int, seed: int) -> Instruction:
    def instruction(values: Values) -> None:
        torch.manual_seed(seed)
        with torch.no_grad():
            values[number] = make(values[first], values[second])

    return instruction


def _write(write: Callable[..., Any], target: int, source: int, seed: int) -> Instruction:
    def instruction(values: Values) -> None:
        torch.manual_seed(seed)
        with torch.no_grad():
            write(values[target], values[source])

    return instruction


def _lists(targets: list[int], write: Callable[..., Any]) -> Instruction:
    def instruction(values: Values) -> None:
        with torch.no_grad():
            write([values[target] for target in dict.fromkeys(targets)])

    return instruction


def _train(leaf: int, depth: int, twice: bool) -> Instruction:
    """Forward, backward and a step of an optimizer."""

    def instruction(values: Values) -> None:
        weight = values[leaf]
        x = weight
        for layer in range(depth):
            x = _LAYERS[layer % len(_LAYERS)](x, weight)
        loss = x.square().mean()
        if twice:
            loss.backward(retain_graph=True)
        loss.backward()
        with torch.no_grad():
            assert weight.grad is not None
            weight.add_(weight.grad.clamp(-1, 1), alpha=-0.01)
        weight.grad = None

    return instruction


_LAYERS: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda x, w: torch.tanh(x @ w),
    lambda x, w: F.layer_norm(x + w, x.shape[-1:]),
    lambda x, w: F.dropout(x.t().contiguous(), 0.25),
    lambda x, w: F.softmax(x.view(-1, 2), -1).view_as(w) * w,
]

_MAKERS: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda x, y: x + y,
    lambda x, y: x.clamp(-2, 2) @ y.clamp(-2, 2),
    lambda x, y: torch.relu(x),
    lambda x, y: x.t(),  # a view, alive beside its base
    lambda x, y: x.view(-1).view(x.shape[0], -1) if x.is_contiguous() else x.clone(),
    lambda x, y: torch.cat([x[:2], y[2:]]),
    lambda x, y: x.sort(-1)[0],
    lambda x, y: torch.where(x > y, x, y),
    lambda x, y: F.dropout(x, 0.5),
    lambda x, y: torch.randn_like(x),
    lambda x, y: x.index_select(0, torch.arange(x.shape[0] - 1, -1, -1, device=x.device)),
    lambda x, y: x.double().float(),
    lambda x, y: torch.view_as_complex(x.reshape(-1, 2)).conj().mul(2).abs().repeat(2).view(x.shape),
    lambda x, y: x.cumsum(0) - y.sum(1, keepdim=True),
    lambda x, y: x.detach(),
    lambda x, y: x.expand(1, *x.shape)[0],
]

_WRITERS: list[Callable[[torch.Tensor, torch.Tensor], Any]] = [
    lambda x, y: x.add_(1),
    lambda x, y: x.copy_(y.clone()),
    lambda x, y: x[1:3].copy_(y[:2].clone()),
    lambda x, y: x.t().mul_(0.5),
    lambda x, y: x.zero_(),
    lambda x, y: x.clamp_(-1, 1).sub_(y.clone()),
    lambda x, y: x.diagonal().fill_(3),
    lambda x, y: torch.sub(x.clone(), y.clone(), out=x) if x.is_contiguous() else x.neg_(),
    lambda x, y: x.normal_(),
    lambda x, y: x.set_(y.clone()),
]

_LIST_WRITERS: list[Callable[[list[torch.Tensor]], Any]] = [
    lambda xs: torch._foreach_add_(xs, 1.0),
    lambda xs: torch._foreach_mul_(xs, 0.5),
    torch._foreach_neg_,
]
