"""Microseconds a sample of reading MDS shards and TFRecords to be packed: penstock's readers, and others'.

    pip install mosaicml-streaming tfrecord  # a virtual environment of its own: the first pins 70 packages
    python benchmarks/samples_sources.py

20,000 samples of 1 to 10 kB, in the page cache. Readers take turns; medians and ranges of all turns but the
first. Both sides of MDS encode the fields, which packing does. Of TFRecords only penstock compares checksums.
"""

from __future__ import annotations

import json
import statistics
import struct
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import tfrecord
from streaming.base.format.mds import MDSReader, MDSWriter

from penstock.samples import encode
from penstock.samples.sources import open_source

SAMPLES = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
TURNS = 6


def write(folder: Path) -> int:
    """The same samples in both formats. Gives their bytes."""
    random = np.random.default_rng(0)
    records = tfrecord.TFRecordWriter(str(folder / "a.tfrecord"))
    columns = {"name": "str", "data": "bytes", "label": "int"}
    with MDSWriter(out=str(folder / "mds"), columns=columns) as shards:
        sizes = random.integers(1000, 10_001, SAMPLES).tolist()
        for number, size in enumerate(sizes):
            data, length = random.bytes(size), struct.pack("<Q", size)
            shards.write({"name": f"{number:09d}", "data": data, "label": number % 10})
            records.file.write(length + records.masked_crc(length) + data + records.masked_crc(data))
    records.close()
    return sum(sizes)


def mds_by_penstock(folder: Path) -> int:
    return sum(len(sample.data) for sample in open_source(folder / "mds"))


def mds_by_streaming(folder: Path) -> int:
    shards = json.loads((folder / "mds" / "index.json").read_bytes())["shards"]
    readers = (MDSReader.from_json(str(folder / "mds"), "", shard) for shard in shards)
    return sum(len(encode(reader[i])) for reader in readers for i in range(len(reader)))


def tfrecord_by_penstock(folder: Path) -> int:
    return sum(len(sample.data) for sample in open_source(folder / "a.tfrecord"))


def tfrecord_by_tfrecord(folder: Path) -> int:
    return sum(len(bytes(record)) for record in tfrecord.reader.tfrecord_iterator(str(folder / "a.tfrecord")))


def main() -> None:
    readers = (mds_by_penstock, mds_by_streaming, tfrecord_by_penstock, tfrecord_by_tfrecord)
    times_us: dict[str, list[float]] = {reader.__name__: [] for reader in readers}
    with tempfile.TemporaryDirectory() as name:
        data_bytes = write(Path(name))
        for _ in range(TURNS):
            for reader in readers:
                began_s = time.perf_counter()
                read_bytes = reader(Path(name))
                times_us[reader.__name__].append((time.perf_counter() - began_s) / SAMPLES * 1e6)
                assert read_bytes >= data_bytes, f"{reader.__name__} gave {read_bytes} of {data_bytes} bytes"
    for reader_name, (_, *turns) in times_us.items():
        print(f"{reader_name:22} {statistics.median(turns):6.2f}  ({min(turns):.2f} to {max(turns):.2f})")


if __name__ == "__main__":
    main()
