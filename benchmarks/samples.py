"""Seconds a sample, bytes per second and mixing of reading samples in random order, side by side.

    python benchmarks/samples.py -o out/samples.json

Every row stores the same samples in its own way, and hands their bytes over in an order of its own for a
whole epoch, or as long as its turn lasts. In each round every row has its turn, each round begins with
another one; each row lives in a process of its own, which is idle while others have their turns. Starting an
epoch is part of the time, opening a store is not. Warm: everything was read into the page cache just before.
Cold: everything was dropped from it; what the host of a virtual machine caches is out of reach.

Mixing: of 20 equal ranges of the stored order, how many does a batch of 64 draw from, on average over an
epoch? A full shuffle gives 19.2. Peers have 20 shards, where they have shards. That every sample came exactly
once, with the right bytes, is verified outside the time.

Libraries that are not installed are listed:

    pip install lmdb webdataset mosaicml-streaming litdata grain array_record datasets

The JSON holds every turn. `--quick` checks that it all works; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from io_bench.machine import heading
from rich.console import Console
from rich.table import Table
from samples_bench import limits
from samples_bench.data import SHARDS, Data
from samples_bench.worker import Row

from penstock.errors import InvalidSize
from penstock.units import format_bytes, parse_bytes

ROOT = Path(__file__).resolve().parents[1]
ROWS: dict[str, str | None] = {  # by name, the package that a row needs
    "penstock chunk, bread(256)": None,
    "penstock chunk, bread(64)": None,
    "penstock chunk, bread(64), one core": None,
    "penstock full, bread(64)": None,
    "penstock Loader, batches of 64": None,
    "one file per sample": None,
    "packed file, pread": None,
    "packed file, mapped": None,
    "LMDB": "lmdb",
    "WebDataset": "webdataset",
    "MosaicML streaming": "streaming",
    "litdata": "litdata",
    "grain, array_record": "grain",
    "Hugging Face datasets": "datasets",
}
COUNTS = {512: 262_144, 4096: 65_536, 16384: 16_384, 131072: 4_096, 1 << 20: 768}
SIZES = ",".join(map(str, COUNTS))
BATCH = 64
PACKAGES = ("lmdb", "webdataset", "mosaicml-streaming", "litdata", "grain", "array_record", "datasets")

Tell = Callable[[str], None]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    console = Console(highlight=False)
    console.width = max(console.width, 130)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {
        **heading("samples", options.directory, PACKAGES),
        "seed": options.seed,
        "rounds": options.rounds,
        "turn_s": options.turn_s,
        "quick": options.quick,
        "missing": {},
        "sizes": {},
    }
    rows = []
    for name in options.rows:
        package = ROWS[name]
        if package is not None and importlib.util.find_spec(package) is None:
            document["missing"][name] = f"{package} is not installed"
        else:
            rows.append(name)
    for size_bytes in options.sizes:
        count = COUNTS.get(size_bytes, max(64, (256 << 20) // size_bytes))
        data = Data(size_bytes, min(count, 2000) if options.quick else count, options.seed)
        with tempfile.TemporaryDirectory(dir=options.directory, prefix="samples.") as folder:
            document["sizes"][str(size_bytes)] = measure(data, Path(folder), rows, options, console.print)
        options.output.write_text(json.dumps(document, indent=1))
        show(console, size_bytes, document["sizes"][str(size_bytes)])
    for name, reason in document["missing"].items():
        console.print(f"{name}: left out, {reason}")
    console.print(f"wrote {options.output}")
    failed = [row for size in document["sizes"].values() for row in size["rows"].values() if "failed" in row]
    return 1 if failed else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default=SIZES, metavar="SIZE,...", help="default: %(default)s")
    parser.add_argument("--rows", metavar="ROW;...", help="only these, by the names in the tables")
    parser.add_argument("--rounds", type=int, help="default: 5")
    parser.add_argument("--turn", type=float, dest="turn_s", help="seconds a turn; default: 0.7")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path(tempfile.gettempdir()),
        metavar="DIR",
        help="on the disk to measure; needs 12 GB; default: %(default)s",
    )
    parser.add_argument("--quick", action="store_true", help="few samples, two rounds")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "out" / "samples.json", metavar="FILE")
    options = parser.parse_args(arguments)
    try:
        options.sizes = [parse_bytes(size) for size in options.sizes.split(",")]
    except InvalidSize as error:
        parser.error(str(error))
    options.rows = [name.strip() for name in options.rows.split(";")] if options.rows else list(ROWS)
    if unknown := [name for name in options.rows if name not in ROWS]:
        parser.error(f"--rows: {', '.join(unknown)} are none; there are {'; '.join(ROWS)}")
    options.rounds = options.rounds or (2 if options.quick else 5)
    options.turn_s = options.turn_s or (0.2 if options.quick else 0.7)
    return options


def measure(
    data: Data, folder: Path, names: Sequence[str], options: argparse.Namespace, tell: Tell
) -> dict[str, Any]:
    rows: dict[str, dict[str, Any]] = {name: {} for name in names}
    open_rows: dict[str, Row] = {}
    written: dict[str, Path] = {}
    try:
        for name in names:
            tell(f"{format_bytes(data.size_bytes)}: storing {data.count} samples for {name}")
            # penstock's rows read one store.
            kind = name.split()[0] if name.startswith(("penstock", "packed")) else name
            open_rows[name] = row = Row(name)
            try:
                if kind not in written:
                    written[kind] = folder / f"{len(written):02d}"
                    written[kind].mkdir()
                    rows[name]["write_s"] = row.ask("write", written[kind], data)
                row.ask("open", written[kind], data)
                rows[name].update(check(row, data, options.seed))
            except (RuntimeError, TimeoutError) as error:
                rows[name]["failed"] = str(error)
                tell(f"{name} failed: {error}")
                open_rows.pop(name).close()
        os.sync()
        for state in ("warm", "cold"):
            for round_number in range(options.rounds):
                tell(f"{format_bytes(data.size_bytes)}, {state}: round {round_number + 1}")
                turns(open_rows, rows, state, round_number, options)
        found = {
            "count": data.count,
            "rows": rows,
            "limits": find_limits(next(folder.glob("*/packed"), None), data, options),
        }
    finally:
        for row in open_rows.values():
            row.close()
    return found


def turns(
    open_rows: dict[str, Row],
    rows: dict[str, dict[str, Any]],
    state: str,
    round_number: int,
    options: argparse.Namespace,
) -> None:
    names = list(open_rows)
    shift = round_number % max(1, len(names))
    for name in names[shift:] + names[:shift]:
        try:
            turn = open_rows[name].ask("run", options.seed + round_number, state == "cold", options.turn_s)
        except (RuntimeError, TimeoutError) as error:
            rows[name]["failed"] = str(error)
            open_rows.pop(name).close()
            continue
        rows[name].setdefault(state, []).append(turn)


def check(row: Row, data: Data, seed: int) -> dict[str, Any]:
    """An epoch's order from the samples' bytes: each once, and how well mixed."""
    return check_order(np.asarray(row.ask("order", seed, data.count)), data.count)


def check_order(order: np.ndarray, count: int) -> dict[str, Any]:
    once = len(order) == count and bool((np.bincount(order, minlength=count) == 1).all())
    batches = len(order) // BATCH
    groups = (order[: batches * BATCH] * SHARDS // count).reshape(batches, BATCH)
    distinct = float(np.mean([len(np.unique(batch)) for batch in groups]))
    moved = float(np.abs(order - np.arange(len(order))).mean() / len(order)) if len(order) else math.nan
    return {"each_once": once, "groups_in_a_batch": distinct, "moved": moved * 3}


def ideal_groups(count: int) -> float:
    """Of SHARDS equal ranges, how many a batch of a full shuffle draws from."""
    each = count // SHARDS
    missed = math.exp(
        math.lgamma(count - each + 1)
        - math.lgamma(count - each - BATCH + 1)
        - math.lgamma(count + 1)
        + math.lgamma(count - BATCH + 1)
    )
    return SHARDS * (1 - missed)


def find_limits(packed: Path | None, data: Data, options: argparse.Namespace) -> dict[str, float | None]:
    found: dict[str, float | None] = {
        "memory copies, one thread": limits.copy(data.size_bytes, data.total_bytes, options.turn_s)
    }
    if packed is not None:
        found["fio, random, direct"] = limits.fio(packed, data.size_bytes, False, 2)
        found["fio, sequential 1 MiB, direct"] = limits.fio(packed, 1 << 20, True, 2)
        found["raw io_uring loop, sequential, huge pages"] = limits.sequential(packed, 3)
    return found


def show(console: Console, size_bytes: int, found: dict[str, Any]) -> None:
    ideal = ideal_groups(found["count"])
    table = Table(title=f"{format_bytes(size_bytes)}, {found['count']} samples; medians (quartiles)")
    for column in (
        "",
        "warm us/sample",
        "GB/s",
        "CPU us",
        "cold us/sample",
        "GB/s",
        f"of {ideal:.1f}",
        "moved",
    ):
        table.add_column(column, justify="left" if not column else "right")
    for name, row in found["rows"].items():
        if "failed" in row:
            table.add_row(name, row["failed"][:60])
            continue
        cells = [name]
        for state in ("warm", "cold"):
            each = [1e6 * turn["wall_s"] / turn["samples"] for turn in row[state] if turn["samples"]]
            middle = statistics.median(each)
            low, _, high = statistics.quantiles(each, n=4) if len(each) > 1 else (middle,) * 3
            cells += [f"{middle:.3g} ({low:.3g}-{high:.3g})", f"{size_bytes / middle / 1e3:.3g}"]
            if state == "warm":
                cpu = statistics.median(1e6 * turn["cpu_s"] / turn["samples"] for turn in row[state])
                cells.append(f"{cpu:.3g}")
        once = "" if row["each_once"] else " NOT EACH ONCE"
        table.add_row(*cells, f"{row['groups_in_a_batch']:.1f}{once}", f"{row['moved']:.2f}")
    console.print(table)
    for name, rate in found["limits"].items():
        if rate:
            console.print(f"  {name}: {rate / 1e9:.2f} GB/s, {1e6 * size_bytes / rate:.3g} us/sample")


if __name__ == "__main__":
    sys.exit(main())
