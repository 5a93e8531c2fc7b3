"""A step of several ranks: in memory, each with a plan of its own, and with one plan for all of them.

    python benchmarks/ranks.py -o out/ranks.json

The demo's GPT with DistributedDataParallel over gloo, one thread a rank, the batch divided among the ranks,
and 35 % of the memory. The ways take turns, in jobs of their own that `torchrun` starts; times are medians
over the steps after the first ones. `predicted` is what the first rank's report says. Ranks plan for
themselves where their budgets differ: here by a byte.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

import ddp_demo  # noqa: E402
from methods import UNSETTLED_STEPS  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from penstock.units import format_seconds  # noqa: E402

WAYS = ("in memory", "each for itself", "planned as one")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="2,4", help="default: %(default)s")
    parser.add_argument("--percent", type=float, default=35, help="of the memory; default: %(default)s")
    parser.add_argument("--steps", type=int, default=12, help="of each job; default: %(default)s")
    parser.add_argument("--turns", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--spill-dir", default=tempfile.gettempdir(), metavar="DIR")
    parser.add_argument("--quick", action="store_true", help="a tiny model: its figures mean nothing")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    if options.steps <= UNSETTLED_STEPS:
        parser.error(f"--steps: give {UNSETTLED_STEPS + 1} or more")
    console = Console(highlight=False)
    table = Table("ranks", "", "step", "spread", "against in memory", "predicted", "short by", "same bits")
    found: list[dict[str, Any]] = []
    for ranks in map(int, options.ranks.split(",")):
        options.processes = ranks
        budget = int(ddp_demo.peak_bytes_of(ddp_demo.config_of(options)) * options.percent / 100)
        budgets = ([], [budget + rank for rank in range(ranks)], [budget] * ranks)
        jobs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
        for turn in range(options.turns):
            for way, given in zip(WAYS, budgets, strict=True):
                console.print(f"{ranks} ranks, turn {turn + 1} of {options.turns}: {way}")
                jobs[way].append(ddp_demo.job(given, options))
        for way, every in jobs.items():
            against = statistics.median(
                statistics.median(mine["settled_s"]) / statistics.median(plain["settled_s"])
                for mine, plain in zip(every, jobs[WAYS[0]], strict=True)
            )
            medians_s = [statistics.median(each["settled_s"]) for each in every]
            step_s = statistics.median(medians_s)
            predicted_s = statistics.median(each["predicted_s"] for each in every)
            row = {"ranks": ranks, "way": way, "step_s": step_s, "predicted_s": predicted_s, "jobs": every}
            found.append(row | {"against": against})
            table.add_row(
                str(ranks),
                way,
                format_seconds(step_s),
                f"{format_seconds(min(medians_s))} to {format_seconds(max(medians_s))}",
                f"{against:.2f}",
                format_seconds(predicted_s) if predicted_s else "",
                f"{1 - predicted_s / step_s:.1%}" if predicted_s else "",
                "yes" if {each["state"] for each in every} == {jobs[WAYS[0]][0]["state"]} else "NO",
            )
    console.print(table)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
