"""CRC-32C (Castagnoli), the checksum of iSCSI (RFC 3720) and ext4.

Polynomial 0x1EDC6F41, bits reflected, all ones before and after; RFC 3720 appendix B.4 has test
vectors. It finds every burst of errors up to 32 bits long, every error in three bits of data below
256 MiB, and all but about one in 2^32 of the others. It is no protection against intent.

A checksum goes on where another ended: ``crc`` is that of the bytes before, 0 for none.
"""

from __future__ import annotations

from penstock import _native


def crc32c(data: bytes | bytearray | memoryview, crc: int = 0) -> int:
    """The checksum of the bytes before, and of ``data``.

    Raises BufferError for a view that is not contiguous, TypeError for ``crc`` outside 32 bits.
    """
    return _native.crc32c_of_bytes(data, crc)


def crc32c_at(address: int, size_bytes: int, crc: int = 0) -> int:
    """The checksum of the bytes before, and of ``size_bytes`` of memory. Releases the GIL for large sizes.

    The caller keeps the memory alive.
    """
    return _native.crc32c(address, size_bytes, crc)


def copy_crc32c(destination: int, source: int, size_bytes: int, crc: int = 0) -> int:
    """`crc32c_at` the source address, copying to the destination address in the same pass over memory.

    The caller keeps both alive, and they must not overlap.
    """
    return _native.copy_crc32c(destination, source, size_bytes, crc)


def crc32c_combine(first: int, second: int, second_bytes: int) -> int:
    """The checksum of bytes that checksum to ``first``, then ``second_bytes`` that checksum to ``second``."""
    return _native.crc32c_combine(first, second, second_bytes)
