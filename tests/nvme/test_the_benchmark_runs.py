"""benchmarks/samples_remote.py measures what it says, on rows that read right bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.benchmark
@pytest.mark.slow
def test_remote_drives_are_measured(tmp_path: Path) -> None:
    output = tmp_path / "samples_remote.json"
    script = ROOT / "benchmarks" / "samples_remote.py"
    subprocess.run([sys.executable, script, "--quick", "-o", output], check=True, timeout=300)
    found = json.loads(output.read_text())
    assert found["reads"]["violations"] == found["samples"]["violations"] == []
    for size in ("4096", "262144"):
        assert {"penstock, io_uring", "penstock, epoll", "raw socket"} <= set(found["reads"][size])
    assert set(found["targets"]["turns"]) == {"one target", "two targets", "one and one of half its rate"}
    for size in ("131072", "512"):
        drives = found["devices"]["sizes"][size]
        assert drives["violations"] == []
        assert {"16 1", "16 16"} == set(drives["turns"])
        assert all(0 < turn["share"] <= 1.05 for turns in drives["turns"].values() for turn in turns)
    mixing = found["samples"]["mixing"]
    assert mixing["namespace"] == mixing["files, page cache"]
    assert mixing["namespace"]["each_once"]
    rows = [*found["samples"]["warm"].values(), *found["samples"]["equal bandwidth"].values()]
    assert all(turn["reads"] > 0 for row in rows for turn in row)
