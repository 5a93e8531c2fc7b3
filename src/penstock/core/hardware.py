"""The machine as a pure value: how much each tier holds and how fast each link is."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from penstock.core import files
from penstock.core.tables import html_table
from penstock.errors import InvalidArgument
from penstock.options import LOSSY
from penstock.units import format_bytes, format_rate

TIERS = ("device", "host", "disk")
MOST_BYTES = 2**62  # beyond, a number is a mistake, and sums of bytes would not be exact
LINKS = ("device_to_host", "host_to_device", "disk_write", "disk_read")
CODERS = ("compress", "expand")  # have rates as links do


@dataclass(frozen=True, kw_only=True)
class Hardware(files.Saveable):
    """Capacities in bytes, rates in bytes per second, latencies in seconds.

    On a CPU the device is the RAM budget. The host is memory beside it, where there is such a tier
    (else ``host_bytes=0``), and the disk is reached directly (``disk_shares_bus=False``).

    disk_shares_bus   disk traffic also crosses the link between device and host. Where both a disk
                      and a host transfer use it in one direction, the disk's gets its own rate, but at
                      most half of the link's, and the other the rest
    duplex            rate of a disk link while the other direction is busy, over its rate alone
    compress_bytes_per_s, expand_bytes_per_s   uncompressed bytes that the device turns into
                      bitmask-CSR, or back, while it computes nothing else; defaults: about what the
                      memory of a data-center GPU allows
    measured_codecs   by lossy codec: float32 bytes per second that the device turns into it, and back
    copy_overhead_s, byte_overhead_s   seconds that kernels lose to each copy, out or back, and to each byte
                      of it: the runtime works on the thread that runs them, and I/O on their cores and
                      memory, or in what a virtual machine shares with its host; 0 where not known
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
    compress_bytes_per_s: float = 600e9
    expand_bytes_per_s: float = 900e9
    disk_shares_bus: bool = True
    duplex: float = 1.0
    copy_overhead_s: float = 0.0
    byte_overhead_s: float = 0.0
    measured_rates: Mapping[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    measured_codecs: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    name: str = ""

    def __post_init__(self) -> None:
        self._require([f"{tier}_bytes" for tier in TIERS], 0, MOST_BYTES, f"0 to {MOST_BYTES} bytes")
        of_links = [f"{link}_bytes_per_s" for link in LINKS]
        self._require(of_links, 0, math.inf, "a rate above 0, or 0 for no link")
        of_coders = [f"{coder}_bytes_per_s" for coder in CODERS]
        self._require(of_coders, sys.float_info.min, math.inf, "a rate above 0")
        times = [*(f"{link}_latency_s" for link in LINKS), "copy_overhead_s", "byte_overhead_s"]
        self._require(times, 0, sys.float_info.max, "seconds, 0 or more")
        for codec, rates in self.measured_codecs.items():
            if codec not in LOSSY or not all(rate > 0 for rate in rates):
                raise InvalidArgument(
                    f"measured_codecs has {codec!r} at {rates}: give rates above 0 for {' or '.join(LOSSY)}"
                )
        if not 0 < self.duplex <= 1:
            raise InvalidArgument(f"duplex is {self.duplex}: it is a fraction above 0 and up to 1")
        for link, points in self.measured_rates.items():
            if link not in LINKS:
                raise InvalidArgument(f"measured_rates names the link {link!r}: links are {', '.join(LINKS)}")
            sizes = [size for size, _ in points]
            if any(size <= 0 for size in sizes) or sizes != sorted(set(sizes)):
                raise InvalidArgument(
                    f"measured_rates of {link} are for {sizes} bytes: give sizes that ascend"
                )
            if not all(0 < rate < math.inf for _, rate in points):
                raise InvalidArgument(
                    f"measured_rates of {link} are {[rate for _, rate in points]}: give rates above 0"
                )

    def _require(self, names: Sequence[str], least: float, most: float, remedy: str) -> None:
        for name in names:
            if not least <= (value := getattr(self, name)) <= most:
                raise InvalidArgument(f"{name} is {value}: give {remedy}")

    def __repr__(self) -> str:
        return f"<penstock.Hardware {self.name or 'without a name'}: {self.in_numbers}>"

    def _repr_html_(self) -> str:
        """In a notebook."""
        rows = [(tier, format_bytes(size)) for tier in TIERS if (size := self.capacity_bytes(tier))]
        rows += [
            (link.replace("_", " "), format_rate(rate))
            for link in LINKS
            if (rate := self.rate_bytes_per_s(link))
        ]
        return html_table(rows, title=f"penstock hardware: {self.name or 'without a name'}")

    def codec_rates(self, codec: str) -> tuple[float, float]:
        """Uncompressed bytes per second that the device turns into the codec, and back. Raises
        InvalidArgument where that was not measured."""
        if codec not in LOSSY:
            return self.compress_bytes_per_s, self.expand_bytes_per_s
        if codec not in self.measured_codecs:
            raise InvalidArgument(
                f"the hardware does not say how fast {codec} is: measure it with penstock.probe"
            )
        return self.measured_codecs[codec]

    @property
    def in_numbers(self) -> str:
        """What each tier holds, and the rate of each link that there is, for people."""
        tiers = ", ".join(f"{tier} {format_bytes(self.capacity_bytes(tier))}" for tier in TIERS)
        links = ", ".join(
            f"{link.replace('_', ' ')} {format_rate(self.rate_bytes_per_s(link))}"
            for link in LINKS
            if self.rate_bytes_per_s(link) > 0
        )
        return f"{tiers}; {links}"

    def require_rates(self) -> None:
        """Raise InvalidArgument where a tier has room, but a link there or back has no rate."""
        for tier in TIERS[1:]:
            if self.capacity_bytes(tier) > 0 and (missing := self._without_rate(tier)):
                raise InvalidArgument(
                    f"{tier} cannot be reached: {' and '.join(f'{link}_bytes_per_s' for link in missing)} "
                    f"{'are' if len(missing) > 1 else 'is'} 0. Give a rate, or {tier}_bytes=0 to leave it out"
                )

    def reaches(self, tier: str) -> bool:
        """Whether the links there and back have rates."""
        return not self._without_rate(tier)

    def _without_rate(self, tier: str) -> list[str]:
        return [
            link
            for link in dict.fromkeys((*self.evict_links(tier), *self.prefetch_links(tier)))
            if not self.measured_rates.get(link) and self.rate_bytes_per_s(link) <= 0
        ]

    def capacity_bytes(self, tier: str) -> int:
        return int(getattr(self, f"{tier}_bytes"))

    def rate_bytes_per_s(self, link: str) -> float:
        return float(getattr(self, f"{link}_bytes_per_s"))

    def transfer_s(self, link: str, size_bytes: int) -> float:
        """Seconds that ``size_bytes`` take on ``link`` when nothing else uses it; or to be compressed, or
        expanded, where that is a key of CODERS."""
        if size_bytes == 0:
            return 0.0
        if link in CODERS:
            return size_bytes / self.rate_bytes_per_s(link)
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

    def overhead_s(self, size_bytes: int) -> float:
        """Seconds that kernels lose to one copy of so many bytes."""
        return self.copy_overhead_s + size_bytes * self.byte_overhead_s

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
        """Seconds to copy from the device to ``tier``: its slowest link decides."""
        return max(self.transfer_s(link, size_bytes) for link in self.evict_links(tier))

    def prefetch_s(self, tier: str, size_bytes: int) -> float:
        """Seconds to copy from ``tier`` to the device: its slowest link decides."""
        return max(self.transfer_s(link, size_bytes) for link in self.prefetch_links(tier))

    def scaled(self, factors: Mapping[str, float]) -> Hardware:
        """The same machine with ``factors`` times the rates of some links or coders, by name."""
        rates: dict[str, Any] = {
            f"{link}_bytes_per_s": self.rate_bytes_per_s(link) * factor for link, factor in factors.items()
        }
        measured = {
            link: tuple((size, rate * factors.get(link, 1.0)) for size, rate in points)
            for link, points in self.measured_rates.items()
        }
        return replace(self, **rates, measured_rates=measured)

    def slowness(self, link: str, spans: Sequence[tuple[float, float, int]]) -> float:
        """How many times as long as here, one after the other, ``spans`` took on the link: start and end in
        seconds, and bytes, of each transfer. 0 where there is none."""
        sizes = Counter(size_bytes for _, _, size_bytes in spans)
        alone_s = sum(count * self.transfer_s(link, size_bytes) for size_bytes, count in sizes.items())
        took_s = busy_s((start_s, end_s) for start_s, end_s, _ in spans)
        return took_s / alone_s if alone_s > 0 else 0.0


def busy_s(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds in which at least one of the spans, from its start to its end, took place."""
    total_s, until_s = 0.0, -math.inf
    for start_s, end_s in sorted(spans):
        total_s += max(0.0, end_s - max(start_s, until_s))
        until_s = max(until_s, end_s)
    return total_s
