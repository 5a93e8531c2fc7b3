"""Kernels run again with the float32 precisions of their first run, whichever API of torch set them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.runtime import recipes
from tests.support.families import FAMILIES
from tests.support.forced import recompute_everything
from tests.support.runs import HARDWARE, PAGED, Program, differences, offloaded, run_in_memory, training

BUDGET = 1 << 30
OPERATIONS = list(itertools.product(("cuda", "mkldnn"), ("matmul", "conv", "rnn", "all")))
backends = torch.backends
SETTINGS: dict[str, Callable[[], None]] = {
    "defaults": lambda: None,
    "all, new": lambda: setattr(backends, "fp32_precision", "tf32"),
    "all exact, new": lambda: setattr(backends, "fp32_precision", "ieee"),
    "products, new": lambda: setattr(backends.cuda.matmul, "fp32_precision", "tf32"),
    "products of oneDNN, new": lambda: setattr(backends.mkldnn.matmul, "fp32_precision", "bf16"),
    "convolutions, new": lambda: setattr(backends.cudnn.conv, "fp32_precision", "ieee"),
    "cuDNN, old": lambda: setattr(backends.cudnn, "allow_tf32", False),
    "products, old": lambda: setattr(backends.cuda.matmul, "allow_tf32", True),
    "high, old": lambda: torch.set_float32_matmul_precision("high"),
    "medium, old": lambda: torch.set_float32_matmul_precision("medium"),
}


def defaults() -> None:
    torch.set_float32_matmul_precision("highest")
    backends.cudnn.allow_tf32 = True
    for backend, operation in (*OPERATIONS, ("generic", "all")):
        if backend == "mkldnn" or operation in ("matmul", "all"):
            torch._C._set_fp32_precision_setter(backend, operation, "none")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    defaults()
    yield
    defaults()


def said(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except RuntimeError:
        return "refused"


def by_old_api() -> list[Any]:
    asked = (
        torch.get_float32_matmul_precision,
        torch._C._get_cublas_allow_tf32,
        torch._C._get_cudnn_allow_tf32,
    )
    return [said(ask) for ask in asked]


def precisions() -> dict[tuple[str, str], str]:
    return {of: torch._C._get_fp32_precision_getter(*of) for of in OPERATIONS}


@pytest.mark.parametrize("name", SETTINGS)
def test_plans_are_carried_out(name: str, tmp_path: Path) -> None:
    program = training(FAMILIES["gpt"], 3)
    SETTINGS[name]()
    before = precisions(), by_old_api()
    expected = run_in_memory(program)
    assert differences(expected, forced(program, tmp_path)) == []
    assert (precisions(), by_old_api()) == before


def forced(program: Program, spill_dir: Path) -> list[bytes]:
    with penstock.offload(
        device_budget=BUDGET, spill_dir=spill_dir, hardware=HARDWARE, planning=PAGED
    ) as run:
        program(run.step)
        assert run.trace is not None
        plan = recompute_everything(run.trace, BUDGET)
    found, report = offloaded(program, BUDGET, spill_dir, plan=plan)
    assert report.recomputed_bytes > 0
    return found


@pytest.mark.parametrize(("first", "then"), list(itertools.permutations(SETTINGS, 2)))
def test_a_kernel_runs_with_those_of_its_first_run(first: str, then: str) -> None:
    seen: list[tuple[Any, Any]] = []

    def kernel() -> None:
        seen.append((precisions(), by_old_api()))

    SETTINGS[first]()
    kernel()
    recipe = recipes.Recipe(kernel, (), {}, None, recipes.switches(), [], {}, None, None, 0)
    SETTINGS[then]()
    now = precisions(), by_old_api()
    recipes.run(recipe)
    assert seen[1][0] == seen[0][0]
    assert (precisions(), by_old_api()) == now


@pytest.mark.parametrize("first", ["defaults", "all, new"])
def test_what_follows_another_precision_does_so_afterwards(first: str) -> None:
    SETTINGS[first]()
    expected = [follow(precision) for precision in ("tf32", "bf16", "none")]
    SETTINGS[first]()
    recipe = recipes.Recipe(lambda: None, (), {}, None, recipes.switches(), [], {}, None, None, 0)
    SETTINGS["all exact, new"]()
    recipes.run(recipe)
    assert [follow(precision) for precision in ("tf32", "bf16", "none")] == expected


def follow(precision: str) -> dict[tuple[str, str], str]:
    backends.fp32_precision = precision
    return precisions()


def test_warnings_about_deterministic_algorithms_stay_warnings() -> None:
    recipe = recipes.Recipe(lambda: None, (), {}, None, recipes.switches(), [], {}, None, None, 0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        recipes.run(recipe)
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
