"""How others store samples and read them in random order. Each at the fastest of the ways it documents."""

from __future__ import annotations

import contextlib
import importlib.machinery
import mmap
import os
import random
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from samples_bench.data import Data

Samples = Iterator[Any]


class Files:
    """One file per sample, a thousand in a folder; opened, read and closed one by one."""

    package = None

    def write(self, folder: Path, data: Data) -> None:
        for index in range(data.count):
            if index % 1000 == 0:
                (folder / f"{index // 1000:05d}").mkdir()
            with open(self._path(folder, index), "wb", buffering=0) as file:
                file.write(data.sample(index))

    def open(self, folder: Path, data: Data) -> None:
        self.paths = [self._path(folder, index) for index in range(data.count)]
        self.size_bytes = data.size_bytes

    def epoch(self, seed: int) -> Samples:
        order = self.paths.copy()
        random.Random(seed).shuffle(order)
        size_bytes = self.size_bytes
        for path in order:
            descriptor = os.open(path, os.O_RDONLY)
            yield os.read(descriptor, size_bytes)
            os.close(descriptor)

    def _path(self, folder: Path, index: int) -> str:
        return f"{folder}/{index // 1000:05d}/{index:09d}"


class Packed:
    """All samples in one file, each read by its own pread."""

    package = None

    def write(self, folder: Path, data: Data) -> None:
        with open(folder / "packed", "wb", buffering=1 << 20) as file:
            for sample in data.samples():
                file.write(sample)

    def open(self, folder: Path, data: Data) -> None:
        self.descriptor = os.open(folder / "packed", os.O_RDONLY)
        os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        self.data = data

    def epoch(self, seed: int) -> Samples:
        size_bytes, descriptor, pread = self.data.size_bytes, self.descriptor, os.pread
        order = [index * size_bytes for index in range(self.data.count)]
        random.Random(seed).shuffle(order)
        for offset in order:
            yield pread(descriptor, size_bytes, offset)


class PackedMemory(Packed):
    """The same file, mapped, and each sample copied out of the mapping."""

    def open(self, folder: Path, data: Data) -> None:
        super().open(folder, data)
        self.mapping = mmap.mmap(self.descriptor, 0, prot=mmap.PROT_READ)
        self.mapping.madvise(mmap.MADV_RANDOM)

    def close(self) -> None:
        self.mapping.close()

    def epoch(self, seed: int) -> Samples:
        size_bytes, mapping = self.data.size_bytes, self.mapping
        order = [index * size_bytes for index in range(self.data.count)]
        random.Random(seed).shuffle(order)
        for offset in order:
            yield mapping[offset : offset + size_bytes]


class Lmdb:
    package = "lmdb"

    def write(self, folder: Path, data: Data) -> None:
        import lmdb

        pages = data.count * (data.size_bytes + 4096) * 2
        with lmdb.open(str(folder), map_size=pages + (64 << 20), sync=False) as environment:
            for begin in range(0, data.count, 10_000):
                with environment.begin(write=True) as transaction:
                    for index in range(begin, min(begin + 10_000, data.count)):
                        transaction.put(index.to_bytes(8, "big"), data.sample(index), append=True)

    def open(self, folder: Path, data: Data) -> None:
        import lmdb

        self.environment = lmdb.open(str(folder), readonly=True, lock=False, readahead=False)
        self.count = data.count

    def close(self) -> None:
        self.environment.close()

    def epoch(self, seed: int) -> Samples:
        order = [index.to_bytes(8, "big") for index in range(self.count)]
        random.Random(seed).shuffle(order)
        with self.environment.begin() as transaction:
            for key in order:
                yield transaction.get(key)


class WebDataset:
    """Shards in random order, then a shuffle buffer of a thousand samples, its usual size."""

    package = "webdataset"

    def write(self, folder: Path, data: Data) -> None:
        import webdataset

        for number, shard in enumerate(data.shards()):
            with webdataset.TarWriter(str(folder / f"{number:05d}.tar")) as sink:
                for index in shard:
                    sink.write({"__key__": f"{index:09d}", "bin": data.sample(index)})

    def open(self, folder: Path, data: Data) -> None:
        self.urls = [str(path) for path in sorted(folder.glob("*.tar"))]

    def epoch(self, seed: int) -> Samples:
        import webdataset

        dataset = webdataset.WebDataset(
            self.urls, shardshuffle=len(self.urls), empty_check=False, seed=seed
        ).shuffle(1000)
        for sample in dataset:
            yield sample["bin"]


class Streaming:
    """MosaicML streaming, on local shards, with its default shuffle."""

    package = "streaming"

    def write(self, folder: Path, data: Data) -> None:
        write_mds(folder, data, -(-data.total_bytes // 20) + 16 * data.count // 20 + 4096)

    def open(self, folder: Path, data: Data) -> None:
        without_torchvision()
        self.folder = str(folder)
        self.dataset: Any = None

    def epoch(self, seed: int) -> Samples:
        from streaming import StreamingDataset
        from streaming.base.util import clean_stale_shared_memory

        if self.dataset is None:
            clean_stale_shared_memory()
            self.dataset = StreamingDataset(local=self.folder, shuffle=True, batch_size=64, shuffle_seed=seed)
        for sample in self.dataset:
            yield sample["x"]


class LitData:
    package = "litdata"

    def write(self, folder: Path, data: Data) -> None:
        write_litdata(folder, data, chunk_size=-(-data.count // 20))

    def open(self, folder: Path, data: Data) -> None:
        self.folder = str(folder)

    def epoch(self, seed: int) -> Samples:
        import litdata

        yield from litdata.StreamingDataset(self.folder, shuffle=True, seed=seed)


class Grain:
    """Grain's shuffle over array_record files of one record a group, as its documentation advises."""

    package = "grain"

    def write(self, folder: Path, data: Data) -> None:
        from array_record.python.array_record_module import ArrayRecordWriter

        for number, shard in enumerate(data.shards()):
            writer = ArrayRecordWriter(str(folder / f"{number:05d}.array_record"), "group_size:1")
            for index in shard:
                writer.write(data.sample(index))
            writer.close()

    def open(self, folder: Path, data: Data) -> None:
        import grain

        paths = [str(path) for path in sorted(folder.glob("*.array_record"))]
        self.source = grain.sources.ArrayRecordDataSource(paths)

    def epoch(self, seed: int) -> Samples:
        import grain

        yield from grain.MapDataset.source(self.source).seed(seed).shuffle().to_iter_dataset()


class HuggingFace:
    """A datasets.Dataset on disk, shuffled by its index mapping."""

    package = "datasets"

    def write(self, folder: Path, data: Data) -> None:
        import datasets

        datasets.disable_progress_bars()

        def rows() -> Iterator[dict[str, bytes]]:
            for sample in data.samples():
                yield {"x": sample}

        features = datasets.Features({"x": datasets.Value("binary")})
        made = datasets.Dataset.from_generator(
            rows, features=features, cache_dir=str(folder.with_name(folder.name + ".cache"))
        )
        made.save_to_disk(str(folder), num_shards=20)

    def open(self, folder: Path, data: Data) -> None:
        import datasets

        datasets.disable_progress_bars()
        self.dataset = datasets.load_from_disk(str(folder))

    def epoch(self, seed: int) -> Samples:
        for row in self.dataset.shuffle(seed=seed, keep_in_memory=True):
            yield row["x"]


def write_mds(folder: Path, data: Data, shard_bytes: int) -> None:
    """Shards of MosaicML streaming."""
    without_torchvision()
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns={"x": "bytes"}, size_limit=shard_bytes) as writer:
        for sample in data.samples():
            writer.write({"x": sample})


def write_litdata(folder: Path, data: Data, **chunks: int) -> None:
    """chunks: chunk_size in samples, or chunk_bytes."""
    import litdata

    with contextlib.redirect_stdout(sys.stderr):
        litdata.optimize(
            fn=data.sample,
            inputs=list(range(data.count)),
            output_dir=str(folder),
            num_workers=1,
            reorder_files=False,
            **chunks,
        )


def without_torchvision() -> None:
    """streaming imports torchvision for data sets that nobody reads here. Where its build does not match
    torch's, an empty one takes its place."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for name in ("", ".datasets", ".datasets.folder", ".transforms", ".transforms.functional", ".io"):
            module = _Anything("torchvision" + name)
            module.__path__ = []
            module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
            module.__version__ = "0"
            sys.modules[module.__name__] = module


class _Anything(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})
