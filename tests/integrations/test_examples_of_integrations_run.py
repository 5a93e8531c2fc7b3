"""The examples of the integrations, from their own code, in a few steps."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

import penstock
from tests.support.runs import HARDWARE

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 3

# By example: the libraries that it needs.
NEEDED = {
    "with_accelerate": ["accelerate"],
    "with_lightning": ["lightning"],
    "with_transformers": ["transformers"],
    "with_trl_and_peft": ["trl", "peft"],
}


@pytest.mark.parametrize("name", sorted(NEEDED))
def test_it_trains_in_its_budget(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in NEEDED[name]:
        pytest.importorskip(library)
    monkeypatch.syspath_prepend(EXAMPLES)
    example: Any = importlib.import_module(name)
    made = example.main(
        steps=STEPS, spill_dir=tmp_path, hardware=HARDWARE, planning=penstock.PlanOptions(policy="g10")
    )

    run = made if isinstance(made, penstock.Offload) else made.run
    assert run.closed
    report = run.report()
    assert report.steps >= STEPS
    assert report.peak_bytes <= report.device_budget_bytes
    assert report.evicted_bytes + report.loaded_bytes + report.recomputed_bytes > 0


def test_each_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("with_*.py")} == set(NEEDED)
