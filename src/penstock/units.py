"""Sizes, times and rates as people write and read them.

GB is 10**9 bytes; GiB is 2**30, and so are G and Gi, as torch and Slurm have them.
"""

from __future__ import annotations

import math
import operator
import re

from penstock.errors import InvalidSize

_FACTORS = {"b": 1}
for _power, _letter in enumerate("kmgtp", 1):
    _FACTORS |= {f"{_letter}b": 10 ** (3 * _power)}
    _FACTORS |= dict.fromkeys((_letter, f"{_letter}i", f"{_letter}ib"), 2 ** (10 * _power))
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*)\s*")
_SHARE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*")

AUTO = "auto"
AUTO_SHARE = 0.9  # of what is free: the rest is for contexts, workers that load data, and other programs


def parse_bytes(size: int | str) -> int:
    """Bytes in ``size``: an integer, or text such as ``"600MiB"``, ``"1.5 GB"``, ``"8G"`` or ``"4096"``.

    Raises InvalidSize where the text is no size, or the size is negative.
    """
    if not isinstance(size, str | bool) and hasattr(size, "__index__"):
        size = operator.index(size)  # NumPy's integers, too
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise InvalidSize(f"{size!r} is not a size: give bytes as an integer, or text such as '600MiB'")
    if isinstance(size, int):
        if size < 0:
            raise InvalidSize(f"{size} bytes is negative: give a size of zero or more")
        return size
    match = _SIZE.fullmatch(size)
    factor = _FACTORS.get(match[2].lower() or "b") if match else None
    if match is None or factor is None:
        raise InvalidSize(
            f"{size!r} is not a size: write a number and one of B, kB, MB, GB, TB, PB, KiB, MiB, GiB, TiB, "
            "PiB, such as '600MiB' or '1.5GB'"
        )
    return math.ceil(float(match[1]) * factor)


def parse_budget(size: int | str) -> int:
    """Bytes in a budget. As `parse_bytes`, but that a text of less than 1 MiB needs a unit."""
    if isinstance(size, str) and (size.strip() == AUTO or _SHARE.fullmatch(size)):
        raise InvalidSize(f"{size!r} is of a machine's memory, and only a run asks for that: write 8GiB")
    found, number = parse_bytes(size), str(size).strip()
    if isinstance(size, str) and 0 < found < 1 << 20 and not number[-1].isalpha():
        raise InvalidSize(f"{size!r} has no unit: {counted(found, 'byte')}? Write {number}GiB or {number}MiB")
    return found


def parse_share(size: int | str) -> int | str:
    """A budget: bytes, or ``"auto"``, or a share of a memory such as ``"50%"``."""
    if isinstance(size, str) and size.strip() == AUTO:
        return AUTO
    if not isinstance(size, str) or (share := _SHARE.fullmatch(size)) is None:
        return parse_budget(size)
    if not 0 < float(share[1]) <= 100:
        raise InvalidSize(f"{size!r} is not a share: give more than 0 %, and 100 % at most")
    return f"{share[1]}%"


def share_bytes(budget: int | str, total_bytes: int, free_bytes: int) -> int:
    """Bytes of what `parse_share` found, of a memory that has so many, of which so many are free."""
    if isinstance(budget, int):
        return budget
    return int(AUTO_SHARE * free_bytes if budget == AUTO else total_bytes * float(budget[:-1]) / 100)


def parse_endurance(size: int | str) -> int:
    """Bytes that may be written to a drive in its life: ``"600TBW"`` as on its data sheet, or any size.

    Raises InvalidSize where the text is no size or has no unit, or the size is not above zero.
    """
    text = (
        re.sub(r"(?<=[kMGTP]B)W$", "", size.strip(), flags=re.IGNORECASE) if isinstance(size, str) else size
    )
    found = parse_bytes(text)
    if found == 0:
        raise InvalidSize(
            "an endurance of 0 bytes is none: take it from the drive's data sheet, such as '600TBW'"
        )
    if isinstance(text, str) and not text[-1:].isalpha():
        raise InvalidSize(f"{size!r} has no unit: {counted(found, 'byte')}? Write {text}TBW")
    return found


def format_bytes(size_bytes: float) -> str:
    """``size_bytes`` in the largest binary unit that keeps it at or above one: ``"1.50 GiB"``."""
    value, units = float(size_bytes), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while abs(value) >= 1024 and len(units) > 1:
        value /= 1024
        del units[0]
    unit = units[0]
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.{1 if abs(value) >= 100 else 2}f} {unit}"


def format_bytes_up(size_bytes: int) -> str:
    """Like format_bytes, never below ``size_bytes``: for amounts that are required."""
    text = format_bytes(size_bytes)
    if parse_bytes(text) >= size_bytes:
        return text
    number, unit = text.split()
    digits = len(number.partition(".")[2])
    return f"{float(number) + 10**-digits:.{digits}f} {unit}"


def format_rate(rate_bytes_per_s: float) -> str:
    """A rate in decimal units, as storage vendors state it: ``"3.20 GB/s"``."""
    return f"{format_decimal_bytes(rate_bytes_per_s, largest='GB')}/s"


def format_decimal_bytes(size_bytes: float, largest: str = "PB") -> str:
    """``size_bytes`` in decimal units up to ``largest``, as storage vendors state them: ``"1.85 TB"``."""
    units = ["kB", "MB", "GB", "TB", "PB"]
    for unit in reversed(units[: units.index(largest) + 1]):
        if size_bytes >= _FACTORS[unit.lower()]:
            return f"{size_bytes / _FACTORS[unit.lower()]:.2f} {unit}"
    return f"{size_bytes:.0f} B"


def counted(number: int, noun: str) -> str:
    """``"1 step"``, ``"1,200 steps"``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_lifetime(time_s: float) -> str:
    """How long a thing lasts: ``"3.2 years"``, ``"41 days"``, ``"5 hours"``."""
    hours = time_s / 3600
    if hours >= 24 * 365:
        return f"{hours / 24 / 365:.1f} years"
    return f"{hours / 24:.0f} days" if hours >= 48 else f"{hours:.0f} hours"


def format_seconds(time_s: float) -> str:
    """A duration: ``"1.24 s"``, ``"310 ms"``, ``"42 us"``."""
    if abs(time_s) >= 0.9995:  # what would round to 1000 ms
        return f"{time_s:.2f} s"
    if abs(time_s) >= 0.9995e-3:
        return f"{time_s * 1e3:.3g} ms"
    return f"{time_s * 1e6:.3g} us"
