"""Loaders feed training: directly, through DataLoaders of any kind, and by index."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from penstock.core.log import log_once
from penstock.errors import InvalidArgument, InvalidFile, SampleError
from penstock.samples import Loader, SampleDataset, encode, mount, pack
from penstock.samples.decode import Sample
from penstock.samples.store import Batch
from tests.support.stores import write_store

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # on a machine of few cores
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # of torchdata
]

SAMPLES = 103


def content(index: int) -> bytes:
    return f"{index}: ".encode() + bytes(index % 251 for _ in range(index * 7 % 300))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("feed") / "store"
    samples = [(f"sample {i}", content(i)) for i in range(SAMPLES)]
    write_store(folder, samples, labels=[i % 3 for i in range(SAMPLES)], classes=["a", "b", "c"])
    return folder


def indices(batch: Batch) -> list[int]:
    return batch.indices.tolist()


def loader_of(
    folder: Path, batch_size: int = 8, rank: int = 0, world_size: int = 1, **options: Any
) -> Loader:
    store = mount(folder, "chunk", 4 * 13312, rank, world_size, timeout_s=30)
    return Loader(store, batch_size, **{"decode_batch": indices, **options})


def flat(batches: Any) -> list[int]:
    return [index for batch in batches for index in batch]


def failure_of(loader: DataLoader[Any]) -> tuple[type, str]:
    """The error that ends an iteration."""
    iterator = iter(loader)
    try:
        for _ in iterator:
            pass
    except Exception as error:
        if loader.num_workers:
            iterator._shutdown_workers()  # collected as garbage, it would wait ten seconds for them
        return type(error), str(error)
    raise AssertionError("there was no error")


ALL = list(range(SAMPLES))


# What a batch is


def test_raw_batches_are_tensors_where_they_lie(folder: Path) -> None:
    seen = []
    for batch in loader_of(folder, decode_batch=None):
        assert {name: tensor.dtype for name, tensor in batch.items()} == {
            "data": torch.uint8,
            "offsets": torch.int64,
            "indices": torch.int64,
            "labels": torch.int64,
        }
        for place, index in enumerate(batch["indices"].tolist()):
            begin, end = batch["offsets"][place : place + 2]
            assert bytes(batch["data"][begin:end].numpy()) == content(index)
        assert batch["labels"].tolist() == [index % 3 for index in batch["indices"].tolist()]
        seen += batch["indices"].tolist()
    assert sorted(seen) == ALL


def test_records_are_tensors_by_field(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "image": rng.random((50, 3, 2), dtype=np.float32),
        "small": rng.integers(0, 200, 50).astype(np.uint8),
        "label": np.arange(50),
    }
    pack(arrays, tmp_path / "store")
    seen = []
    for batch in Loader(mount(tmp_path / "store"), 7):
        for row, number in enumerate(batch["label"].tolist()):
            assert torch.equal(batch["image"][row], torch.from_numpy(arrays["image"][number]))
            assert batch["small"][row] == arrays["small"][number]
        seen += batch["label"].tolist()
    assert sorted(seen) == list(range(50))


def test_maps_are_joined_as_torch_does(tmp_path: Path) -> None:
    pack(
        [(str(i), {"text": f"t{i}", "x": np.full(3, i, np.float32), "y": i}) for i in range(20)],
        tmp_path / "s",
    )
    for batch in Loader(mount(tmp_path / "s"), 4):
        assert batch["text"] == [f"t{y}" for y in batch["y"].tolist()]
        assert torch.equal(batch["x"], batch["y"][:, None].expand(-1, 3).float())
    pack([(str(i), {"x": np.zeros(i)}) for i in range(20)], tmp_path / "ragged")
    with pytest.raises(InvalidArgument, match="collate_fn=list"):
        list(Loader(mount(tmp_path / "ragged"), 4))
    lists = list(Loader(mount(tmp_path / "ragged"), 4, collate_fn=list))
    assert sorted(len(sample["x"]) for batch in lists for sample in batch) == list(range(20))


@pytest.mark.parametrize("threads", [0, 3])
def test_a_decode_function_gets_samples_with_all_that_is_known_of_them(folder: Path, threads: int) -> None:
    def decode(sample: Sample) -> tuple[int, int, str, int, bool]:
        whole = bytes(sample.data) == content(sample.index) == sample.fields
        return sample.index, sample.label, sample.name, len(sample.data), whole

    plain = [batch[0].tolist() for batch in loader_of(folder, decode_batch=None, decode=decode)]
    seen = []
    for index, label, name, size, whole in loader_of(
        folder, decode_batch=None, decode=decode, num_threads=threads, decoded_bytes=4096
    ):
        assert torch.equal(label, index % 3)
        assert list(name) == [f"sample {i}" for i in index.tolist()]
        assert size.tolist() == [len(content(i)) for i in index.tolist()]
        assert whole.all()
        seen.append(index.tolist())
    assert seen == plain  # threads keep the order
    assert sorted(flat(seen)) == ALL


def test_threads_work_at_once_and_hold_no_more_than_they_may(folder: Path) -> None:
    together = threading.Barrier(2, timeout=20)
    given = 0

    def slow(batch: Batch) -> list[int]:
        nonlocal given
        given += 1
        if given <= 2:
            together.wait()
        return indices(batch)

    assert sorted(flat(loader_of(folder, decode_batch=slow, num_threads=2))) == ALL
    counted = []
    few = loader_of(folder, decode_batch=lambda batch: counted.append(1), num_threads=1, decoded_bytes=1)
    iterator = iter(few)
    next(iterator)
    time.sleep(0.05)
    assert len(counted) <= 2


def test_an_error_of_a_decode_function_comes_out_as_it_is(folder: Path) -> None:
    def fails(batch: Batch) -> None:
        raise KeyError("mine")

    for threads in (0, 2):
        with pytest.raises(KeyError, match="mine"):
            list(loader_of(folder, decode_batch=fails, num_threads=threads))


@pytest.mark.parametrize("threads", [0, 2])
def test_an_error_of_decoding_a_sample_names_the_sample(folder: Path, tmp_path: Path, threads: int) -> None:
    def fails(sample: Sample) -> int:
        return 1 // (sample.index - 7)

    with pytest.raises(SampleError, match=r"sample 7 \('sample 7'\) .*ZeroDivisionError") as caught:
        list(loader_of(folder, decode_batch=None, decode=fails, num_threads=threads))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(SampleError, match=r"sample 7 \('sample 7'\)"):
        SampleDataset(mount(folder), decode=fails).__getitems__([3, 7])
    write_store(tmp_path, [("right", encode({"x": 1})), ("wrong", b"\xff")], encoding="msgpack")
    with mount(tmp_path) as store:
        for read in (
            lambda: list(Loader(store, 2, num_threads=threads)),
            lambda: list(Loader(store, 2, decode=lambda sample: sample.fields, num_threads=threads)),
            lambda: store.sample("wrong"),
        ):
            with pytest.raises(InvalidFile, match=r"sample 1 \('wrong'\) cannot be decoded"):
                read()


@pytest.mark.parametrize("threads", [0, 2])
def test_an_iteration_that_another_one_replaced_says_so(folder: Path, threads: int) -> None:
    loader = loader_of(folder, num_threads=threads)
    first = iter(loader)
    next(first)
    second = iter(loader)
    with pytest.raises(InvalidArgument, match="another iteration has begun"):
        list(first)
    assert sorted(flat(second)) == ALL


def test_a_decode_function_that_hangs_is_not_waited_for_without_end(folder: Path) -> None:
    free = threading.Event()
    loader = loader_of(folder, decode_batch=lambda batch: free.wait(20), num_threads=1, decode_timeout_s=0.1)
    with pytest.raises(SampleError, match="to be decoded by 1 threads"):
        next(iter(loader))
    free.set()


def test_a_consumer_that_stops_early_leaves_no_thread(folder: Path) -> None:
    before = threading.active_count()
    for _ in range(20):
        for _batch in loader_of(folder, num_threads=2):
            break
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_two_iterations_at_once_of_one_store_are_refused(folder: Path) -> None:
    loader = loader_of(folder)
    first = iter(loader)
    next(first)
    other = Loader(loader.store, 4)
    next(iter(other))
    with pytest.raises(InvalidArgument, match="mount it once for each Loader"):
        next(first)


def test_arguments_that_cannot_be_used_are_refused(folder: Path) -> None:
    store = mount(folder)
    with pytest.raises(InvalidArgument, match="batch_size=0"):
        Loader(store, 0)
    with pytest.raises(InvalidArgument, match="give one of them"):
        Loader(store, 1, decode=bytes, decode_batch=indices)


def test_pinned_memory_without_a_device_is_said_to_have_no_effect(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    log_once.cache_clear()
    list(loader_of(folder, decode_batch=None, pin_memory=True))
    assert ["no accelerator" in record.message for record in caplog.records] == [True]


# Epochs


def test_each_iteration_is_the_next_epoch_and_set_epoch_chooses(folder: Path) -> None:
    loader = loader_of(folder)
    first, second = list(loader), list(loader)
    assert first != second and sorted(flat(first)) == sorted(flat(second)) == ALL
    loader.set_epoch(0)
    assert list(loader) == first
    assert list(loader) == second


@pytest.mark.parametrize("persistent", [False, True])
def test_epochs_of_a_data_loader_with_workers_differ_and_can_be_chosen(
    folder: Path, persistent: bool
) -> None:
    loader = loader_of(folder, workers=2)
    through = DataLoader(loader, batch_size=None, num_workers=2, persistent_workers=persistent)
    epochs = [list(through) for _ in range(3)]
    assert all(sorted(flat(epoch)) == ALL for epoch in epochs)
    assert len({str(epoch) for epoch in epochs}) == 3
    loader.set_epoch(1)
    assert list(through) == epochs[1]
    assert list(through) == epochs[2]
    assert loader.epoch == 3


def test_a_data_loader_made_anew_with_the_same_seed_has_epochs_of_its_own(folder: Path) -> None:
    loader = loader_of(folder)
    epochs = []
    for _ in range(3):
        generator = torch.Generator().manual_seed(0)
        through = DataLoader(loader, batch_size=None, num_workers=2, generator=generator)
        epochs.append(flat(through))
    assert all(sorted(epoch) == ALL for epoch in epochs)
    assert len({str(epoch) for epoch in epochs}) == 3


def test_an_epoch_that_is_broken_off_is_followed_by_the_next(folder: Path) -> None:
    loader = loader_of(folder)
    through = DataLoader(loader, batch_size=None, num_workers=2)
    for _ in through:
        break
    assert sorted(flat(through)) == ALL
    assert loader.epoch == 2


# Processes and workers


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("world_size", "workers"), [(1, 1), (1, 3), (2, 2)])
def test_every_sample_comes_once_for_any_number_of_workers(
    folder: Path, world_size: int, workers: int, drop_last: bool
) -> None:
    batches = []
    for rank in range(world_size):
        loader = loader_of(folder, 5, rank, world_size, drop_last=drop_last, workers=workers)
        mine = list(DataLoader(loader, batch_size=None, num_workers=workers))
        assert len(mine) == len(loader)
        batches.append(mine)
    seen = flat(flat(batches))
    if drop_last:
        assert {len(batch) for mine in batches for batch in mine} == {5}
        assert len({len(mine) for mine in batches}) == 1
        assert len(set(seen)) == len(seen) > SAMPLES - world_size * workers * 5
    else:
        assert sorted(seen) == ALL


def test_spawned_workers_mount_for_themselves(folder: Path) -> None:
    loader = loader_of(folder, decode_batch=None)
    through = DataLoader(loader, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    batches = list(through)
    assert sorted(torch.cat([batch["indices"] for batch in batches]).tolist()) == ALL
    assert loader.epoch == 1


def test_a_pickled_loader_is_one_of_its_own(folder: Path) -> None:
    loader = loader_of(folder, decode_batch=None)
    list(loader)
    other = pickle.loads(pickle.dumps(loader))
    assert other.epoch == 1
    list(other)
    assert (loader.epoch, other.epoch) == (1, 2)


def test_a_killed_worker_is_an_error_not_a_hang(folder: Path) -> None:
    def dies(batch: Batch) -> list[int]:
        if 50 in batch.indices:
            os.kill(os.getpid(), signal.SIGKILL)
        return indices(batch)

    loader = loader_of(folder, decode_batch=dies)
    kind, message = failure_of(DataLoader(loader, batch_size=None, num_workers=2, timeout=30))
    assert issubclass(kind, RuntimeError) and "worker" in message
    assert sorted(flat(DataLoader(loader_of(folder), batch_size=None, num_workers=2))) == ALL


@pytest.mark.parametrize("workers", [0, 2])
def test_damage_in_mid_epoch_is_an_error_or_left_out(tmp_path: Path, folder: Path, workers: int) -> None:
    shutil.copytree(folder, tmp_path / "store")
    data = tmp_path / "store" / "data-00000.bin"
    content = bytearray(data.read_bytes())
    content[9000] ^= 1
    data.write_bytes(content)
    loader = Loader(mount(tmp_path / "store"), 8, decode_batch=indices)
    kind, message = failure_of(DataLoader(loader, batch_size=None, num_workers=workers))
    assert kind is SampleError and "data-00000.bin" in message
    loader = Loader(mount(tmp_path / "store", on_damage="skip"), 8, decode_batch=indices)
    seen = flat(DataLoader(loader, batch_size=None, num_workers=workers))
    assert len(set(seen)) == len(seen) == SAMPLES - 1
    if workers == 0:
        assert sorted(seen + loader.store.damaged) == ALL


# Resuming through DataLoaders


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_stateful_data_loader_goes_on_with_the_same_batches(folder: Path, workers: int) -> None:
    through = StatefulDataLoader(loader_of(folder), batch_size=None, num_workers=workers)
    whole, following = list(through), list(through)
    assert sorted(flat(following)) == ALL and following != whole
    for taken in (0, 1, 4, 9):
        through = StatefulDataLoader(loader_of(folder), batch_size=None, num_workers=workers)
        iterator = iter(through)
        first = [next(iterator) for _ in range(taken)]
        state = pickle.loads(pickle.dumps(through.state_dict()))
        del iterator
        again = StatefulDataLoader(loader_of(folder), batch_size=None, num_workers=workers)
        again.load_state_dict(state)
        assert first + list(again) == whole
    assert list(again) == following


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize(("workers", "then"), [(2, 3), (3, 0), (0, 2), (3, 3)])
def test_a_stateful_data_loader_s_state_goes_on_with_other_numbers_of_workers(
    folder: Path, workers: int, then: int, every: int
) -> None:
    whole = list(DataLoader(loader_of(folder), batch_size=None, num_workers=workers))
    for taken in (1, 6, 11):
        through = StatefulDataLoader(
            loader_of(folder), batch_size=None, num_workers=workers, snapshot_every_n_steps=every
        )
        iterator = iter(through)
        seen = [next(iterator) for _ in range(taken)]
        state = through.state_dict()
        del iterator, through
        loader = loader_of(folder)
        loader.load_state_dict(state)
        rest = list(StatefulDataLoader(loader, batch_size=None, num_workers=then))
        assert sorted(flat(seen + rest)) == ALL
        if workers == then:
            assert seen + rest == whole


def test_states_of_states_go_on(folder: Path) -> None:
    seen: list[list[int]] = []
    state: dict[str, Any] = {}
    for workers, batches, told in [(2, 3, False), (3, 2, False), (3, 2, True), (2, 2, False), (0, 1, False)]:
        loader = loader_of(folder)
        through = StatefulDataLoader(loader, batch_size=None, num_workers=workers)
        if told:  # the same number of workers: the DataLoader itself goes on
            through.load_state_dict(state)
        elif state:
            loader.load_state_dict(state)
        iterator = iter(through)
        seen += [next(iterator) for _ in range(batches)]
        state = pickle.loads(pickle.dumps(through.state_dict()))
        del iterator, through
    loader = loader_of(folder)
    loader.load_state_dict(state)
    assert sorted(flat(seen + list(loader))) == ALL


def test_a_stateful_data_loader_s_epochs_go_on(folder: Path) -> None:
    through = StatefulDataLoader(loader_of(folder), batch_size=None, num_workers=2)
    epochs = [list(through) for _ in range(3)]
    other = StatefulDataLoader(loader_of(folder), batch_size=None, num_workers=2)
    list(other)
    iterator = iter(other)
    seen = [next(iterator) for _ in range(3)]
    state = other.state_dict()
    loader = loader_of(folder)
    again = StatefulDataLoader(loader, batch_size=None, num_workers=2)
    again.load_state_dict(state)
    assert seen + list(again) == epochs[1]
    assert list(again) == epochs[2]
    finished = through.state_dict()
    loader.load_state_dict(finished)
    assert loader.epoch == 3


@pytest.mark.parametrize(("workers", "then"), [(0, 0), (2, 2), (3, 2), (2, 0)])
@pytest.mark.parametrize("drop_last", [False, True])
def test_plain_data_loaders_go_on_by_counting_batches(
    folder: Path, workers: int, then: int, drop_last: bool
) -> None:
    whole = list(DataLoader(loader_of(folder, drop_last=drop_last), batch_size=None, num_workers=workers))
    for taken in (0, 4, 11, len(whole)):
        loader = loader_of(folder, drop_last=drop_last)
        loader.load_state_dict(loader_of(folder, drop_last=drop_last).state_after(taken, workers, epoch=0))
        rest = list(DataLoader(loader, batch_size=None, num_workers=then))
        if workers == then:
            assert whole[:taken] + rest == whole
        elif not drop_last:
            assert sorted(flat(whole[:taken] + rest)) == ALL
        following = list(DataLoader(loader, batch_size=None, num_workers=then))
        assert len(following) * 8 >= SAMPLES - 8 * max(1, then)


def test_the_state_of_what_workers_read_is_not_guessed(folder: Path) -> None:
    loader = loader_of(folder)
    list(DataLoader(loader, batch_size=None, num_workers=1))
    with pytest.raises(InvalidArgument, match="StatefulDataLoader"):
        loader.state_dict()
    loader.load_state_dict(loader.state_after(2, 1))
    assert loader.state_dict()["epoch"] == 0


def test_a_stateful_data_loader_s_state_for_other_batches_says_where_to_load_it(folder: Path) -> None:
    through = StatefulDataLoader(loader_of(folder), batch_size=None, num_workers=2)
    next(iter(through))
    other = StatefulDataLoader(loader_of(folder, batch_size=3), batch_size=None, num_workers=2)
    other.load_state_dict(through.state_dict())
    with pytest.raises(InvalidArgument, match=r"give it to loader\.load_state_dict"):
        next(iter(other))


def test_a_trainer_s_loop_that_skips_what_it_has_seen(folder: Path) -> None:
    """In the manner of Hugging Face's Trainer: set_epoch each epoch, and after a resume skip batches."""

    def train(steps: int, begin: int = 0) -> list[list[int]]:
        loader, seen, step = loader_of(folder, workers=2), [], 0
        through = DataLoader(loader, batch_size=None, num_workers=2)
        per_epoch = len(through)
        for epoch in range(begin // per_epoch, 3):
            loader.set_epoch(epoch)
            step = epoch * per_epoch
            for batch in through:
                step += 1
                if step > begin:
                    seen.append(batch)
                if step == steps:
                    return seen
        return seen

    assert train(20) + train(33, begin=20) == train(33)


# Access by index


def test_a_data_set_gives_samples_by_index(folder: Path) -> None:
    data = SampleDataset(mount(folder))
    assert len(data) == SAMPLES
    assert data[7] == content(7)
    named = SampleDataset(mount(folder), decode=lambda sample: (sample.index, sample.name))
    loaded = list(DataLoader(named, batch_size=10, shuffle=True, num_workers=2))
    pairs = [(i, name) for batch, names in loaded for i, name in zip(batch.tolist(), names, strict=True)]
    assert sorted(pairs) == [(i, f"sample {i}") for i in range(SAMPLES)]
