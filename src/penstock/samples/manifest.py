"""What a sample store says of itself: `store.json`, written last. A folder without one is no store."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from penstock._native import Descriptor
from penstock.core import files
from penstock.errors import InvalidFile
from penstock.samples.layout import data_file_name
from penstock.storage import files as storage_files
from penstock.storage.checksum import crc32c

if TYPE_CHECKING:
    from typing_extensions import Self

AGAIN = "Copy or pack the store again"

LARGEST_MANIFEST_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """One data file: what DLFS calls a storage node.

    samples      that lie in it
    chunks       its chunks, the last one padded with zeros
    size_bytes   of its samples, without the padding
    """

    samples: int
    chunks: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class FileSum:
    """Size and CRC-32C of one of the store's other files."""

    size_bytes: int
    crc32c: int


@dataclass(frozen=True, kw_only=True)
class Field:
    """A field of samples encoded as `record`.

    dtype   numpy's text for it, little-endian, such as "<f4"
    shape   of one sample's
    """

    name: str
    dtype: str
    shape: tuple[int, ...] = ()


class Sealed(msgspec.Struct, frozen=True, kw_only=True):
    """A value whose last field, `crc32c`, is of its JSON text with this field 0."""

    def sealed(self) -> Self:
        """The same, with the right checksum."""
        blank = replace(self, crc32c=0)
        return replace(blank, crc32c=crc32c(msgspec.json.encode(blank)))

    def is_sealed(self) -> bool:
        return self.sealed() == self

    def save(self, path: Path) -> Self:
        """Write the sealed value to ``path``, durably, and give it. Raises OSError."""
        sealed = self.sealed()
        files.save(sealed, path)
        return sealed


# The file keeps its earlier names.
_IN_THE_FILE = {"data_files": "nodes", "partition": "part", "partitions": "parts"}


class StoreManifest(Sealed, frozen=True, kw_only=True, rename=_IN_THE_FILE):
    """A sample store, whole: once this is saved as `store.json`, all other files must be durable.

    samples      how many
    chunk_bytes  the grid of the data files
    data_files   its data files
    files        the others, by name
    encoding     "raw": bytes; "record": the `fields`, one after the other; "msgpack": a map
    fields       of "record", in order; empty otherwise
    classes      what labels.bin counts; empty where samples have no class
    partition    which of `partitions`, where several processes packed one source
    source       what was packed, for people
    metadata     the user's own
    crc32c       of the manifest's JSON text with this field 0
    """

    samples: int
    chunk_bytes: int
    data_files: tuple[DataFile, ...]
    files: dict[str, FileSum]
    encoding: str = "raw"
    fields: tuple[Field, ...] = ()
    classes: tuple[str, ...] = ()
    partition: int = 0
    partitions: int = 1
    source: str = ""
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    crc32c: int = 0

    @property
    def identity(self) -> str:
        """32 hexadecimal digits: the same for the same samples, names and order."""
        contents = {name: (sum_.size_bytes, sum_.crc32c) for name, sum_ in sorted(self.files.items())}
        text = msgspec.json.encode((contents, self.chunk_bytes, self.data_files, self.encoding, self.fields))
        return hashlib.sha256(text).hexdigest()[:32]

    @property
    def size_bytes(self) -> int:
        """Of all samples."""
        return sum(data_file.size_bytes for data_file in self.data_files)

    @property
    def chunks(self) -> int:
        return sum(data_file.chunks for data_file in self.data_files)

    @property
    def file_sizes(self) -> dict[str, int]:
        """Bytes of each file of the store but this one, by name."""
        sizes = {name: self.files[name].size_bytes for name in sorted(self.files)}
        for number, data_file in enumerate(self.data_files):
            sizes[data_file_name(number)] = data_file.chunks * self.chunk_bytes
        return sizes


def open_regular(path: Path) -> Descriptor:
    """As `penstock.storage.files` does, but InvalidFile for what is no regular file."""
    try:
        return storage_files.open_regular(path)
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.EINVAL):
            raise
        raise InvalidFile(f"{path} is not a regular file. {AGAIN}") from error


@contextmanager
def reading(path: Path) -> Iterator[FileIO]:
    """The same, for Python to read, unbuffered. Raises as `open_regular` does."""
    with open_regular(path) as descriptor, FileIO(descriptor.fileno(), closefd=False) as file:
        yield file


def decoded_manifest(text: bytes, path: str) -> StoreManifest:
    """The manifest in a file's bytes; errors call it ``path``. Raises InvalidFile where it is damaged."""
    if len(text) > LARGEST_MANIFEST_BYTES:
        raise InvalidFile(
            f"{path} has more than {LARGEST_MANIFEST_BYTES} bytes: it is not a manifest. {AGAIN}"
        )
    try:
        manifest = files.decoded(StoreManifest, text, path)
    except InvalidFile as error:
        raise InvalidFile(f"{error}. {AGAIN}") from error
    if not manifest.is_sealed():
        raise InvalidFile(f"{path} is damaged: its checksum is wrong. {AGAIN}")
    return manifest
