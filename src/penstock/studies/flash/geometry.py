"""A drive as a pure value, and what can be said of it without simulating it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.errors import InvalidArgument

DAY_S = 86_400.0
YEAR_S = 365 * DAY_S


@dataclass(frozen=True, kw_only=True)
class Flash:
    """An SSD, or several that are written as one.

    capacity_bytes             what the host can address
    page_bytes                 the unit of programming
    pages_per_block            pages that are erased together, over all chips that work as one
    over_provisioning          flash that the host cannot address, over what it can
    drive_writes_per_day       how often its capacity may be written a day, for `warranty_years`
    warranty_years             for how long
    rated_write_amplification  flash writes for each of the host's under which the endurance is given. Makers
                               rate random writes of 4 KiB, at least 3.5 times as costly as sequential
                               ones (FlashNeuron section 3.4); 1 is the guaranteed minimum
    """

    capacity_bytes: int
    page_bytes: int = 16 * 1024
    pages_per_block: int = 256
    over_provisioning: float = 0.07
    drive_writes_per_day: float = 1.0
    warranty_years: float = 5.0
    rated_write_amplification: float = 1.0

    def __post_init__(self) -> None:
        for name in ("capacity_bytes", "page_bytes", "pages_per_block"):
            if getattr(self, name) <= 0:
                raise InvalidArgument(f"{name} is {getattr(self, name)}: a drive has some of it")
        if not self.over_provisioning > 0:
            raise InvalidArgument(
                f"over_provisioning is {self.over_provisioning}: without spare flash nothing can be "
                "collected; drives have 0.07 and more"
            )
        for name in ("drive_writes_per_day", "warranty_years"):
            if not getattr(self, name) > 0:
                raise InvalidArgument(f"{name} is {getattr(self, name)}: take it from the drive's data sheet")
        if not self.rated_write_amplification >= 1:
            raise InvalidArgument(
                f"rated_write_amplification is {self.rated_write_amplification}: it is 1 or more"
            )

    @property
    def flash_bytes(self) -> int:
        """All of its flash, spare included."""
        return round(self.capacity_bytes * (1 + self.over_provisioning))

    @property
    def endurance_bytes(self) -> float:
        """Host bytes that may be written in its life, with a write amplification of 1."""
        days = self.warranty_years * 365
        return self.drive_writes_per_day * days * self.capacity_bytes * self.rated_write_amplification


def lifetime_s(
    flash: Flash,
    write_bytes_per_s: float,
    *,
    write_fraction: float = 1.0,
    write_amplification: float = 1.0,
) -> float:
    """Seconds until the drive's endurance is used up; infinite where nothing is written.

    FlashNeuron section 3.4 and G10 section 7.7 estimate it so, with a drive that is written at its full
    rate half of the time.

    write_bytes_per_s    while it is written
    write_fraction       of the time
    write_amplification  flash writes for each of the host's
    """
    if not 0 <= write_fraction <= 1:
        raise InvalidArgument(f"write_fraction is {write_fraction}: it is a part of the time, 0 to 1")
    if not write_amplification >= 1:
        raise InvalidArgument(f"write_amplification is {write_amplification}: it is 1 or more")
    if not write_bytes_per_s >= 0:
        raise InvalidArgument(f"write_bytes_per_s is {write_bytes_per_s}: it is 0 or more")
    used_bytes_per_s = write_bytes_per_s * write_fraction * write_amplification
    return flash.endurance_bytes / used_bytes_per_s if used_bytes_per_s > 0 else math.inf


def uniform_write_amplification(over_provisioning: float) -> float:
    """Flash writes for each page of the host's, where pages are rewritten uniformly at random.

    For a large drive that collects its oldest block (Desnoyers, SYSTOR 2012). A block of the share u of
    valid pages is collected after the drive's flash times 1 - u has been written, so that with alpha
    flash pages for each logical one u = exp(-alpha (1 - u)); every collection gains 1 - u of a block.
    Greedy collection is a little better, and comes to the same for large blocks.
    """
    if not over_provisioning > 0:
        raise InvalidArgument(f"over_provisioning is {over_provisioning}: it is above 0")
    alpha = 1 + over_provisioning
    low, high = 0.0, 1.0 - 1e-12  # u = 1 solves it too: that is a drive that never gains anything
    for _ in range(200):
        middle = (low + high) / 2
        if math.exp(-alpha * (1 - middle)) > middle:
            low = middle
        else:
            high = middle
    return 1 / (1 - low)
