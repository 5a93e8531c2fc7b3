"""What can be typed: the commands and their options."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import penstock
from penstock.capture.roofline import DATA_SHEETS
from penstock.cli import checkpoint, commands, planning, reporting, training
from penstock.cli.output import Answer
from penstock.cli.ways import ways as compare_ways
from penstock.errors import InvalidSize
from penstock.planners import POLICIES
from penstock.units import parse_bytes

SCRIPT_HELP = """\
SCRIPT.py:build names a function that takes no arguments and returns four things:

  model, optimizer, batches, loss

batches is an iterable, and loss(model, batch) the scalar to minimise:

  def build():
      model = torch.nn.Linear(1024, 1024)
      optimizer = torch.optim.AdamW(model.parameters())
      batches = [torch.randn(64, 1024) for _ in range(100)]
      return model, optimizer, batches, lambda model, batch: model(batch).square().mean()
"""


REPORT_HELP = """\
SOURCE is the FOLDER that `penstock run` wrote, or a TRACE and a PLAN, with --hardware.
"""

WHATIF_HELP = """\
Every combination is planned for. "limited by" names the resource of which twice as much would help the
plan most. The disk counts as fast enough where one that never keeps the plan waiting would save less
than 5 % of the step.

  penstock whatif trace.json.gz --hardware hardware.json --budget 8GiB,16GiB --disks 1,2,4 --disk-rate 3.2GB/s
"""


class _Parser(argparse.ArgumentParser):
    """Says what was typed wrong, and exits with 1: argparse's own 2 means "infeasible" here."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(1, f"{self.prog}: error: {message}\n")


def parser() -> argparse.ArgumentParser:
    root = _Parser(
        prog="penstock",
        description="Train PyTorch models that do not fit in memory. Every command reads and writes files.",
        epilog="exit codes: 0 done, 1 error, 2 infeasible, 130 interrupted",
    )
    root.add_argument("--version", action="version", version=f"penstock {penstock.__version__}")
    names = root.add_subparsers(title="commands", metavar="COMMAND", required=True)

    probe = _command(names, "probe", commands.probe, "measure this machine")
    _spill_dir(probe, "measure")
    probe.add_argument("--device", default="cpu", help="cpu, or cuda:0 and so on; default: %(default)s")
    probe.add_argument("--seconds", type=float, default=10.0, help="time it may take; default: %(default)g")
    _written(probe, "hardware.json")

    ways = _command(names, "ways", compare_ways, "compare the ways to move tensors to disk and back")
    _spill_dir(ways, "use")
    _page_cache_budget(ways)
    ways.add_argument("--seconds", type=float, default=5.0, help="time to take; default: %(default)g")
    ways.add_argument("--tables", type=Path, metavar="FILE", help="what is known: read, and added to")

    trace = _command(names, "trace", commands.trace, "capture one training step", SCRIPT_HELP)
    _script(trace)
    trace.add_argument(
        "--real", action="store_true", help="run the step and time it, instead of estimating without memory"
    )
    trace.add_argument(
        "--device",
        choices=("cpu", *DATA_SHEETS),
        help="where an estimate's times are for: this processor, or a data sheet; default: cpu",
    )
    _written(trace, "trace.json.gz")

    plan = _command(names, "plan", planning.plan, "decide what leaves the device, and predict the step")
    plan.add_argument("trace", type=Path, metavar="TRACE", help="file that `penstock trace` wrote")
    _hardware(plan)
    _budget(plan)
    _policy(plan)
    _liberties(plan)
    plan.add_argument("--compare", action="store_true", help="show what every policy makes of it")
    plan.add_argument("--budgets", action="store_true", help="show what other device budgets bring")
    _written(plan, "plan.json")

    simulate = _command(names, "simulate", planning.simulate, "judge a plan, and replay it event by event")
    simulate.add_argument("trace", type=Path, metavar="TRACE", help="file that `penstock trace` wrote")
    simulate.add_argument("plan", type=Path, metavar="PLAN", help="file that `penstock plan` wrote")
    _hardware(simulate)
    _written(simulate, "timeline.json.gz")

    run = _command(names, "run", training.run, "train inside a budget", SCRIPT_HELP)
    _script(run)
    _budget(run)
    _spill_dir(run, "use")
    run.add_argument("--steps", type=_count, metavar="N", help="default: one for each batch")
    run.add_argument("--host-budget", type=_size, metavar="SIZE", help="pinned memory, for a model on a GPU")
    run.add_argument("--disk-budget", type=_size, metavar="SIZE", help="default: what is free")
    run.add_argument(
        "--hardware", type=Path, metavar="FILE", help="that `penstock probe` wrote; default: measure now"
    )
    run.add_argument(
        "--way",
        action="append",
        metavar="NAME",
        help="how tensors move, as `penstock ways` names it; may be repeated; default: the fastest, learned",
    )
    _page_cache_budget(run)
    run.add_argument(
        "--way-tables", type=Path, metavar="FILE", help="what is known of the ways: read, and added to"
    )
    run.add_argument(
        "--verify-spill", action="store_true", help="checksum what leaves for the disk, and comes back"
    )
    _policy(run)
    _written(run, "penstock-run", "FOLDER")

    _report(names)
    _whatif(names)
    _checkpoint(names)
    return root


def _report(names: argparse._SubParsersAction[_Parser]) -> None:
    report = _command(
        names, "report", reporting.report, "show a plan, and hold a run against it, in one page", REPORT_HELP
    )
    report.add_argument("source", type=Path, nargs="+", metavar="SOURCE", help="FOLDER, or TRACE PLAN")
    report.add_argument(
        "--hardware", type=Path, metavar="FILE", help="that `penstock probe` wrote; with TRACE PLAN"
    )
    report.add_argument("--measured", type=Path, metavar="FILE", help="timeline of a run; with TRACE PLAN")
    report.add_argument("--no-policies", action="store_true", help="leave out the table of policies")
    _liberties(report, "for the table of policies: ", time_limit_s=5.0)
    report.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help=".html for the page, .png, .svg or .pdf for a picture; default: report.html, in FOLDER",
    )


def _whatif(names: argparse._SubParsersAction[_Parser]) -> None:
    whatif = _command(
        names, "whatif", reporting.whatif, "plan for other machines: is the disk fast enough?", WHATIF_HELP
    )
    whatif.add_argument("trace", type=Path, nargs="+", metavar="TRACE", help="one for each batch size")
    _hardware(whatif)
    whatif.add_argument(
        "--budget", type=_sizes, metavar="SIZE,...", help="device budgets; default: all of the device"
    )
    whatif.add_argument("--host", type=_sizes, metavar="SIZE,...", help="host memory; default: as measured")
    whatif.add_argument(
        "--disks", type=_counts, default=[1], metavar="N,...", help="disks that work as one; default: 1"
    )
    whatif.add_argument(
        "--disk-rate", type=_rate, metavar="RATE", help="of one disk, such as 3.2GB/s; default: as measured"
    )
    _policy(whatif)
    _liberties(whatif, time_limit_s=None)
    whatif.add_argument(
        "--seconds", type=_seconds, default=60.0, help="time to take, about; default: %(default)g"
    )
    whatif.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write the table as JSON; default: do not"
    )


def _checkpoint(names: argparse._SubParsersAction[_Parser]) -> None:
    summary = "look at checkpoints, verify and convert them"
    group = names.add_parser("checkpoint", help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    below = group.add_subparsers(title="commands", metavar="COMMAND", required=True)

    info = _command(below, "info", checkpoint.info, "show what a checkpoint holds")
    verify = _command(
        below, "verify", checkpoint.verify, "read a checkpoint whole, and compare its checksums"
    )
    for command in (info, verify):
        command.add_argument(
            "file", type=Path, metavar="FILE", help="of penstock.save, torch.save or safetensors"
        )

    convert = _command(
        below, "convert", checkpoint.convert, "write a checkpoint in the format of another suffix"
    )
    convert.add_argument("source", type=Path, metavar="A", help="of penstock.save, torch.save or safetensors")
    convert.add_argument(
        "destination", type=Path, metavar="B", help="penstock's: .safetensors; torch's: .pt, .pth, .bin"
    )


def _command(
    names: argparse._SubParsersAction[_Parser],
    name: str,
    command: Callable[[argparse.Namespace], Answer],
    summary: str,
    more: str | None = None,
) -> argparse.ArgumentParser:
    parser = names.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=command)
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    return parser


def _spill_dir(parser: argparse.ArgumentParser, purpose: str) -> None:
    parser.add_argument(
        "--spill-dir",
        type=Path,
        action="append",
        metavar="DIR",
        help=f"on the disk to {purpose}; repeated: striped over all; default: for temporary files",
    )


def _page_cache_budget(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--page-cache-budget",
        type=_size,
        default=0,
        metavar="SIZE",
        help="most bytes to spill to the page cache only, which is memory; default: %(default)s",
    )


def _script(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", metavar="SCRIPT.py:build", help="see below")


def _hardware(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hardware", type=Path, metavar="FILE", required=True, help="that `penstock probe` wrote"
    )


def _budget(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device-budget", type=_size, metavar="SIZE", required=True, help="such as 600MiB or 1.5GB"
    )


def _policy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--policy", choices=tuple(POLICIES), default="optimal", help="default: %(default)s")


def _liberties(parser: argparse.ArgumentParser, purpose: str = "", time_limit_s: float | None = 10.0) -> None:
    parser.add_argument(
        "--recompute", action="store_true", help=f"{purpose}tensors may be made anew instead of moved"
    )
    parser.add_argument(
        "--compress", action="store_true", help=f"{purpose}tensors may be moved compressed, without loss"
    )
    if time_limit_s is not None:
        parser.add_argument(
            "--time-limit",
            type=_seconds,
            default=time_limit_s,
            metavar="SECONDS",
            help=f"{purpose}to plan in; what is best then counts; default: %(default)g",
        )


def _written(parser: argparse.ArgumentParser, default: str, metavar: str = "FILE") -> None:
    parser.add_argument(
        "-o", "--output", type=Path, default=Path(default), metavar=metavar, help="default: %(default)s"
    )


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except InvalidSize as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _sizes(text: str) -> list[int]:
    return [_size(part) for part in text.split(",")]


def _counts(text: str) -> list[int]:
    return [_count(part, "disks") for part in text.split(",")]


def _rate(text: str) -> float:
    size = _size(text.strip().removesuffix("/s"))
    if size <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no rate: give one above zero, such as 3.2GB/s")
    return float(size)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds: give 0 or more")
    return seconds


def _count(text: str, what: str = "steps") -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of {what}: give 1 or more")
    return int(text)
