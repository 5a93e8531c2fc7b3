"""`make demo-samples` runs where there are only the packages of a fresh clone, and shows what it promises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_demo_shows_throughput_mixing_and_training(tmp_path: Path) -> None:
    script = ROOT / "examples" / "samples_demo.py"
    done = subprocess.run(
        [sys.executable, script, "--seconds", "0.05", "-o", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for said in ("are equal to their files", "files: open, read, close", "mixing", "as stored", "accuracy"):
        assert said in done.stdout
    assert (tmp_path / "out" / "library" / "store.json").exists()
    assert (tmp_path / "out" / "digits" / "store.json").exists()
