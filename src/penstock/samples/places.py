"""The place of a store: a folder, a drive of another machine, or objects. Loads and verifies its files.

Files of a folder are mapped: all processes of the machine share them.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock._native import Descriptor
from penstock.errors import InvalidArgument, InvalidFile, SampleError
from penstock.samples.failures import cannot_open, disk_failure
from penstock.samples.layout import DIRECTORY, MANIFEST, PARTITION, partition_name
from penstock.samples.manifest import (
    AGAIN,
    LARGEST_MANIFEST_BYTES,
    StoreManifest,
    decoded_manifest,
    open_regular,
    reading,
)
from penstock.storage.aligned import MADV_POPULATE_READ, advise
from penstock.storage.checksum import crc32c_at, crc32c_combine
from penstock.storage.files import OpenFile, from_descriptor
from penstock.storage.nvme.namespace import DEFAULT_TIMEOUT_S
from penstock.storage.nvme.url import is_url
from penstock.storage.objects import is_object_url, was_object_url
from penstock.storage.threads import in_parallel

if TYPE_CHECKING:
    from penstock.samples.objects.cache import CacheOptions
    from penstock.samples.objects.fetching import Fetched

Bytes: TypeAlias = npt.NDArray[np.uint8]

_SLICE_BYTES = 32 << 20  # what one thread verifies at a time

_library = ctypes.CDLL(None, use_errno=True)
_library.mmap.restype = ctypes.c_void_p
_library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def check_sums(place: Place, manifest: StoreManifest, files: Mapping[str, Bytes]) -> None:
    """Raises InvalidFile where a checksum is wrong, SampleError where a file cannot be read."""
    slices = [
        (name, begin, min(begin + _SLICE_BYTES, data.size))
        for name, data in files.items()
        for begin in range(0, data.size, _SLICE_BYTES)
    ]
    sums: dict[tuple[str, int], int] = {}

    def sum_up(piece: tuple[str, int, int]) -> None:
        name, begin, end = piece
        address = int(files[name].ctypes.data) + begin
        populate_pages(address, end - begin, place.path_of(name))
        sums[name, begin] = crc32c_at(address, end - begin)

    in_parallel(sum_up, slices)
    for name in files:
        crc = 0
        for _, begin, end in (piece for piece in slices if piece[0] == name):
            crc = crc32c_combine(crc, sums[name, begin], end - begin)
        if crc != manifest.files[name].crc32c:
            raise InvalidFile(f"{place.path_of(name)} is damaged: its checksum is wrong. {AGAIN}")


def mapped(descriptor: int, size_bytes: int, ahead: bool) -> Bytes:
    """Map a file. Unlike Python's own mmap it does not keep the file open: there can be many files."""
    if size_bytes == 0:
        return np.empty(0, np.uint8)
    if ahead:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
    address = _library.mmap(None, size_bytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    owner = (ctypes.c_uint8 * size_bytes).from_address(address)
    weakref.finalize(owner, _library.munmap, address, size_bytes).atexit = False
    return np.asarray(memoryview(owner).cast("B").toreadonly())


def populate_pages(address: int, size_bytes: int, path: str) -> None:
    """Populate a mapping by one system call. It fails on an I/O error, where an access would raise SIGBUS."""
    if advise(address, size_bytes, MADV_POPULATE_READ) not in (0, errno.EINVAL, errno.ENOSYS):
        error = OSError(errno.EIO, os.strerror(errno.EIO))
        raise cannot_open(path, error) from error


def lock_pages(address: int, size_bytes: int, path: str) -> None:
    """As `populate_pages`; they stay in memory, as far as this process may keep them there."""
    populate_pages(address, size_bytes, path)
    _library.mlock(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes))


PathLike: TypeAlias = "str | os.PathLike[str]"
Progress = Callable[[int, int], None]


def reporter(progress: Progress | None) -> Progress:
    """What is told how far something has come. Raises InvalidArgument where that cannot be called."""
    if progress is not None and not callable(progress):
        raise InvalidArgument(f"progress={progress!r} cannot be called: give a function of two numbers")
    return progress or (lambda *_: None)


class Target(NamedTuple):
    """What the native reader reads a file from.

    buffered         descriptor through the page cache, -1 where there is none
    direct           descriptor past it, or the handle of a namespace; -1 where there is none
    alignment_bytes  of what is read by ``direct``
    begin            where the file begins there
    """

    buffered: int
    direct: int
    alignment_bytes: int
    begin: int


class StoreFile(NamedTuple):
    """An open file of a store.

    target     returns what the native reader reads from, in this process. Raises SampleError
    read_into  fills a view with the bytes from a position on, past the page cache where that works. Raises
               OSError
    close      idempotent
    fetched    of a data file in an object store: how its bytes come here
    """

    target: Callable[[], Target]
    read_into: Callable[[int, memoryview], None]
    close: Callable[[], None]
    fetched: Fetched | None = None


class Place(ABC):
    """The place of one store, or of one partition. `places_of` takes its text.

    name       last part of the path
    is_remote  on another machine: there is no page cache, and no path
    hang_text  message where a read hangs: the cause, and what to do
    """

    name: str
    is_remote: bool
    hang_text: str

    @abstractmethod
    def path_of(self, name: str) -> str:
        """The path of a file, for messages."""

    def manifest(self) -> StoreManifest:
        """Raises SampleError where there is none, or it cannot be read; InvalidFile where it is damaged, or
        of another partition than the place is named."""
        manifest = decoded_manifest(self.manifest_text(), self.path_of(MANIFEST))
        named, held = PARTITION.fullmatch(self.name), (manifest.partition, manifest.partitions)
        if named is not None and (int(named[1]), int(named[2])) != held:
            raise InvalidFile(
                f"{self} holds partition {held[0]} of {held[1]}, which its name denies. Rename it"
            )
        return manifest

    @abstractmethod
    def manifest_text(self) -> bytes:
        """The bytes of the manifest; of a file that is too large for one, the first. Raises as `manifest`."""

    @abstractmethod
    def size_bytes(self, name: str) -> int:
        """Size of a file. Raises OSError."""

    @abstractmethod
    def load(self, name: str, wanted_bytes: int, ahead: bool = True) -> Bytes:
        """The bytes of a file of ``wanted_bytes``, read-only. ``ahead``: read all of it now.

        Raises SampleError where it cannot be read, InvalidFile where it is missing, or has another size.
        """

    @abstractmethod
    def open(self, name: str, wanted_bytes: int | None = None) -> StoreFile:
        """Open a file, and check its size where one is given. Raises as `load`."""

    @abstractmethod
    def read_failure(self, error_number: int) -> tuple[str, str]:
        """The cause of a failed read, and what to do."""

    def problems(self) -> Sequence[str]:
        """Texts of problems other than those of its files."""
        return ()

    def close(self) -> None:
        """Close what is open, until it is needed again. Idempotent."""
        return


class StoreFolder(Place):
    """A store in a folder of a file system."""

    is_remote = False
    hang_text = "The disk hangs or is very slow: look at dmesg"

    def __init__(self, path: PathLike) -> None:
        self.path = Path(os.path.abspath(path))  # also after a change of the working directory
        self.name = self.path.name

    def __str__(self) -> str:
        return str(self.path)

    def path_of(self, name: str) -> str:
        return str(self.path / name)

    def manifest_text(self) -> bytes:
        try:
            with reading(self.path / MANIFEST) as raw, BufferedReader(raw) as file:
                # So many bytes are allocated.
                wanted_bytes = min(os.fstat(file.fileno()).st_size, LARGEST_MANIFEST_BYTES) + 1
                text = file.read(wanted_bytes)
                while len(text) == wanted_bytes <= LARGEST_MANIFEST_BYTES:  # some file systems say 0
                    wanted_bytes = min(2 * wanted_bytes, LARGEST_MANIFEST_BYTES + 1)
                    text += file.read(wanted_bytes - len(text))
                return text
        except OSError as error:
            raise cannot_open(self.path, error) from error

    def size_bytes(self, name: str) -> int:
        return os.path.getsize(self.path / name)

    def load(self, name: str, wanted_bytes: int, ahead: bool = True) -> Bytes:
        with self._descriptor(name, wanted_bytes) as descriptor:
            try:
                return mapped(descriptor.fileno(), wanted_bytes, ahead)
            except OSError as error:
                raise cannot_open(self.path_of(name), error) from error

    def open(self, name: str, wanted_bytes: int | None = None) -> StoreFile:
        opened = from_descriptor(self._descriptor(name, wanted_bytes), self.path_of(name))
        return StoreFile(lambda: Target(*opened.file, 0), partial(_read_into, opened), opened.close)

    def read_failure(self, error_number: int) -> tuple[str, str]:
        return disk_failure(error_number)

    def _descriptor(self, name: str, wanted_bytes: int | None) -> Descriptor:
        path = self.path / name
        try:
            descriptor = open_regular(path)
            found_bytes = os.fstat(descriptor.fileno()).st_size
        except FileNotFoundError as error:
            raise InvalidFile(f"{path} is missing, which {MANIFEST} names. {AGAIN}") from error
        except OSError as error:
            raise cannot_open(path, error) from error
        if wanted_bytes is not None:
            check_size(str(path), found_bytes, wanted_bytes, AGAIN)
        return descriptor


def _read_into(opened: OpenFile, position: int, view: memoryview) -> None:
    buffered, direct, alignment_bytes = opened.file
    is_aligned = position % alignment_bytes == 0 and view.nbytes % alignment_bytes == 0
    descriptor = direct if direct >= 0 and is_aligned else buffered
    done = 0
    while done < view.nbytes:
        count = os.preadv(descriptor, [view[done:]], position + done)
        if count == 0:
            raise OSError(0, "it ends there")
        done += count


def places_of(
    path: PathLike | Sequence[PathLike],
    timeout_s: float = DEFAULT_TIMEOUT_S,
    cache: CacheOptions | None = None,
) -> list[Place]:
    """The places of the stores that ``path`` stands for, in order.

    path       a store, the folder in which several processes packed their partitions, the URL of a namespace
               or of objects that either was uploaded to, or a list of such
    timeout_s  longest wait for a target, or a server
    cache      keeps on this machine what comes from object stores

    Raises SampleError where there is no store or a partition is missing, InvalidArgument for an empty list
    and for a URL that is none.
    """
    if isinstance(path, str | os.PathLike):
        if not isinstance(path, str) and was_object_url(path):
            raise InvalidArgument(f"{path} was a URL before it became a path: give it as text")
        if is_object_url(path):
            from penstock.samples.objects.place import object_places

            return object_places(str(path), timeout_s, cache)
        if not is_url(path):
            return [StoreFolder(folder) for folder in _folders_of(Path(path))]
        from penstock.samples.remote.store import remote_places

        return remote_places(path, timeout_s)
    places = [place for each in path for place in places_of(each, timeout_s, cache)]
    if not places:
        raise InvalidArgument("no store was given: give a path or several")
    return places


def partition_names(listed: Sequence[str], where: str) -> list[str]:
    """The names of all partitions, in order, where ``listed`` has some of them; empty where it has none.

    Raises SampleError where they are partitions of several stores.
    """
    partitions: dict[int, set[int]] = {}
    for match in filter(None, map(PARTITION.fullmatch, listed)):
        partitions.setdefault(int(match[2]), set()).add(int(match[1]))
    if not partitions:
        return []
    if len(partitions) > 1:
        counts = " and ".join(str(count) for count in sorted(partitions))
        raise SampleError(
            f"{where} has partitions of {counts}: two packings are mixed. Remove the one that is not wanted"
        )
    ((count, there),) = partitions.items()
    if extra := there - set(range(count)):
        raise SampleError(f"{where} has a partition {max(extra)} of only {count}. Pack it again")
    return [partition_name(partition, count) for partition in range(count)]


def check_whole(where: str, partitions: Sequence[object], missing: Sequence[str], remedy: str) -> None:
    """Raises SampleError where partitions are missing, by their names."""
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise SampleError(
            f"{where} is not whole: of its {len(partitions)} partitions, {', '.join(missing[:5])}{more} "
            f"{'is' if len(missing) == 1 else 'are'} missing or not packed to the end. {remedy}"
        )


def check_size(path: str, size_bytes: int, wanted_bytes: int, remedy: str) -> None:
    """Raises InvalidFile where a file has another size."""
    if size_bytes != wanted_bytes:
        what = "was cut short" if size_bytes < wanted_bytes else "is too long"
        raise InvalidFile(f"{path} {what}: it has {size_bytes} bytes, not {wanted_bytes}. {remedy}")


def _folders_of(folder: Path) -> list[Path]:
    if (folder / MANIFEST).exists():
        return [folder]
    try:
        listed = sorted(os.listdir(folder))
    except OSError as error:
        raise cannot_open(folder, error) from error
    folders = [folder / name for name in partition_names(listed, str(folder))]
    if not folders:
        raise _not_packed(folder, listed)
    missing = [partition.name for partition in folders if not (partition / MANIFEST).exists()]
    check_whole(
        str(folder),
        folders,
        missing,
        "Run pack again for these ranks, or mount a list of the partitions that are there",
    )
    return folders


def _not_packed(folder: Path, listed: Sequence[str]) -> SampleError:
    if DIRECTORY in listed or any(name.startswith("data-") and name.endswith(".bin") for name in listed):
        return SampleError(
            f"{folder} has no {MANIFEST}: packing was not finished. Run pack again, with the same arguments: "
            "it goes on where it stopped"
        )
    return SampleError(
        f"{folder} is not a sample store: {MANIFEST} is missing. Give the folder of a store, or make one: "
        "penstock samples pack SOURCE DEST"
    )
