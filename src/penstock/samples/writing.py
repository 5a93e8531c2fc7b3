"""Writing a store's files, so that packing can be resumed.

What the builder makes is appended by a thread, while more is built. Now and then everything is made
durable, and `packing.json` says how far that goes: a killed process loses what came after it. A packing that
goes on compares what its source gives with what is packed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitedTooLong
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from penstock import _native
from penstock.core.files import sync_folder
from penstock.errors import SampleError, with_errno
from penstock.samples import layout, progress
from penstock.samples.builder import Block, Builder, Pieces, joined, lookup_of, with_lengths
from penstock.samples.manifest import DataFile, FileSum, StoreManifest
from penstock.samples.places import StoreFolder
from penstock.samples.progress import Packing
from penstock.samples.sources.source import RawSample, as_block
from penstock.samples.threads import DaemonThreads
from penstock.storage.checksum import crc32c
from penstock.storage.files import Closing
from penstock.units import format_bytes, format_bytes_up

if TYPE_CHECKING:
    from penstock.samples.objects.packing import Sending

logger = logging.getLogger("penstock")

STUCK_S = 600.0  # work that makes no progress for so long is given up


class Background:
    """A thread for work that is given to it. Where some of it fails, what comes after is dropped.

    what      the work, as an error that it is stuck calls it
    waiting   most that may wait
    stuck_s   when to give up
    progress  a number that changes while the work goes on, if it says so
    """

    def __init__(
        self, what: str, waiting: int, stuck_s: float = STUCK_S, progress: Callable[[], int] = lambda: 0
    ) -> None:
        self._what, self._most_waiting, self._stuck_s = what, waiting, stuck_s
        self._progress = progress
        self._thread = DaemonThreads("penstock-pack")
        self._waiting: deque[Future[None]] = deque()
        self._failure: BaseException | None = None

    def put(self, work: Callable[[], None]) -> None:
        """Have it done. Raises what earlier work raised, SampleError where that is stuck."""
        self._wait(self._most_waiting)
        self._check()
        self._waiting.append(self._thread.submit(self._do, work))

    def drain(self) -> None:
        """Wait until all is done. Raises as `put` does."""
        self._wait(0)
        self._check()

    def close(self) -> None:
        """Let what waits be done, and end the thread. Raises nothing. Idempotent."""
        try:
            self._wait(0)
        except SampleError as error:
            logger.warning("%s", error)
        self._thread.close()

    def _wait(self, most: int) -> None:
        while len(self._waiting) > most:
            before = self._progress()
            try:
                self._waiting[0].result(self._stuck_s)
            except WaitedTooLong:
                if self._progress() != before:
                    continue
                raise SampleError(
                    f"{self._what} has made no progress for {self._stuck_s:.0f} s: look after the disk"
                ) from None
            self._waiting.popleft()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _do(self, work: Callable[[], None]) -> None:
        if self._failure is None:
            try:
                work()
            except BaseException as error:  # it is raised where the work came from
                self._failure = error


def restored(folder: Path, done: Packing) -> Builder:
    """The builder of an interrupted packing. Raises SampleError where another version began it."""
    recipe = done.recipe
    try:
        return Builder(recipe.chunk_bytes, recipe.data_file_bytes, done.state)
    except ValueError as error:
        raise SampleError(
            f"packing into {folder} was begun by another version of penstock: {error}. "
            f"Remove {folder}, or pass resume=False to pack it anew"
        ) from error


_NAMES_AT_ONCE = 4096


class PackedSamples:
    """The samples of an interrupted packing, in order.

    Its functions raise SampleError where the source gives others.
    """

    def __init__(self, folder: Path, done: Packing) -> None:
        self._folder, self._done = folder, done
        files = {
            name: StoreFolder(folder).load(name, done.files[name].size_bytes)
            for name in (layout.NAMES, layout.SUMS, layout.LABELS)
            if name in done.files
        }
        self._names, self._sums = files[layout.NAMES], files[layout.SUMS].view("<u4")
        self._labels = files[layout.LABELS].view("<i4") if layout.LABELS in files else None
        self._compared = self._compared_bytes = 0  # samples, and bytes of their names

    def compare_names(self, names: Iterable[str]) -> None:
        """All names of the source, of which those that are packed are looked at."""
        packed = islice(names, self._done.samples)
        while part := tuple(layout.bytes_of(name) for name in islice(packed, _NAMES_AT_ONCE)):
            self._compare_names(*joined(part))
        self._check_count()

    def rest_of(self, items: Iterator[RawSample | Block]) -> Iterator[RawSample | Block]:
        """What of the source comes after the packed samples, with which the first ones are compared."""
        while (left := self._done.samples - self._compared) and (item := next(items, None)) is not None:
            block = item if isinstance(item, Block) else as_block(item)
            count = len(block.data_ends)
            if count > left:
                items = chain([block.part(left, count)], items)
                block, count = block.part(0, left), left
            now = slice(self._compared, self._compared + count)
            is_other = _native.sample_sums(block.data.ctypes.data, block.data_ends) != self._sums[now]
            if self._labels is not None:
                is_other |= self._labels[now] != (-1 if block.labels is None else block.labels)
            self._compare_names(block.names, block.name_ends)
            if is_other.any():
                raise self._changed(f": sample {now.start + int(is_other.argmax())} is another now")
        self._check_count()
        return items

    def _compare_names(self, names: npt.NDArray[np.uint8], ends: npt.NDArray[np.int64]) -> None:
        made, first = with_lengths(names, ends), self._compared
        end = self._compared_bytes + len(made)
        self._compared += len(ends)
        if not np.array_equal(self._names[self._compared_bytes : end], made):
            raise self._changed(f": one of the samples {first} to {self._compared - 1} has another name")
        self._compared_bytes = end

    def _check_count(self) -> None:
        if self._compared < self._done.samples:
            raise self._changed(f": it has {self._compared} samples, and {self._done.samples} were packed")

    def _changed(self, how: str) -> SampleError:
        return SampleError(
            f"the source has changed since packing into {self._folder} was begun{how}. "
            f"Remove {self._folder}, or pass resume=False to pack it anew"
        )


_WAITING = 2  # pieces that wait to be written while others are built
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class StoreWriter(Closing):
    """Appends to the files of one store. A context manager.

    folder   that progress.lock_folder gave to this process
    done     what is in it, durable
    sending  takes the store from there to where it is to be; None: it stays

    Its functions raise SampleError where something could not be written, now or before.
    """

    def __init__(self, folder: Path, done: Packing, sending: Sending | None = None) -> None:
        self.folder = folder
        self.done = done
        self._sending = sending
        self._kept = [name for name in layout.PACKED_FILES if name != layout.LABELS or done.recipe.classes]
        self._files = _StoreFiles(folder, done)
        self._thread = Background(f"writing to {folder}", _WAITING, progress=self._sent_bytes)

    def _sent_bytes(self) -> int:
        return 0 if self._sending is None else self._sending.sent_bytes

    def break_off(self) -> None:
        """Send no more: what is packed goes on another time. Does not wait."""
        if self._sending is not None:
            self._sending.break_off()

    def put(self, pieces: Pieces, mark: Packing | None = None) -> None:
        """Append the pieces. Waits where much is unwritten.

        mark   how far packing had come when they were taken: then everything is made durable
        """
        self._thread.put(lambda: self._write(pieces, mark))

    def finish(self, data_files: tuple[DataFile, ...], **described: Any) -> StoreManifest:
        """After the last pieces: the lookup, and the manifest, which makes the folder a store.

        described   the manifest's `source` and `metadata`
        """
        made: list[StoreManifest] = []
        self._thread.put(lambda: made.append(self._finish(data_files, described)))
        self._thread.drain()
        return made[0]

    def close(self) -> None:
        """Let what was put be written, and close the files. Idempotent."""
        self._thread.close()
        self._files.close()

    def __exit__(self, *raised: object) -> None:
        if raised[1] is not None:
            self.break_off()
        self.close()

    # From here on: in the thread.

    def _write(self, pieces: Pieces, mark: Packing | None) -> None:
        with _explained(self.folder, self.done):
            for data_file, data in pieces[0]:
                self._files.append_data(data_file, data)
            for name in self._kept:
                self._files.append(name, pieces[1][name])
            if mark is None:
                return
            self._files.sync()
            sent = self._sending.take_sent() if self._sending is not None else []
            for name in sent:
                del self._files.sums[name]
            self.done = replace(mark, files=dict(self._files.sums)).save(self.folder / progress.PROGRESS)
            for name in sent:
                os.unlink(self.folder / name)
            if self._sending is not None:
                for name in self._files.whole_data_files():
                    self._sending.put(name)

    def _finish(self, data_files: tuple[DataFile, ...], described: dict[str, Any]) -> StoreManifest:
        with _explained(self.folder, self.done):
            self._files.append(layout.LOOKUP, self._lookup().data)
            self._files.sync()
            sums, recipe = self._files.sums, self.done.recipe
            made = StoreManifest(
                samples=sum(data_file.samples for data_file in data_files),
                chunk_bytes=recipe.chunk_bytes,
                data_files=data_files,
                files={name: sums[name] for name in layout.FILES if name in sums},
                encoding=recipe.encoding,
                fields=recipe.fields,
                classes=recipe.classes,
                partition=recipe.partition,
                partitions=recipe.partitions,
                **described,
            ).save(self.folder / layout.MANIFEST)
            if self._sending is not None:
                self._sending.finish(made)
                self._clear(self._sending)
            else:
                (self.folder / progress.PROGRESS).unlink()
                sync_folder(self.folder)
            return made

    def _clear(self, sending: Sending) -> None:
        """The store is whole elsewhere, and the folder of no use. What goes wrong is logged."""
        self._files.close()  # NFS keeps what is open, under another name
        try:
            # An interrupted removal leaves a packing of nothing.
            Packing(recipe=self.done.recipe).save(self.folder / progress.PROGRESS)
            progress.empty(self.folder, progress.PROGRESS)
            if sending.removes_folder:
                self.folder.rmdir()
            else:
                sync_folder(self.folder)
        except OSError as error:
            text = "the store is whole. Remove %s, where its files waited and which cannot be emptied: %s"
            logger.warning(text, self.folder, error.strerror)

    def _lookup(self) -> npt.NDArray[np.uint8]:
        """The bytes of lookup.bin. Raises SampleError where two samples have one name."""
        place, sums = StoreFolder(self.folder), self._files.sums
        directory, names, anchors = (
            place.load(name, sums[name].size_bytes)
            for name in (layout.DIRECTORY, layout.NAMES, layout.ANCHORS)
        )
        lookup, twins = lookup_of(directory.view(np.uint64).reshape(-1, 2), names, anchors.view(np.uint64))
        if twins is not None:
            raise SampleError(
                f"samples {twins[0]} and {twins[1]} have one name, {twins[2]!r}: give each sample a name of "
                f"its own, remove {self.folder} and pack again"
            )
        return lookup


_NOTHING = FileSum(size_bytes=0, crc32c=0)


class _StoreFiles:
    """The open files of a store that is being written. sums: their sizes and checksums (0 for data files)."""

    def __init__(self, folder: Path, done: Packing) -> None:
        self._folder = folder
        self.sums = dict(done.files)
        self._open: dict[str, int] = {}
        # The data file that is being filled: earlier ones are closed.
        self._data = max((name for name in done.files if name not in layout.FILES), default="")

    def append_data(self, data_file: int, data: npt.NDArray[np.uint8]) -> None:
        name = layout.data_file_name(data_file)
        if name != self._data:
            if self._data in self._open:
                descriptor = self._open.pop(self._data)
                os.fsync(descriptor)
                os.close(descriptor)
            self._data = name
        self._append(name, data.data, 0)

    def whole_data_files(self) -> list[str]:
        """Those that nothing will be appended to."""
        return [name for name in self.sums if name not in layout.FILES and name != self._data]

    def append(self, name: str, data: bytes | memoryview) -> None:
        if len(data) or name != layout.LARGE:  # any other file is there, if only empty
            self._append(name, memoryview(data), crc32c(data, self.sums.get(name, _NOTHING).crc32c))

    def _append(self, name: str, data: memoryview, crc: int) -> None:
        path, size_bytes = self._folder / name, self.sums.get(name, _NOTHING).size_bytes + data.nbytes
        if name not in self._open:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            self._open[name] = os.open(path, flags, 0o666)
        try:
            while data:
                data = data[os.write(self._open[name], data) :]
        except OSError as error:
            error.filename = os.fspath(path)
            raise
        self.sums[name] = FileSum(size_bytes=size_bytes, crc32c=crc)

    def sync(self) -> None:
        """Make everything durable, the names included."""
        for descriptor in self._open.values():
            os.fsync(descriptor)
        sync_folder(self._folder)

    def close(self) -> None:
        while self._open:
            with contextlib.suppress(OSError):  # what counts is durable, and an earlier error says more
                os.close(self._open.popitem()[1])


@contextlib.contextmanager
def _explained(folder: Path, done: Packing) -> Iterator[None]:
    """Makes a SampleError of an OSError in its block, that says what to do."""
    try:
        yield
    except SampleError:
        raise
    except OSError as error:
        text = f"cannot write {error.filename or folder}: {error.strerror}. "
        if error.errno in _FULL:
            text += f"{format_bytes(shutil.disk_usage(folder).free)} are free there"
            size_bytes = done.recipe.size_bytes
            if size_bytes is not None and size_bytes > done.size_bytes:
                left = format_bytes_up(size_bytes - done.size_bytes)
                text += f", and {left} of the source are not yet safe on the disk"
            text += ". Make room there (see also quotas and limits of file sizes), and "
        else:
            text += "See to the disk, and "
        explained = SampleError(
            f"{text}pack again with the same arguments: it goes on after {done.samples} samples"
        )
        raise with_errno(explained, error.errno) from error
