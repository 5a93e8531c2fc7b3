"""Parquet and Arrow files, and Hugging Face datasets in memory: rows by their number."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from penstock.errors import SampleError
from penstock.samples.sources.arrowcolumns import has_missing
from penstock.samples.sources.source import BLOCK_BYTES

_MOST_ROWS = 1 << 16  # at a time


@dataclass(frozen=True)
class Rows:
    """Rows that are read together.

    schema      pyarrow.Schema
    rows        how many
    size_bytes  about, of all
    missing     whether a value is missing anywhere
    """

    path: str
    schema: Any
    rows: int
    size_bytes: int
    missing: bool

    def read(self, begin: int, end: int, columns: list[str]) -> Iterator[Any]:
        """pyarrow.RecordBatches of the rows from ``begin`` up to ``end``, of a few MiB each."""
        step = max(1, min(_MOST_ROWS, BLOCK_BYTES * self.rows // max(self.size_bytes, 1)))
        with failing(self.path):
            for first, batch in self.batches(begin, end, columns, step):
                batch.validate(full=True)  # what is mapped was not parsed: offsets could lead anywhere
                stop = min(end - first, batch.num_rows)
                for start in range(max(begin - first, 0), stop, step):
                    yield batch.slice(start, min(step, stop - start))

    def batches(self, begin: int, end: int, columns: list[str], step: int) -> Iterator[tuple[int, Any]]:
        """Batches of any size with these rows, and perhaps others; each with the number of its first row.

        step   about how many rows are wanted
        """
        raise NotImplementedError


class ParquetRows(Rows):
    @classmethod
    def open(cls, path: str) -> ParquetRows:
        import pyarrow.parquet as pq

        with failing(path), pq.ParquetFile(path) as file:
            found = file.metadata
            groups = [found.row_group(i) for i in range(found.num_row_groups)]
            size_bytes = sum(max(group.total_byte_size, 0) for group in groups)
            columns = [group.column(i) for group in groups for i in range(group.num_columns)]
            missing = any(not each.is_stats_set or each.statistics.null_count != 0 for each in columns)
            return cls(path, _checked(file.schema_arrow), found.num_rows, size_bytes, missing)

    def batches(self, begin: int, end: int, columns: list[str], step: int) -> Iterator[tuple[int, Any]]:
        import pyarrow.parquet as pq

        with pq.ParquetFile(self.path) as file:
            first = 0
            for number in range(file.metadata.num_row_groups):
                group_rows = file.metadata.row_group(number).num_rows
                if first < end and begin < first + group_rows:
                    at = first
                    for batch in file.iter_batches(step, [number], columns):
                        yield at, batch
                        at += batch.num_rows
                first += group_rows


class IpcRows(Rows):
    """A file or stream of Arrow's own format, mapped."""

    @classmethod
    def open(cls, path: str) -> IpcRows:
        rows, missing = 0, False
        with failing(path), _opened(path) as (schema, batches):
            for batch in batches:
                rows += batch.num_rows
                missing = missing or any(map(has_missing, batch.columns))
            return cls(path, _checked(schema), rows, os.path.getsize(path), missing)

    def batches(self, begin: int, end: int, columns: list[str], step: int) -> Iterator[tuple[int, Any]]:
        first = 0
        with _opened(self.path) as (_, batches):
            for batch in batches:
                if first >= end:
                    return
                if begin < first + batch.num_rows:
                    yield first, batch.select(columns)
                first += batch.num_rows


@dataclass(frozen=True)
class DatasetRows(Rows):
    """An object like datasets.Dataset."""

    dataset: Any = None

    @classmethod
    def of(cls, dataset: Any) -> DatasetRows:
        rows = len(dataset)
        table = getattr(dataset.data, "table", dataset.data)
        size_bytes = table.nbytes * rows // max(table.num_rows, 1)
        missing = any(has_missing(chunk) for column in table.columns for chunk in column.chunks)
        return cls("a dataset", table.schema, rows, size_bytes, missing, dataset.with_format("arrow"))

    def batches(self, begin: int, end: int, columns: list[str], step: int) -> Iterator[tuple[int, Any]]:
        for start in range(begin, end, step):
            table = self.dataset[start : min(start + step, end)].select(columns)
            for batch in table.combine_chunks().to_batches():  # a selection has a chunk for each run
                yield start, batch
                start += batch.num_rows


def open_rows(path: str) -> Rows:
    """A file of Parquet or Arrow. Raises SampleError where it is damaged."""
    try:
        with open(path, "rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise SampleError(f"{path} cannot be read: {error.strerror}") from error
    return ParquetRows.open(path) if magic == b"PAR1" else IpcRows.open(path)


@contextmanager
def failing(path: str) -> Iterator[None]:
    """pyarrow's errors as SampleError."""
    from pyarrow import ArrowException

    try:
        yield
    except SampleError:
        raise
    except (ArrowException, OSError, ValueError, LookupError) as error:
        raise SampleError(f"{path} cannot be read as Parquet or Arrow: {error}") from error


def _checked(schema: Any) -> Any:
    """The schema, once all names in it are known to be text."""
    str(schema)
    return schema


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
