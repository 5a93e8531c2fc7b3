"""A rank that fails tells the others, and one that waits for it in vain says which it was.

The process group's key-value store has, for each start of a job, one `cause`: the rank that failed first, and
its error. A rank that ended without a word is found by those on its machine, by its process.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch.distributed as dist

from penstock.core.job import attempt
from penstock.errors import RankFailed
from penstock.runtime.ranks import shared_store, wait_until

logger = logging.getLogger("penstock")

# A process that ends closes its connections a moment before others see that it has ended.
_LOOK_S = 5.0
_LEAVE_S = 2.0  # most that the store's keeper waits until the others have looked

_OF_A_GROUP = re.compile("gloo|nccl|process ?group", re.IGNORECASE)

_ENDED = (
    "its process has ended, and told no error: it was killed, or it left. Look at its messages, and at its "
    "exit code, which torchrun names"
)
_KEEPER_ENDED = (
    "it keeps the process group's key-value store, which does not answer: its process has ended. Look at its "
    "messages, and at its exit code, which torchrun names"
)
_TERMINATED = "it was ended by SIGTERM"


class Cause(NamedTuple):
    """The rank that failed first, and why."""

    rank: int
    why: str


class Job:
    """This rank among the others. All of it goes through the store of the default process group."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.rank, self._world = dist.get_rank(), dist.get_world_size()
        self._prefix = f"penstock/failures/{attempt()}"
        self.pid = os.getpid()
        self._has_failed = False
        self._cause: Cause | None = None
        if begun := _begun(self.pid):
            store.set(self._process_key(self.rank), f"{self.pid} {begun}")

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """What fails inside is told to the others. Where another rank is the cause, RankFailed is raised."""
        if self._has_failed:  # and the program goes on
            self._has_failed = False
            self.store.delete_key(f"{self._prefix}/cause")
        try:
            yield
        except BaseException as error:
            if cause := self.other_cause(error):
                raise RankFailed(self.without(cause), cause.rank) from error
            raise

    def other_cause(self, error: BaseException) -> Cause | None:
        """The rank that made a collective of this one fail. Where there is none, the others are told."""
        if self._has_failed:
            return None
        if _is_of_a_group(error) and (cause := self.cause(_LOOK_S)):
            return cause
        with contextlib.suppress(RuntimeError):  # a store that does not answer
            self._has_failed = self._tell(self.rank, _described(error)).rank == self.rank
        return None

    def cause(self, wait_s: float) -> Cause | None:
        """The rank that failed first, as soon as that is known; None: it is not, after so many seconds."""
        try:
            if self._cause is None and wait_until(self._finds_cause, wait_s):
                self._leave()
        except RuntimeError:
            if self._cause is None and self.rank != 0 and not _agent_keeps_store():
                self._cause = Cause(0, _KEEPER_ENDED)
        return self._cause

    def _finds_cause(self) -> bool:
        self._cause = self._known() or self._found()
        return self._cause is not None

    def without(self, cause: Cause) -> str:
        return f"rank {self.rank} cannot go on: rank {cause.rank} failed: {cause.why}"

    def _known(self) -> Cause | None:
        key = f"{self._prefix}/cause"
        return _parsed(self.store.get(key)) if self.store.check([key]) else None

    def _tell(self, rank: int, why: str) -> Cause:
        """The cause: this one, unless there was one before."""
        return _parsed(self.store.compare_set(f"{self._prefix}/cause", "", f"{rank} {why}"))

    def _found(self) -> Cause | None:
        """A rank of this machine whose process has ended."""
        for rank, (pid, begun) in self._neighbours.items():
            if _begun(pid) != begun:
                return self._tell(rank, _ENDED)
        return None

    @functools.cached_property
    def _neighbours(self) -> dict[int, tuple[int, str]]:
        """The processes of the other ranks on this machine."""
        ranks = range(self._world)
        if local := os.environ.get("LOCAL_WORLD_SIZE"):
            first = self.rank - int(os.environ["LOCAL_RANK"])
            ranks = range(first, first + int(local))
        found = {}
        for rank in ranks:
            key = self._process_key(rank)
            if rank != self.rank and self.store.check([key]):
                pid, begun = self.store.get(key).decode().split()
                found[rank] = int(pid), begun
        return found

    def _process_key(self, rank: int) -> str:
        return f"{self._prefix}/{_machine()}/{rank}"

    def _leave(self) -> None:
        """Where the store ends with this process, wait a little until the others have looked."""
        key = f"{self._prefix}/looked"
        self.store.add(key, 1)
        if self.rank == 0 and not _agent_keeps_store():
            wait_until(lambda: self.store.add(key, 0) >= self._world - 1, _LEAVE_S)

    def end(self) -> None:
        """SIGTERM has come. torchrun sends it to all where one rank fails."""
        if self._has_failed:
            return
        if cause := self.cause(0):
            logger.error("%s", self.without(cause))
        else:
            with contextlib.suppress(RuntimeError):
                self._tell(self.rank, _TERMINATED)


_job: Job | None = None  # of the process group there is


def _joined() -> Job | None:
    """None where this process has no others."""
    global _job
    store = shared_store()
    if store is None:
        return None
    if _job is None or _job.store is not store:
        _job = Job(store)
    return _job


@contextlib.contextmanager
def shared() -> Iterator[None]:
    """What fails inside is told to the other ranks. Where one of them is the cause, RankFailed is raised."""
    job = _joined()
    with job.shared() if job is not None else contextlib.nullcontext():
        yield


def listen(to_signals: bool) -> None:
    """Where an error that nobody catches, or SIGTERM, ends this process, another rank may be the cause: name
    it. A handler of the program's own stays."""
    global _hook_before
    if _joined() is None or threading.current_thread() is not threading.main_thread():
        return
    if sys.excepthook is not _uncaught:
        _hook_before = sys.excepthook
        sys.excepthook = _uncaught
    if to_signals and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminated)


_hook_before = sys.excepthook


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    job = None if isinstance(error, RankFailed) else _own_job()
    cause = None if job is None else job.other_cause(error)
    _hook_before(kind, error, trace)
    if job is not None and cause is not None:
        logger.error("%s", job.without(cause))
    if signal.getsignal(signal.SIGTERM) == _terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # all is said


def _terminated(number: int, frame: FrameType | None) -> None:
    """End as without a handler."""
    signal.signal(number, signal.SIG_DFL)
    if (job := _own_job()) is not None:
        job.end()
    os.kill(os.getpid(), number)


def _own_job() -> Job | None:
    """None in a child, which has no connection of its own to the store."""
    return _job if _job is not None and _job.pid == os.getpid() else None


def _is_of_a_group(error: BaseException) -> bool:
    """Whether a collective has failed, as far as its error tells."""
    return isinstance(error, dist.DistError) or (
        type(error) is RuntimeError and _OF_A_GROUP.search(str(error)) is not None
    )


def _described(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _parsed(record: bytes) -> Cause:
    rank, _, why = record.decode().partition(" ")
    return Cause(int(rank), why)


def _agent_keeps_store() -> bool:
    """Whether torchrun's own process does; else rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


@functools.cache
def _machine() -> str:
    """Names what process numbers are unique in; processes that differ in it do not see each other."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return "unknown"


def _begun(pid: int) -> str:
    """When the process began, which tells it from a later one of the same number; empty: it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]
