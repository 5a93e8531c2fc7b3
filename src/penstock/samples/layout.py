"""How a sample store lies on disk: its files, and the 16 bytes of a directory entry.

The whole format is in docs/formats.md. An entry is that of DLFS, figure 3(b).
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

MANIFEST = "store.json"
DIRECTORY = "directory.bin"  # [samples, 2] uint64: an entry each, in stored order
SUMS = "sums.bin"  # [samples] uint32: CRC-32C of each sample
CHUNKS = "chunks.bin"  # [chunks] CHUNK_RECORD
NAMES = "names.bin"  # each name: uint16 length, then its bytes
ANCHORS = "anchors.bin"  # [ceil(samples / ANCHOR_NAMES)] uint64: where every 16th name begins in names.bin
LOOKUP = "lookup.bin"  # [samples] uint64, then [2 ** lookup_bits(samples) + 1] uint32 or uint64
LARGE = "large.bin"  # [large samples, 2] uint64: index, length; absent where there are none
LABELS = "labels.bin"  # [samples] int32: index in the manifest's classes; absent where there are none
FILES = (DIRECTORY, SUMS, CHUNKS, NAMES, ANCHORS, LOOKUP, LARGE, LABELS)  # as the manifest lists them
PACKED_FILES = tuple(name for name in FILES if name != LOOKUP)  # that grow while samples are packed

SMALLEST_CHUNK_BYTES = 4096
LARGEST_CHUNK_BYTES = 1 << 30

KEY_BITS, OFFSET_BITS, LENGTH_BITS, DATA_FILE_BITS = 48, 40, 23, 16
DATA_FILE_BYTES = 1 << OFFSET_BITS  # most that one data file holds
MOST_DATA_FILES = 1 << DATA_FILE_BITS
LARGE_LENGTH = (1 << LENGTH_BITS) - 1  # an entry of this length has its true one in large.bin
LARGEST_NAME_BYTES = (1 << 16) - 1
ANCHOR_NAMES = 16
PARTITION = re.compile(r"part-(\d{5})-of-(\d{5})")  # the folder of one of several partitions
# Of a file elsewhere: its partition, if it has several, and what it is called in a folder.
_UPLOADED = "|".join(map(re.escape, (MANIFEST, *FILES)))
UPLOADED = re.compile(rf"(?:({PARTITION.pattern})/)?({_UPLOADED}|data-\d{{5}}\.bin)", re.ASCII)

CHUNK_RECORD = np.dtype([("first", "<u8"), ("crc32c", "<u4"), ("reserved", "<u4")])

Words = npt.NDArray[np.uint64]


class Entries(NamedTuple):
    """The fields of directory entries, an array each. `data_file`: DLFS's node. `present` is 0 in a file."""

    data_file: Words
    key: Words
    offset: Words
    length: Words
    present: Words


def unpack_entries(entries: Words) -> Entries:
    """entries: [n, 2] uint64, as in directory.bin."""
    place, extent = entries[:, 0], entries[:, 1]
    one = np.uint64(1)
    return Entries(
        place >> np.uint64(KEY_BITS),
        place & np.uint64((1 << KEY_BITS) - 1),
        extent >> np.uint64(LENGTH_BITS + 1),
        extent >> one & np.uint64(LARGE_LENGTH),
        extent & one,
    )


def pack_entries(
    data_file: int, keys: Words, offsets: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> Words:
    """[n, 2] uint64: the entries of samples of one data file."""
    extents = offsets << LENGTH_BITS + 1 | np.minimum(lengths, LARGE_LENGTH) << 1
    return np.stack([np.uint64(data_file << KEY_BITS) | keys, extents.astype(np.uint64)], axis=1)


def text_of(name: bytes) -> str:
    """A sample's name as text; bytes that are no UTF-8 become lone surrogates."""
    return name.decode("utf-8", "surrogateescape")


def bytes_of(name: str) -> bytes:
    """A sample's name as its file has it. UnicodeEncodeError, a ValueError, where it is no text."""
    return name.encode("utf-8", "surrogateescape")


def data_file_name(data_file: int) -> str:
    """The name of the ``data_file``-th data file."""
    return f"data-{data_file:05d}.bin"


def partition_name(partition: int, partitions: int) -> str:
    """The folder of one of several partitions."""
    return f"part-{partition:05d}-of-{partitions:05d}"


def lookup_bits(samples: int) -> int:
    """How many top bits of a key choose its bucket: four to eight samples a bucket."""
    return max(0, samples.bit_length() - 3)


def chunks_of(data_file_bytes: int, chunk_bytes: int) -> int:
    """Chunks of a data file that holds so many bytes of samples: at least one."""
    return max(1, -(-data_file_bytes // chunk_bytes))


def long_edge_bytes(chunk_bytes: int) -> int:
    """A sample that crosses its chunk's end and is at least so long is a long edge: it is read by itself."""
    return chunk_bytes // 4


def buffer_bytes(chunk_bytes: int) -> int:
    """Memory for the body of any chunk, read in whole blocks of 4096 bytes."""
    return chunk_bytes + long_edge_bytes(chunk_bytes) + 2 * 4096
