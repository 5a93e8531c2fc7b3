"""A packed store of this machine, served to others by NVMe over TCP: to read, as if it had been uploaded.

The files stay where they are. What peers see is a namespace in the layout of `remote.layout`, whose
superblocks and table are made here. The target is C++ (csrc/nvme/server.cpp), on threads without the GIL.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid
import weakref
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from penstock import _native
from penstock._native import Descriptor
from penstock.errors import InvalidArgument, SampleError
from penstock.samples.failures import cannot_open
from penstock.samples.manifest import open_regular
from penstock.samples.places import PathLike
from penstock.samples.remote.layout import SUPERBLOCK_OFFSETS, completed, encoded_table, plan_upload
from penstock.samples.remote.local import local_store
from penstock.storage.files import Closing
from penstock.storage.nvme.keys import keys_for
from penstock.storage.nvme.url import DEFAULT_PORT, Portal, Url, parse_portal

LISTEN = f"127.0.0.1:{DEFAULT_PORT}"

_LOOK_S = 1.0  # between two looks at the files
_BACKLOG = 128


class Served(NamedTuple):
    """What a server has done so far.

    connections     open now
    turned_away     connections beyond the 512 that are served at once
    reads           commands that were answered; read_bytes: of their data
    refused_writes  commands that would have changed the store
    violations      connections that were ended because the peer broke the protocol
    denied          connections that were ended because the peer did not show the key
    """

    connections: int
    turned_away: int
    reads: int
    read_bytes: int
    refused_writes: int
    violations: int
    denied: int


class Server(Closing):
    """A store that is served, made by `serve`. A context manager: at its end peers lose the store.

    It needs no thread of Python. A forked child does not serve.

    portal   the address and the port where it listens
    url      of the store, as `mount` takes it
    samples  of the store
    asks     peers have to show a key
    """

    def __init__(self, path: PathLike, listen: str) -> None:
        """`serve` does this."""
        wanted, store = _portal(listen), local_store(path)
        plan = plan_upload(store.sizes)
        files = [file._replace(crc32c=store.sums.get(file.name, 0)) for file in plan.files]
        table, used_bytes = encoded_table(files), plan.superblock.used_bytes
        # A function of the store: one that is served again is the same to those that have mounted it.
        fresh = replace(plan.superblock, upload_id=store.store_id, store_id=store.store_id)
        superblock = completed(replace(fresh, namespace_bytes=used_bytes), table)
        head = bytearray(superblock.table_offset + len(table))
        for offset in SUPERBLOCK_OFFSETS:
            encoded = superblock.encoded()
            head[offset : offset + len(encoded)] = encoded
        head[superblock.table_offset :] = table
        self.samples, self._process = store.samples, os.getpid()
        self._final = Served(0, 0, 0, 0, 0, 0, 0)
        self._paths = [store.paths[file.name] for file in files if file.size_bytes]
        with contextlib.ExitStack() as opened:
            extents = []
            for file in files:
                if file.size_bytes:
                    descriptor = opened.enter_context(_opened(store.paths[file.name]))
                    extents.append((file.offset, file.size_bytes, descriptor.fileno()))
            self._descriptors = [descriptor for _, _, descriptor in extents]
            listener = opened.enter_context(_listener(wanted))
            self.portal = Portal(*listener.getsockname()[:2])
            # Of any address: the name by which peers know this machine.
            is_any = self.portal.host in ("0.0.0.0", "::")
            host = socket.gethostname() if is_any else wanted.host
            nqn = f"nqn.2014-08.org.nvmexpress:uuid:{uuid.UUID(bytes=store.store_id)}"
            keys = keys_for(nqn)
            self.asks = bool(keys.host)
            self.url = str(Url(host=host, port=self.portal.port, subsystem_nqn=nqn, namespace=1))
            try:
                self._native = _native.NvmeServer(
                    listener.fileno(),
                    subsystem_nqn=nqn,
                    id=store.store_id,
                    head=bytes(head),
                    extents=extents,
                    size_bytes=used_bytes,
                    host_key=keys.host,
                    controller_key=keys.controller,
                )
            except _native.NvmeError as error:  # keys, and no libcrypto
                raise SampleError(f"cannot serve {os.fspath(path)}: {error.args[1]}") from error
            self._finalizer = weakref.finalize(self, _close, self._native, opened.pop_all())

    def served(self) -> Served:
        """What it has done so far; once it is closed, what it did until then."""
        return Served(**self._native.totals()) if self._finalizer.alive else self._final

    def check(self) -> None:
        """Raises SampleError where the store was changed, replaced or removed since it is served.

        Peers get none of the bytes of a file that has changed: their reads fail.
        """
        if not self._finalizer.alive:
            return
        number = self._native.changed()
        if number < 0:
            number = next((at for at in range(len(self._paths)) if self._is_another(at)), -1)
        if number >= 0:
            raise SampleError(
                f"{self._paths[number]} was changed, replaced or removed while it was served. Serve the "
                "store again; the peers have to mount it again"
            )

    def wait(self, timeout_s: float | None = None) -> None:
        """Look at the store now and then, for so long; None: until it is closed. Raises as `check`."""
        end_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while self._finalizer.alive:
            self.check()
            if (left_s := end_s - time.monotonic()) <= 0:
                return
            time.sleep(min(left_s, _LOOK_S))

    def close(self) -> None:
        """Stop serving, and free the port. Idempotent."""
        if self._finalizer.alive:
            if self._process == os.getpid():
                self._final = self.served()._replace(connections=0)
            self._finalizer()

    def _is_another(self, number: int) -> bool:
        try:
            there = os.stat(self._paths[number])
        except OSError:
            return True
        held = os.fstat(self._descriptors[number])
        return (there.st_dev, there.st_ino) != (held.st_dev, held.st_ino)


def _close(native: _native.NvmeServer, opened: contextlib.ExitStack) -> None:
    native.close()
    opened.close()


def serve(path: PathLike, listen: str = LISTEN) -> Server:
    """Serve the packed store at ``path`` to other machines, to read, by NVMe over TCP.

    path    a store, or the folder in which several processes packed their partitions, on this machine
    listen  ``ADDRESS:PORT``, the address of one network of this machine; 0.0.0.0 or [::] for all. Without a
            port 4420, with port 0 any that is free

    Every host that reaches the address can read the store, unless there is a key for it (PENSTOCK_NVME_KEY,
    PENSTOCK_NVME_KEY_FILE): then only those that show it. None can change it. Others mount ``Server.url``.

    Raises SampleError where there is no store, or one that cannot be read, or the address cannot be had;
    InvalidFile where the store is damaged; InvalidArgument.
    """
    return Server(path, listen)


def _portal(listen: str) -> Portal:
    free = listen.endswith(":0")
    try:
        portal = parse_portal(listen.removesuffix(":0"))
    except InvalidArgument as error:
        raise InvalidArgument(f"cannot listen there: {error}") from error
    return portal._replace(port=0) if free else portal


def _listener(portal: Portal) -> socket.socket:
    family = socket.AF_INET6 if ":" in portal.host else socket.AF_INET
    try:
        return socket.create_server(portal, family=family, backlog=_BACKLOG)
    except OSError as error:
        problem = str(error.strerror).partition(" (while")[0]  # what create_server adds says nothing new
        raise SampleError(
            f"cannot listen on {portal}: {problem}. Give an address of this machine, and a "
            "port that nothing else listens on: --listen ADDRESS:PORT"
        ) from error


def _opened(path: Path) -> Descriptor:
    try:
        return open_regular(path)
    except OSError as error:
        raise cannot_open(path, error) from error
