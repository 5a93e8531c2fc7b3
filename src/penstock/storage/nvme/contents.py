"""What lies on a namespace, by its first MiB. Pure: bytes in, values out."""

from __future__ import annotations

HEAD_BYTES = 1 << 20  # of who holds the namespace, and nobody else's
STORE_MAGIC = b"penstock-samples"
STORE_MAGIC_OFFSETS = (0, 512 << 10)
SPILL_MAGIC = b"penstock-spill\0\0"

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
    return "data that is not penstock's" if any(head) else None
