"""Is the disk fast enough? One sentence about the cells of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from penstock.report.sweep import NEAR, Case, Cell, disk_rates
from penstock.units import format_bytes, format_rate, format_seconds


def verdict(cells: Sequence[Cell]) -> str:
    """The sentence. A disk is fast enough where one that never keeps the plan waiting would hardly help."""
    planned = [cell for cell in cells if cell.summary is not None]
    if not planned:
        return "No plan fits any of these machines: raise the budget, the host memory or the disks."
    using = [cell for cell in planned if cell.uses_disk]
    if not using:
        return "The disk is not needed: device and host memory carry every one of these plans."
    aside = f", and not needed in {len(planned) - len(using)} more" if len(planned) > len(using) else ""
    enough = [cell for cell in using if cell.disk_is_enough]
    if len(enough) == len(using):
        where = "the one case that uses it" if len(using) == 1 else f"all {len(using)} cases that use it"
        return (
            f"Yes, the disk is fast enough in {where}{aside}: a faster one would save less than "
            f"{(NEAR - 1) * 100:.0f} % of the step."
        )
    if not enough:
        best = min(using, key=_lost)
        assert best.summary is not None
        where = (
            "the one case that uses it" if len(using) == 1 else f"any of the {len(using)} cases that use it"
        )
        over = "" if best.summary.over_ideal is None else f", {best.summary.over_ideal:.2f} x the ideal"
        step = f"{format_seconds(best.summary.predicted_s)}{over}"
        return (
            f"No, the disk is not fast enough in {where}{aside}: at best, with {_disks(best.case)}"
            f"{_places([best.case], cells)[0]}, the step takes {step}, and a disk that never kept it "
            f"waiting would make it {format_seconds(best.fast_disk_s)}."
        )
    return (
        f"It depends: the disk is fast enough in {len(enough)} of {len(using)} cases that use it{aside}; "
        f"{_thresholds(using, cells)}."
    )


def _thresholds(using: Sequence[Cell], cells: Sequence[Cell]) -> str:
    """How many disks are enough, and for what: fewest disks first."""
    found: dict[tuple[bool, float, str], list[Case]] = {}

    def machine(cell: Cell) -> tuple[str, int, int]:
        return (cell.case.label, cell.case.hardware.host_bytes, cell.case.budget_bytes)

    for _, group in groupby(sorted(using, key=machine), key=machine):
        row = sorted(group, key=lambda cell: cell.case.disks)
        enough = [cell for cell in row if cell.disk_is_enough]
        case = enough[0].case if enough else row[-1].case
        found.setdefault((not enough, case.disks, _disks(case)), []).append(case)
    parts = []
    for lacking, count, disks in sorted(found):
        places = " and".join(_places(found[lacking, count, disks], cells))
        verb = "is" if count == 1 else "are"
        parts.append(f"{f'even {disks} {verb} not' if lacking else f'{disks} {verb} enough'}{places}")
    return "; ".join(parts)


def _places(cases: Sequence[Case], cells: Sequence[Cell]) -> list[str]:
    """What tells these cases from the others, apart from their disks: budgets together where they can be."""

    def rest(case: Case) -> tuple[str, int]:
        return (case.label, case.hardware.host_bytes)

    places = []
    for _, group in groupby(sorted(cases, key=rest), key=rest):
        same = sorted(group, key=lambda case: case.budget_bytes)
        place = f" for {same[0].label}" if len({cell.case.label for cell in cells}) > 1 else ""
        if len({cell.case.budget_bytes for cell in cells}) > 1:
            place += " in " + " or ".join(format_bytes(case.budget_bytes) for case in same)
        if len({cell.case.hardware.host_bytes for cell in cells}) > 1:
            host = same[0].hardware.host_bytes
            place += f" with {format_bytes(host)} of host memory" if host else " without host memory"
        places.append(place)
    return places


def _disks(case: Case) -> str:
    """``"2 disks (6.40 GB/s)"``: the slower of its two rates."""
    count = f"{case.disks:g} disk{'' if case.disks == 1 else 's'}"
    return f"{count} ({format_rate(min(disk_rates(case.hardware)))})"


def _lost(cell: Cell) -> float:
    """The time over what a disk that is no hindrance would make it."""
    assert cell.summary is not None
    return cell.summary.predicted_s / cell.fast_disk_s if cell.fast_disk_s else 1.0
