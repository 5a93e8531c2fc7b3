"""Rows of Parquet, Arrow and Hugging Face datasets become samples: records where all columns are numbers."""

from __future__ import annotations

import datetime
import decimal
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidArgument, SampleError
from penstock.samples.encoding import Decoder, decode
from penstock.samples.sources import Block, RawSample, Source, open_source

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

Write = Callable[[Any, Path, int], None]


def write_parquet(table: Any, path: Path, rows: int) -> None:
    pq.write_table(table, path, row_group_size=rows)


def write_stream(table: Any, path: Path, rows: int) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)


def write_file(table: Any, path: Path, rows: int) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)


WRITERS: dict[str, tuple[str, Write]] = {
    "parquet": ("a.parquet", write_parquet),
    "stream": ("a.arrow", write_stream),
    "file": ("a.feather", write_file),
}


@pytest.fixture(params=WRITERS)
def save(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Path]:
    name, write = WRITERS[request.param]

    def call(table: Any, rows: int = 3, folder: str = "", number: int = 0) -> Path:
        path = tmp_path / folder / f"{number}{name}"
        path.parent.mkdir(exist_ok=True)
        write(table, path, rows)
        return path

    return call


def unfolded(source: Source) -> list[tuple[str, bytes, int]]:
    """Every sample by itself."""
    found = []
    for item in source:
        if isinstance(item, RawSample):
            found.append((item.name, bytes(item.data), item.label))
            continue
        assert isinstance(item, Block)
        name_begin = data_begin = 0
        for i, (name_end, data_end) in enumerate(zip(item.name_ends, item.data_ends, strict=True)):
            name = item.names[name_begin:name_end].tobytes().decode()
            label = -1 if item.labels is None else int(item.labels[i])
            found.append((name, item.data[data_begin:data_end].tobytes(), label))
            name_begin, data_begin = name_end, data_end
        assert name_begin == len(item.names) and data_begin == len(item.data)
    return found


def test_numbers_become_records(save: Callable[..., Path]) -> None:
    values = {
        "b": pa.array([True, False, True, True]),
        "i": pa.array([1, -2, 3, 4], pa.int16()),
        "f": pa.array([0.5, 1.5, float("nan"), -0.0]),
        "v": pa.FixedSizeListArray.from_arrays(pa.array(range(12), pa.float32()), 3),
        "m": pa.FixedSizeListArray.from_arrays(
            pa.FixedSizeListArray.from_arrays(pa.array(range(16), pa.uint8()), 2), 2
        ),
    }
    source = open_source(save(pa.table(values)))
    assert source.encoding == "record"
    assert {field.name: (field.dtype, field.shape) for field in source.fields} == {
        "b": ("|b1", ()), "i": ("<i2", ()), "f": ("<f8", ()), "v": ("<f4", (3,)), "m": ("|u1", (2, 2)),
    }  # fmt: skip
    decoder = Decoder(source.encoding, source.fields)
    samples = unfolded(source)
    assert [name for name, _, _ in samples] == ["0", "1", "2", "3"]
    for i, (_, data, _) in enumerate(samples):
        found = decoder.sample(data)
        assert isinstance(found, dict)
        for name, column in values.items():
            expected = np.array(column[i].as_py(), found[name].dtype)
            assert found[name].tobytes() == expected.tobytes(), name


def test_other_values_become_maps(save: Callable[..., Path]) -> None:
    table = pa.table(
        {
            "text": ["ü", None, ""],
            "bytes": [b"\xff", b"", None],
            "tokens": pa.array([[1, 2], [], None], pa.list_(pa.int32())),
            "tree": [{"a": 1, "b": ["x"]}, None, {"a": None, "b": []}],
            "when": pa.array(
                [datetime.datetime(2024, 2, 29, 12), None, datetime.datetime(1970, 1, 1)], pa.timestamp("us")
            ),
            "price": pa.array([decimal.Decimal("1.50"), None, decimal.Decimal("-2.25")]),
            "kind": pa.array(["p", "q", "p"]).dictionary_encode(),
            "count": pa.array([1 << 63, 0, None], pa.uint64()),
        }
    )
    source = open_source(save(table, rows=2))
    assert source.encoding == "msgpack" and source.samples == 3
    rows = [decode(data) for _, data, _ in unfolded(source)]
    assert rows[0].pop("tokens").tobytes() == np.array([1, 2], np.int32).tobytes()
    assert rows[1].pop("tokens").shape == (0,)
    assert rows[0] == {
        "text": "ü", "bytes": b"\xff", "tree": {"a": 1, "b": ["x"]}, "price": "1.50",
        "when": "2024-02-29 12:00:00.000000", "kind": "p", "count": 1 << 63,
    }  # fmt: skip
    assert rows[2] == {
        "text": "", "bytes": None, "tokens": None, "tree": {"a": None, "b": []}, "price": "-2.25",
        "when": "1970-01-01 00:00:00.000000", "kind": "p", "count": None,
    }  # fmt: skip


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_lists_are_arrays_unless_a_number_is_missing(save: Callable[..., Path], rows: int) -> None:
    table = pa.table(
        {
            "list": pa.array([[1, None], [2, 3], None, []], pa.list_(pa.int64())),
            "fixed": pa.array([[1, 2], [3, None], None, [4, 5]], pa.list_(pa.uint8(), 2)),
            "nested": pa.array([[[1.0]], None, [[None]], [None]], pa.list_(pa.list_(pa.float32(), 1), 1)),
        }
    )
    found = [decode(data) for _, data, _ in unfolded(open_source(save(table, rows=rows)))]
    kinds = [{name: getattr(value, "dtype", value) for name, value in row.items()} for row in found]
    assert kinds == [
        {"list": [1, None], "fixed": np.uint8, "nested": np.float32},
        {"list": np.int64, "fixed": [3, None], "nested": None},
        {"list": None, "fixed": None, "nested": [[None]]},
        {"list": np.int64, "fixed": np.uint8, "nested": [None]},
    ]
    assert found[1]["list"].tolist() == [2, 3] and found[3]["list"].tolist() == []
    assert found[3]["fixed"].tolist() == [4, 5] and found[0]["nested"].tolist() == [[1.0]]


def test_missing_numbers_make_maps(save: Callable[..., Path]) -> None:
    table = pa.table({"x": pa.array([1, None, 3])})
    source = open_source(save(table))
    assert [decode(data) for _, data, _ in unfolded(source)] == [{"x": 1}, {"x": None}, {"x": 3}]
    with pytest.raises(SampleError, match=r"column 'x' .* lacks a value"):
        list(open_source(save(table), encoding="record"))
    with pytest.raises(InvalidArgument, match=r"column 'x' of .* is string"):
        open_source(save(pa.table({"x": ["a"]})), encoding="record")
    assert open_source(save(pa.table({"x": [1]})), encoding="msgpack").encoding == "msgpack"


@settings(max_examples=30)
@given(
    st.sampled_from(sorted(WRITERS)),
    st.lists(st.integers(0, 9), min_size=1, max_size=4),
    st.integers(1, 5),
    st.integers(1, 4),
    st.booleans(),
    st.integers(0, 20),
)
def test_shares_and_the_rest_agree_with_the_whole(
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    files: list[int],
    rows: int,
    world_size: int,
    named: bool,
    skip: int,
) -> None:
    folder = tmp_path_factory.mktemp("tables")
    name, write = WRITERS[kind]
    total = 0
    for number, count in enumerate(files):
        numbers = range(total, total + count)
        columns = {
            "x": pa.array(numbers, pa.int64()),
            "id": pa.array([f"n{i}" for i in numbers], pa.string()),
        }
        write(pa.table(columns), folder / f"{number}{name}", rows)
        total += count
    source = open_source(folder, name_column="id" if named else None)
    whole = unfolded(source)
    assert [sample[0] for sample in whole] == [f"n{i}" if named else str(i) for i in range(total)]
    decoder = Decoder(source.encoding, source.fields)
    assert [decoder.sample(data)["x"] for _, data, _ in whole] == list(range(total))
    shares = [source.of_rank(rank, world_size) for rank in range(world_size)]
    assert [sample for share in shares for sample in unfolded(share)] == whole
    assert [share.samples for share in shares] == [len(unfolded(share)) for share in shares]
    for share in shares:
        assert list(share.names()) == [sample[0] for sample in unfolded(share)]
        assert unfolded(share.after(skip)) == unfolded(share)[skip:]


def test_many_rows_come_in_blocks(save: Callable[..., Path]) -> None:
    rows = 300_000
    source = open_source(save(pa.table({"x": np.arange(rows), "y": np.zeros(rows, np.uint8)}), rows=100_000))
    blocks = list(source)
    assert all(isinstance(block, Block) and len(block.data) <= 5 << 20 for block in blocks)
    data = np.concatenate([block.data for block in blocks if isinstance(block, Block)]).reshape(rows, 9)
    assert np.array_equal(data[:, :8].copy().view(np.int64)[:, 0], np.arange(rows))


def features(**columns: Any) -> dict[bytes, bytes]:
    return {b"huggingface": json.dumps({"info": {"features": columns}}).encode()}


def test_labels_come_from_a_column(save: Callable[..., Path]) -> None:
    table = pa.table(
        {"x": [1.0, 2.0, 3.0, 4.0], "y": pa.array([2, 0, -1, 2], pa.int8()), "w": ["b", "a", "b", None]}
    )
    source = open_source(save(table.drop_columns(["w"])), label_column="y")
    assert source.classes == ("0", "1", "2") and source.encoding == "record"
    assert [label for _, _, label in unfolded(source)] == [2, 0, -1, 2]
    source = open_source(save(table), label_column="w")
    assert source.classes == ("a", "b")
    assert [label for _, _, label in unfolded(source)] == [1, 0, 1, -1]
    named = table.replace_schema_metadata(features(y={"_type": "ClassLabel", "names": ["no", "so", "yes"]}))
    source = open_source(save(named))
    assert source.classes == ("no", "so", "yes")
    assert [label for _, _, label in unfolded(source)] == [2, 0, -1, 2]
    short = table.replace_schema_metadata(features(y={"_type": "ClassLabel", "names": ["no"]}))
    with pytest.raises(InvalidArgument, match="label 2"):
        list(open_source(save(short)))
    with pytest.raises(InvalidArgument, match="holds double"):
        open_source(save(table), label_column="x")
    with pytest.raises(InvalidArgument, match="no column 'z', only x, y, w"):
        open_source(save(table), label_column="z")


@pytest.mark.parametrize(
    "metadata", [b"", b"[]", b'{"info": 3}', b'{"info": {"features": {"y": {"names": 3}}}}']
)
def test_metadata_is_not_trusted(save: Callable[..., Path], metadata: bytes) -> None:
    table = pa.table({"y": [1]}).replace_schema_metadata({b"huggingface": metadata})
    assert open_source(save(table)).classes == ()


def test_a_row_without_a_name_is_refused(save: Callable[..., Path]) -> None:
    with pytest.raises(SampleError, match="row 1 has no name"):
        list(open_source(save(pa.table({"id": ["a", None], "x": [1, 2]})), name_column="id"))


def test_rows_that_have_nothing_but_names_become_empty_maps(save: Callable[..., Path]) -> None:
    source = open_source(save(pa.table({"name": ["a", "b"]})), name_column="name")
    assert [(name, decode(data)) for name, data, _ in source] == [("a", {}), ("b", {})]


def test_files_with_other_columns_are_refused(save: Callable[..., Path]) -> None:
    save(pa.table({"x": [1]}), folder="t", number=0)
    path = save(pa.table({"y": [1]}), folder="t", number=1)
    with pytest.raises(SampleError, match=f"{path.name} has other columns than"):
        open_source(path.parent)


@pytest.mark.parametrize("kind", WRITERS)
def test_damage_is_an_error_or_harmless(kind: str, tmp_path: Path) -> None:
    name, write = WRITERS[kind]
    path = tmp_path / name
    table = pa.table({"x": [1, 2, 3], "s": ["a", "bb", None], "l": [[1], [], [2, 3]]})
    write(table, path, 2)
    whole = path.read_bytes()
    for at in range(0, len(whole), 5):
        for damaged in (whole[:at], whole[:at] + bytes([whole[at] ^ 0x81]) + whole[at + 1 :]):
            path.write_bytes(damaged)
            try:
                list(open_source(path))
            except (SampleError, InvalidArgument) as error:
                assert name in str(error) or isinstance(error, InvalidArgument)


def test_several_splits_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(InvalidArgument, match="several splits: pack one of its folders, train, test"):
        open_source(tmp_path)


@pytest.mark.parametrize("name", ["../x.arrow", "/etc/passwd", "", ".."])
def test_a_saved_dataset_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(SampleError, match="does not lie beside it"):
        open_source(tmp_path)


class Dataset:
    """As datasets.Dataset behaves after a selection."""

    features: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, table: Any, chosen: list[int]) -> None:
        self.data, self._chosen = table, chosen

    def __len__(self) -> int:
        return len(self._chosen)

    def with_format(self, kind: str) -> Dataset:
        assert kind == "arrow"
        return self

    def __getitem__(self, rows: slice) -> Any:
        return self.data.take(self._chosen[rows])


def test_a_dataset_in_memory_keeps_its_selection() -> None:
    source = open_source(Dataset(pa.table({"x": range(10), "s": list("abcdefghij")}), [7, 2, 2, 9]))
    rows = [(name, decode(data)) for name, data, _ in unfolded(source)]
    assert rows == [(str(i), {"x": x, "s": "abcdefghij"[x]}) for i, x in enumerate([7, 2, 2, 9])]


def test_a_dataset_of_several_splits_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match="pack one of 'train', 'test'"):
        open_source({"train": Dataset(pa.table({"x": [1]}), [0]), "test": Dataset(pa.table({"x": [1]}), [])})


def test_without_pyarrow_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, save: Callable[..., Path]
) -> None:
    path = save(pa.table({"x": [1]}))
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(InvalidArgument, match=r"pip install '\.\[arrow\]'"):
        open_source(os.fspath(path))
