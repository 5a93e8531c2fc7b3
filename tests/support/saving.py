"""Processes that save, are killed, and look at each other's files. Run as a program, prints one JSON object.

One process imports torch; the others are its children. It starts no threads before it forks: torch uses
one, and what is loaded is mapped.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from penstock import checkpoint
from penstock.checkpoint import replace

torch.set_num_threads(1)

ELEMENTS = (100_000, 5, 7_001)


def state(version: int) -> dict[str, Any]:
    return {"version": version, **{str(n): torch.full((n,), version) for n in ELEMENTS}}


def version_of(path: Path) -> int:
    """Which of the states the file holds. Raises where it is none of them, or damaged."""
    loaded = checkpoint.load(path, mmap=True)
    version: int = loaded["version"]
    for tensor in loaded.values():
        assert isinstance(tensor, int) or bool((tensor == version).all()), "a mixture of two states"
    return version


def child(work: Callable[[], None]) -> int:
    process = os.fork()
    if process == 0:
        try:
            work()
        finally:
            os._exit(0)
    return process


def save_for_ever(path: Path, version: int, step: int) -> None:
    while True:
        checkpoint.save(state(version), path)
        version += step


def kill_at_random(path: Path, times: int) -> dict[str, Any]:
    """Kill a process that saves, again and again; look at what it leaves each time."""
    chance = random.Random(7)
    versions, most_hidden, foreign = [0], 0, set()
    began_s = time.perf_counter()
    os.waitpid(child(lambda: checkpoint.save(state(0), path)), 0)
    longest_s = 2 * (time.perf_counter() - began_s)
    for _ in range(times):
        process = child(lambda: save_for_ever(path, versions[-1] + 1, 1))
        time.sleep(chance.uniform(0, longest_s))
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        versions.append(version_of(path))
        left = [name for name in os.listdir(path.parent) if name != path.name]
        most_hidden = max(most_hidden, len(left))
        foreign |= {name for name in left if not name.startswith(f".{path.name}.")}
    os.waitpid(child(lambda: checkpoint.save(state(versions[-1] + 1), path)), 0)
    return {
        "versions": [*versions, version_of(path)],
        "most_hidden": most_hidden,
        "foreign": sorted(foreign),
        "left": sorted(os.listdir(path.parent)),
    }


def save_side_by_side(path: Path, duration_s: float) -> dict[str, Any]:
    """Two processes save to one path while a third reads it."""
    os.waitpid(child(lambda: checkpoint.save(state(0), path)), 0)
    writers = [child(lambda start=start: save_for_ever(path, start, 2)) for start in (1, 2)]
    seen = []
    end = time.monotonic() + duration_s
    while time.monotonic() < end:
        seen.append(version_of(path))
    for process in writers:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    return {"seen": seen, "last": version_of(path)}


def main(folder: Path) -> None:
    results = {}
    for name in ("killed", "killed_hidden", "together"):
        (folder / name).mkdir()
    results["killed"] = kill_at_random(folder / "killed" / "state", 60)
    results["together"] = save_side_by_side(folder / "together" / "state", 1.0)
    replace._create_nameless = lambda *_: None  # as on a file system without nameless files
    results["killed_hidden"] = kill_at_random(folder / "killed_hidden" / "state", 30)
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
