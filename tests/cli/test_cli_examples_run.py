"""The examples and benchmarks of training run, and every method gives the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.apart import Program, ended

ROOT = Path(__file__).resolve().parents[2]
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}  # other tests may keep the cores busy


def run(script: Path, *options: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, script, *options],
        capture_output=True,
        text=True,
        timeout=300,
        env=ONE_THREAD,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_demo_shows_five_rows_and_leaves_a_picture(tmp_path: Path) -> None:
    script = ROOT / "examples" / "demo.py"
    said = run(script, "--quick", "--steps", "6", "--spill-dir", tmp_path, "-o", tmp_path / "out")
    table = said[said.index("After") :]
    for name in ("in memory", "checkpoint", "penstock, 65 %", "penstock, 35 %", "penstock, 20 %"):
        (row,) = [line for line in table.splitlines() if line.lstrip().startswith(name)]
        assert row.rstrip().endswith("equal")
    assert (tmp_path / "out" / "demo.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.benchmark
@pytest.mark.slow
def test_every_method_of_training_gives_the_same_bits(tmp_path: Path) -> None:
    output = tmp_path / "step_time.json"
    run(ROOT / "benchmarks" / "step_time.py", "--quick", "--spill-dir", tmp_path, "-o", output)
    document = json.loads(output.read_text())
    methods = document["methods"]
    assert {"in memory", "checkpoint", "files", "penstock, 105 %", "penstock, 20 %"} <= set(methods)
    assert all(method["same_bits"] for method in methods.values())
    assert {len(method["samples_s"]) for method in methods.values()} == {7}
    reports = {name: method["report"] for name, method in methods.items() if method["report"]}
    assert len(reports) == 5  # with host memory, too
    assert all(report["peak_bytes"] <= report["device_budget_bytes"] for report in reports.values())
    assert reports["penstock, 105 %"]["evicted_bytes"] == 0 < reports["penstock, 20 %"]["evicted_bytes"]
    assert document["commit"] and document["config"]["seed"] == 0


@pytest.mark.benchmark
@pytest.mark.slow
def test_tiny_kernels_stay_inside_half_of_their_memory(tmp_path: Path) -> None:
    output = tmp_path / "changing_shapes.json"
    script = ROOT / "benchmarks" / "changing_shapes.py"
    run(script, "--quick", "--model", "tiny kernels", "--spill-dir", tmp_path, "-o", output)
    methods = json.loads(output.read_text())["models"]["tiny kernels"]["methods"]
    assert all(method["same_bits"] for method in methods.values())
    assert methods["penstock, everything fits"]["report"]["evicted_bytes"] == 0
    half = methods["penstock, 50 %"]["report"]
    assert half["evicted_bytes"] > 0
    assert half["peak_bytes"] <= half["device_budget_bytes"]


@pytest.mark.benchmark
@pytest.mark.slow
def test_increments_are_smaller_than_whole_files(tmp_path: Path) -> None:
    output = tmp_path / "increments.json"
    script = ROOT / "benchmarks" / "increments.py"
    run(script, "--million", "17", "--rounds", "1", "--directory", tmp_path, "-o", output)
    found = json.loads(output.read_text())
    written = {name: rows[0]["written_bytes"] for name, rows in found["methods"].items()}
    assert written["penstock Manager"] < found["adapter_bytes"] * 1.1 + 8192
    assert all(each >= found["state_bytes"] for name, each in written.items() if name != "penstock Manager")


@pytest.mark.benchmark
@pytest.mark.slow
def test_large_models_are_tried_at_a_small_scale(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    output = tmp_path / "large_models.json"
    script = ROOT / "benchmarks" / "large_models.py"
    options = ("--cases", "lora,full", "--scale", "0.001", "--steps", "6", "--reference")
    run(script, *options, "--spill-dir", tmp_path, "-o", output)
    cases = json.loads(output.read_text())["cases"]
    assert list(cases) == ["lora", "full"]
    for case in cases.values():
        row = case["rows"]["penstock"]
        assert row["same_bits"] and len(row["samples_s"]) == 6
        assert row["report"]["peak_bytes"] <= row["report"]["device_budget_bytes"]
        assert row["report"]["loaded_bytes"] > 0


def test_large_models_say_what_they_lack(tmp_path: Path) -> None:
    script = ROOT / "benchmarks" / "large_models.py"
    (done,) = ended(Program(script, ("--cases", "larger")))
    assert done.returncode == 2 and "there is no 'larger': choose of lora, full, 4-bit" in done.stderr


@pytest.mark.slow
def test_a_model_larger_than_its_budget_is_trained_saved_and_loaded(tmp_path: Path) -> None:
    script, checkpoint = ROOT / "examples" / "larger_than_memory.py", tmp_path / "gpt.safetensors"
    said = run(script, "--steps", "3", "--spill-dir", tmp_path, "-o", checkpoint)
    assert "3.1 times the budget of 24.00 MiB" in said
    assert checkpoint.stat().st_size > 3 * (24 << 20)


@pytest.mark.benchmark
@pytest.mark.slow
def test_claims_of_papers_are_measured_and_simulated_apart(tmp_path: Path) -> None:
    output = tmp_path / "papers.json"
    script = ROOT / "benchmarks" / "papers.py"
    parts = "depth,addresses,transfers,g10"
    said = run(script, "--quick", "--parts", parts, "--spill-dir", tmp_path, "-o", output)
    rows = {name: part["rows"] for name, part in json.loads(output.read_text())["parts"].items()}
    assert list(rows) == parts.split(",")
    assert all(row["ours"] != "failed" for part in rows.values() for row in part)
    measured, simulated = said.split("## Simulated")
    assert "figure 11: speed" in simulated and "figure 11: speed" not in measured
    assert "layers of a ViT-H" in measured and "THEY MEAN NOTHING" in said


@pytest.mark.benchmark
@pytest.mark.slow
def test_policies_of_papers_are_carried_out_in_virtual_time(tmp_path: Path) -> None:
    output = tmp_path / "papers_virtual.json"
    script = ROOT / "benchmarks" / "papers_virtual.py"
    cells = {"vgg-16-parts": "modnn", "bert-256": "g10", "bert-2048": "evict_all"}
    said = run(script, "--quick", "--steps", "2", "--cells", *cells, "--spill-dir", tmp_path, "-o", output)
    rows = {row["cell"]: row for row in json.loads(output.read_text())["rows"]}
    assert list(rows) == list(cells) and "no GPU was used" in said
    for row in rows.values():
        assert row["budget_bytes"] < row["peak_bytes"]
        for policy in (cells[row["cell"]], "optimal"):
            found = row["policies"][policy]
            assert found["carried_s"] > 0 and found["moved_bytes"]["to_host"] > 0
