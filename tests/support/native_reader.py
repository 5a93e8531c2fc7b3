"""A reader of the stores that tests.support.stores writes, by the native module alone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock import _native

WAIT_S = 30.0


@dataclass
class Mounted:
    reader: _native.SampleReader
    firsts: npt.NDArray[np.uint64]  # [chunks + 1]
    samples: int

    def order(self, kind: str, *, seed: int = 3, slots: int = 3) -> _native.SampleOrder:
        return _native.SampleOrder(kind, self.samples, self.firsts, seed, 0, 1, 0, slots, [])

    def feed(
        self, kind: str, *, slots: int = 3, prefetch_bytes: int = 1 << 20, skip_damaged: bool = False
    ) -> _native.SampleFeed:
        return self.reader.feed(self.order(kind, slots=slots), 1, prefetch_bytes, skip_damaged)


@contextmanager
def mounted(
    *folders: Path,
    buffers: int = 4,
    direct: bool = False,
    verify: bool = True,
    ring: bool = True,
    copy_threads: int = 0,
) -> Iterator[Mounted]:
    descriptors: list[int] = []
    partitions, firsts, samples = [], [], 0
    for folder in folders:
        partition, first = _partition(folder, direct, descriptors)
        partitions.append(partition)
        firsts.append(first + np.uint64(samples))
        samples += len(partition[0])
    reader = _native.SampleReader(
        partitions,
        buffers=buffers,
        direct=direct,
        verify=verify,
        copy_threads=copy_threads,
        depth=16,
        ring=ring,
    )
    try:
        ends = np.array([samples], np.uint64)
        yield Mounted(reader, np.concatenate([*firsts, ends]), samples)
    finally:
        assert reader.close(WAIT_S)
        for descriptor in descriptors:
            os.close(descriptor)


def _partition(folder: Path, direct: bool, descriptors: list[int]) -> tuple[Any, npt.NDArray[np.uint64]]:
    value = json.loads((folder / "store.json").read_text())["value"]

    def array(name: str, dtype: str) -> npt.NDArray[Any]:
        path = folder / name
        return np.fromfile(path, dtype) if path.exists() else np.zeros(0, dtype)

    data_files = []
    for number, data_file in enumerate(value["nodes"]):
        path = folder / f"data-{number:05d}.bin"
        files = [os.open(path, os.O_RDONLY | flag) for flag in ([0, os.O_DIRECT] if direct else [0])]
        descriptors += files
        sizes = (data_file["samples"], data_file["chunks"], data_file["size_bytes"])
        data_files.append((*sizes, files[0], files[1] if direct else -1, 512, 0))
    chunks = array("chunks.bin", "u1").reshape(-1, 16)
    partition = (
        array("directory.bin", "<u8").reshape(-1, 2),
        array("sums.bin", "<u4"),
        chunks,
        array("large.bin", "<u8").reshape(-1, 2),
        value["chunk_bytes"],
        data_files,
    )
    return partition, chunks.view("<u8").reshape(-1, 2)[:, 0]


def parts(data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> list[bytes]:
    return [data[begin:end].tobytes() for begin, end in pairwise(offsets)]


def breads(feed: _native.SampleFeed, sizes: Sequence[int]) -> list[tuple[int, bytes]]:
    """Everything that is left, in batches of these sizes, again and again."""
    found: list[tuple[int, bytes]] = []
    turn = 0
    while (batch := feed.bread(sizes[turn % len(sizes)], WAIT_S)) is not None:
        indices, data, offsets = batch
        assert offsets[0] == 0
        assert offsets[-1] == len(data)
        found += zip(indices.tolist(), parts(data, offsets), strict=True)
        turn += 1
    return found
