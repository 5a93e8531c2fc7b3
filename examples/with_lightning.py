"""A LightningModule that is built, trained and validated in a budget of half its memory.

pip install '.[integrations]', then: python examples/with_lightning.py
"""

from __future__ import annotations

import itertools
from typing import Any

import gpt
import lightning.pytorch as lightning
import torch
from torch.utils.data import DataLoader

from penstock.integrations.lightning import Penstock

CONFIG = gpt.Config(layers=3, width=128, heads=4, context=64, batch=4)


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model: gpt.GPT | None = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = gpt.GPT(CONFIG)

    def training_step(self, text: torch.Tensor) -> torch.Tensor:
        assert self.model is not None
        return gpt.loss(self.model, text)

    def validation_step(self, text: torch.Tensor) -> None:
        assert self.model is not None
        self.log("validation", gpt.loss(self.model, text), prog_bar=True, batch_size=len(text))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=CONFIG.learning_rate)


def main(steps: int = 10, device_budget: str = "8MiB", **options: Any) -> Penstock:
    texts = list(itertools.islice(gpt.batches(CONFIG), 2 * steps + 2))
    penstock = Penstock(device_budget=device_budget, **options)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        accumulate_grad_batches=2,
        callbacks=[penstock],
        enable_checkpointing=False,
        logger=False,
    )
    training, validation = (DataLoader(part, batch_size=None) for part in (texts[2:], texts[:2]))
    trainer.fit(Module(), training, validation)
    return penstock


if __name__ == "__main__":
    run = main().run
    assert run is not None
    print(run.report())
