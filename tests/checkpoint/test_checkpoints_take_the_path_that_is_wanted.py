"""A checkpoint is the same by whichever I/O path it is moved, and moved by the one that is wanted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock
from penstock import IoOptions, checkpoint
from penstock.errors import InvalidArgument, InvalidFile
from penstock.storage.costs import CostEntry, Kind, Tables, add_tables, device_kind
from penstock.storage.native import PosixTransport
from penstock.storage.paths import TRANSPORTS, shared_path
from penstock.storage.transfer import Transfer
from tests.support.faulty_transport import FaultyTransport
from tests.support.states import STATES, numbers, same

PIECE = 4 << 20
METHODS = ("direct", "staged", "buffered")


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[tuple[str, str]]]:
    """Pieces by direction and I/O path, of two transports that count them: "one" and "two"."""
    counted: Counter[tuple[str, str]] = Counter()

    def counting(name: str) -> FaultyTransport:
        def count(transfer: Transfer) -> int:
            counted[transfer.kind, f"{name} {transfer.method}"] += 1
            return 0

        return FaultyTransport(PosixTransport(), count)

    for name in ("one", "two"):
        monkeypatch.setitem(TRANSPORTS, name, lambda name=name: counting(name))
    for name in ("io_uring", "posix"):
        monkeypatch.delitem(TRANSPORTS, name)
    shared_path.cache_clear()
    yield counted
    shared_path.cache_clear()


def ways(counted: Counter[tuple[str, str]]) -> dict[str, set[str]]:
    return {kind: {path for each, path in counted if each == kind} for kind in ("write", "read")}


def round_trip(folder: Path, io: IoOptions | None, wait: bool = True) -> None:
    state, path = {"a": numbers(3 * PIECE // 4 + 5), "b": [numbers(7)]}, folder / "state"
    handle = checkpoint.save(state, path, io=io, wait=wait)
    if handle is not None:
        handle.wait()
    assert same(checkpoint.load(path, mmap=False, io=io), state)
    assert same(checkpoint.load(path), state)


@pytest.mark.parametrize("path", [f"{name} {method}" for name in TRANSPORTS for method in METHODS])
@pytest.mark.parametrize("name", ["several pieces", *list(STATES)[:2]])
def test_every_path_gives_the_same_file(tmp_path: Path, path: str, name: str) -> None:
    state = STATES[name]()
    checkpoint.save(state, tmp_path / "usual")
    checkpoint.save(state, tmp_path / "state", io=IoOptions(paths=path))
    assert (tmp_path / "state").read_bytes() == (tmp_path / "usual").read_bytes()
    assert same(checkpoint.load(tmp_path / "state", mmap=False, io=IoOptions(paths=path)), state)


@pytest.mark.parametrize("wait", [True, False])
def test_the_path_that_is_named_is_used(tmp_path: Path, moved: Counter[tuple[str, str]], wait: bool) -> None:
    round_trip(tmp_path, None, wait)
    assert ways(moved) == {"write": {"one direct"}, "read": {"one direct"}}
    moved.clear()
    round_trip(tmp_path, IoOptions(paths="two buffered"), wait)
    assert ways(moved) == {"write": {"two buffered"}, "read": {"two buffered"}}


def test_a_table_says_the_path_for_the_size_of_a_piece(
    tmp_path: Path, moved: Counter[tuple[str, str]]
) -> None:
    table = IoOptions(paths={"1MiB": "one staged", "4MiB": "two direct"})
    round_trip(tmp_path, table)
    assert ways(moved) == {"write": {"two direct"}, "read": {"two direct"}}
    moved.clear()
    checkpoint.save({"a": numbers(1000)}, tmp_path / "small", io=table)
    assert ways(moved)["write"] == {"one staged"}


def entry(kind: Kind, path: str, medium: str, s_per_byte: float, class_bytes: int = PIECE) -> CostEntry:
    return CostEntry(
        class_bytes=class_bytes, kind=kind, path=path, medium=medium, samples=9, s_per_byte=s_per_byte
    )


def test_what_runs_have_learned_is_used(tmp_path: Path, moved: Counter[tuple[str, str]]) -> None:
    """Of what lies on the same disk, for each direction, whatever the device of the run; never the cache."""
    costs = tmp_path / "costs.json"
    here = device_kind([tmp_path], "some GPU")
    learned = (
        entry("write", "one direct", "disk", 2e-9),
        entry("write", "two staged", "disk", 1e-9),
        entry("write", "one staged", "disk", 1e-12, class_bytes=1 << 12),  # of another size
        entry("write", "two buffered", "page cache", 1e-12),
        entry("read", "one direct", "disk", 1e-9),
        entry("read", "two staged", "disk", 2e-9),
    )
    add_tables(costs, here, Tables(learned))
    add_tables(costs, "a tape, cpu", Tables((entry("write", "two direct", "disk", 1e-13),)))
    round_trip(tmp_path, IoOptions(costs=costs))
    assert ways(moved) == {"write": {"two staged"}, "read": {"one direct"}}
    moved.clear()
    round_trip(tmp_path, IoOptions(costs=costs, paths=["two direct", "one direct"]))  # among these
    assert ways(moved) == {"write": {"one direct"}, "read": {"one direct"}}
    moved.clear()
    round_trip(tmp_path, IoOptions(costs=tmp_path / "nothing yet"))
    assert ways(moved) == {"write": {"one direct"}, "read": {"one direct"}}


def test_paths_and_files_that_are_none_are_refused(tmp_path: Path) -> None:
    state, path = {"a": numbers(9)}, tmp_path / "state"
    for wrong in ("tape direct", "posix sideways", "posix"):
        with pytest.raises(InvalidArgument, match=wrong):
            penstock.save(state, path, io=IoOptions(paths=wrong))
    (tmp_path / "costs.json").write_text("no costs")
    with pytest.raises(InvalidFile, match=r"costs\.json"):
        penstock.save(state, path, io=IoOptions(costs=tmp_path / "costs.json"))
    assert not path.exists()
