"""Ranks that run the same step follow one plan, made for the slowest of them, from the same step on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.planning import FAST
from tests.support.ranks import together

SCRIPT = Path(__file__).parent / "planning.py"


@pytest.mark.slow
def test_ranks_follow_one_plan(tmp_path: Path) -> None:
    (line,) = (line for line in together(2, SCRIPT, tmp_path).splitlines() if line.startswith("ranks "))
    first, second = json.loads(line.removeprefix("ranks "))
    assert first["plans"] == second["plans"] and first["rates"] == second["rates"]
    assert first["replans"] == second["replans"] >= 1
    assert first["rates"][5] == pytest.approx(FAST / 1.1)
    assert first["rates"][-1] < FAST / 1.5 < first["rates"][-2]
