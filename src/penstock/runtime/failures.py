"""A rank that fails publishes its error; ranks whose collectives then fail name it in theirs.

The process group's key-value store holds one `cause` for each start of a job: the rank that failed first, and
its error. A rank that was killed is found by the others on its machine, which check its process.
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

from penstock.core.job import restart_id
from penstock.errors import RankFailed
from penstock.runtime.ranks import shared_store, wait_until

logger = logging.getLogger("penstock")

# A process that ends closes its connections a moment before others see that it has ended.
_LOOK_S = 5.0
_READ_S = 2.0  # the rank that hosts the store waits this long for the others to read the cause

_COLLECTIVE_ERROR = re.compile("gloo|nccl|process ?group", re.IGNORECASE)

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
    """What this rank and the others publish in the store of the default process group."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.rank, self._world = dist.get_rank(), dist.get_world_size()
        self._prefix = f"penstock/failures/{restart_id()}"
        self.pid = os.getpid()
        self._has_failed = False
        self._cause: Cause | None = None
        if started := _start_time(self.pid):
            store.set(self._process_key(self.rank), f"{self.pid} {started}")

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Publish an error raised inside. Raise RankFailed instead where another rank is its cause."""
        if self._has_failed:  # and the program goes on
            self._has_failed = False
            self.store.delete_key(f"{self._prefix}/cause")
        try:
            yield
        except BaseException as error:
            if cause := self.other_cause(error):
                raise RankFailed(self.text(cause), cause.rank) from error
            raise

    def other_cause(self, error: BaseException) -> Cause | None:
        """The other rank that made a collective of this one fail. None: this error was published instead."""
        if self._has_failed:
            return None
        if _is_collective_error(error) and (cause := self.cause(_LOOK_S)):
            return cause
        with contextlib.suppress(RuntimeError):  # a store that does not answer
            self._has_failed = self._publish(self.rank, _described(error)).rank == self.rank
        return None

    def cause(self, wait_s: float) -> Cause | None:
        """The rank that failed first. None: it is still unknown after ``wait_s``."""
        try:
            if self._cause is None and wait_until(self._has_cause, wait_s):
                self._wait_for_readers()
        except RuntimeError:
            if self._cause is None and self.rank != 0 and not _agent_keeps_store():
                self._cause = Cause(0, _KEEPER_ENDED)
        return self._cause

    def _has_cause(self) -> bool:
        self._cause = self._published_cause() or self._find_dead_rank()
        return self._cause is not None

    def text(self, cause: Cause) -> str:
        return f"rank {self.rank} cannot go on: rank {cause.rank} failed: {cause.why}"

    def _published_cause(self) -> Cause | None:
        key = f"{self._prefix}/cause"
        return _parsed(self.store.get(key)) if self.store.check([key]) else None

    def _publish(self, rank: int, why: str) -> Cause:
        """Publish a cause unless there is one; returns the one that is published."""
        return _parsed(self.store.compare_set(f"{self._prefix}/cause", "", f"{rank} {why}"))

    def _find_dead_rank(self) -> Cause | None:
        """Look for a rank on this machine whose process has ended."""
        for rank, (pid, started) in self._neighbours.items():
            if _start_time(pid) != started:
                return self._publish(rank, _ENDED)
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
                pid, started = self.store.get(key).decode().split()
                found[rank] = int(pid), started
        return found

    def _process_key(self, rank: int) -> str:
        return f"{self._prefix}/{_machine()}/{rank}"

    def _wait_for_readers(self) -> None:
        """Where this process hosts the store, wait a little until the others have read the cause."""
        key = f"{self._prefix}/looked"
        self.store.add(key, 1)
        if self.rank == 0 and not _agent_keeps_store():
            wait_until(lambda: self.store.add(key, 0) >= self._world - 1, _READ_S)

    def on_sigterm(self) -> None:
        """Log the cause, or publish SIGTERM as one. torchrun sends it to all ranks when one fails."""
        if self._has_failed:
            return
        if cause := self.cause(0):
            logger.error("%s", self.text(cause))
        else:
            with contextlib.suppress(RuntimeError):
                self._publish(self.rank, _TERMINATED)


_job: Job | None = None  # of the present process group


def _group_job() -> Job | None:
    """The job of the present process group; None where there is none, or one rank."""
    global _job
    store = shared_store()
    if store is None:
        return None
    if _job is None or _job.store is not store:
        _job = Job(store)
    return _job


@contextlib.contextmanager
def shared() -> Iterator[None]:
    """As `Job.shared`; without other ranks it does nothing."""
    job = _group_job()
    with job.shared() if job is not None else contextlib.nullcontext():
        yield


def report_cause_at_exit(to_signals: bool) -> None:
    """When an uncaught error ends this process, log the rank that caused it, if it was another.
    ``to_signals``: also at SIGTERM, unless the program has a handler for it."""
    global _previous_hook
    if _group_job() is None or threading.current_thread() is not threading.main_thread():
        return
    if sys.excepthook is not _on_uncaught:
        _previous_hook = sys.excepthook
        sys.excepthook = _on_uncaught
    if to_signals and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _on_sigterm)


_previous_hook = sys.excepthook


def _on_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    job = None if isinstance(error, RankFailed) else _own_job()
    cause = None if job is None else job.other_cause(error)
    _previous_hook(kind, error, trace)
    if job is not None and cause is not None:
        logger.error("%s", job.text(cause))
    if signal.getsignal(signal.SIGTERM) == _on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the cause is logged


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    """Report the cause, then end as without a handler."""
    signal.signal(number, signal.SIG_DFL)
    if (job := _own_job()) is not None:
        job.on_sigterm()
    os.kill(os.getpid(), number)


def _own_job() -> Job | None:
    """None in a forked child, which has no connection of its own to the store."""
    return _job if _job is not None and _job.pid == os.getpid() else None


def _is_collective_error(error: BaseException) -> bool:
    """Whether the error looks like one of a collective."""
    return isinstance(error, dist.DistError) or (
        type(error) is RuntimeError and _COLLECTIVE_ERROR.search(str(error)) is not None
    )


def _described(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _parsed(record: bytes) -> Cause:
    rank, _, why = record.decode().partition(" ")
    return Cause(int(rank), why)


def _agent_keeps_store() -> bool:
    """Whether torchrun's agent hosts the store; otherwise rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


@functools.cache
def _machine() -> str:
    """Name of the PID namespace: only processes in the same one see each other."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return "unknown"


def _start_time(pid: int) -> str:
    """When the process started, to detect that its PID was reused; empty: it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]
