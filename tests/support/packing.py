"""Sources for tests of packing, and stores to compare with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from penstock.samples.manifest import Field, StoreManifest
from penstock.samples.packing import FlushPolicy, pack_source
from penstock.samples.progress import PackingSettings
from penstock.samples.sources import Block, RawSample, Source
from tests.support import stores

OFTEN = FlushPolicy(flush_bytes=1, checkpoint_bytes=1, checkpoint_s=0.0)  # whenever it can


class Stopped(Exception):
    """A source's own."""


@dataclass(frozen=True)
class Listed:
    """A source of a list.

    blocks    sizes of blocks to give samples in; then, and where there is none, one by one
    stop      after so many samples: raises `error`
    """

    items: Sequence[tuple[str, bytes]]
    labels: Sequence[int] = ()
    classes: tuple[str, ...] = ()
    blocks: tuple[int, ...] = ()
    stop: int | None = None
    error: type[BaseException] = Stopped
    description: str = "a list"
    encoding: str = "raw"
    fields: tuple[Field, ...] = ()
    size_bytes: int | None = None

    @property
    def samples(self) -> int | None:
        return None

    def __iter__(self) -> Iterator[RawSample | Block]:
        at = 0
        for count in self.blocks:
            if at < len(self.items):
                yield self._block(at, min(at + count, len(self.items)))
                at += count
        for index in range(at, len(self.items)):
            if index == self.stop:
                raise self.error
            yield RawSample(*self.items[index], self.labels[index] if self.labels else -1)
        if self.stop is not None and self.stop >= len(self.items):
            raise self.error

    def of_rank(self, rank: int, world_size: int) -> Listed:
        return replace(self, items=self.items[rank::world_size], labels=self.labels[rank::world_size])

    def _block(self, begin: int, end: int) -> Block:
        names = [name.encode("utf-8", "surrogateescape") for name, _ in self.items[begin:end]]
        data = [data for _, data in self.items[begin:end]]
        return Block(
            np.frombuffer(b"".join(names), np.uint8),
            np.cumsum([len(name) for name in names], dtype=np.int64),
            np.frombuffer(b"".join(data), np.uint8),
            np.cumsum([len(part) for part in data], dtype=np.int64),
            np.array(self.labels[begin:end], np.int32) if self.labels else None,
        )


class Seekable(Listed):
    """A source that can begin anywhere, and then reads nothing before."""

    def names(self) -> Iterator[str]:
        return (name for name, _ in self.items)

    def after(self, samples: int) -> Iterator[RawSample | Block]:
        for index in range(samples, len(self.items)):
            if self.stop is not None and index >= self.stop:
                raise self.error
            yield RawSample(*self.items[index], self.labels[index] if self.labels else -1)
        if self.stop is not None:
            raise self.error


def recipe_of(source: Source, chunk_bytes: int = 4096, data_file_bytes: int = 1 << 40) -> PackingSettings:
    return PackingSettings(
        chunk_bytes=chunk_bytes,
        data_file_bytes=data_file_bytes,
        encoding=source.encoding,
        fields=source.fields,
        classes=source.classes,
        partition=0,
        partitions=1,
        samples=source.samples,
        size_bytes=source.size_bytes,
    )


def pack_often(source: Source, folder: Path, data_file_bytes: int = 1 << 40, **options: Any) -> StoreManifest:
    """Pack with checkpoints at every sample."""
    recipe = recipe_of(source, data_file_bytes=data_file_bytes)
    return pack_source(source, folder, recipe, metadata={}, policy=OFTEN, **options)


def contents(folder: Path) -> dict[str, Any]:
    """A store's files, the manifest as what it says."""
    found: dict[str, Any] = {path.name: path.read_bytes() for path in folder.iterdir()}
    found["store.json"] = json.loads(found["store.json"])
    return found


def expected(folder: Path, items: Sequence[tuple[str, bytes]], **options: Any) -> dict[str, Any]:
    """The files that a store of these samples has."""
    stores.write_store(folder, items, **{"source": "a list", **options})
    return contents(folder)


def samples_of(count: int, size_bytes: int = 700) -> list[tuple[str, bytes]]:
    """Samples of many sizes, none the same."""
    random = np.random.default_rng(count)
    sizes = random.integers(0, 2 * size_bytes, count)
    return [(f"sample/{index}", random.bytes(size)) for index, size in enumerate(sizes)]
