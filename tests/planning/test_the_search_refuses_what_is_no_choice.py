"""What the search is given is checked before it is used as an index; several threads may share one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from penstock._native import PlanSearch
from penstock._native import Replay as NativeReplay
from penstock.core.memory_profile import minimum_bytes
from penstock.planners.optimal.search import FoundPlan, choices, plan_search, search_columns
from penstock.planners.problem import Problem
from penstock.simulator import machine_columns, trace_columns
from tests.support.traces import gpt, machine

TRACE = gpt(layers=2)
PROBLEM = Problem(TRACE, machine(1e9), (minimum_bytes(TRACE) + TRACE.peak_bytes) // 2)
OPTIONS = choices(PROBLEM)
KEPT = ("kept", "kept_begin", "kept_end")


def changed(table: dict[str, Any], name: str, position: int, value: int) -> dict[str, Any]:
    column = table[name].copy()
    column[position] = value
    return {**table, name: column}


@pytest.mark.parametrize(
    "name, position, value, words",
    [
        ("tensor", 0, TRACE.tensors, "names a tensor"),
        ("begin", 0, -1, "names a kernel"),
        ("end", 0, 2 * TRACE.kernels, "names a kernel"),
        ("ready", 0, TRACE.kernels, "names a kernel"),
        ("order", 0, 1, "order"),
        ("order", 0, 10**9, "order"),
        ("allowed", 0, 255, "no known action"),
        ("parent_starts", -1, 7, "parents"),
    ],
)
def test_periods_that_the_trace_lacks_are_refused(name: str, position: int, value: int, words: str) -> None:
    trace, hardware, table = search_columns(PROBLEM, OPTIONS)
    with pytest.raises(ValueError, match=words):
        PlanSearch(trace, hardware, changed(table, name, position, value))


@pytest.mark.parametrize("kept", [(TRACE.tensors, 0, 1), (0, 1, 1), (0, -1, 1), (0, 0, TRACE.kernels + 1)])
def test_what_is_kept_is_checked(kept: tuple[int, int, int]) -> None:
    trace, hardware, table = search_columns(PROBLEM, OPTIONS)
    columns = {name: np.array([value]) for name, value in zip(KEPT, kept, strict=True)}
    with pytest.raises(ValueError, match="what is kept"):
        PlanSearch(trace, hardware, {**table, **columns})
    with pytest.raises(ValueError, match="differ in length"):
        PlanSearch(trace, hardware, {**table, "kept": np.array([0])})


@pytest.mark.parametrize("name", ["begin", "cost_s", "bias", "allowed", "order"])
def test_columns_of_another_length_are_refused(name: str) -> None:
    trace, hardware, table = search_columns(PROBLEM, OPTIONS)
    with pytest.raises(ValueError, match=r"number of periods|differ in length"):
        PlanSearch(trace, hardware, {**table, name: table[name][:-1].copy()})


@pytest.mark.parametrize("name, value", [("birth", -1), ("death", TRACE.kernels + 1), ("producer", 10**6)])
def test_traces_are_checked(name: str, value: int) -> None:
    columns = machine_columns(TRACE, PROBLEM.hardware, PROBLEM.budget_bytes)
    with pytest.raises(ValueError, match="kernel that the trace lacks"):
        NativeReplay(changed(trace_columns(TRACE), name, 0, value), columns)
    with pytest.raises(ValueError, match="differ in length"):
        NativeReplay({**trace_columns(TRACE), name: np.zeros(1, dtype=np.int64)}, columns)
    starts, values = trace_columns(TRACE)["outputs"]
    with pytest.raises(ValueError, match="starts"):
        NativeReplay({**trace_columns(TRACE), "outputs": (starts, values[:-1].copy())}, columns)


def test_choices_for_other_periods_are_refused() -> None:
    search = plan_search(PROBLEM, OPTIONS)
    short, nothing = np.zeros(len(OPTIONS) - 1, dtype=np.int8), np.zeros(len(OPTIONS), dtype=np.int8)
    with pytest.raises(ValueError, match="another number of periods"):
        search.repair(short, True)
    for action, late in ((short, nothing), (nothing, short)):
        with pytest.raises(ValueError, match="another number of periods"):
            search.improve(action, late, 1, 1.0, 0.0, 0.0, 0)
    for wrong in (-1, 1, 6, 127):  # there is no host
        with pytest.raises(ValueError, match="by an action that it cannot take"):
            search.repair(np.full(len(OPTIONS), wrong, dtype=np.int8), True)


def test_two_threads_find_what_one_finds() -> None:
    search = plan_search(PROBLEM, OPTIONS)
    found = search.repair(np.zeros(len(OPTIONS), dtype=np.int8), True)
    assert found is not None

    def improved(seed: int) -> tuple[float, list[int]]:
        best = FoundPlan(*search.improve(found, np.zeros_like(found), 150, 60.0, 0.0, 0.0, seed))
        return best.step_s, best.action.tolist()

    alone = [improved(seed) for seed in range(6)]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(improved, range(6))) == alone
