"""The benchmark and the example it trains: they run, and every way gives the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_every_way_of_training_gives_the_same_bits(tmp_path: Path) -> None:
    output = tmp_path / "step_time.json"
    script = ROOT / "benchmarks" / "step_time.py"
    options = ["--quick", "--spill-dir", str(tmp_path), "-o", str(output)]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # other tests may keep the cores busy
    subprocess.run([sys.executable, script, *options], check=True, timeout=300, env=one_thread)
    document = json.loads(output.read_text())
    ways = document["ways"]
    assert {"in memory", "checkpoint", "files", "penstock at 45%"} <= set(ways)
    assert all(way["same_bits"] for way in ways.values())
    assert {len(way["samples_s"]) for way in ways.values()} == {6}
    assert document["commit"] and document["config"]["seed"] == 0
