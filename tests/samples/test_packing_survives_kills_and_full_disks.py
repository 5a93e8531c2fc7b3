"""A process may be killed and a disk may fill up while it packs: nothing looks whole, and packing goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import SampleError
from penstock.samples.writing import Background

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What tests/support/packing_alone.py found; with small disks where this user may mount them."""
    alone = ["unshare", "--mount", *(["--map-root-user"] if os.geteuid() else [])]
    try:
        subprocess.run([*alone, "true"], check=True, capture_output=True, timeout=30)
    except (OSError, subprocess.CalledProcessError):
        alone = []
    folder = str(tmp_path_factory.mktemp("packing"))
    command = [*alone, sys.executable, "-m", "tests.support.packing_alone", folder]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert process.returncode == 0, process.stderr
    return dict(json.loads(process.stdout))


def test_a_killed_packing_goes_on(results: dict[str, Any]) -> None:
    assert [found["code"] for found in results["killed"]] == [-signal.SIGKILL] * 3
    assert not any(found["whole"] for found in results["killed"])
    samples = [found["samples"] for found in results["killed"]]
    assert samples == sorted(samples) and samples[-1] > 0
    assert results["killed packed"]


def test_a_file_that_may_not_grow_is_an_error_and_packing_goes_on(results: dict[str, Any]) -> None:
    found = results["limited"]
    assert found["code"] == 3 and not found["whole"] and 0 < found["samples"] < 300
    for part in ("data-00000.bin: File too large", "are free there", "not yet safe", "Make room there"):
        assert part in found["error"]
    assert f"goes on after {found['samples']} samples" in found["error"]
    assert results["limited packed"]


@pytest.mark.parametrize("size", ["100k", "580k"])
def test_a_full_disk_is_an_error_and_packing_goes_on(size: str, results: dict[str, Any]) -> None:
    found = results[size]
    if found is None:
        pytest.skip("no file system can be mounted here")
    assert found["code"] == 3 and not found["whole"]
    assert "No space left on device" in found["error"] and "Make room there" in found["error"]
    assert results[f"{size} packed"]


def test_a_disk_that_does_not_answer_is_given_up() -> None:
    stuck = threading.Event()
    background = Background("writing", 1, stuck_s=0.05)
    background.put(lambda: (stuck.wait(), None)[1])
    with pytest.raises(SampleError, match="writing has made no progress"):
        background.drain()
    stuck.set()
    background.close()


def test_work_after_a_failure_is_dropped_and_the_failure_is_raised() -> None:
    done = list[int]()
    background = Background("writing", 4)
    background.put(lambda: done.append(1))
    background.put(lambda: done.append(1 // 0))
    background.put(lambda: done.append(2))
    with pytest.raises(ZeroDivisionError):
        background.drain()
    background.close()
    background.close()
    assert done == [1]
