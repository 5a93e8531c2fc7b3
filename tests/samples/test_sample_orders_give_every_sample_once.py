"""Every sample once an epoch, however it is divided and resumed; and C++ does as the specification says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import _native
from penstock.errors import InvalidArgument
from penstock.samples.order import ORDERS, Segment
from tests.support.orders import divisions, firsts_of, layouts, native, seeds, whole
from tests.support.sample_order import draw_order, replica_size


def interrupt(kind, firsts, seed, epoch, divided, data):
    """Take some of an epoch in one division after the other. What was taken, and the segments."""
    given_out, after = [], []
    for replicas, slots in divided:
        taken = []
        for replica in range(replicas):
            order = native(
                kind,
                firsts,
                seed=seed,
                epoch=epoch,
                replicas=replicas,
                replica=replica,
                slots=slots,
                after=after,
            )
            taken.append(data.draw(st.integers(0, order.size)))
            given_out.append(order.take(taken[-1]))
        after.append(Segment(replicas, slots, tuple(taken)))
    return given_out, after


@pytest.mark.parametrize("kind", ORDERS)
@given(layouts, seeds, st.integers(0, 3), st.lists(divisions, max_size=3), divisions, st.data())
@settings(max_examples=60)
def test_every_sample_comes_once_as_specified(kind, firsts, seed, epoch, divided, last, data):
    given_out, after = interrupt(kind, firsts, seed, epoch, divided, data)
    left = int(firsts[-1]) - sum(map(len, given_out))
    replicas, slots = last
    for replica in range(replicas):
        division = {"replicas": replicas, "replica": replica, "slots": slots, "after": after}
        order = native(kind, firsts, seed=seed, epoch=epoch, **division)
        assert order.size == replica_size(left, replicas, replica)
        indices = order.take(1 << 40)
        assert indices.tolist() == draw_order(kind, firsts, seed=seed, epoch=epoch, **division).tolist()
        given_out.append(indices)
    assert np.sort(np.concatenate(given_out)).tolist() == list(range(int(firsts[-1])))


@pytest.mark.parametrize("kind", ORDERS)
@given(layouts, st.lists(st.integers(0, 40), max_size=6), st.lists(st.integers(0, 40), max_size=6))
@settings(max_examples=40)
def test_it_does_not_matter_in_what_steps_samples_are_taken_or_skipped(kind, firsts, steps, skips):
    expected = whole(kind, firsts, slots=3)
    order = native(kind, firsts, slots=3)
    for step, skip in zip(steps, skips, strict=False):
        at = order.taken
        assert order.take(step).tolist() == expected[at : at + step].tolist()
        at = order.taken
        assert order.skip(skip) == min(skip, order.size - at) == order.taken - at
    at = order.taken
    assert order.take(order.size).tolist() == expected[at:].tolist()
    assert order.take(1).tolist() == []
    assert order.skip(1) == 0


@pytest.mark.parametrize("kind", ORDERS)
@pytest.mark.parametrize("sizes", [[], [0], [1], [0, 0, 1, 0], [3_000_000], [1, 70_000, 1], [1] * 70_000])
@pytest.mark.parametrize("replicas", [1, 3])
def test_odd_layouts_are_given_out_whole(kind, sizes, replicas):
    firsts = firsts_of(sizes)
    after = [Segment(2, 5, (100_000, 1)[: 2 if sum(sizes) > 200_000 else 1]), Segment(1, 2, (7,))]
    before = [
        whole(kind, firsts, replicas=2, replica=s, slots=5)[: after[0].taken[s % len(after[0].taken)]]
        for s in (0, 1)
    ]
    before.append(whole(kind, firsts, slots=2, after=after[:1])[:7])
    rest = [whole(kind, firsts, replicas=replicas, replica=s, slots=9, after=after) for s in range(replicas)]
    found = np.sort(np.concatenate([*before, *rest]))
    assert np.array_equal(found, np.arange(sum(sizes)))


@pytest.mark.parametrize("kind", ORDERS)
def test_one_number_of_samples_holds_for_all_replicas(kind):
    firsts = firsts_of([3, 4, 4])  # replicas of 4, 4 and 3
    for number, each in ((2, (2, 2, 2)), (4, (4, 4, 3)), (99, (4, 4, 3))):
        short, long = (
            whole(kind, firsts, slots=2, after=[Segment(3, 2, taken)]).tolist() for taken in ((number,), each)
        )
        assert short == long
        assert short == draw_order(kind, firsts, slots=2, after=[Segment(3, 2, (number,))]).tolist()


REFUSED = [
    ({"replicas": 0}, "at least one replica"),
    ({"replicas": 2, "replica": 2}, "there is no replica 2 of 2"),
    ({"after": [Segment(0, 1, (1,))]}, "at least one replica"),
    ({"after": [Segment(3, 1, (1, 1))]}, "a segment of 3 replicas says of 2"),
    ({"after": [Segment(2, 1, (6, 5))]}, "replica 0 of 2 cannot have given 6 samples: its share was 5"),
    ({"after": [Segment(1, 1, (9,)), Segment(2, 1, (1, 1))]}, "replica 1 of 2 .* share was 0"),
]


@pytest.mark.parametrize("kind", ORDERS)
@pytest.mark.parametrize(("division", "reason"), REFUSED)
def test_divisions_that_contradict_themselves_are_refused(kind, division, reason):
    firsts = firsts_of([5, 5])
    with pytest.raises(ValueError, match=reason):
        native(kind, firsts, **division)
    with pytest.raises(InvalidArgument, match=reason):
        draw_order(kind, firsts, **division)


def test_no_slots_are_refused_in_chunk_order_alone():
    firsts = firsts_of([5, 5])
    for slots, after in ((0, ()), (1, [Segment(1, 0, (1,))])):
        with pytest.raises(ValueError, match="at least one slot"):
            native("chunk", firsts, slots=slots, after=after)
        with pytest.raises(InvalidArgument, match="at least one slot"):
            draw_order("chunk", firsts, slots=slots, after=after)
    assert len(whole("full", firsts, slots=0, after=[Segment(1, 0, (1,))])) == 9


def test_unknown_orders_and_seeds_are_refused():
    firsts = firsts_of([5])
    with pytest.raises(ValueError, match='no order "sorted"'):
        native("sorted", firsts)
    with pytest.raises(InvalidArgument, match='no order "sorted": choose one of full, chunk'):
        draw_order("sorted", firsts)
    for seed in (-1, 1 << 64):
        with pytest.raises(InvalidArgument, match=r"seed=.* is not in \[0, 2\^64\)"):
            draw_order("full", firsts, seed=seed)


@pytest.mark.parametrize("firsts", [[], [1, 5], [0, 3, 2, 5]])
def test_chunks_that_contradict_themselves_are_refused(firsts):
    with pytest.raises(ValueError, match="first sample"):
        _native.SampleOrder("chunk", 5, np.array(firsts, np.uint64), 0, 0, 1, 0, 1, [])


def test_chunks_that_hold_fewer_samples_than_there_are_are_refused():
    with pytest.raises(ValueError, match="as many samples"):
        _native.SampleOrder("chunk", 6, np.array([0, 5], np.uint64), 0, 0, 1, 0, 1, [])
