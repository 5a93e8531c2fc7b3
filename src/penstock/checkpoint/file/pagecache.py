"""How much of a file the page cache holds."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys

import numpy as np

_CACHESTAT = 451  # the same number on every architecture, Linux 6.5

# A file is asked about in this many places, of so many bytes each: to walk over all pages of a large
# one takes milliseconds.
_SAMPLES, _SAMPLE_BYTES = 64, 64 << 10

_library = ctypes.CDLL(None, use_errno=True)


def cached_share(descriptor: int) -> float:
    """About the share of an open file that the page cache holds, 0 to 1. 0 where the system does not say."""
    size_bytes = os.fstat(descriptor).st_size
    if size_bytes == 0 or not sys.platform.startswith("linux"):
        return 0.0
    step = max(_SAMPLE_BYTES, size_bytes // _SAMPLES // mmap.PAGESIZE * mmap.PAGESIZE)
    samples = [(begin, min(begin + _SAMPLE_BYTES, size_bytes)) for begin in range(0, size_bytes, step)]
    pages = sum(-(-(end - begin) // mmap.PAGESIZE) for begin, end in samples)
    cached = _ask_cachestat(descriptor, samples)
    if cached is None:
        cached = _ask_mincore(descriptor, size_bytes, samples)
    return min(1.0, cached / pages)


def _ask_cachestat(descriptor: int, samples: list[tuple[int, int]]) -> int | None:
    cached = 0
    for begin, end in samples:
        sample, answer = (ctypes.c_uint64 * 2)(begin, end - begin), (ctypes.c_uint64 * 5)()
        arguments = ctypes.byref(sample), ctypes.byref(answer), ctypes.c_uint(0)
        if _library.syscall(ctypes.c_long(_CACHESTAT), ctypes.c_uint(descriptor), *arguments):
            return None
        cached += answer[0]  # then those that are dirty, written back, evicted, evicted recently
    return cached


def _ask_mincore(descriptor: int, size_bytes: int, samples: list[tuple[int, int]]) -> int:
    cached = 0
    with mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ) as mapping:
        address = int(np.frombuffer(mapping, np.uint8).ctypes.data)
        for begin, end in samples:
            answer = np.empty(-(-(end - begin) // mmap.PAGESIZE), np.uint8)
            arguments = ctypes.c_void_p(address + begin), ctypes.c_size_t(end - begin)
            if _library.mincore(*arguments, ctypes.c_void_p(answer.ctypes.data)):
                return 0
            cached += int(np.count_nonzero(answer & 1))
    return cached
