"""What can be typed: the commands and their options."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import penstock
from penstock.capture.roofline import DATA_SHEETS
from penstock.cli import checkpoint, commands, training
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

    plan = _command(names, "plan", commands.plan, "decide what leaves the device, and predict the step")
    plan.add_argument("trace", type=Path, metavar="TRACE", help="file that `penstock trace` wrote")
    _hardware(plan)
    _budget(plan)
    _policy(plan)
    _written(plan, "plan.json")

    simulate = _command(names, "simulate", commands.simulate, "judge a plan, and replay it event by event")
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

    report = _command(names, "report", commands.report, "hold a run against its prediction, with a picture")
    report.add_argument("folder", type=Path, metavar="FOLDER", help="that `penstock run` wrote")
    report.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="the picture; default: picture.png in FOLDER"
    )

    _checkpoint(names)
    return root


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
    parser.add_argument("--policy", choices=("auto", *POLICIES), default="auto", help="default: %(default)s")


def _written(parser: argparse.ArgumentParser, default: str, metavar: str = "FILE") -> None:
    parser.add_argument(
        "-o", "--output", type=Path, default=Path(default), metavar=metavar, help="default: %(default)s"
    )


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except InvalidSize as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of steps: give 1 or more")
    return int(text)
