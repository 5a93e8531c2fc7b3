"""How much of an open file the page cache holds."""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np

_CACHESTAT = 451  # the same number on every architecture, Linux 6.5

# A large file is asked about in this many places, of so many bytes each: to walk over all its pages takes
# milliseconds.
_SAMPLES, _SAMPLE_BYTES = 64, 64 << 10

_library = ctypes.CDLL(None)


def cached_share(descriptor: int) -> float:
    """About the share of an open file that the page cache holds, 0 to 1. 0 where the system does not say."""
    try:
        size_bytes = os.fstat(descriptor).st_size
    except OSError:
        return 0.0
    if not size_bytes:
        return 0.0
    samples = [(0, size_bytes)]
    if size_bytes > _SAMPLES * _SAMPLE_BYTES:
        step = size_bytes // _SAMPLES // mmap.PAGESIZE * mmap.PAGESIZE
        samples = [(begin, min(_SAMPLE_BYTES, size_bytes - begin)) for begin in range(0, size_bytes, step)]
    pages = sum(-(-asked_bytes // mmap.PAGESIZE) for _, asked_bytes in samples)
    cached = _ask_cachestat(descriptor, samples)
    return (_ask_mincore(descriptor, samples) if cached is None else cached) / pages


def _ask_cachestat(descriptor: int, samples: list[tuple[int, int]]) -> int | None:
    """Pages of the samples, each where it begins and its bytes. None: the system cannot say it so."""
    cached = 0
    for begin, asked_bytes in samples:
        sample, answer = (ctypes.c_uint64 * 2)(begin, asked_bytes), (ctypes.c_uint64 * 5)()
        if _library.syscall(ctypes.c_long(_CACHESTAT), descriptor, sample, answer, 0):
            return None
        cached += answer[0]  # then those that are dirty, written back, evicted, evicted recently
    return cached


def _ask_mincore(descriptor: int, samples: list[tuple[int, int]]) -> int:
    cached = 0
    with mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ) as mapping:
        address = np.frombuffer(mapping, np.uint8).ctypes.data
        for begin, asked_bytes in samples:
            answer = np.zeros(-(-asked_bytes // mmap.PAGESIZE), np.uint8)
            arguments = ctypes.c_void_p(address + begin), ctypes.c_size_t(asked_bytes)
            if _library.mincore(*arguments, ctypes.c_void_p(answer.ctypes.data)):
                return 0
            cached += int(np.count_nonzero(answer & 1))
    return cached
