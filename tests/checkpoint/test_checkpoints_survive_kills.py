"""A process may be killed at any moment, others may save and read: every file found is whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What tests/support/saving.py found. It refuses by itself what is damaged or a mixture."""
    command = [sys.executable, "-m", "tests.support.saving", str(tmp_path_factory.mktemp("saving"))]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert process.returncode == 0, process.stderr
    return dict(json.loads(process.stdout))


@pytest.mark.parametrize("how", ["killed", "killed_hidden"])
def test_a_killed_save_leaves_the_old_or_the_new_file(how: str, results: dict[str, Any]) -> None:
    versions = results[how]["versions"]
    assert versions == sorted(versions), "no state that was saved is lost again"
    assert versions[-2] > 5, "saves succeeded in between"


@pytest.mark.parametrize("how", ["killed", "killed_hidden"])
def test_a_killed_save_leaves_nothing_that_piles_up(how: str, results: dict[str, Any]) -> None:
    found = results[how]
    assert found["most_hidden"] <= 1, "the next save removes what a killed one left"
    assert found["foreign"] == [] and found["left"] == ["state"]


def test_a_kill_did_leave_a_file_that_the_next_save_removed(results: dict[str, Any]) -> None:
    assert results["killed_hidden"]["most_hidden"] == 1


def test_two_processes_can_save_to_one_path_while_a_third_reads(results: dict[str, Any]) -> None:
    seen = results["together"]["seen"]
    assert len(set(seen)) > 3, "the file changed while it was read"
    assert {version % 2 for version in seen if version} == {0, 1}, "both saved"
