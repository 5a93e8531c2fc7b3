"""What the benchmark ran on, as a document."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "numpy", "penstock", "safetensors", "torchsnapshot", "deepspeed", "nixl")
PROGRAMS = ("fio", "c++")


def heading(benchmark: str, directory: Path | None = None, packages: Sequence[str] = ()) -> dict[str, Any]:
    """What was measured, when, where and with what.

    directory   on the disk that is measured; None: that of temporary files
    """
    return {
        "benchmark": benchmark,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit(),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "machine": machine(directory or Path(tempfile.gettempdir())),
        "versions": versions(packages),
    }


def commit() -> str:
    """The commit of the code, marked where files differ from it."""
    try:
        return subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=Path(__file__).parent,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine(directory: Path) -> dict[str, Any]:
    return {
        "system": platform.platform(),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "huge_pages": first_line(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "load_average": os.getloadavg(),
        **file_system(directory),
    }


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "Model")):
            return line.partition(":")[2].strip()
    return platform.machine()


def file_system(directory: Path) -> dict[str, Any]:
    """Type and options of the file system, and what is known of the disk below it."""
    device = os.stat(directory).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    found: dict[str, Any] = {"file_system": "unknown"}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[2] == number:
            kind, source, options = fields[fields.index("-") + 1 :][:3]
            found = {"file_system": kind, "file_system_options": options, "disk": Path(source).name}
            break
    queue = Path("/sys/dev/block") / number / "queue"
    for name in ("write_cache", "scheduler", "rotational"):
        if value := first_line(queue / name) or first_line(queue.parent / "../queue" / name):
            found[f"disk_{name}"] = value
    return found


def versions(others: Sequence[str] = ()) -> dict[str, str]:
    """Of Python, of the packages that are installed, and of the programs."""
    found = {"python": platform.python_version()}
    for name in (*PACKAGES, *others):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    for name in PROGRAMS:
        if shutil.which(name):
            told = subprocess.run([name, "--version"], capture_output=True, text=True, check=False).stdout
            found[name] = told.partition("\n")[0]
    return found


def first_line(path: Path) -> str:
    try:
        return path.read_text().partition("\n")[0].strip()
    except OSError:
        return ""
