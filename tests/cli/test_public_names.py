"""The names that programs rely on are there, as they were, and the pure parts import nothing heavy."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import penstock
from penstock import errors
from penstock.planners import POLICIES

SOURCE = Path(penstock.__file__).parent

PUBLIC = [
    "BatchOptions",
    "BudgetTooSmall",
    "CheckpointError",
    "DeviceUnavailable",
    "DistributedError",
    "Evict",
    "Hardware",
    "InvalidArgument",
    "InvalidCheckpoint",
    "InvalidFile",
    "InvalidPlan",
    "InvalidSize",
    "IoOptions",
    "Offload",
    "PenstockError",
    "Plan",
    "PlanOptions",
    "RankFailed",
    "Recompute",
    "Report",
    "SampleError",
    "SaveHandle",
    "SpillError",
    "SpillSpaceFull",
    "Timeline",
    "Trace",
    "best_batch",
    "check",
    "close",
    "fake_mode",
    "load",
    "offload",
    "plan",
    "probe",
    "save",
    "simulate",
    "trace",
]

# By function: what can be given by position, and what has to be named. "=" marks a default.
SIGNATURES = {
    "offload": (
        ["model=", "optimizer="],
        ["device_budget", "spill_dir=", "host_budget=", "host_node=", "disk_budget=", "device=", "plan="]
        + ["hardware=", "io=", "planning=", "batches="],
    ),
    "save": (["state", "path"], ["wait=", "metadata="]),
    "load": (["path", "map_location=", "mmap="], ["into=", "verify="]),
    "trace": (["step"], ["fake=", "device=", "warmup=", "mode="]),
    "fake_mode": ([], []),
    "probe": (["spill_dir", "device=", "time_limit_s="], []),
    "plan": (
        ["trace", "hardware", "policy=", "recompute=", "compress=", "time_limit_s="],
        ["device_budget="],
    ),
    "simulate": (["trace", "plan", "hardware"], []),
    "check": (["trace", "plan", "hardware"], []),
}

REPORT_FIELDS = {
    "device",
    "policy",
    "reason",
    "device_budget_bytes",
    "minimum_bytes",
    "peak_bytes",
    "predicted_peak_bytes",
    "peak_resident_bytes",
    "step_s",
    "predicted_step_s",
    "stall_s",
    "predicted_stall_s",
    "ideal_s",
    "evicted_bytes",
    "predicted_evicted_bytes",
    "loaded_bytes",
    "steps",
    "profiled_steps",
    "trace_mismatches",
}


def test_the_public_names() -> None:
    assert sorted(penstock.__all__) == PUBLIC
    assert list(penstock.__all__) == PUBLIC, "kept in order"
    for name in PUBLIC:
        assert getattr(penstock, name).__doc__, f"{name} says what it is"


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    """More may follow, named and with a default: no call that was right becomes wrong."""
    by_position, by_name = [], []
    for parameter in inspect.signature(getattr(penstock, name)).parameters.values():
        text = parameter.name + ("" if parameter.default is parameter.empty else "=")
        (by_name if parameter.kind is parameter.KEYWORD_ONLY else by_position).append(text)
    expected_by_position, expected_by_name = SIGNATURES[name]
    assert by_position == expected_by_position
    assert by_name[: len(expected_by_name)] == expected_by_name
    assert all(extra.endswith("=") for extra in by_name[len(expected_by_name) :])


HARDWARE = penstock.Hardware(device_bytes=1, name="given")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: penstock.offload(torch.optim.SGD, device_budget=1),
            "model is the class SGD: give a torch.nn",
        ),
        (
            lambda: penstock.offload(None, torch.optim.SGD, device_budget=1),
            "optimizer is the class SGD: give",
        ),
        (lambda: penstock.offload(device_budget=1, hardware="h.json"), "hardware is of type str: give what"),
        (lambda: penstock.offload(device_budget=1, plan="p.json"), "plan is of type str: give what"),
        (lambda: penstock.offload(device_budget=1, spill_dir=3), "spill_dir is 3: give a directory"),
        (lambda: penstock.offload(device_budget=1, device="tpu"), "'tpu' is no device: give"),
        (lambda: penstock.plan("t.json", HARDWARE), "trace is of type str: give what"),
        (lambda: penstock.check(HARDWARE, HARDWARE, HARDWARE), "trace is of type Hardware: give what"),
        (lambda: penstock.simulate(HARDWARE, HARDWARE, HARDWARE), "trace is of type Hardware: give what"),
        (lambda: penstock.trace(torch.ones(1)), "step is of type Tensor: give a function"),
        (
            lambda: penstock.samples.Loader("store", 4),
            "store is a path: give the store, penstock.samples.mount",
        ),
    ],
)
def test_an_argument_of_another_type_is_named(call: Callable[[], object], said: str) -> None:
    with pytest.raises(penstock.PenstockError, match=re.escape(said)):
        call()


def test_defaults() -> None:
    offload = inspect.signature(penstock.offload).parameters
    assert len(offload) <= 14
    assert {name: offload[name].default for name in ("spill_dir", "host_budget", "disk_budget")} == {
        "spill_dir": None,
        "host_budget": None,
        "disk_budget": None,
    }
    assert offload["planning"].default.policy == "optimal"
    assert inspect.signature(penstock.trace).parameters["fake"].default is True


def test_a_run_steps_reports_and_closes() -> None:
    for name in ("step", "report", "close", "__enter__", "__exit__"):
        assert callable(getattr(penstock.Offload, name))
    fields = {field.name for field in dataclasses.fields(penstock.Report)}
    assert fields >= REPORT_FIELDS


def test_errors_have_one_root() -> None:
    found = {name: kind for name, kind in vars(errors).items() if inspect.isclass(kind)}
    own = {name: kind for name, kind in found.items() if kind.__module__ == errors.__name__}
    assert own and all(issubclass(kind, penstock.PenstockError) for kind in own.values())
    assert set(own) <= set(PUBLIC), "every error can be caught by its public name"
    assert errors.__doc__ and all(name in errors.__doc__ for name in own), "the tree is drawn in full"


def test_errors_are_also_what_python_would_raise() -> None:
    for name in ("InvalidArgument", "InvalidFile", "InvalidSize"):
        assert issubclass(getattr(penstock, name), ValueError)
    assert issubclass(penstock.SpillError, OSError)
    assert issubclass(penstock.CheckpointError, OSError)
    assert issubclass(penstock.InvalidCheckpoint, penstock.CheckpointError)
    assert issubclass(penstock.InvalidCheckpoint, penstock.InvalidFile)
    assert issubclass(penstock.SpillSpaceFull, penstock.SpillError)


def test_errors_carry_their_numbers() -> None:
    assert penstock.BudgetTooSmall("too small", 12).minimum_bytes == 12
    violations = [f"rule {number}" for number in range(12)]
    error = penstock.InvalidPlan(violations)
    assert error.violations == tuple(violations)
    assert "12 rule(s)" in str(error) and "and 2 more" in str(error)


def test_values_are_frozen_and_go_to_files() -> None:
    for kind in (penstock.Trace, penstock.Hardware, penstock.Plan, penstock.Timeline):
        assert dataclasses.is_dataclass(kind)
        assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
        assert list(inspect.signature(kind.save).parameters) == ["self", "path"]
        assert list(inspect.signature(kind.load).parameters) == ["path"]


def test_what_others_read_of_the_values() -> None:
    for name in ("kernels", "tensors", "live_bytes", "peak_bytes", "persistent_bytes", "ideal_s"):
        assert hasattr(penstock.Trace, name)
    for name in ("peak_bytes", "stall_s", "evicted_bytes"):
        assert isinstance(inspect.getattr_static(penstock.Timeline, name), property)
    timeline = penstock.Timeline(step_s=1.5)
    assert (timeline.step_s, timeline.peak_bytes, timeline.stall_s) == (1.5, 0, 0)
    plan_fields = {field.name for field in dataclasses.fields(penstock.Plan)}
    assert plan_fields >= {"policy", "evictions", "minimum_bytes", "predicted_step_s", "predicted_peak_bytes"}
    assert plan_fields >= {"recomputations", "variants", "lower_bound_s"}


def test_the_policies() -> None:
    named = {"keep", "evict_all", "vdnn_all", "vdnn_conv", "flashneuron", "modnn", "g10", "optimal"}
    assert named <= set(POLICIES)
    assert all(callable(policy) for policy in POLICIES.values())


# -- what the documents say -------------------------------------------------------------------------

DOCUMENTS = Path(__file__).parents[2] / "docs"
VALUES = (penstock.Trace, penstock.Hardware, penstock.Plan, penstock.Timeline)


@pytest.mark.parametrize(
    "kind", [*VALUES, penstock.Evict, penstock.Recompute], ids=lambda kind: kind.__name__
)
def test_the_formats_page_names_every_field(kind: type) -> None:
    page = (DOCUMENTS / "formats.md").read_text(encoding="utf-8")
    missing = [field.name for field in dataclasses.fields(kind) if f"`{field.name}`" not in page]
    assert not missing


def test_the_examples_of_the_formats_page_can_be_read(tmp_path: Path) -> None:
    page = (DOCUMENTS / "formats.md").read_text(encoding="utf-8")
    examples = [block.partition("```")[0] for block in page.split("```json")[1:]]
    read = []
    for example in examples:
        (tmp_path / "example.json").write_text(example, encoding="utf-8")
        for kind in VALUES:
            if f"penstock.{kind.__name__.lower()}/" in example and "{...}" not in example:
                read.append(kind.load(tmp_path / "example.json"))
    trace, timeline = read
    assert [(period.begin, period.end) for period in trace.inactive_periods] == [(1, 4), (2, 3)]
    assert trace.peak_bytes == 300
    assert timeline.peak_bytes == 200 and timeline.evicted_bytes == 100


# -- imports ---------------------------------------------------------------------------------------

PURE = ("core", "planners", "simulator")
BELOW_PURE = {"penstock.errors", "penstock.options", "penstock.units"}
OUTSIDE = {
    "numpy",
    "msgspec",
    "highspy",
}  # msgspec: in core/files.py; highspy: in planners/optimal/program.py
# These import the native module.
COMPILED = {"core/files.py", "simulator/__init__.py", "planners/optimal/search.py"}
DEADLINES = {f"planners/optimal/{name}.py" for name in ("__init__", "lp", "program")}
IMPURE = {"time", "random.SystemRandom", "secrets", "socket", "subprocess", "threading", "tempfile"}


def imported(file: Path) -> Iterator[str]:
    """The modules that a file names in its imports, also inside functions, but those for types alone."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    typing = [
        node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    for_types = {inside for block in typing for inside in ast.walk(block)}
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{file} imports by a relative name"
            yield node.module


def pure_files() -> list[Path]:
    return [file for package in PURE for file in sorted((SOURCE / package).rglob("*.py"))]


@pytest.mark.parametrize("file", pure_files(), ids=lambda file: str(file.relative_to(SOURCE)))
def test_the_pure_parts_import_nothing_heavy(file: Path) -> None:
    name = file.relative_to(SOURCE).as_posix()
    for module in imported(file):
        compiled = module in ("penstock", "penstock._native") and name in COMPILED
        if compiled or (module == "time" and name in DEADLINES):
            continue
        top = module.partition(".")[0]
        if top == "penstock":
            inside = module.split(".")[1:2]
            assert module in BELOW_PURE or inside[0] in PURE, f"{module} is no pure module"
        else:
            assert top in OUTSIDE or top in sys.stdlib_module_names, f"{module} comes from outside"
            assert module not in IMPURE, f"{module} asks the clock, the system or chance"


def test_what_the_pure_parts_stand_on_imports_no_more() -> None:
    for name in BELOW_PURE:
        for module in imported(SOURCE / f"{name.rpartition('.')[2]}.py"):
            top = module.partition(".")[0]
            assert module in BELOW_PURE or top in sys.stdlib_module_names


def test_nobody_is_told_to_install_what_is_not_released() -> None:
    """On the index the name may be somebody else's."""
    root = Path(__file__).parents[2]
    pages = [
        root / "README.md",
        *(root / "docs").rglob("*.md"),
        *(root / "examples").rglob("*.py"),
        *(root / "benchmarks").rglob("*.py"),
    ]
    for path in [*pages, *(root / "src" / "penstock").rglob("*.py")]:
        assert "pip install 'penstock" not in path.read_text(encoding="utf-8"), path
