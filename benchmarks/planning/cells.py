"""The cells of G10's figures 11, 15, 16 and 18, with the settings of its artifact."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from artifact.published import trace as published_trace

import penstock

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
SHIPPED = ROOT / "tests" / "data" / "g10"  # three of the thirty traces, and all published times
SHARED = ROOT.parent / "shared" / "data" / "g10"
DATA = Path(os.environ.get("PENSTOCK_G10_DATA", SHARED if SHARED.exists() else SHIPPED))

# What the artifact of the paper sets, where a figure does not say otherwise.
GPU_GIB = 40
HOST_GIB = 128
SSD_GIB_PER_S = 3.2
PCIE_GIB_PER_S = 15.754
SSD_READ_S = 12e-6
SSD_WRITE_S = 16e-6


@dataclass(frozen=True)
class Cell:
    """One bar or point of a figure.

    published_s   by the artifact's name of the policy: seconds an iteration, None where it failed
    """

    figure: int
    model: str
    host_gib: float
    ssd_gib_per_s: float
    pcie_gib_per_s: float
    published_s: Mapping[str, float | None]

    @property
    def key(self) -> str:
        """Cells with the same key are the same problem."""
        return (
            f"{self.model}, host {self.host_gib:g}, SSD {self.ssd_gib_per_s:g}, PCIe {self.pcie_gib_per_s:g}"
        )

    def hardware(self) -> penstock.Hardware:
        """The machine that the artifact's planner is told of; see `planning.published.simulated_on`."""
        return penstock.Hardware(
            device_bytes=GPU_GIB * GIB,
            host_bytes=int(self.host_gib * GIB),
            disk_bytes=16 << 40,
            device_to_host_bytes_per_s=self.pcie_gib_per_s * GIB,
            host_to_device_bytes_per_s=self.pcie_gib_per_s * GIB,
            disk_read_bytes_per_s=self.ssd_gib_per_s * GIB,
            disk_write_bytes_per_s=self.ssd_gib_per_s * GIB,
            disk_read_latency_s=SSD_READ_S,
            disk_write_latency_s=SSD_WRITE_S,
            name="the artifact's A100, PCIe 3 and SSD",
        )


def trace_path(model: str) -> Path:
    return DATA / f"{model}.json.gz"


@lru_cache(maxsize=4)
def trace_of(model: str) -> penstock.Trace:
    return published_trace(trace_path(model))


def cells() -> Iterator[Cell]:
    published = json.loads((DATA / "published.json").read_text())
    for model, times in published["fig11"].items():
        yield Cell(11, model, HOST_GIB, SSD_GIB_PER_S, PCIE_GIB_PER_S, times)
    for model, times in published["fig15_batch"].items():
        yield Cell(15, model, HOST_GIB, SSD_GIB_PER_S, PCIE_GIB_PER_S, times)
    for model, by_host in published["fig16_host"].items():
        for host_gib, time_s in by_host.items():
            times = time_s if isinstance(time_s, dict) else {"prefetch_lru": time_s}
            yield Cell(16, model, float(host_gib), SSD_GIB_PER_S, PCIE_GIB_PER_S, times)
    for model, by_rate in published["fig18_ssd"].items():
        if model == "note":
            continue
        for rate, times in by_rate.items():
            yield Cell(18, model, HOST_GIB, float(rate), 32.0, times)
