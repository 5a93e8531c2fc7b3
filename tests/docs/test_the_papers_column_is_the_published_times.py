"""What docs/papers.md says of G10's figures, computed again from the times that its artifact publishes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from math import exp, log
from pathlib import Path
from typing import Any

import pytest

from benchmarks.artifact import published
from tests.support.traces import G10_DATA

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED: dict[str, Any] = json.loads((ROOT / "tests" / "data" / "g10" / "published.json").read_text())
IDEAL_S = {
    model: times["ideal"] for figure in ("fig11", "fig15_batch") for model, times in PUBLISHED[figure].items()
}
MEAN = "figure 11: speed over ideal, geometric mean"


def rows() -> dict[str, tuple[int, float]]:
    """By claim of the table: the number of cells, and the paper's figure."""
    page = (ROOT / "docs" / "papers.md").read_text()
    found = re.findall(r"^\| ([^|]+) \| (\d+) \| ([\d.]+) (%|x) \|", page, re.MULTILINE)
    return {
        claim: (int(cells), float(figure) / (100 if unit == "%" else 1))
        for claim, cells, figure, unit in found
    }


def over_ideal(figure: str) -> Iterator[tuple[str, float | None]]:
    """(model, seconds by G10) of the cells of a figure."""
    for model, cells in PUBLISHED[figure].items():
        if model == "note":
            continue
        for times in [cells] if "prefetch_lru" in cells else cells.values():
            yield model, times["prefetch_lru"] if isinstance(times, dict) else times


def ideal_s(model: str) -> float:
    if model not in IDEAL_S:
        IDEAL_S[model] = published.trace(G10_DATA / f"{model}.json.gz").ideal_s
    return IDEAL_S[model]


def mean(values: Iterable[float]) -> tuple[int, float]:
    logarithms = [log(value) for value in values]
    return len(logarithms), exp(sum(logarithms) / len(logarithms))


@pytest.mark.parametrize(
    ("claim", "figure"),
    [(MEAN, "fig11"), ("figure 15", "fig15_batch"), ("figure 16", "fig16_host"), ("figure 18", "fig18_ssd")],
)
def test_shares_of_the_ideal(claim: str, figure: str) -> None:
    cells = [(model, time_s) for model, time_s in over_ideal(figure) if time_s]
    if missing := {m for m, _ in cells if m not in IDEAL_S and not (G10_DATA / f"{m}.json.gz").exists()}:
        pytest.skip(f"the traces of {', '.join(sorted(missing))} are not here: see PENSTOCK_G10_DATA")
    count, found = mean(ideal_s(model) / time_s for model, time_s in cells)
    assert rows()[claim] == (count, pytest.approx(found, abs=5e-4))


@pytest.mark.parametrize(("claim", "system"), [("FlashNeuron", "FlashNeuron"), ("DeepUM+", "deepUM")])
def test_speed_over_other_systems(claim: str, system: str) -> None:
    times = [cell for cell in PUBLISHED["fig11"].values() if cell[system]]
    count, found = mean(cell[system] / cell["prefetch_lru"] for cell in times)
    assert rows()[f"speed over {claim}, figure 11"] == (count, pytest.approx(found, abs=5e-3))
