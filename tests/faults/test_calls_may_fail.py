"""Whatever a call on a file answers: one clear error or the right bits, and nothing is left behind."""

from __future__ import annotations

import pytest

from tests.faults.conftest import FULL, Worker, note_calls

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
    note_calls(activity, answers)
    wrong = [answer for answer in answers if answer["problems"]]
    assert not wrong, "\n\n".join(map(str, wrong))
