"""Train inside a byte budget with the Trainer of transformers, and with what is made of it, such as TRL's.

Run with the versions that `penstock.integrations.versions` names; another one is logged once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from penstock.errors import InvalidArgument
from penstock.integrations.hub import load
from penstock.integrations.loggers import metrics
from penstock.integrations.steps import Steps, require_options
from penstock.integrations.versions import missing, warn_if_unknown
from penstock.runtime.run import Offload

try:
    from transformers import TrainerCallback, TrainingArguments
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
    from transformers.trainer_callback import CallbackHandler
except ImportError as error:
    raise missing("transformers") from error

__all__ = ["Penstock", "load"]


class Penstock(TrainerCallback):
    """A callback for `transformers.Trainer`: it trains and evaluates in a budget, with the same bits::

        Trainer(model, args, train_dataset=..., callbacks=[Penstock(device_budget="8GiB")]).train()

    A step of the run is one of the Trainer's: all micro-batches that it accumulates, clipping, the optimizer
    and its schedule. Each batch of an evaluation is a step, too. The run is open while `train` runs; the
    report is logged at its end, and its numbers, such as "penstock/stall_s", go to the Trainer's loggers
    (`report_to`) with the losses. A model larger than the budget is built inside of it, and what comes before
    and after `train` (`evaluate`, `save_model`) stays in the budget as well, by ::

        with Penstock(device_budget="8GiB", spill_dir="/mnt/nvme") as penstock:
            model = AutoModelForCausalLM.from_config(config)
            Trainer(model, args, train_dataset=..., callbacks=[penstock]).train()

    options   those of `penstock.offload`: device_budget, spill_dir and so on; with ``with`` on a GPU, device
    run       the `penstock.Offload`, None before it is open: ``run.report()``, ``run.plan``

    Where `train` fails without ``with``, the run stays open, until the next `train` or `close`.

    Raises TypeError for an unknown option; when training begins, what `penstock.offload` raises, and
    InvalidArgument where something else (DeepSpeed, FSDP, DataParallel) decides where tensors lie.
    """

    def __init__(self, **options: Any) -> None:
        require_options(options)
        warn_if_unknown("transformers")
        self._options = options
        self._steps = Steps()
        self._is_context = False
        self._undo: list[Any] = []

    @property
    def run(self) -> Offload | None:
        return self._steps.run

    # -- the Trainer's events, in their order --------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, *_: Any, model: Any = None, optimizer: Any = None, **__: Any
    ) -> None:
        _require_own_tensors(args)
        self._leave()
        self._steps.open(model, optimizer, **self._options)
        self._undo.append(_log_metrics_of(self))
        if model is not None:
            self._undo.append(self._steps.evaluate(model))

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._steps.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._steps.end()

    on_epoch_end = on_step_end  # one that is stopped amid the batches that are accumulated

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._steps.end()
        self._steps.log_report()
        if not self._is_context:
            self.close()

    # -- around it -----------------------------------------------------------------------------

    def close(self) -> None:
        """Close the run. Idempotent."""
        self._leave()
        self._steps.close()

    def _leave(self) -> None:
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Penstock:
        self._steps.open(**self._options)
        self._is_context = True
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._is_context = False
        self._leave()
        self._steps.close(error)


def _log_metrics_of(callback: Penstock) -> Callable[[], None]:
    """Add the metrics of the run to those that loggers of the callback's Trainer get. Returns a function that
    undoes it.

    A callback cannot do that by itself: loggers are called before it, and it knows neither them nor the
    Trainer.
    """
    before = CallbackHandler.on_log
    loggers = tuple(INTEGRATION_TO_CALLBACK.values())

    @functools.wraps(before)
    def on_log(handler: Any, args: Any, state: Any, control: Any, *given: Any, **named: Any) -> Any:
        control = before(handler, args, state, control, *given, **named)
        if callback in handler.callbacks and (numbers := metrics(callback.run)):
            for logger in handler.callbacks:
                if isinstance(logger, loggers):
                    logger.on_log(args, state, control, model=handler.model, logs=dict(numbers))
        return control

    CallbackHandler.on_log = on_log

    def undo() -> None:
        if CallbackHandler.on_log is on_log:
            CallbackHandler.on_log = before

    return undo


def _require_own_tensors(args: TrainingArguments) -> None:
    for name in ("DeepSpeed", "FSDP"):
        if getattr(args, name.lower(), None):
            raise InvalidArgument(
                f"the TrainingArguments use {name}, which moves tensors by itself: leave it out, or penstock"
            )
    if args.n_gpu > 1:
        raise InvalidArgument(
            f"the Trainer would use DataParallel on {args.n_gpu} GPUs: start it by torchrun, a process for "
            "each GPU, or show it one GPU by CUDA_VISIBLE_DEVICES"
        )
