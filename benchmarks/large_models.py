"""Models that people know, trained in a fraction of their memory.

    python benchmarks/large_models.py -o out/large_models.json

Three cases, on short sequences so that two cores can do it. Weights are random, and made in the budget:

lora      LoRA on a Llama of 3.2 G parameters (the shapes of Llama 3.2 3B), in 2 GiB: in bfloat16, or in
          float32 where the processor has no instructions for the other
full      a GPT of 1.5 G parameters in float32 with AdamW: 25 GB of training state, in 4 GiB
4-bit     LoRA on a Llama of 6.7 G parameters in 4 bits of bitsandbytes (the shapes of Llama 2 7B), in 1 GiB

It takes up to an hour on two cores, at most 40 GB of disk in --spill-dir (60 GB with --swap), and 6 GiB of
memory. `ideal` is the step without stalls, by the times of its kernels.

--reference trains the same in memory, too, and compares the bits of losses, weights and optimizer state.
--limit gives the process a hard limit of the system, which needs root and a memory control group: what Python
and torch took before the model was built, 105 % of the budget, and 384 MiB. --swap then trains plain PyTorch
under the same limit, on a swap file in --spill-dir. --scale 0.004 shows that it all works; its figures mean
nothing.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import torch
from control_groups import Unavailable, require_root, swap_file
from memory_limit import train, train_limited
from rich.table import Table
from step_time import ROOT, add_common_arguments, heading, wide_console, write

sys.path.insert(0, str(ROOT / "examples"))

import gpt
from methods import UNSETTLED_STEPS, Job, Result
from programs import large_llama

import penstock
from penstock.machine import available_bytes
from penstock.units import format_bytes, format_seconds

PROCESS_BYTES = 2 << 30  # Python, torch, and what is beside the budget
BESIDE_BYTES = 384 << 20  # the budget, under a limit: plans of thousands of kernels, and copies
# Without instructions for it, PyTorch multiplies matrices of bfloat16 on one core, far slower.
DTYPE = "bfloat16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32"
LEAST_BUDGET_BYTES = 12 << 20
SWAP_STEPS = 3


@dataclass(frozen=True)
class Case:
    """state_bytes   weights, gradients and the optimizer's state: what may lie on the disk"""

    config: Any
    program: str
    budget_bytes: int
    state_bytes: int

    def scaled(self, scale: float) -> Case:
        """With about so much of the parameters."""
        shrink = scale ** (1 / 3)
        config = self.config
        layers = max(2, round(config.layers * shrink))
        if isinstance(config, gpt.Config):
            heads = max(1, round(config.heads * shrink))
            config = replace(config, layers=layers, heads=heads, width=heads * config.width // config.heads)
        else:
            groups = config.heads // config.key_value_heads
            key_value_heads = max(1, round(config.key_value_heads * shrink))
            config = replace(
                config,
                layers=layers,
                heads=key_value_heads * groups,
                key_value_heads=key_value_heads,
                feed=64 * max(1, round(config.feed * shrink / 64)),
                vocabulary=round(config.vocabulary * shrink**2),
            )
        least_bytes = LEAST_BUDGET_BYTES  # to quantize a matrix bitsandbytes holds five of it
        if not isinstance(config, gpt.Config) and config.bits < 16:
            least_bytes += 5 * 4 * config.feed * config.heads * large_llama.HEAD_WIDTH
        budget_bytes = max(least_bytes, round(self.budget_bytes * scale))
        return replace(
            self, config=config, budget_bytes=budget_bytes, state_bytes=round(self.state_bytes * scale)
        )


CASES = {
    "lora": Case(
        large_llama.Config(context=32, dtype=DTYPE),
        large_llama.__file__,
        2 << 30,
        (7 if DTYPE == "bfloat16" else 14) * 10**9,
    ),
    "full": Case(
        gpt.Config(layers=30, width=2048, heads=16, context=64, batch=1), gpt.__file__, 4 << 30, 25 * 10**9
    ),
    "4-bit": Case(
        large_llama.Config(
            layers=32,
            heads=32,
            key_value_heads=32,
            feed=11008,
            vocabulary=32000,
            tied=False,
            context=64,
            bits=4,
            dtype=DTYPE,
        ),
        large_llama.__file__,
        1 << 30,
        5 * 10**9,
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=",".join(CASES), help="with commas between; default: %(default)s")
    parser.add_argument("--steps", type=int, default=9, help="of each case; default: %(default)s")
    parser.add_argument("--scale", type=float, default=1.0, help="of the parameters; default: %(default)s")
    parser.add_argument("--reference", action="store_true", help="the same in memory")
    parser.add_argument("--limit", action="store_true", help="a hard limit of the system")
    parser.add_argument("--swap", action="store_true", help="plain PyTorch under that limit, with swap")
    add_common_arguments(parser, "large_models", quick=False)
    options = parser.parse_args(arguments)
    names = options.cases.split(",")
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"--cases: there is no {unknown[0]!r}: choose of {', '.join(CASES)}")
    if options.steps <= UNSETTLED_STEPS:
        parser.error(f"--steps: give {UNSETTLED_STEPS + 1} or more: {UNSETTLED_STEPS} are planned meanwhile")
    if not 0 < options.scale <= 1:
        parser.error("--scale: give more than 0, and at most 1")
    if "4-bit" in names and find_spec("bitsandbytes") is None:
        parser.error("case 4-bit needs bitsandbytes: pip install bitsandbytes, or leave it out of --cases")
    limited = options.limit or options.swap
    try:
        if limited:
            require_root()
    except Unavailable as error:
        parser.error(f"--limit and --swap: {error}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # a swap file has to go
    cases = {name: CASES[name].scaled(options.scale) for name in names}
    if lacking := shortage(cases, options):
        parser.error(lacking)

    console = wide_console()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.spill_dir, prefix="penstock-large-") as folder:
        hardware = penstock.probe(folder, time_limit_s=10.0 if options.scale == 1 else 1.0)
        hardware.save(hardware_file := Path(folder) / "hardware.json")
        for name, case in cases.items():
            console.print(
                f"{name}: {format_bytes(case.state_bytes)} of state in {format_bytes(case.budget_bytes)}"
            )
            plain = Job("in memory", case.config, case.program, hash_state=options.reference)
            job = replace(
                plain,
                method="penstock",
                device_budget_bytes=case.budget_bytes,
                hardware_file=str(hardware_file),
                spill_dir=folder,
            )
            rows: dict[str, Any] = {}
            try:
                facts: dict[str, Any] = {}
                if limited:
                    more_bytes = case.budget_bytes * 105 // 100 + BESIDE_BYTES
                    result, facts = train_limited(job, options.steps, more_bytes=more_bytes)
                else:
                    result = train(job, options.steps)
                rows["penstock"] = {**described(result), **facts}
                if options.reference:
                    reference = train(plain, options.steps)
                    rows["in memory"] = described(reference)
                    rows["penstock"]["same_bits"] = result.same_bits(reference)
                if options.swap:
                    with swap_file(folder, case.state_bytes):
                        swapped, facts = train_limited(plain, SWAP_STEPS, facts["limit_bytes"])
                    rows["the system's swap"] = {**described(swapped, first=1), **facts}
            except Unavailable as error:
                sys.exit(f"this cannot be measured here: {error}")
            found[name] = {"config": asdict(case.config), "rows": rows}
            console.print(drawn(found))
    hardware_values = msgspec.to_builtins(hardware)
    write({**heading("large_models"), "hardware": hardware_values, "cases": found}, options.output, console)
    return 0


def shortage(cases: dict[str, Case], options: argparse.Namespace) -> str:
    """What this machine lacks, in one sentence."""
    most = max(cases.values(), key=lambda case: case.state_bytes)
    disk_bytes = most.state_bytes * (3 if options.swap else 2) * 4 // 5  # the copies, and their holes
    memory_bytes = max(case.budget_bytes for case in cases.values()) + PROCESS_BYTES
    if options.reference:
        memory_bytes = max(memory_bytes, most.state_bytes + PROCESS_BYTES)
    wanted = (
        ("free disk", f" in {options.spill_dir}", disk_bytes, shutil.disk_usage(options.spill_dir).free),
        ("available memory", "", memory_bytes, available_bytes()),
    )
    return " and ".join(
        f"this takes {format_bytes(needed)} of {what}, and there are {format_bytes(there)}{where}: run fewer "
        "--cases, or a smaller --scale"
        for what, where, needed, there in wanted
        if needed > there
    )


def described(result: Result, first: int = UNSETTLED_STEPS) -> dict[str, Any]:
    samples_s = [step.step_s for step in result.steps]
    return {
        "median_s": statistics.median(samples_s[first:]),
        "samples_s": samples_s,
        "loss": [step.loss for step in result.steps],
        "peak_resident_bytes": result.peak_resident_bytes,
        "report": msgspec.to_builtins(result.report),
    }


def drawn(found: dict[str, Any]) -> Table:
    columns = ("", "step", "predicted", "ideal", "first steps", "moved out, in", "budget", "peak", "resident")
    table = Table(*columns, "limit", "most", "bits", box=None, padding=(0, 1))
    for column in table.columns[1:]:
        column.justify = "right"
    for name, case in found.items():
        for how, row in case["rows"].items():
            report = row["report"]
            own = [""] * 5
            if report is not None:
                own = [
                    format_seconds(report["predicted_step_s"]),
                    format_seconds(report["ideal_s"]),
                    f"{format_bytes(report['evicted_bytes'])}, {format_bytes(report['loaded_bytes'])}",
                    format_bytes(report["device_budget_bytes"]),
                    format_bytes(report["peak_bytes"]),
                ]
            table.add_row(
                f"{name}, {how}",
                format_seconds(row["median_s"]),
                *own[:2],
                ", ".join(f"{sample_s:.1f}" for sample_s in row["samples_s"][:UNSETTLED_STEPS]),
                *own[2:],
                format_bytes(row["peak_resident_bytes"]),
                format_bytes(row["limit_bytes"]) if "limit_bytes" in row else "",
                format_bytes(row["group_peak_bytes"]) if "limit_bytes" in row else "",
                {True: "equal", False: "DIFFERENT", None: ""}[row.get("same_bits")],
            )
    return table


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
