"""What can be typed: the commands and their options."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import penstock
from penstock.capture.roofline import DATA_SHEETS
from penstock.cli import commands, training
from penstock.cli.output import Answer
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
    probe.add_argument(
        "--spill-dir", type=Path, metavar="DIR", help="on the disk to measure; default: for temporary files"
    )
    probe.add_argument("--device", default="cpu", help="cpu, or cuda:0 and so on; default: %(default)s")
    probe.add_argument("--seconds", type=float, default=10.0, help="time it may take; default: %(default)g")
    _written(probe, "hardware.json")

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
    run.add_argument(
        "--spill-dir", type=Path, metavar="DIR", help="on the disk to use; default: for temporary files"
    )
    run.add_argument("--steps", type=_count, metavar="N", help="default: one for each batch")
    run.add_argument("--host-budget", type=_size, metavar="SIZE", help="pinned memory, for a model on a GPU")
    run.add_argument("--disk-budget", type=_size, metavar="SIZE", help="default: what is free")
    run.add_argument(
        "--hardware", type=Path, metavar="FILE", help="that `penstock probe` wrote; default: measure now"
    )
    _policy(run)
    _written(run, "penstock-run", "FOLDER")

    report = _command(names, "report", commands.report, "hold a run against its prediction, with a picture")
    report.add_argument("folder", type=Path, metavar="FOLDER", help="that `penstock run` wrote")
    report.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="the picture; default: picture.png in FOLDER"
    )
    return root


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
