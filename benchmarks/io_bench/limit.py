"""What the disk gives at most: a loop of our own (limit.cpp), and fio."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from io_bench.formats import Unavailable
from io_bench.measure import Sample
from io_bench.rows import IN_FLIGHT, KINDS, Place, Row

MIB = 1 << 20
LIMIT = "limit"  # the best of the rows whose name begins so


@lru_cache
def library() -> ctypes.CDLL:
    """limit.cpp, compiled. Raises Unavailable without a compiler."""
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        raise Unavailable("there is no C++ compiler: install c++, or set CXX")
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "limit.so"
        source = Path(__file__).with_name("limit.cpp")
        options = ["-std=c++17", "-O2", "-shared", "-fPIC"]
        made = subprocess.run(
            [compiler, *options, "-o", built, source], capture_output=True, text=True, check=False
        )
        if made.returncode:
            raise Unavailable(f"limit.cpp cannot be compiled: {made.stderr.strip()}")
        loaded = ctypes.CDLL(str(built))
    pointer, number = ctypes.c_void_p, ctypes.c_uint64
    loaded.limit_open.argtypes = [ctypes.POINTER(pointer)]
    loaded.limit_close.argtypes = [pointer]
    loaded.limit_move.argtypes = [
        pointer, ctypes.c_int, ctypes.c_int, number, pointer, number, number, ctypes.c_uint
    ]  # fmt: skip
    loaded.limit_move_each.argtypes = [
        pointer, ctypes.c_int, ctypes.c_int, number, pointer, number, ctypes.c_uint, number, ctypes.c_uint
    ]  # fmt: skip
    return loaded


class Limit(Row):
    """A raw io_uring loop between huge pages and a preallocated file that was written before."""

    request_bytes: ClassVar[int]
    depth: ClassVar[int]
    does = "a raw io_uring loop: huge pages, O_DIRECT, one preallocated file that was written before"
    kinds = (*KINDS, *IN_FLIGHT)
    bypasses = True

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._library = library()
        self._ring = ctypes.c_void_p()
        self._check(self._library.limit_open(ctypes.byref(self._ring)))
        self._descriptor = os.open(place.file, os.O_RDWR | os.O_DIRECT)

    def write(self, durable: bool) -> None:
        if not durable:
            self._move_each(True, 0, len(self.tensors.tensors))
            return
        for index in range(len(self.tensors.tensors)):
            self._move_each(True, index, 1)
            os.fdatasync(self._descriptor)

    def read(self) -> list[Tensor]:
        self._move_each(False, 0, len(self.tensors.tensors))
        return self.tensors.destinations

    def write_in_flight(self) -> None:
        self._move_all(True)

    def read_in_flight(self) -> list[Tensor]:
        self._move_all(False)
        return self.tensors.destinations

    def close(self) -> None:
        self._library.limit_close(self._ring)
        os.close(self._descriptor)

    def _memory(self, write: bool) -> int:
        return (self.tensors.source if write else self.tensors.destination).address

    def _move_each(self, write: bool, first: int, count: int) -> None:
        size_bytes = self.tensors.sizes_bytes[0]
        begin = first * size_bytes
        self._check(
            self._library.limit_move_each(
                self._ring,
                write,
                self._descriptor,
                begin,
                self._memory(write) + begin,
                size_bytes,
                count,
                self.request_bytes,
                self.depth,
            )
        )

    def _move_all(self, write: bool) -> None:
        self._check(
            self._library.limit_move(
                self._ring,
                write,
                self._descriptor,
                0,
                self._memory(write),
                self.tensors.total_bytes,
                min(self.request_bytes, self.tensors.sizes_bytes[0]),
                self.depth,
            )
        )

    @staticmethod
    def _check(result: int) -> None:
        if result < 0:
            raise OSError(-result, os.strerror(-result))


class Limit1MiB(Limit):
    name = f"{LIMIT}, 1 MiB x 8"
    request_bytes, depth = MIB, 8


class Limit4MiB(Limit):
    name = f"{LIMIT}, 4 MiB x 32"
    request_bytes, depth = 4 * MIB, 32


class Fio(Row):
    name = "fio"
    does = (
        "direct=1, io_uring, on the same file, its queue full throughout: 8 requests of 1 MiB, or one of "
        "the tensor's size where that is less. Its memory is in ordinary pages, which understate the device"
    )
    kinds = ("write", "cold read")
    bypasses = True

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        if shutil.which("fio") is None:
            raise Unavailable("fio is not installed")

    def write(self, durable: bool) -> Sample:
        return self._run("write")

    def read(self) -> Sample:
        return self._run("read")

    def _run(self, kind: str) -> Sample:
        """The time that fio says, for as many bytes as the other rows move."""
        size_bytes, total_bytes = self.tensors.sizes_bytes[0], self.tensors.total_bytes
        most_bytes = (64 if self.place.quick else 512) * MIB
        loops = max(1, most_bytes // total_bytes)  # it counts in milliseconds
        depth = 8 if size_bytes >= 8 * MIB else max(1, size_bytes // MIB)
        command = [
            "fio", "--name=fio", f"--filename={self.place.file}", f"--rw={kind}", "--direct=1",
            "--ioengine=io_uring", f"--bs={min(size_bytes, MIB)}", f"--iodepth={depth}",
            f"--size={total_bytes}", f"--loops={loops}", "--fallocate=none", "--invalidate=0",
            "--thread", "--output-format=json",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"fio failed: {done.stderr.strip() or done.stdout.strip()}")
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        wall_s = total_bytes / job[kind]["bw_bytes"]
        return Sample(wall_s, wall_s * (job["usr_cpu"] + job["sys_cpu"]) / 100)


LIMITS: dict[str, type[Row]] = {row.name: row for row in (Limit1MiB, Limit4MiB, Fio)}
