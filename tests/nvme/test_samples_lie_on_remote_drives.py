"""Samples on namespaces of an NVMe/TCP target are those that were packed, whoever reads them and however."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from penstock.errors import InvalidArgument, InvalidFile, SampleError
from penstock.samples import Loader, Store, discover, info, mount, unpack, upload, verify
from penstock.samples.places import places_of
from tests.support.apart import context
from tests.support.nvme_target.process import NQN, Target
from tests.support.ranks import together
from tests.support.remote_stores import MIB, TIMEOUT_S, image_of, serving, url_of
from tests.support.sample_stores import epoch, some_samples
from tests.support.stores import extract_namespace, read_store, write_store

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

SHARES = [some_samples(120, seed=number) for number in range(2)]
CONTENT = SHARES[0] + SHARES[1]
LARGE = [(f"large/{index}", bytes([index]) * size) for index, size in enumerate((70_000, 1, 300_000, 65_536))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("remote")
    classes = ["even", "odd"]
    for number, samples in enumerate([*SHARES, SHARES[0] + LARGE]):
        labels = [index % 2 for index in range(len(samples))]
        write_store(
            folder / f"store-{number}", samples, data_file_bytes=70_000, labels=labels, classes=classes
        )
    return folder


@pytest.fixture(scope="module")
def target(folder: Path) -> Iterator[Target]:
    """Two subsystems, each with one of the two stores."""
    with serving(folder, subsystems=2) as target:
        for number in range(2):
            upload(folder / f"store-{number}", url_of(target, number))
        yield target


def mounted(*places: Any, **options: Any) -> Store:
    return mount(list(places), **{"cache_bytes": "64KiB", "timeout_s": TIMEOUT_S, **options})


def sample_of(store: Store, samples: list[tuple[str, bytes]]) -> None:
    """Everything that it has, by every way to ask."""
    assert list(store.names()) == [name for name, _ in samples]
    for index, (name, data) in enumerate(samples):
        assert store.read(index) == data
        assert store.index(name) == index
    chosen = list(range(len(samples) - 1, -1, -3))
    assert [bytes(data) for data in store.read_many(chosen)] == [samples[index][1] for index in chosen]
    assert store.sizes(chosen).tolist() == [len(samples[index][1]) for index in chosen]


@pytest.mark.parametrize("block_bytes", [512, 4096, 65536])
@pytest.mark.parametrize("options", ["", "&hdgst=1&ddgst=1&queues=2&depth=4"], ids=["plain", "digests"])
def test_every_sample_comes_back(folder: Path, tmp_path: Path, block_bytes: int, options: str) -> None:
    samples = SHARES[0] + LARGE
    with serving(tmp_path, block_bytes=block_bytes) as target:
        url = url_of(target, 0, options)
        done = upload(folder / "store-2", url)
        assert done.url == url
        assert done.samples == len(samples)
        with mounted(url) as store:
            sample_of(store, samples)
            assert store.io == "direct"
            assert store.labels is not None
            assert store.labels.tolist() == [index % 2 for index in range(len(samples))]
        for order in ("chunk", "full"):
            with mounted(url, order=order) as store:
                for number in range(2):
                    store.sequence(seed=1, epoch=number)
                    assert epoch(store) == {index: data for index, (_, data) in enumerate(samples)}
    (extracted,) = extract_namespace(image_of(tmp_path).read_bytes(), tmp_path / "out")
    assert read_store(extracted) == samples


def test_parts_come_from_wherever_they_are(folder: Path, target: Target) -> None:
    for places in (
        [url_of(target, 0), url_of(target, 1)],
        [folder / "store-0", url_of(target, 1)],
        [url_of(target, 0), folder / "store-1"],
    ):
        for order in ("chunk", "full"):
            with mounted(*places, order=order) as store:
                assert len(store) == len(CONTENT)
                sample_of(store, CONTENT)
                assert epoch(store) == {index: data for index, (_, data) in enumerate(CONTENT)}


def test_the_order_is_that_of_the_folders(folder: Path, target: Target) -> None:
    """Where a store lies plays no part in it."""
    drawn = []
    for places in ([folder / "store-0", folder / "store-1"], [url_of(target, 0), url_of(target, 1)]):
        with mounted(*places) as store:
            store.sequence(seed=5, epoch=3)
            batches = []
            while (batch := store.bread(7)) is not None:
                batches.append((batch.indices.tolist(), bytes(batch.data)))
            drawn.append((store.identity, batches))
    assert drawn[0] == drawn[1]


def test_a_folder_of_partitions_takes_one_namespace(tmp_path: Path) -> None:
    for number, samples in enumerate(SHARES):
        write_store(tmp_path / "parts" / f"part-0000{number}-of-00002", samples, part=number, parts=2)
    with serving(tmp_path) as target:
        url = url_of(target)
        upload(tmp_path / "parts", url)
        with mounted(url) as store:
            sample_of(store, CONTENT)
            assert [str(directory.place) for directory in store.directories] == [
                f"{url}#part-0000{number}-of-00002" for number in range(2)
            ]
            again = pickle.loads(pickle.dumps(store))
            sample_of(again, CONTENT)
            again.close()
        with mounted(f"{url}#part-00001-of-00002") as store:
            sample_of(store, SHARES[1])
        with pytest.raises(SampleError, match="has no partition 'x'"):
            mounted(f"{url}#x")
        with pytest.raises(InvalidArgument, match="a store takes all of a namespace"):
            upload(tmp_path / "parts", f"{url}#part-00001-of-00002")
        assert verify(url).sound


def test_a_sound_store_is_found_sound(folder: Path, target: Target, tmp_path: Path) -> None:
    url, path = url_of(target), folder / "store-0"
    found, local = verify(url), verify(path)
    assert (found.sound, found.path) == (True, url)
    assert (found.samples, found.size_bytes) == (local.samples, local.size_bytes)
    told, of_folder = info(url), info(path)
    assert (told.samples, told.overhead_bytes, told.classes) == (
        of_folder.samples,
        of_folder.overhead_bytes,
        of_folder.classes,
    )
    assert unpack(url, tmp_path, flat=True) == len(SHARES[0])
    for name, data in SHARES[0]:
        assert (tmp_path / name.replace("/", "%2F")).read_bytes() == data


def test_what_a_target_has_is_listed(target: Target) -> None:
    for portal in (f"{target.address}:{target.port}", url_of(target)):
        found = {each.url: each for each in discover(portal, timeout_s=TIMEOUT_S)}
        for number in range(2):
            each = found[url_of(target, number)]
            assert (each.size_bytes, each.block_bytes, each.holds) == (32 * MIB, 512, "a store")


@pytest.mark.parametrize(
    ("offset", "text"),
    [
        (32, b"0"),  # the port
        (32, b"99999"),
        (32, b"4420x"),
        (32, b"\xb2"),
        (256, b""),  # the NQN
        (256, b"nqn.a\nb"),
        (256, b"n" * 256),
        (512, b"a b"),  # the address
        (512, b"\xff\xfe"),
    ],
)
def test_what_a_target_says_of_itself_is_not_believed(target: Target, offset: int, text: bytes) -> None:
    size_bytes = 32 if offset == 32 else 256
    target.patch("log112", 1024 + offset, text.ljust(size_bytes, b"\0"))
    try:
        found = discover(f"{target.address}:{target.port}", timeout_s=TIMEOUT_S)
        assert any(each.url == url_of(target, 1) for each in found)
        assert any(each.problem and each.size_bytes is None for each in found)
    except SampleError as error:  # all of the answer is refused
        assert str(target.port) in str(error)
    finally:
        target.clear()


# Other processes: handles of namespaces survive neither a fork nor a pickle.


def expected(samples: list[tuple[str, bytes]]) -> list[list[Any]]:
    return [[index, data] for index, (_, data) in enumerate(samples)]


def take(batch: Any) -> list[list[Any]]:
    return [[int(index), bytes(data)] for index, data in zip(batch.indices, batch, strict=True)]


@pytest.mark.parametrize("how", ["fork", "forkserver"])
def test_workers_read_for_themselves(target: Target, how: str) -> None:
    processes = context() if how == "forkserver" else how
    with mounted(url_of(target, 0), url_of(target, 1)) as store:
        store.read(0)
        loader = Loader(store, batch_size=16, decode_batch=take, decoded_bytes="1MiB")
        through = DataLoader(loader, batch_size=None, num_workers=2, multiprocessing_context=processes)
        for _ in range(2 if how == "fork" else 1):
            assert sorted(sample for batch in through for sample in batch) == expected(CONTENT)
        assert sorted(sample for batch in loader for sample in batch) == expected(CONTENT)


def in_child(act: Callable[[], None]) -> int:
    """The exit code of a forked child that does it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            act()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_reads_what_its_parent_mounted(target: Target) -> None:
    with mounted(url_of(target, 0), url_of(target, 1)) as store:
        store.sequence(seed=2)
        first = store.bread(5)
        assert first is not None

        def read_all() -> None:
            with pytest.raises(InvalidArgument, match="forked during an epoch"):
                store.bread(1)
            sample_of(store, CONTENT)
            store.sequence()
            assert len(epoch(store)) == len(CONTENT)
            store.close()

        assert in_child(read_all) == 0
        assert len(epoch(store)) == len(CONTENT) - 5  # the parent's epoch goes on
        with mounted(url_of(target, 0)) as unread:
            assert in_child(lambda: sample_of(unread, SHARES[0])) == 0
            assert in_child(unread.close) == 0
            sample_of(unread, SHARES[0])


ENDS = """
import os, sys
from penstock.samples import mount

store = mount(sys.argv[1], timeout_s=20)
store.read(0)
child = os.fork()
store.bread(3)
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    store.read(1)
"""


def test_processes_that_close_nothing_end_like_others(target: Target) -> None:
    """A parent in mid-epoch, and a forked child whose interpreter ends as any does."""
    command = [sys.executable, "-c", ENDS, url_of(target)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_what_forked_children_share_is_not_copied(target: Target) -> None:
    """The directory lies in memory that a child reads without making a page its own."""
    with mounted(url_of(target, 0)) as store:
        entries = store.directories[0].entries
        assert not entries.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            entries[0, 0] = 1


def read_pickled(data: bytes, queue: Any) -> None:
    store = pickle.loads(data)
    queue.put([store.read(index) for index in range(len(store))])
    store.close()


def test_a_store_goes_to_other_processes_by_name(target: Target) -> None:
    with mounted(url_of(target, 0), url_of(target, 1)) as store:
        queue = context().Queue()
        process = context().Process(target=read_pickled, args=(pickle.dumps(store), queue))
        process.start()
        assert queue.get(timeout=120) == [data for _, data in CONTENT]
        process.join(60)
        assert process.exitcode == 0


RANK = """
import json, os, sys
import torch.distributed as dist
from penstock.samples import mount
from tests.support.ranks import leave

urls, out = json.loads(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
for how in ("alone", "together"):
    if how == "alone":
        store = mount(urls, cache_bytes="64KiB", rank=rank, world_size=world_size)
    else:
        store = mount(urls[rank], cache_bytes="64KiB", group=dist.group.WORLD)
    store.sequence(seed=3, epoch=1)
    found = {}
    while (batch := store.bread(9)) is not None:
        for index, data in zip(batch.indices.tolist(), batch):
            assert index not in found
            found[index] = bytes(data).hex()
    with open(f"{out}.{how}.{rank}", "w") as file:
        json.dump([len(store), found], file)
    store.close()
leave()
"""


def test_every_rank_reads_from_every_target(target: Target, tmp_path: Path) -> None:
    """Figure 8 of DLFS. Ranks share nothing but the seed, or mount together what each of them names."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    before = target.stats()["io_connects"]
    together(2, script, json.dumps([url_of(target, 0), url_of(target, 1)]), tmp_path / "found")
    for how in ("alone", "together"):
        found: dict[int, bytes] = {}
        for rank in range(2):
            size, mine = json.loads((tmp_path / f"found.{how}.{rank}").read_text())
            assert size == len(CONTENT)
            assert abs(len(mine) - size / 2) <= 1
            assert not found.keys() & {int(index) for index in mine}
            found |= {int(index): bytes.fromhex(data) for index, data in mine.items()}
        assert sorted(map(list, found.items())) == expected(CONTENT)
    assert target.stats()["io_connects"] - before >= 8  # twice two ranks, two subsystems


# What goes wrong.


def test_damage_on_a_drive_is_found_and_named(folder: Path, tmp_path: Path) -> None:
    with serving(tmp_path) as target:
        url = url_of(target)
        upload(folder / "store-0", url)
        (place,) = places_of(url)
        offset = place.open("data-00001.bin").target().begin
        place.close()
        image = np.memmap(image_of(tmp_path), np.uint8)
        image[offset + 9] ^= 1
        with mounted(url, order="chunk", on_damage="skip") as store:
            found = epoch(store)
            (damaged,) = store.damaged
            assert found == {index: data for index, (_, data) in enumerate(SHARES[0]) if index != damaged}
            with pytest.raises(SampleError, match=rf"sample {damaged} .* is damaged: the checksum") as raised:
                store.read(damaged)
            assert f"data-00001.bin of {url}" in str(raised.value)
        seen = verify(url)
        assert [sample.index for sample in seen.damaged] == [damaged]
        assert not seen.problems
        image[offset + 9] ^= 1
        image[100] ^= 1
        assert "first superblock" in verify(url).problems[0]
        begin = place.open("directory.bin").target().begin
        image[begin] ^= 1
        with pytest.raises(InvalidFile, match=r"directory.bin of nvme\+tcp.* is damaged: its checksum"):
            mounted(url)
        image[512 * 1024] ^= 1
        with pytest.raises(InvalidFile, match=r"first superblock .* damaged.*second superblock"):
            mounted(url)


def test_what_cannot_be_reached_is_named(folder: Path, target: Target) -> None:
    address = f"{target.address}:{target.port}"
    for url, says in (
        (url_of(target, 7), "lists the subsystems that this host may use"),
        (url_of(target, 0, namespace=9), "Look at \\?ns= and at the target's namespaces"),
        (f"nvme+tcp://{target.address}:1/{NQN.format(0)}?ns=1", "Nothing listens there"),
        (f"nvme+tcp://no-such-host.invalid/{NQN.format(0)}?ns=1", "Look at the host's name"),
    ):
        for act in (mounted, verify, info, lambda url: upload(folder / "store-0", url)):
            with pytest.raises(SampleError, match=says) as raised:
                act(url)
            assert url.partition("//")[2].partition("/")[0] in str(raised.value), address


def test_a_namespace_that_is_not_enough_is_refused(folder: Path, tmp_path: Path) -> None:
    with serving(tmp_path, size_bytes=2 * MIB) as target:
        with pytest.raises(SampleError, match="no sample store: it is empty"):
            mounted(url_of(target))
        with pytest.raises(SampleError, match=r"is too small: it has 2\.00 MiB, and the store needs 1"):
            upload(folder / "store-0", url_of(target))
        assert not any(image_of(tmp_path).read_bytes())


def test_another_store_is_not_read_by_those_that_had_mounted_this_one(folder: Path, tmp_path: Path) -> None:
    with serving(tmp_path) as target:
        url = url_of(target)
        upload(folder / "store-0", url)
        with mounted(url) as store:
            sent = pickle.dumps(store)
            assert store.read(0) == SHARES[0][0][1]
            with pytest.raises(SampleError, match="holds another store: nothing was written"):
                upload(folder / "store-1", url)
            upload(folder / "store-1", url, overwrite=True)

            def read() -> None:
                with pytest.raises(SampleError, match="another store than when it was mounted"):
                    store.read(0)

            assert in_child(read) == 0
            with pytest.raises(SampleError, match="holds other samples than when it was mounted"):
                pickle.loads(sent)
        with mounted(url) as store:
            sample_of(store, SHARES[1])
