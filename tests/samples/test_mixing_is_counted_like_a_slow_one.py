"""The numbers of penstock.samples.order against counting by hand."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidArgument
from penstock.samples.order import ORDERS, expected_mixing, ideal_distinct, mixing_of
from tests.support.orders import firsts_of, layouts, whole


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.integers(1, 9))
@settings(max_examples=40)
def test_the_ideal_is_the_mean_over_all_batches(sizes, batch_size):
    samples = [chunk for chunk, size in enumerate(sizes) for _ in range(size)]
    batches = list(itertools.combinations(samples, min(batch_size, len(samples))))
    mean = sum(len(set(batch)) for batch in batches) / len(batches)
    assert ideal_distinct(sizes, batch_size) == pytest.approx(mean)


@given(layouts, st.integers(1, 12), st.integers(1, 5), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_an_order_is_measured_as_by_hand(firsts, batch_size, groups, rng):
    samples = int(firsts[-1])
    order = rng.sample(range(samples), rng.randint(0, samples))
    if not order:
        with pytest.raises(InvalidArgument, match="of 0 samples"):
            mixing_of(order, firsts, batch_size)
        return
    mixing = mixing_of(order, firsts, batch_size, groups=groups)
    size = min(batch_size, len(order))
    batches = [order[i : i + size] for i in range(0, len(order) - size + 1, size)]
    assert (mixing.batch_size, mixing.batches) == (size, len(batches))
    chunk_of = [
        chunk for chunk in range(len(firsts) - 1) for _ in range(int(firsts[chunk + 1] - firsts[chunk]))
    ]
    group_of = [max(g for g in range(groups) if g * samples // groups <= i) for i in range(samples)]
    for found, of in ((mixing.chunks, chunk_of), (mixing.groups, group_of)):
        assert found == pytest.approx(sum(len({of[i] for i in batch}) for batch in batches) / len(batches))
    counted = list(enumerate(itertools.chain(*batches)))
    assert mixing.displacement == pytest.approx(sum(abs(p - i) for p, i in counted) / len(counted) / samples)
    assert mixing.ideal_displacement == pytest.approx(
        sum(abs(p - i) for p, _ in counted for i in range(samples)) / len(counted) / samples**2
    )


@pytest.mark.parametrize("kind", ORDERS)
@pytest.mark.parametrize("replicas", [1, 3])
def test_what_is_expected_is_what_comes(kind, replicas):
    firsts = firsts_of([5, 9, 1] * 30)
    expected = expected_mixing(kind, firsts, slots=10, batch_size=8, seed=3, epoch=1, replicas=replicas)
    order = whole(kind, firsts, slots=10, seed=3, epoch=1, replicas=replicas)
    found = mixing_of(order, firsts, 8)
    assert (expected.chunks, expected.groups, expected.batches) == (found.chunks, found.groups, found.batches)
    if replicas == 1:
        assert expected == found


def test_some_batches_stand_for_all():
    firsts = firsts_of([20] * 500)
    every = expected_mixing("chunk", firsts, slots=40, batch_size=16)
    some = expected_mixing("chunk", firsts, slots=40, batch_size=16, batches=100)
    assert (every.batches, some.batches) == (625, 100)
    assert some.chunks == pytest.approx(every.chunks, rel=0.02)
    assert some.displacement == pytest.approx(every.displacement, rel=0.1)


def test_stored_order_and_a_full_shuffle_are_the_ends_of_the_scale():
    firsts = firsts_of([50] * 400)
    stored = mixing_of(np.arange(20_000), firsts, 50)
    assert (stored.chunks, stored.displacement) == (1, 0)
    assert stored.correlation == pytest.approx(1)
    order = list(range(20_000))
    random.Random(1).shuffle(order)
    shuffled = mixing_of(order, firsts, 50)
    assert shuffled.chunks == pytest.approx(shuffled.ideal_chunks, rel=0.01)
    assert shuffled.groups == pytest.approx(shuffled.ideal_groups, rel=0.01)
    lucky = replace(shuffled, chunks=shuffled.ideal_chunks * 1.01)
    assert lucky.ratio == 1 and "(100.0%" in str(lucky)
    assert shuffled.displacement == pytest.approx(1 / 3, abs=0.01)
    assert shuffled.ideal_displacement == pytest.approx(1 / 3, abs=0.001)
    assert abs(shuffled.correlation) < 0.03


def test_it_reads_well():
    assert str(mixing_of(np.arange(100), firsts_of([10] * 10), 10, groups=5)) == (
        "a batch of 10 draws from 1.0 chunks (14.9% of 6.7) and 1.0 of 5 ranges (22.1% of 4.5); "
        "samples move by 0.000 of the store (shuffled: 0.333), correlation 1.000"
    )


@pytest.mark.parametrize("kind", ORDERS)
def test_a_replica_without_samples_has_no_mixing(kind):
    with pytest.raises(InvalidArgument, match="no batches of 4 can be made of 0 samples"):
        expected_mixing(kind, firsts_of([0]), slots=1, batch_size=4)
