"""Threads that bring what the reader of samples misses: by ranges, many at once, in the order of the epoch.

The reader asks ahead, in the order that is known before the epoch begins. So nothing is guessed here.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

from penstock import _native
from penstock.samples.failures import LOST
from penstock.samples.objects.cache import BLOCK_BYTES, CachedFile
from penstock.storage.aligned import align_down, align_up
from penstock.storage.objects import ObjectError

logger = logging.getLogger("penstock")

REQUESTS_AT_ONCE = 32
_LOOK_S = 1.0
_CLOSE_S = 0.3


class Fetched(NamedTuple):
    """A data file whose bytes are fetched.

    read   gives its bytes from where to where. Raises ObjectError
    kept   what this machine has of it; None where nothing is kept
    """

    read: Callable[[int, int], memoryview]
    kept: CachedFile | None = None


class Fetcher:
    """The threads of one reader.

    requests, fetched_bytes   so far
    """

    def __init__(self, reader: _native.SampleReader, files: Mapping[tuple[int, int], Fetched]) -> None:
        """``files``: by partition and data file. Raises RuntimeError where no thread can be started."""
        self._reader, self._files = reader, files
        self._lock = threading.Lock()
        self._bringing: dict[tuple[int, int, int, int], list[int]] = {}  # tickets that wait for the same
        self.requests = self.fetched_bytes = 0
        self._threads: list[threading.Thread] = []
        self._running = 0
        self._then: Callable[[], None] | None = None
        for _ in range(REQUESTS_AT_ONCE):
            thread = threading.Thread(target=self._run, name="penstock-fetch", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # this process may have no more: some are slower, none is an error
                if not self._threads:
                    raise
                break
            self._threads.append(thread)
            with self._lock:
                self._running += 1

    def close(self, then: Callable[[], None]) -> None:
        """After the reader was closed. ``then`` is called once no thread uses the files any more: by the last
        of them, where a server does not answer, for which this does not wait."""
        end_s = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        with self._lock:
            if self._running:
                self._then = then
                return
        then()

    def _run(self) -> None:
        try:
            while (taken := self._reader.take_fetches(1, _LOOK_S)) is not None:
                for each in taken:
                    self._bring(each)
        finally:
            with self._lock:
                self._running -= 1
                then = None if self._running else self._then
            if then is not None:
                then()

    def _bring(self, fetch: tuple[int, ...]) -> None:
        """A fetch of `_native.SampleReader.take_fetches`."""
        ticket, part, number, chunk, bit, begin, end, first, last = fetch
        file, key = self._files[part, number], (part, number, chunk, bit)
        if file.kept is not None and file.kept.cache.has_room(end - begin):
            # Whole blocks are written past the page cache; a file has no others.
            begin, end = align_down(begin, BLOCK_BYTES), align_up(end, BLOCK_BYTES)
        elif (first, last) != (begin, end):
            begin, end, key = first, last, (part, number, -1, ticket)  # only this, for nobody else
        with self._lock:
            if (others := self._bringing.get(key)) is not None:
                others.append(ticket)
                return
            self._bringing[key] = []
        data, failure = None, errno.ENODEV
        try:
            data = file.read(begin, end)
        except ObjectError as error:
            # Whatever it was, it says nothing of the sample: it counts as lost, not as damaged.
            failure = error.errno if error.errno in LOST else errno.ENODEV
        except Exception:
            logger.exception("what a sample store needs could not be fetched")
        with self._lock:
            self.requests += 1
            self.fetched_bytes += 0 if data is None else data.nbytes
        tickets = [ticket]
        if data is not None:
            array = np.frombuffer(data, np.uint8)
            give = partial(self._reader.give_fetch, tickets.pop(), begin, array)
            if key[2] < 0 or file.kept is None:
                give(-1)
            else:
                file.kept.keep(chunk, bit, begin, array, give)
        with self._lock:
            tickets += self._bringing.pop(key)  # who comes later finds what is kept
        for each in tickets:
            if data is None:
                self._reader.fail_fetch(each, failure)
            else:
                self._reader.give_fetch(each, begin, array, -1)
