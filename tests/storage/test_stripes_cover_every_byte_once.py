"""Every byte of a striped space lies in exactly one place, and files are as large as that takes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.storage.extents import Stripes

STRIPE_BYTES = 8
TOP = 400


def places(stripes: Stripes, offset: int, end: int) -> list[tuple[int, int]]:
    """(file, offset in it) of each byte."""
    found = []
    for segment in stripes.segments(offset, end - offset):
        assert segment.begin == len(found)
        found += [(segment.file, segment.offset + index) for index in range(segment.size_bytes)]
    assert len(found) == end - offset
    return found


@st.composite
def spaces(draw: st.DrawFn) -> Stripes:
    count = draw(st.integers(1, 5))
    stripes = Stripes(count, STRIPE_BYTES)
    begin = 0
    for file in draw(st.permutations(range(count)))[: draw(st.integers(0, count - 1))]:
        begin += draw(st.integers(0, 100))
        stripes.leave_out(file, begin)
    return stripes


@given(spaces())
def test_no_two_bytes_share_a_place(stripes: Stripes) -> None:
    found = places(stripes, 0, TOP)
    assert len(set(found)) == TOP


@given(spaces(), st.integers(0, TOP), st.integers(0, TOP))
def test_a_byte_lies_in_the_same_place_whatever_range_is_asked_for(
    stripes: Stripes, first: int, second: int
) -> None:
    begin, end = sorted((first, second))
    assert places(stripes, begin, end) == places(stripes, 0, TOP)[begin:end]


@given(spaces(), st.integers(0, TOP))
def test_files_are_as_large_as_the_bytes_in_them(stripes: Stripes, end: int) -> None:
    sizes = [0] * len(stripes.file_bytes(end))
    for file, offset in places(stripes, 0, end):
        sizes[file] = max(sizes[file], offset + 1)
    assert stripes.file_bytes(end) == sizes


@given(st.integers(2, 5), st.integers(0, 100), st.integers(0, 4))
def test_a_file_that_is_left_out_grows_no_more(count: int, begin: int, file: int) -> None:
    stripes = Stripes(count, STRIPE_BYTES)
    file %= count
    before = places(stripes, 0, begin)
    size_bytes = stripes.file_bytes(begin)[file]
    stripes.leave_out(file, begin)
    assert stripes.file_bytes(TOP)[file] == size_bytes
    assert places(stripes, 0, begin) == before


@given(st.integers(1, 5), st.integers(0, 50))
def test_files_fill_evenly(count: int, rows: int) -> None:
    sizes = Stripes(count, STRIPE_BYTES).file_bytes(rows * count * STRIPE_BYTES)
    assert set(sizes) == {rows * STRIPE_BYTES}
