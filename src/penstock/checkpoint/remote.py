"""Checkpoints that are objects, at URLs such as ``s3://bucket/run/model.safetensors``."""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.errors import CheckpointError, InvalidArgument, with_errno
from penstock.options import IoOptions
from penstock.storage import files
from penstock.storage.objects import Bucket, ObjectError
from penstock.storage.paths import IoPath
from penstock.storage.transfer import Transfer
from penstock.storage.workers import Workers

_THREADS = 16  # requests at once: an answer takes tens of milliseconds
_METHOD = "requests"
_REMEDIES = {
    errno.ENOMEM: "Free memory, or save with wait=True, which copies nothing as a whole.",
    errno.ENOENT: "Give the URL of a checkpoint that exists, in a bucket that exists.",
    errno.EACCES: "Give the credentials that the bucket wants, by the environment or a profile.",
    errno.ESTALE: "It was replaced meanwhile: load it again.",
    errno.ETIMEDOUT: "Look at the network, and at the endpoint that is configured.",
}


@dataclass(frozen=True)
class ObjectPath:
    """The URL of an object, as far as a path's methods are needed of it."""

    url: str
    bucket: Bucket = field(compare=False, repr=False)

    @classmethod
    def of(cls, url: str) -> ObjectPath:
        """Raises InvalidArgument."""
        folder, _, name = url.rpartition("/")
        if not name or folder.endswith((":/", ":")):
            raise InvalidArgument(f"{url} names no object: give the URL of a checkpoint, s3://BUCKET/NAME")
        return cls(url, Bucket(folder))

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        return "".join(self.name.rpartition(".")[1:]) if "." in self.name else ""

    def with_name(self, name: str) -> ObjectPath:
        return ObjectPath(self.bucket.url_of(name), self.bucket)

    def exists(self) -> bool:
        """Raises CheckpointError where that cannot be found out."""
        try:
            self.bucket.info(self.name)
        except ObjectError as error:
            if error.errno == errno.ENOENT:
                return False
            raise failed(error) from error
        return True

    def failure(self, error: OSError) -> CheckpointError:
        """Of writing it, before anything was sent."""
        return failed(ObjectError(error.errno or errno.EIO, f"{self} cannot be written: {error.strerror}"))

    def write(self, parts: Iterable[Any], size_bytes: int) -> None:
        """Write it: whole, or not at all. Raises CheckpointError."""
        try:
            self.bucket.write(self.name, parts, size_bytes=size_bytes)
        except ObjectError as error:
            # Where no answer came, the server may have done it all the same.
            if error.errno == errno.ETIMEDOUT:
                raise failed(error, "There is what was before, or all of the new one.") from error
            raise failed(error, "Nothing of it was left there.") from error


class OpenObject(files.Closing):
    """An object that is read. What replaces it meanwhile is an error. Raises CheckpointError."""

    opened = files.OpenFile()  # none

    def __init__(self, path: ObjectPath, io: IoOptions | None) -> None:
        no_io_paths(path, io)
        self._path = path
        try:
            self.size_bytes, self._tag = path.bucket.info(path.name)
        except ObjectError as error:
            raise failed(error) from error
        self._requests: _Requests | None = None

    def read(self, begin: int, end: int) -> bytes:
        try:
            return bytes(self.answer(begin, end))
        except ObjectError as error:
            raise failed(error) from error

    def answer(self, begin: int, end: int) -> memoryview:
        """Raises ObjectError."""
        return self._path.bucket.read(self._path.name, begin, end, self._tag)

    @property
    def way(self) -> IoPath:
        if self._requests is None:
            self._requests = _Requests(self)
        return IoPath("requests", _METHOD, "network", self._requests)

    def failure(self, error_number: int, offset: int, tensors: str) -> CheckpointError:
        error = self._requests.error if self._requests is not None else None
        return failed(error or ObjectError(error_number, f"{self._path} cannot be read: no answer in time"))

    def sibling(self, name: str) -> ObjectPath:
        return self._path.with_name(name)

    def close(self) -> None:
        if self._requests is not None:
            self._requests.close(1.0)


class _Requests(Workers):
    """A transport that reads an object. Offsets are those in the object, whatever the file of a transfer."""

    methods: tuple[str, ...] = (_METHOD,)

    def __init__(self, source: OpenObject) -> None:
        self._source = source
        self.error: ObjectError | None = None  # the first one
        super().__init__(_THREADS, "objects")

    def perform(self, transfer: Transfer, begin: int, end: int) -> int:
        try:
            data = self._source.answer(transfer.offset + begin, transfer.offset + end)
        except ObjectError as error:
            self.error = self.error or error
            return error.errno or errno.EIO
        ctypes.memmove(transfer.address + begin, np.frombuffer(data, np.uint8).ctypes.data, end - begin)
        return 0


def no_io_paths(path: ObjectPath, io: IoOptions | None) -> None:
    if io is not None:
        raise InvalidArgument(f"{path} is not on a disk: leave io out")


def failed(error: ObjectError, more: str = "") -> CheckpointError:
    said = f"checkpoint {error.strerror}.", _REMEDIES.get(error.errno or 0, ""), more
    return with_errno(CheckpointError(" ".join(filter(None, said))), error.errno)
