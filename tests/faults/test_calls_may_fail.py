"""Whatever a call on a file answers: one clear error or the right bits, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.conftest import FILES, FULL, SYSTEM, Worker, note_calls
from tests.support.nvme_target.process import NQN, Namespace, Subsystem, Target, compiler

pytestmark = [pytest.mark.faults, pytest.mark.slow]

ACTIVITIES = (
    ("training, io_uring direct", "training, posix staged")
    + ("save, io_uring direct", "save, io_uring buffered", "save, posix direct", "save, posix buffered")
    + ("save, wait=False", "load, read", "load, mapped", "load, into", "verify", "Manager, increments")
    + ("samples pack", "samples pack, overwrite", "samples mount, read", "samples unpack", "values")
)


@pytest.mark.parametrize("activity", ACTIVITIES)
def test_every_call_may_fail(activity: str, worker: Worker) -> None:
    answers = worker.ask("matrix", activity, 3 if FULL else 1)
    assert "error" not in answers[0]["outcome"], answers[0]
    assert len(answers) > 1
    note_calls(activity, answers, FILES)
    wrong = [answer for answer in answers if answer["problems"]]
    assert not wrong, "\n\n".join(map(str, wrong))


@pytest.fixture(scope="module")
def drive() -> Iterator[str]:
    """The URL of a namespace in the memory of the tests' NVMe/TCP target."""
    if compiler() is None:
        pytest.skip("no C++ compiler for the NVMe/TCP target: set CXX, or install g++")
    with Target([Subsystem(NQN.format(0), [Namespace(1, 64 << 20)])]) as target:
        yield f"nvme+tcp://{target.address}:{target.port}/{NQN.format(0)}?ns=1"


@pytest.mark.parametrize(
    "activity",
    (*ACTIVITIES, "samples cache", "drive, training", "drive, upload")
    + ("objects, upload", "objects, read", "objects, save", "objects, load"),
)
def test_every_system_call_may_fail(activity: str, worker: Worker, request: pytest.FixtureRequest) -> None:
    """Also those on files that no file system sees, and those on sockets."""
    if activity.startswith("drive"):
        worker.ask("environment", {"PENSTOCK_FAULTS_DRIVE": request.getfixturevalue("drive")})
    if activity.startswith("objects"):
        seaweed = request.getfixturevalue("seaweed")
        worker.ask("environment", {**seaweed.environment, "PENSTOCK_FAULTS_OBJECTS": seaweed.url("faults")})
    answers = worker.ask("calls", activity, 3 if FULL else 1)
    if "skipped" in answers[0]:
        pytest.skip(answers[0]["skipped"])
    assert "error" not in answers[0]["outcome"], answers[0]
    assert len(answers) > 1
    unknown = [each for each in answers[0]["counts"] if each.startswith("?")]
    assert not unknown, "tests/faults/calls.py has to say what these are about"
    note_calls(activity, answers, SYSTEM)
    wrong = [answer for answer in answers if answer["problems"]]
    assert not wrong, "\n\n".join(map(str, wrong))
