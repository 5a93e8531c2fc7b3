"""What docs/papers.md says of G10's figures, computed again from the results that its artifact publishes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from math import exp, log
from pathlib import Path
from typing import Any

import pytest

from tests.support import traces

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED: dict[str, Any] = json.loads(traces.PUBLISHED.read_text())
IDEAL_S = PUBLISHED["ideal_s"] | {
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


def mean(values: Iterable[float]) -> tuple[int, float]:
    logarithms = [log(value) for value in values]
    return len(logarithms), exp(sum(logarithms) / len(logarithms))


@pytest.mark.parametrize(
    ("claim", "figure"),
    [(MEAN, "fig11"), ("figure 15", "fig15_batch"), ("figure 16", "fig16_host"), ("figure 18", "fig18_ssd")],
)
def test_shares_of_the_ideal(claim: str, figure: str) -> None:
    count, found = mean(IDEAL_S[model] / time_s for model, time_s in over_ideal(figure) if time_s)
    assert rows()[claim] == (count, pytest.approx(found, abs=5e-4))


@pytest.mark.parametrize(("claim", "system"), [("FlashNeuron", "FlashNeuron"), ("DeepUM+", "deepUM")])
def test_speed_over_other_systems(claim: str, system: str) -> None:
    times = [cell for cell in PUBLISHED["fig11"].values() if cell[system]]
    count, found = mean(cell[system] / cell["prefetch_lru"] for cell in times)
    assert rows()[f"speed over {claim}, figure 11"] == (count, pytest.approx(found, abs=5e-3))


@pytest.mark.parametrize(
    ("claim", "system"),
    [("DeepUM+'s writes to the SSD over G10's, figure 14", "deepUM"), ("FlashNeuron's", "FlashNeuron")],
)
def test_bytes_that_wear_the_ssd(claim: str, system: str) -> None:
    cells = [cell for model, cell in PUBLISHED["fig14_ssd_writes"].items() if model != "note"]
    written = [cell for cell in cells if cell[system] is not None]
    found = sum(cell[system] for cell in written) / sum(cell["prefetch_lru"] for cell in written)
    assert rows()[claim] == (len(written), pytest.approx(found, abs=5e-3))
