"""What averaging gradients is predicted to take, against bytes that are counted one by one."""

from __future__ import annotations

from itertools import pairwise

import pytest

from penstock.distributed.hook import predict_exchange

BUS, HOST = 10e9, 40e9


def ring_bytes(size_bytes: int, ranks: int) -> int:
    """That all ranks send: twice, each part of the bucket goes to the next rank until all had it."""
    part_bytes = size_bytes // ranks
    return sum(part_bytes for _ in range(2) for _ in range(ranks) for _ in range(ranks - 1))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_bytes_on_the_bus(ranks: int) -> None:
    size_bytes = 24 << 20
    found = predict_exchange(size_bytes, ranks, BUS, HOST)
    assert found.all_reduce_s == pytest.approx(2 * ring_bytes(size_bytes, ranks) / BUS)
    up_and_down_bytes = sum(size_bytes for _ in range(ranks) for _ in ("up", "down"))
    read_bytes = sum(size_bytes for _ in range(ranks))
    assert found.host_s == pytest.approx(up_and_down_bytes / BUS + read_bytes / HOST)


def test_the_host_wins_with_more_devices_that_reach_each_other_through_it() -> None:
    """As in moDNN 7.5, with four of them."""
    times = [predict_exchange(25 << 20, ranks, BUS, HOST) for ranks in (2, 3, 4, 8)]
    gains = [time.all_reduce_s / time.host_s for time in times]
    assert gains[0] < 1 < gains[1]
    assert all(fewer < more for fewer, more in pairwise(gains))
