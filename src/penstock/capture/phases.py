"""The phase that runs now, and the kinds of tensors, as the optimizers' hooks show them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from penstock.core.columns import KINDS, PHASES

FORWARD, BACKWARD, OPTIMIZER = range(len(PHASES))
WEIGHT, GRADIENT, OPTIMIZER_STATE, ACTIVATION, INPUT, WORKSPACE = range(len(KINDS))


class Phases:
    """Finds the current phase from optimizer hooks and autograd, between `enter` and `exit`.

    on_kind   called with tensors and WEIGHT, GRADIENT or OPTIMIZER_STATE: before an optimizer's step with
              its parameters and their gradients, after it with its state
    """

    def __init__(self, on_kind: Callable[[list[torch.Tensor], int], None] | None = None) -> None:
        self._on_kind = on_kind
        self._in_optimizer = False
        self._hooks: list[Any] = []

    def enter(self) -> None:
        self._in_optimizer = False
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def exit(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def current(self) -> int:
        """FORWARD, BACKWARD or OPTIMIZER, of this thread: autograd may run on another one."""
        if self._in_optimizer:
            return OPTIMIZER
        return FORWARD if torch._C._current_autograd_node() is None else BACKWARD

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._in_optimizer = True
        self._report_gradients(optimizer)
        this, *given = args
        if callable(closure := kwargs.get("closure")):
            return args, kwargs | {"closure": self._wrapped(optimizer, closure)}
        if given and callable(given[0]):
            return (this, self._wrapped(optimizer, given[0]), *given[1:]), kwargs
        return None

    def _wrapped(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap the closure of `Optimizer.step`: what it runs is forward and backward."""

        def called() -> Any:
            self._in_optimizer = False
            try:
                return closure()
            finally:
                self._in_optimizer = True
                self._report_gradients(optimizer)

        return called

    def _report_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        if self._on_kind is None:
            return
        weights = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._on_kind(weights, WEIGHT)
        self._on_kind([weight.grad for weight in weights if weight.grad is not None], GRADIENT)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._in_optimizer = False
        if self._on_kind is None:
            return
        states = [state for state in optimizer.state.values() if isinstance(state, Mapping)]
        tensors = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        self._on_kind(tensors, OPTIMIZER_STATE)
