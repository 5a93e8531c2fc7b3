"""What the tests of the integrations share: a small language model, its samples, and what is compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import penstock
from tests.support.runs import EVERYTHING, HARDWARE

WORDS, LENGTH, WIDTH = 96, 16, 64


def language_model() -> torch.nn.Module:
    """A GPT-2 with dropout: its losses tell whether random numbers are drawn in the same order."""
    import transformers

    torch.manual_seed(3)
    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=WIDTH,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return transformers.GPT2LMHeadModel(config)


def samples(count: int, seed: int = 5) -> list[dict[str, torch.Tensor]]:
    words = torch.randint(WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": text, "labels": text} for text in words]


def options(budget: int | str, spill_dir: Path) -> dict[str, Any]:
    """Of `penstock.offload`, with which every tensor of a small model moves."""
    return {
        "device_budget": budget,
        "spill_dir": spill_dir,
        "hardware": HARDWARE,
        "planning": penstock.PlanOptions(smallest_bytes=EVERYTHING, policy="g10"),  # planned in no time
    }


def tight(report: penstock.Report, share: float = 0.25) -> int:
    """A budget between the smallest that a run can keep (0) and all that it takes in memory (1)."""
    return int(report.minimum_bytes + share * (report.peak_bytes - report.minimum_bytes))


def check_moved(report: penstock.Report, budget: int) -> None:
    assert report.peak_bytes <= budget
    assert report.evicted_bytes + report.recomputed_bytes > 0 and report.loaded_bytes > 0
