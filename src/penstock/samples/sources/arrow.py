"""Samples of Parquet and Arrow files, and of Hugging Face datasets: a row each. Read by pyarrow."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise, repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import InvalidArgument, SampleError, installing
from penstock.samples.builder import Block, joined
from penstock.samples.encoding import DTYPES, encode
from penstock.samples.layout import bytes_of
from penstock.samples.manifest import Field
from penstock.samples.sources.arrays import label_classes, record_block
from penstock.samples.sources.paths import shards_of
from penstock.samples.sources.source import (
    BLOCK_BYTES,
    Labels,
    Numbered,
    RawSample,
    label_text,
    parts_with,
    printable,
)


def _field(name: str, kind: Any) -> Field | None:
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


def _dtype(kind: Any) -> np.dtype[Any] | None:
    from pyarrow import types

    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        return None
    return DTYPES.get(np.dtype(kind.to_pandas_dtype()).newbyteorder("<").str)


def _rows(batch: Any) -> Iterator[dict[str, Any]]:
    """The rows of a pyarrow.RecordBatch, a map each.

    Lists of numbers become arrays; dates, times and decimals text.
    """
    names, columns = batch.schema.names, [_values(column) for column in batch.columns]
    for values in zip(*columns, strict=True) if columns else repeat((), batch.num_rows):
        yield dict(zip(names, values, strict=True))


def _lacks_values(column: Any, depth: int = 0) -> bool:
    """Whether a pyarrow.Array lacks a value anywhere."""
    from pyarrow import types

    if column.null_count:
        return True
    return types.is_fixed_size_list(column.type) and depth < 32 and _lacks_values(column.values, depth + 1)


def _names(column: Any, number: int) -> list[str]:
    """A column as names; ``number`` is that of its first row."""
    names = column.to_pylist()
    if None in names:
        raise SampleError(f"row {number + names.index(None)} has no name")
    return list(map(str, names))


def _class_names(schema: Any) -> dict[str, list[str]]:
    """The names of labels by column, as Hugging Face datasets writes them beside a schema."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {
            name: [printable(str(each)) for each in kind["names"]]
            for name, kind in features.items()
            if isinstance(kind, Mapping)
            and kind.get("_type") == "ClassLabel"
            and isinstance(kind.get("names"), list)
        }
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}


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
    field = _field("", kind)
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


def _nulls(column: Any) -> Any:
    return column.is_null().to_numpy(zero_copy_only=False)


def _numbers(column: Any) -> npt.NDArray[Any]:
    """A column of numbers; zeros where one is missing, so that integers stay what they are."""
    if column.null_count:
        column = column.fill_null(False if _dtype(column.type) == np.bool_ else 0)
    return np.asarray(column.to_numpy(zero_copy_only=False))


_MOST_ROWS = 1 << 16  # at a time


@dataclass(frozen=True)
class ArrowRows:
    """Rows that are read together.

    schema      pyarrow.Schema
    rows        how many
    size_bytes  about, of all
    missing     whether a value is missing anywhere
    batches     gives batches that have the rows from a number up to another, and perhaps more, each with the
                number of its first row. It takes these two, columns, and about how many rows are wanted
    """

    path: str
    schema: Any
    rows: int
    size_bytes: int
    missing: bool
    batches: Callable[[int, int, list[str], int], Iterator[tuple[int, Any]]]

    def read(self, begin: int, end: int, columns: list[str]) -> Iterator[Any]:
        """pyarrow.RecordBatches of the rows from ``begin`` up to ``end``, of a few MiB each."""
        step = max(1, min(_MOST_ROWS, BLOCK_BYTES * self.rows // max(self.size_bytes, 1)))
        with _failing(self.path):
            for first, batch in self.batches(begin, end, columns, step):
                batch.validate(full=True)  # what is mapped was not parsed: offsets could lead anywhere
                stop = min(end - first, batch.num_rows)
                for start in range(max(begin - first, 0), stop, step):
                    yield batch.slice(start, min(step, stop - start))


def _open(path: str) -> ArrowRows:
    """A file of Parquet or Arrow. Raises SampleError where it is damaged."""
    with _failing(path):
        with open(path, "rb") as file:
            magic = file.read(4)
        return _parquet(path) if magic == b"PAR1" else _ipc(path)


def _parquet(path: str) -> ArrowRows:
    import pyarrow.parquet as pq

    def batches(begin: int, end: int, columns: list[str], step: int) -> Iterator[tuple[int, Any]]:
        with pq.ParquetFile(path) as file:
            groups, rows_of = range(file.metadata.num_row_groups), file.metadata.row_group
            for group, at, _, _ in parts_with(range(begin, end), groups, lambda i: int(rows_of(i).num_rows)):
                for batch in file.iter_batches(step, [group], columns):
                    yield at, batch
                    at += batch.num_rows

    with pq.ParquetFile(path) as file:
        found = file.metadata
        groups = [found.row_group(i) for i in range(found.num_row_groups)]
        size_bytes = sum(max(group.total_byte_size, 0) for group in groups)
        columns = [group.column(i) for group in groups for i in range(group.num_columns)]
        missing = any(not each.is_stats_set or each.statistics.null_count != 0 for each in columns)
        str(file.schema_arrow)  # raises where a name is no text
        return ArrowRows(path, file.schema_arrow, found.num_rows, size_bytes, missing, batches)


def _ipc(path: str) -> ArrowRows:
    """A file or stream of Arrow's own format, mapped."""

    def batches(begin: int, end: int, columns: list[str], step: int) -> Iterator[tuple[int, Any]]:
        with _opened(path) as (_, all_):
            for batch, first, _, _ in parts_with(range(begin, end), all_, lambda batch: int(batch.num_rows)):
                yield first, batch.select(columns)

    rows, missing = 0, False
    with _opened(path) as (schema, all_):
        for batch in all_:
            rows += batch.num_rows
            missing = missing or any(map(_lacks_values, batch.columns))
        str(schema)  # raises where a name is no text
        return ArrowRows(path, schema, rows, os.path.getsize(path), missing, batches)


def _dataset(dataset: Any) -> ArrowRows:
    """An object like datasets.Dataset."""

    def batches(begin: int, end: int, columns: list[str], step: int) -> Iterator[tuple[int, Any]]:
        for start in range(begin, end, step):
            part = as_tables[start : min(start + step, end)].select(columns)
            for batch in part.combine_chunks().to_batches():  # a selection has a chunk for each run
                yield start, batch
                start += batch.num_rows

    rows, as_tables = len(dataset), dataset.with_format("arrow")
    table = getattr(dataset.data, "table", dataset.data)
    size_bytes = table.nbytes * rows // max(table.num_rows, 1)
    missing = any(_lacks_values(chunk) for column in table.columns for chunk in column.chunks)
    return ArrowRows("a dataset", table.schema, rows, size_bytes, missing, batches)


@contextmanager
def _failing(path: str) -> Iterator[None]:
    """pyarrow's errors as SampleError."""
    from pyarrow import ArrowException

    try:
        yield
    except SampleError:
        raise
    except (ArrowException, OSError, ValueError, LookupError) as error:
        raise SampleError(f"{path} cannot be read as Parquet or Arrow: {error}") from error


@contextmanager
def _opened(path: str) -> Iterator[tuple[Any, Iterator[Any]]]:
    """Schema and batches."""
    import pyarrow as pa

    with pa.memory_map(path) as file:
        if file.read(6) == b"ARROW1":
            with pa.ipc.open_file(file) as reader:
                yield reader.schema, (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            file.seek(0)
            with pa.ipc.open_stream(file) as reader:
                yield reader.schema, iter(reader)


@dataclass(frozen=True)
class ArrowTables(Numbered):
    """The rows of several files, one after the other."""

    tables: tuple[ArrowRows, ...]
    labels: Labels
    name_column: str | None
    label_column: str | None

    def names(self) -> Iterator[str]:
        if self.name_column is None:
            return super().names()
        batches = self._read(self.mine, [self.name_column])
        return chain.from_iterable(_names(batch.column(0), number) for number, batch in batches)

    def after(self, samples: int) -> Iterator[RawSample | Block]:
        for number, batch in self._read(self.mine[samples:], self.tables[0].schema.names):
            labels = self._labels(batch)
            if self.fields:
                yield self._block(batch, number, labels)
                continue
            names: Iterator[str] = map(str, range(number, number + batch.num_rows))
            if self.name_column is not None:
                names = iter(_names(batch.column(self.name_column), number))
                batch = batch.drop_columns([self.name_column])
            for i, (name, row) in enumerate(zip(names, _rows(batch), strict=True)):
                try:
                    yield RawSample(name, encode(row), -1 if labels is None else int(labels[i]))
                except InvalidArgument as error:
                    raise InvalidArgument(f"row {number + i} of {self.description}: {error}") from None

    def _read(self, wanted: range, columns: list[str]) -> Iterator[tuple[int, Any]]:
        """Batches of these rows, each with the number of its first row."""
        for table, first, begin, end in parts_with(wanted, self.tables, lambda table: table.rows):
            at = begin
            for batch in table.read(begin, end, columns):
                if batch.num_rows:
                    yield first + at, batch
                at += batch.num_rows
            if at != end:
                raise SampleError(f"{table.path} has {at} rows of {table.rows}: it changed, or is damaged")

    def _block(self, batch: Any, number: int, labels: npt.NDArray[np.int32] | None) -> Block:
        columns = {}
        for each in self.fields:
            columns[each.name], missing = _fixed(batch.column(each.name), each)
            if missing.any():
                raise SampleError(
                    f"column {each.name!r} of {self.description} lacks a value in row {number} or one of the "
                    f"{batch.num_rows} behind it: pack it with encoding='msgpack'"
                )
        block = record_block(columns, number, labels)
        if self.name_column is None:
            return block
        names, ends = joined(tuple(map(bytes_of, _names(batch.column(self.name_column), number))))
        return block._replace(names=names, name_ends=ends)

    def _labels(self, batch: Any) -> npt.NDArray[np.int32] | None:
        if self.label_column is None:
            return None
        what = f"in {self.description}"
        values = batch.column(self.label_column).to_pylist()
        return np.array([self.labels.label(value, what) for value in values], np.int32)


def open_arrow(
    source: Any,
    *,
    name_column: str | None = None,
    label_column: str | None = None,
    encoding: str | None = None,
) -> ArrowTables:
    """Samples of rows. Needs pyarrow: pip install '.[arrow]' in a clone.

    source        Parquet files, Arrow files or streams (.arrow), a folder of them, a folder that a Hugging
                  Face dataset was saved to, or such a dataset itself
    name_column   holds the names, and is not stored otherwise; if none, names are row numbers in decimal
    label_column  holds the class: an integer, or text. Otherwise the only column that Hugging Face's features
                  call a ClassLabel, which also give its names
    encoding      "record" or "msgpack"; otherwise "record" where every column holds numbers, or lists of
                  numbers of fixed size, and no value is missing

    Raises InvalidArgument for columns that are not there, SampleError for files that cannot be read.
    """
    tables, name = _tables(source)
    schema = tables[0].schema
    for table in tables[1:]:
        if not table.schema.equals(schema, check_metadata=False):
            raise SampleError(f"{table.path} has other columns than {tables[0].path}: pack them apart")
    if len(set(schema.names)) < len(schema.names):
        raise SampleError(f"{name} has two columns of one name: rename one of them")
    for wanted in (name_column, label_column):
        if wanted is not None and wanted not in schema.names:
            raise InvalidArgument(f"{name} has no column {wanted!r}, only {', '.join(schema.names)}")
    named = _class_names(schema)
    if label_column is None and len(named) == 1:
        label_column = next(iter(named))
    labels = Labels(named.get(label_column or "", ()))
    if label_column is not None and not labels.classes:
        labels = _labels_in(tables, label_column)
    fields = _fields(tables, name_column, encoding, name)
    rows, size_bytes = sum(table.rows for table in tables), sum(table.size_bytes for table in tables)
    kind = "record" if fields else "msgpack"
    return ArrowTables(
        name, kind, labels.classes, rows, size_bytes, tables, labels, name_column, label_column, fields=fields
    )


def _tables(source: Any) -> tuple[tuple[ArrowRows, ...], str]:
    """The tables of a source, and a description."""
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise InvalidArgument(f"Parquet and Arrow need pyarrow: {installing('arrow')}") from None
    if hasattr(source, "with_format"):
        return (_dataset(source),), "a dataset"
    name, saved = "Arrow tables", []
    if isinstance(source, str | os.PathLike):
        name, saved = printable(os.path.basename(os.path.abspath(source))), _saved(os.fspath(source))
    return tuple(map(_open, saved or [path for path, _ in shards_of(source, "arrow")])), name


def _saved(folder: str) -> list[str]:
    """The files of a dataset that Hugging Face's save_to_disk wrote; empty where the path is another."""
    splits = os.path.join(folder, "dataset_dict.json")
    if os.path.exists(splits):
        names = ", ".join(map(str, _json(splits).get("splits", ())))
        raise InvalidArgument(f"{folder} holds several splits: pack one of its folders, {names}")
    state = os.path.join(folder, "state.json")
    if not os.path.exists(state):
        return []
    files = _json(state).get("_data_files")
    entries = [each for each in files if isinstance(each, dict)] if isinstance(files, list) else []
    found = [str(each.get("filename")) for each in entries]
    for name in found:
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise SampleError(f"{state} names the file {name!r}, which does not lie beside it")
    return [os.path.join(folder, name) for name in found]


def _json(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            value = json.loads(file.read(1 << 26))
    except (OSError, ValueError) as error:
        raise SampleError(f"{path} cannot be read: {error}") from error
    return value if isinstance(value, dict) else {}


def _fields(
    tables: Sequence[ArrowRows], name_column: str | None, encoding: str | None, description: str
) -> tuple[Field, ...]:
    """Of "record"; empty for "msgpack"."""
    if encoding not in (None, "record", "msgpack"):
        raise InvalidArgument(f"encoding={encoding!r} is unknown: rows become 'record' or 'msgpack'")
    fields: list[Field] = []
    for column in tables[0].schema:
        if column.name == name_column:
            continue
        field = _field(column.name, column.type)
        if field is None and encoding == "record":
            raise InvalidArgument(
                f"column {column.name!r} of {description} is {column.type}, and no field of a record: "
                "records hold numbers and lists of numbers of fixed size"
            )
        if field is None or encoding == "msgpack":
            return ()
        fields.append(field)
    return () if encoding is None and any(table.missing for table in tables) else tuple(fields)


def _labels_in(tables: Sequence[ArrowRows], column: str) -> Labels:
    """The labels that the values of a column are."""
    from pyarrow import types

    kind = tables[0].schema.field(column).type
    values = (
        value
        for table in tables
        for batch in table.read(0, table.rows, [column])
        for value in batch.column(0).to_pylist()
        if value is not None
    )
    if types.is_integer(kind):
        return Labels(label_classes(np.fromiter(values, np.int64), column, None))
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_dictionary(kind)):
        raise InvalidArgument(f"label_column={column!r} holds {kind}: labels are integers or text")
    return Labels(sorted(set(map(label_text, values))))
