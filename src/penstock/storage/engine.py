"""The one door to storage: the transports of this machine, and the ways they offer.

Spill space asks for a way by name and hands over requests; which way is best is decided by `choose`.
Checkpoints share one transport.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from penstock.errors import InvalidArgument
from penstock.storage.transports import (
    DOMAINS,
    GPU_TRANSPORTS,
    TRANSPORTS,
    File,
    Transport,
    TransportUnavailable,
)

logger = logging.getLogger("penstock")


class Way(NamedTuple):
    """One way to move bytes.

    name        such as "io_uring direct"
    transport   key of TRANSPORTS, or of GPU_TRANSPORTS
    kind        what `Request.way` is to be
    domain      where it leaves what it writes: "disk" or "page cache"
    """

    name: str
    transport: str
    kind: str
    domain: str


@runtime_checkable
class _Probing(Protocol):
    """A transport that may refuse single files."""

    def probe(self, file: File) -> str | None: ...


class Engine:
    """The transports of this machine that can be used. A context manager.

    ways            names of the ways wanted, None for all there are. Transports nobody wants are
                    not opened
    domains         only ways of these domains, None for any
    gpu             also ways that move the memory of a GPU. Where only such are wanted, there are all
                    others too, for what the former cannot move

    ways            the ways there are to move host memory, by name, in order of preference
    gpu_ways        those to move the memory of a GPU
    unavailable     why transports cannot be used, by their name

    Raises InvalidArgument where a name is unknown, or none of the ways is there.
    """

    def __init__(
        self,
        ways: Sequence[str] | None = None,
        domains: Collection[str] | None = None,
        gpu: bool = False,
    ) -> None:
        self.ways: dict[str, Way] = {}
        self.gpu_ways: dict[str, Way] = {}
        self.unavailable: dict[str, str] = {}
        self._transports: dict[str, Transport] = {}
        self._wanted = None if ways is None else list(ways)
        on_gpu = [way for way in self._wanted or () if way.partition(" ")[0] in GPU_TRANSPORTS]
        if gpu:
            self._open_all(GPU_TRANSPORTS, self.gpu_ways, self._wanted, domains)
        else:
            reason = "it moves nothing but the memory of a GPU"
            self.unavailable.update((way.partition(" ")[0], reason) for way in on_gpu)
        only_gpu = gpu and bool(on_gpu) and on_gpu == self._wanted
        self._open_all(TRANSPORTS, self.ways, None if only_gpu else self._wanted, domains)
        self._check()

    def transport(self, way: Way) -> Transport:
        """What carries out requests of a way, which is one of `ways` or `gpu_ways`."""
        return self._transports[way.transport]

    def refusal(self, way: Way, file: File) -> str | None:
        """Why ``way`` cannot move ``file``; None where nothing speaks against it."""
        transport = self._transports[way.transport]
        return transport.probe(file) if isinstance(transport, _Probing) else None

    def give_up(self, way: Way, reason: str) -> None:
        """Do without a way that proved unusable. Raises InvalidArgument where it was asked for by name."""
        for ways in (self.ways, self.gpu_ways):
            ways.pop(way.name, None)
        self.unavailable[way.transport] = reason
        _log_once(way.transport, reason, logging.WARNING)
        self._check()

    def close(self, timeout_s: float | None = None) -> bool:
        """Wait for what is in flight, then end the transports. Idempotent.

        False: something is still under way after ``timeout_s``.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        ended = [
            transport.close(None if deadline_s is None else max(deadline_s - time.monotonic(), 0.0))
            for transport in self._transports.values()
        ]
        return all(ended)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_all(
        self,
        transports: Mapping[str, Callable[[], Transport]],
        ways: dict[str, Way],
        wanted: Sequence[str] | None,
        domains: Collection[str] | None,
    ) -> None:
        for name, make in transports.items():
            if wanted is None or any(way.startswith(name + " ") for way in wanted):
                used = self._open(name, make, wanted, domains)
                ways.update((way.name, way) for way in used)

    def _open(
        self,
        name: str,
        make: Callable[[], Transport],
        wanted: Sequence[str] | None,
        domains: Collection[str] | None,
    ) -> list[Way]:
        try:
            transport = make()
        except TransportUnavailable as reason:
            self.unavailable[name] = str(reason)
            _log_once(name, str(reason), logging.INFO if reason.expected else logging.WARNING)
            return []
        ways = [Way(f"{name} {kind}", name, kind, DOMAINS[kind]) for kind in transport.ways]
        used = [
            way
            for way in ways
            if (wanted is None or way.name in wanted) and (domains is None or way.domain in domains)
        ]
        if used:
            self._transports[name] = transport
        else:
            transport.close()
        return used

    def _check(self) -> None:
        missing = [name for name in self._wanted or () if name not in self.ways and name not in self.gpu_ways]
        if not missing and self.ways:
            return
        self.close()
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.unavailable.items())
        raise InvalidArgument(
            f"{', '.join(missing) or 'no way'} cannot be used to move tensors: there are "
            f"{', '.join((*self.ways, *self.gpu_ways)) or 'none'}" + (f" ({reasons})" if reasons else "")
        )


_logged: set[str] = set()


def _log_once(transport: str, reason: str, level: int) -> None:
    if transport not in _logged:
        _logged.add(transport)
        logger.log(level, "%s is not used to move tensors: %s. Other ways take its place.", transport, reason)


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
