"""The disk of virtual time, as a transport: importing this lets runs use the I/O path DISK.

A transfer ends when the machine's disk would have carried it out. The bytes lie in the spill files, but where
nothing is computed.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
from collections.abc import Sequence
from typing import Any

from penstock.storage.paths import TRANSPORTS
from penstock.storage.transfer import FOR_EVER_S, Transfer, move_fully

from . import begin_transfer, computes, wait_until

DISK = "emu direct"


class DiskTransport:
    """Transfers of a direction end in the order in which they came, on a thread of its own."""

    methods = ("direct",)

    def __init__(self) -> None:
        self._asked = {"read": queue.Queue[Any](), "write": queue.Queue[Any]()}
        self._threads = [
            threading.Thread(target=_serve, args=(asked,), name=f"emu-disk-{kind}", daemon=True)
            for kind, asked in self._asked.items()
        ]
        for thread in self._threads:
            thread.start()
        self._closed = False

    def submit(self, transfers: Sequence[Transfer], /) -> None:
        if self._closed:
            raise ValueError("the transport is closed")
        for transfer in transfers:
            end = begin_transfer(f"disk_{transfer.kind}", transfer.size_bytes)
            self._asked[transfer.kind].put((transfer, end))

    def cancel(self, transfers: Sequence[Transfer], /) -> int:
        return 0  # all have begun

    def raise_priority(self, transfers: Sequence[Transfer], /) -> None:
        pass

    def close(self, timeout_s: float = FOR_EVER_S) -> bool:
        if not self._closed:
            self._closed = True
            for asked in self._asked.values():
                asked.put(None)
        for thread in self._threads:
            thread.join(min(timeout_s, threading.TIMEOUT_MAX))
        return not any(thread.is_alive() for thread in self._threads)


def _serve(asked: queue.Queue[Any]) -> None:
    while (entry := asked.get()) is not None:
        transfer, end = entry
        del entry
        wait_until(end)
        transfer.end(_carried_out(transfer) if computes() else 0)
        del transfer


def _carried_out(transfer: Transfer) -> int:
    """0, or an errno."""
    memory = memoryview((ctypes.c_char * transfer.size_bytes).from_address(transfer.address))
    move: Any = os.preadv if transfer.kind == "read" else os.pwritev
    file, offset = transfer.file.buffered, transfer.offset
    return move_fully(lambda begin, end: int(move(file, [memory[begin:end]], offset + begin)), len(memory))


TRANSPORTS["emu"] = DiskTransport
