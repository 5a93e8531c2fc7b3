"""G10's artifact: FlashNeuron's times over batch size, and G10's share of the ideal.

The published traces and times are found by PENSTOCK_G10_DATA.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator

import numpy as np

from benchmarks.artifact import g10_artifact, own_iteration_s, published
from penstock.core.hardware import Hardware
from penstock.core.trace import Trace
from penstock.errors import InvalidArgument
from penstock.planners.problem import Problem
from penstock.simulator import Intervals, Replay
from tests.support.traces import G10_DATA, needs_g10_data, published_times

GIB = 2**30
GPU_BYTES = 40 * GIB
SHARE = 10 / 50  # of the bus that the disk has, in pages of a batch

pytestmark = needs_g10_data


def machine(bus_bytes_per_s: float, disk_bytes_per_s: float) -> Hardware:
    return Hardware(
        device_bytes=GPU_BYTES,
        host_bytes=128 * GIB,
        disk_bytes=2**44,
        device_to_host_bytes_per_s=bus_bytes_per_s,
        host_to_device_bytes_per_s=bus_bytes_per_s,
        disk_read_bytes_per_s=disk_bytes_per_s,
        disk_write_bytes_per_s=disk_bytes_per_s,
    )


# The artifact plans with these rates in GiB/s; its simulator of unified memory takes them as GB/s.
PLANNED = machine(15.754 * GIB, 3.2 * GIB)
SIMULATED = machine(15.754e9, SHARE * 15.754e9)


def figure_15() -> Iterator[tuple[str, Trace, dict[str, float | None]]]:
    for case, times in published_times("fig15_batch").items():
        yield case, published.trace(G10_DATA / f"{case}.json.gz"), times


def test_flashneuron_over_batch_size() -> None:
    """All finite times within 2 %. It failed five times; one of those, Inceptionv3 at 1536, hangs on the
    order in which its memory manager is asked for a kernel's tensors, and works here."""
    failed, ratios = [], {}
    for case, trace, times in figure_15():
        try:
            own_s = own_iteration_s(Problem(trace, PLANNED, GPU_BYTES))
        except InvalidArgument:
            failed.append(case)
            continue
        if (expected := times["FlashNeuron"]) is not None:
            ratios[case] = own_s / expected
    assert len(ratios) == 20
    assert max(abs(ratio - 1) for ratio in ratios.values()) < 0.02
    assert failed == ["BERT-768", "BERT-1024", "VIT-1280", "Inceptionv3-1792"]


def test_g10_over_batch_size() -> None:
    """In fractions of the ideal: measured, a median difference of 0.003, and 21 of 25 within 0.03."""
    differences = []
    for _, trace, times in figure_15():
        made = g10_artifact(Problem(trace, PLANNED, GPU_BYTES))
        step_s = Replay(trace, SIMULATED, GPU_BYTES).run(Intervals.of(made.evictions)).step_s
        expected = times["prefetch_lru"]
        assert expected is not None
        differences.append(abs(trace.ideal_s / step_s - trace.ideal_s / expected))
    assert np.median(differences) < 0.01
    assert np.mean(np.array(differences) < 0.03) >= 0.8


def test_g10_moves_what_its_own_schedules_move() -> None:
    """Bytes to either tier, where the published schedules say: within a tenth of all that moves."""
    for case in ("Inceptionv3-1536", "ResNet152-1280", "SENet154-1024"):
        trace = published.trace(G10_DATA / f"{case}.json.gz")
        made = g10_artifact(Problem(trace, PLANNED, GPU_BYTES))
        theirs = {"host": 0, "disk": 0}
        schedule = json.loads(gzip.decompress((G10_DATA / f"plan-{case}.json.gz").read_bytes()))
        for _, tensor, action in schedule["ops"]:
            if action != "prefetch":
                theirs[{"evict_host": "host", "evict_ssd": "disk"}[action]] += int(trace.tensor_bytes[tensor])
        ours = {"host": 0, "disk": 0}
        for evict in made.evictions:
            ours[evict.tier] += int(trace.tensor_bytes[evict.tensor])
        total = sum(theirs.values())
        assert abs(ours["host"] - theirs["host"]) < 0.1 * total, case
        assert abs(ours["disk"] - theirs["disk"]) < 0.1 * total, case
