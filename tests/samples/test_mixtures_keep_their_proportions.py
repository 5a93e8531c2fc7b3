"""A mixture has its proportions in every window, and gives every sample of a pass once, whoever reads it."""

from __future__ import annotations

import itertools
import json
import pickle
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchdata.stateful_dataloader import StatefulDataLoader

from penstock.errors import InvalidArgument
from penstock.samples import (
    Batch,
    Loader,
    Mixture,
    Store,
    filtered,
    mapped,
    merge_states,
    mount,
    pack,
    upload,
)
from penstock.samples.epochs import from_state
from penstock.samples.interleaving import Division, Left
from penstock.samples.order import Segment
from tests.support.remote_stores import serving, url_of
from tests.support.sample_stores import flat, received
from tests.support.stores import write_store

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # on a machine of few cores
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # of torchdata
]

SIZES = (97, 40, 3)
KEPT = [index for index in range(SIZES[0]) if index % 3]
CACHE_BYTES = 5 * (4096 + 1024 + 8192)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixtures")
    content = random.Random(0)
    for number, samples in enumerate(SIZES):
        named = [(f"{number}/{i}", content.randbytes(content.randrange(900))) for i in range(samples)]
        write_store(folder / str(number), named)
    return folder


def stores(folder: Path, rank: int = 0, world_size: int = 1) -> list[Any]:
    """Of 64, 40 and 3 samples: a filtered one in chunk order, one in full order, and a tiny one."""
    orders = ("chunk", "full", "chunk")
    made = [
        mount(folder / str(number), order, CACHE_BYTES, rank, world_size, timeout_s=10)
        for number, order in enumerate(orders)
    ]
    return [filtered(made[0], KEPT), *made[1:]]


def loaders(
    folder: Path,
    world_size: int,
    batch_size: int,
    weights: Sequence[float],
    samples: int | None,
    **options: Any,
) -> list[Loader]:
    return [
        Loader(
            Mixture(
                dict(zip(stores(folder, rank, world_size), weights, strict=True)), samples_per_epoch=samples
            ),
            batch_size,
            decode_batch=lambda batch: batch.indices.tolist(),
            **options,
        )
        for rank in range(world_size)
    ]


def check_passes(seen: list[int], draws: Sequence[int]) -> None:
    """Each source has given as many as it was to, and none of its samples twice more than another."""
    counts = Counter(seen)
    sources = [KEPT, range(97, 137), range(137, 140)]
    assert len(seen) == sum(draws) and counts.keys() <= {i for source in sources for i in source}
    for source, drawn in zip(sources, draws, strict=True):
        found = [counts[index] for index in source]
        assert sum(found) == drawn
        assert max(found) - min(found) <= (drawn % len(source) > 0)


mixes = st.sampled_from([(64, 40, 3), (1, 1, 1), (5, 0.5, 0), (0.1, 0.2, 0.7)])
lengths = st.sampled_from([None, 1, 50, 400])
stops = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), max_size=3)


@settings(max_examples=50)
@given(
    weights=mixes,
    samples=lengths,
    batch_size=st.integers(1, 11),
    stops=stops,
    last=st.integers(1, 5),
    epoch=st.integers(0, 2),
)
def test_other_numbers_of_processes_get_every_remaining_sample_once(
    folder: Path,
    weights: tuple[float, ...],
    samples: int | None,
    batch_size: int,
    stops: list[tuple[int, int]],
    last: int,
    epoch: int,
) -> None:
    state: dict[str, Any] | None = None
    seen: list[int] = []
    draws: Sequence[int] = ()
    for world_size, batches in [*stops, (last, None)]:
        states = []
        for loader in loaders(folder, world_size, batch_size, weights, samples, seed=3):
            assert isinstance(loader.store, Mixture)
            draws = loader.store.draws(epoch)
            loader.set_epoch(epoch)
            if state is not None:
                loader.load_state_dict(state)
            seen += flat(received(loader, batches))
            states.append(loader.state_dict())
        merged = merge_states(states)
        if from_state(merged).over:
            break
        together = not any(from_state(each).over for each in states)
        state = json.loads(json.dumps(states[-1] if together else merged))
    check_passes(seen, draws)


@settings(max_examples=30)
@given(
    weights=mixes,
    uneven=st.lists(st.integers(0, 30), min_size=1, max_size=4),
    world_size=st.integers(1, 4),
)
def test_processes_that_took_unequally_much_merge_their_states(
    folder: Path, weights: tuple[float, ...], uneven: list[int], world_size: int
) -> None:
    seen, states = [], []
    for loader, batches in zip(loaders(folder, len(uneven), 3, weights, 300), uneven, strict=True):
        seen += flat(received(loader, batches))
        states.append(loader.state_dict())
    merged = merge_states(states)
    draws: Sequence[int] = ()
    for loader in loaders(folder, world_size, 5, weights, 300):
        assert isinstance(loader.store, Mixture)
        draws = loader.store.draws()
        if not from_state(merged).over:
            loader.load_state_dict(merged)
            seen += flat(received(loader))
    check_passes(seen, draws)


@settings(max_examples=30)
@given(
    weights=mixes,
    batch_size=st.integers(1, 13),
    world_size=st.integers(1, 3),
    stops=st.lists(st.integers(0, 9), max_size=3),
    drop_last=st.booleans(),
    threads=st.sampled_from([0, 2]),
)
def test_the_same_number_of_processes_gets_the_same_batches(
    folder: Path,
    weights: tuple[float, ...],
    batch_size: int,
    world_size: int,
    stops: list[int],
    drop_last: bool,
    threads: int,
) -> None:
    def make() -> list[Loader]:
        options: dict[str, Any] = {"drop_last": drop_last, "num_threads": threads, "seed": 5}
        return loaders(folder, world_size, batch_size, weights, 200, **options)

    whole = [received(loader) for loader in make()]
    assert [len(each) for each in whole] == [len(loader) for loader in make()]
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


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three stores of 20,000, 8,000 and 700 samples of one byte."""
    folder = tmp_path_factory.mktemp("many")
    for number, samples in enumerate((20_000, 8_000, 700)):
        pack(((str(i), b"x") for i in range(samples)), folder / str(number))
    return folder


def sources_of(mixtures: Sequence[Mixture], batch_size: int) -> np.ndarray[Any, Any]:
    """The source of each sample, in the order in which processes in step would get them."""
    everyone = []
    for rank, mixture in enumerate(mixtures):
        mixture.sequence(seed=1, replica=rank, replicas=len(mixtures))
        batches: list[np.ndarray[Any, Any]] = []
        while (batch := mixture.bread(batch_size)) is not None:
            batches.append(batch.sources)  # type: ignore[attr-defined]
        everyone.append(batches)
    rounds = itertools.zip_longest(*everyone, fillvalue=np.empty(0, np.int64))
    return np.concatenate([batch for each in rounds for batch in each])


@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 256), (7, 64), (96, 16)])
def test_every_window_of_10000_samples_has_its_proportions(
    many: Path, world_size: int, batch_size: int
) -> None:
    weights = (0.55, 0.3, 0.15)
    mixtures = [
        Mixture(
            dict(zip([mount(many / str(number)) for number in range(3)], weights, strict=True)),
            samples_per_epoch=40_000,
        )
        for _ in range(world_size)
    ]
    sources = sources_of(mixtures, batch_size)
    assert len(sources) == 40_000
    for source, weight in enumerate(weights):
        until = np.concatenate([[0], np.cumsum(sources == source)])
        counts = until[10_000:] - until[:-10_000]
        assert np.abs(counts / 10_000 - weight).max() < 0.01
        assert until[-1] == round(40_000 * weight)
    for mixture in mixtures:
        for store in mixture.sources:
            assert isinstance(store, Store)
            store.close()


def test_weights_change_where_they_say_over_all_epochs(many: Path) -> None:
    a, b, c = (mount(many / str(number)) for number in range(3))
    weights: dict[int, Any] = {0: {a: 1, b: 1}, 6_000: {a: 1, c: 3}, 15_000: {b: 2}}
    mixture = Mixture(weights, samples_per_epoch=10_000)
    assert mixture.draws(0) == (3_000 + 1_000, 3_000, 3_000)
    assert mixture.draws(1) == (1_250, 5_000, 3_750)
    mixture.sequence(epoch=0)
    first = np.concatenate([mixture.bread(1).sources for _ in range(6_000)])  # type: ignore[union-attr]
    assert set(first) == {0, 1}
    rest = mixture.bread(10_000)
    assert rest is not None and set(rest.sources) == {0, 2}  # type: ignore[attr-defined]
    assert mixture.bread(1) is None


def test_by_default_an_epoch_shows_every_sample(folder: Path) -> None:
    a, b, c = stores(folder)
    assert len(Mixture({a: 64, b: 40, c: 3})) == 107
    assert Mixture({a: np.float32(0.64), b: 0.4, c: 0.03}).draws() == (64, 40, 3)
    mixture = Mixture({a: 1, b: 1, c: 2})
    assert mixture.draws() == (64, 64, 128)
    # Nothing is drawn from b later: all of it is seen before.
    changing = Mixture({0: {a: 1, b: 1}, 100: {a: 1, c: 1}})
    assert changing.draws() == (64, 50, 14)


def test_formats_and_places_mix(tmp_path: Path) -> None:
    pack({"x": np.arange(24, dtype=np.float32).reshape(12, 2)}, tmp_path / "records")
    named = ((str(i), {"x": np.full(2, 100 + i, np.float32)}) for i in range(8))
    pack(named, tmp_path / "maps")
    write_store(
        tmp_path / "bytes", [(f"b{i}", bytes([i])) for i in range(4)], labels=[2] * 4, classes=["a", "b", "c"]
    )
    with serving(tmp_path) as target:
        upload(tmp_path / "bytes", url_of(target))
        remote = mapped(
            mount(url_of(target), timeout_s=20),
            lambda sample: {"x": torch.full((2,), 200.0 + sample.data[0])},
        )
        records, maps = mount(tmp_path / "records"), mount(tmp_path / "maps")
        mixture = Mixture({records: 12, maps: 8, remote: 4})
        loader = Loader(mixture, 5, num_threads=2)
        batches = list(loader)
        rows = torch.cat([batch["x"] for batch in batches])
        assert sorted(rows[:, 0].tolist()) == [
            *map(float, range(0, 24, 2)),
            *range(100, 108),
            *range(200, 204),
        ]
        mixture.sequence()
        batch = mixture.bread(24)
        assert batch is not None and batch.labels is not None
        assert [batch.labels[i] for i in range(24)] == [2 if source == 2 else -1 for source in batch.sources]
        own = {0: records, 1: maps}
        for place, (source, name) in enumerate(zip(batch.sources.tolist(), batch.names(), strict=True)):
            if source in own:
                assert bytes(batch[place]) == own[source].read(name)
            else:
                assert name == f"b{batch[place][0]}"
        again: Batch = pickle.loads(pickle.dumps(Mixture({records: 1, maps: 1}).bread(6)))
        assert len(again.names()) == len(again.decoded()) == 6
        for store in (records, maps):
            store.close()


@settings(max_examples=20)
@given(damaged=st.sets(st.integers(0, 39)), batch_size=st.integers(1, 9), tiny=st.integers(1, 3))
def test_damaged_samples_are_left_out_and_nothing_else(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, damaged: set[int], batch_size: int, tiny: int
) -> None:
    other = tmp_path_factory.mktemp("damaged")
    write_store(other, [(str(i), bytes([i]) * 100) for i in range(40)])
    with open(other / "data-00000.bin", "r+b") as file:
        for index in damaged:
            file.seek(100 * index)
            file.write(b"\xff")
    whole, partly = mount(folder / "1"), mount(other, "full", on_damage="skip")
    mixture = Mixture({whole: 40, partly: 40 * tiny}, samples_per_epoch=40 + 40 * tiny)
    seen = Counter(
        flat(received(Loader(mixture, batch_size, decode_batch=lambda batch: batch.indices.tolist())))
    )
    assert seen == Counter(
        [*range(40), *(40 + i for i in range(40) if i not in damaged for _ in range(tiny))]
    )
    assert set(partly.damaged) == damaged


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_data_loader_goes_on(folder: Path, workers: int) -> None:
    def make() -> StatefulDataLoader[Any]:
        (loader,) = loaders(folder, 1, 4, (1, 1, 1), 200, seed=2)
        return StatefulDataLoader(loader, batch_size=None, num_workers=workers)

    whole = list(make())
    first = make()
    begun = list(itertools.islice(iter(first), 11))
    second = make()
    second.load_state_dict(first.state_dict())
    assert begun + list(second) == whole
    check_passes(flat(whole), (67, 67, 66))


@pytest.mark.parametrize(("workers", "then"), [(2, 3), (3, 0), (0, 2)])
def test_a_stateful_data_loader_s_state_goes_on_with_other_numbers_of_workers(
    folder: Path, workers: int, then: int
) -> None:
    for taken in (1, 12):
        (loader,) = loaders(folder, 1, 4, (1, 1, 1), 200)
        first = StatefulDataLoader(loader, batch_size=None, num_workers=workers)
        seen = list(itertools.islice(iter(first), taken))
        (other,) = loaders(folder, 1, 4, (1, 1, 1), 200)
        other.load_state_dict(json.loads(json.dumps(first.state_dict())))
        seen += StatefulDataLoader(other, batch_size=None, num_workers=then)
        check_passes(flat(seen), (67, 67, 66))


def test_what_cannot_be_mixed_is_refused(folder: Path, tmp_path: Path) -> None:
    a, b, _ = stores(folder)
    write_store(tmp_path / "none", [])
    for sources, message in [
        ({}, "a mixture of nothing"),
        ({0: {}}, "a mixture of nothing"),
        ([a, b], "made of a dict of stores and weights"),
        ({a: 1, b: -0.5}, "the weight -0.5 of Store"),
        ({a: 1, b: float("nan")}, "the weight nan of"),
        ({a: 1, b: True}, "the weight True of"),
        ({a: 1, b: 10**400}, "the weight 1000"),
        ({a: 0, b: 0}, "sum to zero"),
        ({0: {a: 1}, 10: {b: 0}}, "sum to zero"),
        ({5: {a: 1}}, "the first from 0 on"),
        ({"photos.store": 1}, "is a path: give the store"),
        ({3.5: 1}, "a float gives no samples"),
        ({Mixture({a: 1}): 1}, "cannot hold a Mixture"),
        ({mount(tmp_path / "none"): 1}, "holds no samples to mix"),
        ({b: 1, mount(folder / "0", rank=1, world_size=2): 1}, "mount all with the same rank and world_size"),
    ]:
        with pytest.raises(InvalidArgument, match=message):
            Mixture(sources)  # type: ignore[arg-type]
    for wrong in (0, 1.5, float("nan"), "100", 1 << 60):
        with pytest.raises(InvalidArgument, match=f"samples_per_epoch={wrong!r}: give a whole number"):
            Mixture({a: 1}, samples_per_epoch=wrong)  # type: ignore[arg-type]
    for right in (np.int64(1000), 1e3):
        mixed = Mixture({a: 1}, samples_per_epoch=right)  # type: ignore[arg-type]
        assert mixed.identity == Mixture({a: 1}, samples_per_epoch=1000).identity
    one, other = Loader(Mixture({a: 1, b: 1}), 4), Loader(Mixture({a: 1, b: 2}), 4)
    with pytest.raises(InvalidArgument, match="with the same weights, filters and packing"):
        other.load_state_dict(one.state_dict())
    shared = Loader(Mixture({a: 1, filtered(a.store, [1, 2, 4]): 1}), 4)
    with pytest.raises(InvalidArgument, match="another iteration has begun on this store"):
        list(shared)


STATE = st.sampled_from(
    [-1, 0, 1, 7, 1 << 20, 1 << 40, 1.5, None, "", [], [4, 0, 1], [4, 0], [[2, [4, 0, 1], [3, 3]]]]
    + [[[2, 4, [3, 3]]], [[1, [4, 0, 1], [1 << 40]]], [[3, [1, 1, 1], [1]]], [[0, 1 << 40]], [[5, 1]]]
)


@settings(max_examples=200)
@given(
    changes=st.dictionaries(
        st.sampled_from(["after", "taken", "slots", "replicas", "workers", "samples", "epoch", "finished"]),
        STATE,
        min_size=1,
        max_size=3,
    )
)
def test_a_changed_state_is_refused_or_gives_no_sample_too_often(
    folder: Path, changes: dict[str, Any]
) -> None:
    (first,) = loaders(folder, 1, 7, (64, 40, 3), None)
    received(first, 3)
    (second,) = loaders(folder, 1, 7, (64, 40, 3), None)
    try:
        second.load_state_dict({**first.state_dict(), **changes})
        seen = flat(received(second))
    except InvalidArgument:
        return
    assert len(seen) == len(set(seen)) and len(seen) <= 107


@settings(max_examples=60)
@given(data=st.data())
def test_rounds_of_passes_are_left_out_and_nothing_changes(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    draws = [data.draw(st.integers(0, 200)) for _ in sizes]
    segments = []
    left = Left.whole([draws], sizes)
    for _ in range(data.draw(st.integers(1, 3))):
        replicas = data.draw(st.integers(1, 5))
        shares = Division(left, replicas).quotas(np.arange(replicas))[0].sum(1).tolist()
        least = data.draw(st.sampled_from([0, 1, 2]))  # halves that all have taken
        taken = tuple(data.draw(st.integers(share * least // 2, share)) for share in shares)
        segments.append(Segment(replicas, tuple(0 for _ in sizes), taken))
        left = left.after(segments[-1])
    slowly = Left.whole([draws], sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Division, "rounds", lambda *_: 0)
        for segment in segments:
            slowly = slowly.after(segment)
    assert left == slowly


def test_a_long_epoch_of_a_tiny_store_goes_on_at_once(folder: Path) -> None:
    """3 samples come 200 million times."""

    def loader(rank: int, world_size: int) -> Loader:
        _, big, tiny = stores(folder, rank, world_size)
        mixed = Mixture({big: 0.4, tiny: 0.6}, samples_per_epoch=1_000_000_000)
        return Loader(mixed, 10, decode_batch=lambda batch: batch.indices.tolist())

    one, again = loader(0, 1), loader(0, 1)
    state = one.state_after(90_000_000, 1, 0)
    again.load_state_dict(state)
    batches = list(itertools.islice(again, 6))
    assert again.state_dict() == one.state_after(90_000_006, 1, 0)
    assert max(Counter(itertools.chain(*batches))[SIZES[1] + i] for i in range(3)) <= 13
    other = loader(1, 3)
    other.load_state_dict(state)
    assert len(next(iter(other))) == 10
