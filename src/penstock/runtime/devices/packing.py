"""Packing of bytes on an accelerator by operators of torch: the same bytes as the native codecs make."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from penstock._native import DEMAND
from penstock.codecs import CODECS, bitmask, encode
from penstock.errors import SpillError
from penstock.runtime.devices import Copy, Device
from penstock.runtime.devices.copies import Events, as_bytes
from penstock.runtime.devices.driver import Driver
from penstock.runtime.devices.queues import CopyQueue, call_then
from penstock.runtime.storages import ManagedStorage

logger = logging.getLogger("penstock")

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def pack(
    content: torch.Tensor, codec: str, itemsize: int, admits: Callable[[int], bool]
) -> torch.Tensor | None:
    """The bytes ``content`` packed, on the same device; None where that makes them no smaller, or there is
    no room.

    content   [N] uint8, the whole of a storage
    codec     a key of penstock.codecs.CODECS
    itemsize  bytes of an element
    admits    whether there is room for so many bytes, which are counted then

    Takes a few MiB beside what it gives.
    """
    if content.numel() % itemsize:
        return None
    elements = _elements(content, codec, itemsize)
    size_bytes = bitmask.packed_bytes(elements) if codec == "csr" else content.numel() // 2
    if size_bytes >= content.numel() or not admits(size_bytes):
        return None
    return encode(codec, elements)


def unpack(packed: torch.Tensor, content: torch.Tensor, codec: str, itemsize: int) -> bool:
    """Fill ``content`` [N] uint8 with what was packed. False: ``packed`` is of no such elements."""
    return CODECS[codec].decode_into(packed, _elements(content, codec, itemsize))


def _elements(content: torch.Tensor, codec: str, itemsize: int) -> torch.Tensor:
    return content.view(_INTEGERS[itemsize] if codec == "csr" else torch.float32)


class PackedBytes(NamedTuple):
    """Packed bytes on the device, and the codec with the bytes of an element."""

    content: torch.UntypedStorage
    codec: tuple[str, int]


class DevicePacking:
    """Packs and expands storages of a device, on a stream of its own.

    packed    by key: what is on the device, or being fetched to it
    is_used   anything was packed
    """

    def __init__(self, device: Device, driver: Driver, events: Events) -> None:
        self._device, self._driver, self._events = device, driver, events
        self.packed: dict[int, PackedBytes] = {}
        self.is_used = False
        carry_out = functools.partial(self._carry_out, driver.make_stream())
        self._queue = CopyQueue("penstock-packing", carry_out, driver)
        self.raise_priority = functools.partial(self._queue.raise_priority, priority=DEMAND)
        self.close = self._queue.close

    def pack(self, copy: Copy) -> None:
        """As Device.pack."""
        self.is_used = True
        copy.then = self._on_packed
        self._queue.put(copy)

    def _on_packed(self, copy: Copy) -> None:
        managed = copy.managed
        if copy.error is not None:
            logger.warning("a tensor leaves as it is: %s", copy.error)
            copy.error = None
        with self._device.engine.lock:
            if managed.key in self.packed:
                managed.packed_bytes = self.packed[managed.key].content.nbytes()
            # Nothing here may keep the memory: `on_end` may give it up, and others count on that.
            copy.on_end(copy)
            if not managed.packed_bytes:
                self.drop(managed)

    def expand(self, copy: Copy) -> None:
        """Of what is packed on the device, into the storage's memory."""
        self._queue.put(copy)

    def add(self, managed: ManagedStorage, content: torch.UntypedStorage, codec: tuple[str, int]) -> None:
        """Packed bytes of the storage come to this memory."""
        self.packed[managed.key] = PackedBytes(content, codec)
        self._device.memory.managed_bytes += content.nbytes()

    def drop(self, managed: ManagedStorage) -> None:
        packed = self.packed.pop(managed.key, None)
        if packed is not None:
            self._device.memory.managed_bytes -= packed.content.nbytes()

    def _carry_out(self, stream: Any, copy: Copy, priority: int) -> None:
        copy.wait()
        self._events.free.extend(copy.ready)
        if copy.out:
            self._pack(copy.managed, as_bytes(copy.storage), copy.codec, stream)
        else:
            self._expand(copy, stream)
        call_then(copy)

    def _expand(self, copy: Copy, stream: Any) -> None:
        packed = self.packed[copy.managed.key]
        whole = self._driver.unpack(as_bytes(packed.content), as_bytes(copy.storage), *packed.codec, stream)
        self._events.complete(stream)
        if not whole:
            copy.error = SpillError(
                f"{packed.content.nbytes()} compressed bytes on {self._device.place_text} are damaged: check "
                "the disk (dmesg, smartctl), or choose another spill_dir"
            )

    def _pack(
        self, managed: ManagedStorage, content: torch.Tensor, codec: tuple[str, int], stream: Any
    ) -> None:
        engine, memory = self._device.engine, self._device.memory
        admitted_bytes = 0

        def admits(size_bytes: int) -> bool:
            nonlocal admitted_bytes
            with engine.lock:
                self._device.poll()
                if engine.fits(size_bytes):
                    admitted_bytes = size_bytes
                    memory.managed_bytes += size_bytes
            return admitted_bytes > 0

        made = None
        try:
            made = self._driver.pack(content, *codec, admits, stream)
            self._events.complete(stream)
        finally:
            with engine.lock:
                if made is not None:
                    self.packed[managed.key] = PackedBytes(made.untyped_storage(), codec)
                else:
                    memory.managed_bytes -= admitted_bytes
