"""penstock's rows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import penstock.samples
from samples_bench.data import Data

CACHE_BYTES = 64 << 20  # a quarter of most stores here, so that chunk order has to mix what does not fit


class Bread:
    """Batches by `bread`, which are whole: an array of bytes, offsets, indices."""

    package = None

    def __init__(self, order: str, batch: int, one_core: bool = False, io: str = "auto") -> None:
        self.order, self.batch, self.one_core, self.io = order, batch, one_core, io

    def write(self, folder: Path, data: Data) -> None:
        penstock.samples.pack(((f"{i:09d}", data.sample(i)) for i in range(data.count)), folder / "store")

    def open(self, folder: Path, data: Data) -> None:
        if self.one_core:
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        self.store: Any = penstock.samples.mount(
            folder / "store", order=self.order, cache_bytes=CACHE_BYTES, io=self.io
        )
        self.epochs = 0

    def close(self) -> None:
        self.store.close()

    def batches(self, seed: int) -> Iterator[Any]:
        """Batches of samples, in place of `epoch`, which gives them one by one."""
        store, batch = self.store, self.batch
        store.sequence(seed=seed, epoch=self.epochs)
        self.epochs += 1
        while (got := store.bread(batch)) is not None:
            yield got

    def count(self, got: Any) -> int:
        return len(got)

    def samples(self, got: Any) -> list[bytes]:
        return [bytes(got[i][:8]) for i in range(len(got))]


class Loaded(Bread):
    """Batches of tensors by penstock.samples.Loader, without worker processes."""

    def open(self, folder: Path, data: Data) -> None:
        super().open(folder, data)
        self.loader: Any = penstock.samples.Loader(self.store, self.batch)

    def batches(self, seed: int) -> Iterator[Any]:
        self.loader.set_epoch(self.epochs)
        self.epochs += 1
        yield from self.loader

    def count(self, got: Any) -> int:
        return len(got["indices"])

    def samples(self, got: Any) -> list[bytes]:
        data, offsets = got["data"].numpy(), got["offsets"].tolist()
        return [data[begin : begin + 8].tobytes() for begin in offsets[:-1]]
