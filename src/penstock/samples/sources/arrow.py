"""Samples of Parquet and Arrow files, and of Hugging Face datasets: a row each."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import InvalidArgument, SampleError
from penstock.samples.format.encoding import encode
from penstock.samples.format.manifest import Field
from penstock.samples.sources.arrays import label_classes, record_block
from penstock.samples.sources.arrowcolumns import class_names, fixed_values, record_field, rows, text_values
from penstock.samples.sources.arrowfiles import DatasetRows, Rows, open_rows
from penstock.samples.sources.paths import shards_of
from penstock.samples.sources.source import Block, Numbered, RawSample, check_label, printable


@dataclass(frozen=True)
class Tables(Numbered):
    """The rows of several files, one after the other."""

    tables: tuple[Rows, ...]
    description: str
    fields: tuple[Field, ...]
    name_column: str | None
    label_column: str | None
    label_text: bool
    classes: tuple[str, ...]

    def count(self) -> int:
        return sum(table.rows for table in self.tables)

    @property
    def encoding(self) -> str:
        return "record" if self.fields else "msgpack"

    @property
    def size_bytes(self) -> int:
        return sum(table.size_bytes for table in self.tables) * self.samples // max(self.count(), 1)

    def names(self) -> Iterator[str]:
        """All names; of the data at most one column is read."""
        if self.name_column is None:
            yield from map(str, self.mine)
            return
        for number, batch in self._read(self.mine, [self.name_column]):
            yield from _names(batch.column(0), number)

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
            for i, (name, row) in enumerate(zip(names, rows(batch), strict=True)):
                try:
                    yield RawSample(name, encode(row), -1 if labels is None else int(labels[i]))
                except InvalidArgument as error:
                    raise InvalidArgument(f"row {number + i} of {self.description}: {error}") from None

    def _read(self, wanted: range, columns: list[str]) -> Iterator[tuple[int, Any]]:
        """Batches of these rows, each with the number of its first row."""
        first = 0
        for table in self.tables:
            begin, end = max(wanted.start - first, 0), min(wanted.stop - first, table.rows)
            at = begin
            for batch in table.read(begin, end, columns) if begin < end else ():
                if batch.num_rows:
                    yield first + at, batch
                at += batch.num_rows
            if begin < end and at != end:
                raise SampleError(f"{table.path} has {at} rows of {table.rows}: it changed, or is damaged")
            first += table.rows

    def _block(self, batch: Any, number: int, labels: npt.NDArray[np.int32] | None) -> Block:
        columns = {}
        for each in self.fields:
            values = fixed_values(batch.column(each.name), each)
            if values is None:
                raise SampleError(
                    f"column {each.name!r} of {self.description} lacks a value in row {number} or one of the "
                    f"{batch.num_rows} behind it: pack it with encoding='msgpack'"
                )
            columns[each.name] = values
        block = record_block(columns, number, labels)
        if self.name_column is None:
            return block
        names = [os.fsencode(name) for name in _names(batch.column(self.name_column), number)]
        ends = np.fromiter(accumulate(map(len, names)), np.int64, len(names))
        return block._replace(names=np.frombuffer(b"".join(names), np.uint8), name_ends=ends)

    def _labels(self, batch: Any) -> npt.NDArray[np.int32] | None:
        if self.label_column is None:
            return None
        values = batch.column(self.label_column).to_pylist()
        if self.label_text:
            known = {name: label for label, name in enumerate(self.classes)}
            values = [known.get(str(value)) if value is not None else -1 for value in values]
            if None in values:
                raise SampleError(f"{self.description} changed while it was packed: it has new classes")
        labels = [-1 if value is None else value for value in values]
        for label in (min(labels), max(labels)):
            check_label(label, self.classes, f"a row of {self.description}")
        return np.array(labels, np.int32)


def open_arrow(
    source: Any,
    *,
    name_column: str | None = None,
    label_column: str | None = None,
    encoding: str | None = None,
) -> Tables:
    """Samples of rows. Needs pyarrow: pip install 'penstock[arrow]'.

    source        Parquet files, Arrow files or streams (.arrow), a folder of them, a folder that a Hugging
                  Face dataset was saved to, or such a dataset itself
    name_column   holds the names, and is not stored otherwise; if none, names are row numbers in decimal
    label_column  holds the class: an integer, or text. Otherwise the only column that Hugging Face's features
                  call a ClassLabel, which also give its names
    encoding      "record" or "msgpack"; otherwise "record" where every column holds numbers, or lists of
                  numbers of fixed size, and no value is missing

    Raises InvalidArgument for columns that are not there, SampleError for files that cannot be read.
    """
    tables, description = _tables(source)
    schema = tables[0].schema
    for table in tables[1:]:
        if not table.schema.equals(schema, check_metadata=False):
            raise SampleError(f"{table.path} has other columns than {tables[0].path}: pack them apart")
    if len(set(schema.names)) < len(schema.names):
        raise SampleError(f"{description} has two columns of one name: rename one of them")
    for wanted in (name_column, label_column):
        if wanted is not None and wanted not in schema.names:
            raise InvalidArgument(f"{description} has no column {wanted!r}, only {', '.join(schema.names)}")
    named = class_names(schema)
    if label_column is None and len(named) == 1:
        label_column = next(iter(named))
    text, classes = False, tuple(named.get(label_column or "", ()))
    if label_column is not None and not classes:
        text, classes = _classes(tables, label_column)
    fields = _fields(tables, name_column, encoding, description)
    return Tables(tables, description, fields, name_column, label_column, text, classes)


def _tables(source: Any) -> tuple[tuple[Rows, ...], str]:
    """The tables of a source, and a description."""
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise InvalidArgument("Parquet and Arrow need pyarrow: run pip install 'penstock[arrow]'") from None
    if hasattr(source, "with_format"):
        return (DatasetRows.of(source),), "a dataset"
    if isinstance(source, str | os.PathLike):
        name = printable(os.path.basename(os.path.abspath(source)))
        return tuple(open_rows(path) for path in _saved(os.fspath(source)) or _paths(source)), name
    return tuple(map(open_rows, _paths(source))), "Arrow tables"


def _paths(source: Any) -> list[str]:
    return [path for path, _ in shards_of(source, "arrow")]


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
    tables: Sequence[Rows], name_column: str | None, encoding: str | None, description: str
) -> tuple[Field, ...]:
    """Of "record"; empty for "msgpack"."""
    if encoding not in (None, "record", "msgpack"):
        raise InvalidArgument(f"encoding={encoding!r} is unknown: rows become 'record' or 'msgpack'")
    fields = []
    for column in tables[0].schema:
        if column.name == name_column:
            continue
        fitting = record_field(column.name, column.type)
        if fitting is None and encoding == "record":
            raise InvalidArgument(
                f"column {column.name!r} of {description} is {column.type}, and no field of a record: "
                "records hold numbers and lists of numbers of fixed size"
            )
        fields.append(fitting)
    kept = [each for each in fields if each is not None]
    if encoding == "msgpack" or len(kept) < len(fields):
        return ()
    if encoding is None and any(table.missing for table in tables):
        return ()
    return tuple(kept)


def _classes(tables: Sequence[Rows], column: str) -> tuple[bool, tuple[str, ...]]:
    """Whether labels are text, and the classes, from all values of a column."""
    from pyarrow import types

    kind = tables[0].schema.field(column).type
    if types.is_integer(kind):
        seen = [
            np.array([value for value in batch.column(0).to_pylist() if value is not None], np.int64)
            for table in tables
            for batch in table.read(0, table.rows, [column])
        ]
        return False, label_classes(np.concatenate(seen or [np.empty(0, np.int64)]), column, None)
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_dictionary(kind)):
        raise InvalidArgument(f"label_column={column!r} holds {kind}: labels are integers or text")
    words: set[str] = set()
    for table in tables:
        for batch in table.read(0, table.rows, [column]):
            words.update(word for word in text_values(batch.column(0)) if word is not None)
    return True, tuple(sorted(words))


def _names(column: Any, number: int) -> list[str]:
    """A column as names; ``number`` is that of its first row."""
    names = text_values(column)
    if None in names:
        raise SampleError(f"row {number + names.index(None)} has no name")
    return [name for name in names if name is not None]
