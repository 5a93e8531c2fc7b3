"""benchmarks/samples_objects.py measures every row of the table in docs/measured/samples.md."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.object_servers import weed

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.benchmark
@pytest.mark.slow
def test_object_stores_are_measured(tmp_path: Path) -> None:
    weed()  # skips where there is no server
    script, output = ROOT / "benchmarks" / "samples_objects.py", tmp_path / "samples_objects.json"
    command = [sys.executable, script, "--quick", "--folder", tmp_path, "-o", output]
    subprocess.run(command, check=True, timeout=300)
    found = json.loads(output.read_text())
    rows = {(row["chunk_bytes"] >> 10, row["cache_bytes"] >> 20): row for row in found["throughput"]}
    assert list(rows) == [(256, 256), (1024, 256), (4096, 64)]
    for row in rows.values():
        assert row["bytes_per_s"].keys() == {"obstore", "bare", "cold", "warm"}
        assert min(row["bytes_per_s"].values()) > 0
        assert min(row["requests"]["cold"], row["requests"]["bare"]) > row["requests"]["warm"] == 0
    assert found["first"]["samples"] == 10_000
    assert [path.name for path in tmp_path.iterdir()] == [output.name]
