"""Who has a namespace: a marker on it, which its writer, a run that spills or an upload, renews meanwhile.

One writer at a time: others read its marker before they write. One that is gone is told by its process number
on the same machine. On another one, by a marker that is not renewed for as long as its lease: by then each of
its requests has ended, in an error if need be. What it had sent may land yet: NVMe lets nobody end the
association of another, so the next writer waits for as long as a target may take. Clocks of machines
are never compared.
"""

from __future__ import annotations

import logging
import math
import threading
from time import monotonic, sleep
from typing import NamedTuple

from penstock.storage.aligned import AlignedBuffer, align_up
from penstock.storage.files import Closing
from penstock.storage.nvme.contents import (
    ENDED,
    IN_USE,
    MARKER_BYTES,
    SPILL_MAGIC,
    WRITER_MAGIC,
    WRITER_OFFSET,
    Marker,
    held,
    marker_of,
    own_marker,
)
from penstock.storage.nvme.namespace import Namespace, TargetError
from penstock.units import format_seconds

logger = logging.getLogger("penstock")

_OTHERS_S = 0.25  # in which another that has found it free too has written its marker
_LOOKS_S = 1.0
_LONGEST_QUIESCE_S, _LONGEST_LEASE_S = 300, 3600  # what a marker says beyond these is not believed


class _Kind(NamedTuple):
    """Of a writer: where its marker is, how often it is renewed, and words for messages."""

    offset: int
    renewed_s: float
    writes: str
    goes_on: str


_KINDS = {
    SPILL_MAGIC: _Kind(0, 10.0, "spills tensors to", "this run spills to it"),
    WRITER_MAGIC: _Kind(WRITER_OFFSET, 2.0, "writes to", "this upload goes on"),
}


class NamespaceInUse(Exception):
    """Somebody else writes to the namespace. Its text names them."""


def wait_for_others(device: Namespace, takeover: bool = False) -> None:
    """Return once nobody writes to the namespace, and nothing can land any more that was written before.

    takeover   a writer on another machine is held to have ended, unless it gives a sign

    Raises Held where somebody writes there, TargetError.
    """
    begun_s = int(monotonic())
    seen: dict[bytes, Marker | None] = {}
    over_s: dict[bytes, float] = {}
    said = False
    while True:
        for magic, kind in _KINDS.items():
            there = _read(device, magic)
            if magic in seen and there == seen[magic]:
                continue
            if there is not None and there.state == IN_USE:
                # Of a process of another user it cannot always be told that it runs; and what changed may be
                # an old sign that was lost, and has landed.
                signs = magic in seen and (not there.is_here or there.sign_s >= begun_s)
                if signs or (there.is_here and there.runs):
                    raise NamespaceInUse(f"{there.who} {kind.writes} {device.url}")
            seen[magic] = there
            over_s[magic] = monotonic() + (0.0 if there is None else _landing_s(there, takeover))
        magic = max(over_s, key=over_s.__getitem__)
        left_s, last = over_s[magic] - monotonic(), seen[magic]
        if left_s <= 0 or last is None:
            return
        if not said:
            said = True
            logger.warning(
                "waiting up to %s: writes of %s to %s may land yet. It has not ended, or not well",
                format_seconds(left_s),
                last.who,
                device.url,
            )
        sleep(min(left_s, _LOOKS_S))


def _landing_s(there: Marker, takeover: bool) -> float:
    """How long a write may land yet, at most, of a writer that has ended, or gives no sign from now on."""
    if not there.is_here:  # when it gave its last sign cannot be told
        return there.lease_s if there.state == IN_USE and not takeover else there.quiesce_s
    silent_s = max(monotonic() - there.sign_s, 0.0)
    if there.state == IN_USE:  # it wrote after that sign, and a lost one may have landed on a later one
        silent_s = max(silent_s - there.lease_s, 0.0)
    return max(there.quiesce_s - silent_s, 0.0)


class NamespaceLease(Closing):
    """The right to write to a namespace, until it is closed: of a run that spills (SPILL_MAGIC), or of an
    upload. A context manager. After `wait_for_others`.

    lost   who has taken the namespace over, once that was seen. A run's is closed then

    Raises Held where somebody else took it at the same time, TargetError.
    """

    def __init__(self, device: Namespace, magic: bytes = WRITER_MAGIC) -> None:
        self._device, self._magic, self._kind = device, magic, _KINDS[magic]
        self._lock = threading.Lock()  # of what follows
        self.lost: NamespaceInUse | None = None
        self._ended = threading.Event()
        self._renewed_s = -math.inf
        self._own = own_marker()._replace(
            sign_s=int(monotonic()),
            lease_s=math.ceil(device.longest_request_s + device.quiesce_s + 2 * self._kind.renewed_s),
            quiesce_s=math.ceil(device.quiesce_s),
        )
        held.add(self._own.random)
        try:
            self._write(self._own, durable=True)
            sleep(_OTHERS_S)
            self._compare()
            self._thread = threading.Thread(target=self._renew, name="penstock-lease", daemon=True)
            self._thread.start()
        except BaseException:
            held.discard(self._own.random)
            raise

    def check(self) -> None:
        """Raises Held where somebody else has taken the namespace over; TargetError."""
        with self._lock:
            if self.lost is None and monotonic() - self._renewed_s > self._kind.renewed_s / 2:
                try:
                    self._compare()
                    self._write(self._own._replace(sign_s=int(monotonic())))
                    self._renewed_s = monotonic()
                except NamespaceInUse as lost:
                    self.lost = lost
            if self.lost is not None:
                raise self.lost

    def __exit__(self, *raised: object) -> None:
        if raised[1] is None or isinstance(raised[1], Exception):
            self.close()
            return
        # Ctrl-C waits for no drive: the marker stays, and says on this machine that nobody writes.
        self._ended.set()
        held.discard(self._own.random)

    def close(self) -> None:
        """Let others write, once what was lost can land no more. Idempotent."""
        if self._ended.is_set():
            return
        self._ended.set()
        try:
            self._thread.join()
            if self.lost is None:
                self._compare()
                self._end()
        except NamespaceInUse:  # the marker is the other's
            pass
        except TargetError as error:
            logger.warning("%s still says that %s: %s", self._device.url, self._kind.goes_on, error)
        finally:
            held.discard(self._own.random)

    def _compare(self) -> None:
        """Raises Held where somebody else's marker is there by now."""
        there = _read(self._device, self._magic)
        if there is None or there.random != self._own.random:
            who = "somebody else" if there is None else there.who
            raise NamespaceInUse(f"{who} has begun to write to {self._device.url}")

    def _end(self) -> None:
        """Say that it has ended; and, where a write was lost, how long that may land yet."""
        while True:
            late_s, sign_s = self._device.late_s, int(monotonic())
            quiesce_s = math.ceil(late_s) + 1 if late_s else 0
            ended = self._own._replace(state=ENDED, sign_s=sign_s, quiesce_s=quiesce_s)
            is_over = not late_s and self._magic == WRITER_MAGIC
            self._write(None if is_over else ended, durable=True)
            late_s = self._device.late_s  # what says so may have been lost, too
            if not late_s or monotonic() + late_s <= sign_s + quiesce_s:
                return

    def _write(self, marker: Marker | None, durable: bool = False) -> None:
        """None: nobody's. An upload's is written again soon."""
        view = AlignedBuffer(align_up(MARKER_BYTES, self._device.block_bytes)).view()
        if marker is not None:
            view[:MARKER_BYTES] = marker.encoded(self._magic)
        self._device.write(self._kind.offset, view)
        if durable and self._magic == SPILL_MAGIC:
            self._device.flush()

    def _renew(self) -> None:
        while not self._ended.wait(self._kind.renewed_s):
            try:
                self.check()
            except NamespaceInUse:
                held.discard(self._own.random)
                if self._magic == SPILL_MAGIC:
                    self._device.close()  # nothing more of the run may land on the other's
                return
            except TargetError:  # the writes themselves will say so, or the target comes back
                continue


def _read(device: Namespace, magic: bytes) -> Marker | None:
    """Whosever is there."""
    view = AlignedBuffer(align_up(MARKER_BYTES, device.block_bytes)).view()
    device.read_into(_KINDS[magic].offset, view)
    there = marker_of(bytes(view[:MARKER_BYTES]), magic)
    return there and there._replace(
        lease_s=min(there.lease_s, _LONGEST_LEASE_S), quiesce_s=min(there.quiesce_s, _LONGEST_QUIESCE_S)
    )
