"""Packing and mounting of one store by the processes of a torch.distributed group.

They exchange messages through the group's key-value store, where it shows which process is missing. Files are
not copied: every process maps them by the path that their owner gave, so the processes of a machine share the
pages.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch.distributed as dist

from penstock.core.job import restart_id
from penstock.errors import InvalidArgument, PenstockError, SampleError
from penstock.samples.catalog import Directory, load_all
from penstock.samples.manifest import StoreManifest
from penstock.samples.objects.cache import CacheOptions
from penstock.samples.places import PathLike, Place, Progress, reporter
from penstock.storage.nvme.url import is_url, parse_url
from penstock.units import format_seconds

_LONGEST_POLL_S = 0.05
_HEARTBEAT_S = 0.5  # between heartbeats
_READ_S = 2.0  # for the others to read an error before this process ends

_counters: dict[tuple[int, ...], itertools.count[int]] = {}


class HeldStore(msgspec.Struct, frozen=True):
    """A store that a process can read. place: its path or URL."""

    place: str
    manifest: StoreManifest


class Message(msgspec.Struct, frozen=True):
    """A message to the other processes: the stores that this one holds, or its error."""

    held: list[HeldStore] = []
    error: str = ""


def gather(
    path: PathLike | Sequence[PathLike],
    group: Any,
    *,
    served_at: str | None = None,
    verify: bool = True,
    timeout_s: float = 60.0,
    cache: CacheOptions | None = None,
) -> tuple[list[Directory], int, int]:
    """The directories of all stores that the processes hold, in the order of ranks; rank, and world_size.

    path       what this process holds: a store, a folder of partitions, or a list of such; every process can
               give the same, or each its own partitions
    group      of torch.distributed, with a backend for CPU tensors; all its processes call this
    served_at  the URL at which the others read it: see `penstock.samples.serve`

    Raises SampleError, in all processes, where one does not come in time, cannot read what it holds, cannot
    see what another one holds, or received it damaged, and where a partition is missing.
    """
    if served_at is not None and not isinstance(path, str | os.PathLike):
        raise InvalidArgument("served_at= is the URL of one store, not of a list: give the path of one")
    if served_at is not None and parse_url(served_at).fragment:
        raise InvalidArgument(f"{served_at!r} names one partition: give the URL that serving has named")
    peers = Rendezvous(group, timeout_s)
    mine, error = _try_load(lambda: load_all(path, verify, timeout_s, cache))
    holds = [HeldStore(_where(each.place, path, served_at), each.manifest) for each in mine]
    stores = _unique_stores(peers, peers.exchange("say what they hold", Message(holds, error)))
    own = {directory.manifest.identity: directory for directory in mine}
    opened, error = _try_load(
        lambda: [
            own.get(held.manifest.identity) or _open(owner, held, verify, timeout_s, cache)
            for owner, held in stores
        ]
    )
    peers.exchange("open what the others hold", Message(error=error))
    return opened, peers.rank, peers.world_size


def _where(place: Place, path: Any, served_at: str | None) -> str:
    """Where the others read a store that this process holds at ``path``."""
    if served_at is None or place.is_remote:
        return str(place)
    # Of a folder of partitions the URL names the one.
    partition = "" if str(place) == os.path.abspath(path) else place.name
    return str(dataclasses.replace(parse_url(served_at), fragment=partition))


def _try_load(load: Callable[[], list[Directory]]) -> tuple[list[Directory], str]:
    """The result of ``load``, or the text of its error, to send to the others."""
    try:
        return load(), ""
    except (PenstockError, OSError) as problem:
        return [], str(problem)


def pack_together(
    source: Any,
    dest: PathLike,
    group: Any,
    *,
    timeout_s: float = 600.0,
    progress: Progress | None = None,
    **options: Any,
) -> list[StoreManifest]:
    """Pack a source by all processes of a group, each its partition, into the folder ``dest``.

    timeout_s  longest time without a heartbeat of another process
    progress   of this process, and options: as in penstock.samples.pack

    Returns the manifests of all partitions. Where one process fails, it raises its own error, and all others
    SampleError.
    """
    from penstock.samples.packing import pack

    peers, told = Rendezvous(group, timeout_s), reporter(progress)

    def report(samples: int, size_bytes: int) -> None:
        peers.heartbeat()
        told(samples, size_bytes)

    try:
        options |= {"rank": peers.rank, "world_size": peers.world_size}
        manifest = pack(source, dest, progress=report, **options)
    except BaseException as problem:
        peers.send("pack", Message(error=f"{type(problem).__name__}: {problem}"))
        peers.leave()
        raise
    messages = peers.exchange("pack", Message([HeldStore(os.path.abspath(dest), manifest)]))
    return [each.held[0].manifest for each in messages]


def _unique_stores(peers: Rendezvous, messages: Sequence[Message]) -> list[tuple[int, HeldStore]]:
    """The stores of all processes, each once, with the lowest rank that holds it, or serves it."""
    found: dict[str, tuple[int, HeldStore]] = {}
    partitions: dict[int, set[int]] = {}
    for rank, each in enumerate(messages):
        for held in each.held:
            partitions.setdefault(held.manifest.partitions, set()).add(held.manifest.partition)
            _, before = found.setdefault(held.manifest.identity, (rank, held))
            if is_url(held.place) and not is_url(before.place):  # all can see it there
                found[held.manifest.identity] = rank, held
    for count, there in partitions.items():
        if missing := sorted(set(range(count)) - there):
            peers.leave()
            raise SampleError(
                f"of {count} partitions of a store, the {peers.world_size} processes hold {len(there)}: "
                f"partition {', '.join(map(str, missing[:5]))} is missing. Mount it in one of them, or "
                "pack it"
            )
    return list(found.values())


def _open(
    owner: int, held: HeldStore, verify: bool, timeout_s: float, cache: CacheOptions | None
) -> Directory:
    """Open a store that another process holds. Raises SampleError, InvalidFile."""
    advice = (
        "put it where all processes can see it, or serve it to them (penstock samples serve, and served_at=)"
    )
    try:
        directory, *_ = load_all(held.place, verify, timeout_s, cache)
    except SampleError as error:
        raise SampleError(
            f"cannot see {held.place}, which process {owner} holds: {error}; {advice}"
        ) from error
    if directory.manifest.identity != held.manifest.identity:
        raise SampleError(
            f"at {held.place}, which process {owner} holds, this process sees another store; {advice}"
        )
    return directory


@dataclass
class Rendezvous:
    """One collective operation of a group: every process makes one, in the same order."""

    group: Any
    timeout_s: float

    def __post_init__(self) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise InvalidArgument(
                "group= needs torch.distributed: call torch.distributed.init_process_group first"
            )
        if dist.get_rank(self.group) < 0:
            raise InvalidArgument("this process is not of the group: only its partitions mount with it")
        self.ranks = tuple(dist.get_process_group_ranks(self.group))
        self.rank, self.world_size = dist.get_rank(self.group), len(self.ranks)
        number = next(_counters.setdefault(self.ranks, itertools.count()))
        prefix = f"penstock/samples/{restart_id()}/{'-'.join(map(str, self.ranks))}/{number}"
        self._store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())
        self._sent: list[str] = []  # keys that this process set in the last exchange
        self._heartbeat_s = -_HEARTBEAT_S  # of this process; and the latest ones of the others
        self._heartbeats: dict[int, bytes] = {}

    def send(self, what: str, message: Message) -> None:
        """Publish a message, without waiting for those of the others."""
        self._call_store("set", f"{what}/{self.rank}", msgspec.msgpack.encode(message))

    def exchange(self, what: str, message: Message) -> list[Message]:
        """Publish a message, and return those of all processes, by rank. ``what`` they do, such as "pack".

        Raises SampleError where a process sends nothing in time, or an error.
        """
        self.send(what, message)
        missing: Sequence[int] = range(self.world_size)
        dead: list[int] = []
        while missing := self._wait_for(what, missing, time.monotonic() + self.timeout_s):
            if dead := self._without_heartbeat(missing):
                break
        if missing:
            self.leave(missing)
            raise SampleError(
                f"waited {format_seconds(self.timeout_s)} for processes to {what}: of {self.world_size}, "
                f"{_ranks_text(dead)} did not. {'It has' if len(dead) == 1 else 'They have'} "
                "stopped, or not come so far: look at the messages there, or give a longer timeout_s"
            )
        ranks = range(self.world_size)
        everyone = [msgspec.msgpack.decode(self._get(what, rank), type=Message) for rank in ranks]
        if failed := [(rank, each.error) for rank, each in enumerate(everyone) if each.error]:
            self.leave()
            rank, error = failed[0]
            more = f" ({len(failed)} of {self.world_size} processes failed)" if len(failed) > 1 else ""
            raise SampleError(f"process {rank} could not {what}: {error}{more}")
        # All have sent this message, so all have read the one before.
        for key in self._sent:
            self._call_store("delete_key", key)
        self._sent = [f"{what}/{self.rank}"]
        return everyone

    def heartbeat(self) -> None:
        """Tell waiting processes that this one is alive: they go on waiting."""
        if time.monotonic() - self._heartbeat_s > _HEARTBEAT_S:
            self._heartbeat_s = time.monotonic()
            with contextlib.suppress(SampleError):  # this process can go on without the others
                self._call_store("set", f"heartbeat/{self.rank}", str(self._heartbeat_s))

    def _without_heartbeat(self, ranks: Sequence[int]) -> list[int]:
        """The ranks without a heartbeat since the last call."""
        before = dict(self._heartbeats)
        self._heartbeats |= {
            rank: self._get("heartbeat", rank) for rank in ranks if self._has_sent("heartbeat", rank)
        }
        return [rank for rank in ranks if self._heartbeats.get(rank) == before.get(rank)]

    def leave(self, missing: Sequence[int] = ()) -> None:
        """Wait a little for the others to read an error: this process may host the key-value store."""
        with contextlib.suppress(SampleError):
            self.send("leave", Message())
            there = [rank for rank in range(self.world_size) if rank not in missing]
            self._wait_for("leave", there, time.monotonic() + _READ_S)

    def _wait_for(self, what: str, ranks: Sequence[int], deadline: float) -> list[int]:
        """The ranks that have sent nothing under this key by the deadline."""
        missing, pause_s = list(ranks), 0.001
        while missing and time.monotonic() < deadline:
            while missing and self._has_sent(what, missing[0]):
                del missing[0]
            if missing:
                time.sleep(pause_s)
                pause_s = min(_LONGEST_POLL_S, 1.5 * pause_s)
        return [rank for rank in missing if not self._has_sent(what, rank)]

    def _get(self, what: str, rank: int) -> bytes:
        return bytes(self._call_store("get", f"{what}/{rank}"))

    def _has_sent(self, what: str, rank: int) -> bool:
        return bool(self._call_store("check", [f"{what}/{rank}"]))

    def _call_store(self, method: str, *arguments: Any) -> Any:
        """Call a method of the group's key-value store."""
        try:
            return getattr(self._store, method)(*arguments)
        except RuntimeError as error:
            raise SampleError(
                "the key-value store of the process group does not answer: the process that keeps it, most "
                f"often rank 0, has stopped ({str(error).splitlines()[0]})"
            ) from error


def _ranks_text(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"process{'' if len(ranks) == 1 else 'es'} {shown}"
