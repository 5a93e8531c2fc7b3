"""A rank that fails ends the job: all others name it, and nothing is left behind."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.support.ranks import started

SCRIPT = Path(__file__).parent / "failing.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks, how, words",
    [
        (3, "killed", "its process has ended"),
        (2, "disk", "SpillSpaceFull: the disk budget of 8.00 KiB is full"),
        (2, "memory", "BudgetTooSmall: a kernel"),
        (2, "between steps", "ValueError: the batch is bad"),
    ],
)
def test_a_rank_that_fails_is_named_by_all(ranks: int, how: str, words: str, tmp_path: Path) -> None:
    done = started(ranks, SCRIPT, how, tmp_path, timeout_s=120)
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert "trained to the end" not in said
    for rank in {*range(ranks)} - {1}:
        assert f"rank {rank} cannot go on: rank 1 failed: {words}" in said
    assert "rank 1 cannot go on" not in said
    if how == "killed":
        assert "exitcode  : -9" in said
    else:
        assert re.search(rf"^\[rank1\]: (penstock\.errors\.)?{words}", said, re.MULTILINE)
    assert list(tmp_path.iterdir()) == []
    processes = re.findall(r"^process (\d+)$", said, re.MULTILINE)
    assert len(processes) == ranks
    assert not any(Path("/proc", process).exists() for process in processes)
    assert not any(process in name for name in os.listdir("/dev/shm") for process in processes)
