"""Planners against published results, against their own lower bounds, and against each other.

    python benchmarks/planners.py -o out/planners.json

Nothing here is timed but the planning: iteration times are the simulator's. Parts:

published   the cells of G10's figures 11, 15, 16 and 18, on its own traces, with its artifact's settings:
            penstock's g10, flashneuron, Base UVM and DeepUM+ against the published times, and `optimal`
            against the published G10 and against its own bound. All 183 cells need all traces: see
            PENSTOCK_G10_DATA; three are in tests/data/g10
real        the published traces with their fixed costs taken out, and traces captured here with times from
            data sheets: each action (moving, recomputation, compression) alone and all together
demo        the demo's trace at several budgets: `optimal` against the other policies

Every plan is checked before its time counts. The JSON holds every cell. Plots go beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parent))

from io_bench.machine import heading
from planning import demo, published_part, real, show

PARTS: dict[str, Callable[[argparse.Namespace, Callable[[str], None]], dict[str, Any]]] = {
    "published": published_part.measure,
    "real": real.measure,
    "demo": demo.measure,
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = read_options(arguments)
    console = Console(width=None if sys.stdout.isatty() else 170)
    document: dict[str, Any] = {
        **heading("planners"),
        "time_limit_s": options.time_limit,
        "parts": {},
    }
    with Progress(console=console, transient=True) as progress:
        for part in options.parts:
            task = progress.add_task(part, total=None)
            document["parts"][part] = PARTS[part](
                options, lambda text, task=task: progress.update(task, description=text)
            )
            progress.remove_task(task)
    for part in options.parts:
        show.SHOW[part](console, document["parts"][part])
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(document, indent=1))
        console.print(f"wrote {options.output}")
        for part in options.parts:
            for path in show.plot(part, document["parts"][part], options.output.parent):
                console.print(f"wrote {path}")
    return 0


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), metavar="PART,...", help="default: %(default)s")
    parser.add_argument("--figures", default="11,15,16,18", metavar="N,...", help="default: %(default)s")
    parser.add_argument("--only", default="", metavar="TEXT", help="cells whose name contains this")
    parser.add_argument("--time-limit", type=float, default=10.0, metavar="SECONDS", help="default: 10")
    parser.add_argument(
        "--jobs", type=int, default=max(len(os.sched_getaffinity(0)), 1), help="default: cores"
    )
    parser.add_argument("--quick", action="store_true", help="a few small cells")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    options.parts = options.parts.split(",")
    options.figures = {int(number) for number in options.figures.split(",")}
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"--parts: there is no {unknown[0]!r}; there are {', '.join(PARTS)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
