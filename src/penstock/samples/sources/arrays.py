"""Samples of arrays: a record of all arrays' rows of one number."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import InvalidArgument, SampleError
from penstock.samples.builder import Block
from penstock.samples.encoding import Decoder, array_of, stored_dtype
from penstock.samples.manifest import Field
from penstock.samples.sources.source import BLOCK_BYTES, MOST_CLASSES, Numbered, numbers, printable

_UNREADABLE = (
    ValueError,
    TypeError,  # numpy's, of an .npz that is none
    EOFError,
    KeyError,
    MemoryError,
    NotImplementedError,
    zipfile.BadZipFile,
    zlib.error,
)


@dataclass(frozen=True)
class ArrayRows(Numbered):
    """Arrays [samples, ...], in blocks. In a partition, too, rows keep their numbers as names."""

    arrays: dict[str, npt.NDArray[Any]]
    label_field: str | None

    def after(self, samples: int) -> Iterator[Block]:
        mine = self.mine[samples:]
        step = max(1, BLOCK_BYTES // max(Decoder(self.encoding, self.fields).record_bytes, 1))
        step = min(step, BLOCK_BYTES // 16)  # names take memory, too
        for begin in range(mine.start, mine.stop, step):
            end = min(begin + step, mine.stop)
            rows = {name: array[begin:end] for name, array in self.arrays.items()}
            labels = None if self.label_field is None else rows[self.label_field].astype(np.int32)
            yield record_block(rows, begin, labels)


def open_arrays(
    source: Any, *, label_field: str | None = None, classes: Sequence[str] | None = None
) -> ArrayRows:
    """Samples of arrays of numbers: the rows of all of them, along the first dimension.

    source       an array or tensor, which becomes the field "x"; two of them, "x" and "y"; a map of them; or
                 the path of an .npy file, which is mapped, or of an .npz. Nothing is ever unpickled
    label_field  the array [samples] of integers that are labels: -1, or from 0 on
    classes      what labels count; otherwise the numbers up to the largest label

    Names are row numbers in decimal. Raises InvalidArgument for arrays that do not go together or have other
    values than numbers, SampleError for files that cannot be read.
    """
    description = "arrays"
    if isinstance(source, str | os.PathLike):
        description = printable(os.path.basename(source))
        source = _load(os.fspath(source))
    if isinstance(source, tuple | list):
        if not 1 <= len(source) <= 2:
            raise InvalidArgument(f"{len(source)} arrays have no names: give a map of names to arrays")
        source = dict(zip(("x", "y"), source, strict=False))
    if not isinstance(source, Mapping):
        source = {"x": source}
    arrays = {name: _rows(name, array) for name, array in source.items()}
    if any(not isinstance(name, str) for name in arrays):
        raise InvalidArgument(f"the arrays' names are {', '.join(map(repr, arrays))}: names are text")
    if not arrays:
        raise InvalidArgument(f"{description} has no arrays: nothing to pack")
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise InvalidArgument(f"arrays have different numbers of rows: {lengths}")
    if label_field is not None:
        if label_field not in arrays:
            raise InvalidArgument(f"label_field={label_field!r} is none of the arrays {', '.join(arrays)}")
        classes = label_classes(arrays[label_field], label_field, classes)
    fields = tuple(
        Field(name=name, dtype=stored_dtype(array.dtype, name).str, shape=array.shape[1:])
        for name, array in arrays.items()
    )
    whole = next(iter(lengths.values()))
    size_bytes = whole * Decoder("record", fields).record_bytes
    known = tuple(classes or ())
    return ArrayRows(description, "record", known, whole, size_bytes, arrays, label_field, fields=fields)


def record_block(
    rows: Mapping[str, npt.NDArray[Any]], begin: int, labels: npt.NDArray[np.int32] | None
) -> Block:
    """Rows of arrays [n, ...] as samples encoded as `record`, named by their numbers from ``begin`` on."""
    count = len(next(iter(rows.values())))
    columns = [
        np.ascontiguousarray(array, dtype=stored_dtype(array.dtype, name)).reshape(count, -1)
        if array.size
        else np.empty((count, 0), np.uint8)
        for name, array in rows.items()
    ]
    bytes_ = [column.view(np.uint8) if column.size else column for column in columns]
    data = bytes_[0] if len(bytes_) == 1 else np.concatenate(bytes_, axis=1)
    names, name_ends = numbers(begin, begin + count)
    ends = np.arange(1, count + 1, dtype=np.int64) * data.shape[1]
    return Block(names, name_ends, data.reshape(-1), ends, labels)


def label_classes(labels: npt.NDArray[Any], name: str, classes: Sequence[str] | None) -> tuple[str, ...]:
    """The classes of labels [n]; InvalidArgument where there are labels that have none."""
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise InvalidArgument(
            f"{name} is {labels.dtype} of shape {labels.shape}: labels are integers, one a sample"
        )
    lowest, highest = (int(labels.min()), int(labels.max())) if labels.size else (0, -1)
    most = MOST_CLASSES if classes is None else len(classes)
    if lowest < -1 or highest >= most:
        raise InvalidArgument(
            f"{name} has labels from {lowest} to {highest}: they must lie from -1 to {most - 1}"
        )
    return tuple(map(str, range(highest + 1))) if classes is None else tuple(classes)


def _rows(name: str, array: Any) -> npt.NDArray[Any]:
    if not isinstance(array, np.ndarray):
        array = array_of(array, f"array {name!r}") if hasattr(array, "numpy") else np.asarray(array)
    stored_dtype(array.dtype, f"array {name!r}")
    if array.ndim == 0:
        raise InvalidArgument(f"array {name!r} has no dimensions: the first one counts the samples")
    rows: npt.NDArray[Any] = array
    return rows


def _load(path: str) -> Any:
    try:
        if not path.endswith(".npz"):
            return np.load(path, mmap_mode="r", allow_pickle=False)
        with np.load(path, allow_pickle=False) as file:
            packed = os.path.getsize(path)
            for info in file.zip.infolist():
                if info.file_size > 1032 * packed + 1024:  # more than deflate can
                    raise ValueError(f"{info.filename} cannot have {info.file_size} bytes")
            arrays = dict(file)
            for name, array in arrays.items():
                if not isinstance(array, np.ndarray):  # numpy gives the bytes of other files as they are
                    raise ValueError(f"{name} is not an array")
            return arrays
    except OSError as error:
        raise SampleError(f"{path} cannot be read: {error.strerror or error}") from error
    except _UNREADABLE as error:
        raise SampleError(f"{path} has no arrays that can be read: {error}") from error
