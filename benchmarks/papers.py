"""What five papers claim, and what penstock does: measured with real training, or simulated and named so.

    python benchmarks/papers.py -o out/papers.json

FlashNeuron (FAST 2021), moDNN (IEEE TPDS 2019), Fastensor (ACM TACO 2023), G10 (MICRO 2023), DLFS (CLUSTER
2019). For each claim the paper's figure and its conditions, ours and its own, and the ratio of the two where
both are one number. Two tables: what was measured on this machine, and what was simulated: on the traces that
G10's authors published (three of them are in tests/data/g10; all: see PENSTOCK_G10_DATA), and on fake traces
of moDNN's networks. What cannot be measured on such a machine says so.

Each training is a process of its own, one after the other: the first five steps are recorded and not counted,
times are medians with quartiles. `--quick` checks that it all works; its figures mean nothing. `--parts` runs
some parts, and keeps what the output file has of the others. Under 20 minutes on two cores that do nothing
else; 6 GB of free disk, 8 GB of memory. The slow disk needs root and control groups of version 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from papers_bench import feature_maps, modnn, modnn_runs, simulated, storage, training
from papers_bench.rows import Row, markdown
from step_time import add_common_arguments, heading, wide_console, write

import penstock

MEASURED: dict[str, Callable[[training.Session], training.Found]] = {
    "batch": training.batch,
    "depth": training.depth,
    "throughput": training.throughput,
    "least_memory": training.least_memory,
    "modnn_runs": modnn_runs.least_memory,
    "csr": training.csr,
    "addresses": training.addresses,
    "isolation": training.isolation,
    "choice": lambda session: storage.choice(session.spill_dir, session.quick, session.tell),
    "transfers": lambda session: storage.transfers(session.spill_dir, session.quick, session.tell),
    "feature_maps": feature_maps.feature_maps,
    "samples": lambda session: storage.samples(session.spill_dir, session.quick, session.tell),
}
# (quick, seconds to plan in, tell)
SIMULATED: dict[str, Callable[[bool, float, Callable[[str], None]], training.Found]] = {
    "g10": simulated.g10,
    "modnn_memory": lambda quick, _, tell: modnn.least_memory(quick, tell),
    "modnn_speed": modnn.speed,
}
PARTS = (*MEASURED, *SIMULATED)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    console = wide_console()
    began_s = time.perf_counter()

    def tell(text: str) -> None:
        console.print(f"[{time.perf_counter() - began_s:6.0f} s] {text}", markup=False)

    document: dict[str, Any] = {}
    if options.output.exists() and options.parts != list(PARTS):
        document = json.loads(options.output.read_text())
    parts = document.get("parts", {})
    with tempfile.TemporaryDirectory() as scratch:
        hardware_file = Path(scratch) / "hardware.json"
        hardware = penstock.probe(options.spill_dir, time_limit_s=1.0 if options.quick else 5.0)
        hardware.save(hardware_file)
        session = training.Session(
            options.spill_dir, hardware_file, options.quick, 2 if options.quick else options.steps, tell
        )
        for part in options.parts:
            part_began_s = time.perf_counter()
            data: dict[str, Any] = {}
            try:
                if part in SIMULATED:
                    rows, data = SIMULATED[part](options.quick, options.time_limit, tell)
                else:
                    rows, data = MEASURED[part](session)
            except Exception as error:  # the others go on
                traceback.print_exc()
                rows = [Row("", part, "", "failed", f"{type(error).__name__}: {error}")]
            parts[part] = {
                "rows": [asdict(row) for row in rows],
                "data": data,
                "seconds": time.perf_counter() - part_began_s,
                "quick": options.quick,
            }
            document = {
                **heading("papers"),
                "quick": options.quick,
                "hardware": msgspec.to_builtins(hardware),
                "parts": parts,
            }
            write(document, options.output, console)
    tell("done")
    print(tables(parts))
    return 1 if any(row["ours"] == "failed" for part in parts.values() for row in part["rows"]) else 0


def tables(parts: dict[str, Any]) -> str:
    """Both tables, as Markdown."""

    def rows(names: Sequence[str]) -> list[Row]:
        return [Row(**row) for name in names if name in parts for row in parts[name]["rows"]]

    note = (
        "\nFIGURES OF A QUICK RUN: THEY MEAN NOTHING\n"
        if any(part["quick"] for part in parts.values())
        else ""
    )
    measured, simulated_rows = markdown(rows(list(MEASURED))), markdown(rows(list(SIMULATED)))
    return f"{note}\n## Measured\n\n{measured}\n\n## Simulated\n\n{simulated_rows}\n{note}"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), metavar="PART,...", help="default: %(default)s")
    parser.add_argument(
        "--steps", type=int, default=4, help="settled ones of a training; default: %(default)s"
    )
    parser.add_argument(
        "--time-limit", type=float, default=3.0, metavar="SECONDS", help="of a simulated plan"
    )
    add_common_arguments(parser, "papers")
    options = parser.parse_args(arguments)
    options.parts = options.parts.split(",")
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser.error(f"--parts: there is no {unknown[0]!r}; there are {', '.join(PARTS)}")
    return options


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
