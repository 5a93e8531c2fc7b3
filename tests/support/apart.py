"""Programs in processes of their own, forked from one that has imported torch and penstock: that takes longer
than most programs run. What is claimed of the start or end of Python, or of resident memory, needs one that
is started anew."""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import NamedTuple

from penstock.runtime import step_planner

ROOT = Path(__file__).parents[2]
IMPORTED = ["numpy", "torch._dynamo", "torch.distributed.fsdp", "penstock.runtime.run", __name__]


class Program(NamedTuple):
    """source   text, or a file; its arguments; environment   beside that of the tests"""

    source: str | Path
    arguments: tuple[object, ...] = ()
    environment: Mapping[str, str] = {}


def context() -> ForkServerContext:
    """What makes processes that have imported."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(IMPORTED)
    before = os.getcwd()
    os.chdir(ROOT)  # from where the tests are imported
    try:
        forkserver.ensure_running()
    finally:
        os.chdir(before)
    return found


def started(target: Callable[..., object], *arguments: object) -> ForkServerProcess:
    """A process that calls a function, in the environment of this one; it ends with it."""
    process = context().Process(target=_called, args=(dict(os.environ), target, arguments), daemon=True)
    process.start()
    return process


class Running:
    """A program that has begun."""

    def __init__(self, program: Program) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._outputs = [Path(self._folder.name, name) for name in ("out", "err")]
        environment = {**os.environ, **program.environment}
        arguments = (program, os.getcwd(), environment, *self._outputs)
        self.process = context().Process(target=_run, args=arguments)
        self.process.start()

    @property
    def said(self) -> list[str]:
        """What it has printed so far, and its errors."""
        return [path.read_text() if path.exists() else "" for path in self._outputs]

    def wait_for(self, text: str, times: int = 1) -> None:
        """Until it has printed that so often. Raises AssertionError where it has ended."""
        while sum(said.count(text) for said in self.said) < times:
            assert self.process.exitcode is None, self.said
            time.sleep(0.01)

    def end(self, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """When it has ended, or did not in that time and is killed."""
        self.process.join(timeout_s)
        self.process.kill()
        self.process.join()
        return subprocess.CompletedProcess(self.process.name, self.process.exitcode or 0, *self.said)


def ended(*programs: Program, timeout_s: float = 120) -> list[subprocess.CompletedProcess[str]]:
    """The programs side by side, when they have ended. Where one fails, and after ``timeout_s``, so do the
    others."""
    running = [Running(program) for program in programs]
    latest_s = time.monotonic() + timeout_s
    while left := [each.process for each in running if each.process.exitcode is None]:
        over = not wait([process.sentinel for process in left], latest_s - time.monotonic())
        if over or any(each.process.exitcode for each in running):
            break
    return [each.end(0) for each in running]


def python(source: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """One program, when it has ended."""
    return ended(Program(textwrap.dedent(source), arguments, environment))[0]


def _called(
    environment: Mapping[str, str], target: Callable[..., object], arguments: tuple[object, ...]
) -> None:
    os.environ.update(environment)
    target(*arguments)


def _run(program: Program, folder: str, environment: Mapping[str, str], *paths: Path) -> None:
    gc.freeze()  # what was imported stays: each run looks for garbage, and need not look there
    for number, path in enumerate(paths, 1):
        with open(path, "wb") as file:
            os.dup2(file.fileno(), number)
    least_s, most_s = step_planner.PLANNING_LIMITS_S
    step_planner.PLANNING_LIMITS_S = (least_s / 10, most_s)  # as in the tests' own process
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests' shell ignores it
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [str(program.source), *map(str, program.arguments)]
    if isinstance(program.source, Path):
        sys.path.insert(0, str(program.source.parent))
        runpy.run_path(str(program.source), run_name="__main__")
    else:
        exec(compile(program.source, "<program>", "exec"), {"__name__": "__main__"})
