"""What a position of an epoch says for other processes and workers: together they take each sample once."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import _native
from penstock.errors import InvalidArgument
from penstock.samples.epochs import Epoch, Position, from_state, merge_states

FIRSTS = np.array([0, 5, 5, 30, 31, 60, 77], np.uint64)
SAMPLES = int(FIRSTS[-1])


def begin(order: str, batch_size: int, drop_last: bool = False) -> Position:
    return Position(Epoch("id", SAMPLES, order, 3, 1), batch_size, drop_last)


def drawn(position: Position, replica: int, begin: int, end: int) -> list[int]:
    """Samples of a replica, from one of its places up to another."""
    after = [(each.replicas, each.slots, list(each.taken)) for each in position.after]
    order = _native.SampleOrder(
        position.of.order,
        SAMPLES,
        FIRSTS if position.of.order == "chunk" else np.empty(0, np.uint64),
        position.of.seed,
        position.of.epoch,
        position.replicas,
        replica,
        position.slots,
        after,
    )
    order.skip(begin)
    return order.take(end - begin).tolist()


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(state))


stages = st.lists(
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(2, 4), st.integers(0, 9), st.integers(1, 7)),
    min_size=1,
    max_size=4,
)


@given(order=st.sampled_from(["chunk", "full"]), stages=stages, speaker=st.integers(0, 2))
def test_any_process_speaks_for_all_that_took_as_many_batches(
    order: str, stages: list[tuple[int, int, int, int, int]], speaker: int
) -> None:
    position, seen = begin(order, stages[0][4]), []
    for world_size, workers, slots, batches, batch_size in [*stages, (2, 2, 3, 10**6, 5)]:
        slots = slots if order == "chunk" else 0
        now = position.with_batches(batch_size, False).divided(world_size * workers, slots, workers)
        ends = [now.advanced(rank, batches) for rank in range(world_size)]
        for end in ends:
            for replica, taken in end.taken.items():
                seen += drawn(now, replica, now.taken_by([replica])[replica], taken)
        together = not any(end.finished for end in ends)
        states = [end.state() for end in ends]
        position = from_state(
            through_json(states[speaker % world_size] if together else merge_states(states))
        )
        if position.over:
            break
    assert sorted(seen) == list(range(SAMPLES))


@given(
    batches=st.lists(st.integers(0, 30), min_size=1, max_size=4),
    workers=st.integers(1, 4),
    batch_size=st.integers(1, 9),
    drop_last=st.booleans(),
)
def test_batches_are_counted_as_if_one_by_one(
    batches: list[int], workers: int, batch_size: int, drop_last: bool
) -> None:
    start = begin("full", batch_size, drop_last).divided(workers, 0, workers)
    stepwise = at_once = start
    for count in batches:
        at_once = at_once.advanced(0, count)
        for _ in range(count):
            stepwise = stepwise.advanced(0, 1)
    assert at_once.taken == stepwise.taken
    given = [-(-taken // batch_size) for taken in at_once.taken.values()]
    assert max(given) - min(given) <= 1  # workers take turns
    assert sum(given) <= sum(batches)


def test_states_that_cannot_speak_for_others_are_refused() -> None:
    position = begin("full", 4).divided(4, 0, 2)
    uneven = position.at(0, 4, False).state() | {"taken": [[0, 4], [2, 8]]}
    with pytest.raises(InvalidArgument, match="of worker 1 nothing"):
        from_state(position.at(0, 4, False).state()).divided(2, 0, 1)
    with pytest.raises(InvalidArgument, match="different numbers of batches"):
        from_state(uneven | {"workers": 1}).divided(2, 0, 1)
    with pytest.raises(InvalidArgument, match="not around one"):
        from_state({"_snapshot": {"_worker_snapshots": {"worker_0": {"dataset_state": None}}}})
