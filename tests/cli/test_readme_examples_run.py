"""The examples of the README do what they say, as they stand."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock import samples

README = Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """Runs the example that contains a text, with the names that it takes for granted."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    inputs = torch.randn(4, 8, 16)

    def run(part: str, **more: Any) -> dict[str, Any]:
        (block,) = [block for block in BLOCKS if part in block]
        model = torch.nn.Linear(16, 16)
        names = {
            "torch": torch,
            "penstock": penstock,
            "build_model": lambda: torch.nn.Linear(16, 16),
            "model": model,
            "optimizer": torch.optim.AdamW(model.parameters()),
            "loss_fn": torch.nn.functional.mse_loss,
            "batches": [(batch, batch) for batch in inputs],
            "step": 3,
            **more,
        }
        exec(block.replace("/mnt/nvme", str(tmp_path)), names)
        return names

    return run


def test_training(run: Callable[..., dict[str, Any]]) -> None:
    names = run("for x, y in batches")
    saved = penstock.load("model.safetensors")
    assert torch.equal(saved["weight"], names["model"].weight)


def test_planning(run: Callable[..., dict[str, Any]]) -> None:
    model = torch.nn.Linear(64, 64)
    names = run("penstock.simulate(", step=lambda: model(torch.ones(8, 64)).sum().backward())
    names["run"].close()
    assert names["timeline"].peak_bytes <= 600 << 20


def test_checkpoints(run: Callable[..., dict[str, Any]]) -> None:
    names = run("into=model")
    names["handle"].wait()
    assert names["found"] == {**names["found"], "step": 3} and names["found"]["model"] is names["model"]


def test_samples(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    for label in ("cat", "dog"):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for number in range(3):
            (tmp_path / "photos" / label / f"{number}.bin").write_bytes(bytes(range(12)))

    def decode(sample: Any) -> tuple[torch.Tensor, int]:
        return torch.frombuffer(bytearray(sample.data), dtype=torch.uint8), sample.label

    names = run("samples.Loader(", decode=decode)
    assert names["images"].shape == (6, 12) and sorted(names["labels"].tolist()) == [0, 0, 0, 1, 1, 1]
    names["store"].close()
    assert len(samples.mount("photos.store")) == 6
