"""Ranks explore I/O paths in place of each other, and believe nothing that a file may not hold."""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from torch.distributed import HashStore

from penstock.core import files
from penstock.errors import InvalidArgument
from penstock.storage import cost_sharing
from penstock.storage.choice import Choice
from penstock.storage.cost_sharing import CostSharing
from penstock.storage.costs import CostEntry, CostTables, Tables
from tests.support.io_paths import Machine, train

MIB = 1 << 20
PATHS = {"slow": "disk", "fast": "disk", "middling": "disk"}
COSTS = {kind: {"slow": 9.0, "fast": 1.0, "middling": 2.0} for kind in ("write", "read")}


class Rank:
    """One rank's choice, and what it has moved by each path."""

    def __init__(self, store: object, number: int, kind: str = "a disk", explorers: str = "divided") -> None:
        self.choice, self.lock = Choice(PATHS, reexplore=0), threading.Lock()
        self.machine = Machine(COSTS, sigma=0.0, outliers=0.0)
        self.tried: dict[int, set[str]] = {}
        self.sharing = CostSharing(
            store,  # type: ignore[arg-type]
            {"host": self.choice},
            self.lock,
            kind,
            explorers,  # type: ignore[arg-type]
            number,
            2,
        )

    def step(self, sizes: list[int]) -> None:
        with self.lock:
            for moved in train(self.choice, self.machine, sizes, 1)[0]:
                self.tried.setdefault(moved.size_bytes, set()).add(moved.path)

    def knows(self, sizes: list[int]) -> bool:
        with self.lock:
            classes = self.choice.classes()
        return all(classes.get(size.bit_length() - 1) for size in sizes)

    def best(self, size_bytes: int) -> tuple[str, str]:
        with self.lock:
            return self.choice.path_to_write(size_bytes), self.choice.path_to_read(size_bytes, "disk")


@contextmanager
def ranks(*made: Rank) -> Iterator[tuple[Rank, ...]]:
    try:
        yield made
    finally:
        for rank in made:
            rank.sharing.close()


def run_until(done: Callable[[], bool], step: Callable[[], None] = lambda: None) -> None:
    end_s = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end_s
        step()
        time.sleep(0.002)


def train_until_all_know(made: tuple[Rank, ...], *sizes: list[int]) -> None:
    def step() -> None:
        for rank, wanted in zip(made, sizes, strict=True):
            rank.step(wanted)

    run_until(lambda: all(rank.knows(wanted) for rank, wanted in zip(made, sizes, strict=True)), step)


SIZES = [MIB, 2 * MIB, 4 * MIB, 8 * MIB]


def explorers_of(made: tuple[Rank, ...], size_bytes: int) -> list[int]:
    return [index for index, rank in enumerate(made) if "slow" in rank.tried.get(size_bytes, ())]


@pytest.mark.parametrize("how", ["divided", "one"])
def test_one_rank_explores_each_size_and_all_know_the_fastest(how: str) -> None:
    store = HashStore()
    # "slow" is the first path, which a rank uses that knows nothing: that is no exploration.
    with ranks(Rank(store, 0, explorers=how), Rank(store, 1, explorers=how)) as made:
        train_until_all_know(made, SIZES, SIZES)
        tried = [[index for index, r in enumerate(made) if "middling" in r.tried[size]] for size in SIZES]
        assert all(len(who) == 1 for who in tried)
        if how == "one":
            assert len({who[0] for who in tried}) == 1
        for rank in made:
            assert {rank.best(size) for size in SIZES} == {("fast", "fast")}
            assert {e.path for e in rank.choice.tables().entries if e.class_bytes == MIB} == set(PATHS)


def test_sizes_of_one_rank_alone_are_explored_there() -> None:
    store = HashStore()
    with ranks(Rank(store, 0), Rank(store, 1)) as made:
        train_until_all_know(made, [MIB, 2 * MIB], [4 * MIB, 8 * MIB])
        assert made[0].best(MIB) == made[1].best(8 * MIB) == ("fast", "fast")
        assert not made[0].tried.keys() & made[1].tried.keys()


def test_other_kinds_of_device_do_not_meet() -> None:
    store = HashStore()
    with ranks(Rank(store, 0, "ext4, one GPU"), Rank(store, 1, "ext4, another GPU")) as made:
        train_until_all_know(made, SIZES, SIZES)
        assert all(rank.tried[size] == set(PATHS) for rank in made for size in SIZES)


def test_what_a_file_taught_one_rank_is_told_to_the_others() -> None:
    store = HashStore()
    with ranks(Rank(store, 0), Rank(store, 1)) as (first, second):
        with first.lock:
            first.choice.learn(tables(s_per_byte={"fast": 1e-9, "slow": 9e-9, "middling": 5e-9}))
        run_until(lambda: store.num_keys() == 2)  # it has claimed the size, and told
        train_until_all_know((second,), [MIB])
        assert "middling" not in second.tried[MIB] and second.best(MIB) == ("fast", "fast")


def tables(s_per_byte: dict[str, float]) -> Tables:
    return Tables(
        tuple(
            CostEntry(class_bytes=MIB, kind=kind, path=path, medium="disk", samples=9, s_per_byte=cost)
            for kind in ("write", "read")
            for path, cost in s_per_byte.items()
        )
    )


class Lying:
    """A store in which another rank has claimed every class, and tells ``data`` of it."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def add(self, key: str, value: int) -> int:
        return 2

    def set(self, key: str, value: bytes) -> None:
        raise AssertionError("nothing was claimed here")

    def check(self, keys: list[str]) -> bool:
        return True

    def get(self, key: str) -> bytes:
        return self.data


GOOD = files.encoded(CostTables({"a disk": tables({"fast": 1e-9, "slow": 9e-9, "middling": 5e-9})}))


def test_what_is_told_is_taken() -> None:  # the next test's data would be, too, were they right
    with ranks(Rank(Lying(GOOD), 0)) as (rank,):
        train_until_all_know((rank,), [MIB])
        assert rank.tried[MIB] <= {"slow", "fast"} and rank.best(MIB) == ("fast", "fast")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        pickle.dumps(CostTables()),
        b'{"schema": "penstock.costtables/1", "value": ' + b"[" * 100_000,
        GOOD[:-20],
        GOOD + b" " * (1 << 20),
        GOOD.replace(b"costtables/1", b"costtables/2"),
        GOOD.replace(b"costtables", b"plan"),
        GOOD.replace(b'"samples":9', b'"samples":-9', 1),
        GOOD.replace(b'"samples":9', b'"samples":"9"', 1),
        GOOD.replace(b'"class_bytes":1048576', b'"class_bytes":1048577', 1),
        GOOD.replace(b'"class_bytes":1048576', b'"class_bytes":' + b"1" * 40, 1),
        GOOD.replace(b'"s_per_byte":1e-9', b'"s_per_byte":1e999', 1),
        GOOD.replace(b'"s_per_byte":1e-9', b'"s_per_byte":-1e-9', 1),
        GOOD.replace(b'"kind":"write"', b'"kind":"wipe"', 1),
    ],
)
def test_what_a_file_may_not_hold_is_not_believed(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    assert data != GOOD
    with caplog.at_level(logging.WARNING, "penstock"), ranks(Rank(Lying(data), 0)) as (rank,):
        train_until_all_know((rank,), [MIB])
        assert rank.tried[MIB] == set(PATHS) and rank.best(MIB) == ("fast", "fast")
    assert "finds out by itself" in caplog.text and "another rank" in caplog.text


def test_tables_of_paths_or_devices_that_are_not_here_teach_nothing() -> None:
    for other in (
        CostTables({"another disk": tables({"fast": 1e-9})}),
        CostTables({"a disk": tables({"far": 1e-12})}),
    ):
        with ranks(Rank(Lying(files.encoded(other)), 0)) as (rank,):
            train_until_all_know((rank,), [MIB])
            assert rank.tried[MIB] == set(PATHS)


class Silent(Lying):
    """Who has claimed everything tells nothing."""

    def check(self, keys: list[str]) -> bool:
        return False


def test_a_rank_that_is_told_nothing_explores_after_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_sharing, "PATIENCE_S", 0.1)
    with ranks(Rank(Silent(b""), 0)) as (rank,):
        train_until_all_know((rank,), [MIB])
        assert rank.best(MIB) == ("fast", "fast")


class Dead(Silent):
    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("Connection reset by peer")


def test_a_store_that_has_ended_ends_the_sharing_alone(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "penstock"), ranks(Rank(Dead(b""), 0)) as (rank,):
        train_until_all_know((rank,), [MIB])
        train_until_all_know((rank,), SIZES)  # nothing waits that comes later
    assert caplog.text.count("Connection reset by peer") == 1


class Hanging(Silent):
    def __init__(self) -> None:
        super().__init__(b"")
        self.asked, self.go_on = threading.Event(), threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.asked.set()
        self.go_on.wait(60)
        return False


def test_a_store_that_hangs_keeps_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_sharing, "_CLOSING_S", 0.1)
    store = Hanging()
    with ranks(Rank(store, 0)) as (rank,):
        rank.step([MIB])
        assert store.asked.wait(60)
        rank.step([MIB])  # the lock is free
        rank.sharing.close()
        assert not store.go_on.is_set()
        store.go_on.set()


def test_unknown_explorers_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="'divided' or 'one'"):
        Rank(HashStore(), 0, explorers="all")
