"""Requests on their way to a transport, a bounded number at a time."""

from __future__ import annotations

import queue
from collections import deque

import torch

from penstock.storage.aligned import AlignedBuffer
from penstock.storage.io_paths import shared_transport
from penstock.storage.transports.contract import Completion, Request

PIECE_BYTES = 4 << 20
DEPTH = 8


class Pump:
    """Hands requests to the transport, and gives back their completions in the order they come.

    Used by one thread. A context manager: leaving waits for all that is in flight, so that files can be
    closed and memory be used afterwards, whatever happened.

    in_flight   requests whose completions were not given back yet
    """

    def __init__(self) -> None:
        self.in_flight = 0
        self._transport = shared_transport()
        self._completions: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        self._incomplete: dict[int, Request] = {}

    def submit(self, request: Request) -> None:
        self._incomplete[id(request)] = request
        try:
            self._transport.submit([request], self._completed)
        except ValueError:  # nothing has begun
            del self._incomplete[id(request)]
            raise
        self.in_flight += 1

    def wait(self) -> Completion:
        """The next completion."""
        completion = self._completions.get()
        self.in_flight -= 1
        return completion

    def __enter__(self) -> Pump:
        return self

    def __exit__(self, *_: object) -> None:
        interrupted: BaseException | None = None
        while self._incomplete:
            try:
                self._transport.cancel(list(self._incomplete.values()))
                self._completions.get()
            except KeyboardInterrupt as error:  # the memory is in use all the same
                interrupted = error
        if interrupted is not None:
            raise interrupted

    def _completed(self, completion: Completion) -> None:
        del self._incomplete[id(completion.request)]
        self._completions.put(completion)


class Ring:
    """Buffers of PIECE_BYTES each, made when they are first needed, and kept for the next ring.

    most_bytes   of one piece, where that is less: then they are smaller, and not kept
    pinned       for tensors that are not in the memory of the CPU: page-locked where CUDA is there, so
                 that copies run at the link's speed. Not kept here: torch does that
    """

    def __init__(self, most_bytes: int = PIECE_BYTES, pinned: bool = False) -> None:
        self._size_bytes = min(most_bytes, PIECE_BYTES)
        self._make = PinnedBuffer if pinned and torch.cuda.is_available() else AlignedBuffer
        whole = self._make is AlignedBuffer and self._size_bytes == PIECE_BYTES
        self._free: deque[AlignedBuffer | PinnedBuffer] = _spare if whole else deque(maxlen=DEPTH)

    def take(self) -> AlignedBuffer | PinnedBuffer:
        try:
            return self._free.pop()
        except IndexError:
            return self._make(self._size_bytes)

    def give(self, buffer: AlignedBuffer | PinnedBuffer) -> None:
        self._free.append(buffer)


_spare: deque[AlignedBuffer | PinnedBuffer] = deque(maxlen=DEPTH)


class PinnedBuffer:
    """Page-locked memory, which begins at a page."""

    def __init__(self, size_bytes: int) -> None:
        self._data = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        self.address = self._data.data_ptr()
