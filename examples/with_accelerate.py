"""A loop of one's own with accelerate, two batches a step, in a budget of half its memory.

pip install '.[integrations]', then: python examples/with_accelerate.py
"""

from __future__ import annotations

import itertools
from typing import Any

import gpt
import torch
from accelerate import Accelerator

import penstock
from penstock.integrations.accelerate import offload

CONFIG = gpt.Config(layers=3, width=128, heads=4, context=64, batch=4)


def main(steps: int = 10, device_budget: str = "8MiB", **options: Any) -> penstock.Offload:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = gpt.GPT(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=CONFIG.learning_rate)
    model, optimizer = accelerator.prepare(model, optimizer)
    with offload(accelerator, device_budget=device_budget, **options) as run:
        for text in itertools.islice(gpt.batches(CONFIG), 2 * steps):
            with accelerator.accumulate(model):
                loss = gpt.loss(model, text)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                print(f"loss {loss.item():.3f}")
    return run


if __name__ == "__main__":
    print(main().report())
