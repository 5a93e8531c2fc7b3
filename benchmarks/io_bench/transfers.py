"""Part one: tensors of one size, written and read back by every row in turn."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from io_bench.formats import Unavailable
from io_bench.limit import LIMITS
from io_bench.measure import (
    Sample,
    Tensors,
    make_cold,
    make_warm,
    remove,
    rotated,
    settle,
    summary,
    sync,
    tensors_in_sample,
    timed,
    touch,
)
from io_bench.peers import PEERS
from io_bench.rows import IN_FLIGHT, ROWS, Place, Row

MIB = 1 << 20
ALL_ROWS: dict[str, Callable[[Place], Row]] = {**ROWS, **PEERS, **LIMITS}

Samples = dict[str, list[Sample]]
Told = Callable[[str], None]


def measure_size(
    directory: Path, size_bytes: int, names: list[str], rounds: int, seed: int, quick: bool, tell: Told
) -> dict[str, Any]:
    """Every kind of transfer of tensors of ``size_bytes``, by row: what goes to the document."""
    count = tensors_in_sample(size_bytes, quick)
    tensors = Tensors([size_bytes] * count, seed)
    samples: dict[str, Samples] = {}
    does: dict[str, str] = {}
    unavailable: dict[str, str] = {}
    failed: dict[str, str] = {}
    cold_left_bytes: dict[str, int] = {}
    with ExitStack() as stack:
        file = stack.enter_context(written_file(directory / "overwritten", tensors))
        place = Place(directory, file, tensors, quick)
        rows: list[Row] = []
        for name in names:
            tell(f"{name}: preparing")
            try:
                row = ALL_ROWS[name](place)
            except Unavailable as reason:
                unavailable[name] = str(reason)
                continue
            stack.callback(row.close)
            rows.append(row)
            does[name] = row.does
            samples[name] = {kind: [] for kind in row.kinds}
        for number in range(rounds):
            tensors.refresh()
            for row in list(rotated(rows, number)):
                tell(f"{row.name}: round {number + 1} of {rounds}")
                try:
                    left_bytes = one_round(row, samples[row.name], number)
                except Exception as error:  # the others go on
                    failed[row.name] = f"{type(error).__name__}: {error}"
                    rows.remove(row)
                    del samples[row.name]
                else:
                    cold_left_bytes[row.name] = max(left_bytes, cold_left_bytes.get(row.name, 0))
                row.begin()
                settle(directory)
        settings = {row.name: found for row in rows if (found := row.settings())}
    return {
        "tensors": count,
        "rows": {
            name: {kind: summary(taken, tensors.total_bytes) for kind, taken in kinds.items() if taken}
            for name, kinds in samples.items()
        },
        "cold_left_bytes": {name: left for name, left in cold_left_bytes.items() if left},
        "does": does,
        "settings": settings,
        "unavailable": unavailable,
        "failed": failed,
    }


def one_round(row: Row, samples: Samples, number: int) -> int:
    """Add a sample to each kind the row can do. Gives the bytes a cold read found in the page cache."""
    left_bytes = 0
    directory = row.place.directory
    for durable, kind in ((False, "write"), (True, "write+fsync")):
        if kind in row.kinds:
            row.begin()
            samples[kind].append(timed(partial(row.write, durable))[0])
            for path in row.paths():
                sync(path)
            settle(directory)
            if number == 0:  # what was not synced has to be right too
                read_back(row, row.read)
    if not set(row.kinds) & {"write", "write+fsync"}:
        row.begin()
        row.write(durable=True)
    if "cold read" in row.kinds:
        if not row.bypasses:
            left_bytes = sum(make_cold(path) for path in row.paths())
        samples["cold read"].append(read_back(row, row.read))
    if "warm read" in row.kinds:
        if not row.bypasses:
            for path in row.paths():
                make_warm(path)
        samples["warm read"].append(read_back(row, row.read))
    if IN_FLIGHT[0] in row.kinds and len(row.tensors.tensors) > 1:
        row.begin()
        samples[IN_FLIGHT[0]].append(timed(row.write_in_flight)[0])
        settle(directory)
        samples[IN_FLIGHT[1]].append(read_back(row, row.read_in_flight))
    return left_bytes


def read_back(row: Row, read: Callable[[], Sample | list[Tensor]]) -> Sample:
    """Time ``read``; compare every bit afterwards."""

    def act() -> Sample | list[Tensor]:
        result = read()
        if row.maps and not isinstance(result, Sample):
            touch(result)
        return result

    row.scrub()
    sample, read_tensors = timed(act)
    if read_tensors is not None:
        row.tensors.verify(read_tensors, row.name)
    return sample


@contextmanager
def written_file(path: Path, tensors: Tensors) -> Iterator[Path]:
    """A preallocated file of the tensors' bytes, written once; removed at the end."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, tensors.total_bytes)
        view = tensors.source.view()
        for begin in range(0, tensors.total_bytes, 4 * MIB):
            os.pwrite(descriptor, view[begin : begin + 4 * MIB], begin)
    finally:
        os.close(descriptor)
    make_cold(path)
    try:
        yield path
    finally:
        remove(path)
