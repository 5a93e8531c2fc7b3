"""Bytes per second and processor time of writing tensors to disk and reading them back, side by side.

    python benchmarks/tensor_io.py -o out/tensor_io.json

Three parts. `transfers`: tensors of one size, one after another, through penstock's spill space, its
checkpoints, torch, numpy, safetensors, torch.distributed.checkpoint, torchsnapshot, DeepSpeed's aio
and NIXL, against what the disk gives to a raw io_uring loop and to fio. `checkpoints`: the state of a
model, saved to stay and loaded. `adaptive`: the choice of the way for each tensor against each single
way, on every size and on what a step of examples/demo.py moves.

In each round every row has its turn, each round begins with another one, and the file system is synced
in between, outside the time: nobody waits for what another wrote. The bits are random, others in each
round, and compared after each read, outside the time. A cold read finds nothing of its file in the page
cache, a warm one all of it; rows that never read from the page cache are as fast either way. What the
host of a virtual machine caches is out of reach. Libraries that are not installed are listed:

    pip install safetensors torchsnapshot deepspeed nixl

DeepSpeed builds its operator at first use, for some minutes; it needs libaio's headers, and ninja. The
JSON holds every sample. See `--quick` for a check that it all works; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from io_bench import adaptive, show
from io_bench.checkpoints import measure_checkpoints
from io_bench.formats import FORMATS
from io_bench.machine import heading
from io_bench.targets import targets
from io_bench.transfers import ALL_ROWS, measure_size
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from penstock.errors import InvalidSize
from penstock.units import format_bytes, parse_bytes

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("transfers", "checkpoints", "adaptive")
SIZES = "64KiB,256KiB,1MiB,3MiB,12.25MiB,49MiB,196MiB,784MiB"
QUICK_SIZES = "256KiB,3MiB"
QUICK_STEP = adaptive.Step((3 << 20, 64 << 10, 1 << 20) * 4, tuple(reversed(range(12))))
CHECKPOINT_BYTES, QUICK_CHECKPOINT_BYTES = 10**9, 40 * 10**6

Tell = Callable[[str], None]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    console = Console(highlight=False)
    console.width = max(console.width, 130)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {
        **heading("tensor_io", options.directory),
        "seed": options.seed,
        "rounds": options.rounds,
        "quick": options.quick,
    }
    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with (
        tempfile.TemporaryDirectory(dir=options.directory, prefix="tensor_io.") as folder,
        Progress(*columns, console=console, transient=True) as progress,
    ):
        bar = progress.add_task("")

        def tell(text: str) -> None:
            progress.update(bar, description=text)

        for part in options.parts:
            MEASURES[part](document, Path(folder), options, tell)
            save(document, options.output)
    verdicts = targets(document)
    document["targets"] = [target.document() for target in verdicts]
    save(document, options.output)
    report(console, document)
    show.show_targets(console, verdicts)
    console.print(f"wrote {options.output}")
    return 1 if troubles(document, "failed") else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), metavar="PART,...", help="default: %(default)s")
    parser.add_argument("--sizes", metavar="SIZE,...", help=f"of tensors; default: {SIZES}")
    parser.add_argument("--rows", metavar="ROW;...", help="only these, by the names in the tables")
    parser.add_argument("--rounds", type=int, help="default: 7, and 5 from 100 MiB on")
    parser.add_argument("--checkpoint-size", metavar="SIZE", help="default: 1GB")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path(tempfile.gettempdir()),
        metavar="DIR",
        help="on the disk to measure; needs 10 GB; default: %(default)s",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "out" / "tensor_io.json", metavar="FILE")
    options = parser.parse_args(arguments)
    options.parts = options.parts.split(",")
    try:
        sizes = options.sizes or (QUICK_SIZES if options.quick else SIZES)
        options.sizes = [parse_bytes(size) for size in sizes.split(",")]
        default_bytes = QUICK_CHECKPOINT_BYTES if options.quick else CHECKPOINT_BYTES
        options.checkpoint_bytes = parse_bytes(options.checkpoint_size or default_bytes)
    except InvalidSize as error:
        parser.error(str(error))
    options.rows = [name.strip() for name in options.rows.split(";")] if options.rows else list(ALL_ROWS)
    for name, given, known in (("parts", options.parts, PARTS), ("rows", options.rows, ALL_ROWS)):
        if unknown := [one for one in given if one not in known]:
            parser.error(f"--{name}: {', '.join(unknown)} are none; there are {'; '.join(known)}")
    if not all(size > 0 and size % 4096 == 0 for size in options.sizes):
        parser.error("--sizes: give multiples of 4096 bytes, above zero")
    if options.rounds is not None and options.rounds < 1:
        parser.error("--rounds: give 1 or more")
    return options


def rounds_for(options: argparse.Namespace, size_bytes: int) -> int:
    if options.rounds:
        return options.rounds
    if options.quick:
        return 2
    return 5 if size_bytes >= 100 << 20 else 7


def transfers(document: dict[str, Any], folder: Path, options: argparse.Namespace, tell: Tell) -> None:
    document["transfers"] = {}
    for size_bytes in options.sizes:

        def tell_size(text: str, label: str = format_bytes(size_bytes)) -> None:
            tell(f"transfers, {label}: {text}")

        document["transfers"][str(size_bytes)] = measure_size(
            folder,
            size_bytes,
            options.rows,
            rounds_for(options, size_bytes),
            options.seed,
            options.quick,
            tell_size,
        )
        save(document, options.output)


def checkpoints(document: dict[str, Any], folder: Path, options: argparse.Namespace, tell: Tell) -> None:
    document["checkpoints"] = measure_checkpoints(
        folder,
        options.checkpoint_bytes,
        [name for name in options.rows if name in FORMATS],
        rounds_for(options, options.checkpoint_bytes),
        options.seed,
        options.quick,
        lambda text: tell(f"checkpoints: {text}"),
    )


def adapts(document: dict[str, Any], folder: Path, options: argparse.Namespace, tell: Tell) -> None:
    # What is looked for here is small: more rounds.
    more = 1 if options.quick else 3
    part = document["adaptive"] = adaptive.measure_sizes(
        folder,
        options.sizes,
        lambda size_bytes: more * rounds_for(options, size_bytes),
        options.seed,
        options.quick,
        lambda text: tell(f"adaptive, {text}"),
    )
    tell("adaptive: tracing the demo's step")
    step = QUICK_STEP if options.quick else adaptive.demo_step()
    part["step"] = adaptive.measure_step(
        folder,
        step,
        more * rounds_for(options, 0),
        options.seed,
        lambda text: tell(f"adaptive, {text}"),
    )


MEASURES = dict(zip(PARTS, (transfers, checkpoints, adapts), strict=True))


def save(document: Mapping[str, Any], path: Path) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n")


def report(console: Console, document: Mapping[str, Any]) -> None:
    if sizes := document.get("transfers"):
        show.show_transfers(console, sizes)
    if part := document.get("checkpoints"):
        show.show_checkpoints(console, part)
    if part := document.get("adaptive"):
        show.show_adaptive(console, part)
    does: dict[str, str] = {}
    for one in measured(document):
        does.update(one["does"])
    show.show_notes(console, does, {**troubles(document, "unavailable"), **troubles(document, "failed")})
    for name, left_bytes in troubles(document, "cold_left_bytes").items():
        console.print(f"cold reads of {name} found up to {format_bytes(left_bytes)} in the page cache")


def measured(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The parts that have rows."""
    found = list(document.get("transfers", {}).values())
    return [*found, document["checkpoints"]] if "checkpoints" in document else found


def troubles(document: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """By row: why it is "unavailable", or "failed"; or its "cold_left_bytes"."""
    found: dict[str, Any] = {}
    for one in measured(document):
        found.update(one[kind])
    return found


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
