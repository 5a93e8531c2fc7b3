"""Sizes as people write them, and back."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.wear import DiskWear
from penstock.errors import InvalidSize
from penstock.units import (
    counted,
    format_bytes,
    format_bytes_up,
    format_lifetime,
    format_rate,
    format_seconds,
    parse_budget,
    parse_bytes,
    parse_endurance,
    parse_share,
    share_bytes,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        (" 600 MiB ", 600 * 2**20),
        ("1.5GB", 1_500_000_000),
        ("1.5 GiB", 3 * 2**29),
        (".5kib", 512),
        ("2.TB", 2 * 10**12),
        ("0.3 B", 1),
        (7, 7),
        ("8G", 8 << 30),
        ("8Gi", 8 << 30),
        ("512M", 512 << 20),
        ("1.5k", 1536),
    ],
)
def test_sizes_that_can_be_read(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "8 gigs", "-1", "1e9", "1 2", "1.5.2 GB", "nan", -1, True, 1.5, None]
)
def test_sizes_that_cannot(text: object) -> None:
    with pytest.raises(InvalidSize):
        parse_bytes(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("8", "'8' has no unit: 8 bytes? Write 8GiB or 8MiB"),
        ("0.5", "'0.5' has no unit: 1 byte? Write 0.5GiB"),
        (" 1.5 ", "2 bytes? Write 1.5GiB"),
        ("1048575", "has no unit"),
        ("50%", "only a run asks for that"),
        ("auto", "only a run asks for that"),
    ],
)
def test_budgets_that_nobody_means(text: str, said: str) -> None:
    with pytest.raises(InvalidSize, match=re.escape(said)):
        parse_budget(text)
    if "only" not in said:
        with pytest.raises(InvalidSize, match=re.escape(said)):
            parse_share(text)


@pytest.mark.parametrize(
    ("budget", "size"),
    [(8, 8), ("0", 0), ("512B", 512), ("1048576", 1 << 20), ("8G", 8 << 30), ("50%", 500), ("37.5 %", 375)]
    + [("100%", 1000), ("auto", 540)],
)
def test_budgets_of_a_memory_of_1000_bytes_600_of_them_free(budget: int | str, size: int) -> None:
    assert share_bytes(parse_share(budget), 1000, 600) == size


@pytest.mark.parametrize("share", ["0%", "101%", "%", "-5%", "half"])
def test_shares_that_are_none(share: str) -> None:
    with pytest.raises(InvalidSize):
        parse_share(share)


@given(st.integers(0, 2**50))
def test_a_formatted_size_reads_back_as_about_the_same(size: int) -> None:
    assert math.isclose(parse_bytes(format_bytes(size)), size, rel_tol=0.006)


@given(st.integers(0, 2**50))
def test_a_required_size_never_rounds_down(size: int) -> None:
    shown = parse_bytes(format_bytes_up(size))
    assert size <= shown <= size * 1.02


def test_units_as_people_know_them() -> None:
    assert [format_bytes(size) for size in (0, 1023, 1024, 3 * 2**29, 200 * 2**30, 2**50)] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "1.50 GiB",
        "200.0 GiB",
        "1.00 PiB",
    ]
    assert format_bytes_up(2**30 + 1) == "1.01 GiB"
    assert [format_rate(rate) for rate in (3.2e9, 5e6, 2e3, 7)] == [
        "3.20 GB/s",
        "5.00 MB/s",
        "2.00 kB/s",
        "7 B/s",
    ]
    assert [format_seconds(time) for time in (1.239, 0.31, 42e-6)] == ["1.24 s", "310 ms", "42 us"]
    assert [format_seconds(time) for time in (0.99996, 0.99996e-3)] == ["1.00 s", "1 ms"]
    assert parse_bytes(np.int64(1 << 40)) == 1 << 40  # type: ignore[arg-type]
    assert (counted(1, "step"), counted(1200, "step")) == ("1 step", "1,200 steps")


@pytest.mark.parametrize(
    ("text", "size"), [("600TBW", 600 * 10**12), ("1.2 PBW", 12 * 10**14), ("600TB", 600 * 10**12), (5, 5)]
)
def test_endurance_as_on_a_data_sheet(text: int | str, size: int) -> None:
    assert parse_endurance(text) == size


@pytest.mark.parametrize("text", ["0TBW", "TBW", "600W", "600TiBW", "much", "600", "1.5", -1])
def test_an_endurance_that_is_none(text: int | str) -> None:
    with pytest.raises(InvalidSize):
        parse_endurance(text)


@pytest.mark.parametrize(
    ("time_s", "text"), [(3e8, "9.5 years"), (86400 * 41, "41 days"), (3600 * 5, "5 hours")]
)
def test_lifetimes(time_s: float, text: str) -> None:
    assert format_lifetime(time_s) == text


def test_a_disk_wears_as_fast_as_it_is_written() -> None:
    wear = DiskWear(written_bytes=10**9, step_s=2.0, endurance_bytes=600 * 10**12)
    assert wear.written_bytes_per_day == 43_200 * 10**9
    assert wear.lifetime_s == 2.0 * 600_000
    assert str(wear) == "43.20 TB written a day: an endurance of 600.00 TB lasts 14 days"
    assert DiskWear(written_bytes=10**9, step_s=2.0).lifetime_s is None
    assert DiskWear(written_bytes=0, step_s=2.0, endurance_bytes=1).lifetime_s is None
    assert str(DiskWear(written_bytes=0, step_s=0.0)) == "nothing is written to the disk"
