"""Models of transformers, and adapters of peft: the bits of the in-memory run, at any budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.language_models import language_model
from tests.support.runs import Way, check_same, training

STEPS = 6  # one that makes the optimizer's state, one traced, three recorded, one at full speed


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "mixtral", "lora"])
def test_same_bits(name: str, tmp_path: Path) -> None:
    # The router of the experts may send all words to one of them in a step that was not recorded.
    least = 0.5 if name == "mixtral" else 0.0
    program = training(language_model(name), STEPS, way=Way(clipped=True))
    for _, report in check_same(program, tmp_path, least, 0.6):
        assert report.evicted_bytes + report.recomputed_bytes > 0
        if name == "lora":  # frozen weights come back again and again, and are written once
            assert report.moved_bytes_by_kind["weight"] == 0
