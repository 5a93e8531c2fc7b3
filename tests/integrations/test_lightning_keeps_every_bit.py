"""Lightning's Trainer with penstock's callback: the losses, weights and checkpoints that it has without."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import penstock
from penstock.runtime.resident import peak_resident_bytes, reset_peak, resident_bytes
from tests.support.runs import Bits, bits, state_bits
from tests.support.trainers import LENGTH, WIDTH, WORDS, check_moved, options, tight

lightning = pytest.importorskip("lightning.pytorch")

from penstock.integrations.lightning import Penstock  # noqa: E402

EPOCHS = 2


class Model(lightning.LightningModule):
    """Built in `configure_model`, and so inside the run."""

    def __init__(self) -> None:
        super().__init__()
        self.network: torch.nn.Module | None = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.network is None:
            torch.manual_seed(3)
            self.network = torch.nn.Sequential(
                torch.nn.Embedding(WORDS, WIDTH),
                *(torch.nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True) for _ in range(2)),
                torch.nn.Linear(WIDTH, WORDS),
            )
            torch.manual_seed(4)

    def loss(self, words: torch.Tensor) -> torch.Tensor:
        assert self.network is not None
        loss = torch.nn.functional.cross_entropy(self.network(words).flatten(0, 1), words.flatten())
        self.losses.append(loss.item())
        return loss

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("validation", self.loss(batch))

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def words() -> DataLoader[Any]:
    texts = torch.randint(WORDS, (18, LENGTH), generator=torch.Generator().manual_seed(5))
    return DataLoader(texts, batch_size=2)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a loader without workers
        yield


def trainer(folder: Path, *callbacks: Any, **changes: Any) -> Any:
    given = {
        "accelerator": "cpu",
        "max_epochs": EPOCHS,
        "accumulate_grad_batches": 2,  # 9 batches: the last step of an epoch has one
        "val_check_interval": 5,  # amid the batches of a step
        "limit_val_batches": 2,
        "num_sanity_val_steps": 1,
        "gradient_clip_val": 0.5,
        "default_root_dir": folder,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return lightning.Trainer(callbacks=list(callbacks), **given | changes)


def train(folder: Path, *callbacks: Any, **changes: Any) -> tuple[list[float], Bits]:
    module, training = Model(), trainer(folder, *callbacks, **changes)
    training.fit(module, words(), words())
    training.save_checkpoint(folder / "last.ckpt")
    return module.losses, bits(module.parameters()) + state_bits(training.optimizers[0])


@pytest.fixture(scope="module")
def budget(tmp_path_factory: pytest.TempPathFactory) -> int:
    folder = tmp_path_factory.mktemp("generous")
    callback = Penstock(**options("1GiB", folder))
    train(folder, callback)
    assert callback.run is not None
    return tight(callback.run.report())


def test_batches_that_are_accumulated_and_validation(budget: int, tmp_path: Path) -> None:
    losses, expected = train(tmp_path)
    callback = Penstock(**options(budget, tmp_path))
    found_losses, found = train(tmp_path, callback)

    assert found_losses == losses
    assert found == expected
    run = callback.run
    assert run is not None and run.closed
    check_moved(run.report(), budget)


def test_manual_optimization(budget: int, tmp_path: Path) -> None:
    class Manual(Model):
        automatic_optimization = False

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            self.manual_backward(self.loss(batch))
            if batch_idx % 2:
                optimizer.step()
                optimizer.zero_grad()

    def train(*callbacks: Any) -> tuple[list[float], Bits]:
        module = Manual()
        changes: dict[str, Any] = {"accumulate_grad_batches": 1, "gradient_clip_val": None}
        training = trainer(tmp_path, *callbacks, **changes)
        training.fit(module, words(), words())
        return module.losses, bits(module.parameters())

    callback = Penstock(**options(budget, tmp_path))
    assert train() == train(callback)
    assert callback.run is not None
    check_moved(callback.run.report(), budget)


def test_resuming_and_testing(budget: int, tmp_path: Path) -> None:
    train(tmp_path, max_epochs=1)

    def resume(*callbacks: Any) -> tuple[list[float], Bits, Any]:
        module, training = Model(), trainer(tmp_path, *callbacks)
        training.fit(module, words(), words(), ckpt_path=tmp_path / "last.ckpt")
        found = bits(module.parameters()) + state_bits(training.optimizers[0])
        return module.losses, found, training.test(module, words(), verbose=False)

    callback = Penstock(**options(budget, tmp_path))
    assert resume() == resume(callback)
    assert callback.run is not None and callback.run.report().steps == 9  # of the test


def test_checkpoints_are_written_inside_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger than the budget, without a copy in memory, and as the Trainer itself reads them."""
    monkeypatch.setattr("penstock.integrations.lightning.PIECE_BYTES", 1 << 20)

    class Large(Model):
        def configure_model(self) -> None:
            if self.network is None:
                torch.manual_seed(3)
                self.network = torch.nn.Sequential(
                    torch.nn.Embedding(WORDS, 1024),
                    *(torch.nn.Linear(1024, 1024) for _ in range(12)),
                    torch.nn.Linear(1024, WORDS),
                )

    class Saved(lightning.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            gc.collect()
            reset_peak()
            before = resident_bytes()
            trainer.save_checkpoint(tmp_path / "large.ckpt")
            grown.append(peak_resident_bytes() - before)

    grown: list[int] = []
    module = Large()
    training = trainer(tmp_path, Saved(), Penstock(**options("48MiB", tmp_path)), max_steps=1)
    training.fit(module, words())
    saved = torch.load(tmp_path / "large.ckpt", weights_only=False)
    assert bits(saved["state_dict"].values()) == bits(module.state_dict().values())
    size = (tmp_path / "large.ckpt").stat().st_size
    assert size > 140 << 20 and grown[0] < size // 2
    assert not list(tmp_path.glob("*.partial"))


def test_training_that_failed_leaves_no_run_open(budget: int, tmp_path: Path) -> None:
    class Greedy(Model):
        def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
            if len(self.losses) > 8:
                torch.ones(32 << 20)

    callback = Penstock(**options(budget, tmp_path))
    with pytest.raises(penstock.BudgetTooSmall, match=r"128\.0 MiB"):
        trainer(tmp_path, callback).fit(Greedy(), words(), words())
    assert callback.run is not None and callback.run.closed and not callback.run.in_step
