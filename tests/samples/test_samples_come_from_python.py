"""Arrays, tensors, maps of them and any iterable become samples."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidArgument, SampleError
from penstock.samples.encoding import DTYPES, Decoder, decode
from penstock.samples.sources import Block, RawSample, Source, open_source


def decoded(source: Source) -> tuple[list[str], dict[str, np.ndarray[Any, Any]]]:
    """Names, and the fields of all samples."""
    names: list[str] = []
    data = []
    ends = [0]
    for block in source:
        assert isinstance(block, Block)
        begin = 0
        for end in block.name_ends.tolist():
            names.append(block.names[begin:end].tobytes().decode())
            begin = end
        assert begin == len(block.names) and block.data_ends[-1] == len(block.data)
        ends += (ends[-1] + block.data_ends).tolist()
        data.append(block.data)
    batch = Decoder(source.encoding, source.fields).batch(
        np.concatenate(data or [np.empty(0, np.uint8)]), np.array(ends)
    )
    assert isinstance(batch, dict)
    return names, batch


@settings(max_examples=60)
@given(
    st.integers(0, 130),
    st.lists(
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 3), max_size=2), st.booleans()),
        min_size=1,
        max_size=3,
    ),
    st.integers(1, 4),
    st.integers(0, 140),
)
def test_arrays_come_back_in_shares(
    rows: int, kinds: list[tuple[str, list[int], bool]], world_size: int, skip: int
) -> None:
    random = np.random.default_rng(rows)
    arrays = {}
    for i, (dtype, shape, swapped) in enumerate(kinds):
        array = random.integers(0, 2, (rows, *shape)).astype(dtype)
        arrays[f"field {i}"] = array.astype(array.dtype.newbyteorder(">")) if swapped else array[:, ...]
    source = open_source(arrays)
    assert source.samples == rows
    names, batch = decoded(source)
    assert names == list(map(str, range(rows)))
    for name, array in arrays.items():
        assert batch[name].dtype == array.dtype.newbyteorder("<") and np.array_equal(batch[name], array)
    shares = [source.of_rank(rank, world_size) for rank in range(world_size)]
    assert [name for share in shares for name in decoded(share)[0]] == names
    for share in shares:
        assert list(share.names()) == decoded(share)[0]
        if share.samples:
            rest = list(share.after(skip))
            assert (
                b"".join(block.data.tobytes() for block in rest)
                == b"".join(block.data.tobytes() for block in share)[
                    skip * Decoder("record", source.fields).record_bytes :
                ]
            )


def test_large_arrays_come_in_blocks() -> None:
    array = np.arange(3_000_000, dtype=np.float32).reshape(-1, 3).T.copy().T  # not contiguous
    blocks = [block for block in open_source(array) if isinstance(block, Block)]
    assert len(blocks) > 2 and max(len(block.data) for block in blocks) <= 4 << 20
    assert b"".join(block.data.tobytes() for block in blocks) == array.tobytes()
    tiny = [block for block in open_source(np.zeros(3_000_000, np.uint8)) if isinstance(block, Block)]
    assert max(len(block.names) for block in tiny) <= 4 << 20


def test_tuples_and_tensors_are_taken() -> None:
    x, y = torch.arange(12).view(4, 3).t(), torch.arange(3.0, requires_grad=True)
    names, batch = decoded(open_source((x, y)))
    assert list(batch) == ["x", "y"] and names == ["0", "1", "2"]
    assert np.array_equal(batch["x"], x.numpy()) and np.array_equal(batch["y"], y.detach().numpy())
    assert list(decoded(open_source(torch.zeros(2)))[1]) == ["x"]


def test_labels_come_from_an_array() -> None:
    arrays = {"x": np.zeros((4, 2)), "y": np.array([2, 0, -1, 2], np.int8)}
    source = open_source(arrays, label_field="y")
    assert source.classes == ("0", "1", "2")
    labels = [block.labels for block in source if isinstance(block, Block)]
    assert labels[0] is not None and labels[0].dtype == np.int32 and labels[0].tolist() == [2, 0, -1, 2]
    assert open_source(arrays, label_field="y", classes=["a", "b", "c"]).classes == ("a", "b", "c")
    with pytest.raises(InvalidArgument, match="labels from -1 to 2"):
        open_source(arrays, label_field="y", classes=["a"])
    with pytest.raises(InvalidArgument, match="float64"):
        open_source(arrays, label_field="x")
    with pytest.raises(InvalidArgument, match="none of the arrays x, y"):
        open_source(arrays, label_field="z")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"x": np.zeros(2), "y": np.zeros(3)}, "different numbers of rows"),
        (np.array(["a"]), "dtype <U1"),
        (np.array([None]), "dtype object"),
        (np.float64(1), "no dimensions"),
        ((np.zeros(1), np.zeros(1), np.zeros(1)), "3 arrays have no names"),
        ({"a": b"1"}, "give its items"),
        (object(), "type object gives no samples"),
        (3, "type int gives no samples"),
    ],
)
def test_what_makes_no_samples_is_refused(source: Any, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        open_source(source)


@pytest.mark.parametrize("kind", ["npy", "npz", "compressed npz"])
def test_files_of_arrays_are_read(tmp_path: Path, kind: str) -> None:
    arrays = {"x": np.arange(12.0).reshape(3, 4).T, "y": np.array([True, False, True, True])}
    if kind == "npy":
        path = tmp_path / "a.npy"
        np.save(path, arrays["x"])
        expected = {"x": arrays["x"]}
    else:
        path = tmp_path / "a.npz"
        (np.savez if kind == "npz" else np.savez_compressed)(path, **arrays)
        expected = arrays
    before = path.read_bytes()
    _, batch = decoded(open_source(path))
    assert batch.keys() == expected.keys()
    assert all(np.array_equal(batch[name], array) for name, array in expected.items())
    assert path.read_bytes() == before


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("trapped",)


def zipped(name: str, data: bytes, size_bytes: int | None = None) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(name, data)
    content = bytearray(buffer.getvalue())
    if size_bytes is not None:
        central = content.rindex(b"PK\1\2")
        content[central + 24 : central + 28] = size_bytes.to_bytes(4, "little")
    return bytes(content)


def npy(array: Any, shape: bytes | None = None) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    content = buffer.getvalue()
    if shape is None:
        return content
    padded = content.replace(b"(3,)", shape)
    return padded[: 128 + len(shape) - 4].replace(b" " * (len(shape) - 4) + b"\n", b"\n") + content[128:]


HOSTILE = {
    "pickled.npy": npy(np.array([Trap()], object)),
    "pickled.npz": zipped("x.npy", npy(np.array([Trap()], object))),
    "cut.npy": npy(np.zeros(100))[:-8],
    "absurd.npy": npy(np.zeros(3), b"(9999999999,)"),
    "absurd.npz": zipped("x.npy", npy(np.zeros(3), b"(9999999999,)")),
    "large.npz": zipped("x.npy", npy(np.zeros(3)), 0xFFFFFF00),
    "other.npz": zipped("x.txt", b"hello"),
    "empty.npy": b"",
    "none.npz": b"none",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_of_arrays_are_refused(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(HOSTILE[name])
    with pytest.raises(SampleError, match=name) as failure:
        list(open_source(tmp_path / name))
    assert not (tmp_path / "trapped").exists()
    assert str(pickle.loads(pickle.dumps(failure.value))) == str(failure.value)


def test_iterables_of_bytes_and_fields() -> None:
    items = [("a", b"1"), ("ü", "ü"), ("b", bytearray(b"2"), -1), RawSample("c", memoryview(b"3")), b"4"]
    source = open_source(items)
    assert source.encoding == "raw" and source.samples == 5
    found = [(sample.name, bytes(sample.data)) for sample in source if isinstance(sample, RawSample)]
    assert found == [("a", b"1"), ("ü", "ü".encode()), ("b", b"2"), ("c", b"3"), ("4", b"4")]
    source = open_source([{"x": 1}, ("n", {"x": np.arange(2)})])
    assert source.encoding == "msgpack"
    names = [sample.name for sample in source if isinstance(sample, RawSample)]
    values = [decode(sample.data)["x"] for sample in source if isinstance(sample, RawSample)]
    assert names == ["0", "n"] and values[0] == 1 and values[1].tolist() == [0, 1]
    assert list(open_source([])) == []


def test_labels_need_classes() -> None:
    source = open_source([("a", b"", 1), ("b", b"", np.int64(-1))], classes=["p", "q"])
    assert [sample.label for sample in source if isinstance(sample, RawSample)] == [1, -1]
    with pytest.raises(InvalidArgument, match="'a' has the label 1, but the source has no classes"):
        list(open_source([("a", b"", 1)]))
    with pytest.raises(InvalidArgument, match="'a' has the label 2, but the source has 2 classes"):
        list(open_source([("a", b"", 2)], classes=["p", "q"]))
    with pytest.raises(InvalidArgument, match="label 'x'"):
        list(open_source([("a", b"", "x")], classes=["p", "q"]))


@pytest.mark.parametrize(
    ("items", "said"),
    [
        ([("a", b""), ("b", {"x": 1})], "'b' is fields, but the first was bytes"),
        ([{"x": 1}, b""], "'1' is bytes, but the first was fields"),
        ([("a", 3)], "'a' is of type int"),
        (("text",), "item 0 is of type str"),
        ([b"", 7], "item 1 is of type int"),
        ([("a", {"x": object()})], "'a': field 'x' is of type object"),
    ],
)
def test_items_of_other_kinds_are_refused(items: list[Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        list(open_source(items))


def numbered() -> Iterator[tuple[str, bytes]]:
    for i in range(10):
        yield f"n{i}", bytes([i])


def test_generators_give_their_samples_once() -> None:
    source = open_source(numbered())
    assert len(list(source)) == 10
    with pytest.raises(InvalidArgument, match="gives its samples only once"):
        list(source)
    again = open_source(numbered)
    assert list(again) == list(again) and len(list(again)) == 10


@pytest.mark.parametrize("world_size", [1, 3, 11])
def test_shares_of_iterables_take_turns(world_size: int) -> None:
    shares = [list(open_source(numbered).of_rank(rank, world_size)) for rank in range(world_size)]
    assert [share[:1] for share in shares] == [
        list(open_source(numbered))[rank : rank + 1] for rank in range(world_size)
    ]
    assert sorted(
        sample.name for share in shares for sample in share if isinstance(sample, RawSample)
    ) == sorted(name for name, _ in numbered())
    with pytest.raises(InvalidArgument, match="a partition already"):
        open_source(numbered).of_rank(0, 2).of_rank(0, 2)


def test_a_source_passes_through() -> None:
    source = open_source([b"1"])
    assert open_source(source) is source
    with pytest.raises(InvalidArgument, match="takes no options: classes"):
        open_source(source, classes=["a"])
    with pytest.raises(InvalidArgument, match="format='zip' is unknown: choose one of folder, webdataset"):
        open_source("x", format="zip")
