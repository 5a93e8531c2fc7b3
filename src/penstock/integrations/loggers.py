"""What a run measures, as numbers for TensorBoard, W&B, MLflow and others."""

from __future__ import annotations

from penstock.errors import PenstockError
from penstock.runtime.run import Offload

PREFIX = "penstock/"


def metrics(run: Offload | None, kind: str | None = None) -> dict[str, float]:
    """The numbers of ``run.report(kind)``, by names such as "penstock/peak_bytes", for any logger::

        for name, value in metrics(run).items():
            writer.add_scalar(name, value, step)  # TensorBoard's SummaryWriter
        wandb.log(metrics(run), step=step)
        mlflow.log_metrics(metrics(run), step=step)

    Empty before the first step has ended.
    """
    if run is None:
        return {}
    try:
        report = run.report(kind)
    except PenstockError:  # no step has run
        return {}
    return {PREFIX + name: float(value) for name, value in report.as_dict().items()}
