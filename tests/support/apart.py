"""Programs in processes of their own, forked from one that has imported torch and penstock: that takes longer
than most programs run. What is claimed of the start or the end of Python needs one that is started anew."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
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


def ended(*programs: Program, timeout_s: float = 120) -> list[subprocess.CompletedProcess[str]]:
    """The programs side by side, when they have ended. Where one fails, and after ``timeout_s``, so do the
    others."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [(Path(folder, f"{i}.out"), Path(folder, f"{i}.err")) for i in range(len(programs))]
        processes = []
        for program, paths in zip(programs, outputs, strict=True):
            environment = {**os.environ, **program.environment}
            processes.append(context().Process(target=_run, args=(program, os.getcwd(), environment, *paths)))
            processes[-1].start()
        latest_s = time.monotonic() + timeout_s
        while left := [process for process in processes if process.exitcode is None]:
            over = not wait([process.sentinel for process in left], latest_s - time.monotonic())
            if over or any(process.exitcode for process in processes):
                for process in left:
                    process.kill()
        said = [[path.read_text() if path.exists() else "" for path in paths] for paths in outputs]
        return [
            subprocess.CompletedProcess(program.source, process.exitcode or 0, *texts)
            for program, process, texts in zip(programs, processes, said, strict=True)
        ]


def python(source: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """One program, when it has ended."""
    return ended(Program(textwrap.dedent(source), arguments, environment))[0]


def _run(program: Program, folder: str, environment: Mapping[str, str], *paths: Path) -> None:
    for number, path in enumerate(paths, 1):
        with open(path, "wb") as file:
            os.dup2(file.fileno(), number)
    least_s, most_s = step_planner.PLANNING_LIMITS_S
    step_planner.PLANNING_LIMITS_S = (least_s / 10, most_s)  # as in the tests' own process
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [str(program.source), *map(str, program.arguments)]
    if isinstance(program.source, Path):
        runpy.run_path(str(program.source), run_name="__main__")
    else:
        exec(compile(program.source, "<program>", "exec"), {"__name__": "__main__"})
