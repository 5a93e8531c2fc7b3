"""Training on several processes gives the bits that it gives without penstock, within each one's budget."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.ranks import together

SCRIPT = Path(__file__).parent / "training.py"

PROGRAMS = ("ddp --clip --depth 3", "fsdp --clip --parts 2 --depth 3")
MORE = (
    "ddp_views --parts 2",
    "ddp --precision autocast --parts 2 --depth 3",
    "fsdp --precision bf16 --depth 3",
)


def same_bits(ranks: int, programs: tuple[str, ...], spill_dir: Path) -> None:
    arguments = " --then ".join(f"{program} --spill {spill_dir}" for program in programs).split(" ")
    printed = together(ranks, SCRIPT, *arguments).splitlines()
    found = [json.loads(line.removeprefix("rows ")) for line in printed if line.startswith("rows ")]
    assert len(found) == len(programs)
    for every in found:
        assert len(every) == ranks
        for rows in every:
            roomy, half, least = rows
            assert all(row["same"] for row in rows)
            assert all(row["processes"] == ranks for row in rows)
            assert roomy["evicted"] == 0
            assert half["evicted"] > 0 and least["evicted"] > 0
            assert [row["plan"] for row in rows] == [row["plan"] for row in every[0]], "one for all ranks"
            assert half["peak"] <= half["budget"] and least["peak"] <= least["budget"]
    assert list(spill_dir.iterdir()) == []


def test_same_bits_on_two(tmp_path: Path) -> None:
    same_bits(2, PROGRAMS, tmp_path)


@pytest.mark.slow
def test_same_bits_in_other_ways(tmp_path: Path) -> None:
    same_bits(2, MORE, tmp_path)


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 4, reason="four processes on fewer cores take minutes")
def test_same_bits_on_four(tmp_path: Path) -> None:
    same_bits(4, ("fsdp --steps 5",), tmp_path)


@pytest.mark.parametrize("recompute", ["recompute", "keep"])
def test_what_a_collective_uses_stays_where_the_system_finds_it(tmp_path: Path, recompute: str) -> None:
    """Another thread presses tensors out of memory while gloo has the system read and write them: an access
    to what is away, or protected, would not be served there."""
    together(2, Path(__file__).parent / "evicting.py", tmp_path, recompute)


def test_what_was_sent_leaves_once_it_was_waited_for(tmp_path: Path) -> None:
    together(2, Path(__file__).parent / "sending.py", tmp_path, timeout_s=100)
