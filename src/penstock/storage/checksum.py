"""CRC-32C (Castagnoli), the checksum of iSCSI (RFC 3720) and ext4.

Polynomial 0x1EDC6F41, bits reflected, all ones before and after; RFC 3720 appendix B.4 has test
vectors. It finds every burst of errors up to 32 bits long, every error in three bits of data below
256 MiB, and all but about one in 2^32 of the others. It is no protection against intent.

A checksum goes on where another ended: ``crc`` is that of the bytes before, 0 for none. The functions are
native, and release the GIL for large sizes:

crc32c           of bytes. Raises BufferError for a view that is not contiguous
crc32c_at        of memory at an address, which the caller keeps alive
copy_crc32c      the same, copying to another address in one pass. The two must not overlap
crc32c_combine   of bytes that checksum to ``first``, then ``second_bytes`` that checksum to ``second``
"""

from __future__ import annotations

from penstock._native import copy_crc32c, crc32c, crc32c_at, crc32c_combine

__all__ = ["copy_crc32c", "crc32c", "crc32c_at", "crc32c_combine"]
