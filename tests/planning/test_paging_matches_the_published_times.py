"""Base UVM and DeepUM+ on G10's traces against the times that its artifact published.

The artifact counts fault times in whole seconds and publishes the faster of two iterations; its links are in
units of 10^9 bytes per second. So is it done here.
"""

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from benchmarks.artifact import published
from benchmarks.artifact.paging import PagingResult, simulate_paging
from penstock.core.columns import FloatArray
from penstock.core.hardware import Hardware
from penstock.core.trace import Trace
from tests.support.traces import G10_DATA, needs_g10_data, published_times

GIB = 1 << 30
CASES = ("BERT-256", "VIT-768", "Inceptionv3-1024", "SENet154-256")
NAMES = {"uvm": "lru", "deepum": "deepUM"}

pytestmark = needs_g10_data


def artifact(pcie: float = 15.754, disk: float = 3.2) -> Hardware:
    return Hardware(
        device_bytes=40 * GIB,
        host_bytes=128 * GIB,
        disk_bytes=3_200_000_000_000,
        device_to_host_bytes_per_s=pcie * 1e9,
        host_to_device_bytes_per_s=pcie * 1e9,
        disk_read_bytes_per_s=disk * 1e9,
        disk_write_bytes_per_s=disk * 1e9,
    )


def whole_seconds(trace: Trace, path: Path) -> tuple[FloatArray, FloatArray]:
    outputs_s, all_s = published.fault_times_s(path)
    outputs = trace.kernel_time_s + np.floor(outputs_s) - np.floor(trace.kernel_time_s)
    return outputs, outputs + np.floor(all_s) - np.floor(outputs_s)


@cache
def paged(case: str, policy: str) -> PagingResult:
    path = G10_DATA / f"{case}.json.gz"
    trace = published.trace(path)
    return simulate_paging(trace, artifact(), policy, fault_times_s=whole_seconds(trace, path))


@pytest.mark.parametrize("case", CASES)
def test_times_and_order_are_the_published(case: str) -> None:
    figure = published_times("fig15_batch")[case]
    ours = {}
    for policy, name in NAMES.items():
        theirs = figure[name]
        assert theirs is not None
        ours[policy] = min(paged(case, policy).steps_s)
        assert ours[policy] == pytest.approx(theirs, rel=0.02)
    g10, ideal = figure["prefetch_lru"], figure["ideal"]
    assert g10 is not None
    assert ideal is not None
    assert ours["uvm"] > ours["deepum"] >= ideal * (1 - 1e-4)
    # DeepUM+ was published as faster than G10 where both are within a percent of the ideal.
    assert ours["deepum"] >= g10 * 0.99


def test_bytes_moved_are_the_published_to_the_page() -> None:
    # Figure 14 of G10, pages each way in the second iteration of BERT-256.
    for policy, pages in (("uvm", 45_385_726), ("deepum", 13_094_159)):
        result = paged("BERT-256", policy)
        assert result.moved_bytes == {"host_to_device": pages * 4096, "device_to_host": pages * 4096}


def test_faults_that_cost_what_was_measured_make_base_uvm_slower_still() -> None:
    path = G10_DATA / "BERT-256.json.gz"
    trace = published.trace(path)
    result = simulate_paging(trace, artifact(), "uvm", fault_times_s=published.fault_times_s(path))
    assert result.step_s > 2 * paged("BERT-256", "uvm").step_s
