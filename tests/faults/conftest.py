"""The worker that does what fails, and the table of what came of it, printed at the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FULL = bool(os.environ.get("PENSTOCK_FAULTS"))
FILES, SYSTEM = "Calls on files", "System calls on files and sockets"
_COLUMNS = {
    FILES: ("EIO", "dead", "ENOSPC", "EINTR", "short", "slow", "never"),
    SYSTEM: (
        "EIO",
        "ENOSPC",
        "EINTR",
        "short",
        "slow",
        "never",
        "lost",
        "reset",
        "refused",
        "EPIPE",
        "timeout",
    ),
}
# What a call may end in.
_LETTERS = {"went on": "+", "timed out": "t", "SIGSEGV": "s"}

_tables: dict[str, dict[tuple[str, str], dict[str, Any]]] = defaultdict(dict)
_images: list[dict[str, Any]] = []


class Worker:
    """tests/faults/worker.py, in a mount namespace of its own."""

    def __init__(self, folder: Path) -> None:
        alone = ["unshare", "--mount", *(["--map-root-user"] if os.geteuid() else [])]
        command = [*alone, sys.executable, "-m", "tests.faults.worker", str(folder)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)

    def ask(self, *request: Any) -> list[dict[str, Any]]:
        """What it answers to a request; see `worker.REQUESTS`."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        found = []
        for line in self._process.stdout:
            if (answer := json.loads(line)) is None:
                return found
            found.append(answer)
        raise AssertionError(f"the worker ended: its status is {self._process.wait()}")

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        assert self._process.wait(60) == 0


@pytest.fixture(scope="session")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Skips where no file system of FUSE can be mounted."""
    probe = ["unshare", "--mount", *(["--map-root-user"] if os.geteuid() else []), "test", "-w", "/dev/fuse"]
    try:
        subprocess.run(probe, check=True, capture_output=True, timeout=30)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no file system of FUSE can be mounted here: that needs /dev/fuse and unshare --mount")
    made = Worker(tmp_path_factory.mktemp("faults"))
    yield made
    made.close()


def note_calls(activity: str, answers: list[dict[str, Any]], what: str) -> None:
    """For the table of `what`: what came of each call that failed."""
    for operation, calls in answers[0]["counts"].items():
        _tables[what][activity, operation] = {"calls": calls, **{name: Counter() for name in _COLUMNS[what]}}
    for answer in answers[1:]:
        row = _tables[what][activity, answer["operation"]]
        row[answer["fault"]][_LETTERS.get(answer["kind"], "E")] += 1


def note_images(answer: dict[str, Any]) -> None:
    _images.append(answer)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    write = terminalreporter.write_line
    for what, table in _tables.items():
        write("")
        write(f"{what}, and what came of those that failed: + the same bits; E one error;")
        write("t an error when the limit was over, before the answer came; s the process ended and said why,")
        write("since what it touched is lost. So many of each; . not tried.")
        columns = _COLUMNS[what]
        write(f"{'activity':<26}{'operation':<17}" + "".join(f"{name:>8}" for name in ("calls", *columns)))
        totals: dict[str, Counter[str]] = defaultdict(Counter)
        for (activity, operation), row in table.items():
            for name in columns:
                totals[name] += row[name]
            cells = [f"{row['calls']}", *(_shown(row[name]) for name in columns)]
            write(f"{activity:<26}{operation:<17}" + "".join(f"{cell:>8}" for cell in cells))
        tried = sum(sum(total.values()) for total in totals.values())
        write(f"{tried} faults: " + "; ".join(f"{name} {_shown(total)}" for name, total in totals.items()))
    if _images:
        write("")
        for each in _images:
            write(
                f"{each['images']:>6} crashes in {each['events']} writes, names and syncs: {each['scenario']}"
            )
        write(f"{sum(each['images'] for each in _images):>6} crashes in all")


def _shown(found: Counter[str]) -> str:
    return " ".join(f"{count}{letter}" for letter, count in sorted(found.items())) or "."
