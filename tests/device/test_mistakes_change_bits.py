"""What keeps copies and kernels apart, taken out one at a time: see mutants.py."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.device import probes
from tests.device.mutants import MUTANTS, Mutant
from tests.support.accelerator import orders, wanted

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_takes_out_what_is_there(mutant: Mutant) -> None:
    compile(mutant.source(), mutant.file, "exec")


@pytest.mark.parametrize("order", orders(wanted("emu"), "lazy", "stepped", "newest", "random"))
def test_without_one_all_is_right(configure: Callable[..., None], order: str, tmp_path: Path) -> None:
    for probe in probes.PROBES:
        configure(order=order, seed=5, host_delay_us=50)
        assert probe(tmp_path), probe
    assert any(probes.moves)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_changes_numbers(emu: Any, mutant: Mutant) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.device.mutants", mutant.name],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 1 and "other numbers" in done.stdout, done.stdout + done.stderr
