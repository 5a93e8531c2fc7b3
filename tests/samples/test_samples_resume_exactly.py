"""A Loader goes on where it stopped: bit for bit as before, or with every remaining sample exactly once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidArgument
from penstock.samples import mount
from penstock.samples.epochs import from_state, merge_states
from penstock.samples.loader import Loader
from tests.support.sample_stores import flat, received
from tests.support.stores import write_store

SAMPLES = 157


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume") / "store"
    rng = np.random.default_rng(0)
    sizes = rng.integers(0, 400, SAMPLES)
    write_store(folder, [(f"n{i}", bytes(rng.bytes(int(size)))) for i, size in enumerate(sizes)])
    return folder


def loaders(folder: Path, order: str, world_size: int, batch_size: int, **options: Any) -> list[Loader]:
    cache_bytes = 5 * (4096 + 1024 + 8192)
    return [
        Loader(
            mount(folder, order, cache_bytes, rank, world_size, timeout_s=10),
            batch_size,
            decode_batch=lambda batch: batch.indices.tolist(),
            **options,
        )
        for rank in range(world_size)
    ]


STATE_FIELDS = [
    *(
        "version",
        "store",
        "samples",
        "order",
        "seed",
        "epoch",
        "batch_size",
        "drop_last",
        "after",
        "replicas",
    ),
    *("slots", "workers", "taken", "finished"),
]
stops = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 7)), max_size=3)


@settings(max_examples=40)
@given(
    order=st.sampled_from(["chunk", "full"]),
    batch_size=st.integers(1, 13),
    stops=stops,
    last=st.integers(1, 4),
)
def test_other_numbers_of_processes_get_every_remaining_sample_once(
    folder: Path, order: str, batch_size: int, stops: list[tuple[int, int]], last: int
) -> None:
    state: dict[str, Any] | None = None
    seen: list[int] = []
    for world_size, batches in [*stops, (last, None)]:
        states = []
        for loader in loaders(folder, order, world_size, batch_size, seed=3):
            if state is not None:
                loader.load_state_dict(state)
            seen += flat(received(loader, batches))
            states.append(loader.state_dict())
        merged = merge_states(states)
        if from_state(merged).over:
            break
        together = not any(from_state(each).over for each in states)
        # One is enough where all have stopped at the same batch; and it is plain data.
        state = json.loads(json.dumps(states[-1] if together else merged))
    assert sorted(seen) == list(range(SAMPLES))


@settings(max_examples=40)
@given(
    order=st.sampled_from(["chunk", "full"]),
    batch_size=st.integers(1, 13),
    uneven=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    world_size=st.integers(1, 4),
)
def test_processes_that_took_unequally_many_batches_merge_their_states(
    folder: Path, order: str, batch_size: int, uneven: list[int], world_size: int
) -> None:
    seen, states = [], []
    for loader, batches in zip(loaders(folder, order, len(uneven), batch_size), uneven, strict=True):
        seen += flat(received(loader, batches))
        states.append(loader.state_dict())
    merged = merge_states(states)
    if not from_state(merged).over:  # else the next epoch would follow
        for loader in loaders(folder, order, world_size, batch_size):
            loader.load_state_dict(merged)
            seen += flat(received(loader))
    assert sorted(seen) == list(range(SAMPLES))


@settings(max_examples=40)
@given(
    order=st.sampled_from(["chunk", "full"]),
    batch_size=st.integers(1, 13),
    world_size=st.integers(1, 3),
    stops=st.lists(st.integers(0, 5), max_size=3),
    drop_last=st.booleans(),
    threads=st.sampled_from([0, 2]),
)
def test_the_same_number_of_processes_gets_the_same_batches(
    folder: Path,
    order: str,
    batch_size: int,
    world_size: int,
    stops: list[int],
    drop_last: bool,
    threads: int,
) -> None:
    def make() -> list[Loader]:
        return loaders(
            folder, order, world_size, batch_size, seed=5, drop_last=drop_last, num_threads=threads
        )

    whole = [received(loader) for loader in make()]
    for rank in range(world_size):
        batches: list[list[int]] = []
        state: dict[str, Any] | None = None
        for stop in [*stops, None]:
            loader = make()[rank]
            if state is not None:
                loader.load_state_dict(state)
            batches += received(loader, stop)
            state = loader.state_dict()
            if from_state(state).over:
                break
        assert batches == whole[rank]


@settings(max_examples=40)
@given(batch_size=st.integers(1, 40), world_size=st.integers(1, 5), batches=st.integers(0, 4))
def test_with_drop_last_all_make_equally_many_whole_steps(
    folder: Path, batch_size: int, world_size: int, batches: int
) -> None:
    everyone = loaders(folder, "chunk", world_size, batch_size, drop_last=True)
    given = [received(loader) for loader in everyone]
    assert {len(each) for each in given} == {len(everyone[0])}
    assert {len(batch) for each in given for batch in each} <= {batch_size}
    seen = flat(flat(given))
    assert len(set(seen)) == len(seen) > SAMPLES - world_size * batch_size


def test_the_epoch_after_a_finished_one_is_the_next(folder: Path) -> None:
    (loader,) = loaders(folder, "chunk", 1, 16)
    first, second = received(loader), None
    state = loader.state_dict()
    second = received(loader)
    assert first != second
    (other,) = loaders(folder, "chunk", 1, 16)
    other.load_state_dict(state)
    assert other.epoch == 1
    assert received(other) == second
    assert other.epoch == 2


def test_what_was_loaded_holds_for_its_epoch_only(folder: Path) -> None:
    (loader,) = loaders(folder, "chunk", 1, 16)
    loader.set_epoch(4)
    whole, state = received(loader), None
    loader.set_epoch(4)
    received(loader, 3)
    state = loader.state_dict()
    (other,) = loaders(folder, "chunk", 1, 16)
    other.load_state_dict(state)
    other.set_epoch(4)  # as training loops do
    assert received(other) == whole[3:]
    other.set_epoch(4)
    assert received(other) == whole
    other.load_state_dict(state)
    other.set_epoch(5)
    assert len(received(other)) == len(whole)


def test_batches_of_another_size_go_on(folder: Path) -> None:
    (loader,) = loaders(folder, "chunk", 1, 16)
    seen = flat(received(loader, 4))
    (other,) = loaders(folder, "chunk", 1, 5)
    other.load_state_dict(loader.state_dict())
    assert sorted(seen + flat(received(other))) == list(range(SAMPLES))


def test_another_cache_gets_every_remaining_sample_once(folder: Path) -> None:
    (loader,) = loaders(folder, "chunk", 1, 16)
    seen = flat(received(loader, 4))
    other = Loader(mount(folder), 16, decode_batch=lambda batch: batch.indices.tolist())
    other.load_state_dict(loader.state_dict())
    assert sorted(seen + flat(received(other))) == list(range(SAMPLES))


def test_a_state_of_something_else_is_refused(folder: Path, tmp_path: Path) -> None:
    write_store(tmp_path / "other", [("a", b"1"), ("b", b"2")])
    other = Loader(mount(tmp_path / "other"), 1)
    (loader,) = loaders(folder, "chunk", 1, 4)
    received(loader, 1)
    state = loader.state_dict()
    with pytest.raises(InvalidArgument, match="another store, of 157 samples"):
        other.load_state_dict(state)
    for changed in ({"seed": 9}, {"order": "full"}):
        with pytest.raises(InvalidArgument, match=r"order '(chunk|full)' and seed"):
            loader.load_state_dict(state | changed)
    with pytest.raises(InvalidArgument, match="version 1"):
        loader.load_state_dict(state | {"version": 1})
    with pytest.raises(InvalidArgument, match="not a state of a penstock Loader"):
        loader.load_state_dict({"model": 1})
    with pytest.raises(InvalidArgument, match="epoch 0 of seed 1"):
        merge_states([state, state | {"seed": 1}])
    with pytest.raises(InvalidArgument, match="no state to merge"):
        merge_states([])
    with pytest.raises(InvalidArgument, match="different things of one replica"):
        merge_states([state, state | {"taken": [[0, 1]]}])


# States that anybody may have changed


NUMBERS: st.SearchStrategy[Any] = st.sampled_from(
    [-1, 0, 1, 2, 3, 1 << 20, 1 << 32, 1 << 62, 1 << 70, 1.5, None, True, "", "chunk", [], {}]
    + [[[1 << 32, 4, [1]]], [[1 << 20, 4, [0]]], [[2, 3, [5, 5]]] * 3, [[0, 1 << 40]], [[1 << 40, 0]]]
)


@settings(max_examples=300)
@given(
    order=st.sampled_from(["chunk", "full"]),
    stateful=st.booleans(),
    changes=st.lists(st.tuples(st.sampled_from([*STATE_FIELDS, "more"]), NUMBERS), min_size=1, max_size=3),
)
def test_a_changed_state_is_refused_or_gives_no_sample_twice(
    folder: Path, order: str, stateful: bool, changes: list[tuple[str, Any]]
) -> None:
    (first,) = loaders(folder, order, 1, 7)
    received(first, 3)
    state = {**first.state_dict(), **dict(changes)}
    (second,) = loaders(folder, order, 1, 7)
    try:
        second.load_state_dict({"dataset_state": state} if stateful else state)
        seen = flat(received(second))
    except InvalidArgument:
        return
    assert len(seen) == len(set(seen)) and set(seen) <= set(range(SAMPLES))


@pytest.mark.parametrize(
    "state",
    [{}, {"version": 1}, {"_snapshot": None}, {"_snapshot": {"_worker_snapshots": {"a": {}}}}]
    + [{"dataset_state": None}, {"_snapshot": {"_worker_snapshots": {}}}],
)
def test_what_is_no_state_is_refused(folder: Path, state: Any) -> None:
    (loader,) = loaders(folder, "full", 1, 7)
    with pytest.raises(InvalidArgument):
        loader.load_state_dict(state)


def test_a_state_of_very_many_replicas_takes_no_memory_and_no_time(folder: Path) -> None:
    (loader,) = loaders(folder, "full", 1, 7)
    state = loader.state_dict() | {"replicas": 1 << 18, "workers": 1 << 17, "slots": 0}
    state["taken"] = [[replica, 0] for replica in range(1 << 17)]
    loader.load_state_dict(state)
    assert sorted(flat(received(loader))) == list(range(SAMPLES))
    loader.load_state_dict({**loader.state_dict(), "finished": []})
    with pytest.raises(InvalidArgument, match="not a state"):
        loader.load_state_dict(state | {"replicas": 1 << 32, "workers": 1, "taken": [[0, 1]]})
    with pytest.raises(InvalidArgument, match="replicas"):
        loader.store.sequence(replicas=1 << 32)
