"""A store on a namespace: what lies there, its files as memory, and what a target has to offer."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from penstock.errors import InvalidArgument, InvalidFile, SampleError
from penstock.samples.failures import from_target
from penstock.samples.layout import MANIFEST
from penstock.samples.manifest import LARGEST_MANIFEST_BYTES
from penstock.samples.places import (
    Bytes,
    Place,
    StoreFile,
    Target,
    check_size,
    check_whole,
    partition_names,
)
from penstock.samples.remote.layout import (
    AGAIN,
    SUPERBLOCK_BYTES,
    SUPERBLOCK_OFFSETS,
    StoredFile,
    Superblock,
    decoded_table,
    find_superblock,
)
from penstock.storage.aligned import AlignedBuffer, align_down, align_up
from penstock.storage.checksum import crc32c
from penstock.storage.nvme.contents import HEAD_BYTES, known_contents
from penstock.storage.nvme.namespace import (
    DEFAULT_TIMEOUT_S,
    Namespace,
    Subsystem,
    TargetError,
    namespaces_of,
    subsystems_of,
)
from penstock.storage.nvme.url import Url, parse_portal, parse_url
from penstock.storage.objects import FORMS
from penstock.units import format_bytes


def read_superblock(device: Namespace, name: str) -> tuple[Superblock | None, tuple[str, ...]]:
    """What the superblocks of a namespace say: see `find_superblock`."""
    size_bytes = align_up(SUPERBLOCK_BYTES, device.block_bytes)
    copies = []
    for offset in SUPERBLOCK_OFFSETS:
        copy = AlignedBuffer(size_bytes)
        if offset + size_bytes <= device.size_bytes:  # nothing lies on a namespace so small
            device.read_into(offset, copy.view())
        copies.append(bytes(copy.view()[:SUPERBLOCK_BYTES]))
    return find_superblock(copies, device.size_bytes, name)


def contents(device: Namespace) -> str | None:
    """What lies on a namespace without a store, in words; None for nothing."""
    head = bytearray(min(HEAD_BYTES, device.size_bytes))
    device.read_into(0, memoryview(head))
    return known_contents(head)


_READ_BYTES = 8 << 20
_UPLOAD = "penstock samples upload STORE URL"


Files = dict[str, dict[str, StoredFile]]  # by partition and name; "" where the store is none of several


def read_store(device: Namespace, name: str) -> tuple[Superblock, tuple[str, ...], Files]:
    """The superblock of the store on ``device``, what is wrong with its other copy, and its files.

    Raises SampleError where there is none, or not all of it; InvalidFile where it is damaged.
    """
    superblock, problems = read_superblock(device, name)
    if superblock is None:
        there = contents(device)
        what = "it is empty" if there is None else f"it holds {there}"
        raise SampleError(f"{name} has no sample store: {what}. Upload one: {_UPLOAD}")
    if not superblock.complete:
        raise SampleError(
            f"the upload to {name} was not finished. Run it again, with the same store: it goes on where it "
            "stopped"
        )
    table = read_bytes(device, superblock.table_offset, superblock.table_bytes)
    return superblock, problems, decoded_table(table.tobytes(), superblock, name)


def read_bytes(device: Namespace, offset: int, size_bytes: int) -> Bytes:
    """Bytes of the device, in private memory that forked children share. Read-only."""
    begin = align_down(offset, device.block_bytes)
    end = align_up(offset + size_bytes, device.block_bytes)
    try:
        buffer = AlignedBuffer(max(end - begin, 1))
    except (OSError, OverflowError, MemoryError) as error:
        raise SampleError(
            f"there is no memory for {format_bytes(size_bytes)} of a store's directory. Free memory, or look "
            "at the store: penstock samples verify"
        ) from error
    view = buffer.view()
    for at in range(begin, end, _READ_BYTES):
        device.read_into(at, view[at - begin : min(at + _READ_BYTES, end) - begin])
    return np.asarray(view[offset - begin : offset - begin + size_bytes].toreadonly())


class RemoteStore:
    """The store on a namespace. It connects at first need, and anew in a forked child.

    problems   what is wrong with one of its superblocks, in words
    """

    def __init__(self, url: Url, timeout_s: float) -> None:
        """``url``: of the namespace, without a fragment."""
        self.url, self.timeout_s = url, timeout_s
        self._namespace: Namespace | None = None
        self._superblock: Superblock | None = None
        self._files: Files = {}
        self.problems: tuple[str, ...] = ()

    def places(self) -> list[Place]:
        """Of all partitions, in order. Raises as `files`, and where one is missing."""
        files, where = self.files(), str(self.url)
        names = [""] if "" in files else partition_names(sorted(files), where)
        check_whole(where, names, [name for name in names if name not in files], AGAIN)
        return [RemotePlace(self, name) for name in names]

    def files(self) -> Files:
        """Of all partitions.

        Raises SampleError where the namespace cannot be reached, or has no store; InvalidFile where that is
        damaged.
        """
        if self._superblock is None:
            with _as_sample_errors():
                self._superblock, self.problems, self._files = read_store(self._connected(), str(self.url))
        return self._files

    def namespace(self) -> Namespace:
        """The namespace, open in this process. Raises SampleError where it cannot be reached any more, or has
        another store by now."""
        self.files()
        namespace = self._namespace
        if namespace is None or not namespace.is_usable:
            with _as_sample_errors():
                namespace = self._connected()
                now, _ = read_superblock(namespace, str(self.url))
            if now != self._superblock:
                raise SampleError(f"{self.url} has another store than when it was mounted: mount it again")
        return namespace

    def _connected(self) -> Namespace:
        # Two threads may both do it, and one is closed when nobody has it: a lock could outlive a fork.
        namespace = self._namespace
        if namespace is None or not namespace.is_usable:
            self._namespace = namespace = Namespace(self.url, self.timeout_s)
        return namespace

    def error_text(self) -> str:
        """Why a read has failed last, in the initiator's words; empty where it has not."""
        namespace = self._namespace
        return namespace.error_text() if namespace is not None and namespace.is_usable else ""

    def close(self) -> None:
        """Let go of the namespace, until it is needed again."""
        namespace, self._namespace = self._namespace, None
        if namespace is not None:
            namespace.close()


def remote_places(url: str | os.PathLike[str], timeout_s: float) -> list[Place]:
    """One partition, or all of them, as ``url`` says. Raises InvalidArgument, and as `places`."""
    parsed = parse_url(os.fspath(url), f"a folder, {FORMS}, https://")
    store = RemoteStore(replace(parsed, fragment=""), timeout_s)
    return [RemotePlace(store, parsed.fragment)] if parsed.fragment else store.places()


class RemotePlace(Place):
    """A store, or a partition of one, on a namespace."""

    is_remote = True
    hang_text = "The target, or the network to it, hangs or is very slow: look at both"

    def __init__(self, store: RemoteStore, partition: str) -> None:
        """``partition``: its name, empty where the store is none of several."""
        self._store, self._partition = store, partition
        self.name = partition or str(self)

    def __str__(self) -> str:
        return str(replace(self._store.url, fragment=self._partition))

    def path_of(self, name: str) -> str:
        return f"{name} of {self}"

    def manifest_text(self) -> bytes:
        file, path = self._file(MANIFEST), self.path_of(MANIFEST)
        if file.size_bytes > LARGEST_MANIFEST_BYTES:
            raise InvalidFile(f"{path} has {file.size_bytes} bytes: it is no manifest. {AGAIN}")
        text = self.load(MANIFEST, file.size_bytes)
        if crc32c(text.data) != file.crc32c:
            raise InvalidFile(f"{path} is damaged: its checksum is wrong. {AGAIN}")
        return text.tobytes()

    def size_bytes(self, name: str) -> int:
        return self._file(name).size_bytes

    def load(self, name: str, wanted_bytes: int, ahead: bool = True) -> Bytes:
        file = self._file(name, wanted_bytes)
        with _as_sample_errors():
            return read_bytes(self._store.namespace(), file.offset, file.size_bytes)

    def open(self, name: str, wanted_bytes: int | None = None) -> StoreFile:
        store, file = self._store, self._file(name, wanted_bytes)

        def read_into(position: int, view: memoryview) -> None:
            if position + view.nbytes > file.size_bytes:
                raise OSError(0, "it ends there")
            with _as_sample_errors():
                store.namespace().read_into(file.offset + position, view)

        # The namespace stays open: it is the store's. A forked child connects for itself.
        return StoreFile(lambda: Target(*store.namespace().file, file.offset), read_into, lambda: None)

    def read_failure(self, error_number: int) -> tuple[str, str]:
        reason = self._store.error_text() or os.strerror(error_number or errno.EIO)
        return reason, "Look at the target and the network. Once it is back, the store reads again"

    def problems(self) -> Sequence[str]:
        self._store.files()
        return self._store.problems

    def close(self) -> None:
        self._store.close()

    def _file(self, name: str, wanted_bytes: int | None = None) -> StoredFile:
        files = self._store.files().get(self._partition)
        if files is None:
            raise SampleError(f"{self._store.url} has no partition {self._partition!r}: leave # out")
        file = files.get(name)
        if file is None:
            raise InvalidFile(f"{self.path_of(name)} is missing. {AGAIN}")
        if wanted_bytes is not None:
            check_size(self.path_of(name), file.size_bytes, wanted_bytes, AGAIN)
        return file


@contextmanager
def _as_sample_errors() -> Iterator[None]:
    try:
        yield
    except TargetError as error:
        raise from_target(error) from error


@dataclass(frozen=True, kw_only=True)
class RemoteNamespace:
    """A namespace that a target has to offer, or a subsystem of which none can be used.

    url          of the namespace, as `mount` and `upload` take it; of a subsystem without ``?ns=``
    size_bytes   None where it cannot be used
    block_bytes  None where it cannot be used
    holds        what lies there, such as "a store", or "nothing"
    problem      why it cannot be used; empty where it can
    """

    url: str
    size_bytes: int | None = None
    block_bytes: int | None = None
    holds: str = ""
    problem: str = ""


def discover(portal: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[RemoteNamespace]:
    """What the target at ``portal`` lets this host use. Nothing is written.

    portal     HOST, HOST:PORT, or a URL that begins so
    timeout_s  longest wait for an answer

    Raises SampleError where the target cannot be reached, InvalidArgument for what is no address.
    """
    with _as_sample_errors():
        found = subsystems_of(parse_portal(portal), timeout_s)
    return [
        each for subsystem in found if subsystem.kind == "nvme" for each in _namespaces(subsystem, timeout_s)
    ]


def _namespaces(subsystem: Subsystem, timeout_s: float) -> Iterator[RemoteNamespace]:
    url, problem, numbers = str(subsystem.url(1)), "", []
    try:
        parse_url(url)
        if subsystem.transport != "tcp":
            problem = f"it speaks {subsystem.transport}, and penstock TCP"
        elif subsystem.security:
            problem = "it asks for TLS, which penstock does not speak"
        elif not (numbers := namespaces_of(subsystem, timeout_s)):
            problem = "it has no namespace for this host"
    except InvalidArgument as error:
        problem = f"what the target says of it cannot be used: {error}"
    except TargetError as error:
        problem = str(error)
    if problem:
        yield RemoteNamespace(url=url.rpartition("?")[0], problem=problem)
    for number in numbers:
        yield _namespace(subsystem.url(number), timeout_s)


def _namespace(url: Url, timeout_s: float) -> RemoteNamespace:
    try:
        with Namespace(url, timeout_s) as namespace:
            size_bytes, block_bytes = namespace.size_bytes, namespace.block_bytes
            holds = _contents_or_store(namespace, str(url))
    except TargetError as error:
        return RemoteNamespace(url=str(url), problem=str(error))
    return RemoteNamespace(url=str(url), size_bytes=size_bytes, block_bytes=block_bytes, holds=holds)


def _contents_or_store(device: Namespace, name: str) -> str:
    try:
        superblock, _ = read_superblock(device, name)
    except InvalidFile as error:
        return f"a damaged store: {error}"
    if superblock is None:
        return contents(device) or "nothing"
    return "a store" if superblock.complete else "part of a store, whose upload was not finished"
