"""What the device gives to fio, and memory to a copy."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np


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
