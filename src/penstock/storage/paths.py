"""The I/O paths of this machine: its transports, and the methods by which each moves bytes."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from penstock.core.log import log_once
from penstock.errors import InvalidArgument
from penstock.storage.gpudirect import GpuDirectTransport
from penstock.storage.native import CopyTransport, NvmeSpillTransport, PosixTransport, UringTransport
from penstock.storage.transfer import FOR_EVER_S, File, Transport, TransportUnavailable

# In order of preference where nothing is known. Each raises TransportUnavailable where it cannot work.
# Adding one takes a file, a line here or in GPU_TRANSPORTS, and a pass of the contract suite.
TRANSPORTS: dict[str, Callable[[], Transport]] = {
    "io_uring": UringTransport,
    "posix": PosixTransport,
}

# Those between memory and a namespace of a remote drive.
REMOTE_TRANSPORTS: dict[str, Callable[[], Transport]] = {
    "nvme": NvmeSpillTransport,
}

# Those that move the memory of a GPU, and no other.
GPU_TRANSPORTS: dict[str, Callable[[], Transport]] = {
    "kvikio": GpuDirectTransport,
}

HOST_PATH = "memory copy"

# The medium that each method leaves what it writes in: a method reads only what was written to the same.
MEDIA = {
    "direct": "disk",
    "staged": "disk",
    "gpu-direct": "disk",
    "buffered": "page cache",
    "mapped": "page cache",
}


class IoPath(NamedTuple):
    """One way to move bytes.

    name     its transport's and its method: such as "io_uring direct"
    method   what `Transfer.method` is to be
    medium   where it leaves what it writes: "disk", "page cache" or "host"
    """

    name: str
    method: str
    medium: str
    transport: Transport


class IoPaths:
    """The transports of this machine that can be used, and their I/O paths.

    wanted      names of the I/O paths wanted, None for all there are. Transports nobody wants are
                not opened
    media       only I/O paths to these media, None for any
    gpu         also those that move the memory of a GPU. Where only such are wanted, there are all
                others too, for what the former cannot move
    transports  by name, in order of preference: REMOTE_TRANSPORTS for a namespace
    host        also the I/O path to a tier of host memory

    paths       the I/O paths there are to move host memory, by name, in order of preference
    gpu_paths   those to move the memory of a GPU
    host_paths  the one to host memory, by name, where there is one
    unavailable why transports cannot be used, by their name

    Raises InvalidArgument where a name is unknown, or none of the I/O paths is there.
    """

    def __init__(
        self,
        wanted: Sequence[str] | None = None,
        media: Collection[str] | None = None,
        gpu: bool = False,
        transports: Mapping[str, Callable[[], Transport]] = TRANSPORTS,
        host: bool = False,
    ) -> None:
        self.paths: dict[str, IoPath] = {}
        self.host_paths: dict[str, IoPath] = {}
        self.gpu_paths: dict[str, IoPath] = {}
        self.unavailable: dict[str, str] = {}
        self._wanted = None if wanted is None else list(wanted)
        self._media = media
        self._transports: list[Transport] = []
        on_gpu = [name for name in self._wanted or () if _transport_of(name) in GPU_TRANSPORTS]
        if gpu:
            self.gpu_paths = self._open(GPU_TRANSPORTS, self._wanted)
        else:
            reason = "it moves nothing but the memory of a GPU"
            self.unavailable.update((_transport_of(name), reason) for name in on_gpu)
        only_gpu = gpu and bool(on_gpu) and on_gpu == self._wanted
        self.paths = self._open(transports, None if only_gpu else self._wanted)
        nothing = self._wanted is not None and not self.paths and not self.gpu_paths
        self._check(self._open(transports, None) if nothing else ())
        if host:
            try:
                self._transports.append(CopyTransport())
            except TransportUnavailable as reason:
                self.close()
                raise InvalidArgument(f"host memory cannot be a tier here: {reason}") from None
            self.host_paths[HOST_PATH] = IoPath(HOST_PATH, "direct", "host", self._transports[-1])

    def usable_gpu_path(self, files: Sequence[File], verifies: bool) -> IoPath | None:
        """The first I/O path for the memory of a GPU that takes all files. None is tried where bytes are to
        be verified: the processor does not see them."""
        for path in list(self.gpu_paths.values()):
            probe = getattr(path.transport, "probe", lambda file: None)
            refusals = ["it cannot verify what it moves"] if verifies else []
            refusals += filter(None, map(probe, files))
            if not refusals:
                return path
            self.give_up(path, refusals[0])
        return None

    def give_up(self, path: IoPath, reason: str) -> None:
        """Do without a path that proved unusable. Raises InvalidArgument where it was asked for by name."""
        for paths in (self.paths, self.gpu_paths):
            paths.pop(path.name, None)
        transport = _transport_of(path.name)
        self.unavailable[transport] = reason
        _log_unused(transport, reason)
        self._check()

    def close(self, timeout_s: float = FOR_EVER_S) -> bool:
        """Wait for what is in flight, then end the transports. Idempotent.

        False: something is still under way after ``timeout_s``.
        """
        deadline_s = time.monotonic() + timeout_s
        ended = [each.close(max(deadline_s - time.monotonic(), 0.0)) for each in self._transports]
        return all(ended)

    def _open(
        self, transports: Mapping[str, Callable[[], Transport]], wanted: Sequence[str] | None
    ) -> dict[str, IoPath]:
        found: dict[str, IoPath] = {}
        for transport_name, make in transports.items():
            if wanted is not None and transport_name not in map(_transport_of, wanted):
                continue
            try:
                transport = make()
            except TransportUnavailable as reason:
                self.unavailable[transport_name] = str(reason)
                _log_unused(transport_name, str(reason), logging.INFO if reason.expected else logging.WARNING)
                continue
            used = 0
            for method in transport.methods:
                path = IoPath(f"{transport_name} {method}", method, MEDIA[method], transport)
                if (wanted is None or path.name in wanted) and path.medium in (self._media or MEDIA.values()):
                    found[path.name] = path
                    used += 1
            if used:
                self._transports.append(transport)
            else:
                transport.close()
        return found

    def _check(self, others: Iterable[str] = ()) -> None:
        """others: names of paths that were not wanted, where none of those that were is there"""
        there = (*self.paths, *self.gpu_paths)
        missing = [name for name in self._wanted or () if name not in there]
        if not missing and self.paths:
            return
        self.close()
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.unavailable.items())
        raise InvalidArgument(
            f"{', '.join(missing) or 'no I/O path'} cannot be used to move tensors: there are "
            f"{', '.join((*there, *others)) or 'none'}" + (f" ({reasons})" if reasons else "")
        )


def _transport_of(path: str) -> str:
    return path.partition(" ")[0]


def _log_unused(transport: str, reason: str, level: int = logging.WARNING) -> None:
    log_once(f"{transport} is not used to move tensors: {reason}. Other I/O paths take its place.", level)


@functools.cache
def shared_path(name: str | None = None) -> IoPath:
    """An I/O path for what is not spilled, one for the process: the preferred one of this machine that is
    direct, or the one of this name. Never closed. Raises InvalidArgument where it cannot be used."""
    wanted = "direct" if name is None else name.partition(" ")[2]
    reasons = []
    for transport_name, make in TRANSPORTS.items():
        if name not in (None, f"{transport_name} {wanted}"):
            continue
        try:
            transport = make()
        except TransportUnavailable as reason:
            reasons.append(f"{transport_name}: {reason}")
            if name is None:
                _log_unused(transport_name, str(reason))
            continue
        if wanted in transport.methods:
            return IoPath(f"{transport_name} {wanted}", wanted, MEDIA[wanted], transport)
        transport.close()
    why = "; ".join(reasons) or "see Offload.io_paths"
    raise InvalidArgument(f"{name or 'no I/O path'} cannot be used here to move files: {why}")


os.register_at_fork(after_in_child=shared_path.cache_clear)  # its threads stay with the parent
