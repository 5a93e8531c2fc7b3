"""Ranks that run the same step follow one plan, made for the slowest of them, from the same step on. Where
their steps differ, each plans for its own, and none waits for a plan that the others do not make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.differing import ODD, SKIPPED, STEPS
from tests.distributed.planning import FAST
from tests.support.ranks import together


def found_by(ranks: int, script: str, *args: object) -> list[list[dict[str, Any]]]:
    """What each rank has found, in each line that the script prints of that."""
    lines = together(ranks, Path(__file__).parent / script, *args).splitlines()
    return [json.loads(line.removeprefix("ranks ")) for line in lines if line.startswith("ranks ")]


@pytest.mark.slow
def test_ranks_follow_one_plan(tmp_path: Path) -> None:
    ((first, second),) = found_by(2, "planning.py", tmp_path)
    assert first["plans"] == second["plans"] and first["rates"] == second["rates"]
    assert first["replans"] == second["replans"] >= 1
    assert first["rates"][5] == pytest.approx(FAST / 1.1)
    assert first["rates"][-1] < FAST / 1.5 < first["rates"][-2]


def test_ranks_whose_steps_differ_plan_apart_and_wait_for_nobody(tmp_path: Path) -> None:
    at_first, later, roomy, alone = found_by(3, "differing.py", tmp_path, *SKIPPED)
    for found, apart, told in (
        (at_first, {0, 1}, [0, ODD, 2]),
        (later, {SKIPPED["later"][-1]}, [ODD]),
        (roomy, set(range(STEPS)), [0, ODD, 2]),
        (alone, set(), []),
    ):
        first, odd, third = (rank["plans"] for rank in found)
        assert first == third
        assert {step for step in range(STEPS) if odd[step] != first[step]} == apart
        logged = [[message for message in rank["logged"] if "others: " in message[1]] for rank in found]
        assert [rank for rank in range(3) for _ in logged[rank]] == told, "once each"
        warnings = [message for rank in found for level, message in rank["logged"] if level == "WARNING"]
        assert warnings == [], "nobody came too late"
