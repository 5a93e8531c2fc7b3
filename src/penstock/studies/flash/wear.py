"""What a plan's writes to the disk do to the drive."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from penstock.core.columns import IntArray
from penstock.core.memory_profile import EVERY, copies_made, rows_of
from penstock.core.plan import Plan
from penstock.core.trace import Trace
from penstock.errors import InvalidArgument, SpillSpaceFull
from penstock.studies.flash.drive import Drive
from penstock.studies.flash.geometry import YEAR_S, Flash, lifetime_s

LAYOUTS = ("sequential", "scattered")
SEED = 0

# A drive is simulated with so many logical pages, and blocks of so many: enough for its write
# amplification to settle within a percent or two.
_PAGES = 1 << 15
_PAGES_PER_BLOCK = 64
_PASSES = 4  # of the flash, before anything is counted, and again while it is


@dataclass(frozen=True, kw_only=True)
class Wear:
    """What training does to a drive.

    written_bytes_per_iteration  by the host
    write_amplification          flash writes for each of the host's
    write_bytes_per_s            by the host, over the whole iteration
    lifetime_s                   until the drive's endurance is used up
    """

    written_bytes_per_iteration: int
    write_amplification: float
    write_bytes_per_s: float
    lifetime_s: float

    @property
    def lifetime_years(self) -> float:
        return self.lifetime_s / YEAR_S


def wear(
    trace: Trace,
    plan: Plan,
    flash: Flash,
    *,
    iteration_s: float | None = None,
    layout: str = "sequential",
    filled: float = 0.0,
) -> Wear:
    """What it does to a drive to train with ``plan`` without a pause.

    iteration_s   time of an iteration; the plan's prediction where not given
    layout        "sequential": extents lie one after the other in the order in which they are written, and
                  the next iteration writes over them in the same order (FlashNeuron figure 11).
                  "scattered": the same bytes as pages at random places, as a pager leaves them
    filled        share of the capacity, besides the plan's extents, that holds other data, at rest
    """
    if layout not in LAYOUTS:
        raise InvalidArgument(f"there is no layout {layout!r}: choose from {', '.join(LAYOUTS)}")
    if not 0 <= filled < 1:
        raise InvalidArgument(f"filled is {filled}: it is a share of the capacity, from 0 to less than 1")
    taken_s = plan.predicted_s if iteration_s is None else iteration_s
    if not taken_s > 0:
        raise InvalidArgument("the plan predicts no time for an iteration: give iteration_s")
    written = written_bytes(trace, plan)
    total = int(written.sum())
    if total > (1 - filled) * flash.capacity_bytes:
        raise SpillSpaceFull(
            f"an iteration writes {total} bytes, and {1 - filled:.0%} of a drive of {flash.capacity_bytes} "
            "bytes is free: take a larger drive, or free some of this one"
        )
    amplification = _amplification(flash, total, layout, filled)
    rate = total / taken_s
    return Wear(
        written_bytes_per_iteration=total,
        write_amplification=amplification,
        write_bytes_per_s=rate,
        lifetime_s=lifetime_s(flash, rate, write_amplification=amplification),
    )


def written_bytes(trace: Trace, plan: Plan) -> IntArray:
    """[W] bytes of each copy that every iteration writes to the disk, in the order of the writes."""
    rows = rows_of(trace, plan.evictions)
    made = np.array(copies_made(trace, plan.evictions), dtype=np.int64)
    to_disk = np.array([evict.tier == "disk" for evict in plan.evictions], dtype=np.bool_)
    chosen = np.flatnonzero(to_disk & (made == EVERY))
    order = np.argsort(rows.after[chosen], kind="stable")
    sizes: IntArray = rows.moved_bytes[chosen][order]
    return sizes


def _amplification(flash: Flash, total_bytes: int, layout: str, filled: float) -> float:
    """Of rewriting ``total_bytes`` over and over, on a drive scaled down to `_PAGES` logical pages."""
    if total_bytes == 0:
        return 1.0
    scaled = replace(flash, capacity_bytes=_PAGES, page_bytes=1, pages_per_block=_PAGES_PER_BLOCK)
    drive = Drive(scaled)
    used = min(max(round(total_bytes / flash.capacity_bytes * _PAGES), 1), _PAGES)
    other = min(round(filled * _PAGES), _PAGES - used)
    drive.write_extent(_PAGES - other, _PAGES)
    generator = np.random.default_rng(SEED)

    def write(pages: int) -> None:
        if layout == "scattered":
            drive.write(generator.integers(0, used, size=pages))
        else:
            for _ in range(max(round(pages / used), 1)):
                drive.write_extent(0, used)

    write(_PASSES * _PAGES)
    drive.reset_counters()
    write(_PASSES * _PAGES)
    return drive.write_amplification
