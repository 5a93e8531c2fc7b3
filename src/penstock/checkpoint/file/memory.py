"""Memory for tensors: their own, or the page cache's."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from pathlib import Path

import torch

from penstock.machine import lines
from penstock.storage.aligned import AlignedBuffer, address_of, align_down, align_up, view_at

_MADV_DONTNEED = 4
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # Linux 5.14
_library = ctypes.CDLL(None, use_errno=True)


class OwnMemory(AlignedBuffer):
    """Zeroed memory that is given out in parts. Raises OSError."""

    def touch(self, begin: int, end: int) -> None:
        """Have the kernel bring in the pages of [begin, end) now, by one call without the GIL."""
        _populate(self.address, begin, end, _MADV_POPULATE_WRITE)  # where it fails, the first use does it

    def part(self, begin: int, end: int) -> memoryview:
        """The bytes [begin, end). When nothing uses them any more, their pages are given back, and
        with the last part the rest."""
        begin, end = begin + self._skipped, end + self._skipped
        part = memoryview(self._mapping)[begin:end]
        low, high = align_up(begin, mmap.PAGESIZE), align_down(end, mmap.PAGESIZE)
        if low < high and hasattr(mmap, "MADV_DONTNEED"):
            give_back = weakref.finalize(part, self._mapping.madvise, mmap.MADV_DONTNEED, low, high - low)
            give_back.atexit = False
        return part


class MappedFile:
    """The first ``size_bytes`` of an open file as copy-on-write memory. Raises OSError.

    address   of the first byte
    """

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        access = mmap.PROT_READ | mmap.PROT_WRITE
        try:
            self._mapping = mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_PRIVATE, prot=access)
        except ValueError as error:  # the file became shorter
            raise OSError(errno.EIO, os.strerror(errno.EIO)) from error
        self.address = address_of(self._mapping)

    def part(self, begin: int, end: int) -> memoryview:
        """The bytes [begin, end). The mapping lives as long as they do."""
        return memoryview(self._mapping)[begin:end]

    def populate(self, begin: int, end: int) -> None:
        """Bring the bytes in by one call, which fails where touching them would end the process.

        Raises OSError.
        """
        # EINVAL is of a kernel that does not know the advice.
        if _populate(self.address, begin, end, _MADV_POPULATE_READ) not in (0, errno.EINVAL):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def release_pages(self, begin: int, end: int) -> None:
        """Give the pages that lie in [begin, end) back to the page cache: they can be read again."""
        _release_pages(self.address + begin, self.address + end)


class Mappings:
    """Where an open file lies in memory that somebody else has mapped, and nobody writes to."""

    def __init__(self, descriptor: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        fields = (line.split(maxsplit=5) for line in lines(Path("/proc/self/maps")))
        self._ranges = [
            [int(address, 16) for address in found[0].split("-")] for found in fields if found[5:] == [name]
        ]

    def release_pages(self, address: int, size_bytes: int) -> None:
        """Give these bytes back to the page cache, if they are the file's: they can be read again."""
        end = address + size_bytes
        if any(first <= address and end <= last for first, last in self._ranges):
            _release_pages(address, end)


def _release_pages(begin: int, end: int) -> None:
    low, high = align_up(begin, mmap.PAGESIZE), align_down(end, mmap.PAGESIZE)
    if low < high:
        _library.madvise(ctypes.c_void_p(low), ctypes.c_size_t(high - low), _MADV_DONTNEED)


def _populate(address: int, begin: int, end: int, advice: int) -> int:
    """Bring in the pages of [begin, end) from the address on, without the GIL. Gives 0, or an errno."""
    low, high = align_down(begin, mmap.PAGESIZE), align_up(end, mmap.PAGESIZE)
    failed = _library.madvise(ctypes.c_void_p(address + low), ctypes.c_size_t(high - low), advice)
    return ctypes.get_errno() if failed else 0


def is_on_host(tensor: torch.Tensor) -> bool:
    """Its bytes are in the memory of the CPU."""
    return tensor.device.type == "cpu"


def host_bytes(address: int, size_bytes: int) -> torch.Tensor:
    """The bytes at ``address`` as a tensor. The caller keeps the memory alive."""
    return torch.frombuffer(view_at(address, size_bytes, writable=True), dtype=torch.uint8)


def tensor_of(part: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The bytes of ``part`` as a tensor whose storage is exactly these bytes."""
    if not part.nbytes:
        return torch.empty(shape, dtype=dtype)
    data = torch.frombuffer(part, dtype=torch.uint8)
    if data.data_ptr() % dtype.itemsize:  # a file of another writer: some kernels need aligned elements
        data = data.clone()
    return data.view(dtype).view(shape)
