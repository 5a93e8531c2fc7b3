"""What the device gives to fio and to a raw io_uring loop, and memory to a copy."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import statistics
import subprocess
import time
from pathlib import Path

import numpy as np
from io_bench.formats import Unavailable
from io_bench.limit import library

from penstock.storage.aligned import AlignedBuffer

WINDOW_BYTES = 64 << 20


def fio(file: Path, size_bytes: int, sequential: bool, seconds: float) -> float | None:
    """Bytes per second of direct reads of ``size_bytes`` at a depth of 32; None without fio."""
    program = shutil.which("fio")
    if program is None:
        return None
    command = [program, "--name=limit", f"--filename={file}", "--readonly", "--direct=1"]
    command += ["--ioengine=io_uring", "--iodepth=32", f"--rw={'read' if sequential else 'randread'}"]
    command += [f"--bs={size_bytes}", f"--runtime={seconds}", "--time_based", "--output-format=json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 60, check=True)
    return float(json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"])


def sequential(file: Path, seconds: float) -> float | None:
    """Bytes per second of reading ``file`` from its beginning, past the page cache, into huge pages.

    Eight requests of 1 MiB at once; the median over windows. None without a compiler.
    """
    try:
        limit = library()
    except Unavailable:
        return None
    memory = AlignedBuffer(WINDOW_BYTES)
    memory.view()[:] = bytes(WINDOW_BYTES)
    whole = file.stat().st_size // WINDOW_BYTES * WINDOW_BYTES
    ring = ctypes.c_void_p()
    if whole == 0 or limit.limit_open(ctypes.byref(ring)) < 0:
        return None
    descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
    rates, offset, end_s = [], 0, time.perf_counter() + seconds
    try:
        while time.perf_counter() < end_s:
            begun_s = time.perf_counter()
            moved = limit.limit_move(ring, 0, descriptor, offset, memory.address, WINDOW_BYTES, 1 << 20, 8)
            if moved < 0:
                raise OSError(-moved, os.strerror(-moved))
            rates.append(WINDOW_BYTES / (time.perf_counter() - begun_s))
            offset = (offset + WINDOW_BYTES) % whole
    finally:
        limit.limit_close(ring)
        os.close(descriptor)
    return statistics.median(rates)


def copy(size_bytes: int, total_bytes: int, seconds: float) -> float:
    """Bytes per second of copies of ``size_bytes`` from random places of memory: numpy's take, one thread."""
    rows = max(2, min(total_bytes, 256 << 20) // size_bytes)
    source = np.ones((rows, size_bytes), dtype=np.uint8)
    picked = np.random.default_rng(0).permutation(rows)[: max(1, (4 << 20) // size_bytes)]
    target = np.empty((len(picked), size_bytes), dtype=np.uint8)
    moved, begun_s = 0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - begun_s) < seconds:
        np.take(source, picked, axis=0, out=target, mode="clip")
        moved += target.nbytes
    return moved / elapsed_s
