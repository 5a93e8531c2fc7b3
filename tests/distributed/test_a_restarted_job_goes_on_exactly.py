"""torchrun starts a job again after a rank was killed: it ends with the bits of one without interruption."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from penstock import samples
from tests.distributed.restarting import KILLED_AT, SAMPLES, SAVED_EVERY, STEPS, WIDTH
from tests.support.ranks import torchrun

SCRIPT = Path(__file__).parent / "restarting.py"


def noted(path: Path) -> list[tuple[int, list[int]]]:
    """Which samples each step took."""
    return [(step, taken) for step, taken in map(json.loads, path.read_text().splitlines())]


@pytest.mark.slow
def test_a_restarted_job_goes_on_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    (tmp_path / "spill").mkdir()
    x = np.random.default_rng(0).standard_normal((SAMPLES, WIDTH), dtype=np.float32)
    samples.pack({"x": x, "number": np.arange(SAMPLES)}, tmp_path / "store")
    printed = torchrun(2, SCRIPT, tmp_path, restarts=2)
    assert [line.split(" to ")[0] for line in sorted(printed.splitlines()) if "trained" in line] == [
        f"rank {rank} trained in attempt 1" for rank in range(2)
    ]
    taken_by_all = []
    for rank in range(2):
        first = noted(tmp_path / f"rank-{rank}-attempt-0")
        second = noted(tmp_path / f"rank-{rank}-attempt-1")
        whole = noted(tmp_path / f"rank-{rank}-whole")
        saved = KILLED_AT // SAVED_EVERY * SAVED_EVERY
        assert [step for step, _ in whole] == list(range(STEPS))
        assert first == whole[: len(first)] and len(first) in (KILLED_AT, KILLED_AT + 1)
        assert second == whole[saved:]
        taken_by_all += whole
    epoch = [number for step, taken in taken_by_all if step < SAMPLES // 8 for number in taken]
    assert len(epoch) == len(set(epoch)) == SAMPLES // 8 * 8
    assert list((tmp_path / "spill").iterdir()) == []
