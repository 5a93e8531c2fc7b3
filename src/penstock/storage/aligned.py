"""Memory at a known address: aligned buffers of our own, views of other people's, and rounding."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

HUGE_PAGE_BYTES = 2 << 20
_MAP_NORESERVE = 0x4000  # <linux/mman.h>; Python has no name for it, nor for the next ones
MADV_WIPEONFORK = 18
MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23  # Linux 5.14

_PYBUF_READ, _PYBUF_WRITE = 0x100, 0x200
_memory_view = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_memory_view.restype = ctypes.py_object
_library = ctypes.CDLL(None, use_errno=True)


def align_down(value: int, alignment_bytes: int) -> int:
    """The largest multiple of ``alignment_bytes`` that is not above ``value``."""
    return value // alignment_bytes * alignment_bytes


def align_up(value: int, alignment_bytes: int) -> int:
    """The smallest multiple of ``alignment_bytes`` that is not below ``value``."""
    return -(-value // alignment_bytes) * alignment_bytes


def view_at(address: int, size_bytes: int, writable: bool) -> memoryview:
    """The bytes at ``address``. The caller keeps the memory alive while the view is used."""
    view: memoryview = _memory_view(address, size_bytes, _PYBUF_WRITE if writable else _PYBUF_READ)
    return view


def advise(address: int, size_bytes: int, advice: int) -> int:
    """Tell the kernel how whole pages are used, without the GIL. Returns 0, or an errno."""
    failed = _library.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), advice)
    return ctypes.get_errno() if failed else 0


def address_of(mapping: mmap.mmap) -> int:
    """Of its first byte. The mapping must be writable."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


class AlignedBuffer:
    """Zeroed memory of its own, in huge pages where the system has them. Freed with the object.

    address      of the first byte, a multiple of 2 MiB
    size_bytes   as asked for

    inherited   processes made by fork have its bytes too; else they have zeros there
    reserved    False: there may be more of it than the system has memory, of which little is to be used
    """

    def __init__(self, size_bytes: int, *, inherited: bool = True, reserved: bool = True) -> None:
        # Private: memory that could be shared gets no huge pages.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (0 if reserved else _MAP_NORESERVE)
        self._mapping = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, flags=flags)
        start = address_of(self._mapping)
        self.address = align_up(start, HUGE_PAGE_BYTES)
        self.size_bytes = size_bytes
        self._skipped = self.address - start
        if not inherited:
            # Not MADV_DONTFORK: in the child its end would unmap whatever has come to lie there.
            with contextlib.suppress(OSError):  # a kernel before 4.14
                self._mapping.madvise(MADV_WIPEONFORK)
        whole_bytes = align_down(size_bytes, HUGE_PAGE_BYTES)  # a huge page at the end would waste memory
        if whole_bytes:
            with contextlib.suppress(OSError):  # a kernel without huge pages: small ones serve
                self._mapping.madvise(mmap.MADV_HUGEPAGE, self._skipped, whole_bytes)

    def discard(self) -> None:
        """Give the memory to the system. Who still uses it finds zeros."""
        self._mapping.madvise(mmap.MADV_DONTNEED)

    def view(self) -> memoryview:
        """All bytes, writable. It keeps the memory."""
        return memoryview(self._mapping)[self._skipped : self._skipped + self.size_bytes]
