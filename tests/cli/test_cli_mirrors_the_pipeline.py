"""Every command reads what the one before wrote, names what it writes, and answers in JSON too."""

from __future__ import annotations

import json
import os
import signal
from importlib import import_module
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest

import penstock
from penstock import cli
from penstock.report import Record
from tests.support.apart import Program, Running

SCRIPT = """
import torch

def build():
    torch.manual_seed(0)
    layers = [part for _ in range(6) for part in (torch.nn.Linear(64, 64), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers)
    batches = [torch.randn(512, 64) for _ in range(7)]
    return model, torch.optim.AdamW(model.parameters()), batches, loss

def loss(model, batch):
    return (model(batch) - batch).square().mean()

def in_blocks():
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(6)]
    model = torch.nn.Sequential(*blocks)
    return model, torch.optim.AdamW(model.parameters()), [torch.randn(512, 64) for _ in range(3)], loss

def once():
    model, optimizer, batches, loss = build()
    return model, optimizer, iter(batches), loss

def endless():
    model, optimizer, batches, loss = build()
    return model, optimizer, iter(lambda: batches[0], None), told_loss

def told_loss(model, batch):
    print("step", flush=True)
    return loss(model, batch)
"""

# Between the minimum and the peak of the script's step.
BUDGET = "1400KiB"


@pytest.fixture(autouse=True)
def few_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """How good plans are is no matter here."""
    monkeypatch.setattr(import_module("penstock.planners.optimal"), "MOST_CHANGES", 1000)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hardware: penstock.Hardware) -> Path:
    """The working directory: a script, and the machine in a file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(SCRIPT)
    hardware.save(tmp_path / "given.json")
    return tmp_path


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The JSON object that a command prints, and nothing else."""
    capsys.readouterr()
    assert cli.main([*arguments, "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert all(Path(path).is_file() for path in answer["written"])
    return answer


def test_each_stage_reads_what_the_last_one_wrote(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traced = ask(capsys, "trace", "model.py:build")
    assert traced["minimum_bytes"] < traced["peak_bytes"]
    assert penstock.Trace.load("trace.json.gz").kernels == traced["kernels"]

    stage = ("--hardware", "given.json")
    planned = ask(capsys, "plan", "trace.json.gz", *stage, "--device-budget", BUDGET)
    assert planned["minimum_bytes"] <= 1400 * 1024 < planned["in_memory_bytes"]
    assert planned["evictions"] == len(penstock.Plan.load("plan.json").evictions) > 0
    assert planned["lower_bound_s"] <= planned["predicted_step_s"]
    assert planned["gap"] == pytest.approx(planned["predicted_step_s"] / planned["lower_bound_s"] - 1)
    assert planned["summary"]["budget_bytes"] == 1400 * 1024

    simulated = ask(capsys, "simulate", "trace.json.gz", "plan.json", *stage)
    assert simulated["step_s"] == pytest.approx(planned["predicted_step_s"])
    assert penstock.Timeline.load("timeline.json.gz").peak_bytes == simulated["peak_bytes"]


def test_policies_and_budgets_are_shown_on_request(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask(capsys, "trace", "model.py:build")
    arguments = ("plan", "trace.json.gz", "--hardware", "given.json", "--device-budget", BUDGET)
    asked = ("--policy", "g10", "--compare-policies", "--compare-budgets", "--time-limit", "1")
    planned = ask(capsys, *arguments, *asked)
    assert {row["policy"] for row in planned["policies"]} == set(penstock.planners.POLICIES)
    times = [row["summary"]["predicted_step_s"] for row in planned["policies"] if row["summary"]]
    assert times == sorted(times)
    assert all(row["reason"] for row in planned["policies"] if not row["summary"])
    budgets = [row["device_budget_bytes"] for row in planned["budgets"]]
    assert budgets == sorted(budgets) and 1400 * 1024 in budgets

    assert cli.main([*arguments, *asked]) == 0
    shown = capsys.readouterr().out
    assert "keep: the policy 'keep' needs" in shown and "limited by" in shown


def test_recomputation_and_compression_are_used_unless_they_are_forbidden(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk of 1 MB/s: whatever else can make room is faster."""
    slow = penstock.Hardware(
        device_bytes=1 << 40,
        disk_bytes=8 << 30,
        disk_read_bytes_per_s=1e6,
        disk_write_bytes_per_s=1e6,
        disk_shares_bus=False,
    )
    slow.save("slow.json")
    arguments = ("plan", "trace.json.gz", "--hardware", "slow.json", "--device-budget", BUDGET)
    ask(capsys, "trace", "model.py:build")
    assert ask(capsys, *arguments, "--no-recompute", "--time-limit", "2")["recomputations"] == 0
    assert not penstock.Plan.load("plan.json").recomputations
    assert ask(capsys, *arguments, "--time-limit", "2")["recomputations"] > 0
    assert penstock.Plan.load("plan.json").recomputations

    (folder / "relu.py").write_text(SCRIPT.replace("GELU", "ReLU"))
    ask(capsys, "trace", "relu.py:build", "--real")
    arguments = (*arguments, "--no-recompute")
    plain = ask(capsys, *arguments, "--no-compress", "--time-limit", "2")
    assert {evict.codec for evict in penstock.Plan.load("plan.json").evictions} == {"raw"}
    packed = ask(capsys, *arguments, "--time-limit", "2")
    assert "csr" in {evict.codec for evict in penstock.Plan.load("plan.json").evictions}
    assert packed["predicted_step_s"] < plain["predicted_step_s"]


def test_a_plan_is_reported_without_a_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask(capsys, "trace", "model.py:build")
    stage = ("--hardware", "given.json")
    ask(capsys, "plan", "trace.json.gz", *stage, "--device-budget", BUDGET)
    ask(capsys, "simulate", "trace.json.gz", "plan.json", *stage)
    files = ("report", "trace.json.gz", "plan.json", *stage)
    assert ask(capsys, *files, "--no-policies")["written"] == ["report.html"]
    assert "<h2>Policies</h2>" not in Path("report.html").read_text()
    measured = ("--measured", "timeline.json.gz", "--time-limit", "1", "-o", "both.html")
    reported = ask(capsys, *files, *measured)
    assert {row["policy"] for row in reported["policies"]} == set(penstock.planners.POLICIES)
    page = Path("both.html").read_text()
    assert "<h2>Policies</h2>" in page and "<h2>Predicted against measured</h2>" in page


def test_other_machines_are_asked_about(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask(capsys, "trace", "model.py:build")
    sweep = (
        "--device-budget",
        "1400KiB,1600KiB",
        "--disks",
        "1,4",
        "--disk-rate",
        "50MB/s",
        "--time-limit",
        "4",
    )
    arguments = ("whatif", "trace.json.gz", "--hardware", "given.json", *sweep)
    answer = ask(capsys, *arguments, "-o", "sweep.json")
    assert json.loads(Path("sweep.json").read_text())["cells"] == answer["cells"]
    cells = answer["cells"]
    assert [(cell["device_budget_bytes"], cell["disks"]) for cell in cells] == [
        (budget * 1024, disks) for budget in (1400, 1600) for disks in (1, 4)
    ]
    assert all(cell["predicted_step_s"] >= cell["lower_bound_s"] for cell in cells)
    assert cells[1]["disk_write_bytes_per_s"] == 2e8
    assert cells[1]["predicted_step_s"] <= cells[0]["predicted_step_s"]
    assert cli.main([*arguments]) == 0
    shown = capsys.readouterr().out
    assert "limited by" in shown and "the disk is" in shown


def names_in(folder: Path) -> set[str]:
    """But for Python's own."""
    return {path.name for path in folder.iterdir()} - {"__pycache__"}


def test_a_run_leaves_a_folder_that_can_be_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--device-budget", BUDGET, "--spill-dir", ".", "--hardware", "given.json")
    run = ask(capsys, "run", "model.py:build", *options, "-o", "kept/run")
    assert len(run["losses"]) == run["report"]["steps"] == 7
    assert run["report"]["evicted_bytes"] > 0
    names = {path.name for path in (folder / "kept" / "run").iterdir()}
    assert names == {"trace.json.gz", "hardware.json", "plan.json", "report.json", "timeline.json.gz"}
    assert names_in(folder) == {"model.py", "given.json", "kept"}

    reported = ask(capsys, "report", "kept/run", "-o", "picture.png")
    assert reported["report"] == run["report"]
    assert matplotlib.image.imread(folder / "picture.png").shape == (1000, 1600, 4)
    assert ask(capsys, "report", "kept/run", "--no-policies")["written"] == ["kept/run/report.html"]
    assert "<h2>Predicted against measured</h2>" in (folder / "kept" / "run" / "report.html").read_text()


def test_a_run_goes_through_its_batches_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--device-budget", BUDGET, "--spill-dir", ".", "--hardware", "given.json", "--steps", "9")
    run = ask(capsys, "run", "model.py:build", *options)
    assert len(run["losses"]) == run["report"]["steps"] == 9
    assert cli.main(["run", "model.py:once", *options]) == 0
    assert "only 7 of 9 steps: batches is an iterator, and it ended" in capsys.readouterr().out


@pytest.mark.slow
def test_a_batch_is_divided_where_that_is_asked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planning = ("plan", "model.py:build", "--hardware", "given.json", "--time-limit", "1")
    plan = ask(capsys, *planning, "--device-budget", "700KiB", "--micro-batch", "auto")
    assert 1 <= plan["micro_batch"] < 512 and plan["predicted_peak_bytes"] <= 700 << 10
    assert cli.main([*planning, "--device-budget", "700KiB", "--micro-batch", "auto"]) == 0
    assert "moDNN's equation 8 alone would choose" in capsys.readouterr().out

    options = ("--hardware", "given.json", "--device-budget", BUDGET)
    ask(capsys, *planning, "--device-budget", BUDGET, "--micro-batch", "96")
    running = ("run", "model.py:build", *options, "--spill-dir", ".")
    planned = ask(capsys, *running, "--plan", "plan.json")
    assert (planned["report"]["micro_batch"], planned["report"]["micro_batches"]) == (96, 6)
    assert planned["report"]["trace_mismatches"] <= 1
    given = ask(capsys, *running, "--micro-batch", "96")
    chosen = ask(capsys, *running, "--micro-batch", "auto")
    assert 1 <= chosen["report"]["micro_batch"] <= 512
    whole = ask(capsys, *running)
    assert given["losses"] == planned["losses"] == pytest.approx(whole["losses"])
    assert chosen["losses"] == pytest.approx(whole["losses"])


@pytest.mark.slow
def test_parts_pass_layer_by_layer_where_that_is_asked_for(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--hardware", "given.json", "--device-budget", "4MiB")
    divided = ("model.py:in_blocks", *options, "--micro-batch", "128", "--micro-batch-order")
    assert ask(capsys, "plan", *divided, "auto", "--time-limit", "1")["micro_batch_order"] in (
        "part",
        "layer",
    )
    assert ask(capsys, "plan", *divided, "layer", "--time-limit", "1")["micro_batch_order"] == "layer"

    plain = ask(capsys, "run", *divided, "part", "--spill-dir", ".")
    layers = ask(capsys, "run", *divided, "layer", "--spill-dir", ".")
    running = ("run", "model.py:in_blocks", *options, "--spill-dir", ".", "--plan", "plan.json")
    planned = ask(capsys, *running)
    assert plain["report"]["micro_batch_order"] == "part"
    assert layers["report"]["micro_batch_order"] == planned["report"]["micro_batch_order"] == "layer"
    assert planned["report"]["trace_mismatches"] <= 1
    assert plain["losses"] == layers["losses"] == planned["losses"]
    assert cli.main([*running, "--micro-batch-order", "part"]) == 1
    assert "the plan is for a micro_batch_order of 'layer'" in capsys.readouterr().err


@pytest.mark.slow
def test_how_long_a_disk_lasts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask(capsys, "trace", "model.py:build")
    options = ("--device-budget", BUDGET, "--hardware", "given.json")
    plan = ask(capsys, "plan", "trace.json.gz", *options, "--endurance", "600TBW")
    a_day = plan["summary"]["written_bytes"]["disk"] / plan["predicted_step_s"] * 86_400
    assert plan["disk_written_bytes_per_day"] == pytest.approx(a_day) and a_day > 0
    assert plan["disk_lifetime_s"] == pytest.approx(600e12 / a_day * 86_400)
    assert ask(capsys, "plan", "trace.json.gz", *options)["disk_lifetime_s"] is None
    assert cli.main(["plan", "trace.json.gz", *options, "--endurance", "600TBW"]) == 0
    assert "written a day: an endurance of 600.00 TB lasts" in capsys.readouterr().out

    run = ask(capsys, "run", "model.py:build", *options, "--spill-dir", ".", "--endurance", "1PBW")
    assert run["report"]["endurance_bytes"] == 10**15
    assert run["report"]["disk_written_bytes"] == run["report"]["evicted_bytes"] > 0
    assert "an endurance of 1.00 PB lasts" in str(Record.load("penstock-run").report)


def test_a_short_run_has_no_measured_timeline(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--device-budget", BUDGET, "--spill-dir", ".", "--hardware", "given.json", "--steps", "1")
    run = ask(capsys, "run", "model.py:build", *options)
    assert run["report"]["steps"] == 1
    assert not Path("penstock-run/timeline.json.gz").exists()
    assert ask(capsys, "report", "penstock-run", "--no-policies")["written"] == ["penstock-run/report.html"]


def test_a_run_without_a_plan_has_a_report(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--device-budget", BUDGET, "--spill-dir", ".", "--hardware", "given.json", "--policy", "keep")
    run = ask(capsys, "run", "model.py:build", *options)
    assert run["report"]["policy"] == "least recent use"
    assert not Path("penstock-run/plan.json").exists()
    assert ask(capsys, "report", "penstock-run")["report"] == run["report"]
    Path("penstock-run/report.json").unlink()
    assert cli.main(["report", "penstock-run"]) == 1
    assert "has no report.json" in capsys.readouterr().err


def test_a_real_trace_is_measured(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(capsys, "trace", "model.py:build", "--real")["measured"]


def test_probe_measures_the_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = ask(capsys, "probe", "--spill-dir", ".", "--time-limit", "0.2", "-o", "measured.json")
    assert answer["hardware"]["disk_write_bytes_per_s"] > 0
    assert penstock.Hardware.load("measured.json").disk_read_bytes_per_s > 0


def test_people_read_tables_and_the_files_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trace", "model.py:build"]) == 0
    assert capsys.readouterr().out.endswith("wrote trace.json.gz\n")
    budget = ["--device-budget", BUDGET]
    assert cli.main(["plan", "trace.json.gz", "--hardware", "given.json", *budget]) == 0
    shown = capsys.readouterr().out
    assert "1.37 MiB budget" in shown and shown.endswith("wrote plan.json\n")
    assert "above the bound" in shown and "x the ideal" in shown and "disk" in shown
    assert cli.main(["simulate", "trace.json.gz", "plan.json", "--hardware", "given.json"]) == 0
    assert "the plan is legal" in capsys.readouterr().out


def test_an_interrupt_ends_cleanly(folder: Path) -> None:
    command = "import sys; from penstock.cli import main; sys.exit(main())"
    options = ("--device-budget", BUDGET, "--spill-dir", ".", "--hardware", "given.json")
    running = Running(Program(command, ("run", "model.py:endless", *options)))
    running.wait_for("step\n", 3)
    os.kill(running.process.pid, signal.SIGINT)
    ended = running.end(60)
    assert ended.returncode == 130, ended.stderr
    assert "Traceback" not in ended.stderr
    assert names_in(folder) == {"model.py", "given.json", "penstock-run"}
    kept = Record.load(folder / "penstock-run")
    assert kept.report.steps >= 1 and "wrote penstock-run/report.json" in ended.stdout


def test_a_prediction_of_estimated_times_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("plan", "trace.json.gz", "--hardware", "given.json", "--device-budget", "1GiB")
    for real, said in ((), True), (("--real",), False):
        ask(capsys, "trace", "model.py:build", *real)
        assert cli.main(arguments) == 0
        shown = capsys.readouterr().out
        assert ("bytes are exact, times are not" in shown) is said
        assert ("nothing is compressed" in shown) is said
