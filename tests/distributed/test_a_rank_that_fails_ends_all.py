"""A rank that fails ends the job: all others name it, and nothing is left behind."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.support.ranks import started

SCRIPT = Path(__file__).parent / "failing.py"


def said_by_all(ranks: int, ways: dict[str, str], spill_dir: Path) -> str:
    """What is printed where rank 1 fails in these ways, in one attempt after the other."""
    done = started(ranks, SCRIPT, spill_dir, *ways, timeout_s=600, restarts=len(ways) - 1)
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert "trained to the end" not in said
    for words in ways.values():
        for rank in {*range(ranks)} - {1}:
            assert f"rank {rank} cannot go on: rank 1 failed: {words}" in said
    assert not re.search(r"rank 1 cannot go on|rank [02] failed", said)
    assert list(spill_dir.iterdir()) == []
    processes = re.findall(r"^process (\d+)$", said, re.MULTILINE)
    assert len(processes) == ranks * len(ways)
    assert not any(Path("/proc", process).exists() for process in processes)
    assert not any(process in name for name in os.listdir("/dev/shm") for process in processes)
    return said


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_by_all(tmp_path: Path) -> None:
    assert "exitcode  : -9" in said_by_all(3, {"killed": "its process has ended"}, tmp_path)


@pytest.mark.slow
def test_the_error_of_a_rank_is_named_by_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    ways = {
        "disk": "SpillSpaceFull: the disk budget of 8.00 KiB is full",
        "memory": "BudgetTooSmall: a kernel",
        "between steps": "ValueError: the batch is bad",
    }
    said = said_by_all(2, ways, tmp_path)
    for words in ways.values():
        assert re.search(rf"^\[rank1\]: (penstock\.errors\.)?{words}", said, re.MULTILINE)
