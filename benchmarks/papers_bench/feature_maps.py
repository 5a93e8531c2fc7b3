"""Feature maps to disk and back in whole training: Fastensor's comparison with torch's own I/O."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "benchmarks" / "programs")]

import cnn  # noqa: E402
import gpt  # noqa: E402
from methods import UNSETTLED_STEPS, Job, trace_of  # noqa: E402
from step_time import REFERENCE, measure, summary, wide_console  # noqa: E402

import penstock  # noqa: E402
from papers_bench.rows import Row  # noqa: E402
from papers_bench.training import Found, Session  # noqa: E402
from penstock.errors import PenstockError  # noqa: E402
from penstock.units import format_bytes, format_seconds  # noqa: E402

PAPER = 2.96  # times as fast as torch's own I/O, at most
FILES = "files"
POLICIES = ("evict_all", "optimal")
MODELS: dict[str, tuple[ModuleType, Any, Any]] = {  # the program, and its configuration, also with --quick
    "GPT": (gpt, gpt.Config(layers=6, width=256, heads=8, context=128, batch=16), gpt.QUICK),
    "CNN": (cnn, cnn.Config(), cnn.Config(blocks=3, width=24, batch=16)),
}


def feature_maps(session: Session) -> Found:
    """Step times of hooks that write each saved tensor by torch.save, and of penstock in one budget.

    The hooks keep weights, gradients and the optimizer's state in memory, and their files in the page cache,
    never synced; penstock moves all of these, past the page cache.
    """
    rows: list[Row] = []
    data: dict[str, Any] = {}
    hardware = penstock.Hardware.load(session.hardware_file)
    for name, (program, config, quick) in list(MODELS.items())[: 1 if session.quick else None]:
        session.tell(f"feature maps, {name}")
        config = quick if session.quick else config
        trace = trace_of(config, program.build)
        common = {"config": config, "program": str(program.__file__), "spill_dir": session.spill_dir}
        budget_bytes = max(budget_of(trace, hardware, policy) for policy in POLICIES)
        jobs = {REFERENCE: Job(REFERENCE, **common), FILES: Job(FILES, **common)}
        for policy in POLICIES:
            jobs[policy] = Job(
                "penstock",
                **common,
                planning={"policy": policy},
                device_budget_bytes=budget_bytes,
                hardware_file=str(session.hardware_file),
            )
        results = measure(jobs, UNSETTLED_STEPS + session.steps, wide_console())
        found = {key: summary(jobs[key], result, results[REFERENCE]) for key, result in results.items()}
        data[name] = {"config": asdict(config), "budget_bytes": budget_bytes, "methods": found}
        for policy in POLICIES:
            gain = found[FILES]["median_s"] / found[policy]["median_s"]
            rows.append(
                Row(
                    "Fastensor",
                    f"feature maps written and read back, whole training, over torch's I/O: {name}",
                    f"{PAPER} x at most",
                    f"{gain:.2f} x" if found[policy]["same_bits"] else "other bits",
                    f"`{policy}` in {format_bytes(budget_bytes)} of {format_bytes(trace.peak_bytes)}: "
                    + ", ".join(f"{key} {_spread(found[key])}" for key in (policy, FILES, REFERENCE))
                    + f"; resident {_resident(found[policy])} and, of the hooks, {_resident(found[FILES])}",
                    gain / PAPER,
                )
            )
    return rows, data


def _spread(row: dict[str, Any]) -> str:
    lower, upper = row["quartiles_s"]
    return f"{format_seconds(row['median_s'])} ({format_seconds(lower)} to {format_seconds(upper)})"


def _resident(row: dict[str, Any]) -> str:
    return format_bytes(row["peak_resident_bytes"])


def budget_of(trace: penstock.Trace, hardware: penstock.Hardware, policy: str) -> int:
    """Half of the peak, or the first twentieth of it more that the policy can reach; at most all of it."""
    machine = replace(hardware, device_bytes=trace.peak_bytes)
    for twentieths in range(10, 20):
        budget_bytes = trace.peak_bytes * twentieths // 20
        try:
            penstock.plan(trace, machine, policy, False, False, 1.0, device_budget=budget_bytes)
        except PenstockError:
            continue
        return budget_bytes
    return trace.peak_bytes
