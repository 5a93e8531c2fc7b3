"""Ranks that save one file together write it once; who saves alone waits for nobody."""

from __future__ import annotations

from pathlib import Path

import pytest

import penstock
from tests.support.ranks import together

SCRIPT = Path(__file__).parent / "saving.py"


@pytest.mark.slow
def test_several_ranks_save_one_file(tmp_path: Path) -> None:
    printed = together(2, SCRIPT, tmp_path)
    assert {line for line in printed.splitlines() if "saved" in line} == {"rank 0 saved", "rank 1 saved"}
    assert penstock.load(tmp_path / "subgroup") == {"by": 1}
    assert not any((tmp_path / name).exists() for name in ("bad", "x", "shards"))


def test_a_group_without_processes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(penstock.InvalidArgument, match="init_process_group"):
        penstock.save({}, tmp_path / "state", group=object())
