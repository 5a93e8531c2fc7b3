"""What a run measures reaches the loggers of the trainers, and those of a plain loop."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.integrations.loggers import metrics
from tests.support.runs import HARDWARE
from tests.support.trainers import language_model, samples

NAMES = {"penstock/peak_bytes", "penstock/stall_s", "penstock/predicted_step_s", "penstock/steps"}

G10 = penstock.PlanOptions(policy="g10")


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard finds in a folder: (step, value) by name."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(folder)).Reload()
    return {name: [(e.step, e.value) for e in found.Scalars(name)] for name in found.Tags()["scalars"]}


def run_of(folder: Path) -> penstock.Offload:
    return penstock.offload(device_budget="64MiB", spill_dir=folder, hardware=HARDWARE, planning=G10)


def stepped(run: penstock.Offload) -> None:
    weight = torch.nn.Parameter(torch.randn(64, 64))
    with run.step():
        weight.square().sum().backward()


def test_a_plain_loop(tmp_path: Path) -> None:
    with run_of(tmp_path) as run:
        assert metrics(run) == {} == metrics(None), "no step has ended"
        stepped(run)
        found = metrics(run)
        assert found.keys() >= NAMES and all(type(value) is float for value in found.values())
        assert found["penstock/peak_bytes"] == run.report().peak_bytes


def test_tensorboard(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard", reason="tensorboard is not installed")
    with run_of(tmp_path) as run, tensorboard.SummaryWriter(str(tmp_path / "events")) as writer:
        for step in (1, 2):
            stepped(run)
            for name, value in metrics(run).items():
                writer.add_scalar(name, value, step)
    assert [step for step, _ in scalars(tmp_path / "events")["penstock/peak_bytes"]] == [1, 2]


def test_mlflow(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    with run_of(tmp_path) as run, mlflow.start_run() as logged:
        stepped(run)
        mlflow.log_metrics(metrics(run), step=1)
    assert mlflow.get_run(logged.info.run_id).data.metrics.keys() >= NAMES


def test_wandb(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    with run_of(tmp_path) as run, wandb.init(mode="offline", dir=str(tmp_path)) as logged:
        stepped(run)
        logged.log(metrics(run), step=1)
    (written,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert all(name.encode() in written.read_bytes() for name in NAMES)


def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    utils = pytest.importorskip("transformers.integrations.integration_utils")
    from penstock.integrations.transformers import Penstock

    class Logger(utils.TensorBoardCallback):  # type: ignore[misc, name-defined]
        """Takes the place of one that is installed: a class of the kind that `report_to` names."""

        def __init__(self) -> None:
            self.told: list[tuple[int, dict[str, Any]]] = []

        def on_train_begin(self, *_: Any, **__: Any) -> None: ...

        def on_train_end(self, *_: Any, **__: Any) -> None: ...

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            self.told.append((state.global_step, logs))

    logger = Logger()
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=4, logging_steps=2, use_cpu=True, report_to=[], disable_tqdm=True
    )
    callback = Penstock(device_budget="64MiB", spill_dir=tmp_path, hardware=HARDWARE, planning=G10)
    trainer = transformers.Trainer(
        language_model(), arguments, train_dataset=samples(8), callbacks=[logger, callback]
    )
    trainer.train()
    steps = [step for step, logs in logger.told if logs.keys() >= NAMES]
    assert steps[:2] == [2, 4]
    assert [step for step, logs in logger.told if "loss" in logs] == [2, 4], "losses come as before"
    assert not any("penstock/steps" in entry for entry in trainer.state.log_history)
    before = len(logger.told)
    trainer.log({"after": 1.0})
    assert len(logger.told) == before + 1, "no run is open any more"


def test_the_trainer_of_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    loggers = pytest.importorskip("lightning.pytorch.loggers")
    from penstock.integrations.lightning import Penstock

    class Model(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(64, 64)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    logger = loggers.CSVLogger(str(tmp_path))
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=4,
        log_every_n_steps=2,
        logger=logger,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Penstock(device_budget="64MiB", spill_dir=tmp_path, hardware=HARDWARE, planning=G10)],
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(list(torch.randn(8, 64)), batch_size=2))
    with open(Path(logger.log_dir) / "metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row.get("penstock/steps")]
    assert [int(row["step"]) for row in rows] == [2, 4]
    assert all(float(row["penstock/peak_bytes"]) > 0 for row in rows) and set(rows[0]) >= NAMES
