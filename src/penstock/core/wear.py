"""How fast training uses up the endurance of a disk."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.units import format_decimal_bytes, format_lifetime

DAY_S = 86_400.0


@dataclass(frozen=True, kw_only=True)
class DiskWear:
    """What one step writes to the disk, where step follows step without a pause.

    Both are bytes of the host, as the endurance on a data sheet (TBW) is. Spilled tensors are large and
    overwrite the same extents in the same order, so the drive itself writes hardly more than that.

    endurance_bytes   that may be written in the disk's life; None where it is not known
    """

    written_bytes: int
    step_s: float
    endurance_bytes: int | None = None

    @property
    def written_bytes_per_day(self) -> float:
        return self.written_bytes / self.step_s * DAY_S if self.step_s > 0 else 0.0

    @property
    def lifetime_s(self) -> float | None:
        """Seconds until the endurance is used up; None where it is not known, or nothing is written."""
        if self.endurance_bytes is None or not self.written_bytes_per_day:
            return None
        return self.endurance_bytes / self.written_bytes_per_day * DAY_S

    def __str__(self) -> str:
        if not self.written_bytes_per_day:
            return "nothing is written to the disk"
        text = f"{format_decimal_bytes(self.written_bytes_per_day)} written a day"
        if self.lifetime_s is None or self.endurance_bytes is None:
            return text
        endurance = format_decimal_bytes(self.endurance_bytes)
        return f"{text}: an endurance of {endurance} lasts {format_lifetime(self.lifetime_s)}"
