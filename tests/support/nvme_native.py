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
from tests.support.nvme_host import HOST_ID, HOST_NQN
from tests.support.nvme_target.process import NQN

WAIT_S = 60.0

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
        self._ended = threading.Condition()
        self._errors: dict[int, int] = {}
        self._token = 0
        self._kept: list[object] = []
        self._transfers = _native.Transfers("nvme", depth, piece_bytes, slot_bytes, 4, threads, self._deliver)
        # What ends while more is under way waits to be fetched.
        self._deliverer = threading.Thread(target=self._fetch, daemon=True)
        self._deliverer.start()

    def _deliver(self, finished: _native.Finished) -> None:
        with self._ended:
            self._errors.update({token: error for token, error, *_ in finished})
            self._ended.notify_all()

    def _fetch(self) -> None:
        while finished := self._transfers.wait():
            self._deliver(finished)

    def begin(
        self, kind: str, namespace: dict[str, Any], offsets: Sequence[int], memory: Sequence[npt.NDArray[Any]]
    ) -> list[int]:
        """Their tokens. `memory`: contiguous arrays of bytes, one for each offset."""
        file = (-1, namespace["handle"], namespace["block_bytes"])
        tokens = list(range(self._token + 1, self._token + 1 + len(offsets)))
        self._token += len(offsets)
        self._kept.append(memory)
        requests = [
            (kind, file, offset, one.ctypes.data, one.nbytes, "direct", False, None, 0)
            for offset, one in zip(offsets, memory, strict=True)
        ]
        at_once = self._transfers.submit(tokens, requests)
        assert at_once is not None
        self._deliver(at_once)
        return tokens

    def errors(self, tokens: Sequence[int], timeout_s: float = WAIT_S) -> list[int]:
        """How each ended: 0, or an errno. Fails where one does not end."""
        with self._ended:
            ended = self._ended.wait_for(lambda: all(one in self._errors for one in tokens), timeout_s)
            assert ended, f"{sum(one not in self._errors for one in tokens)} requests have not ended"
            return [self._errors[one] for one in tokens]

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
        self._deliverer.join(WAIT_S)


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
