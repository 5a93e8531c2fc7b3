"""Resident bytes, as the operating system counts them, keep the budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import training

MIB = 1 << 20
CODE_BYTES = 80 * MIB  # for code and libraries, the solver and what it holds among them


@pytest.fixture(scope="module")
def in_memory() -> dict[str, Any]:
    return training.outcome()


@pytest.fixture(scope="module")
def generous(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """With more than it needs."""
    return training.outcome(budget="2GiB", spill_dir=str(tmp_path_factory.mktemp("generous")), steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.4], ids=["minimum", "middle"])
def test_resident_growth_keeps_the_budget(
    share: float, in_memory: dict[str, Any], generous: dict[str, Any], tmp_path: Path
) -> None:
    least, most = generous["report"]["minimum_bytes"], generous["report"]["peak_bytes"]
    budget_bytes = int(least + share * (most - least))

    offloaded = training.outcome(budget=budget_bytes, spill_dir=str(tmp_path))

    assert offloaded["losses"] == in_memory["losses"]
    assert offloaded["growth_bytes"] <= 1.05 * budget_bytes + CODE_BYTES
    assert in_memory["growth_bytes"] > 1.05 * budget_bytes + CODE_BYTES
    report = offloaded["report"]
    assert report["peak_bytes"] <= budget_bytes
    assert abs(report["predicted_peak_bytes"] / report["peak_bytes"] - 1) <= 0.05


@pytest.mark.slow
def test_a_limit_of_the_operating_system_is_kept_where_the_in_memory_run_is_refused(tmp_path: Path) -> None:
    size = {"batch": 10, "steps": 2}
    generous = training.outcome(budget="2GiB", spill_dir=str(tmp_path), **size)
    least, most = generous["report"]["minimum_bytes"], generous["report"]["peak_bytes"]
    # The limit counts addresses: 8 MiB for the stack of each thread, of which there are up to 12.
    growth_limit = least + CODE_BYTES + 12 * 8 * MIB
    assert most > growth_limit + 32 * MIB

    refused = training.start(growth_limit=growth_limit, **size).end(300)
    assert refused.returncode > 0
    assert "memory" in refused.stderr.lower()

    finished = training.outcome(budget=least, spill_dir=str(tmp_path), growth_limit=growth_limit, **size)
    assert finished["losses"] == generous["losses"]
