"""What one rank finds out about I/O paths, the others need not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.ranks import together

SCRIPT = Path(__file__).parent / "learning.py"


@pytest.mark.slow
def test_each_size_is_explored_by_one_of_two_ranks(tmp_path: Path) -> None:
    printed = together(2, SCRIPT, tmp_path, "divided", "one", "each", "by-hand")
    (found,) = [json.loads(line.removeprefix("rows ")) for line in printed.splitlines() if "rows " in line]
    for mode in ("divided", "one", "each", "by-hand"):
        first, second = (rank[mode] for rank in found)
        assert first["known"] and second["known"]
        both = set(first["known"]) & set(second["known"])
        assert both
        tried = [set(rank["tried"]) & both for rank in (first, second)]
        if mode == "each":
            assert tried == [both, both]
        else:
            assert tried[0] | tried[1] == both and not tried[0] & tried[1]
            assert mode != "one" or set() in tried
    assert list(tmp_path.iterdir()) == []
