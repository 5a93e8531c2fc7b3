"""Part one: the published cells."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import penstock
from planning import paging, published
from planning.cells import Cell, cells, trace_of, trace_path
from planning.runs import OFFLOAD, RECOMPUTE, Outcome, run, run_all

QUICK = ("BERT-256", "VIT-1280")


def measure(options: argparse.Namespace, tell: Callable[[str], None]) -> dict[str, Any]:
    wanted = [
        cell
        for cell in cells()
        if cell.figure in options.figures
        and options.only in cell.key
        and (not options.quick or cell.model in QUICK)
        and trace_path(cell.model).exists()
    ]
    figures: dict[str, set[int]] = {}
    by_key: dict[str, Cell] = {}
    for cell in wanted:
        figures.setdefault(cell.key, set()).add(cell.figure)
        # Of cells that are the same problem, the one of the figure that had the most systems.
        known = by_key.setdefault(cell.key, cell)
        if len(cell.published_s) > len(known.published_s):
            by_key[cell.key] = cell
    tasks = {
        key: (measure_cell, (cell, sorted(figures[key]), options.time_limit)) for key, cell in by_key.items()
    }
    outcomes = run_all(tasks, options.jobs, tell)
    return {
        "cells": [
            {
                "figure": cell.figure,
                "cell": cell.key,
                "model": cell.model,
                "published_s": dict(cell.published_s),
                "outcomes": {outcome["way"]: outcome for outcome in outcomes[cell.key]},
            }
            for cell in wanted
        ]
    }


def measure_cell(cell: Cell, figures: list[int], time_limit_s: float) -> list[Outcome]:
    """Every way that a figure of this cell needs.

    The baselines run as the artifact ran them. `optimal` plans and runs on the machine on which the
    artifact's simulator ran G10, whose links are a little slower than those that G10 planned for.
    """
    trace, hardware = trace_of(cell.model), published.simulated_on(cell)
    compared = {11, 15, 18} & set(figures)
    found = [as_published(trace, "g10_artifact", lambda: published.g10_row(cell))]
    if 11 in figures:
        for policy in ("g10_gds", "g10_host"):
            found.append(as_published(trace, policy, lambda policy=policy: published.g10_row(cell, policy)))
    if compared:
        found.append(as_published(trace, "flashneuron_g10", lambda: published.flashneuron_row(cell)))
        for row in paging.rows(cell):
            name = paging.POLICIES[row["policy"]]
            found.append(Outcome(name, row["faster_s"], trace.ideal_s, bound_s=trace.ideal_s))
    for way in (OFFLOAD, RECOMPUTE) if 11 in figures else (OFFLOAD,):
        found.append(run(trace, hardware, way, time_limit_s=time_limit_s, noise=11 in figures))
    return found


def as_published(trace: penstock.Trace, way: str, made: Callable[[], dict[str, Any]]) -> Outcome:
    began_s = time.perf_counter()
    row = made()
    planning_s = time.perf_counter() - began_s
    failed = row.get("error", "")
    return Outcome(way, row["step_s"], trace.ideal_s, trace.ideal_s, planning_s, failed=failed)
