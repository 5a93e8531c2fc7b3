"""Every sample of a mounted store comes once an epoch, with its own bytes, in an order that is asked for."""

from __future__ import annotations

import functools
import logging
import random
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock import _native
from penstock.core.log import log_once
from penstock.errors import InvalidArgument
from penstock.samples.order import Segment
from penstock.samples.store import Store, mount
from tests.support.sample_stores import Sample, epoch, mounted, samples, some_samples

ORDERS = ["full", "chunk"]
quick = settings(
    max_examples=40,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def contents(content: list[Sample]) -> dict[int, bytes]:
    return {index: data for index, (_, data) in enumerate(content)}


def indices(store: Store, **sequence: int) -> list[int]:
    store.sequence(**sequence)
    return list(epoch(store))


@quick
@given(samples(), st.sampled_from(ORDERS), st.integers(1, 5), st.integers(1, 40))
def test_processes_share_all_samples(content: list[Sample], order: str, world_size: int, n: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        mounted(Path(folder), content).close()
        found: dict[int, bytes] = {}
        for rank in range(world_size):
            with mount(folder, order, "64KiB", rank, world_size) as store:
                store.sequence(seed=3, epoch=2)
                share = epoch(store, n)
                assert not share.keys() & found.keys()
                assert len(share) == store.taken == store.replica_size
                found |= share
        assert found == contents(content)


@quick
@given(samples(), st.data())
def test_samples_are_read_by_name_and_index(content: list[Sample], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder, mounted(Path(folder), content) as store:
        assert list(store.names()) == [name for name, _ in content]
        for index, (name, value) in enumerate(content):
            assert store.index(name) == index
            assert store.name(index) == name
            assert store.read(name) == store.read(index) == value
        some = data.draw(st.lists(st.integers(0, len(content) - 1), max_size=30)) if content else []
        batch = store.read_many(some)
        assert batch.indices.tolist() == some
        assert [bytes(view) for view in batch] == [content[index][1] for index in some]
        assert batch.names() == [content[index][0] for index in some]
        by_name = store.read_many([content[index][0] for index in some])
        assert bytes(by_name.data) == bytes(batch.data)


@pytest.mark.parametrize("order", ORDERS)
def test_order_is_a_function_of_its_arguments(tmp_path: Path, order: str) -> None:
    with mounted(tmp_path, some_samples(), order=order) as store:
        first = indices(store, seed=1, epoch=1)
        assert indices(store, seed=1, epoch=1) == first
        assert first != sorted(first)
        assert indices(store, seed=1, epoch=2) != first != indices(store, seed=2, epoch=1)
        with mount(tmp_path, order, "64KiB") as other:
            assert indices(other, seed=1, epoch=1) == first


def test_orders_differ(tmp_path: Path) -> None:
    with mounted(tmp_path, some_samples(), order="full") as store:
        full = indices(store)
    with mount(tmp_path, "chunk", "64KiB") as store:
        assert indices(store) != full


@pytest.mark.parametrize("order", ORDERS)
def test_order_does_not_depend_on_how_it_is_taken(tmp_path: Path, order: str) -> None:
    with mounted(tmp_path, some_samples(), order=order) as store:
        store.sequence(seed=5)
        whole = list(epoch(store, 1000))
        for n in (1, 13):
            store.sequence(seed=5)
            assert list(epoch(store, n)) == whole
        store.sequence(seed=5, skip=37)
        assert store.taken == 37
        assert list(epoch(store, 10)) == whole[37:]


@pytest.mark.parametrize("order", ORDERS)
def test_the_rest_of_an_epoch_can_be_divided_anew(tmp_path: Path, order: str) -> None:
    content = some_samples()
    found: dict[int, bytes] = {}
    taken = []
    mounted(tmp_path, content).close()
    for rank in range(3):
        with mount(tmp_path, order, "64KiB", rank, 3) as store:
            store.sequence(seed=5)
            for _ in range(rank + 1):
                batch = store.bread(4)
                assert batch is not None
                found |= dict(zip(batch.indices.tolist(), map(bytes, batch), strict=True))
            taken.append(store.taken)
            slots = store.shape.slots
    for rank in range(2):
        with mount(tmp_path, order, "64KiB", rank, 2) as store:
            store.sequence(seed=5, after=[Segment(3, slots, tuple(taken))])
            rest = epoch(store)
            assert not rest.keys() & found.keys()
            found |= rest
    assert found == contents(content)


@pytest.mark.parametrize("order", ORDERS)
def test_several_stores_count_through(tmp_path: Path, order: str) -> None:
    parts = [some_samples(30, 1), [], some_samples(20, 2), [("0/5", b"also"), ("last", b"")]]
    for number, content in enumerate(parts):
        mounted(tmp_path / str(number), content).close()
    everything = [sample for content in parts for sample in content]
    with mount([tmp_path / str(number) for number in range(4)], order, "64KiB") as store:
        assert len(store) == len(everything)
        assert list(store.names()) == [name for name, _ in everything]
        assert epoch(store) == contents(everything)
        assert store.read("last") == b""
        assert [store.read(index) for index in range(len(store))] == [data for _, data in everything]


def test_the_first_of_two_stores_is_found_by_name(tmp_path: Path) -> None:
    mounted(tmp_path / "a", [("x", b"first")]).close()
    mounted(tmp_path / "b", [("y", b""), ("x", b"second")]).close()
    with mount([tmp_path / "a", tmp_path / "b"]) as store:
        assert store.read("x") == b"first"
        assert store.indices(["y", "x"]).tolist() == [1, 0]
        assert store.read(2) == b"second"


@pytest.mark.parametrize("order", ORDERS)
def test_an_empty_store_has_empty_epochs(tmp_path: Path, order: str) -> None:
    with mounted(tmp_path, [], order=order) as store:
        assert store.bread(5) is None
        assert list(store.names()) == []
        assert len(store.read_many([])) == 0


def test_bread_begins_a_sequence_where_there_is_none(tmp_path: Path) -> None:
    with mounted(tmp_path, some_samples()) as store:
        implied = list(epoch(store))
        assert indices(store, seed=0, epoch=0) == implied


@pytest.mark.parametrize("order", ORDERS)
def test_a_consumer_can_stop_early(tmp_path: Path, order: str) -> None:
    with mounted(tmp_path, some_samples(), order=order) as store:
        whole = indices(store, seed=1)
        for epochs in range(20):
            store.sequence(seed=epochs)
            assert store.bread(3) is not None
        assert indices(store, seed=1) == whole


@pytest.mark.parametrize("io", ["buffered", "direct"])
@pytest.mark.parametrize("order", ORDERS)
def test_both_io_paths_give_the_same(tmp_path: Path, order: str, io: str) -> None:
    content = some_samples()
    with mounted(tmp_path, content, order=order, io=io) as store:
        assert epoch(store) == contents(content)
        assert [store.read(index) for index in range(len(store))] == [data for _, data in content]
        assert bytes(store.read_many(range(10, 60)).data) == b"".join(data for _, data in content[10:60])


@pytest.mark.parametrize("order", ORDERS)
def test_reading_does_without_io_uring_and_says_so_once(
    tmp_path: Path, order: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    content = some_samples()
    plain = functools.partial(_native.SampleReader, ring=False)
    monkeypatch.setattr(_native, "SampleReader", plain)
    log_once.cache_clear()
    mounted(tmp_path, content).close()
    with caplog.at_level(logging.WARNING, "penstock"):
        for _ in range(2):
            with mount(tmp_path, order, "64KiB", io="direct") as store:
                assert epoch(store) == contents(content)
                assert store.io != "direct" or store.counters()["io_uring"] == 0
    told = sum("io_uring is refused" in record.getMessage() for record in caplog.records)
    assert told == 1 or store.io != "direct"


@pytest.mark.parametrize("order", ORDERS)
def test_what_was_read_is_counted(tmp_path: Path, order: str) -> None:
    content = some_samples()
    with mounted(tmp_path, content, order=order) as store:
        epoch(store)
        counters = store.counters()
        assert counters["samples"] == len(content)
        assert counters["bytes_read"] >= sum(len(data) for _, data in content)
        assert (counters["chunk_reads"] > 0) == (order == "chunk")


def test_batches_outlive_their_store(tmp_path: Path) -> None:
    content = some_samples()
    with mounted(tmp_path, content) as store:
        batches = [store.bread(9) for _ in range(5)]
    for batch in batches:
        assert batch is not None
        for index, view in zip(batch.indices.tolist(), batch, strict=True):
            assert bytes(view) == content[index][1]


def test_names_that_are_no_utf8_are_told_from_names_that_are_no_names(tmp_path: Path) -> None:
    content = [("\udced\udca0\udc80", b"bytes of a file name"), ("é", b"text")]
    with mounted(tmp_path, content) as store:
        assert store.read("\udced\udca0\udc80") == b"bytes of a file name"
        assert store.names().find_many(["\ud800", "\udced\udca0\udc80", "é"]).tolist() == [-1, 0, 1]
        assert "\ud800" not in store
        assert list(store.names()) == [name for name, _ in content]


@pytest.mark.parametrize("io", ["buffered", "direct"])
def test_samples_of_8_mib_have_their_length_elsewhere(tmp_path: Path, io: str) -> None:
    large = random.Random(0).randbytes((1 << 23) - 1)
    content = [("small", b"1"), ("large", large), ("after", b"2" * 5000)]
    with mounted(tmp_path, content, io=io) as store:
        assert (tmp_path / "large.bin").stat().st_size == 16
        assert store.sizes([0, 1, 2]).tolist() == [1, len(large), 5000]
        assert store.read("large") == large
        assert epoch(store) == contents(content)
        file = store.open("large")
        file.seek(-10, 2)
        assert file.read() == large[-10:]


def test_keys_are_names_or_integers_of_any_kind(tmp_path: Path) -> None:
    content = some_samples()
    with mounted(tmp_path, content) as store:
        some = [3, 1, 4]
        for keys in (some, tuple(some), np.array(some, np.uint8), torch.tensor(some), ["0/3", "0/1", 4]):
            assert store.indices(keys).tolist() == some
            assert bytes(store.read_many(keys)[1]) == content[1][1]
        assert store.read(np.int32(3)) == content[3][1]
        store.sequence(seed=np.int64(3), epoch=np.uint8(1))
        assert store.bread(np.int64(3)) is not None
        with pytest.raises(InvalidArgument, match="one name"):
            store.read_many("0/3")


def test_what_is_no_sample_is_refused(tmp_path: Path) -> None:
    with mounted(tmp_path, some_samples()) as store:
        for key in (100, -1, "no such", "\ud800", 1.5, None):
            with pytest.raises(InvalidArgument, match=r"no sample|not a sample|100"):
                store.read(key)  # type: ignore[arg-type]
        for keys in ([0, 100], ["0/1", "none"], [0, "none"]):
            with pytest.raises(InvalidArgument):
                store.read_many(keys)  # type: ignore[arg-type]
        for n in (0, -3):
            with pytest.raises(InvalidArgument, match="1 or more"):
                store.bread(n)
        for wrong in ({"seed": -1}, {"replica": 3}, {"replicas": 0}, {"epoch": 1 << 70}, {"skip": -1}):
            with pytest.raises(InvalidArgument, match=r"sequence(?!.*incompatible)"):
                store.sequence(**wrong)
