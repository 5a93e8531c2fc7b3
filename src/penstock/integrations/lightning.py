"""Train inside a byte budget with Lightning's Trainer, by a callback.

Run with the versions that `penstock.integrations.versions` names; another one is logged once.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any

import torch

from penstock.errors import InvalidArgument
from penstock.integrations.loggers import metrics
from penstock.integrations.steps import EVALUATION, Steps, require_options
from penstock.integrations.versions import missing, warn_if_unknown
from penstock.runtime.run import Offload

try:
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.plugins import TorchCheckpointIO
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
except ImportError as error:
    raise missing("lightning") from error


PIECE_BYTES = 8 << 20


class _Streamed(TorchCheckpointIO):
    """Lightning's checkpoints, of the same format, without the two copies in memory that it writes from."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        if storage_options is not None or not isinstance(url_to_fs(str(path))[0], LocalFileSystem):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        path = Path(LocalFileSystem._strip_protocol(str(path)))
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        with open(partial, "wb") as file:
            torch.save(checkpoint, _Pieces(file))
        partial.replace(path)


class _Pieces:
    """A file that is given no address of memory which is away: the system would refuse it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for begin in range(0, len(view), PIECE_BYTES):
            self._file.write(bytes(view[begin : begin + PIECE_BYTES]))
        return len(view)

    def flush(self) -> None:
        self._file.flush()


class Penstock(Callback):
    """A callback for Lightning's Trainer: it trains and validates in a budget, with the same bits::

        Trainer(max_epochs=3, callbacks=[Penstock(device_budget="8GiB")]).fit(module, loader)

    A step of the run is one of the optimizer's, with all batches that are accumulated for it; each batch of
    validation, test and prediction is one, too. The run opens before `configure_model`, so a model that is
    built there may be larger than the budget, and closes after the Trainer's last hook; the report is logged
    then. With manual optimization a step ends with the batch in which an optimizer has stepped.

    options   those of `penstock.offload`: device_budget, spill_dir and so on
    run       the `penstock.Offload`, None before it is open: ``run.report()``, ``run.plan``

    Raises TypeError for an unknown option; when the Trainer begins, what `penstock.offload` raises, and
    InvalidArgument for a strategy that decides itself where tensors lie.
    """

    def __init__(self, **options: Any) -> None:
        require_options(options)
        warn_if_unknown("lightning")
        self._options = options
        self._steps = Steps()
        self._optimizer_steps = 0  # that the Trainer had counted when the open step began

    @property
    def run(self) -> Offload | None:
        return self._steps.run

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if type(trainer.strategy) not in (SingleDeviceStrategy, DDPStrategy):
            raise InvalidArgument(
                f"{type(trainer.strategy).__name__} decides by itself where tensors lie: take the strategy "
                "'auto' on one device, or 'ddp'"
            )
        device = trainer.strategy.root_device
        on_cpu = device.type == "cpu"
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:  # nobody has asked for another one
            trainer.strategy.checkpoint_io = _Streamed()
        self._steps.open(pl_module if on_cpu else None, **{"device": str(device), **self._options})

    # -- training ------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        if not self._steps.is_open:
            self._optimizer_steps = trainer.global_step
            self._steps.begin()

    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_step > self._optimizer_steps:
            self._steps.end()
            if trainer.loggers and trainer.global_step % trainer.log_every_n_steps == 0:
                numbers = metrics(self.run)
                for logger in trainer.loggers:
                    logger.log_metrics(numbers, step=trainer.global_step)

    def on_train_epoch_end(self, *_: Any, **__: Any) -> None:
        self._steps.end()

    # -- evaluation ----------------------------------------------------------------------------

    def _begin_evaluation(self, *_: Any, **__: Any) -> None:
        if not self._steps.is_open:  # it may be amid batches that are accumulated
            self._steps.begin(EVALUATION)

    def _end_evaluation(self, *_: Any, **__: Any) -> None:
        if self._steps.kind == EVALUATION:
            self._steps.end()

    on_validation_batch_start = on_test_batch_start = on_predict_batch_start = _begin_evaluation
    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _end_evaluation

    # -- the end -------------------------------------------------------------------------------

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._steps.close(exception)

    def teardown(self, *_: Any, **__: Any) -> None:
        self._steps.end()
        self._steps.log_report()
        self._steps.close()
