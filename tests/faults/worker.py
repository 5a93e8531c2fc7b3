"""Does what activities.py has on the file system that fails: a process in a mount namespace of its own.

    unshare --mount python -m tests.faults.worker FOLDER

Each line of standard input is a request, as JSON; each line of standard output an answer. Every activity
runs in a forked child, which may hang or be killed. When this process ends, whatever ends it, nothing is
mounted any more.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tests.faults.calls import SENDS, Filter, Supervisor
from tests.faults.filesystem import Mount, Rule
from tests.support.object_servers import HttpServer

HANG_S = 45.0  # so long a child may take
IMAGES_S = 900.0  # and one that looks at crashes
NEVER_S = 2.5  # so long an answer takes, where a wait should end before
_UNREACHABLE = "the server cannot be reached", "no answer in time"
_runs = itertools.count()

_WRITES = (
    "write",
    "write direct",
    "fallocate",
    "ftruncate",
    "fsync",
    "fsync folder",
    "create",
    "mkdir",
    "rename",
)
_WRITES += ("link", "close")
_REPEATED = (
    "read",
    "read direct",
    "write",
    "write direct",
    "open",
    "create",
    "fsync",
    "fsync folder",
    "fallocate",
)
# The kernel takes a short answer to a read into the page cache for the end of the file.
_MOVES = ("read direct", "write", "write direct")


class Fault(NamedTuple):
    """rule: without its operation. operations: that it makes sense for; None: all."""

    rule: Rule
    operations: tuple[str, ...] | None = None


FAULTS = {
    "EIO": Fault(Rule("", error=errno.EIO)),
    "dead": Fault(Rule("", error=errno.EIO, dead=True)),
    "ENOSPC": Fault(Rule("", error=errno.ENOSPC, count=None), _WRITES),
    "EINTR": Fault(Rule("", error=errno.EINTR)),
    "short": Fault(Rule("", short=True), _MOVES),
    "slow": Fault(Rule("", delay_s=0.05, count=4)),
    "never": Fault(Rule("", delay_s=NEVER_S)),
}
# System calls: those that change files, others that may fail on files, those that are
# made again after EINTR, then those that wait, or are made on sockets. What is not here never fails.
_CHANGES = """
create mkdir mkdirat rename renameat renameat2 link linkat write pwrite64 writev pwritev fallocate ftruncate
fsync fdatasync copy_file_range sync_file_range
"""
_LOOKS = """
open read pread64 readv preadv preadv2 fstat newfstatat statx statfs fstatfs lseek getdents64 mmap flock
unlink unlinkat rmdir fchmod fadvise64 cachestat io_uring_setup io_uring_enter io_uring_register
"""
_AGAIN = """
open create read pread64 write pwrite64 readv writev preadv pwritev fsync fdatasync fallocate ftruncate flock
io_uring_enter
"""
_ON_FILES = (*_CHANGES.split(), *_LOOKS.split(), "open folder", "mmap io_uring")
_WAITS = ("io_uring_enter", "flock", "mmap", "fstatfs", "newfstatat")
_SENDS = tuple(f"{name} socket" for name in SENDS)
_HALVED = (*_SENDS, "recvfrom socket", "read socket")
_MESSAGES = (*_HALVED, "recvmsg socket", "readv socket")
_CONNECTS = ("connect socket",)

CALL_FAULTS = {
    "EIO": Fault(Rule("", error=errno.EIO), _ON_FILES),
    "ENOSPC": Fault(Rule("", error=errno.ENOSPC, count=None), tuple(_CHANGES.split())),
    "EINTR": Fault(Rule("", error=errno.EINTR), tuple(_AGAIN.split())),
    "short": Fault(Rule("", short=True), _HALVED),
    "slow": Fault(Rule("", delay_s=0.05, count=4), (*_WAITS, *_MESSAGES, *_CONNECTS)),
    "never": Fault(Rule("", delay_s=NEVER_S), _WAITS),
    "lost": Fault(Rule("", dead=True, count=None), _SENDS),
    "reset": Fault(Rule("", error=errno.ECONNRESET), _MESSAGES),
    "refused": Fault(Rule("", error=errno.ECONNREFUSED, count=None), _CONNECTS),
    "EPIPE": Fault(Rule("", error=errno.EPIPE, count=None), _SENDS),
    "timeout": Fault(Rule("", error=errno.ETIMEDOUT, count=None), (*_MESSAGES, *_CONNECTS)),
}  # fmt: skip


def in_child(
    mount: Mount, work: Callable[[], Any], limit_s: float = HANG_S, supervisor: Supervisor | None = None
) -> dict[str, Any]:
    """What ``work`` returned, or raised, or how it ended, in a forked child."""
    return _end(*_begin(mount, work, supervisor), limit_s, supervisor)


def _begin(mount: Mount, work: Callable[[], Any], supervisor: Supervisor | None = None) -> tuple[int, int]:
    """A child, and where it writes what came of it."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            mount.disown()
            if supervisor is not None:
                supervisor.enter(writing)
            os.write(writing, json.dumps(_outcome(work)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    return child, reading


def _end(child: int, reading: int, limit_s: float, supervisor: Supervisor | None = None) -> dict[str, Any]:
    found, deadline_s = b"", time.monotonic() + limit_s
    if supervisor is not None:
        supervisor.attach(child, reading)
    while (left_s := deadline_s - time.monotonic()) > 0:
        asking = [] if supervisor is None else [supervisor.listener]
        due_s = left_s if supervisor is None else min(left_s, supervisor.wait_s())
        ready = select.select([reading, *asking], [], [], due_s)[0]
        if supervisor is not None:
            supervisor.answer_late()
            if supervisor.listener in ready:
                supervisor.answer()
        if reading in ready:
            if not (part := os.read(reading, 1 << 16)):
                break
            found += part
    else:
        os.kill(child, signal.SIGKILL)
    os.close(reading)
    if supervisor is not None:
        supervisor.close()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status or not found:
        hung = time.monotonic() >= deadline_s
        return {
            "error": "hung" if hung else signal.Signals(-status).name if status < 0 else f"status {status}"
        }
    return dict(json.loads(found))


def _outcome(work: Callable[[], Any]) -> dict[str, Any]:
    from penstock.errors import PenstockError

    try:
        return {"found": work()}
    except BaseException as error:
        named = isinstance(error, OSError) and error.filename is not None
        return {
            "error": type(error).__name__,
            "text": str(error),
            "ours": isinstance(error, PenstockError) or named,
            "where": "".join(traceback.format_exception(error)[-4:]),
        }


class Runs:
    """Runs of one activity, whose requests to the file system fail, or its system calls."""

    def __init__(self, mount: Mount, name: str, calls: Filter | None = None) -> None:
        from tests.faults.activities import ACTIVITIES, end_waits_soon, move_small_pieces

        move_small_pieces()

        self._mount, self._name, self._activity, self._calls = mount, name, ACTIVITIES[name], calls
        self._faults, self._repeated = (FAULTS, _REPEATED) if calls is None else (CALL_FAULTS, _AGAIN.split())
        self._end_waits_soon = end_waits_soon
        mount.ask("begin", [], False)
        mount.ask("clear")
        prepared = in_child(mount, lambda: self._activity.prepare(mount.folder))
        assert "error" not in prepared, prepared
        mount.ask("save")

    def act(self, *rules: Rule) -> tuple[dict[str, Any], dict[str, int], int]:
        """The outcome; how often each operation was called, and how many calls failed."""
        self._mount.ask("restore")
        if (prepare := self._activity.remote) is not None:
            os.environ["PENSTOCK_FAULTS_RUN"] = f"/{next(_runs)}"
            prepared = in_child(self._mount, lambda: self._shortly(prepare))
            assert "error" not in prepared, prepared
        act = partial(self._shortly, self._activity.act)
        if self._calls is not None:
            supervisor = Supervisor(self._calls, self._mount.folder, rules)
            outcome = in_child(self._mount, act, supervisor=supervisor)
            return outcome, dict(supervisor.counts), supervisor.failed
        self._mount.ask("begin", list(rules), False)
        outcome = in_child(self._mount, act)
        counts, failed, _ = self._mount.ask("end")
        return outcome, counts, failed

    def _shortly(self, work: Callable[[Path], Any]) -> Any:
        self._end_waits_soon()
        return work(self._mount.folder)

    def problems(self, went_well: bool, may_leave: bool) -> list[str]:
        """What is wrong afterwards; also when it is done again."""
        folder, activity = self._mount.folder, self._activity

        def look(went_well: bool, may_leave: bool) -> list[str]:
            left = set(os.listdir(folder)) - activity.names
            left -= frozenset() if went_well else activity.begun
            return [
                *activity.problems(folder, went_well),
                *(f"{name} was left" for name in left if not may_leave),
            ]

        def both() -> list[str]:
            found = [f"then: {each}" for each in look(went_well, may_leave)]
            activity.act(folder)
            return found + [f"again: {each}" for each in look(True, False)]

        outcome = in_child(self._mount, both)
        said = f"{outcome.get('error')}: {outcome.get('text')} {outcome.get('where')}"
        return list(outcome.get("found", [said]))

    def matrix(self, places: int) -> Iterator[dict[str, Any]]:
        """Every operation that is called fails in every way, at up to so many of its calls."""
        whole, counts, _ = self.act()
        yield {
            "activity": self._name,
            "counts": counts,
            "outcome": whole,
            "problems": self.problems(True, False),
        }
        if "error" in whole:
            return
        for operation, calls in counts.items():
            for fault, (rule, operations) in self._faults.items():
                if operations is not None and operation not in operations:
                    continue
                tried = 1 if rule.delay_s else min(places, calls)
                firsts = {(2 * place + 1) * calls // (2 * tried) for place in range(tried)}
                for first in sorted(firsts):
                    made = rule._replace(operation=operation, first=first)
                    outcome, _, failed = self.act(made)
                    if failed:
                        yield self._judged(outcome, whole, fault, made)

    def _judged(
        self, outcome: dict[str, Any], whole: dict[str, Any], fault: str, rule: Rule
    ) -> dict[str, Any]:
        from tests.faults.activities import drive, url

        went_well, problems = "found" in outcome, list[str]()
        places = [os.fspath(self._mount.folder), os.environ["PENSTOCK_FAULTS_URL"]]
        places += filter(None, (drive().partition("?")[0], url()))
        if "io_uring" in rule.operation:  # it has no path
            places += ["io_uring", "transfers broke"]
        if went_well:
            kind = "went on"
            if outcome != whole:
                problems.append(f"other bits: {outcome}")
        else:
            text = outcome.get("text", "")
            kind = "timed out" if fault == "never" and "hang" in text else outcome["error"]
            is_lost = rule.operation == "pread64" or (rule.operation == "read" and rule.dead)
            if kind == "SIGSEGV" and self._activity.touches and is_lost:
                pass  # what was to be read is gone: docs/troubleshooting/steps.md
            elif not outcome.get("ours"):
                problems.append("the error is not one of penstock")
            elif not any(place in text for place in places):
                problems.append("the error does not name the path")
            elif (
                rule.error
                and os.strerror(rule.error) not in text
                and not any(each in text for each in _UNREACHABLE)
            ):
                problems.append("the error does not name the cause")
            elif fault in ("short", "slow") or (fault == "EINTR" and rule.operation in self._repeated):
                problems.append("nothing had failed")
        problems += self.problems(went_well, rule.operation in ("unlink", "unlinkat", "rmdir") or rule.dead)
        return {"operation": rule.operation, "first": rule.first, "fault": fault, "kind": kind,
                "outcome": outcome, "problems": problems}  # fmt: skip


@contextlib.contextmanager
def served_store(folder: Path) -> Iterator[str]:
    """The URL of a store of the activities' samples: served by HTTP from a process of its own."""
    from tests.faults.activities import SAMPLES
    from tests.support.stores import write_store

    write_store(folder, SAMPLES, data_file_bytes=70_000)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            with HttpServer(folder) as server:
                os.write(writing, server.url.encode())
                while os.getppid() != 1:
                    time.sleep(0.2)
        finally:
            os._exit(0)
    os.close(writing)
    try:
        yield os.read(reading, 200).decode()
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def main(folder: Path) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what others print is no answer
    (folder / "mount").mkdir()
    with Mount(folder / "mount") as mount, served_store(folder / "served") as url:
        os.environ["PENSTOCK_FAULTS_URL"] = url
        gc.collect()
        gc.freeze()  # children copy none of it
        for line in sys.stdin:
            name, *arguments = json.loads(line)
            for answer in REQUESTS[name](mount, *arguments):
                answers.write(json.dumps(answer) + "\n")
            answers.write("null\n")


def _matrix(mount: Mount, name: str, places: int) -> Iterator[dict[str, Any]]:
    yield from Runs(mount, name).matrix(places)


def _environment(mount: Mount, variables: dict[str, str]) -> Iterator[dict[str, Any]]:
    os.environ.update(variables)
    yield from ()


def _calls(mount: Mount, name: str, places: int) -> Iterator[dict[str, Any]]:
    try:
        calls = Filter()
        probe = in_child(mount, lambda: os.path.exists("/"), supervisor=Supervisor(calls, mount.folder, ()))
        assert "error" not in probe, probe
    except OSError as error:
        yield {"skipped": f"system calls cannot be stopped here: {error}"}
        return
    yield from Runs(mount, name, calls).matrix(places)


def _crashes(mount: Mount, name: str, count: int, left_out: list[str]) -> Iterator[dict[str, Any]]:
    """Record what a scenario does, and look at so many crashes of it, in two processes.

    left_out   kinds of events that are taken out of the record
    """
    from tests.faults.activities import move_small_pieces
    from tests.faults.crashes import SCENARIOS, after, build, crashes, marking

    move_small_pieces()

    scenario, folder = SCENARIOS[name](), mount.folder
    mount.ask("begin", [], False)
    mount.ask("clear")
    for record, work in (
        (False, scenario.prepare),
        (True, lambda folder: scenario.act(folder, marking(folder))),
    ):
        if record:
            saved = mount.ask("save")
        mount.ask("begin", [], record)
        done = in_child(mount, lambda work=work: work(folder))
        assert "error" not in done, done
    events = [event for event in mount.ask("end")[2] if event.kind not in left_out]
    memory = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else folder.parent

    def look(part: int) -> list[Any]:
        found: list[Any] = []
        with tempfile.TemporaryDirectory(dir=memory, prefix="penstock-faults-") as images:
            for number, crash in enumerate(crashes(len(events), count)):
                if number % 2 == part:
                    tree, marks = after(crash, saved, events)
                    build(tree, image := Path(images) / f"{number}")
                    try:
                        problems = list(scenario.problems(image, marks))
                    except Exception as error:
                        problems = ["".join(traceback.format_exception(error)[-4:])]
                    found += [(crash, marks, problems)] if problems else []
                    shutil.rmtree(image)
        return found[:20]

    for part in [_begin(mount, lambda part=part: look(part)) for part in (0, 1)]:
        outcome = _end(*part, IMAGES_S)
        for crash, marks, problems in outcome.get("found", [[None, [], [str(outcome)]]]):
            yield {"crash": crash, "marks": marks, "problems": problems}
    yield {"scenario": name, "events": len(events), "images": count}


REQUESTS: dict[str, Callable[..., Iterator[dict[str, Any]]]] = {
    "crashes": _crashes,
    "matrix": _matrix,
    "calls": _calls,
    "environment": _environment,
}

if __name__ == "__main__":
    main(Path(sys.argv[1]))
