"""What other libraries wrote is read as they read it: tests/data/samples has files and what they say."""

from __future__ import annotations

import gzip
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from penstock.errors import InvalidArgument, SampleError
from penstock.samples.encoding import decode
from penstock.samples.sources import RawSample, Source, open_source
from penstock.samples.sources.mds import Mds

pytest.importorskip("pyarrow")
DATA = Path(__file__).parent.parent / "data" / "samples"
EXPECTED = json.loads((DATA / "expected.json").read_text())


def read(source: Source) -> list[RawSample]:
    found = []
    for sample in source:
        assert isinstance(sample, RawSample)
        found.append(sample)
    return found


def fields(source: Source) -> list[dict[str, Any]]:
    return [decode(sample.data) for sample in read(source)]


def plain(value: Any) -> Any:
    """As JSON holds it in expected.json."""
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "shape": list(value.shape), "bytes": value.tobytes().hex()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


def picture(data: bytes) -> dict[str, Any]:
    image = Image.open(io.BytesIO(data))
    return {"pixels": image.tobytes().hex(), "mode": image.mode, "size": list(image.size)}


@pytest.mark.parametrize("compression", ["plain", "gz", "bz2", "zstd"])
def test_mds(compression: str) -> None:
    source = open_source(DATA / "mds" / compression)
    assert source.samples == len(EXPECTED["mds"])
    assert [sample.name for sample in source] == ["0", "1", "2", "3", "4"]
    for found, expected in zip(fields(source), EXPECTED["mds"], strict=True):
        raw = found.pop("raw")
        pixels = {"pixels": raw["data"].hex(), "mode": raw["mode"], "size": [raw["width"], raw["height"]]}
        images = {"raw": pixels, "png": picture(found.pop("png"))}
        images["pngs"] = [picture(data) for data in found.pop("pngs")]
        assert plain(found) | images == expected


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_mds_in_shares(world_size: int) -> None:
    source = open_source(DATA / "mds" / "plain" / "index.json")
    assert [sample for rank in range(world_size) for sample in source.of_rank(rank, world_size)] == list(
        source
    )
    share = source.of_rank(1, world_size)
    assert list(share.names()) == [sample.name for sample in share]
    assert list(source.after(3)) == list(source)[3:]


def test_mds_columns_can_name_and_label() -> None:
    source = open_source(
        DATA / "mds" / "plain",
        name_column="digits",
        label_column="small",
        classes=[str(i) for i in range(256)],
    )
    assert [sample.name for sample in source] == [str(10 ** (4 * i)) for i in range(5)]
    assert [sample.label for sample in source] == [250 + i for i in range(5)]
    with pytest.raises(InvalidArgument, match="no column 'nothing', only bytes"):
        open_source(DATA / "mds" / "plain", name_column="nothing")
    source = open_source(DATA / "mds" / "plain", label_column="text")
    assert source.classes == tuple(sorted("größer 大" * i for i in range(5)))
    assert [source.classes[sample.label] for sample in source] == ["größer 大" * i for i in range(5)]
    with pytest.raises(SampleError, match=r"sample 1: .*is of the class"):
        list(open_source(DATA / "mds" / "plain", label_column="text", classes=[""]))


@pytest.fixture
def mds(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA / "mds" / "plain", tmp_path / "mds"))


def edit(folder: Path, **shard: Any) -> None:
    index = json.loads((folder / "index.json").read_text())
    index["shards"][0] |= shard
    (folder / "index.json").write_text(json.dumps(index))


def test_mds_of_very_many_shards_is_not_taken_for_files(mds: Path) -> None:
    index = json.loads((mds / "index.json").read_text())
    index["notes"] = " " * (65 << 20)  # as long as the entries of a few hundred thousand shards
    (mds / "index.json").write_text(json.dumps(index))
    assert isinstance(open_source(mds), Mds)


def test_mds_that_is_damaged_is_refused(mds: Path) -> None:
    shard = mds / "shard.00000.mds"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    with pytest.raises(SampleError, match=r"shard\.00000\.mds does not have the 1910 bytes"):
        list(open_source(mds))
    shard.write_bytes(whole[:1000] + bytes([whole[1000] ^ 1]) + whole[1001:])
    with pytest.raises(SampleError, match=r"shard\.00000\.mds is damaged: its sha1 is wrong"):
        list(open_source(mds))
    shard.unlink()
    with pytest.raises(SampleError, match="cannot be read: No such file"):
        list(open_source(mds))


def test_mds_whose_bytes_make_no_sense_is_refused(mds: Path) -> None:
    """No hash would tell."""
    shard = mds / "shard.00000.mds"
    whole = shard.read_bytes()
    edit(mds, raw_data={"basename": shard.name, "bytes": len(whole), "hashes": {}})
    for at in range(0, len(whole), 13):
        for flip in (0x01, 0x80):
            shard.write_bytes(whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :])
            try:
                list(open_source(mds))
            except SampleError as error:
                assert shard.name in str(error)


@pytest.mark.parametrize("name", ["../shard.00000.mds", "/etc/passwd", "a/../../b", ""])
def test_mds_that_leads_elsewhere_is_refused(mds: Path, name: str) -> None:
    edit(mds, raw_data={"basename": name, "bytes": 1910, "hashes": {}})
    with pytest.raises(SampleError, match="lies elsewhere"):
        open_source(mds)


@pytest.mark.parametrize(
    ("shard", "said"),
    [
        ({"column_encodings": ["pkl"] * 15}, "pickles are never opened"),
        ({"column_encodings": ["audio"] * 15}, "'audio' is unknown"),
        ({"column_encodings": ["ndarray:object"] * 15}, "'object' are unknown"),
        ({"column_names": ["a"]}, "do not go together"),
        ({"samples": -1}, "-1 samples"),
        ({"version": 3}, "version 3"),
        ({"raw_data": None}, "not a valid index"),
        ({"raw_data": {"basename": "x", "bytes": 1 << 40}}, "said to have"),
    ],
)
def test_an_mds_index_is_not_trusted(mds: Path, shard: dict[str, Any], said: str) -> None:
    edit(mds, **shard)
    with pytest.raises(SampleError, match=said):
        open_source(mds, format="mds")


def test_mds_that_unpacks_to_more_than_it_says_is_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DATA / "mds" / "gz", tmp_path / "mds"))
    bomb = gzip.compress(bytes(50 << 20))
    (folder / "shard.00000.mds.gz").write_bytes(bomb)
    edit(folder, zip_data={"basename": "shard.00000.mds.gz", "bytes": len(bomb), "hashes": {}})
    with pytest.raises(SampleError, match="does not have the 1910 bytes"):
        list(open_source(folder))


def test_webdataset() -> None:
    names = ["train-000.tar", "train-001.tar", "gnu.tar"]
    source = open_source([DATA / "webdataset" / name for name in names])
    found = [{"name": sample.name, "fields": plain(decode(sample.data))} for sample in read(source)]
    assert found == EXPECTED["webdataset"]


def test_tfrecord() -> None:
    samples = read(open_source(DATA / "tfrecord"))
    assert [bytes(sample.data).hex() for sample in samples] == [each["data"] for each in EXPECTED["tfrecord"]]
    assert [sample.name for sample in samples] == [f"examples.tfrecord:{i}" for i in range(4)]


def test_a_saved_dataset_of_hugging_face() -> None:
    source = open_source(DATA / "datasets" / "saved")
    assert source.classes == ("no", "yes")
    found = [row | {"tokens": row["tokens"].tolist()} for row in fields(source)]
    assert found == EXPECTED["datasets"]
    assert [sample.label for sample in read(source)] == [row["label"] for row in EXPECTED["datasets"]]
