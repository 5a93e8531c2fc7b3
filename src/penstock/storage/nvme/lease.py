"""Who has a namespace: a marker on it, which a run writes once and at its end, and an upload renews.

One upload at a time: others read its marker before they write. A writer that is gone is told by its process
number on the same machine. On another one, by a marker that is not renewed for as long as its lease: by then
each of its requests has ended, in an error if need be, and the target carries out none that it had got before
it lost the connection. Clocks of machines are never compared.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time

from penstock.storage.aligned import AlignedBuffer, align_up
from penstock.storage.files import Closing
from penstock.storage.nvme.contents import (
    MARKER_BYTES,
    SPILL_MAGIC,
    WRITER_MAGIC,
    WRITER_OFFSET,
    Marker,
    marker_of,
    own_marker,
)
from penstock.storage.nvme.namespace import Namespace, TargetError
from penstock.units import format_seconds

logger = logging.getLogger("penstock")

_OTHERS_S = 0.25  # in which another that has found it free too has written its marker
_RENEWED_S = 2.0


_held: set[bytes] = set()  # by `random`, of this process


class Held(Exception):
    """Somebody else writes to the namespace. Its text names them."""


class OwnMarker:
    """What says that this process has a namespace: for a run that spills (SPILL_MAGIC), or an upload."""

    def __init__(self, device: Namespace, magic: bytes, lease_s: int = 0) -> None:
        self._device, self._magic = device, magic
        self._offset = WRITER_OFFSET if magic == WRITER_MAGIC else 0
        self.marker = own_marker()._replace(lease_s=lease_s)

    def take(self) -> None:
        """Write it. Raises Held where another that has found the namespace free too did so later."""
        self.write(self.marker)
        time.sleep(_OTHERS_S)
        self.check()

    def check(self) -> None:
        """Raises Held where somebody else's is there by now."""
        there = self.read()
        if there is None or there.random != self.marker.random:
            who = "somebody else" if there is None else there.who
            raise Held(f"{who} has begun to write to {self._device.url}")

    def read(self) -> Marker | None:
        """Whosever is there."""
        view = AlignedBuffer(align_up(MARKER_BYTES, self._device.block_bytes)).view()
        self._device.read_into(self._offset, view)
        return marker_of(bytes(view[:MARKER_BYTES]), self._magic)

    def write(self, marker: Marker | None) -> None:
        """None: nobody's. A run's is durable afterwards; an upload's is written again soon."""
        view = AlignedBuffer(align_up(MARKER_BYTES, self._device.block_bytes)).view()
        if marker is not None:
            view[:MARKER_BYTES] = marker.encoded(self._magic)
            self.marker = marker
        self._device.write(self._offset, view)
        if self._magic == SPILL_MAGIC:
            self._device.flush()


class Lease(Closing):
    """The right to write to a namespace, until it is closed. A context manager.

    Raises Held where somebody else has it, TargetError. One on another machine may have ended: it is waited
    for as long as its lease.
    """

    def __init__(self, device: Namespace) -> None:
        self._device = device
        self._lock = threading.Lock()  # of what follows
        self._lost: Held | None = None
        self._ended = threading.Event()
        self._renewed_s = -math.inf
        lease_s = math.ceil(device.longest_request_s + device.quiesce_s + 2 * _RENEWED_S)
        self._own = OwnMarker(device, WRITER_MAGIC, lease_s)
        self._wait_for_others()
        _held.add(self._own.marker.random)
        try:
            self._own.take()
            self._thread = threading.Thread(target=self._renew, name="penstock-lease", daemon=True)
            self._thread.start()
        except BaseException:
            _held.discard(self._own.marker.random)
            raise

    def check(self) -> None:
        """Raises Held where somebody else has taken the namespace over; TargetError."""
        with self._lock:
            if self._lost is None and time.monotonic() - self._renewed_s > _RENEWED_S / 2:
                try:
                    self._own.check()
                    self._own.write(self._own.marker._replace(state=self._own.marker.state % 0xFFFFFFFF + 1))
                    self._renewed_s = time.monotonic()
                except Held as lost:
                    self._lost = lost
            if self._lost is not None:
                raise self._lost

    def __exit__(self, *raised: object) -> None:
        if raised[1] is None or isinstance(raised[1], Exception):
            self.close()
            return
        # Ctrl-C waits for no drive: the marker stays, and says on this machine that nobody writes.
        self._ended.set()
        _held.discard(self._own.marker.random)

    def close(self) -> None:
        """Let others write. Idempotent."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join()
        try:
            self.check()
            self._own.write(None)
        except Held:  # the marker is the other's
            pass
        except TargetError as error:
            logger.warning("%s still says that this upload goes on: %s", self._device.url, error)
        finally:
            _held.discard(self._own.marker.random)

    def _renew(self) -> None:
        while not self._ended.wait(_RENEWED_S):
            try:
                self.check()
            except Held:
                return
            except TargetError:  # the upload itself will say so, or the target comes back
                continue

    def _wait_for_others(self) -> None:
        there = self._own.read()
        if there is None or (there.is_here and not self._goes_on(there)):
            return
        if not there.is_here:
            logger.info(
                "%s is marked as written to by %s: waiting up to %s for a sign of it",
                self._device.url,
                there.who,
                format_seconds(there.lease_s),
            )
            latest_s, now = time.monotonic() + there.lease_s, self._own.read()
            while now == there and time.monotonic() < latest_s:
                time.sleep(min(_RENEWED_S / 2, there.lease_s))
                now = self._own.read()
            if now is None or now == there:
                return
            there = now
        raise Held(f"{there.who} writes to {self._device.url}")

    @staticmethod
    def _goes_on(there: Marker) -> bool:
        """Of one on this machine."""
        return there.random in _held if there.process == os.getpid() else there.runs
