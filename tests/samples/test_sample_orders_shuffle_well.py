"""Orders are pure and look random, keep to their slots, want chunks evenly, and mix what is stored sorted."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from penstock.samples.order import ORDERS, Segment, expected_mixing, mixing_of
from tests.support.orders import firsts_of, whole

DRAWS = 4000


def is_even(counts: np.ndarray, freedom: int) -> bool:
    """Chi-square against equal counts: within five of its standard deviations."""
    expected = counts.mean()
    return bool(abs(((counts - expected) ** 2 / expected).sum() - freedom) < 5 * np.sqrt(2 * freedom))


@pytest.mark.parametrize("kind", ORDERS)
def test_an_order_is_a_pure_function(kind):
    firsts = firsts_of([7] * 40)
    division = {"replicas": 3, "replica": 1, "slots": 5, "after": [Segment(2, 4, (30, 9))]}
    order = whole(kind, firsts, seed=5, epoch=2, **division).tolist()
    assert order == whole(kind, firsts, seed=5, epoch=2, **division).tolist()
    for other in ({"seed": 6, "epoch": 2}, {"seed": 5, "epoch": 3}, {"seed": 2, "epoch": 5}):
        assert order != whole(kind, firsts, **other, **division).tolist()


@pytest.mark.parametrize("kind", ORDERS)
@pytest.mark.parametrize("samples", [2, 3, 12, 60])
def test_every_sample_is_equally_likely_at_every_place(kind, samples):
    firsts = firsts_of([samples // 3] * 3 if samples % 3 == 0 else [1] * samples)
    counts = np.zeros((samples, samples))
    for seed in range(DRAWS):
        counts[np.arange(samples), whole(kind, firsts, seed=seed, slots=2)] += 1
    # In a permutation places exclude each other, and so counts spread a little more than by chance.
    assert is_even(counts * (samples - 1) / samples, (samples - 1) ** 2)


@pytest.mark.parametrize("kind", ORDERS)
def test_every_epoch_of_one_seed_is_another_order(kind):
    firsts = firsts_of([1] * 4)
    found = Counter(tuple(whole(kind, firsts, epoch=epoch, slots=4).tolist()) for epoch in range(DRAWS))
    assert len(found) == 24
    assert is_even(np.array(list(found.values())), 23)


@pytest.mark.parametrize("samples", [17, 256, 1000])
def test_neighbours_in_full_order_have_nothing_in_common(samples):
    firsts = firsts_of([samples])
    steps = np.zeros(samples - 1)
    for seed in range(max(30, 60_000 // samples)):
        order = whole("full", firsts, seed=seed)
        steps += np.bincount(np.diff(order) % samples, minlength=samples)[1:]
    assert is_even(steps, samples - 2)


@pytest.mark.parametrize("slots", [1, 2, 7, 30])
@pytest.mark.parametrize("after", [(), [Segment(3, 5, (100, 31, 0))]])
def test_no_more_chunks_are_under_way_than_slots(slots, after):
    firsts = firsts_of([0, 1, 4, 9, 3, 16, 5] * 12)
    for replica in range(2):
        order = whole("chunk", firsts, seed=1, replicas=2, replica=replica, slots=slots, after=after)
        chunks = np.searchsorted(firsts, order, side="right")
        begin = {chunk: place for place, chunk in reversed(list(enumerate(chunks)))}
        end = {chunk: place for place, chunk in enumerate(chunks)}
        under_way = np.zeros(len(order) + 1, int)
        for chunk in begin:
            under_way[begin[chunk]] += 1
            under_way[end[chunk] + 1] -= 1
        assert under_way.cumsum().max() <= slots


@pytest.mark.parametrize(("size", "slots"), [(64, 200), (512, 60)])
def test_chunks_end_evenly_though_they_begin_at_once(size, slots):
    firsts = firsts_of([size] * slots * 8)
    order = whole("chunk", firsts, slots=slots)
    ends = np.sort([np.flatnonzero(chunk)[-1] for chunk in chunk_masks(order, size)])
    window = size * slots // 5
    counts = np.bincount(ends // window)[
        5:30
    ]  # from the first chunks' lives on, until nothing is left to begin
    assert counts.max() < 2 * slots / 5
    assert counts.min() > slots / 5 / 2


def chunk_masks(order, size):
    """For each chunk, where its samples came, a mask over the order of one replica."""
    by_chunk = np.argsort(order // size, kind="stable").reshape(-1, size)
    for places in by_chunk:
        mask = np.zeros(len(order), bool)
        mask[places] = True
        yield mask


def test_samples_stored_by_class_come_out_mixed():
    classes, chunks, size = 10, 1000, 16
    firsts = firsts_of([size] * chunks)
    order = whole("chunk", firsts, slots=50)
    mixing = mixing_of(order, firsts, 64, groups=classes)
    assert mixing.groups_ratio > 0.97
    assert mixing.groups > 9.7
    assert abs(mixing.correlation) < 0.1
    stored = mixing_of(np.arange(classes * chunks), firsts, 64, groups=classes)
    assert stored.groups < 1.1


def test_mixing_does_not_fade_at_the_end():
    firsts = firsts_of([64] * 1000)
    order = whole("chunk", firsts, slots=200)
    last = mixing_of(order[-64 * 20 :], firsts, 64).chunks
    assert last > 0.85 * expected_mixing("chunk", firsts, slots=200, batch_size=64).chunks


def test_where_all_chunks_fit_the_order_is_as_good_as_a_full_one():
    firsts = firsts_of([3, 50, 1, 200] * 50)
    mixing = expected_mixing("chunk", firsts, slots=200, batch_size=64)
    assert abs(mixing.chunks / mixing.ideal_chunks - 1) < 0.01
    assert abs(mixing.displacement / mixing.ideal_displacement - 1) < 0.02


def test_replicas_share_chunks_only_where_they_meet():
    firsts = firsts_of([10] * 95)
    shares = [
        set(np.searchsorted(firsts, whole("chunk", firsts, replicas=4, replica=s, slots=3), side="right"))
        for s in range(4)
    ]
    assert sum(map(len, shares)) <= 95 + 3
    assert all(len(one & other) <= 1 for one, other in pairwise(shares))
