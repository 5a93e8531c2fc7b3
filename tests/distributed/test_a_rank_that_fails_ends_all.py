"""A rank that fails ends the job, says why, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import started

SCRIPT = Path(__file__).parent / "failing.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    "how, words",
    [
        ("killed", "Signal 9"),
        ("disk", "SpillSpaceFull"),
    ],
)
def test_a_rank_that_fails_ends_all(how: str, words: str, tmp_path: Path) -> None:
    done = started(2, SCRIPT, how, tmp_path, timeout_s=120)
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert "trained to the end" not in said
    assert words in said and "rank      : 1" in said
    assert how == "killed" or f"[rank1]: penstock.errors.{words}" in said
    assert list(tmp_path.iterdir()) == []
