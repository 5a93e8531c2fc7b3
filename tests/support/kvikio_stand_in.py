"""What penstock uses of kvikio, on memory that the host can reach: for machines without a GPU.

It moves bytes as kvikio does without its compatibility mode: ranges of less than `gds_threshold` by their
own bytes through the page cache, others by whole blocks past it. What it says when something fails is
kvikio's wording.
"""

from __future__ import annotations

import enum
import errno
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from penstock.storage.aligned import AlignedBuffer, align_down, align_up, view_at

BLOCK = 4096


class CompatMode(enum.IntEnum):
    OFF = 0
    ON = 1
    AUTO = 2


class StandIn:
    """Put in the place of kvikio by `install`. Change its attributes to make a machine of another kind.

    driver             of cuFile, as kvikio.cufile_driver.get tells it
    driver_error       why it cannot be opened, None where it can
    settings           as kvikio.defaults.get tells them
    compatible         whether kvikio prefers its compatibility mode
    refusal            why files cannot be registered, None where they can
    move_error         the errno that reads and writes fail with, 0 for none
    short_bytes        most bytes that are moved at once
    registered         paths registered so far
    open_files         of which so many are still open

    reached            where the host finds what lies at an address
    """

    def __init__(self, reached: Callable[[int], int] = int) -> None:
        self.reached = reached
        self.driver: dict[str, Any] = {"is_gds_available": True, "allow_compat_mode": True}
        self.driver_error: str | None = None
        self.settings: dict[str, Any] = {
            "compat_mode": CompatMode.AUTO,
            "num_threads": 1,
            "gds_threshold": 16 << 10,
        }
        self.compatible = False
        self.refusal: str | None = None
        self.move_error = 0
        self.short_bytes = 1 << 40
        self.registered: list[str] = []
        self.open_files = 0
        self.pool = ThreadPoolExecutor(8, "kvikio-stand-in")

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Also have the machine look like one with a CUDA device."""
        kvikio, defaults, driver = map(
            types.ModuleType, ("kvikio", "kvikio.defaults", "kvikio.cufile_driver")
        )
        vars(kvikio).update(CompatMode=CompatMode, CuFile=self._open, defaults=defaults, cufile_driver=driver)
        vars(defaults).update(
            get=self.settings.__getitem__, set=self._set, is_compat_mode_preferred=lambda: self.compatible
        )
        vars(driver).update(get=self.driver.__getitem__, driver_open=self._open_driver)
        for module in (kvikio, defaults, driver):
            patch.setitem(sys.modules, module.__name__, module)
        patch.setattr(torch.cuda, "is_available", lambda: True)

    def _open(self, path: str, flags: str) -> _File:
        return _File(self, path, flags)

    def _open_driver(self) -> None:
        if self.driver_error is not None:
            raise RuntimeError(self.driver_error)

    def _set(self, name: str, value: Any) -> Any:
        """At once, as kvikio does; leaving the context undoes it."""
        before = self.settings[name]
        self.settings[name] = value

        @contextmanager
        def undone() -> Iterator[None]:
            try:
                yield
            finally:
                self.settings[name] = before

        return undone()


class _File:
    def __init__(self, kvikio: StandIn, path: str, flags: str) -> None:
        self._kvikio = kvikio
        self._buffered = self._direct = -1
        assert kvikio.settings["compat_mode"] == CompatMode.OFF, "kvikio would fall back without a word"
        if kvikio.refusal is not None:
            raise RuntimeError(f"cuFile error at: compat_mode_manager.cpp:80: {kvikio.refusal}")
        mode = {"r": os.O_RDONLY, "r+": os.O_RDWR}[flags]
        self._buffered = os.open(path, mode)
        try:
            self._direct = os.open(path, mode | os.O_DIRECT)
        except OSError as error:
            raise RuntimeError(f"Unable to open file. {error.strerror}") from error
        kvikio.registered.append(path)
        kvikio.open_files += 1

    def __del__(self) -> None:
        if self._direct >= 0:
            self._kvikio.open_files -= 1
        for descriptor in (self._buffered, self._direct):
            if descriptor >= 0:
                os.close(descriptor)

    def pwrite(self, buf: Any, size: int, file_offset: int, task_size: int) -> _IOFuture:
        return self._start(True, buf, size, file_offset, task_size)

    def pread(self, buf: Any, size: int, file_offset: int, task_size: int) -> _IOFuture:
        return self._start(False, buf, size, file_offset, task_size)

    def _start(self, writes: bool, buf: Any, size: int, offset: int, task_size: int) -> _IOFuture:
        interface: Mapping[str, Any] = buf.__cuda_array_interface__
        address, readonly = interface["data"]
        assert interface["shape"] == (size,) and interface["typestr"] == "|u1" and not readonly
        assert task_size >= size, "of several tasks, some outlive the error of another"
        move = self._small if size < self._kvikio.settings["gds_threshold"] else self._blocks
        return _IOFuture(self._kvikio.pool.submit(self._move, move, writes, address, size, offset))

    def _move(self, move: Any, writes: bool, address: int, size: int, offset: int) -> int:
        if error := self._kvikio.move_error:
            told = os.strerror(error if writes else errno.EPERM)
            raise RuntimeError(f"cuFile error at: file_handle.cpp:230: {told}")
        memory = view_at(self._kvikio.reached(address), size, writable=not writes)
        moved: int = move(writes, memory[: self._kvikio.short_bytes], offset)
        return moved

    def _small(self, writes: bool, memory: memoryview, offset: int) -> int:
        if writes:
            return os.pwrite(self._buffered, memory, offset)
        moved = os.preadv(self._buffered, [memory], offset)
        if moved < len(memory):
            raise RuntimeError("POSIX error on pread: EOF")
        return moved

    def _blocks(self, writes: bool, memory: memoryview, offset: int) -> int:
        low, high = align_down(offset, BLOCK), align_up(offset + len(memory), BLOCK)
        blocks = AlignedBuffer(high - low)
        view = blocks.view()
        if not writes or low != offset or high != offset + len(memory):
            found = max(os.preadv(self._direct, [view], low) - (offset - low), 0)
        begin = offset - low
        if writes:
            view[begin : begin + len(memory)] = memory
            os.pwrite(self._direct, view, low)
            return len(memory)
        moved = min(found, len(memory))
        memory[:moved] = view[begin : begin + moved]
        return moved


class _IOFuture:
    def __init__(self, future: Future[int]) -> None:
        self._future = future

    def get(self) -> int:
        return self._future.result()
