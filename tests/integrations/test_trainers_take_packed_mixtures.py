"""The example that feeds packed mixtures to trainers: each resumes in the middle of an epoch, to the bit."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 5


@pytest.mark.parametrize("name", ["transformers", "trl", "lightning"])
def test_it_goes_on_where_it_stopped(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in {name, "transformers"}:
        pytest.importorskip(library)
    monkeypatch.syspath_prepend(EXAMPLES)
    example: Any = importlib.import_module("samples_in_trainers")
    train = example.TRAINERS[name]
    whole = train(tmp_path / "whole", STEPS)
    assert len(whole) == STEPS and len(set(whole)) == STEPS
    begun = train(tmp_path / "parts", 2)
    rest = train(tmp_path / "parts", STEPS)
    # Those of transformers keep the losses of earlier calls.
    assert begun == whole[:2] and rest[-3:] == whole[2:]


def test_the_mixture_is_of_whole_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(EXAMPLES)
    example: Any = importlib.import_module("samples_in_trainers")
    loader = example.loader(tmp_path)
    first, second = loader.store.draws()
    assert first / (first + second) == pytest.approx(0.7, abs=1e-3)
    assert all(source.waste < 0.01 for source in loader.store.sources)
    assert next(iter(loader))["input_ids"].shape == (4, example.BLOCK)
