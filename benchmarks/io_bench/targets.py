"""What is to be reached, and whether it is. Pure: from the document to verdicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from io_bench.adaptive import CHOICES
from io_bench.limit import LIMIT
from io_bench.rows import Spill, SpillWithPageCache
from penstock.units import format_bytes

SPILL, SPILL_CACHED = Spill.name, SpillWithPageCache.name
LARGE_BYTES = 3 << 20  # from here on the disk decides, below it what is done for each tensor
SMALL_BYTES = 1 << 20
TORCH, SAFETENSORS, PENSTOCK = "torch", "safetensors", "penstock"
# No libraries but the disk's own speed; and penstock itself.
NOT_OTHERS = (LIMIT, "fio", PENSTOCK)

Rows = Mapping[str, Mapping[str, Mapping[str, Any]]]


@dataclass(frozen=True)
class Target:
    """One figure that has to be reached everywhere it was measured.

    at        where it was measured: what it was there, and what it was compared with
    at_least  the bound is the least that will do; else it is the most
    """

    name: str
    bound: float
    at: Mapping[str, tuple[float, str]]
    at_least: bool = True

    @property
    def worst(self) -> str:
        """Where it is furthest from the bound."""
        choose: Callable[..., str] = min if self.at_least else max
        return choose(self.at, key=lambda where: self.at[where][0])

    @property
    def passed(self) -> bool:
        value = self.at[self.worst][0]
        return value >= self.bound if self.at_least else value <= self.bound

    def document(self) -> dict[str, Any]:
        return {
            "target": self.name,
            "bound": self.bound,
            "at_least": self.at_least,
            "worst": self.worst,
            "passed": self.passed,
            "at": {where: {"value": value, "compared": text} for where, (value, text) in self.at.items()},
        }


def targets(document: Mapping[str, Any]) -> list[Target]:
    """Those that the parts in ``document`` can tell of."""
    found = [
        *transfer_targets(document.get("transfers", {})),
        *checkpoint_targets(document.get("checkpoints", {})),
        *adaptive_targets(document.get("adaptive", {})),
    ]
    return [target for target in found if target.at]


def transfer_targets(sizes: Mapping[str, Any]) -> Iterator[Target]:
    rows_by_size: dict[int, Rows] = {int(size): part["rows"] for size, part in sizes.items()}
    large = {size: rows for size, rows in rows_by_size.items() if size >= LARGE_BYTES}
    small = {size: rows for size, rows in rows_by_size.items() if size <= SMALL_BYTES}
    for kind in ("write", "cold read"):
        yield Target(
            f"spill, {kind}: times the limit", 0.85, ratios(large, kind, [SPILL], begins_with(LIMIT))
        )
    yield Target("spill, write+fsync: times torch.save", 4, ratios(large, "write+fsync", [SPILL], [TORCH]))
    yield Target("spill, cold read: times torch.load", 1.7, ratios(large, "cold read", [SPILL], [TORCH]))
    for kind in ("write", "cold read"):
        cpu = {
            format_bytes(size): (rows[SPILL][kind]["median_cpu_s_per_gb"], "")
            for size, rows in large.items()
            if kind in rows.get(SPILL, {})
        }
        yield Target(f"spill, {kind}: CPU seconds per GB", 0.03, cpu, at_least=False)
    for kind in ("write", "write+fsync", "cold read", "warm read"):
        yield Target(
            f"spill up to 1 MiB, {kind}: times the best other",
            1,
            ratios(small, kind, [SPILL, SPILL_CACHED], others),
        )


def checkpoint_targets(part: Mapping[str, Any]) -> Iterator[Target]:
    rows = {part["bytes"]: part["rows"]} if part else {}
    yield Target(
        "checkpoint, save+fsync: times torch.save", 3, ratios(rows, "save+fsync", [PENSTOCK], [TORCH])
    )
    for kind in ("cold load", "warm load"):
        yield Target(
            f"checkpoint, {kind}, touched: times safetensors",
            1,
            ratios(rows, kind, [PENSTOCK], [SAFETENSORS]),
        )


def adaptive_targets(part: Mapping[str, Any]) -> Iterator[Target]:
    measured = {format_bytes(int(size)): compared for size, compared in part.get("sizes", {}).items()}
    if "step" in part:
        measured["a step"] = part["step"]
    for choice in CHOICES:
        at = {
            where: (compared["contenders"][choice]["speed_of_best_single"], best)
            for where, compared in measured.items()
            if (best := compared["best_single"].get(choice))
        }
        yield Target(f"{choice}: times the best single way", 0.97, at)


def ratios(
    rows_by_size: Mapping[int, Rows],
    kind: str,
    ours: Iterable[str],
    theirs: Iterable[str] | Callable[[str], bool],
) -> dict[str, tuple[float, str]]:
    """By size: our best median rate over theirs, and whose it was."""
    found = {}
    for size, rows in rows_by_size.items():
        rates = {name: kinds[kind]["median_bytes_per_s"] for name, kinds in rows.items() if kind in kinds}
        wanted = theirs if callable(theirs) else list(theirs).__contains__
        mine = [rates[name] for name in ours if name in rates]
        best = max((name for name in rates if wanted(name)), key=rates.__getitem__, default=None)
        if mine and best is not None:
            found[format_bytes(size)] = (max(mine) / rates[best], best)
    return found


def begins_with(start: str) -> Callable[[str], bool]:
    return lambda name: name.startswith(start)


def others(name: str) -> bool:
    return not name.startswith(NOT_OTHERS)
