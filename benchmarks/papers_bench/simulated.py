"""G10's evaluation: simulated, on its own traces, and named so everywhere."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import artifact
import numpy as np
from planning import paging, published, published_part
from planning.cells import DATA, SHIPPED, cells, trace_of

import penstock
from papers_bench.rows import Row
from penstock.errors import PenstockError
from penstock.units import format_decimal_bytes

SYSTEMS = {"FlashNeuron": "flashneuron_g10", "deepUM": "deepUM"}  # published name -> outcome's
SAYS = {"FlashNeuron": "FlashNeuron", "deepUM": "DeepUM+"}


def g10(quick: bool, time_limit_s: float, tell: Callable[[str], None]) -> tuple[list[Row], dict[str, Any]]:
    options = argparse.Namespace(
        figures={11} if quick else {11, 15, 16, 18},
        only="",
        quick=quick,
        time_limit=time_limit_s,
        jobs=len(os.sched_getaffinity(0)),
    )
    part = published_part.measure(options, lambda text: tell(f"simulated: {text}"))
    found = part["cells"]
    rows = [*_figures(found), *_against(found)]
    tell("simulated: bytes written to the SSD")
    models = sorted({cell["model"] for cell in found if cell["figure"] == 11})
    with ProcessPoolExecutor(options.jobs) as pool:
        writes = dict(zip(models, pool.map(_writes, models, [time_limit_s] * len(models)), strict=True))
    rows += _lifetime(writes)
    return rows, {**part, "disk_write_bytes": writes}


def _mean(values: Iterable[float]) -> float:
    return float(np.exp(np.mean(np.log(list(values)))))


def _where(found: list[dict[str, Any]]) -> str:
    traces = "the three traces of a clone" if DATA.samefile(SHIPPED) else "all traces"
    return f"{len(found)} cells, {traces}"


def _time(cell: dict[str, Any], way: str) -> float | None:
    outcome = cell["outcomes"].get(way)
    return None if outcome is None else outcome["predicted_s"]


def _figures(found: list[dict[str, Any]]) -> list[Row]:
    """By figure: our plans against the published G10."""
    rows = []
    for figure in (11, 15, 16, 18):
        chosen = [
            cell
            for cell in found
            if cell["figure"] == figure and cell["published_s"].get("prefetch_lru") and _time(cell, "optimal")
        ]
        if not chosen:
            rows.append(
                Row("G10", f"figure {figure}", "", "not simulated", "left out by --quick, or no trace")
            )
            continue

        def ideal(cell: dict[str, Any]) -> float:
            return float(cell["outcomes"]["optimal"]["ideal_s"])

        theirs = _mean(ideal(cell) / cell["published_s"]["prefetch_lru"] for cell in chosen)
        own = _mean(ideal(cell) / cell["outcomes"]["g10_artifact"]["predicted_s"] for cell in chosen)
        ours = _mean(ideal(cell) / cell["outcomes"]["optimal"]["predicted_s"] for cell in chosen)
        slower = sum(
            cell["outcomes"]["optimal"]["predicted_s"] > cell["published_s"]["prefetch_lru"]
            for cell in chosen
        )
        rows.append(
            Row(
                "G10",
                f"figure {figure}: speed over ideal, geometric mean",
                f"{theirs:.1%}",
                f"{ours:.1%} `optimal`, {own:.1%} `g10_artifact`",
                f"{_where(chosen)}; `optimal` slower than the published G10 in {slower}",
                ours / theirs,
            )
        )
    noise = [one for cell in found if cell["figure"] == 11 for one in cell["outcomes"]["optimal"]["noisy"]]
    if noise:
        rows.append(
            Row(
                "G10",
                "figure 19: loss with kernel times off by up to 20 %",
                "below 0.5 %",
                f"{np.mean(noise):.2%} in the mean, {max(noise):.2%} at worst",
                f"`optimal`, {len(noise)} draws on the cells of figure 11",
            )
        )
    return rows


def _against(found: list[dict[str, Any]]) -> list[Row]:
    rows = []
    for name, simulated in SYSTEMS.items():
        chosen = [
            cell
            for cell in found
            if cell["figure"] == 11 and cell["published_s"].get(name) and _time(cell, simulated)
        ]
        if not chosen:
            continue
        theirs = _mean(cell["published_s"][name] / cell["published_s"]["prefetch_lru"] for cell in chosen)
        own = _mean(_time(cell, simulated) / _time(cell, "g10_artifact") for cell in chosen)  # type: ignore[operator]
        ours = _mean(_time(cell, simulated) / _time(cell, "optimal") for cell in chosen)  # type: ignore[operator]
        rows.append(
            Row(
                "G10",
                f"speed over {SAYS[name]}, figure 11, geometric mean",
                f"{theirs:.2f} x",
                f"{ours:.2f} x `optimal`, {own:.2f} x `g10_artifact`",
                f"{_where(chosen)}; {SAYS[name]} simulated here too",
                ours / theirs,
            )
        )
    return rows


def _writes(model: str, time_limit_s: float) -> dict[str, float | None]:
    """Bytes that an iteration of figure 11 writes to the SSD, by system."""
    (cell,) = (one for one in cells() if one.figure == 11 and one.model == model)
    trace, hardware = trace_of(model), published.simulated_on(cell)
    found: dict[str, float | None] = {}
    for policy in ("g10_artifact", "flashneuron_g10", "optimal"):
        try:
            made = artifact.plan(trace, hardware, policy, time_limit_s=time_limit_s)
            found[policy] = penstock.simulate(trace, made, hardware).moved_bytes("disk_write")
        except PenstockError:
            found[policy] = None
    for row in paging.rows(cell):
        found[paging.POLICIES[row["policy"]]] = row["moved_bytes"].get("disk_write", 0)
    return found


def _lifetime(writes: dict[str, dict[str, float | None]]) -> list[Row]:
    """What wears the SSD: bytes that other systems write to it, over ours, in the cells of figure 14."""
    published_writes = json.loads((SHIPPED / "published.json").read_text())["fig14_ssd_writes"]
    rows = []
    for name, simulated in SYSTEMS.items():
        used = [
            (published_writes[model], by)
            for model, by in writes.items()
            if published_writes[model][name] is not None
            and None not in (by[simulated], by["optimal"], by["g10_artifact"])
        ]
        if not used:
            continue
        sums = {way: sum(by[way] or 0.0 for _, by in used) for way in ("g10_artifact", "optimal", simulated)}
        theirs = sum(by[name] for by, _ in used) / sum(by["prefetch_lru"] for by, _ in used)
        ratios = {way: sums[simulated] / sums[way] for way in ("optimal", "g10_artifact") if sums[way]}
        rows.append(
            Row(
                "G10",
                f"writes to the SSD, and so its life, figure 14: {SAYS[name]} over G10",
                f"{theirs:.2f} x",
                ", ".join(f"{ratio:.2f} x `{way}`" for way, ratio in ratios.items()) or "nothing written",
                f"sums over {len(used)} cells: {SAYS[name]} {format_decimal_bytes(sums[simulated])} an "
                f"iteration, `g10_artifact` {format_decimal_bytes(sums['g10_artifact'])}, `optimal` "
                f"{format_decimal_bytes(sums['optimal'])}",
                ratios["optimal"] / theirs if theirs and "optimal" in ratios else None,
            )
        )
    return rows
