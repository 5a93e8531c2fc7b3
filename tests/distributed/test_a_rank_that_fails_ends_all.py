"""A rank that fails ends the job: all others name it, and nothing is left behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.ranks import started

SCRIPT = Path(__file__).parent / "failing.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    "how, words",
    [
        ("killed", "its process has ended"),
        ("disk", "SpillSpaceFull: the disk budget of 8.00 KiB is full"),
        ("memory", "BudgetTooSmall: a kernel"),
        ("error", "ValueError: the batch is bad"),
    ],
)
def test_a_rank_that_fails_is_named_by_all(how: str, words: str, tmp_path: Path) -> None:
    done = started(3, SCRIPT, how, tmp_path, timeout_s=120)
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert "trained to the end" not in said
    for rank in (0, 2):
        assert f"rank {rank} cannot go on: rank 1 failed: {words}" in said
    assert "rank 1 cannot go on" not in said
    if how == "killed":
        assert "exitcode  : -9" in said
    else:
        name, _, message = words.partition(": ")
        (last,) = [line for line in said.splitlines() if line.startswith("[rank1]:") and message in line]
        assert name in last
    assert list(tmp_path.iterdir()) == []
    processes = [line.split()[1] for line in said.splitlines() if line.startswith("process ")]
    assert len(processes) == 3
    assert not any(Path("/proc", process).exists() for process in processes)
    assert not any(process in name for name in os.listdir("/dev/shm") for process in processes)
