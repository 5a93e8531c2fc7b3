"""The examples of the README, and of pages that say more of the same, do what they say, as they stand."""

from __future__ import annotations

import itertools
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock import samples

ROOT = Path(__file__).parents[2]


def examples(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """Runs the example of a page that contains a text, with the names that it takes for granted."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    inputs = torch.randn(4, 8, 16)

    def run(page: str, part: str, **more: Any) -> dict[str, Any]:
        (block,) = [block for block in examples(page) if part in block]
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
    names = run("README.md", "for x, y in batches")
    saved = penstock.load("model.safetensors")
    assert torch.equal(saved["weight"], names["model"].weight)
    blocks = [block for block in examples("docs/training.md") if "for x, y in batches" in block]
    assert blocks == examples("README.md")[:1]


def test_the_readme_has_the_table_of_the_measured_page() -> None:
    table = re.findall(r"^\|.*$", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    measured = (ROOT / "docs" / "measured" / "training.md").read_text(encoding="utf-8")
    assert table and "\n".join(table) in measured


def test_planning(run: Callable[..., dict[str, Any]]) -> None:
    model = torch.nn.Linear(64, 64)
    names = run("README.md", "penstock.simulate(", step=lambda: model(torch.ones(8, 64)).sum().backward())
    names["run"].close()
    assert names["timeline"].peak_bytes <= 600 << 20
    (block,) = examples("docs/before-you-run.md")
    assert block in examples("README.md")


def test_checkpoints(run: Callable[..., dict[str, Any]]) -> None:
    names = run("README.md", "into={")
    assert names["state"]["step"] == 3
    assert torch.equal(names["state"]["model"]["weight"], names["model"].weight)
    names = run("docs/checkpoints.md", "into=model")
    names["handle"].wait()
    assert names["found"] == {**names["found"], "step": 3} and names["found"]["model"] is names["model"]
    for _ in range(2):
        names = run("docs/checkpoints.md", "Manager(")
    assert names["manager"].steps() == (4, 5)


def test_samples(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    for label in ("cat", "dog"):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for number in range(3):
            (tmp_path / "photos" / label / f"{number}.bin").write_bytes(bytes(range(12)))

    def decode(sample: Any) -> tuple[torch.Tensor, int]:
        return torch.frombuffer(bytearray(sample.data), dtype=torch.uint8), sample.label

    names = run("README.md", "samples.Loader(", decode=decode)
    assert names["images"].shape == (6, 12) and sorted(names["labels"].tolist()) == [0, 0, 0, 1, 1, 1]
    names["store"].close()
    assert len(samples.mount("photos.store")) == 6


def test_mixtures(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    class EnoughError(Exception):
        pass

    def model(use_cache: bool, **batch: torch.Tensor) -> Any:
        seen.append(batch)
        if len(seen) == 10:
            raise EnoughError
        return types.SimpleNamespace(loss=0)

    for name in ("web", "books"):
        tokens = bytes(2000) if name == "web" else b"\1\0" * 1000
        samples.pack(((f"{index}", tokens) for index in range(30)), tmp_path / f"{name}.store")
    seen: list[dict[str, torch.Tensor]] = []
    with pytest.raises(EnoughError):
        run("docs/samples.md", "samples.Mixture(", samples=samples, model=model)
    assert all(each.shape == (8, 4096) for batch in seen for each in batch.values())
    assert abs(sum(int((batch["input_ids"][:, 0] == 0).sum()) for batch in seen) - 56) <= 1


def packed(folder: Path) -> samples.Store:
    samples.pack(((f"{index}", bytes([index]) * index) for index in range(40)), folder / "a.store")
    return samples.mount(folder / "a.store")


def test_the_generator_for_tensorflow(tmp_path: Path) -> None:
    """Each call gives the whole of the next epoch, in another order."""
    (block,) = [block for block in examples("docs/samples.md") if "def batches" in block]
    with packed(tmp_path) as store:
        names: dict[str, Any] = {"store": store, "epochs": itertools.count()}
        exec(block.partition("\n\n\n")[0], names)
        orders = []
        for _ in range(2):
            rows = [
                bytes(data[begin:end])
                for data, offsets in names["batches"]()
                for begin, end in itertools.pairwise(offsets.tolist())
            ]
            assert sorted(rows) == [bytes([index]) * index for index in range(40)]
            orders.append(rows)
        assert orders[0] != orders[1]


def test_samples_for_tensorflow(tmp_path: Path) -> None:
    tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    (block,) = [block for block in examples("docs/samples.md") if "def batches" in block]
    with packed(tmp_path) as store:
        names: dict[str, Any] = {"store": store, "tf": tf, "itertools": itertools}
        exec(block, names)
        for _ in range(2):
            rows = [bytes(row.numpy()) for batch in names["dataset"] for row in batch]
            assert sorted(rows) == [bytes([index]) * index for index in range(40)]
