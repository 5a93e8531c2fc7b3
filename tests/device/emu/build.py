"""Compiles the device against the torch that is installed, at most once for each version of both.

`python tests/device/emu/build.py` says where the library is. It takes half a minute with two cores.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

NATIVE = Path(__file__).with_name("native")
FOLDER = Path(__file__).parents[3] / "build" / "device"
TORCH = Path(torch.__file__).parent
FLAGS = ("-std=c++20", "-O1", "-g1", "-fPIC", "-Wall", "-Wno-interference-size")
INCLUDES = tuple(f"-isystem{TORCH / 'include' / part}" for part in ("", "torch/csrc/api/include"))
LINKED = (f"-L{TORCH / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{TORCH / 'lib'}")


class NoCompiler(ImportError):
    """The device cannot be compiled here."""


def library() -> Path:
    """The compiled device. Raises NoCompiler, and CalledProcessError where it does not compile."""
    compiler = _compiler()
    if compiler is None:
        raise NoCompiler("the emulated device needs a C++20 compiler: set CXX, or install g++")
    FOLDER.mkdir(parents=True, exist_ok=True)
    units = sorted(NATIVE.glob("*.cpp"))
    headers = sorted(NATIVE.glob("*.h"))
    common = "\n".join([*compiler, *FLAGS, *LINKED, torch.__version__]).encode() + _content(headers)
    made = FOLDER / f"libemu-{_digest(common + _content(units))}.so"
    with open(FOLDER / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if made.exists():
            return made
        launcher = [found] if (found := shutil.which("ccache")) else []
        flags = [*FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", *INCLUDES]
        targets = {unit: FOLDER / f"{unit.stem}-{_digest(common + unit.read_bytes())}.o" for unit in units}

        def compiled(source: Path, target: Path, *more: str) -> None:
            part = target.with_suffix(".part")
            subprocess.run([*launcher, *compiler, *flags, *more, str(source), "-o", str(part)], check=True)
            part.rename(target)

        if missing := {unit: target for unit, target in targets.items() if not target.exists()}:
            parallel = int(os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", os.cpu_count() or 1))
            with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(parallel) as pool:
                header = NATIVE / "precompiled.h"
                if not launcher:  # which remembers more where nothing is precompiled
                    header = Path(shutil.copy(header, folder))
                    compiled(header, Path(f"{header}.gch"), "-x", "c++-header")
                first = ("-include", str(header), "-c")
                done = [pool.submit(compiled, unit, target, *first) for unit, target in missing.items()]
                for each in done:
                    each.result()
        objects = list(targets.values())
        part = made.with_suffix(".part")
        subprocess.run([*compiler, "-shared", "-o", str(part), *map(str, objects), *LINKED], check=True)
        part.rename(made)
        for old in FOLDER.iterdir():
            if old.suffix in (".so", ".o") and old not in (made, *objects):
                old.unlink()
    return made


def _compiler() -> list[str] | None:
    for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        command = shlex.split(name)
        if command and shutil.which(command[0]):
            return command
    return None


def _content(paths: list[Path]) -> bytes:
    return b"".join(path.name.encode() + path.read_bytes() for path in paths)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


if __name__ == "__main__":
    try:
        print(library())
    except (NoCompiler, subprocess.CalledProcessError) as error:
        sys.exit(str(error))
