"""Files of a store as memory, and verified. Those of a folder are mapped: all processes of the machine share
them."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.errors import InvalidFile
from penstock.samples.format.layout import MANIFEST
from penstock.samples.format.manifest import AGAIN, StoreManifest
from penstock.samples.reader.failures import cannot_open, open_sized
from penstock.storage.checksum import crc32c_at, crc32c_combine
from penstock.storage.threads import in_parallel

if TYPE_CHECKING:
    from penstock.samples.reader.places import Place

Bytes: TypeAlias = npt.NDArray[np.uint8]

_SLICE_BYTES = 32 << 20  # what one thread verifies at a time
_MADV_POPULATE_READ = 22  # Linux 5.14

_library = ctypes.CDLL(None, use_errno=True)
_library.mmap.restype = ctypes.c_void_p
_library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class LoadedFiles(Mapping[str, Bytes]):
    """Bytes of files, mapped or read when they are first asked for."""

    def __init__(
        self, place: Place, manifest: StoreManifest, verify: bool, together: Sequence[str] = ()
    ) -> None:
        """together: files of which all are loaded, and verified, when one is asked for."""
        self._place, self._manifest, self._verify, self._together = place, manifest, verify, together
        self._loaded: dict[str, Bytes] = {}

    def __getitem__(self, name: str) -> Bytes:
        if name not in self._loaded:
            self._manifest.files[name]  # KeyError
            self.load(self._together if name in self._together else [name])
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._manifest.files)

    def __len__(self) -> int:
        return len(self._manifest.files)

    def load(self, names: Sequence[str]) -> None:
        """Load files, and verify them together. Two threads may both do it: a lock could outlive a fork."""
        fresh = {name: self._load(name) for name in names if name not in self._loaded}
        if self._verify:
            check_sums(self._place, self._manifest, fresh)
        self._loaded |= fresh

    def _load(self, name: str) -> Bytes:
        wanted_bytes = self._manifest.files[name].size_bytes
        return self._place.load(name, wanted_bytes, f", which {MANIFEST} names", ahead=self._verify)


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
        _bring_in(address, end - begin, place.path_of(name))
        sums[name, begin] = crc32c_at(address, end - begin)

    in_parallel(sum_up, slices)
    for name in files:
        crc = 0
        for _, begin, end in (piece for piece in slices if piece[0] == name):
            crc = crc32c_combine(crc, sums[name, begin], end - begin)
        if crc != manifest.files[name].crc32c:
            raise InvalidFile(f"{place.path_of(name)} is damaged: its checksum is wrong. {AGAIN}")


def mapped(path: Path, wanted_bytes: int, missing: str, ahead: bool) -> Bytes:
    """The file's bytes, mapped.

    wanted_bytes  that it must have
    missing       what its absence means, for the error
    ahead         all of it will be read soon

    Raises SampleError where it cannot be opened, InvalidFile where it is not there, or not of this size.
    """
    descriptor = open_sized(path, wanted_bytes, missing)
    try:
        return _map(descriptor, wanted_bytes, ahead)
    except OSError as error:
        raise cannot_open(path, error) from error
    finally:
        os.close(descriptor)


def _map(descriptor: int, size_bytes: int, ahead: bool) -> Bytes:
    """The file's bytes. The file is not kept open, as Python's own mapping would: there can be many files."""
    if size_bytes == 0:
        return np.empty(0, np.uint8)
    if ahead and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
    address = _library.mmap(None, size_bytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    owner = (ctypes.c_uint8 * size_bytes).from_address(address)
    weakref.finalize(owner, _library.munmap, address, size_bytes).atexit = False
    data: Bytes = np.frombuffer(memoryview(owner).cast("B"), np.uint8)
    data.flags.writeable = False
    return data


def _bring_in(address: int, size_bytes: int, path: str) -> None:
    """Have the kernel map the pages by one call, which fails where touching them would end the process."""
    arguments = ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), _MADV_POPULATE_READ
    if _library.madvise(*arguments) and ctypes.get_errno() not in (errno.EINVAL, errno.ENOSYS):
        error = OSError(errno.EIO, os.strerror(errno.EIO))
        raise cannot_open(path, error) from error
