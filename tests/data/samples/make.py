"""Make the files beside this one, with the libraries whose formats they are.

    pip install mosaicml-streaming==0.13.0 webdataset==1.0.2 datasets==5.0.1 tfrecord==1.14.6 crc32c
    python tests/data/samples/make.py

`expected.json` says what these libraries read from them. Running it again gives the same contents; the time
in gzip's headers and the order of the features in an Example differ.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import tfrecord
import webdataset
from PIL import Image
from streaming import MDSWriter
from streaming.base.format.mds.reader import MDSReader

HERE = Path(__file__).parent
MDS_COLUMNS = {
    "bytes": "bytes",
    "text": "str",
    "count": "int",
    "small": "uint8",
    "weight": "float32",
    "half": "float16",
    "free": "ndarray",
    "typed": "ndarray:int16",
    "fixed": "ndarray:float32:2,3",
    "digits": "str_int",
    "decimal": "str_float",
    "tree": "json",
    "raw": "pil",
    "png": "png",
    "pngs": "list[png]",
}


def main() -> None:
    for path in HERE.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
    expected = {
        "mds": make_mds(""),
        "webdataset": make_webdataset(),
        "tfrecord": make_tfrecord(),
        "datasets": make_datasets(),
    }
    assert all(make_mds(compression) == expected["mds"] for compression in ("gz", "bz2", "zstd"))
    (HERE / "expected.json").write_text(json.dumps(expected) + "\n")


def make_mds(compression: str) -> list[dict[str, Any]]:
    folder = HERE / "mds" / (compression or "plain")
    options: dict[str, Any] = {"compression": compression} if compression else {}
    with MDSWriter(
        out=str(folder), columns=MDS_COLUMNS, hashes=["sha1", "xxh64"], size_limit=2048, **options
    ) as writer:
        for i in range(5):
            writer.write(mds_sample(i))
    found = []
    for shard in json.loads((folder / "index.json").read_text())["shards"]:
        if compression:  # this library reads what it has unpacked
            from streaming.base.compression import decompress

            packed = (folder / shard["zip_data"]["basename"]).read_bytes()
            (folder / shard["raw_data"]["basename"]).write_bytes(decompress(compression, packed))
        reader = MDSReader.from_json(str(folder), "", shard)
        found += [plain(reader[i]) for i in range(shard["samples"])]
        if compression:
            (folder / shard["raw_data"]["basename"]).unlink()
    return found


def mds_sample(i: int) -> dict[str, Any]:
    random = np.random.default_rng(i)
    image = Image.fromarray(random.integers(0, 256, (3, 4, 3), np.uint8))
    return {
        "bytes": random.bytes(i),
        "text": "größer 大" * i,
        "count": -(i**20),
        "small": 250 + i,
        "weight": np.float32(i / 3),
        "half": np.float16(i / 7),
        "free": random.integers(0, 1 << 60, (1, i + 1)),
        "typed": random.integers(-9, 9, (i + 1, 2), np.int16),
        "fixed": random.random((2, 3), np.float32),
        "digits": 10 ** (i * 4),
        "decimal": i / 11,
        "tree": {"list": [i, None, "x"], "yes": True},
        "raw": image,
        "png": image,
        "pngs": [image] * i,
    }


def make_webdataset() -> list[dict[str, Any]]:
    folder = HERE / "webdataset"
    folder.mkdir()
    for number in range(2):
        # Without compression: its header would hold the time.
        with webdataset.TarWriter(
            str(folder / f"train-{number:03d}.tar"), mtime=0, user="u", group="g"
        ) as writer:
            for i in range(3):
                key = f"{number}/{'long/' * 30 * (i == 2)}sample{i}"
                writer.write({"__key__": key, "txt": "ü" * i, "cls": i, "seg.png": bytes([i]) * 520})
    with tarfile.open(folder / "gnu.tar", "w", format=tarfile.GNU_FORMAT) as archive:
        member = tarfile.TarInfo("deep/" * 40 + "a.TXT")
        member.size = 3
        archive.addfile(member, io.BytesIO(b"abc"))
    found = []
    for name in ("train-000.tar", "train-001.tar", "gnu.tar"):
        for sample in webdataset.WebDataset(str(folder / name), shardshuffle=False):
            fields = {key: plain(value) for key, value in sample.items() if not key.startswith("__")}
            found.append({"name": sample["__key__"], "fields": fields})
    return found


def make_tfrecord() -> list[dict[str, Any]]:
    folder = HERE / "tfrecord"
    folder.mkdir()
    path = folder / "examples.tfrecord"
    writer = tfrecord.TFRecordWriter(str(path))
    for i in range(4):
        values = {
            "image": (bytes([i]) * i * 50, "byte"),
            "texts": ([b"a", b"", b"ccc"][:i] or b"", "byte"),
            "box": ([i / 3, -1.5], "float"),
            "label": (i, "int"),
            "ids": ([-i, 1 << 62, -(1 << 63)], "int"),
        }
        writer.write(values)
    writer.close()
    found = []
    for record in tfrecord.reader.tfrecord_iterator(str(path)):
        example = tfrecord.example_pb2.Example()
        example.ParseFromString(bytes(record))
        fields = {}
        for name, feature in example.features.feature.items():
            kind = feature.WhichOneof("kind")
            fields[name] = [kind, plain(list(getattr(feature, kind).value))]
        found.append({"data": bytes(record).hex(), "fields": fields})
    return found


def make_datasets() -> list[dict[str, Any]]:
    features = datasets.Features(
        {
            "label": datasets.ClassLabel(names=["no", "yes"]),
            "text": datasets.Value("string"),
            "tokens": datasets.Sequence(datasets.Value("int32")),
        }
    )
    rows = [{"label": i % 2, "text": f"row {i} ä", "tokens": list(range(i))} for i in range(6)]
    dataset = datasets.Dataset.from_list(rows, features=features)
    dataset.save_to_disk(str(HERE / "datasets" / "saved"), num_shards=2)
    return [dict(row) for row in dataset]


def plain(value: Any) -> Any:
    """A value as JSON can hold it."""
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, Image.Image):
        return {"pixels": value.tobytes().hex(), "mode": value.mode, "size": list(value.size)}
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "shape": list(value.shape), "bytes": value.tobytes().hex()}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


if __name__ == "__main__":
    sys.exit(main())
