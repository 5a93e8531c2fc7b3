"""Filtered and mapped stores are stores: whole batches, every kept sample once, and positions that go on."""

from __future__ import annotations

import itertools
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from penstock.errors import InvalidArgument, SampleError
from penstock.samples import Loader, filtered, mapped, merge_states, mount
from penstock.samples.decode import Sample
from penstock.samples.epochs import from_state
from tests.support.orders import native
from tests.support.stores import write_store

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

SAMPLES = 150
CACHE_BYTES = 5 * (4096 + 1024 + 8192)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("filters") / "store"
    content = random.Random(0)
    named = [(f"n{i}", bytes([i]) + content.randbytes(content.randrange(900))) for i in range(SAMPLES)]
    write_store(folder, named, labels=[i % 3 for i in range(SAMPLES)], classes=["a", "b", "c"])
    return folder


def store(folder: Path, order: str = "chunk", **options: Any) -> Any:
    return mount(folder, order, CACHE_BYTES, timeout_s=10, **options)


@settings(max_examples=50)
@given(
    kept=st.sets(st.integers(0, SAMPLES - 1), min_size=1),
    order=st.sampled_from(["chunk", "full"]),
    batch_size=st.integers(1, 13),
    stops=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), max_size=3),
    last=st.integers(1, 4),
)
def test_every_kept_sample_comes_once_to_any_number_of_processes(
    folder: Path, kept: set[int], order: str, batch_size: int, stops: list[tuple[int, int]], last: int
) -> None:
    state: dict[str, Any] | None = None
    seen: list[int] = []
    for world_size, batches in [*stops, (last, None)]:
        states = []
        for rank in range(world_size):
            source = filtered(store(folder, order, rank=rank, world_size=world_size), sorted(kept))
            loader = Loader(source, batch_size, seed=3, decode=lambda sample: (sample.index, sample.data[0]))
            if state is not None:
                loader.load_state_dict(state)
            for indices, firsts in itertools.islice(loader, batches):
                assert indices.tolist() == firsts.tolist()  # the bytes are those of the sample
                seen += indices.tolist()
            states.append(loader.state_dict())
        state = merge_states(states)
        if from_state(state).over:
            break
    assert sorted(seen) == sorted(kept)


def test_batches_of_a_filtered_store_are_whole_and_shuffled(folder: Path) -> None:
    whole = store(folder)
    third = filtered(whole, whole.labels == 2)
    loader = Loader(third, 8, decode_batch=lambda batch: batch.indices.tolist())
    epochs = [list(loader), list(loader)]
    for batches in epochs:
        assert [len(batch) for batch in batches] == [8] * 6 + [2]
        assert sorted(itertools.chain(*batches)) == list(range(2, SAMPLES, 3))
    assert epochs[0] != epochs[1] and epochs[0] != sorted(epochs[0])
    assert len(loader) == 7 and len(third) == 50


def test_a_function_is_called_once_for_each_sample(folder: Path) -> None:
    called: list[int] = []

    def keep(sample: Sample) -> bool:
        called.append(sample.index)
        return sample.label == 1 and len(sample.data) > 300

    chosen = filtered(store(folder), keep)
    assert sorted(called) == list(range(SAMPLES))
    sizes = store(folder).sizes(range(SAMPLES))
    assert chosen.kept.tolist() == [i for i in range(SAMPLES) if i % 3 == 1 and sizes[i] > 300]
    saved = filtered(store(folder), chosen.kept)
    assert saved.identity == chosen.identity
    assert filtered(store(folder), chosen.kept[1:]).identity != chosen.identity
    list(Loader(chosen, 8))
    assert len(called) == SAMPLES


@pytest.mark.parametrize("order", ["chunk", "full"])
def test_the_order_is_that_of_the_kept_samples_numbered_through(folder: Path, order: str) -> None:
    kept = np.flatnonzero(np.random.default_rng(0).random(SAMPLES) < 0.4)
    source = store(folder, order)
    firsts = np.searchsorted(kept, source.firsts).astype(np.uint64)
    for replica in range(3):
        numbers = native(
            order, firsts, seed=5, epoch=2, replicas=3, replica=replica, slots=source.slots, after=()
        )
        source.sequence(seed=5, epoch=2, replica=replica, replicas=3, kept=kept)
        assert source.bread(SAMPLES).indices.tolist() == kept[numbers.take(SAMPLES)].tolist()


def test_chunks_without_kept_samples_are_not_read(folder: Path) -> None:
    source = filtered(store(folder), range(10))
    source.sequence()
    while source.bread(4) is not None:
        pass
    read_bytes = source.store.counters()["bytes_read"]
    assert 0 < read_bytes < source.store.manifests[0].size_bytes / 3


def double(sample: Sample) -> dict[str, int]:
    return {"twice": 2 * sample.index, "length": len(sample.data)}


def increased(sample: Sample) -> int:
    value: int = sample.fields["twice"] + 1
    return value


@pytest.mark.parametrize("threads", [0, 2])
def test_maps_compose_and_positions_stay(folder: Path, threads: int) -> None:
    def make() -> Loader:
        return Loader(mapped(mapped(store(folder), double), increased), 8, num_threads=threads)

    plain = Loader(store(folder), 8, decode_batch=lambda batch: batch.indices.tolist())
    whole = [[2 * index + 1 for index in batch] for batch in plain]
    first, second = make(), make()
    begun = [batch.tolist() for batch in itertools.islice(first, 5)]
    second.load_state_dict(first.state_dict())
    assert begun + [batch.tolist() for batch in second] == whole


def test_maps_run_in_workers_and_travel_with_batches(folder: Path) -> None:
    source = mapped(filtered(store(folder), range(20)), double)
    loader = DataLoader(Loader(source, 4), batch_size=None, num_workers=2)
    assert sorted(i for batch in loader for i in batch["twice"].tolist()) == list(range(0, 40, 2))
    source.sequence()
    batch = source.bread(3)
    assert batch is not None
    again = pickle.loads(pickle.dumps(batch))
    assert again.decoded() == batch.decoded() and again.names() == batch.names()
    assert np.array_equal(again.labels, batch.labels)


def test_a_map_that_fails_names_the_sample(folder: Path) -> None:
    loader = Loader(mapped(store(folder), lambda sample: 1 / (sample.index - 7)), 8)
    with pytest.raises(SampleError, match=r"sample 7 \('n7'\) could not be decoded: ZeroDivisionError"):
        list(loader)


def test_what_cannot_be_filtered_or_mapped_is_refused(folder: Path) -> None:
    whole = store(folder)
    with pytest.raises(InvalidArgument, match="keeps none of 150 samples"):
        filtered(whole, np.zeros(SAMPLES, bool))
    with pytest.raises(InvalidArgument, match="give one bool for each of 150 samples"):
        filtered(whole, np.ones(SAMPLES - 1, bool))
    with pytest.raises(InvalidArgument, match="there is no sample 150"):
        filtered(whole, [3, SAMPLES])
    with pytest.raises(SampleError, match="could not be decoded: ValueError: The truth value of an array"):
        filtered(whole, lambda sample: np.array([True, False]))  # type: ignore[arg-type, return-value]
    with pytest.raises(InvalidArgument, match="is a path"):
        filtered(str(folder), [1])  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="a Mapped cannot be filtered: filter its stores"):
        filtered(mapped(whole, double), [1])  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="a map is a function of a sample, not a int"):
        mapped(whole, 3)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="do not ascend"):
        whole.sequence(kept=np.array([3, 1]))
    one, other = Loader(filtered(whole, [1, 2]), 1), Loader(filtered(store(folder), [1, 3]), 1)
    with pytest.raises(InvalidArgument, match="of another store"):
        other.load_state_dict(one.state_dict())
