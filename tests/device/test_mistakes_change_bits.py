"""What keeps copies and kernels apart, taken out one at a time: see mutants.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.device import probes
from tests.device.mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_takes_out_what_is_there(mutant: Mutant) -> None:
    compile(mutant.source(), mutant.file, "exec")


@pytest.mark.parametrize("order", ["lazy", "stepped", "newest", "random"])
def test_without_one_all_is_right(emu: Any, order: str, tmp_path: Path) -> None:
    for probe in probes.PROBES:
        emu.configure(order=order, seed=5, host_delay_us=50)
        assert probe(tmp_path), probe


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_changes_numbers(compiled: Any, mutant: Mutant) -> None:
    path = os.pathsep.join([str(ROOT / "tests" / "device"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "tests.device.mutants", mutant.name],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 1 and "other numbers" in done.stdout, done.stdout + done.stderr
