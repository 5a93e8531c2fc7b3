"""What lies on a namespace, by its first MiB; and the markers by which a run says that it spills there, or an
upload that it writes a store.

A marker keeps others off, and lets somebody use a namespace that an earlier run left. It is no lock: who
writes it reads it back a moment later, and of two that begin at once the later one stays. It is renewed while
its writer lasts: `lease.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import struct
from pathlib import Path
from typing import NamedTuple

from penstock.storage.checksum import crc32c

HEAD_BYTES = 1 << 20  # of who holds the namespace, and nobody else's
STORE_MAGIC = b"penstock-samples"
STORE_MAGIC_OFFSETS = (0, 512 << 10)
SPILL_MAGIC = b"penstock-spill\0\0"
WRITER_MAGIC = b"penstock-writer\0"
WRITER_OFFSET = 256 << 10  # of the marker of an upload, in a block of its own, whatever a block is

# What else may lie there, by its bytes: an offset into the first MiB, what stands there, and whose it is.
_OTHERS = (
    (512, b"EFI PART", "a partition table (GPT)"),
    (4096, b"EFI PART", "a partition table (GPT)"),
    (1080, b"\x53\xef", "an ext2, ext3 or ext4 file system"),
    (0, b"XFSB", "an XFS file system"),
    (65600, b"_BHRfS_M", "a btrfs file system"),
    (1024, b"\x10\x20\xf5\xf2", "an F2FS file system"),
    (3, b"NTFS    ", "an NTFS file system"),
    (0, b"LUKS\xba\xbe", "an encrypted volume (LUKS)"),
    (512, b"LABELONE", "a volume of LVM"),
    (4096, b"\xfc\x4e\x2b\xa9", "a member of a RAID (md)"),
    (4086, b"SWAPSPACE2", "swap space"),
    (32769, b"CD001", "an ISO 9660 file system"),
    (0, SPILL_MAGIC, "the spill space of a run of penstock"),
    (0, b"bluestore block device", "a volume of Ceph"),
    (510, b"\x55\xaa", "a partition table or a boot sector"),
)


def known_contents(head: bytes | bytearray) -> str | None:
    """What lies on a namespace whose first MiB this is, and is no store; None for nothing but zeros."""
    for offset, magic, whose in _OTHERS:
        if head[offset : offset + len(magic)] == magic:
            return whose
    return "data that is not penstock's" if any(without_writer(head)) else None


def without_writer(head: bytes | bytearray) -> bytes | bytearray:
    """A namespace's beginning with zeros in the place of an upload's marker, if one is there."""
    end = WRITER_OFFSET + MARKER_BYTES
    if marker_of(head[WRITER_OFFSET:end], WRITER_MAGIC) is None:
        return head
    return head[:WRITER_OFFSET] + bytes(MARKER_BYTES) + head[end:]


MARKER_BYTES = 4096  # a multiple of every block that is spilled to

ENDED, IN_USE = 0, 1
_VERSION = 1
_MARKER = struct.Struct("<16sII16s16sQQ64sIII")  # then a CRC-32C of it

held: set[bytes] = set()  # by `random`: of this process


class Marker(NamedTuple):
    """Who spills, or uploads.

    state          `IN_USE`, or `ENDED`
    random         16 bytes, of this run or upload alone
    place          16 bytes: the machine since it was started, and its container
    process        number of the process there
    started_ticks  when that began, as of /proc
    host           name of the machine, in at most 64 bytes, for messages
    sign_s         when it was renewed last, or ended, by the monotonic clock of its machine
    lease_s        of one in use that is not renewed for so long nothing can land any more
    quiesce_s      so long after its end, what it wrote may land yet; 0 where all is known to have landed
    """

    state: int
    random: bytes
    place: bytes
    process: int
    started_ticks: int
    host: bytes
    sign_s: int = 0
    lease_s: int = 0
    quiesce_s: int = 0

    @property
    def who(self) -> str:
        """For messages."""
        host = self.host.rstrip(b"\0").decode("utf-8", "replace") or "another machine"
        return f"process {self.process} on {host}"

    @property
    def is_here(self) -> bool:
        """On this machine: whether it runs can be told."""
        return self.place == _place()

    @property
    def runs(self) -> bool:
        """Of one that is here."""
        if self.process == os.getpid():
            return self.random in held
        return self.started_ticks != 0 and _started_ticks(self.process) == self.started_ticks

    def encoded(self, magic: bytes = SPILL_MAGIC) -> bytes:
        """[4096 bytes]"""
        packed = _MARKER.pack(magic, _VERSION, *self)
        return (packed + struct.pack("<I", crc32c(packed))).ljust(MARKER_BYTES, b"\0")


def marker_of(head: bytes | bytearray, magic: bytes = SPILL_MAGIC) -> Marker | None:
    """The marker that these bytes begin with; None where there is none, or it is damaged."""
    packed, crc = head[: _MARKER.size], head[_MARKER.size : _MARKER.size + 4]
    if len(crc) < 4 or not packed.startswith(magic) or crc != struct.pack("<I", crc32c(packed)):
        return None
    _, version, *fields = _MARKER.unpack(packed)
    return Marker(*fields) if version == _VERSION else None


def own_marker() -> Marker:
    """Of this process, for one run or upload."""
    process, host = os.getpid(), socket.gethostname().encode()
    return Marker(IN_USE, os.urandom(16), _place(), process, _started_ticks(process), host)


def in_the_way(head: bytes | bytearray, takeover: bool = False) -> str | None:
    """What forbids to spill to a namespace that begins so, in words; None for nothing: it is empty, or an
    earlier run's that has ended.

    takeover   a run of another machine is held to have ended
    """
    for offset in STORE_MAGIC_OFFSETS:
        if head[offset : offset + len(STORE_MAGIC)] == STORE_MAGIC:
            return "a sample store"
    marker = marker_of(head)
    writer = marker_of(head[WRITER_OFFSET : WRITER_OFFSET + MARKER_BYTES], WRITER_MAGIC)
    if writer is not None and writer.state == IN_USE and (not writer.is_here or writer.runs):
        return f"a store that {writer.who} uploads"
    if marker is None:
        return known_contents(head)
    if any(without_writer(head)[MARKER_BYTES:]):
        return "data that is not penstock's"
    if marker.state != IN_USE:
        return None
    run = f"the spill space of {marker.who}"
    if not marker.is_here:
        gone = "has not said that it has ended (if that machine is gone, add &takeover=1 to the URL)"
        return None if takeover else f"{run}, which {gone}"
    return f"{run}, which runs" if marker.runs else None


def _place() -> bytes:
    """Process numbers mean the same where this is the same."""
    known = []
    with contextlib.suppress(OSError):
        known.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        known.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256("\n".join([socket.gethostname(), *known]).encode()).digest()[:16]


def _started_ticks(process: int) -> int:
    """When it began; 0 where there is no such process."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    return 0
