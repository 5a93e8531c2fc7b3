"""Packing a source into a store."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from penstock.errors import InvalidArgument
from penstock.options import CHUNK_BYTES
from penstock.samples import layout
from penstock.samples.builder import Block, Builder, Pieces
from penstock.samples.manifest import DataFile, StoreManifest
from penstock.samples.objects.packing import (
    DATA_FILE_BYTES,
    Sending,
    check_partitions,
    make_private,
    staging_path,
)
from penstock.samples.places import Progress, reporter
from penstock.samples.progress import PackingSettings, lock_folder
from penstock.samples.sources import open_source
from penstock.samples.sources.folder import Files
from penstock.samples.sources.source import RawSample, Source
from penstock.samples.writing import PackedSamples, StoreWriter, restored
from penstock.storage.nvme.url import is_url
from penstock.storage.objects import FORMS, Bucket, was_object_url
from penstock.units import format_bytes, format_bytes_up, parse_bytes

logger = logging.getLogger("penstock")

_PARTITION = re.compile(rf"\.?{layout.PARTITION.pattern}(\.packing)?")
_PROGRESS_S = 0.1


class FlushPolicy(NamedTuple):
    """How often packing writes, and how much work a crash can lose.

    flush_bytes        after so many bytes they are passed to the writer thread
    checkpoint_bytes   after so many bytes the store is made durable, to be resumed from there
    checkpoint_s       or after so much time, for slow sources
    """

    flush_bytes: int = 8 << 20
    checkpoint_bytes: int = 256 << 20
    checkpoint_s: float = 10.0


def pack(
    source: Any,
    dest: str | os.PathLike[str],
    chunk_bytes: int | str = CHUNK_BYTES,
    *,
    rank: int = 0,
    world_size: int = 1,
    data_file_bytes: int | str | None = None,
    format: str | None = None,
    format_options: Mapping[str, Any] | None = None,
    metadata: Mapping[str, str] | None = None,
    resume: bool = True,
    overwrite: bool = False,
    staging: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> StoreManifest:
    """Make a store at ``dest`` of everything in ``source``, which is not changed.

    source          whatever penstock.samples.sources.open_source takes
    dest            a folder, new or empty, or one where the same packing was interrupted; or where objects
                    lie: ``s3://BUCKET/PREFIX``, ``gs://``, ``az://``
    chunk_bytes     the grid of the data files, such as "256KiB": a multiple of 4096, up to 1 GiB
    rank            of ``world_size`` processes: this one packs its partition to
                    ``dest``/part-00003-of-00008. Mount ``dest`` when all have done so
    data_file_bytes  most that a data file holds: 1 TiB by default, of objects 1 GiB
    format          of the source, where it should not be found out; format_options go to it
    metadata        texts of your own, kept in the manifest
    resume          go on where packing the same source into ``dest`` was interrupted. The source must give
                    the same samples in the same order; that is checked
    overwrite       replace the store that is at ``dest``. It stays until the new one, which is packed to a
                    hidden folder beside it, is whole; then they are exchanged in one step. The disk needs
                    room for both. Of a store in partitions each partition is replaced by itself. Objects
                    cannot be exchanged: those of the old store go at once. Who is still writing it is stopped
    staging         for objects, a folder of this machine where files wait until they are sent, and where
                    packing goes on after an interruption. By default a private one where temporary files are
                    (TMPDIR). It needs room for four data files, and what is not data
    progress        is called now and then with the samples and bytes so far

    Returns the store's manifest. An exception of the source passes through; so does KeyboardInterrupt.
    After these, as after a full disk or a killed process, the same call goes on.

    Raises InvalidArgument for arguments that cannot be used and for samples that do not fit the format,
    SampleError where the store cannot be written, where the source has changed since packing was begun,
    and where two samples have one name.
    """
    described = _check_metadata(metadata)
    chunk_bytes = _size("chunk_bytes", chunk_bytes, layout.SMALLEST_CHUNK_BYTES, layout.LARGEST_CHUNK_BYTES)
    bucket = _bucket(dest)
    if bucket is None and is_url(dest):
        raise InvalidArgument(
            f"{dest} cannot be packed to: give a folder, or {FORMS}; for a namespace upload the packed store "
            "then (penstock samples upload)"
        )
    if data_file_bytes is None:
        data_file_bytes = layout.DATA_FILE_BYTES if bucket is None else DATA_FILE_BYTES
    data_file_bytes = _size("data_file_bytes", data_file_bytes, 1, layout.DATA_FILE_BYTES)
    if not 0 <= rank < world_size or world_size > 99999:
        raise InvalidArgument(
            f"rank={rank} is none of world_size={world_size} processes: give 0 <= rank < world_size <= 99999"
        )
    if bucket is None and staging is not None:
        raise InvalidArgument(f"staging={os.fspath(staging)!r} is for objects, and {dest} is a folder")
    name = layout.partition_name(rank, world_size) if world_size > 1 else ""
    if bucket is not None and staging is None:
        folder = staging_path(bucket.url_of(name))
    else:
        folder = Path(dest if staging is None else staging)
    _check_outside(source, folder)
    opened = open_source(source, format=format, **(format_options or {}))
    if world_size > 1:
        if bucket is None:
            _check_partitions(folder, world_size)
        else:
            check_partitions(bucket, world_size)
            bucket = Bucket(bucket.url_of(name))
        opened = opened.of_rank(rank, world_size)
    if bucket is not None and staging is None:
        make_private(folder)
    else:
        folder = folder / name
    recipe = PackingSettings(
        chunk_bytes=chunk_bytes,
        data_file_bytes=data_file_bytes,
        encoding=opened.encoding,
        fields=opened.fields,
        classes=opened.classes,
        partition=rank,
        partitions=world_size,
        samples=opened.samples,
        size_bytes=opened.size_bytes,
    )
    options: dict[str, Any] = {"metadata": described, "resume": resume, "report": progress}
    if bucket is None:
        return pack_source(opened, folder, recipe, overwrite=overwrite, **options)
    with Sending(bucket, overwrite=overwrite, removes_folder=staging is None or world_size > 1) as sending:
        return pack_source(opened, folder, recipe, sending=sending, **options)


def pack_source(
    source: Source,
    folder: Path,
    recipe: PackingSettings,
    *,
    metadata: dict[str, str],
    resume: bool = True,
    overwrite: bool = False,
    report: Progress | None = None,
    policy: FlushPolicy | None = None,
    sending: Sending | None = None,
) -> StoreManifest:
    """`pack`, after its arguments were checked."""
    with (
        lock_folder(folder, recipe, resume=resume, overwrite=overwrite) as locked,
        StoreWriter(locked.folder, locked.done, sending) as writer,
    ):
        if sending is None:
            _warn_if_disk_is_small(writer)
        else:
            sending.begin(locked.folder, locked.done)
        data_files = _Packer(source, writer, policy or FlushPolicy(), report).run()
        manifest = writer.finish(data_files, source=source.description, metadata=metadata)
        locked.publish()
        return manifest


class _Packer:
    """Passes samples from a source to the builder, and its output to the writer."""

    def __init__(
        self, source: Source, writer: StoreWriter, policy: FlushPolicy, report: Progress | None
    ) -> None:
        self._source, self._writer, self._policy = source, writer, policy
        self._report = reporter(report)
        self._recipe = writer.done.recipe
        self._builder = Builder(self._recipe.chunk_bytes, self._recipe.data_file_bytes)
        self._size_bytes = 0  # of all samples so far
        self._taken_unwritten = False  # pieces were taken, and are not written
        self._durable_bytes, self._durable_s = 0, time.monotonic()
        self._next_look_s = 0.0  # when to look at the clock again

    def run(self) -> tuple[DataFile, ...]:
        """Pack all samples. Returns the data files."""
        items = self._resumed() if self._writer.done.samples else iter(self._source)
        try:
            for item in items:
                self._add(item)
                if (
                    self._builder.pending_bytes >= self._policy.flush_bytes
                    or time.monotonic() >= self._next_look_s
                ):
                    self._write_if_due()
        except BaseException:
            self._writer.break_off()
            if not self._taken_unwritten:
                with contextlib.suppress(Exception):  # what happened before is what matters
                    self._flush(durable=True)
            raise
        self._builder.finish()
        self._flush(durable=False)
        self._report(self._builder.samples, self._size_bytes)
        return tuple(
            DataFile(samples=samples, chunks=chunks, size_bytes=size_bytes)
            for samples, chunks, size_bytes in self._builder.data_files
        )

    def _add(self, item: RawSample | Block) -> None:
        try:
            if isinstance(item, Block):
                self._builder.add_many(item)
                self._size_bytes += item.data.nbytes
            else:
                name, data, label = item
                self._builder.add(layout.bytes_of(name), data, label)
                self._size_bytes += len(data)
        except (ValueError, TypeError) as error:
            what = "a block of samples" if isinstance(item, Block) else f"the sample {item[0]!r}"
            raise InvalidArgument(
                f"{what}, after {self._builder.samples} others, cannot be packed: {error}"
            ) from error

    def _write_if_due(self) -> None:
        """Write, make durable, and report progress, where it is time to."""
        now = time.monotonic()
        durable = (
            self._size_bytes - self._durable_bytes >= self._policy.checkpoint_bytes
            or now - self._durable_s >= self._policy.checkpoint_s
        )
        if durable or self._builder.pending_bytes >= self._policy.flush_bytes:
            self._flush(durable)
        if durable:
            self._durable_bytes, self._durable_s = self._size_bytes, now
        self._next_look_s = now + _PROGRESS_S
        self._report(self._builder.samples, self._size_bytes)

    def _flush(self, durable: bool) -> None:
        self._taken_unwritten = True
        pieces = self._builder.take()
        self._check_labels(pieces)
        mark = None
        if durable:
            samples, state = self._builder.samples, self._builder.state()
            mark = replace(self._writer.done, samples=samples, size_bytes=self._size_bytes, state=state)
        self._writer.put(pieces, mark)
        self._taken_unwritten = False

    def _check_labels(self, pieces: Pieces) -> None:
        labels = np.frombuffer(pieces[1][layout.LABELS], "<i4")
        classes = len(self._recipe.classes)
        if labels.size and not -1 <= labels.min() <= labels.max() < classes:
            raise InvalidArgument(
                f"a label is {labels.min()} or {labels.max()}, and the source has {classes} classes: "
                "a label is the number of a class, or -1"
            )

    def _resumed(self) -> Iterator[RawSample | Block]:
        """The samples that are not packed yet. Restores the builder's state."""
        done = self._writer.done
        packed = PackedSamples(self._writer.folder, done)
        self._builder = restored(self._writer.folder, done)
        self._size_bytes = self._durable_bytes = done.size_bytes
        names, after = getattr(self._source, "names", None), getattr(self._source, "after", None)
        if callable(names) and callable(after):
            packed.compare_names(names())
            rest: Iterator[RawSample | Block] = after(done.samples)
            return rest
        return packed.rest_of(iter(self._source))


def _bucket(dest: str | os.PathLike[str]) -> Bucket | None:
    """Where the objects are to lie; None: ``dest`` is a folder. Raises InvalidArgument."""
    if not was_object_url(dest):
        return None
    bucket = Bucket(re.sub(r":/+", "://", os.fspath(dest), count=1))
    bucket.require_writable()
    return bucket


def _warn_if_disk_is_small(writer: StoreWriter) -> None:
    """Warn where the disk will probably be full. No error, as the file system may compress."""
    try:
        free_bytes = shutil.disk_usage(writer.folder).free
    except OSError:  # packing itself says what is wrong there
        return
    size_bytes = writer.done.recipe.size_bytes
    left_bytes = 0 if size_bytes is None else size_bytes - writer.done.size_bytes
    if left_bytes > free_bytes:
        logger.warning(
            "%s has %s free, and %s are to be packed: make room there, or packing will stop",
            writer.folder,
            format_bytes(free_bytes),
            format_bytes_up(left_bytes),
        )


def _size(name: str, value: int | str, least: int, most: int) -> int:
    """A size in bytes, a multiple of the smallest."""
    size_bytes = parse_bytes(value)
    if size_bytes % least or not least <= size_bytes <= most:
        some = f"a multiple of {least} bytes up to" if least > 1 else "at most"
        raise InvalidArgument(f"{name}={value!r} cannot be used: give {some} {format_bytes(most)}")
    return size_bytes


def _check_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    checked = dict(metadata or {})
    for key, value in checked.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise InvalidArgument(f"metadata has {key!r}: {value!r}: give text for both")
    return checked


def _check_outside(source: Any, folder: Path) -> None:
    """Packing must not write into what it reads. source: a path, several, or what was opened."""
    source = source.root if isinstance(source, Files) else source
    where = Path(os.path.realpath(folder))
    for path in source if isinstance(source, list | tuple) else [source]:
        if not isinstance(path, str | bytes | os.PathLike):
            return  # samples, not paths
        real = Path(os.fsdecode(os.path.realpath(path)))
        if real == where or real in where.parents:
            raise InvalidArgument(f"{folder} lies in the source {real}: choose a folder outside")


def _check_partitions(folder: Path, world_size: int) -> None:
    """Raises InvalidArgument where ``folder`` holds anything but partitions of so many."""
    if not folder.is_dir():
        return
    for name in sorted(os.listdir(folder)):
        found = _PARTITION.fullmatch(name)
        if found is None or int(found[2]) != world_size:
            raise InvalidArgument(
                f"{folder} holds {name!r}, which is not a partition of a store of {world_size}: "
                "choose a new or an empty folder"
            )
