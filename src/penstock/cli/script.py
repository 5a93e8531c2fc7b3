"""The user's script: from ``SCRIPT.py:build`` to what it builds."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from penstock.errors import InvalidArgument

LossOf = Callable[[Any], torch.Tensor]

WANTED = "model, optimizer, batches, loss"


class Training(NamedTuple):
    """What a script builds. ``loss(model, batch)`` is the scalar to minimise."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterable[Any]
    loss: Callable[[torch.nn.Module, Any], torch.Tensor]

    def step(
        self, batch: Any, accumulate: Callable[[Any, LossOf], torch.Tensor] | None = None
    ) -> torch.Tensor:
        """One iteration. Returns the loss, without its graph.

        accumulate   forward and backward of the batch in parts; None: it is not divided
        """
        if accumulate is None:
            loss = self.loss_of(batch)
            loss.backward()
        else:
            loss = accumulate(batch, self.loss_of)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def loss_of(self, batch: Any) -> torch.Tensor:
        loss = self.loss(self.model, batch)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
            raise InvalidArgument(f"loss(model, batch) returned {what}: let it return a scalar tensor")
        return loss


def load(script: str) -> Callable[[], Training]:
    """The function that builds what ``SCRIPT.py:build`` says. The script's own errors pass through."""
    file, colon, name = script.rpartition(":")
    if not colon or not file or not name:
        raise InvalidArgument(f"{script!r} names no function: write SCRIPT.py:build")
    path = Path(file)
    if not path.is_file():
        raise InvalidArgument(f"there is no script {file}: give the path of a Python file, then :{name}")
    name_of_module = f"penstock_script_{path.stem}"  # its own name could hide a module of the same name
    spec = importlib.util.spec_from_file_location(name_of_module, path)
    if spec is None or spec.loader is None:
        raise InvalidArgument(f"{file} is not a Python file: its name has to end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name_of_module] = module  # dataclasses and pickle look it up
    sys.path.insert(0, str(path.parent.resolve()))  # as if the script were run itself
    spec.loader.exec_module(module)
    build = getattr(module, name, None)
    if not callable(build):
        raise InvalidArgument(f"{file} has no function {name}: define {name}() that returns ({WANTED})")
    return lambda: _checked(build(), f"{name}() in {file}")


def _checked(built: Any, who: str) -> Training:
    if not isinstance(built, tuple) or len(built) != 4:
        what = f"a tuple of {len(built)}" if isinstance(built, tuple) else f"a {type(built).__name__}"
        raise InvalidArgument(f"{who} returned {what}: return ({WANTED})")
    training = Training(*built)
    wrong = [
        f"{name} is a {type(value).__name__}, not {wanted}"
        for name, value, wanted, right in (
            ("model", training.model, "a torch.nn.Module", isinstance(training.model, torch.nn.Module)),
            (
                "optimizer",
                training.optimizer,
                "a torch.optim.Optimizer",
                isinstance(training.optimizer, torch.optim.Optimizer),
            ),
            ("batches", training.batches, "an iterable", isinstance(training.batches, Iterable)),
            ("loss", training.loss, "a function", callable(training.loss)),
        )
        if not right
    ]
    if wrong:
        raise InvalidArgument(f"{who} returned something else: {'; '.join(wrong)}. Return ({WANTED})")
    return training


def first_batch(training: Training) -> Any:
    for batch in training.batches:
        return batch
    raise InvalidArgument("batches is empty: give at least one batch")
