"""Processes of torch.distributed mount and pack one store together, or learn which of them did not."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from penstock.errors import InvalidArgument, PenstockError, SampleError
from penstock.samples import collective
from penstock.samples.catalog import Directory, load_all
from penstock.samples.collective import pack_together
from penstock.samples.store import Store, mount
from tests.support.stores import write_store

WORLD = 4
Said = dict[str, Any]


def run(body: Callable[[int], Said], where: Path, world_size: int = WORLD) -> list[tuple[int, Said]]:
    """Call the body with each rank, in a fork of this process: how each ended, and what it said."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    said = [where / f"said-{rank}.json" for rank in range(world_size)]
    children = [_fork(body, rank, world_size, address, said[rank]) for rank in range(world_size)]
    ended, deadline = [], time.monotonic() + 60
    try:
        for child in list(children):
            while not (status := os.waitpid(child, os.WNOHANG))[0]:
                assert time.monotonic() < deadline, "a process hangs"
                time.sleep(0.01)
            children.remove(child)
            ended.append(os.waitstatus_to_exitcode(status[1]))
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    heard = [json.loads(path.read_text()) if path.exists() else {} for path in said]
    return list(zip(ended, heard, strict=True))


def _fork(body: Callable[[int], Said], rank: int, world_size: int, address: str, said: Path) -> int:
    if child := os.fork():
        return child
    try:
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
        said.write_text(json.dumps(body(rank)))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def refusal(path: Any, timeout_s: float = 30) -> Said:
    """What mounting it together says."""
    try:
        mount(path, group=dist.group.WORLD, timeout_s=timeout_s)
    except PenstockError as error:
        return {"kind": type(error).__name__, "error": str(error)}
    return {}


def partition(folder: Path, number: int, count: int = WORLD) -> Path:
    return folder / f"part-{number:05d}-of-{count:05d}"


def write_parts(folder: Path, count: int = WORLD) -> list[tuple[str, bytes]]:
    """Write a store in partitions, and say what is in it."""
    samples = [(f"sample {i}", f"content {i} ".encode() * (i % 40)) for i in range(60)]
    for number in range(count):
        share = samples[number * 60 // count : (number + 1) * 60 // count]
        labels = [number] * len(share)
        write_store(
            partition(folder, number, count),
            share,
            part=number,
            parts=count,
            labels=labels,
            classes=list("abcd"),
        )
    return samples


def named(samples: list[tuple[str, bytes]]) -> list[list[str]]:
    return [[name, hashlib.sha256(data).hexdigest()] for name, data in samples]


def contents(store: Store) -> list[list[str]]:
    return named([(name, store.read(name)) for name in store.names()])


def test_each_process_brings_its_part_and_has_all(tmp_path: Path) -> None:
    samples = write_parts(tmp_path)

    def body(rank: int) -> Said:
        store = mount(partition(tmp_path, rank), group=dist.group.WORLD)
        store.sequence(seed=1, epoch=2)
        mine: list[int] = []
        while (batch := store.bread(7)) is not None:
            mine += batch.indices.tolist()
        again = pickle.loads(pickle.dumps(store))
        same = mount(tmp_path, group=dist.group.WORLD)
        return {
            "place": [store.rank, store.world_size],
            "contents": contents(store),
            "labels": store.labels.tolist(),
            "mine": mine,
            "again": [again.rank, again.world_size, contents(again) == contents(store)],
            "same": [contents(same) == contents(store), same.identity == store.identity],
        }

    ended = run(body, tmp_path)
    assert [code for code, _ in ended] == [0] * WORLD, ended
    for rank, (_, said) in enumerate(ended):
        assert said["place"] == [rank, WORLD]
        assert said["contents"] == named(samples)
        assert said["labels"] == [number for number in range(WORLD) for _ in range(15)]
        assert said["again"] == [rank, WORLD, True]
        assert said["same"] == [True, True]
    assert sorted(index for _, said in ended for index in said["mine"]) == list(range(len(samples)))


def test_a_group_of_some_processes_mounts_without_the_others(tmp_path: Path) -> None:
    samples = write_parts(tmp_path, 2)

    def body(rank: int) -> Said:
        group = dist.new_group([1, 2])
        if rank == 0:
            with pytest.raises(InvalidArgument, match="not of the group"):
                mount(tmp_path, group=group)
            said: Said = {}
        else:
            store = mount(partition(tmp_path, rank - 1, 2), group=group)
            said = {"contents": contents(store), "place": [store.rank, store.world_size]}
        dist.barrier()
        return said

    ended = run(body, tmp_path, world_size=3)
    assert [code for code, _ in ended] == [0] * 3, ended
    assert [said.get("place") for _, said in ended] == [None, [0, 2], [1, 2]]
    assert ended[1][1]["contents"] == ended[2][1]["contents"] == named(samples)


def test_what_one_process_cannot_read_all_are_told(tmp_path: Path) -> None:
    write_parts(tmp_path)
    for _, said in run(
        lambda rank: refusal(tmp_path / "x" if rank == 2 else partition(tmp_path, rank)), tmp_path
    ):
        assert said["kind"] == "SampleError"
        assert "process 2 could not say what they hold" in said["error"]
        assert str(tmp_path / "x") in said["error"]


def test_a_part_that_nobody_holds_is_named(tmp_path: Path) -> None:
    write_parts(tmp_path)
    for _, said in run(lambda rank: refusal(partition(tmp_path, min(rank, 2))), tmp_path):
        assert "partition 3 is missing" in said["error"]


def test_a_part_that_others_cannot_see_is_named(tmp_path: Path) -> None:
    write_parts(tmp_path)

    def body(rank: int) -> Said:
        def load(folder: Any, *options: Any) -> list[Directory]:
            if rank == 1 and folder == str(partition(tmp_path, 3)):  # as on another machine
                raise SampleError("No such file or directory")
            return load_all(folder, *options)

        collective.load_all = load  # type: ignore[assignment]
        return refusal(partition(tmp_path, rank))

    for _, said in run(body, tmp_path):
        assert "process 1 could not open what the others hold: cannot see" in said["error"]
        assert f"{partition(tmp_path, 3)}, which process 3 holds" in said["error"]


def test_a_process_that_does_not_come_is_named(tmp_path: Path) -> None:
    write_parts(tmp_path)

    def body(rank: int) -> Said:
        if rank == 3:
            time.sleep(1.8)
            os._exit(0)
        return refusal(tmp_path, timeout_s=1)

    for _, said in run(body, tmp_path)[:3]:
        assert "waited 1.00 s for processes to say what they hold: of 4, process 3 did not" in said["error"]


@pytest.mark.parametrize("victim", [0, 2])
def test_a_process_that_is_killed_leaves_no_one_waiting(tmp_path: Path, victim: int) -> None:
    write_parts(tmp_path)

    def body(rank: int) -> Said:
        def load(folder: Any, *options: Any) -> list[Directory]:
            if rank == victim and folder == str(partition(tmp_path, 3)):
                os.kill(os.getpid(), signal.SIGKILL)
            return load_all(folder, *options)

        collective.load_all = load  # type: ignore[assignment]
        return refusal(partition(tmp_path, rank), timeout_s=1)

    for rank, (code, said) in enumerate(run(body, tmp_path)):
        if rank == victim:
            assert code == -signal.SIGKILL
        elif victim == 0:  # it kept the key-value store
            assert "the process that keeps it, most often rank 0, has stopped" in said["error"]
        else:
            assert "to open what the others hold: of 4, process 2 did not" in said["error"]


def test_processes_pack_their_shares_and_mount_them(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for number in range(40):
        folder = source / f"class {number % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.txt").write_bytes(b"%d " % number * number)

    def body(_: int) -> Said:
        manifests = pack_together(source, tmp_path / "store", dist.group.WORLD, timeout_s=30)
        store = mount(tmp_path / "store", group=dist.group.WORLD)
        return {
            "partitions": [manifest.partition for manifest in manifests],
            "contents": sorted(contents(store)),
        }

    ended = run(body, tmp_path)
    files = [(str(path.relative_to(source)), path.read_bytes()) for path in source.rglob("*.txt")]
    for code, said in ended:
        assert code == 0
        assert said["partitions"] == list(range(WORLD))
        assert said["contents"] == sorted(named(files))


def test_where_one_process_cannot_pack_all_are_told(tmp_path: Path) -> None:
    def body(rank: int) -> Said:
        try:
            source: Any = [("a", 3 if rank == 1 else b"x")] * 2
            pack_together(source, tmp_path / "store", dist.group.WORLD, timeout_s=30)
        except Exception as error:
            return {"error": str(error)}
        return {}

    first, second = (said["error"] for _, said in run(body, tmp_path, world_size=2))
    assert "process 1 could not pack" in first
    assert second in first


class Slow:
    """Twenty samples, at which process 1 is slow, and process 2 is killed."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[tuple[str, bytes]]:
        for number in range(20):
            yield f"{number}", b"x" * 1000
            if self.rank == 1:
                time.sleep(0.1)
            if self.rank == 2 and number == 10:
                os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_packs_for_long_is_waited_for_while_it_lives(tmp_path: Path) -> None:
    def body(rank: int) -> Said:
        try:
            pack_together(Slow(rank), tmp_path / "store", dist.group.WORLD, timeout_s=0.9)
        except SampleError as error:
            return {"error": str(error)}
        return {"samples": len(mount(tmp_path / "store"))}

    assert [said for _, said in run(body, tmp_path, world_size=2)] == [{"samples": 20}] * 2


def test_a_process_that_is_killed_while_it_packs_is_named(tmp_path: Path) -> None:
    def body(rank: int) -> Said:
        try:
            pack_together(Slow(rank), tmp_path / "store", dist.group.WORLD, timeout_s=0.9)
        except SampleError as error:
            return {"error": str(error)}
        return {}

    (_, first), (_, second), _ = run(body, tmp_path, world_size=3)
    assert "for processes to pack: of 3, process 2 did not" in first["error"]
    assert "process 2 did not" in second["error"] or "rank 0, has stopped" in second["error"]
    assert (tmp_path / "store" / "part-00001-of-00003" / "store.json").exists()  # its partition is packed


def test_without_a_process_group_mounting_says_what_to_call(tmp_path: Path) -> None:
    write_store(tmp_path / "store", [("a", b"1")])
    with pytest.raises(InvalidArgument, match="init_process_group"):
        mount(tmp_path / "store", group=object())
