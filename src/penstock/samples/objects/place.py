"""A store below a URL of objects: its small files as memory or in the cache, its data files by ranges."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from penstock.errors import InvalidFile, SampleError, with_errno
from penstock.samples.layout import MANIFEST, data_file_name
from penstock.samples.manifest import LARGEST_MANIFEST_BYTES, StoreManifest
from penstock.samples.objects.cache import CachedStore, CacheOptions, DiskCache
from penstock.samples.objects.fetching import Fetched
from penstock.samples.places import (
    Bytes,
    Place,
    StoreFile,
    Target,
    check_size,
    check_whole,
    mapped,
    partition_names,
)
from penstock.storage.checksum import crc32c_at
from penstock.storage.objects import Bucket, ObjectError, ObjectInfo
from penstock.storage.threads import in_parallel

AGAIN = "Upload the store again (penstock samples upload --overwrite)"
_RANGE_BYTES = 8 << 20  # of a small file that is not so small


def object_places(url: str, timeout_s: float, cache: CacheOptions | None) -> list[Place]:
    """The places of the store at ``url``, or of the partitions below it, in order.

    Raises SampleError where there is none or a partition is missing, InvalidArgument.
    """
    bucket = Bucket(url, timeout_s)
    disk = None if cache is None else DiskCache(cache)
    place = ObjectPlace(bucket, disk)
    try:
        place.manifest()
        return [place]
    except SampleError as error:
        if error.errno != errno.ENOENT or not bucket.is_writable:
            raise
    with as_sample_errors():
        folders = bucket.folders()
    names = partition_names(folders, bucket.url)
    if not names:
        raise SampleError(
            f"{bucket.url} has no sample store: {MANIFEST} is missing. Upload one: penstock samples "
            "upload STORE URL. An upload that was broken off goes on by the same command"
        )
    check_whole(bucket.url, names, [name for name in names if name not in folders], AGAIN)
    return [ObjectPlace(Bucket(bucket.url_of(name), timeout_s), disk) for name in names]


@contextmanager
def as_sample_errors(again: str = "") -> Iterator[None]:
    """What the seam raises becomes a SampleError, which ends with ``again``."""
    try:
        yield
    except ObjectError as error:
        remedies = {
            errno.ENOENT: "Give the URL of a store",
            errno.EACCES: "Give yourself the right to it, or other credentials: the environment, a profile",
            errno.ESTALE: "The store was changed: mount it again",
            errno.EFBIG: "It is no manifest: give the URL of a store",
        }
        remedy = remedies.get(error.errno or 0, "Look at the server and the network")
        raise with_errno(SampleError(f"{error.strerror}. {remedy}{again}"), error.errno) from error


class ObjectPlace(Place):
    """A store, or a partition of one, below a URL."""

    is_remote = True
    hang_text = "The server, or the network to it, hangs or is very slow: look at both"

    def __init__(self, bucket: Bucket, disk: DiskCache | None) -> None:
        """``disk``: keeps what is fetched; None: nothing does."""
        self._bucket, self._disk = bucket, disk
        if disk is not None:
            where = f"or the disk of cache_dir={str(disk)!r}"
            self.hang_text = f"The server, the network to it, {where} hangs or is very slow: look at them"
        self.name = bucket.url.rpartition("/")[2]
        self._manifest: StoreManifest | None = None
        self._text = b""
        self._infos: dict[str, ObjectInfo] = {}
        self._cached: CachedStore | None = None
        self._failure = 0, ""

    def __str__(self) -> str:
        return self._bucket.url

    def path_of(self, name: str) -> str:
        return self._bucket.url_of(name)

    def manifest(self) -> StoreManifest:
        if self._manifest is None:
            self._manifest = super().manifest()
        return self._manifest

    def manifest_text(self) -> bytes:
        with as_sample_errors():
            self._text = bytes(self._bucket.read(MANIFEST, most_bytes=LARGEST_MANIFEST_BYTES))
        return self._text

    def size_bytes(self, name: str) -> int:
        try:
            return self._info(name).size_bytes
        except ObjectError as error:
            raise OSError(error.errno, error.strerror) from error

    def load(self, name: str, wanted_bytes: int, ahead: bool = True) -> Bytes:
        store = self._store()
        if store is None:
            return np.frombuffer(self._fetched(name, wanted_bytes), np.uint8)
        path, listed = store.folder / name, self.manifest().files.get(name)
        for _ in range(2):
            with store.cache.checked(wanted_bytes):
                try:
                    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                except FileNotFoundError:
                    store.cache.make_room(wanted_bytes)
                    part = path.with_name(f"{name}.{int.from_bytes(os.urandom(8), 'big')}.part")
                    data = self._fetched(name, wanted_bytes)
                    try:
                        with open(part, "wb") as file:
                            file.write(data)
                        os.replace(part, path)
                    finally:
                        part.unlink(missing_ok=True)
                    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    if os.fstat(descriptor).st_size == wanted_bytes:
                        found = mapped(descriptor, wanted_bytes, ahead)
                        if listed is None or crc32c_at(found.ctypes.data, found.size) == listed.crc32c:
                            return found
                finally:
                    os.close(descriptor)
                path.unlink(missing_ok=True)  # not what it was: fetch it again
        raise InvalidFile(f"{self.path_of(name)} is damaged: its checksum is wrong. {AGAIN}")

    def open(self, name: str, wanted_bytes: int | None = None) -> StoreFile:
        with as_sample_errors():
            info = self._info(name)
        if wanted_bytes is not None:
            check_size(self.path_of(name), info.size_bytes, wanted_bytes, AGAIN)

        def read(begin: int, end: int) -> memoryview:
            try:
                return self._bucket.read(name, begin, end, info.tag)
            except ObjectError as error:
                self._failure = error.errno or 0, error.reason
                raise
            except Exception as error:
                self._failure = 0, f"{type(error).__name__}: {error}"
                raise

        def read_into(position: int, view: memoryview) -> None:
            if position + view.nbytes > info.size_bytes:
                raise OSError(0, "it ends there")
            with as_sample_errors():
                view[:] = read(position, position + view.nbytes)

        store = self._store()
        numbers = [data_file_name(number) for number in range(len(self.manifest().data_files))]
        if store is None or name not in numbers:
            return StoreFile(lambda: Target(-1, -1, 1, 0), read_into, lambda: None, Fetched(read))
        kept = store.files[numbers.index(name)]
        target = Target(kept.descriptor, -1, 1, 0)
        return StoreFile(lambda: target, read_into, lambda: None, Fetched(read, kept))

    def read_failure(self, error_number: int) -> tuple[str, str]:
        number, reason = self._failure
        reason = reason or os.strerror(error_number or errno.EIO)
        if error_number == errno.ESTALE:
            return reason, "The store was changed under this mount: mount it again"
        if number == errno.EACCES:
            return reason, "Give yourself the right to it, or mount it again with other credentials"
        return reason, "Look at the server and the network. Once it is back, the store reads again"

    def close(self) -> None:
        store, self._cached = self._cached, None
        if store is not None:
            store.close()

    def _store(self) -> CachedStore | None:
        if self._disk is not None and self._cached is None:
            manifest = self.manifest()
            sizes = [(each.chunks * manifest.chunk_bytes, each.chunks) for each in manifest.data_files]
            self._cached = self._disk.open(self._text, sizes)
        return self._cached

    def _info(self, name: str) -> ObjectInfo:
        if name not in self._infos:
            if self._bucket.is_writable and not self._infos:
                self._infos = self._bucket.listed()
            if name not in self._infos:
                self._infos[name] = self._bucket.info(name)
        return self._infos[name]

    def _fetched(self, name: str, wanted_bytes: int) -> bytearray:
        """A whole small file, in ranges at once."""
        with as_sample_errors():
            info = self._info(name)
            check_size(self.path_of(name), info.size_bytes, wanted_bytes, AGAIN)
            data = bytearray(wanted_bytes)
            view = memoryview(data)

            def read(begin: int) -> None:
                end = min(begin + _RANGE_BYTES, wanted_bytes)
                view[begin:end] = self._bucket.read(name, begin, end, info.tag)

            in_parallel(read, range(0, wanted_bytes, _RANGE_BYTES))
        return data
