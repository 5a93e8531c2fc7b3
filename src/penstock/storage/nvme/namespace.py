"""Open namespaces, and who this machine says it is.

Those of one subsystem share an association in each process; none survives a fork.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from penstock import _native
from penstock.errors import with_errno
from penstock.storage.files import Closing
from penstock.storage.native import NvmeTransport
from penstock.storage.nvme.keys import FILE_VARIABLE, KEY_VARIABLE, keys_for
from penstock.storage.nvme.url import DISCOVERY_NQN, LARGEST_NQN_BYTES, Portal, Url
from penstock.storage.transfer import File, Kind, Transfer
from penstock.units import format_seconds

DEFAULT_TIMEOUT_S = 60.0

_CONNECT_SHARE, _COMMAND_SHARE, _RECONNECT_SHARE = 1 / 4, 1 / 4, 1 / 2  # of the time limit of a request
_LONGEST_CONNECT_S, _LONGEST_COMMAND_S, _LONGEST_KEEP_ALIVE_S = 15.0, 30.0, 15.0
_CLOSE_TIMEOUT_S = 5.0
_ANY = ("", "0.0.0.0", "::")  # of a target that listens at all its addresses
_ENCRYPTED_BYTES = 4096  # at once
_PATIENCE = 3.0  # times the time limit: by then the initiator has ended every request
_DONE = {"read": "read", "write": "written"}

_REMEDIES = {
    "refused": "Nothing listens there: start the target, or correct host and port",
    "unreachable": "Look at the host's name, the network and its firewalls",
    "timeout": "Look at the target and the network, or give more time",
    "not_found": "`penstock samples discover {portal}` lists the subsystems that this host may use",
    "not_supported": "Use a target, or a namespace, that does without",
    "denied": "Allow this host at the target: it calls itself {host_nqn}",
    "protocol": "What listens there is no NVMe/TCP target, or a faulty one",
    "namespace": "Look at ?ns= and at the target's namespaces",
    "unauthenticated": "Give both ends the same keys: this host looks for them in "
    f"{KEY_VARIABLE} and {FILE_VARIABLE}, and calls itself {{host_nqn}}",
    "lost": "Look at the target and the network: once it is back, the same goes on",
}


class TargetError(OSError):
    """A drive of another machine cannot be reached or used. Who spoke to it says what that means."""


class Namespace(Closing):
    """An open namespace. A context manager. Any number of threads may read and write.

    url          of it
    file         for transports and the sample reader
    size_bytes   of all its blocks
    block_bytes  what is written is a multiple of: a power of two, 512 to 65536
    queues       I/O queues that its target grants
    longest_request_s  in which a request has ended, well or in an error, whatever happens
    quiesce_s    after a connection is lost, the longest that the target may still carry out what it had got
    """

    def __init__(
        self, url: Url, timeout_s: float = DEFAULT_TIMEOUT_S, encrypted_from: int | None = None
    ) -> None:
        """Connects.

        timeout_s  in which a request ends, well or in an error: commands, and attempts to connect again,
                   have shares of it
        encrypted_from  what is written there and behind it is encrypted (AES-256-GCM), with a key that
                   lives as long as this object, and moved in whole pieces of 4096 bytes

        Raises TargetError where the target cannot be reached, or refuses, or has no such namespace, or where
        one of the two does not show its key; InvalidArgument where a key cannot be used.
        """
        self.url, self._timeout_s = url, timeout_s
        self._process = os.getpid()
        self._is_open = False
        with _target_errors(url):
            self._controller = _connected(url, timeout_s)
            try:
                found = self._controller.open_namespace(
                    url.namespace, -1 if encrypted_from is None else encrypted_from
                )
            except BaseException:
                self._controller.close(_CLOSE_TIMEOUT_S)
                raise
        self.block_bytes: int = found["block_bytes"]
        self.size_bytes: int = found["block_bytes"] * found["blocks"]
        piece_bytes = self.block_bytes if encrypted_from is None else max(self.block_bytes, _ENCRYPTED_BYTES)
        self.file = File(-1, found["handle"], piece_bytes)
        facts = self._controller.identify()
        self.queues: int = facts["max_queues"]
        self.longest_request_s = timeout_s * _PATIENCE
        self.quiesce_s: float = facts["quiesce_s"]
        self._is_open = True

    @property
    def late_s(self) -> float:
        """So long, what was lost with a connection, here or by another use of its subsystem, may land yet."""
        self._check()
        return self._controller.late_s()

    @property
    def is_usable(self) -> bool:
        """It is open, in this process."""
        return self._is_open and self._process == os.getpid()

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes from ``offset`` on. The view has to keep its memory: a request that is
        given up may still use it.

        Raises TargetError; ValueError beyond the end.
        """
        self._move("read", offset, view)

    def write(self, offset: int, view: memoryview) -> None:
        """Write whole blocks. They are durable after `flush`. Raises TargetError; ValueError."""
        if offset % self.block_bytes or view.nbytes % self.block_bytes:
            raise ValueError(f"{view.nbytes} bytes at {offset} are not whole blocks of {self.block_bytes}")
        self._move("write", offset, view)

    def flush(self) -> None:
        """Have the drive make durable what was written. Raises TargetError."""
        self._check()
        with _target_errors(self.url):
            self._controller.flush(self.url.namespace)

    def error_text(self) -> str:
        """Why its last request failed, in the initiator's words; empty where none has."""
        return _native.nvme_error_of(self.file.direct)

    def close(self) -> None:
        """Let go of the association: the last one to do so ends it. Idempotent."""
        was_usable, self._is_open = self.is_usable, False
        if was_usable:
            self._controller.close(_CLOSE_TIMEOUT_S)

    def failure(self, failed: Transfer) -> TargetError:
        """What to raise for a transfer that has failed."""
        why = self.error_text() or f"{self.url}: {os.strerror(failed.error_number)}"
        what = f"{failed.size_bytes} bytes at {failed.offset} cannot be {_DONE[failed.kind]}"
        return with_errno(TargetError(f"{what}: {why}. {_REMEDIES['lost']}"), failed.error_number)

    def _check(self) -> None:
        if not self.is_usable:
            raise TargetError(f"{self.url} was closed, or opened in another process: open it here")

    def _move(self, kind: Kind, offset: int, view: memoryview) -> None:
        self._check()
        if offset < 0 or offset + view.nbytes > self.size_bytes:
            raise ValueError(f"bytes {offset} to {offset + view.nbytes} are not all among {self.size_bytes}")
        if not view.nbytes:
            return
        over = threading.Event()
        address = int(np.frombuffer(view, np.uint8).ctypes.data)
        transfer = Transfer(kind, self.file, offset, address, view.nbytes, keep=view)
        transfer.on_done = lambda _: over.set()
        try:
            _transport().submit([transfer])
        except ValueError as error:  # it is closed, or broken
            raise TargetError(f"{self.url}: {error}") from error
        if not over.wait(self._timeout_s * _PATIENCE):
            raise TargetError(
                f"waited {format_seconds(self._timeout_s * _PATIENCE)} for {self.url}: {view.nbytes} bytes "
                f"at {offset} were not {_DONE[kind]}. {_REMEDIES['timeout']}"
            )
        if transfer.error_number:
            raise self.failure(transfer)


class Subsystem(NamedTuple):
    """What a target has to offer.

    kind       "nvme": it has namespaces; "discovery", "referral": it knows of other targets
    transport  "tcp", "rdma", "fc"
    portal     where it listens
    security   empty, or what it asks for and penstock does not speak: TLS
    """

    subsystem_nqn: str
    kind: str
    transport: str
    portal: Portal
    security: str

    def url(self, namespace: int) -> Url:
        """Of one of its namespaces."""
        host, port = self.portal
        return Url(host=host, port=port, subsystem_nqn=self.subsystem_nqn, namespace=namespace)


def subsystems_of(portal: Portal, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[Subsystem]:
    """The subsystems that a target offers this host. Raises TargetError."""
    host, keys = this_host(), keys_for(DISCOVERY_NQN)
    with _target_errors(portal):
        found = _native.nvme_discover(
            portal.host,
            portal.port,
            host_nqn=host.nqn,
            host_id=host.identifier,
            host_key=keys.host,
            # Targets do not authenticate discovery, and what it says is not trusted.
            timeout_s=timeout_s,
        )
    return [
        Subsystem(
            each["subsystem_nqn"],
            each["subsystem_type"],
            each["transport"],
            Portal(
                portal.host if each["address"] in _ANY else each["address"],
                int(each["service"]) if re.fullmatch("[0-9]{1,5}", each["service"]) else 0,
            ),
            each["secure_channel"],
        )
        for each in found
    ]


def namespaces_of(subsystem: Subsystem, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[int]:
    """The numbers of its namespaces. Raises TargetError."""
    url = subsystem.url(1)
    with _target_errors(url):
        controller = _connected(url, timeout_s)
        try:
            return controller.namespaces()
        finally:
            controller.close(_CLOSE_TIMEOUT_S)


def _connected(url: Url, timeout_s: float) -> _native.NvmeController:
    host, keys = this_host(url.host_nqn), keys_for(url.subsystem_nqn)
    command_s = min(_LONGEST_COMMAND_S, timeout_s * _COMMAND_SHARE)
    return _native.NvmeController(
        url.host,
        url.port,
        url.subsystem_nqn,
        host_nqn=host.nqn,
        host_id=host.identifier,
        host_key=keys.host,
        controller_key=keys.controller,
        queues=url.queues,
        depth=url.depth,
        header_digest=url.header_digest,
        data_digest=url.data_digest,
        connect_timeout_s=min(_LONGEST_CONNECT_S, timeout_s * _CONNECT_SHARE),
        command_timeout_s=command_s,
        keep_alive_s=min(_LONGEST_KEEP_ALIVE_S, command_s),
        reconnect_timeout_s=timeout_s * _RECONNECT_SHARE,
    )


_transports: dict[int, NvmeTransport] = {}  # by process: a parent's is not to be touched, nor ended


def _transport() -> NvmeTransport:
    """The transport of this process; a forked child makes its own."""
    process = os.getpid()
    if process not in _transports:
        made = NvmeTransport()
        if _transports.setdefault(process, made) is not made:  # another thread was faster
            made.close()
    return _transports[process]


@contextlib.contextmanager
def _target_errors(where: Url | Portal) -> Iterator[None]:
    """What the initiator says, as an error of penstock's."""
    try:
        yield
    except _native.NvmeError as error:
        kind, text = error.args
        host_nqn = this_host(where.host_nqn if isinstance(where, Url) else None).nqn
        portal = where.portal if isinstance(where, Url) else where
        remedy = _REMEDIES.get(kind, "Look at the target").format(portal=portal, host_nqn=host_nqn)
        raise TargetError(f"{text}. {remedy}") from error


_PREFIX = "nqn.2014-08.org.nvmexpress:uuid:"
_SPACE = uuid.UUID("5b2d7e0a-4f0e-5c5d-9d56-70656e73746b")  # penstock's own, for uuids made of names


class Host(NamedTuple):
    """nqn: its name. identifier: 16 bytes."""

    nqn: str
    identifier: bytes


def this_host(nqn: str | None = None, root: Path = Path("/")) -> Host:
    """This machine's identity.

    nqn    to be used instead of its own
    root   below which its files lie

    It is that of nvme-cli, ``/etc/nvme/hostnqn`` and ``/etc/nvme/hostid``, where these can be read. Otherwise
    both are made of ``/etc/machine-id``, which stays the same, or of the machine's network address.
    """
    own_nqn, own_id = _line(root / "etc/nvme/hostnqn"), _uuid(_line(root / "etc/nvme/hostid"))
    if own_nqn and len(own_nqn.encode()) <= LARGEST_NQN_BYTES and nqn in (None, own_nqn):
        return Host(own_nqn, (own_id or _uuid_of(own_nqn)).bytes)
    if nqn is not None:
        return Host(nqn, _uuid_of(nqn).bytes)
    made = own_id or uuid.uuid5(_SPACE, _line(root / "etc/machine-id") or f"{uuid.getnode():012x}")
    return Host(f"{_PREFIX}{made}", made.bytes)


def _uuid_of(nqn: str) -> uuid.UUID:
    """The one in the name, or one made of it: one name always goes with one identifier."""
    return _uuid(nqn.removeprefix(_PREFIX)) or uuid.uuid5(_SPACE, nqn)


def _uuid(text: str) -> uuid.UUID | None:
    with contextlib.suppress(ValueError):
        found = uuid.UUID(text)
        return found if found.int else None
    return None


def _line(path: Path) -> str:
    """The first line of a small file; empty where it cannot be read."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.readline(1024).strip()
    except (OSError, UnicodeError):
        return ""
