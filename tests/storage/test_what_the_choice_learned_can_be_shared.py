"""What a choice learned: saved, merged and loaded as tables; overruled by pins; told in a report."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core import files
from penstock.errors import InvalidArgument, InvalidFile
from penstock.storage.choice import Choice
from penstock.storage.costs import CostEntry, Tables, merge
from penstock.storage.rounds import ChoiceReport
from tests.support.io_paths import PATHS, Costs, Machine, train

MIB = 1 << 20
COSTS: Costs = {
    "write": dict(zip(PATHS, (1.0, 1.2, 1.3, 1.5, 2.0), strict=True)),
    "read": dict(zip(PATHS, (1.0, 1.1, 0.9, 1.6, 1.9), strict=True)),
}
QUIET = {"sigma": 0.0, "outliers": 0.0}
TABLES = st.builds(
    lambda entries: Tables(tuple(entries.values())),
    st.dictionaries(
        st.tuples(
            st.sampled_from([4096, MIB]), st.sampled_from(["write", "read"]), st.sampled_from(list(PATHS))
        ),
        st.tuples(st.integers(1, 100), st.floats(1e-12, 1e-3)),
        max_size=12,
    ).map(lambda drawn: {key: entry(*key, *value) for key, value in drawn.items()}),
)


def entry(class_bytes: int, kind: str, path: str, samples: int = 9, s_per_byte: float = 1e-9) -> CostEntry:
    return CostEntry(
        class_bytes=class_bytes,
        kind=kind,  # type: ignore[arg-type]
        path=path,
        medium=PATHS.get(path, "disk"),
        samples=samples,
        s_per_byte=s_per_byte,
    )


def learned(costs: Costs = COSTS, steps: int = 20) -> Choice:
    choice = Choice(PATHS)
    train(choice, Machine(costs, **QUIET), [MIB] * 10 + [64 * MIB] * 10, steps)
    return choice


# Tables


def test_tables_come_back_from_a_file_as_they_were(tmp_path: Path) -> None:
    tables = learned().tables()
    files.save(tables, tmp_path / "tables.json")
    assert files.load(Tables, tmp_path / "tables.json") == tables
    text = (tmp_path / "tables.json").read_text().replace('"samples":3', '"samples":-3')
    (tmp_path / "tables.json").write_text(text)
    with pytest.raises(InvalidFile, match="-3 samples"):
        files.load(Tables, tmp_path / "tables.json")


def test_loaded_tables_spare_the_first_trials() -> None:
    again = Choice(PATHS, tables=learned().tables(), reexplore=0)
    assert {again.path_to_write(MIB) for _ in range(20)} == {"io_uring direct"}
    assert {again.path_to_read(64 * MIB, "disk") for _ in range(20)} == {"posix direct"}
    assert Choice(PATHS, tables=learned().tables()).tables().rows()[0].write_samples == 3


def test_loaded_tables_are_checked() -> None:
    """A path became slower since, another faster: both are found out."""
    costs: Costs = {
        "write": {**COSTS["write"], "io_uring direct": 9.0, "posix direct": 0.5},
        "read": COSTS["read"],
    }
    again = Choice(PATHS, tables=learned().tables())
    moved = train(again, Machine(costs, **QUIET), [MIB] * 20, 60)
    used = Counter(moved.path for step in moved[50:] for moved in step if moved.kind == "write")
    assert used.most_common(1)[0][0] == "posix direct"
    first = Counter(moved.path for step in moved for moved in step if moved.kind == "write")
    assert first["io_uring direct"] < 10


def test_paths_no_longer_there_are_ignored_and_new_ones_are_tried() -> None:
    paths = {path: medium for path, medium in PATHS.items() if path != "io_uring direct"}
    paths |= {"kvikio gpu-direct": "disk", "posix mapped": "disk"}  # mapped now writes elsewhere
    choice = Choice(paths, tables=learned().tables(), reexplore=0)
    asked = Counter(choice.path_to_write(MIB) for _ in range(40))
    assert asked == {"kvikio gpu-direct": 3, "posix mapped": 3, "io_uring staged": 34}


@given(TABLES, TABLES)
def test_merging_commutes_and_loses_nothing(a: Tables, b: Tables) -> None:
    both = merge(a, b)
    assert both == merge(b, a)
    assert sum(one.samples for one in both.entries) == sum(one.samples for one in a.entries + b.entries)
    assert merge(both, Tables()) == both
    by_key = {(one.class_bytes, one.kind, one.path): one.s_per_byte for one in both.entries}
    for one in a.entries + b.entries:
        others = [
            other.s_per_byte
            for other in a.entries + b.entries
            if (other.class_bytes, other.kind, other.path) == (one.class_bytes, one.kind, one.path)
        ]
        merged = by_key[one.class_bytes, one.kind, one.path]
        assert min(others) * (1 - 1e-12) <= merged <= max(others) * (1 + 1e-12)


def test_a_median_of_many_samples_outweighs_one_of_few() -> None:
    few, many = (
        Tables((entry(MIB, "write", "posix direct", samples, cost),))
        for samples, cost in ((1, 4e-9), (3, 2e-9))
    )
    (merged,) = merge(few, many).entries
    assert merged.samples == 4 and merged.s_per_byte == pytest.approx(2.5e-9)


def test_rows_mark_what_is_used() -> None:
    tables = learned({"write": COSTS["write"], "read": {**COSTS["read"], "posix buffered": 0.7}}).tables()
    rows = [row for row in tables.rows() if row.class_bytes == MIB]
    assert [row.path for row in rows if row.writes] == ["io_uring direct"]
    assert [row.path for row in rows if row.reads] == ["posix direct"]
    rates = {row.path: row.write_bytes_per_s for row in tables.rows()}
    assert rates["posix mapped"] == pytest.approx(0.5e9)


@pytest.mark.parametrize(
    "change", [{"class_bytes": 3}, {"samples": 0}, {"s_per_byte": 0.0}, {"s_per_byte": -1.0}]
)
def test_an_entry_that_cannot_be_is_refused(change: dict[str, float]) -> None:
    values = {
        "class_bytes": MIB,
        "kind": "write",
        "path": "a",
        "medium": "d",
        "samples": 1,
        "s_per_byte": 1e-9,
    }
    with pytest.raises(InvalidArgument):
        CostEntry(**{**values, **change})  # type: ignore[arg-type]


# The report


def two_halves(steps: int = 150) -> ChoiceReport:
    """A machine on which the best path changes a third of the way through."""
    machine, choice = Machine(COSTS, seed=3), Choice(PATHS, reexplore=0.05)
    train(choice, machine, [MIB] * 20, steps)
    machine.cost = Machine({**COSTS, "write": {**COSTS["write"], "io_uring staged": 0.4}}).cost
    train(choice, machine, [MIB] * 20, 2 * steps)
    return choice.report()


def test_report_counts_add_up() -> None:
    report = two_halves()
    assert [row.kind for row in report.rows] == ["write", "read", "write+read"]
    for row in report.rows:
        assert row.rounds == sum(row.wins.values()) > 3
        assert row.best == max(row.wins, key=row.wins.__getitem__)
        shares = report.shares[row.kind]
        assert shares["Best"].best == pytest.approx(row.wins[row.best] / row.rounds)
        assert shares["First"].best == pytest.approx(row.wins[row.first] / row.rounds)
        for path, wins in row.wins.items():
            assert shares[path].best == pytest.approx(wins / row.rounds)
        assert all(share.speed is not None and 0 < share.speed <= 1 for share in shares.values())
        assert sum(
            share.best for policy, share in shares.items() if policy not in ("First", "Running", "Best")
        ) == (pytest.approx(1))


def test_report_tells_first_from_running() -> None:
    report = two_halves()
    (row,) = (row for row in report.rows if row.kind == "write")
    shares = report.shares["write"]
    assert row.first == "io_uring direct" and row.running == "io_uring staged"
    assert shares["First"].best < shares["Running"].best and shares["Running"].best > 0.8
    assert shares["First"].speed < shares["Running"].speed  # type: ignore[operator]
    assert shares["First"].speed == shares["io_uring direct"].speed
    assert "io_uring staged" in report.describe() and "rounds won" in report.describe()


def test_writes_with_their_reads_are_won_by_pairs_of_one_medium() -> None:
    report = learned(steps=60).report()
    for row in report.rows:
        if row.kind == "write+read":
            assert row.first == row.running == row.best == "io_uring direct, posix direct"
    assert report.shares["write+read"]["io_uring direct"].speed == pytest.approx(1.9 / 2.0, rel=1e-3)
    assert report.shares["write+read"]["Running"].speed == pytest.approx(1)


def test_a_report_before_the_first_round_is_empty() -> None:
    choice = Choice(PATHS)
    choice.observe("write", MIB, "posix direct", 1e-3)
    assert choice.report().rows == () and choice.report().describe() == ""
