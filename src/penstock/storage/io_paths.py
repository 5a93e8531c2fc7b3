"""The I/O paths of this machine: its transports, and the methods by which each moves bytes."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from penstock.errors import InvalidArgument
from penstock.storage.transports import (
    GPU_TRANSPORTS,
    MEDIA,
    TRANSPORTS,
    File,
    Transport,
    TransportUnavailable,
)

logger = logging.getLogger("penstock")


class IoPath(NamedTuple):
    """One way to move bytes.

    name        its transport's, as in TRANSPORTS or GPU_TRANSPORTS, and its method: such as "io_uring direct"
    method      what `Request.method` is to be
    medium      where it leaves what it writes: "disk" or "page cache"
    """

    name: str
    method: str
    medium: str
    transport: Transport


@runtime_checkable
class _Probing(Protocol):
    """A transport that may refuse single files."""

    def probe(self, file: File) -> str | None: ...


class IoPaths:
    """The transports of this machine that can be used, and their I/O paths. A context manager.

    wanted      names of the I/O paths wanted, None for all there are. Transports nobody wants are
                not opened
    media       only I/O paths to these media, None for any
    gpu         also those that move the memory of a GPU. Where only such are wanted, there are all
                others too, for what the former cannot move

    paths       the I/O paths there are to move host memory, by name, in order of preference
    gpu_paths   those to move the memory of a GPU
    unavailable why transports cannot be used, by their name

    Raises InvalidArgument where a name is unknown, or none of the I/O paths is there.
    """

    def __init__(
        self,
        wanted: Sequence[str] | None = None,
        media: Collection[str] | None = None,
        gpu: bool = False,
    ) -> None:
        self.paths: dict[str, IoPath] = {}
        self.gpu_paths: dict[str, IoPath] = {}
        self.unavailable: dict[str, str] = {}
        self._wanted = None if wanted is None else list(wanted)
        self._media = media
        self._transports: list[Transport] = []
        on_gpu = [name for name in self._wanted or () if _transport_of(name) in GPU_TRANSPORTS]
        if gpu:
            self._open_all(GPU_TRANSPORTS, self.gpu_paths, self._wanted)
        else:
            reason = "it moves nothing but the memory of a GPU"
            self.unavailable.update((_transport_of(name), reason) for name in on_gpu)
        only_gpu = gpu and bool(on_gpu) and on_gpu == self._wanted
        self._open_all(TRANSPORTS, self.paths, None if only_gpu else self._wanted)
        self._check()

    def refusal(self, path: IoPath, file: File) -> str | None:
        """Why ``path`` cannot move ``file``; None where nothing speaks against it."""
        return path.transport.probe(file) if isinstance(path.transport, _Probing) else None

    def give_up(self, path: IoPath, reason: str) -> None:
        """Do without a path that proved unusable. Raises InvalidArgument where it was asked for by name."""
        for paths in (self.paths, self.gpu_paths):
            paths.pop(path.name, None)
        transport = _transport_of(path.name)
        self.unavailable[transport] = reason
        _log_once(transport, reason, logging.WARNING)
        self._check()

    def close(self, timeout_s: float | None = None) -> bool:
        """Wait for what is in flight, then end the transports. Idempotent.

        False: something is still under way after ``timeout_s``.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        ended = [
            transport.close(None if deadline_s is None else max(deadline_s - time.monotonic(), 0.0))
            for transport in self._transports
        ]
        return all(ended)

    def __enter__(self) -> IoPaths:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_all(
        self,
        transports: Mapping[str, Callable[[], Transport]],
        paths: dict[str, IoPath],
        wanted: Sequence[str] | None,
    ) -> None:
        for name, make in transports.items():
            if wanted is None or any(_transport_of(path) == name for path in wanted):
                paths.update((path.name, path) for path in self._open(name, make, wanted))

    def _open(self, name: str, make: Callable[[], Transport], wanted: Sequence[str] | None) -> list[IoPath]:
        try:
            transport = make()
        except TransportUnavailable as reason:
            self.unavailable[name] = str(reason)
            _log_once(name, str(reason), logging.INFO if reason.expected else logging.WARNING)
            return []
        paths = [IoPath(f"{name} {method}", method, MEDIA[method], transport) for method in transport.methods]
        used = [
            path
            for path in paths
            if (wanted is None or path.name in wanted) and (self._media is None or path.medium in self._media)
        ]
        if used:
            self._transports.append(transport)
        else:
            transport.close()
        return used

    def _check(self) -> None:
        missing = [
            name for name in self._wanted or () if name not in self.paths and name not in self.gpu_paths
        ]
        if not missing and self.paths:
            return
        self.close()
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.unavailable.items())
        raise InvalidArgument(
            f"{', '.join(missing) or 'no I/O path'} cannot be used to move tensors: there are "
            f"{', '.join((*self.paths, *self.gpu_paths)) or 'none'}" + (f" ({reasons})" if reasons else "")
        )


def _transport_of(path: str) -> str:
    return path.partition(" ")[0]


_logged: set[str] = set()


def _log_once(transport: str, reason: str, level: int) -> None:
    if transport not in _logged:
        _logged.add(transport)
        logger.log(
            level, "%s is not used to move tensors: %s. Other I/O paths take its place.", transport, reason
        )


_shared: Transport | None = None
_shared_lock = threading.Lock()


def _forget_shared() -> None:
    global _shared, _shared_lock
    _shared, _shared_lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):  # the threads of a transport stay with the parent
    os.register_at_fork(after_in_child=_forget_shared)


def shared_transport() -> Transport:
    """The preferred transport of this machine, one for the process: for what is not spilled. Never closed."""
    global _shared
    with _shared_lock:
        if _shared is None:
            _shared = _first_there_is()
        return _shared


def _first_there_is() -> Transport:
    for name, make in TRANSPORTS.items():
        try:
            return make()
        except TransportUnavailable as reason:
            _log_once(name, str(reason), logging.WARNING)
    raise InvalidArgument(f"none of the transports can be used here: {', '.join(TRANSPORTS)}")
