"""Files of values are loaded as they were written, or refused: nothing in them is believed."""

from __future__ import annotations

import copy
import dataclasses
import gzip
import json
import os
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.artifact import published
from penstock.core import files
from penstock.core.check import check
from penstock.core.hardware import Hardware
from penstock.core.plan import Evict, Plan, Recompute
from penstock.core.timeline import MemorySample, Span, Stall, Timeline
from penstock.core.trace import Trace
from penstock.errors import InvalidFile
from penstock.runtime.report import Report
from penstock.storage.costs import CostEntry, CostTables, Tables
from tests.support.traces import five_kernels, machine


def test_any_other_version_is_refused() -> None:
    for kind, value in (
        (Hardware, machine()),
        (Trace, five_kernels()),
        (Timeline, Timeline(step_s=1.0)),
    ):
        data = json.loads(files.encoded(value))
        for version in ("0", "1000", "-1", "", "1.0"):
            data["schema"] = f"{data['schema'].partition('/')[0]}/{version}"
            with pytest.raises(InvalidFile, match=r"earlier version|written by this version"):
                files.decoded(kind, json.dumps(data).encode(), "file")


# -- writing ----------------------------------------------------------------------------------------


def test_a_planted_draft_is_not_followed(tmp_path: Path) -> None:
    """Whoever may write to the folder cannot have another file overwritten."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in (f".hardware.json.{os.getpid()}", f".hardware.json.{os.getpid()}.0"):
        (folder / name).symlink_to(victim)
    machine().save(folder / "hardware.json")
    assert victim.read_text() == "precious"
    assert Hardware.load(folder / "hardware.json") == machine()


def test_a_file_is_durable_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "hardware.json"
    synced = []
    sync = os.fsync

    def observed(descriptor: int) -> None:
        target = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((target.is_dir(), path.exists(), None if target.is_dir() else target.stat().st_size))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", observed)
    machine().save(path)
    assert synced == [(False, False, path.stat().st_size), (True, True, None)]


def test_what_cannot_be_written_names_the_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "none" / "a.json", tmp_path / "pipe", tmp_path / "folder"):
        with pytest.raises(OSError) as refusal:
            machine().save(path)
        assert refusal.value.filename == str(path)
    assert (tmp_path / "pipe").is_fifo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "pipe"]


# -- reading ----------------------------------------------------------------------------------------


def test_a_small_file_cannot_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "hardware.json.gz"
    with gzip.open(path, "wb", compresslevel=1) as bomb:
        bomb.write(b'{"schema": "penstock.hardware/1", "value": "')
        for _ in range(4 * files.MOST_TEXT_BYTES >> 20):
            bomb.write(bytes(1 << 20))
    assert path.stat().st_size < 8 << 20
    tracemalloc.start()
    try:
        with pytest.raises(InvalidFile, match="holds more than 256 MiB of text once unpacked"):
            Hardware.load(path)
        assert tracemalloc.get_traced_memory()[1] < 2.5 * files.MOST_TEXT_BYTES
    finally:
        tracemalloc.stop()


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "hardware.json"
    with path.open("wb") as sparse:
        sparse.truncate(1 << 40)
    with pytest.raises(InvalidFile, match="holds more than 256 MiB of text:"):
        Hardware.load(path)


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidFile, match="not a regular file"):
        Hardware.load(tmp_path / "pipe")


# -- hostile files: any change gives a clean error or another valid value ---------------------------


def spans() -> Timeline:
    return Timeline(
        step_s=2.0,
        spans=(Span("compute", 0.0, 1.0, "a", 0), Span("disk_write", 0.5, 1.5, "b", 1, 4096)),
        memory={"device": (MemorySample(0.0, 100), MemorySample(1.0, 50))},
        stalls=(Stall(1.0, 1.5, "memory", 1),),
    )


def full_trace() -> Trace:
    trace = five_kernels()
    density, itemsize = np.full(trace.tensors, 0.5), np.full(trace.tensors, 4, dtype=np.int64)
    return dataclasses.replace(trace, tensor_density=density, tensor_itemsize=itemsize)


ENTRY = CostEntry(class_bytes=1 << 20, kind="write", path="x", medium="disk", samples=3, s_per_byte=1e-9)
PUBLISHED = {
    "schema": published.SCHEMA,
    "model": "tiny",
    "batch": 1,
    "loss_kernel": 0,
    "kernel_names": ["a", "b"],
    "tensor_kinds": ["weight", "act"],
    "kernels": {"name": [0, 1], "ns": [1000, 2000], "in": [[0], [1]], "out": [[1], [0]]},
    "tensors": {"bytes": [4096, 8192], "kind": [0, 1]},
}
VALUES: dict[str, tuple[type, Any]] = {
    "trace": (Trace, full_trace()),
    "plan": (
        Plan,
        Plan(
            policy="test",
            device_budget_bytes=300,
            evictions=(Evict(0, 0, 1, 4, 3),),
            recomputations=(Recompute(1, 2, 3),),
            variants=(-1,) * 5,
            trace=five_kernels(),
        ),
    ),
    "hardware": (
        Hardware,
        dataclasses.replace(machine(), measured_rates={"disk_read": ((4096, 1e8), (8192, 2e8))}),
    ),
    "timeline": (Timeline, spans()),
    "report": (
        Report,
        Report(
            **dict.fromkeys(("device", "policy", "reason", "memory_manager"), "x"),
            **{name: 1 << 20 for name in Report.__annotations__ if name.endswith("_bytes")},
            **{name: 1.5 for name in Report.__annotations__ if name.endswith("_s") and "per" not in name},
            **dict.fromkeys(("steps", "profiled_steps", "trace_mismatches", "unplanned_accesses"), 2),
            direct_io=False,
            operators=100,
            moved_bytes_by_kind={"weight": 100},
            rates_bytes_per_s={"disk_read": 1e9},
            moved_bytes_by_io_path={"threads": 100},
            unavailable_transports={"cuFile": "no GPU"},
        ),
    ),
    "tables": (CostTables, CostTables({"ext4 on x": Tables((ENTRY,))})),
}

ODD: list[Any] = [None, True, -1, 0, 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**400]
ODD += [0.5, -0.0, 1e308, 1e-320, "", "x", "disk", "\0", "9" * 100, [], [[]], [0], [-1], {}, {"": None}]


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where in a JSON value anything is."""
    yield at
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*at, key))


def changed(document: Any, place: tuple[Any, ...], how: str, odd: Any) -> Any:
    """``document`` with one place replaced, removed or repeated."""
    if not place:
        return odd
    document = copy.deepcopy(document)
    inside = document
    for key in place[:-1]:
        inside = inside[key]
    if how == "removed":
        del inside[place[-1]]
    elif how == "repeated" and isinstance(inside, list):
        inside.append(inside[place[-1]])
    else:
        inside[place[-1]] = odd
    return document


def is_refused_or_valid(kind: type, path: Path, load: Callable[[type, Path], Any] = files.load) -> None:
    try:
        value = load(kind, path)
    except InvalidFile as refusal:
        assert str(path) in str(refusal) and len(str(refusal)) < 2000
        return
    files.save(value, path.with_name("again.json"))
    again = files.load(kind, path.with_name("again.json"))
    if kind is Trace:
        assert again.inactive_periods == value.inactive_periods and again.peak_bytes == value.peak_bytes
    else:
        assert again == value
    if kind is Report:
        assert str(value) and repr(value) and value._repr_html_()
    if kind is Plan:
        trace = value.trace or five_kernels()
        assert all(isinstance(problem, str) for problem in check(trace, value, machine()))


@pytest.mark.parametrize("name", VALUES)
def test_every_place_may_hold_anything(name: str, tmp_path: Path) -> None:
    kind, value = VALUES[name]
    path = tmp_path / "value.json"
    files.save(value, path)
    document = json.loads(path.read_text())
    for number, place in enumerate(places(document)):
        for how, odd in [("removed", None), ("repeated", None)] + [
            ("replaced", odd) for odd in ODD[number % 3 :: 3]
        ]:
            path.write_text(json.dumps(changed(document, place, how, odd)))
            is_refused_or_valid(kind, path)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("name", VALUES)
@settings(
    max_examples=40,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    changes=st.lists(
        st.tuples(st.integers(0, 1 << 16), st.binary(max_size=6), st.integers(0, 6)), min_size=1, max_size=4
    )
)
def test_every_byte_may_be_anything(
    name: str, suffix: str, changes: list[tuple[int, bytes, int]], tmp_path: Path
) -> None:
    kind, value = VALUES[name]
    path = tmp_path / f"value.json{suffix}"
    files.save(value, path)
    data = bytearray(path.read_bytes())
    for position, content, removed in changes:
        position %= len(data) + 1
        data[position : position + removed] = content
    path.write_bytes(data)
    is_refused_or_valid(kind, path)


@pytest.mark.parametrize("text", ["[" * 1_000_000, '{"a":' * 100_000, "1" * 1_000_000, '"' + "\\ud800" * 10])
@pytest.mark.parametrize("where", ["alone", "the schema", "the value", "an unknown field"])
@pytest.mark.parametrize("kind", [kind for kind, _ in VALUES.values()])
def test_deep_and_long_texts_are_refused(kind: type, where: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    name = kind.__name__.lower()
    schema = f"penstock.{name}/{files.VERSIONS.get(name, 1)}"
    path.write_text(
        {
            "alone": text,
            "the schema": f'{{"schema": {text}',
            "the value": f'{{"schema": "{schema}", "value": {text}',
            "an unknown field": f'{{"schema": "{schema}", "x": {text}',
        }[where]
    )
    with pytest.raises(InvalidFile):
        files.load(kind, path)


def test_every_place_of_a_published_trace_may_hold_anything(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    path.write_text(json.dumps(PUBLISHED))
    assert published.trace(path).kernels == 2
    for number, place in enumerate(places(PUBLISHED)):
        for how, odd in [("removed", None), ("repeated", None)] + [
            ("replaced", odd) for odd in ODD[number % 3 :: 3]
        ]:
            path.write_text(json.dumps(changed(PUBLISHED, place, how, odd)))
            is_refused_or_valid(Trace, path, lambda _, path: published.trace(path))
