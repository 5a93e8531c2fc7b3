"""The machine as a pure value: how much each tier holds and how fast each link is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from penstock.core import files
from penstock.errors import InvalidArgument

TIERS = ("device", "host", "disk")
LINKS = ("device_to_host", "host_to_device", "disk_write", "disk_read")


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Capacities in bytes, rates in bytes per second, latencies in seconds.

    On a CPU the device is the RAM budget, there is no host tier (``host_bytes=0``, host rates
    0) and the disk is the next tier, reached directly (``disk_shares_bus=False``).

    disk_shares_bus   disk traffic also crosses the link between device and host
    duplex            rate of a disk link while the other direction is busy, over its rate alone
    measured_rates    by link: (transfer bytes, bytes per second) pairs, ascending by bytes;
                      where present they take the place of the link's rate and latency
    name              what this describes, for people
    """

    device_bytes: int
    host_bytes: int = 0
    disk_bytes: int = 0
    device_to_host_bytes_per_s: float = 0.0
    host_to_device_bytes_per_s: float = 0.0
    disk_read_bytes_per_s: float = 0.0
    disk_write_bytes_per_s: float = 0.0
    device_to_host_latency_s: float = 0.0
    host_to_device_latency_s: float = 0.0
    disk_read_latency_s: float = 0.0
    disk_write_latency_s: float = 0.0
    disk_shares_bus: bool = True
    duplex: float = 1.0
    measured_rates: Mapping[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    name: str = ""

    def __post_init__(self) -> None:
        for tier in TIERS:
            if self.capacity_bytes(tier) < 0:
                raise InvalidArgument(f"{tier}_bytes is negative: {self.capacity_bytes(tier)}")
        if not 0 < self.duplex <= 1:
            raise InvalidArgument(f"duplex is {self.duplex}: it is a fraction above 0 and up to 1")
        for link in self.measured_rates:
            if link not in LINKS:
                raise InvalidArgument(f"measured_rates names the link {link!r}: links are {', '.join(LINKS)}")

    def capacity_bytes(self, tier: str) -> int:
        return int(getattr(self, f"{tier}_bytes"))

    def rate_bytes_per_s(self, link: str) -> float:
        return float(getattr(self, f"{link}_bytes_per_s"))

    def transfer_s(self, link: str, size_bytes: int) -> float:
        """Seconds that ``size_bytes`` take on ``link`` when nothing else uses it."""
        if size_bytes == 0:
            return 0.0
        if points := self.measured_rates.get(link):
            sizes = np.log([size for size, _ in points])
            seconds = [size / rate for size, rate in points]
            if size_bytes >= points[-1][0]:
                return size_bytes / points[-1][1]
            if size_bytes <= points[0][0]:
                return seconds[0]
            return float(np.exp(np.interp(np.log(size_bytes), sizes, np.log(seconds))))
        rate = self.rate_bytes_per_s(link)
        if rate <= 0:
            raise InvalidArgument(f"the link {link} has no rate: give {link}_bytes_per_s")
        return float(getattr(self, f"{link}_latency_s")) + size_bytes / rate

    def evict_links(self, tier: str) -> tuple[str, ...]:
        """The links a copy from the device to ``tier`` occupies."""
        if tier == "host":
            return ("device_to_host",)
        return ("device_to_host", "disk_write") if self.disk_shares_bus else ("disk_write",)

    def prefetch_links(self, tier: str) -> tuple[str, ...]:
        """The links a copy from ``tier`` to the device occupies."""
        if tier == "host":
            return ("host_to_device",)
        return ("host_to_device", "disk_read") if self.disk_shares_bus else ("disk_read",)

    def evict_s(self, tier: str, size_bytes: int) -> float:
        """Seconds to copy from the device to ``tier``: the slowest link on the way decides."""
        return max(self.transfer_s(link, size_bytes) for link in self.evict_links(tier))

    def prefetch_s(self, tier: str, size_bytes: int) -> float:
        """Seconds to copy from ``tier`` to the device: the slowest link on the way decides."""
        return max(self.transfer_s(link, size_bytes) for link in self.prefetch_links(tier))

    def save(self, path: str | Path) -> None:
        """Write to ``path`` as versioned JSON."""
        files.save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Hardware:
        """Read what `save` wrote. Raises InvalidFile where it is something else."""
        return files.load(cls, path)
