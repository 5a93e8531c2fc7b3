"""Layouts of stores, ways to divide an epoch, and the orders that penstock._native draws."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from penstock import _native
from penstock.samples.order import Segment


def firsts_of(sizes: Sequence[int]) -> np.ndarray:
    """From how many samples each chunk has to where they begin."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.uint64)]).astype(np.uint64)


def native(
    kind: str,
    firsts: np.ndarray,
    *,
    seed: int = 0,
    epoch: int = 0,
    replicas: int = 1,
    replica: int = 0,
    slots: int = 1,
    after: Sequence[Segment] = (),
) -> _native.SampleOrder:
    before = [(segment.replicas, segment.slots, list(segment.taken)) for segment in after]
    return _native.SampleOrder(kind, int(firsts[-1]), firsts, seed, epoch, replicas, replica, slots, before)


def whole(kind: str, firsts: np.ndarray, **options) -> np.ndarray:
    order = native(kind, firsts, **options)
    return order.take(order.size)


layouts = st.lists(st.sampled_from([0, 1, 1, 2, 3, 5, 17]), max_size=24).map(firsts_of)
divisions = st.tuples(st.integers(1, 5), st.integers(1, 8))  # replicas, slots
seeds = st.integers(0, 2**64 - 1)
