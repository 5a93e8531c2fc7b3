"""Each mistake is one line on standard error, without a traceback, and has its exit code."""

from __future__ import annotations

import builtins
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import cli
from penstock.core.plan import Evict

SCRIPT = """
import torch

def build():
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    batches = [torch.randn(512, 64)]
    return model, torch.optim.AdamW(model.parameters()), batches, lambda model, batch: model(batch).mean()

def pair():
    return build()[:2]

def swapped():
    model, optimizer, batches, loss = build()
    return optimizer, model, batches, loss

def no_scalar():
    model, optimizer, batches, _ = build()
    return model, optimizer, batches, lambda model, batch: model(batch)

def nothing_to_do():
    model, optimizer, _, loss = build()
    return model, optimizer, [], loss

def no_gradient():
    model, optimizer, batches, loss = build()
    return model, optimizer, batches, lambda model, batch: loss(model, batch).detach()

def sized(width):
    return build()

number = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hardware: penstock.Hardware) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(SCRIPT)
    (tmp_path / "notes.txt").write_text("not a value")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one").write_text("a sample")
    (tmp_path / "empty").mkdir()
    hardware.save(tmp_path / "given.json")
    return tmp_path


@pytest.fixture
def traced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trace", "model.py:build"]) == 0
    capsys.readouterr()


PLAN = ("--hardware", "given.json", "--device-budget", "1GiB")
RUN = ("run", "model.py:build", "--hardware", "given.json", "--device-budget")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("trace", "model.py"), "write SCRIPT.py:build"),
        (("trace", "missing.py:build"), "there is no script missing.py"),
        (("trace", "notes.txt:build"), "its name has to end in .py"),
        (("trace", "model.py:missing"), "define missing() that returns (model, optimizer, batches, loss)"),
        (("trace", "model.py:number"), "define number() that returns (model, optimizer, batches, loss)"),
        (("trace", "model.py:pair"), "returned a tuple of 2: return (model, optimizer, batches, loss)"),
        (("trace", "model.py:swapped"), "model is a AdamW, not a torch.nn.Module"),
        (("trace", "model.py:no_scalar"), "let it return a scalar tensor"),
        (("trace", "model.py:no_gradient"), "returned a tensor without a gradient"),
        (("trace", "model.py:sized"), "sized() in model.py is called without arguments: missing"),
        (("trace", "model.py:nothing_to_do"), "batches is empty"),
        (("plan", "model.py:build", *PLAN, "--micro-batch", "513"), "larger than the batch, which has 512"),
        (("plan", "trace.json.gz", *PLAN, "--micro-batch", "8"), "write SCRIPT.py:build"),
        (("trace", "model.py:build", "--real", "--device", "a100"), "leave it out with --real"),
        (("plan", "none.json", "--hardware", "given.json", "--device-budget", "1MiB"), "none.json: No such"),
        (("plan", "given.json", "--hardware", "given.json", "--device-budget", "1MiB"), "file of a Trace"),
        (
            ("plan", "notes.txt", "--hardware", "given.json", "--device-budget", "1MiB"),
            "is not a whole JSON file",
        ),
        (("probe", "--spill-dir", "nowhere", "--time-limit", "0.2"), "nowhere"),
        (("probe", "--device", "abacus"), "abacus"),
        (
            ("samples", "pack", "photos", "photos", "store"),
            "format 'folder' takes one path, not 2",
        ),
        (("samples", "pack", "empty", "store"), "empty has no files: nothing to pack"),
        (("report", "nowhere"), "nowhere is not a folder"),
        (("report", "."), "has no trace.json.gz"),
        (("report", "given.json"), "given.json alone is not a report: give FOLDER, or TRACE PLAN"),
        (("report", "given.json", "given.json"), "need --hardware FILE"),
        (("report", "a", "b", "c"), "give one FOLDER, or two files"),
        (("report", ".", "--hardware", "given.json"), "a FOLDER has its own"),
        (("whatif", "none.json", "--hardware", "given.json"), "none.json: No such"),
        (("whatif", "notes.txt", "--hardware", "given.json"), "notes.txt"),
        ((*RUN, "1GiB", "-o", "notes.txt"), "notes.txt: "),
        ((*RUN, "1GiB", "--spill-dir", "nowhere"), "nowhere"),
    ],
)
def test_error(arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("penstock: error: ") and said in shown.err
    assert shown.err.count("\n") == 1


def test_a_file_that_cannot_be_written_is_named_as_it_was_given(
    traced: None, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "plan.json").mkdir()
    assert cli.main(["plan", "trace.json.gz", *PLAN]) == 1
    assert capsys.readouterr().err == "penstock: error: plan.json: Is a directory\n"


WITHOUT_RIGHTS = """
import os, sys
from penstock import cli
if os.getuid() == 0:
    os.setresuid(65534, 0, 0)  # root may write everywhere; imports go on as root
arguments = "plan none.json --hardware none.json --device-budget 1GiB -o p/plan.json"
sys.exit(cli.main(arguments.split()))
"""


def test_a_folder_that_cannot_be_written_to_is_named_before_the_work() -> None:
    with tempfile.TemporaryDirectory() as folder:  # others may look into it, but not into pytest's
        os.chmod(folder, 0o555)
        ended = subprocess.run(
            [sys.executable, "-c", WITHOUT_RIGHTS], cwd=folder, capture_output=True, text=True, check=False
        )
    assert ended.returncode == 1
    assert ended.stderr == (
        f"penstock: error: p/plan.json cannot be written: {folder} is read-only for you. Give another path "
        "by -o\n"
    )


def test_names_are_shown_in_a_locale_without_their_letters(folder: Path) -> None:
    """Neither a traceback nor halves of characters."""
    (folder / "photos" / "naïve.png").write_bytes(b"a sample")
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

    def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "penstock", "samples", *arguments]
        return subprocess.run(command, env=ascii_only, capture_output=True, encoding="ascii", check=False)

    assert ask("pack", "photos", "né").stdout.endswith("wrote n\\xe9\n")
    assert ask("ls", "né").stdout == "na\\xefve.png\none\n"
    assert ask("ls", "ö").stderr.startswith("penstock: error: \\xf6 ")


@pytest.mark.parametrize("endurance", ["much", "0TBW"])
def test_an_endurance_is_one_of_a_data_sheet(endurance: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        cli.main(["plan", "trace.json.gz", *PLAN, "--endurance", endurance])
    assert refusal.value.code == 2
    assert "600" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["0", "-1", "all"])
def test_a_micro_batch_is_a_number_of_samples(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        cli.main([*RUN, "1GiB", f"--micro-batch={size}"])
    assert refusal.value.code == 2
    assert f"'{size}' is not a number of samples: give 1 or more, or \"auto\"" in capsys.readouterr().err


def test_an_order_of_micro_batches_needs_their_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "trace.json.gz", *PLAN, "--micro-batch-order", "layer"]) == 1
    assert "give --micro-batch, too" in capsys.readouterr().err


@pytest.mark.parametrize("budget", ["lots", "8 gigs", "-1"])
def test_a_budget_that_is_no_size(budget: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        cli.main([*RUN[:-1], f"--device-budget={budget}"])
    assert refusal.value.code == 2
    assert "is not a size" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--disks", "0"), "'0' is not a number of disks: give 1 or more"),
        (("--disks", "1,few"), "'few' is not a number of disks"),
        (("--disk-rate", "0GB/s"), "give one above zero"),
        (("--disk-rate", "fast"), "is not a size"),
        (("--device-budget", "8GiB,"), "is not a size"),
        (("--host-budget=-1GiB",), "is not a size"),
        (("--time-limit", "soon"), "is not a number of seconds"),
        (("--time-limit", "nan"), "'nan' is not a number of seconds: give a finite one, 0 or more"),
        (("--time-limit=-1",), "'-1' is not a number of seconds: give a finite one, 0 or more"),
        (("--policy", "best"), "invalid choice: 'best'"),
    ],
)
def test_what_a_sweep_cannot_read(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refusal:
        cli.main(["whatif", "trace.json.gz", "--hardware", "given.json", *arguments])
    assert refusal.value.code == 2
    assert said in capsys.readouterr().err


def test_a_sweep_that_fits_nowhere_is_infeasible(traced: None, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["whatif", "trace.json.gz", "--hardware", "given.json", "--device-budget", "1KiB,2KiB"]
    assert cli.main(arguments) == 3
    shown = capsys.readouterr().out
    assert "cannot" in shown and "raise the budget to" in shown and "No plan fits" in shown
    assert cli.main(["whatif", "trace.json.gz", "trace.json.gz", "--hardware", "given.json"]) == 1
    assert "two traces are called trace" in capsys.readouterr().err


def test_a_plan_below_the_minimum_is_infeasible(traced: None, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "trace.json.gz", "--hardware", "given.json", "--device-budget", "1KiB", "--json"]
    assert cli.main(arguments) == 3
    shown = capsys.readouterr()
    answer = json.loads(shown.out)
    assert answer["minimum_bytes"] > 1024
    assert "raise the budget to" in answer["error"] and answer["error"] in shown.err
    assert not Path("plan.json").exists()


@pytest.mark.parametrize("budget", ["1KiB", "200KiB"])
def test_a_run_below_the_minimum_is_infeasible(
    budget: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*RUN, budget, "--spill-dir", ".", "-o", "new/run"]) == 3
    assert "raise device_budget to" in capsys.readouterr().err.lower()
    assert not (folder / "new").exists()


def test_a_disk_too_small_is_infeasible(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*RUN, "600KiB", "--spill-dir", ".", "--disk-budget", "8KiB"]) == 3
    assert "penstock: error: " in capsys.readouterr().err


def test_an_illegal_plan_is_not_simulated(traced: None, capsys: pytest.CaptureFixture[str]) -> None:
    stage = ["--hardware", "given.json"]
    assert cli.main(["plan", "trace.json.gz", *stage, "--device-budget", "1GiB"]) == 0
    plan = penstock.Plan.load("plan.json")
    evict = Evict(tensor=0, after=0, begin=1, end=2, prefetch_at=1)
    replace(plan, evictions=(evict,), device_budget_bytes=1).save("plan.json")
    capsys.readouterr()
    assert cli.main(["simulate", "trace.json.gz", "plan.json", *stage]) == 1
    assert "outside the tensor's inactive periods" in capsys.readouterr().out
    assert cli.main(["simulate", "trace.json.gz", "plan.json", *stage, "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["violations"]) >= 2
    assert not Path("timeline.json.gz").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def build():\n    raise FileNotFoundError(2, 'gone', 'data.bin')\n", "[Errno 2] gone: 'data.bin'"),
        ("def build(: pass\n", "SyntaxError: invalid syntax"),
    ],
)
def test_the_scripts_own_errors_keep_its_part_of_their_traceback(
    text: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "broken.py").write_text(text)
    assert cli.main(["trace", "broken.py:build"]) == 1
    shown = capsys.readouterr().err
    assert said in shown and shown.count('File "') == 1 and "broken.py" in shown
    assert cli.main(["trace", "broken.py:build", "--json"]) == 1
    answer = capsys.readouterr()
    assert said in json.loads(answer.out)["error"] and answer.err == shown


@pytest.mark.parametrize("package", ["matplotlib", "plotly"])
def test_a_missing_extra_is_named(
    package: str, traced: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*RUN, "1GiB", "--spill-dir", ".", "--steps", "1"]) == 0
    capsys.readouterr()
    importing = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name.partition(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return importing(name, *rest, **named)

    for module in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(builtins, "__import__", without)
    output = "page.html" if package == "plotly" else "picture.png"
    assert cli.main(["report", "penstock-run", "--no-policies", "-o", output]) == 1
    assert "pip install '.[report]'" in capsys.readouterr().err
