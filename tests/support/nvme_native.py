"""penstock's NVMe/TCP host, by the native module alone."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock import _native
from penstock.storage.transfer import File, Kind, Transfer
from tests.support.nvme_host import HOST_ID, HOST_NQN
from tests.support.nvme_target.process import NQN

WAIT_S = 60.0
METHODS = ("direct", "buffered")

# Short enough for a test to wait for, long enough for a busy machine.
LIMITS: dict[str, Any] = {
    "connect_timeout_s": 5.0,
    "command_timeout_s": 5.0,
    "keep_alive_s": 10.0,
    "reconnect_timeout_s": 10.0,
}


class Listening(Protocol):
    address: str
    port: int


class Failed(Exception):
    """A request ended with an errno; `text` says more."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(f"{errno.errorcode.get(number, number)}: {text}")
        self.number, self.text = number, text


@contextmanager
def controller(target: Listening, number: int = 0, **options: Any) -> Iterator[_native.NvmeController]:
    """An association with subsystem `number` of the target. Closed at the end."""
    wanted = {"host_nqn": HOST_NQN, "host_id": HOST_ID, **LIMITS, **options}
    opened = _native.NvmeController(target.address, target.port, NQN.format(number), **wanted)
    try:
        yield opened
    finally:
        opened.close()


class Requests:
    """Reads and writes of namespaces in the background."""

    def __init__(
        self, *, depth: int = 64, piece_bytes: int = 1 << 20, slot_bytes: int = 1 << 20, threads: int = 1
    ) -> None:
        self._changed = threading.Condition()
        self._over: set[Transfer] = set()
        self._transfers = _native.Transfers(
            "nvme", ["direct", "buffered"], depth, piece_bytes, slot_bytes, 4, threads
        )

    def _note_over(self, transfer: Transfer) -> None:
        with self._changed:
            self._over.add(transfer)
            self._changed.notify_all()

    def begin(
        self,
        kind: Kind,
        namespace: dict[str, Any],
        offsets: Sequence[int],
        memory: Sequence[npt.NDArray[Any]],
        method: str = "direct",
    ) -> list[Transfer]:
        """`memory`: contiguous arrays of bytes, one for each offset."""
        file = File(namespace.get("descriptor", -1), namespace["handle"], namespace["block_bytes"])
        transfers = [
            Transfer(
                kind, file, offset, one.ctypes.data, one.nbytes, method, keep=one, on_done=self._note_over
            )
            for offset, one in zip(offsets, memory, strict=True)
        ]
        self._transfers.submit(transfers)
        return transfers

    def errors(self, transfers: Sequence[Transfer], timeout_s: float = WAIT_S) -> list[int]:
        """How each ended: 0, or an errno. Fails where one does not end."""
        with self._changed:
            ended = self._changed.wait_for(lambda: self._over.issuperset(transfers), timeout_s)
            assert ended, f"{len(set(transfers) - self._over)} transfers have not ended"
            return [transfer.error_number for transfer in transfers]

    def read(self, namespace: dict[str, Any], offset: int, size: int, timeout_s: float = WAIT_S) -> bytes:
        memory = np.zeros(size, np.uint8)
        (error,) = self.errors(self.begin("read", namespace, [offset], [memory]), timeout_s)
        if error:
            raise Failed(error, _native.nvme_error_of(namespace["handle"]))
        return memory.tobytes()

    def write(self, namespace: dict[str, Any], offset: int, data: bytes, timeout_s: float = WAIT_S) -> None:
        memory = np.frombuffer(data, np.uint8)
        (error,) = self.errors(self.begin("write", namespace, [offset], [memory]), timeout_s)
        if error:
            raise Failed(error, _native.nvme_error_of(namespace["handle"]))

    def close(self) -> None:
        assert self._transfers.close(WAIT_S)


@contextmanager
def requests(**options: int) -> Iterator[Requests]:
    opened = Requests(**options)
    try:
        yield opened
    finally:
        opened.close()


def guarded(size: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Memory for `size` bytes, and the page-aligned whole of it with a guard of 64 KiB on each side."""
    guard = 1 << 16
    whole = np.full(size + 2 * guard + 4096, 0xA5, np.uint8)
    begin = guard + (-(whole.ctypes.data + guard)) % 4096
    return whole[begin : begin + size], whole


def guards_hold(memory: npt.NDArray[np.uint8], whole: npt.NDArray[np.uint8]) -> bool:
    begin = memory.ctypes.data - whole.ctypes.data
    return bool((whole[:begin] == 0xA5).all() and (whole[begin + memory.size :] == 0xA5).all())
