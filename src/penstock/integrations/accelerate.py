"""Train inside a byte budget in a loop of one's own with Hugging Face's accelerate.

Run with the versions that `penstock.integrations.versions` names; another one is logged once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from penstock.errors import InvalidArgument
from penstock.integrations.steps import Steps, require_options
from penstock.integrations.versions import missing, warn_if_unknown
from penstock.runtime.run import Offload

try:
    from accelerate import Accelerator
    from accelerate.utils import DistributedType
except ImportError as error:
    raise missing("accelerate") from error

TENSORS_STAY = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def offload(accelerator: Accelerator, *, run: Offload | None = None, **options: Any) -> Offload:
    """A run whose steps are those of the accelerator's loop. Called after ``prepare``, once::

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        with penstock.integrations.accelerate.offload(accelerator, device_budget="8GiB") as run:
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(loss(model, batch))
                    optimizer.step()
                    optimizer.zero_grad()

    A step begins with the first ``accelerator.accumulate`` and ends with the one that synchronizes gradients,
    after which the optimizer has stepped. A loop without ``accumulate`` says ``with run.step():`` around the
    same. Each forward of a prepared model without gradients, outside of a step, is a step, too. Files of
    ``accelerator.save_state`` and ``save_model`` are written inside the budget. All that lasts until
    ``run.close()``, or the end of ``with``.

    run       one that is open, inside of which the model was built; None: it is opened here
    options   those of `penstock.offload`

    Raises TypeError for an unknown option, what `penstock.offload` raises, and InvalidArgument where the
    accelerator's own plug-in decides where tensors lie, or where ``run`` comes with options.
    """
    warn_if_unknown("accelerate")
    if accelerator.distributed_type not in TENSORS_STAY:
        raise InvalidArgument(
            f"this accelerator uses {accelerator.distributed_type.value}, which moves tensors by itself: "
            "leave it out, or penstock"
        )
    if run is not None and options:
        raise InvalidArgument(
            f"the run is open, and its options are given: leave out {', '.join(sorted(options))}, or run"
        )
    models, optimizers = accelerator._models, accelerator._optimizers
    steps = Steps(run)
    if run is None:
        require_options(options)
        run = steps.open(
            torch.nn.ModuleList(models) if models else None, optimizers[0] if optimizers else None, **options
        )
    _bracket(accelerator, steps)
    for model in models:
        run.at_close(steps.evaluate(model))
    return run


def _bracket(accelerator: Accelerator, steps: Steps) -> None:
    """From now on the accelerator's `accumulate` begins and ends steps, while the run is open."""
    accumulate = accelerator.accumulate

    @contextlib.contextmanager
    def in_steps(*models: torch.nn.Module) -> Iterator[None]:
        if not steps.is_open:
            steps.begin()
        try:
            with accumulate(*models):
                yield
        except BaseException as error:
            steps.end(error)
            raise
        if accelerator.sync_gradients:
            steps.end()

    accelerator.accumulate = in_steps
    assert steps.run is not None

    def undo() -> None:
        steps.end()
        if accelerator.accumulate is in_steps:
            accelerator.accumulate = accumulate

    steps.run.at_close(undo)
