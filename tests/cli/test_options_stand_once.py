"""The command line has the options that `penstock.options` has, and errors name them."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock
from penstock import cli
from penstock.cli.arguments import parser
from penstock.options import FineTuneOptions, LoraOptions, grouped, options_of, run_options
from penstock.planners import POLICIES
from tests.support.traces import five_kernels, machine

RUN = ("run", "script.py:build", "--device-budget", "1GiB")


def _planned() -> tuple[penstock.Trace, penstock.Hardware]:
    return five_kernels(), machine()


def test_a_plan_may_do_what_a_run_does() -> None:
    given = inspect.signature(penstock.plan).parameters
    options = penstock.PlanOptions()
    assert (given["recompute"].default, given["compress"].default) == (options.recompute, options.compress)
    for command in ("plan", "whatif", "report", "run", "finetune"):
        typed = of_command(command)
        for name in ("recompute", "compress"):
            assert typed[name].default is True and f"--no-{name}" in typed[name].option_strings, command
    assert given["keep_weights"].default is options.keep_weights is False
    for command in ("plan", "run"):
        assert of_command(command)["keep_weights"].default is False


def of_command(name: str) -> dict[str, argparse.Action]:
    """The options of a command, by where they go."""
    (commands,) = (a.choices for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    return {action.dest: action for action in commands[name]._actions}


def test_a_run_has_every_option_on_the_command_line() -> None:
    known, typed = run_options(), of_command("run")
    assert set(known) <= set(typed)
    for name in set(known) - {"device", "spill_dir"}:
        assert typed[name].default == known[name].default, name
        assert typed[name].help, name
    assert typed["policy"].choices == tuple(POLICIES)
    assert typed["policy"].metavar == "POLICY" and "evict_all" in str(typed["policy"].help)
    assert typed["verify"].help == known["verify"].text


def test_fine_tuning_has_every_option_on_the_command_line() -> None:
    typed = of_command("finetune")
    for name, option in options_of(FineTuneOptions).items():
        assert name == "lora" or typed[name].default == option.default
    for name, option in options_of(LoraOptions).items():
        assert typed[f"lora_{name}"].default == option.default


def test_fine_tuning_is_typed_as_for_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    tune = ["finetune", "model", "text", "--device_budget=1GiB", "--output_dir", "a_b", "--max_steps"]
    with pytest.raises(SystemExit):
        cli.main([*tune, "0_1"])
    assert "argument --max-steps: '0_1' is not" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main([*tune, "1", "--some_thing"])
    assert "unrecognized arguments: --some-thing\n" in capsys.readouterr().err
    assert of_command("finetune")["output"].option_strings == ["-o", "--output-dir"]


def test_what_is_typed_is_what_a_program_gives() -> None:
    typed = parser().parse_args([*RUN, "--verify-spill", "--io-path", "posix direct", "--no-recompute"])
    given = {name: value for name, value in vars(typed).items() if name in run_options()}
    arguments = grouped(given)
    assert arguments["io"] == penstock.IoOptions(verify=True, paths=["posix direct"])
    assert arguments["planning"] == penstock.PlanOptions(recompute=False)
    assert arguments["batches"] == penstock.BatchOptions()
    assert arguments["device_budget"] == 1 << 30


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: penstock.IoOptions(page_cache_budget="lots"), "page_cache_budget: 'lots' is not a size"),
        (
            lambda: penstock.IoOptions(reexplore=-1),
            "reexplore: -1 is not a number: give a finite one, 0 or more",
        ),
        (
            lambda: penstock.IoOptions(explorers="all"),
            "explorers: there is no 'all': choose divided",
        ),
        (lambda: penstock.IoOptions(verify=1), "verify: 1 is of type int: give True or False"),
        (lambda: penstock.IoOptions(paths=[3]), "paths: 3 is of type int: give text"),
        (lambda: penstock.IoOptions(paths=3), "paths: 3 cannot be used"),
        (lambda: penstock.IoOptions(costs=3), "costs: 3 cannot be used"),
        (lambda: penstock.IoOptions(endurance="0TBW"), "endurance: an endurance of 0 bytes is none"),
        (lambda: penstock.PlanOptions(lossy="fp8"), "lossy: there is no 'fp8': choose fp16 or bf16"),
        (lambda: penstock.PlanOptions(smallest_bytes=None), "smallest_bytes: None is not a size"),
        (lambda: penstock.BatchOptions(micro_batch=0), "micro_batch: 0 is not a number of samples"),
        (lambda: FineTuneOptions(model=Path(), text=Path(), seed=-1), "seed: -1 is not a whole number"),
        (lambda: penstock.offload(device_budget="1GB", host_budget="x"), "host_budget: 'x' is not a size"),
        (
            lambda: penstock.offload(device_budget=1, io="posix"),
            "io is of type str: give penstock.IoOpt",
        ),
        (lambda: penstock.offload(device_budget="8"), "device_budget: '8' has no unit"),
        (lambda: penstock.offload(device_budget="1GB", disk_budget="auto"), "disk_budget: 'auto' is of a"),
        (lambda: penstock.IoOptions(page_cache_budget="8"), "page_cache_budget: '8' has no unit"),
        (lambda: penstock.plan(*_planned(), device_budget="8"), "'8' has no unit"),
        (lambda: penstock.offload(device_budget="-1"), "device_budget: '-1' is not a size"),
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_option(call: Callable[[], object], said: str) -> None:
    with pytest.raises(penstock.PenstockError, match=f"^{re.escape(said)}"):
        call()


def test_a_typo_is_no_option() -> None:
    with pytest.raises(TypeError, match="verify_all"):
        penstock.offload(**grouped({"device_budget": "1GiB", "verify_all": True}))
    with pytest.raises(AttributeError):  # frozen
        penstock.PlanOptions().policy = "g10"
