"""Steps of a run inside loops of other libraries, whose callbacks begin and end them."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch

from penstock.errors import PenstockError
from penstock.options import offload
from penstock.runtime.run import Offload

logger = logging.getLogger("penstock")

EVALUATION = "evaluation"  # the kind of such a step


class AbandonedStep(Exception):
    """Ends a step that was left open by an error in the loop, of which there was no callback."""


class Steps:
    """Opens and closes a run, and begins and ends its steps.

    run   None before `open`
    """

    def __init__(self, run: Offload | None = None) -> None:
        self.run = run
        self.kind: str | None = None  # of the step that is open
        self._step: contextlib.ExitStack | None = None

    def open(self, *known: Any, **options: Any) -> Offload:
        """Returns the open run, or a new one. Ends a step that a failed loop has left open."""
        self.end(AbandonedStep())
        if self.run is None or self.run.closed:
            self.run = offload(*known, **options)
        return self.run

    def begin(self, kind: str | None = None) -> None:
        """Begin a step, unless the run is closed or the program has begun a step itself."""
        if self.run is None or self.run.closed:
            return
        self.end()
        if self.run.in_step:
            return
        step = contextlib.ExitStack()
        step.enter_context(self.run.step(kind))
        self._step, self.kind = step, kind

    @property
    def is_open(self) -> bool:
        return self._step is not None

    def end(self, error: BaseException | None = None) -> None:
        """End the step that `begin` has begun, if there is one.

        error   raised in the step. What the run raises instead of it passes through
        """
        step, self._step, self.kind = self._step, None, None
        if step is None:
            return
        with contextlib.suppress(AbandonedStep):
            try:
                trace = None if error is None else error.__traceback__
                step.__exit__(None if error is None else type(error), error, trace)
            except BaseException as raised:
                if raised is not error:
                    raise

    def log_report(self) -> None:
        """Log the report of the run, at level INFO."""
        if self.run is None:
            return
        try:
            logger.info("%s", self.run.report())
        except PenstockError as error:  # no step has run
            logger.info("%s", error)

    def close(self, error: BaseException | None = None) -> None:
        """Close the run, and the step that is open. Idempotent."""
        try:
            self.end(error)
        finally:
            if self.run is not None:
                self.run.close()

    def evaluate(self, model: torch.nn.Module) -> Callable[[], None]:
        """Make each forward of the model without gradients, outside of a step, a step of the kind
        "evaluation". Returns a function that undoes it."""
        ours = False

        @torch.compiler.disable
        def begins(*_: Any) -> None:
            nonlocal ours
            if not self.is_open and not torch.is_grad_enabled():
                self.begin(EVALUATION)
                ours = self.is_open

        @torch.compiler.disable
        def ends(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            nonlocal ours
            if ours:
                ours = False
                self.end(AbandonedStep() if output is None else None)  # None: forward has raised

        hooks = [
            model.register_forward_pre_hook(begins),
            model.register_forward_hook(ends, always_call=True),
        ]

        def undo() -> None:
            for hook in hooks:
                hook.remove()

        return undo


def require_options(options: dict[str, Any]) -> None:
    """Raises TypeError for an option that `penstock.offload` does not have, before a loop begins."""
    inspect.signature(offload).bind(None, None, **options)
