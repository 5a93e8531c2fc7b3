"""The allocator of spill space: disjoint, aligned, sequential, and whole again at the end."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidArgument, SpillSpaceFull
from penstock.storage.extents import ALIGNMENT_BYTES, Extent, Extents

# Above zero: allocate so many bytes. Zero or below: release one of those alive.
ACTIONS = st.lists(st.integers(-20, 40_000), max_size=80)


def play(actions: list[int], extents: Extents) -> tuple[list[Extent], list[Extent]]:
    """Every extent given out, and those still alive; checks each step."""
    given_out: list[Extent] = []
    alive: list[Extent] = []
    for action in actions:
        if action <= 0:
            if alive:
                extents.release(alive.pop(action % len(alive)))
            continue
        try:
            extent = extents.allocate(action)
        except SpillSpaceFull:
            assert all(end - start < action for start, end in extents.free)
            continue
        assert extent.size_bytes >= action
        assert extent.offset % ALIGNMENT_BYTES == extent.size_bytes % ALIGNMENT_BYTES == 0
        assert all(extent.end <= other.offset or other.end <= extent.offset for other in alive)
        alive.append(extent)
        given_out.append(extent)
        check_ranges(extents, alive)
    return given_out, alive


def check_ranges(extents: Extents, alive: list[Extent]) -> None:
    """Live extents and free ranges tile [0, end) exactly; free ranges never touch each other."""
    free = extents.free
    tiles = sorted(free + [(extent.offset, extent.end) for extent in alive])
    edges = [0, *(edge for tile in tiles for edge in tile), extents.end]
    assert edges[::2] == edges[1::2]
    assert all(a[1] < b[0] for a, b in pairwise(free))
    assert extents.used_bytes == sum(extent.size_bytes for extent in alive)


@given(ACTIONS, st.one_of(st.none(), st.integers(0, 300_000)))
def test_extents_are_disjoint_and_end_as_one_free_range(
    actions: list[int], capacity_bytes: int | None
) -> None:
    extents = Extents(capacity_bytes)
    _, alive = play(actions, extents)
    for extent in alive:
        extents.release(extent)
    assert extents.used_bytes == 0
    assert extents.free in ([], [(0, extents.end)])
    assert capacity_bytes is None or extents.end <= capacity_bytes


@given(ACTIONS)
def test_the_same_calls_give_the_same_extents(actions: list[int]) -> None:
    assert play(actions, Extents())[0] == play(actions, Extents())[0]


def test_a_pass_is_written_sequentially() -> None:
    extents = Extents()
    sizes = [5000, 4096, 1, 20_000]
    first = [extents.allocate(size) for size in sizes]
    assert all(a.end == b.offset for a, b in pairwise(first))
    for extent in reversed(first):
        extents.release(extent)
    second = [extents.allocate(size) for size in sizes]
    assert all(a.end == b.offset for a, b in pairwise(second))
    assert extents.end == first[-1].end, "freed space is used again before the file grows"


def test_the_next_extent_follows_the_last_one_even_where_an_earlier_gap_is_free() -> None:
    extents = Extents()
    parts = [extents.allocate(4096) for _ in range(4)]
    extents.release(parts[0])
    extents.release(parts[3])
    extents.release(parts[2])
    assert extents.allocate(4096).offset == parts[0].offset  # nothing is free after the last one
    assert extents.allocate(4096).offset == parts[2].offset  # and on from there


def test_a_full_space_says_by_how_much() -> None:
    extents = Extents(capacity_bytes=1 << 20)
    extents.allocate(1 << 19)
    with pytest.raises(SpillSpaceFull, match=r"Raise disk_budget by 512\.0 KiB"):
        extents.allocate(1 << 20)
    assert extents.used_bytes == 1 << 19
    assert extents.allocate(1 << 19).offset == 1 << 19


def test_what_was_not_given_out_cannot_be_released() -> None:
    extents = Extents()
    extent = extents.allocate(4096)
    with pytest.raises(InvalidArgument):
        extents.release(Extent(extent.offset, 8192))
    extents.release(extent)
    with pytest.raises(InvalidArgument):
        extents.release(extent)


@pytest.mark.parametrize("size_bytes", [0, -1])
def test_an_extent_has_a_size(size_bytes: int) -> None:
    with pytest.raises(InvalidArgument):
        Extents().allocate(size_bytes)
