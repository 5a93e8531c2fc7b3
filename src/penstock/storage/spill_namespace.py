"""A namespace of a remote drive in the place of a spill file."""

from __future__ import annotations

import errno
import logging

from penstock.errors import InvalidArgument, SpillError, SpillSpaceFull, with_errno
from penstock.storage.aligned import align_down
from penstock.storage.extents import ALIGNMENT_BYTES
from penstock.storage.nvme.contents import HEAD_BYTES, SPILL_MAGIC, in_the_way
from penstock.storage.nvme.lease import NamespaceInUse, NamespaceLease, wait_for_others
from penstock.storage.nvme.namespace import Namespace, TargetError
from penstock.storage.nvme.url import Url
from penstock.storage.transfer import Transfer
from penstock.units import format_bytes, format_bytes_up

logger = logging.getLogger("penstock")

_SMALLEST_BYTES = HEAD_BYTES + (1 << 20)
_SWAP_PARTS = 4  # one of so many is the arena's


class SpillNamespace:
    """A namespace that tensors are spilled to, behind a marker that keeps others off. What was written stays
    on it: it is no file that goes away. Unless the target is on this machine, or the URL says otherwise, it
    is encrypted with a key that goes with the run.

    The attributes are those of SpillFile; `handle` names it to the native side.

    timeout_s   in which a request ends, well or in an error

    Raises SpillError where the target cannot be used, the namespace is too small, or anything lies on it but
    what an earlier run spilled.
    """

    direct = True
    refusal = ""
    begin = HEAD_BYTES

    def __init__(self, url: Url, timeout_s: float) -> None:
        if url.fragment:
            raise InvalidArgument(
                f"{url} names a part of a namespace: leave out #{url.fragment} to spill to it"
            )
        self.place = url
        self.size_bytes = 0
        try:
            encrypts = not url.portal.is_here if url.encrypt is None else url.encrypt
            self._namespace = Namespace(url, timeout_s, HEAD_BYTES if encrypts else None)
            try:
                self._take()
            except BaseException:
                self._namespace.close()
                raise
        except TargetError as error:
            raise _unusable(url, error) from error
        self.file = self._namespace.file
        self.handle = self.file.direct
        if encrypts:
            logger.info("tensors that are spilled to %s are encrypted", url)
        self._end_bytes = align_down(self._namespace.size_bytes - HEAD_BYTES, ALIGNMENT_BYTES)
        self._swap: tuple[int, int] | None = None

    def grow_to(self, size_bytes: int, most_bytes: int | None = None) -> None:
        """Raises SpillSpaceFull where it is smaller."""
        if size_bytes > self._end_bytes:
            missing_bytes = size_bytes - self._end_bytes
            kept = f", {format_bytes(self._swap[1])} are kept for unplanned evictions" if self._swap else ""
            raise SpillSpaceFull(
                f"the namespace {self.place} is full: of its {format_bytes(self._namespace.size_bytes)}, "
                f"spilled tensors may have {format_bytes(self._end_bytes)}{kept}, and "
                f"{format_bytes_up(size_bytes)} are needed. Use one that is larger by "
                f"{format_bytes_up(missing_bytes * _SWAP_PARTS // (_SWAP_PARTS - 1))}, or a directory."
            )
        self.size_bytes = max(self.size_bytes, size_bytes)

    def free_bytes(self) -> int:
        """Bytes of the space that were never used."""
        return self._end_bytes - self.size_bytes

    def swap_area(self) -> tuple[int, int]:
        """Where on the namespace the arena may write by itself: its first byte, and bytes.

        The same whenever it is asked for; extents have what is before it.
        """
        if self._swap is None:
            share_bytes = align_down(min(self._end_bytes // _SWAP_PARTS, self.free_bytes()), ALIGNMENT_BYTES)
            self._end_bytes -= share_bytes
            self._swap = HEAD_BYTES + self._end_bytes, share_bytes
        return self._swap

    def failure(self, failed: Transfer) -> SpillError:
        return _unusable(self.place, self._lease.lost or self._namespace.failure(failed))

    @property
    def quiesce_s(self) -> float:
        return self._namespace.quiesce_s

    def close(self) -> None:
        """Say that the run has ended, and let go. Idempotent."""
        if self._namespace.is_usable:
            self._lease.close()
        self._namespace.close()

    def _take(self) -> None:
        """Make it this run's."""
        namespace = self._namespace
        if namespace.size_bytes < _SMALLEST_BYTES:
            raise SpillSpaceFull(
                f"the namespace {self.place} is too small to spill to: it has "
                f"{format_bytes(namespace.size_bytes)}, and {format_bytes(_SMALLEST_BYTES)} are the least. "
                "Use a larger one, or a directory."
            )
        if namespace.block_bytes > ALIGNMENT_BYTES:
            raise SpillError(
                f"the namespace {self.place} has blocks of {namespace.block_bytes} bytes: tensors are "
                f"spilled to blocks of up to {ALIGNMENT_BYTES}. Format it so, or use a directory."
            )
        needed = self.place.queues + 1  # what has to come back at once does not wait behind the rest
        if namespace.queues < needed:
            raise SpillError(
                f"the target of {self.place} grants too few I/O queues to spill to it: {namespace.queues}, "
                f"and {needed} are needed. Have it grant more, or use a directory."
            )
        self._refuse_others()
        try:
            wait_for_others(namespace, self.place.takeover)
            self._refuse_others()  # as it is now
            self._lease = NamespaceLease(namespace, SPILL_MAGIC)
        except NamespaceInUse as held:
            raise SpillError(f"{held}: use another namespace to spill to") from held

    def _refuse_others(self) -> None:
        head = bytearray(HEAD_BYTES)
        self._namespace.read_into(0, memoryview(head))
        if (obstacle := in_the_way(head, self.place.takeover)) is not None:
            raise SpillError(
                f"tensors are not spilled to {self.place}: that would destroy what lies there, {obstacle}. "
                "Use an empty namespace; if nobody needs this one, clear its first "
                f"{format_bytes(HEAD_BYTES)}."
            )


def _unusable(url: Url, error: TargetError | NamespaceInUse) -> SpillError:
    unusable = SpillError(f"tensors cannot be spilled to {url}: {error}")
    return with_errno(unusable, getattr(error, "errno", None) or errno.EIO)
