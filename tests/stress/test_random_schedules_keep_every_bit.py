"""Ten small programs under some random schedules; `make test-stress` runs a thousand of each."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stress.programs import PROGRAMS
from tests.support.apart import Program, ended

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.runtime


def passed(*arguments: str) -> int:
    """How many seeds passed: all, or the first failure is raised."""
    (done,) = ended(Program(ROOT / "tests/stress/__main__.py", ("--work", *arguments)), timeout_s=600)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout.count("passed")


def test_a_few_schedules() -> None:
    assert passed("--seeds", "1:2") == len(PROGRAMS)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_more_schedules(program: str) -> None:
    assert passed("--programs", program, "--seeds", "100:104") == 4


@pytest.mark.slow
def test_each_failure_says_how_to_repeat_it() -> None:
    command = [sys.executable, "-m", "tests.stress", "--programs", "minimum", "--seeds", "1:3"]
    done = subprocess.run(
        [*command, "--limit", "0.001"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    for seed in (1, 2):
        # By a signal where faulthandler reads frames amid their change: nothing keeps them still.
        assert re.search(f"FAILED: minimum, seed {seed}: (status 1|signal 11)", done.stdout)
        assert f"-m tests.stress --programs minimum --seeds {seed}:{seed + 1}" in done.stdout
    assert "Timeout" in done.stdout and "tests/stress/programs.py" in done.stdout  # where it was
