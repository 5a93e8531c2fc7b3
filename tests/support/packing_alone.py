"""Packing in processes that are killed, or run out of space. Prints what came of it as JSON.

    python -m tests.support.packing_alone FOLDER

Run by `unshare --mount`, it also packs to disks that are too small.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.errors import SampleError
from penstock.samples import progress
from penstock.samples.packing import FlushPolicy, pack_source
from tests.support.packing import Listed, contents, expected, recipe_of, samples_of

ITEMS = samples_of(300, 2000)
SOURCE = Listed(ITEMS, size_bytes=sum(len(data) for _, data in ITEMS))
RHYTHM = FlushPolicy(flush_bytes=8 << 10, checkpoint_bytes=64 << 10, checkpoint_s=1e9)


def pack_to(folder: Path, report: Callable[[int, int], None] | None = None) -> None:
    pack_source(SOURCE, folder, recipe_of(SOURCE), metadata={}, policy=RHYTHM, report=report)


def pack_until_killed(folder: Path, reports: int) -> None:
    """Be killed at the last of so many reports."""
    left = reports

    def report(*_: int) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    pack_to(folder, report)


def pack_to_short_files(folder: Path, size_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))
    pack_to(folder)


def run_alone(work: Callable[[], None]) -> dict[str, Any]:
    """Do it in another process. Gives its exit code, 3 for a SampleError, and the text of that."""
    end, other_end = os.pipe()
    process = os.fork()
    if process == 0:
        code = 0
        try:
            work()
        except SampleError as error:
            os.write(other_end, str(error).encode())
            code = 3
        except BaseException:
            traceback.print_exc()
            code = 1
        os._exit(code)
    os.close(other_end)
    with open(end) as file:
        text = file.read()
    return {"code": os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), "error": text}


def look_at(folder: Path) -> dict[str, Any]:
    """What an interrupted packing left."""
    found = progress.read(folder)
    assert found is not None
    return {"whole": (folder / "store.json").exists(), "samples": found.samples}


def on_small_disk(folder: Path, size: str) -> dict[str, Any] | None:
    """Pack to a new file system of that size, and copy what is left. None where there can be no such."""
    disk = folder.with_suffix(".disk")
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        return None
    found = run_alone(lambda: pack_to(disk / "store"))
    shutil.copytree(disk / "store", folder)
    return found | look_at(folder)


def main(made: Path) -> None:
    wanted = expected(made / "wanted", ITEMS)
    results: dict[str, Any] = {"killed": []}
    for reports in (3, 25, 40):
        found = run_alone(lambda reports=reports: pack_until_killed(made / "killed", reports))
        results["killed"].append(found | look_at(made / "killed"))
    found = run_alone(lambda: pack_to_short_files(made / "limited", 300 << 10))
    results["limited"] = found | look_at(made / "limited")
    for size in ("100k", "580k"):
        results[size] = on_small_disk(made / size, size)
    for name in ("killed", "limited", "100k", "580k"):
        if results[name]:
            pack_to(made / name)
            results[f"{name} packed"] = contents(made / name) == wanted
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
