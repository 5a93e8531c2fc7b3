"""Where a store lies: in a folder, or on a drive of another machine."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

from penstock.errors import InvalidArgument, InvalidFile, SampleError
from penstock.samples.format import manifest as manifests
from penstock.samples.format.layout import DIRECTORY, MANIFEST, PARTITION, partition_name
from penstock.samples.format.manifest import StoreManifest, open_regular
from penstock.samples.reader.failures import cannot_open, disk_failure, open_sized
from penstock.samples.reader.mapping import Bytes, mapped
from penstock.storage.checksum import crc32c
from penstock.storage.files import OpenFile, from_descriptor
from penstock.storage.nvme import DEFAULT_TIMEOUT_S, is_url

PathLike: TypeAlias = "str | os.PathLike[str]"

_READ_BYTES = 4 << 20


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


class StoreFile(Protocol):
    """An open file of a store."""

    @property
    def target(self) -> Target: ...

    def read_into(self, position: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes from ``position`` on, past the page cache where that works.

        Raises OSError.
        """

    def close(self) -> None:
        """Idempotent."""


class Place(Protocol):
    """Where the files of one store lie; of several partitions, those of one. As text, what `place_of` takes.

    name       its last part
    is_remote  on another machine: there is no page cache, and no path
    """

    @property
    def name(self) -> str: ...
    @property
    def is_remote(self) -> bool: ...

    def path_of(self, name: str) -> str:
        """What messages call the file of that name."""

    def manifest(self) -> StoreManifest:
        """Raises SampleError where there is none, or it cannot be read; InvalidFile where it is damaged."""

    def size_bytes(self, name: str) -> int:
        """Of a file. Raises OSError."""

    def sum_of(self, name: str) -> int:
        """CRC-32C of a file. Raises OSError, InvalidFile."""

    def load(self, name: str, wanted_bytes: int, missing: str, ahead: bool) -> Bytes:
        """The bytes of a file that must have so many, read-only.

        missing  what its absence means, for the error
        ahead    all of it will be read soon

        Raises SampleError where it cannot be read, InvalidFile where it is not there, or not of this size.
        """

    def open(self, name: str, wanted_bytes: int | None, missing: str) -> StoreFile:
        """A file that must have so many bytes, if that is said. Raises as `load`."""

    def read_failure(self, error_number: int) -> tuple[str, str]:
        """Why a read has failed, and what to do."""

    def hang_text(self) -> str:
        """What it means where a read does not end, and what to do."""

    def problems(self) -> Sequence[str]:
        """What is wrong there, apart from the files, in words."""

    def close(self) -> None:
        """Let go of what is open, until it is needed again. Idempotent."""


class Folder:
    """A store in a folder of a file system. Satisfies Place."""

    is_remote = False

    def __init__(self, path: PathLike) -> None:
        self.path = Path(os.path.abspath(path))  # also after a change of the working directory

    @property
    def name(self) -> str:
        return self.path.name

    def __str__(self) -> str:
        return str(self.path)

    def path_of(self, name: str) -> str:
        return str(self.path / name)

    def manifest(self) -> StoreManifest:
        try:
            manifest = manifests.read(self.path)
        except OSError as error:
            raise _no_store(self.path, error) from error
        check_partition(manifest, self.path.name, str(self))
        return manifest

    def size_bytes(self, name: str) -> int:
        return os.path.getsize(self.path / name)

    def sum_of(self, name: str) -> int:
        crc = 0
        with open(open_regular(self.path / name), "rb", buffering=0) as file:
            while block := file.read(_READ_BYTES):
                crc = crc32c(block, crc)
        return crc

    def load(self, name: str, wanted_bytes: int, missing: str, ahead: bool) -> Bytes:
        return mapped(self.path / name, wanted_bytes, missing, ahead)

    def open(self, name: str, wanted_bytes: int | None, missing: str) -> StoreFile:
        path = self.path / name
        if wanted_bytes is not None:
            return _LocalFile(from_descriptor(open_sized(path, wanted_bytes, missing), str(path)))
        try:
            return _LocalFile(from_descriptor(open_regular(path), str(path)))
        except OSError as error:
            raise cannot_open(path, error) from error

    def read_failure(self, error_number: int) -> tuple[str, str]:
        return disk_failure(error_number)

    def hang_text(self) -> str:
        return "The disk hangs or is very slow: look at dmesg"

    def problems(self) -> Sequence[str]:
        return ()

    def close(self) -> None:
        pass


class _LocalFile:
    """Satisfies StoreFile."""

    def __init__(self, opened: OpenFile) -> None:
        self._opened = opened

    @property
    def target(self) -> Target:
        return Target(*self._opened.file, 0)

    def read_into(self, position: int, view: memoryview) -> None:
        file, end = self._opened.file, position + view.nbytes
        descriptor = file.buffered
        if file.direct >= 0 and position % file.alignment_bytes == 0 and end % file.alignment_bytes == 0:
            descriptor = file.direct
        done = 0
        while done < view.nbytes:
            count = os.preadv(descriptor, [view[done:]], position + done)
            if count == 0:
                raise OSError(0, "it ends there")
            done += count

    def close(self) -> None:
        self._opened.close()


def place_of(path: PathLike, timeout_s: float = DEFAULT_TIMEOUT_S) -> Place:
    """The place at a path, or of a URL.

    timeout_s  longest wait for a target

    Raises SampleError where a namespace has no store; InvalidArgument for a URL that is none, or names a
    namespace with several partitions.
    """
    if not is_url(path):
        return Folder(path)
    (place, *more) = _remote_places(path, timeout_s)
    if more:
        raise InvalidArgument(f"{path} has {len(more) + 1} partitions: name one, such as {place}")
    return place


def places_of(
    path: PathLike | Sequence[PathLike], whole: bool = True, timeout_s: float = DEFAULT_TIMEOUT_S
) -> list[Place]:
    """The places of the stores that ``path`` stands for, in order.

    path       a store, the folder in which several processes packed their partitions, the URL of a namespace
               that either was uploaded to, or a list of such
    whole      all partitions must be there
    timeout_s  longest wait for a target

    Raises SampleError where there is no store or a partition is missing, InvalidArgument for an empty list
    and for a URL that is none.
    """
    if isinstance(path, str | os.PathLike):
        if not is_url(path):
            return [Folder(folder) for folder in _folders_of(Path(path), whole)]
        return _remote_places(path, timeout_s)
    places = [place for each in path for place in places_of(each, whole, timeout_s)]
    if not places:
        raise InvalidArgument("no store was given: give a path or several")
    return places


def _remote_places(url: PathLike, timeout_s: float) -> list[Place]:
    from penstock.samples.remote.place import RemotePlace, remote_store  # it needs this module

    store, partition = remote_store(url, timeout_s)
    return [RemotePlace(store, partition)] if partition else list(store.places())


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


def check_partition(manifest: StoreManifest, name: str, where: str) -> None:
    """Raises InvalidFile where a partition's name is not what its manifest says."""
    if (match := PARTITION.fullmatch(name)) and (int(match[1]), int(match[2])) != (
        manifest.partition,
        manifest.partitions,
    ):
        raise InvalidFile(
            f"{where} holds partition {manifest.partition} of {manifest.partitions}, which its name denies. "
            "Rename it"
        )


def _folders_of(folder: Path, whole: bool) -> list[Path]:
    if (folder / MANIFEST).exists():
        return [folder]
    try:
        listed = sorted(os.listdir(folder))
    except OSError as error:
        raise _no_store(folder, error) from error
    folders = [folder / name for name in partition_names(listed, str(folder))]
    if not folders:
        raise _not_packed(folder, listed)
    if not whole:
        return [partition for partition in folders if (partition / MANIFEST).exists()]
    if missing := [partition.name for partition in folders if not (partition / MANIFEST).exists()]:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise SampleError(
            f"{folder} is not whole: of its {len(folders)} partitions, {', '.join(missing[:5])}{more} "
            f"{'is' if len(missing) == 1 else 'are'} missing or not packed to the end. Run pack again for "
            "these ranks, or mount a list of the partitions that are there"
        )
    return folders


def _no_store(folder: Path, error: OSError) -> SampleError:
    if error.errno in (errno.ENOENT, errno.ENOTDIR) and folder.is_dir():
        return _not_packed(folder, os.listdir(folder))
    return cannot_open(folder, error)


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
