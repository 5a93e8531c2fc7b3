"""A packed store on this machine, as it is to be uploaded, and what an upload has done."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import InvalidArgument
from penstock.samples.catalog import Directory
from penstock.samples.layout import MANIFEST
from penstock.samples.places import PathLike, StoreFolder, places_of
from penstock.storage.checksum import crc32c
from penstock.storage.nvme.url import is_url


@dataclass(frozen=True, kw_only=True)
class Upload:
    """What an upload has done.

    url             of the store, as `mount` takes it
    size_bytes      of all its files
    written_bytes   of them, this time: the others were there already
    used_bytes      of the namespace, from its beginning; of objects, of all of them
    """

    url: str
    samples: int
    files: int
    size_bytes: int
    written_bytes: int
    used_bytes: int


@dataclass(frozen=True)
class LocalStore:
    """A packed store, as it is to be uploaded.

    paths     of its files, by their names on the namespace, in order
    sizes     of each, in bytes
    sums      CRC-32C of those whose manifest has it
    store_id  16 bytes: the same for the same files
    """

    paths: dict[str, Path]
    sizes: dict[str, int]
    sums: dict[str, int]
    store_id: bytes
    samples: int


def local_store(path: PathLike) -> LocalStore:
    """The files of the store at ``path``: of a store, or of the folder of its partitions.

    Raises SampleError where there is no store or a partition is missing, InvalidFile where one is damaged.
    """
    paths: dict[str, Path] = {}
    sizes: dict[str, int] = {}
    sums: dict[str, int] = {}
    identity = hashlib.sha256()
    samples = 0
    if is_url(path):
        raise InvalidArgument(f"{path} is on another machine already: give the folder of a store")
    for place in places_of(path):
        assert isinstance(place, StoreFolder)
        manifest = Directory.load(place).manifest
        prefix = f"{place.name}/" if place.path != Path(os.path.abspath(path)) else ""
        text = place.load(MANIFEST, place.size_bytes(MANIFEST)).tobytes()
        identity.update(prefix.encode() + hashlib.sha256(text).digest())
        samples += manifest.samples
        for name, size_bytes in {MANIFEST: len(text), **manifest.file_sizes}.items():
            place.open(name, size_bytes).close()
            paths[prefix + name], sizes[prefix + name] = place.path / name, size_bytes
        sums |= {prefix + name: file.crc32c for name, file in manifest.files.items()}
        sums[prefix + MANIFEST] = crc32c(text)
    return LocalStore(paths, sizes, sums, identity.digest()[:16], samples)
