"""What is typed for an option, read. What cannot be is said as argparse says it."""

from __future__ import annotations

import argparse

from penstock.errors import InvalidSize
from penstock.units import parse_bytes


def size(text: str) -> int:
    try:
        return parse_bytes(text)
    except InvalidSize as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def sizes(text: str) -> list[int]:
    return [size(part) for part in text.split(",")]


def counts(text: str) -> list[int]:
    return [count(part, "disks") for part in text.split(",")]


def rate(text: str) -> float:
    found = size(text.strip().removesuffix("/s"))
    if found <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no rate: give one above zero, such as 3.2GB/s")
    return float(found)


def seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds: give 0 or more")
    return found


def count(text: str, what: str = "steps") -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of {what}: give 1 or more")
    return int(text)


def samples_count(text: str) -> int:
    return count(text, "samples")
