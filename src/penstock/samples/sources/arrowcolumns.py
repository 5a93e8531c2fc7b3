"""Columns of Arrow batches, as samples. pyarrow must be there when these functions are called."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.samples.format.encoding import DTYPES
from penstock.samples.format.manifest import Field
from penstock.samples.sources.source import printable


def record_field(name: str, kind: Any) -> Field | None:
    """The field that a column becomes in `record`, or None where its values are no numbers of fixed size.

    kind   pyarrow.DataType
    """
    from pyarrow import types

    shape: tuple[int, ...] = ()
    while types.is_fixed_size_list(kind):
        shape += (kind.list_size,)
        kind = kind.value_type
    dtype = _dtype(kind)
    return None if dtype is None else Field(name=name, dtype=dtype.str, shape=shape)


def fixed_values(column: Any, field: Field) -> npt.NDArray[Any] | None:
    """A column [n] as an array [n, *shape], or None where a value is missing."""
    values, missing = _fixed(column, field)
    return None if missing.any() else values


def rows(batch: Any) -> Iterator[dict[str, Any]]:
    """The rows of a pyarrow.RecordBatch, a map each.

    Lists of numbers become arrays; dates, times and decimals text.
    """
    columns = [_values(column) for column in batch.columns]
    for values in zip(*columns, strict=True):
        yield dict(zip(batch.schema.names, values, strict=True))


def has_missing(column: Any, depth: int = 0) -> bool:
    """Whether a pyarrow.Array lacks a value anywhere."""
    from pyarrow import types

    if column.null_count:
        return True
    return types.is_fixed_size_list(column.type) and depth < 32 and has_missing(column.values, depth + 1)


def text_values(column: Any) -> list[str | None]:
    """A column as text."""
    return [None if value is None else str(value) for value in column.to_pylist()]


def class_names(schema: Any) -> dict[str, list[str]]:
    """The names of labels by column, as Hugging Face datasets writes them beside a schema."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {
            name: [printable(str(each)) for each in kind["names"]]
            for name, kind in features.items()
            if _is_class(kind)
        }
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}


def _is_class(kind: Any) -> bool:
    return (
        isinstance(kind, Mapping)
        and kind.get("_type") == "ClassLabel"
        and isinstance(kind.get("names"), list)
    )


def _dtype(kind: Any) -> np.dtype[Any] | None:
    from pyarrow import types

    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        return None
    return DTYPES.get(np.dtype(kind.to_pandas_dtype()).newbyteorder("<").str)


def _values(column: Any) -> list[Any]:
    """The values of a pyarrow.Array."""
    import pyarrow as pa
    from pyarrow import types

    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    if types.is_temporal(kind) or types.is_decimal(kind):
        column = column.cast(pa.int64()) if types.is_duration(kind) else column.cast(pa.string())
    field = record_field("", kind)
    arrays: tuple[Sequence[npt.NDArray[Any]] | npt.NDArray[Any], npt.NDArray[np.bool_]]
    if (types.is_list(kind) or types.is_large_list(kind)) and _dtype(kind.value_type) is not None:
        arrays = _lists(column)
    elif field is not None and field.shape:
        arrays = _fixed(column, field)
    else:
        return list(column.to_pylist())
    return [
        column[i].as_py() if missing else value
        for i, (value, missing) in enumerate(zip(*arrays, strict=True))
    ]


def _fixed(column: Any, field: Field) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    """Values [n, *shape] of a column, and where [n] one is missing."""
    count = len(column)
    missing = np.zeros(count, np.bool_)
    for size in (*field.shape, None):
        if column.null_count:
            missing |= _nulls(column).reshape(count, -1).any(axis=1)
        if size is not None:
            column = column.values.slice(column.offset * size, len(column) * size)
    return _numbers(column).astype(DTYPES[field.dtype], copy=False).reshape(count, *field.shape), missing


def _lists(column: Any) -> tuple[list[npt.NDArray[Any]], npt.NDArray[np.bool_]]:
    """The lists [n] of numbers in a column as arrays, and where [n] one lacks a number, or is missing."""
    values = _numbers(column.values).astype(_dtype(column.type.value_type), copy=False)
    offsets = column.offsets.to_numpy()
    nulls = np.concatenate([[0], np.cumsum(_nulls(column.values))])
    missing = (nulls[offsets[1:]] > nulls[offsets[:-1]]) | _nulls(column)
    return [values[begin:end] for begin, end in pairwise(offsets.tolist())], missing


def _nulls(column: Any) -> npt.NDArray[np.bool_]:
    nulls: npt.NDArray[np.bool_] = column.is_null().to_numpy(zero_copy_only=False)
    return nulls


def _numbers(column: Any) -> npt.NDArray[Any]:
    """A column of numbers; zeros where one is missing, so that integers stay what they are."""
    if column.null_count:
        column = column.fill_null(False if _dtype(column.type) == np.bool_ else 0)
    values: npt.NDArray[Any] = column.to_numpy(zero_copy_only=False)
    return values
