"""Builds csrc/tests/model/arena_model.cpp, which runs the arena in every order of its steps: from these
sources, or from sources with a mistake.

    python -m tests.model.arena [NAME]

The long form: everything, in two processes, then each mistake that has NAME in its name. It ends with 1 where
the sources are wrong, or a mistake does not show.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OBJECTS = ROOT / "build" / "model"
FLAGS = ["-std=c++20", "-O1", "-DPENSTOCK_SEAMS"]
ARENA = ["arena", "copies", "frames", "gate", "landings", "paging", "swap", "tails"]


@dataclass(frozen=True)
class Mutant:
    """A mistake: ``before`` in ``file`` becomes ``after``.

    arguments   for the program, so that it looks where the mistake shows
    real        it shows only with the system's own pages
    """

    name: str
    file: str
    before: str
    after: str
    arguments: Sequence[str] = ()
    real: bool = False


def compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")


def build(folder: Path, *, real: bool = False, mutant: Mutant | None = None) -> Path:
    """The program. real: with the system's pages, and with what encodes; they take more time than simulated
    ones."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = folder / "csrc"
    shutil.copytree(ROOT / "csrc", sources)
    if mutant is not None:
        file = sources / "arena" / mutant.file
        text = file.read_text()
        assert text.count(mutant.before) == 1, f"{mutant.name}: {mutant.file} has changed"
        file.write_text(text.replace(mutant.before, mutant.after))
    pages = "arena/pages" if real else "tests/model/simulated_pages"
    names = [f"arena/{name}" for name in ARENA]
    names += [pages, "codecs/packing", "codecs/bitmask", "tests/model/local", "tests/model/arena_model"]
    flags = [*FLAGS, *([] if real else ["-DPENSTOCK_SIMULATED_PAGES"])]
    headers = hashlib.sha256()
    for header in sorted(sources.rglob("*.hpp")):
        headers.update(header.read_bytes())
    OBJECTS.mkdir(parents=True, exist_ok=True)

    def compiled(name: str) -> Path:
        source = sources / f"{name}.cpp"
        digest = hashlib.sha256(repr((flags, headers.hexdigest(), source.read_bytes())).encode()).hexdigest()
        made = OBJECTS / f"{source.stem}-{digest[:16]}.o"
        if not made.exists():
            part = folder / made.name  # whole, or not there
            include = [f"-I{sources}", f"-I{sources}/tests"]
            _run([compiler() or "g++", *flags, *include, "-c", str(source), "-o", str(part)])
            shutil.move(part, made)
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [str(made) for made in pool.map(compiled, names)]
    program = folder / "arena_model"
    _run([compiler() or "g++", *objects, "-o", str(program), "-lpthread"])
    return program


def explore(program: Path, *arguments: str, timeout_s: float = 900) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program, *arguments], capture_output=True, text=True, timeout=timeout_s, check=False
    )


def main(name: str = "") -> int:
    from tests.model.arena_mutants import MUTANTS

    parts = [("--part", f"{i}/2") for i in range(2)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        simulated, real = build(Path(folder) / "simulated"), build(Path(folder) / "real", real=True)
        jobs = [(simulated, part) for part in parts] + [(real, (*part, "--seconds", "60")) for part in parts]
        jobs += [(simulated, (*part, "--forks", "--only", "fork", "--seconds", "60")) for part in parts]
        done = [] if name else list(pool.map(lambda job: explore(job[0], *job[1]), jobs))
        for each in done:
            print(each.stdout, end="", flush=True)

        def shows(mutant: Mutant) -> bool:
            with tempfile.TemporaryDirectory() as own:
                program = build(Path(own) / "mutant", real=mutant.real, mutant=mutant)
                found = explore(program, *(mutant.arguments or ("--deep", "--seconds", "60"))).returncode != 0
            print("found " if found else "MISSED", mutant.name, flush=True)
            return found

        missed = [
            found for found in pool.map(shows, (each for each in MUTANTS if name in each.name)) if not found
        ]
    return int(bool(missed) or any(each.returncode for each in done))


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
