"""What keeps copies and kernels apart, taken out one at a time: see mutants.py."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.device import probes
from tests.device.mutants import MUTANTS, Mutant, cmake
from tests.support.accelerator import orders, wanted

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_takes_out_what_is_there(mutant: Mutant) -> None:
    source = mutant.source()
    if not mutant.is_native:
        compile(source, mutant.file, "exec")


@pytest.mark.parametrize("order", orders(wanted("emu"), "lazy", "stepped", "newest", "random"))
def test_without_one_all_is_right(configure: Callable[..., None], order: str, tmp_path: Path) -> None:
    for probe in probes.PROBES:
        configure(order=order, seed=5, host_delay_us=50)
        assert probe(tmp_path), probe
    assert any(probes.moves)


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(mutant, marks=() if mutant.fast else pytest.mark.slow) for mutant in MUTANTS],
    ids=[mutant.name for mutant in MUTANTS],
)
def test_each_changes_numbers(emu: Any, mutant: Mutant) -> None:
    if mutant.is_native and (cmake() is None or importlib.util.find_spec("nanobind") is None):
        pytest.skip("needs what builds the native module: make setup")
    done = subprocess.run(
        [sys.executable, "-m", "tests.device.mutants", mutant.name],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=3600 if mutant.is_native else 600,
    )
    shows = ["1 failed"] if "::" in mutant.shown else ["other numbers", *filter(None, [mutant.error])]
    assert done.returncode == 1 and any(each in done.stdout for each in shows), done.stdout + done.stderr
