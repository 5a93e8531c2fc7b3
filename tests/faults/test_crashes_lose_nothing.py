"""Wherever power is lost: the old or the new is there, whole, and what was acknowledged is there."""

from __future__ import annotations

import pytest

from tests.faults.conftest import FULL, Worker, note_images
from tests.support.nvme_target.process import compiler

pytestmark = [pytest.mark.faults, pytest.mark.slow]

# Each is looked at after so many crashes, in the full run.
SCENARIOS = {
    "save": 800,
    "save over another": 1000,
    "save over another, buffered": 1000,
    "Manager, increments": 1600,
    "samples pack": 1600,
    "samples pack, overwrite": 1600,
    "samples upload, namespace": 800,
    "samples cache": 1000,
    "values": 600,
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_crash_leaves_the_old_or_the_new(scenario: str, worker: Worker) -> None:
    _skip_without_target(scenario)
    *wrong, recorded = worker.ask("crashes", scenario, SCENARIOS[scenario] if FULL else 60, [])
    note_images(recorded)
    assert not wrong, "\n\n".join(map(str, wrong))


@pytest.mark.parametrize(
    ("scenario", "left_out"),
    [
        ("save", "sync"),
        ("save", "sync folder"),
        ("save over another", "sync"),
        ("Manager, increments", "sync folder"),
        ("samples pack", "sync"),
        ("samples pack, overwrite", "sync"),
        ("samples upload, namespace", "sync"),
        ("values", "sync folder"),
    ],
)
def test_without_its_flushes_something_would_be_lost(scenario: str, left_out: str, worker: Worker) -> None:
    """What looks at the crashes can tell: of the same record without them."""
    _skip_without_target(scenario)
    *wrong, _ = worker.ask("crashes", scenario, 100, [left_out])
    assert wrong


def _skip_without_target(scenario: str) -> None:
    if "namespace" in scenario and compiler() is None:
        pytest.skip("no C++ compiler for the NVMe/TCP target: set CXX, or install g++")
