"""torch takes seconds to import: planning and looking at files do without it, help also without numpy."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import penstock
from penstock import samples
from penstock.cli import main
from tests.support.runs import HARDWARE

WITHOUT_TORCH = """
import sys
import penstock
{}
assert "torch" not in sys.modules
"""


def alone(program: str) -> None:
    """Run a program in a process of its own."""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    "program",
    [
        "penstock.Plan, penstock.plan, penstock.simulate, penstock.check, penstock.Report",
        "penstock.samples.pack, penstock.samples.mount, penstock.checkpoint.info",
        "import penstock.report.html, penstock.report.sweep",
    ],
)
def test_names(program: str) -> None:
    alone(WITHOUT_TORCH.format(program))


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "trace.json.gz", "--hardware", "given.json", "--device-budget", "1GiB"),
        ("simulate", "trace.json.gz", "plan.json", "--hardware", "given.json"),
        ("report", "trace.json.gz", "plan.json", "--hardware", "given.json", "--no-policies"),
        ("whatif", "trace.json.gz", "--hardware", "given.json", "--time-limit", "1"),
        ("checkpoint", "info", "state.safetensors"),
        ("samples", "ls", "store"),
        ("samples", "info", "store"),
    ],
    ids=" ".join,
)
def test_commands(arguments: tuple[str, ...], folder: Path) -> None:
    program = f"""
import os
os.chdir({str(folder)!r})
from penstock.cli import main
try:
    assert main({list(arguments)!r}) == 0
except SystemExit as done:
    assert not done.code
"""
    alone(WITHOUT_TORCH.format(program))


# In one process: every command's help, and the version.
HELP = """
import argparse, sys
from penstock.cli import main
from penstock.cli.arguments import parser

def commands(parser, typed=()):
    yield typed
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from commands(below, (*typed, name))

asked = [*(["--help"] if not typed else [*typed, "--help"] for typed in commands(parser())), ["--version"]]
assert len(asked) > 15, asked
for arguments in asked:
    try:
        main(arguments)
    except SystemExit as done:
        assert not done.code
heavy = {"torch", "numpy", "msgspec", "rich", "penstock._native", "penstock.planners", "penstock.samples"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""


def test_asking_for_help_imports_nothing_heavy() -> None:
    alone(HELP)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file of each kind."""
    folder = tmp_path_factory.mktemp("files")
    model = torch.nn.Linear(64, 64)
    trace = penstock.trace(lambda: model(torch.ones(8, 64)).sum().backward())
    trace.save(folder / "trace.json.gz")
    HARDWARE.save(folder / "given.json")
    penstock.plan(trace, HARDWARE, device_budget="1GiB").save(folder / "plan.json")
    penstock.save(model.state_dict(), folder / "state.safetensors")
    samples.pack([("one", b"a sample")], folder / "store")
    return folder


def test_every_public_name_is_found_and_listed() -> None:
    program = """
import penstock, sys
assert "numpy" not in sys.modules
for name in penstock.__all__: assert name in dir(penstock), name
assert penstock.planners.POLICIES and penstock.units.parse_bytes("1KiB") == 1024
"""
    alone(f"{program}\nfor name in penstock.__all__: getattr(penstock, name)")
    with pytest.raises(AttributeError, match="has no attribute 'ofload'"):
        _ = penstock.ofload  # type: ignore[attr-defined]


def test_a_python_without_the_gil_is_refused() -> None:
    program = "import sys; sys._is_gil_enabled = lambda: False; import penstock"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == (
        "ImportError: penstock has not been tried without the GIL: take a Python that has it, such as "
        "python3.14 in place of python3.14t"
    )


def test_the_package_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "penstock", "--version"], capture_output=True, text=True, check=True
    ).stdout
    with pytest.raises(SystemExit):
        main(["--version"])
    assert shown == capsys.readouterr().out == f"penstock {penstock.__version__}\n"


def test_the_command_line_needs_no_extra() -> None:
    needed = [line for line in importlib.metadata.requires("penstock") or [] if "extra ==" not in line]
    assert any(line.startswith("rich") for line in needed)
