"""What is typed on the command line, as values: errors are those of argparse."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from penstock.errors import InvalidArgument
from penstock.options import fraction, read, whole_number
from penstock.units import parse_bytes


def parse(kind: str, text: str) -> Any:
    """Parse a value of a kind of PARSERS or `penstock.options`; "KIND,..." is a list of them."""
    if kind.endswith(",..."):
        return [parse(kind.removesuffix(",..."), part) for part in text.split(",")]
    try:
        return PARSERS[kind](text) if kind in PARSERS else read(kind, text)
    except ValueError as error:  # an InvalidArgument or InvalidSize
        raise argparse.ArgumentTypeError(str(error)) from error


def _rate(text: str) -> float:
    found = parse_bytes(text.strip().removesuffix("/s"))
    if found <= 0:
        raise InvalidArgument(f"{text!r} is not a rate: give one above zero, such as 3.2GB/s")
    return float(found)


def _place(text: str) -> Path | str:
    from penstock.storage.nvme.url import is_url

    return text if is_url(text) else Path(text)


def _directory(text: str) -> Path:
    if isinstance(_place(text), str):
        raise InvalidArgument(f"{text} is a remote drive: only probe and run spill to one")
    return Path(text)


PARSERS: dict[str, Callable[[str], Any]] = {
    "Rate": _rate,
    "Seconds": partial(fraction, what="number of seconds"),
    "Steps": partial(whole_number, what="number of steps", least=1),
    "Samples": partial(whole_number, what="number of samples", least=1),
    "Disks": partial(whole_number, what="number of disks", least=1),
    "Place": _place,
    "Directory": _directory,
    "Hardware": Path,
    "Plan": Path,
}


def metavar(kind: str) -> str:
    one, *more = kind.partition(",")
    return METAVARS.get(one, "NAME") + "".join(more)


METAVARS = {"Share": "SIZE|N%|auto", "Rate": "RATE", "Seconds": "SECONDS"}
METAVARS |= dict.fromkeys(("Path", "str | os.PathLike[str]", "Hardware", "Plan"), "FILE")
METAVARS |= dict.fromkeys(("Size", "Budget", "Endurance"), "SIZE")
METAVARS |= dict.fromkeys(("Steps", "Samples", "Disks", "Count", "Number", "Fraction", "MicroBatch"), "N")
