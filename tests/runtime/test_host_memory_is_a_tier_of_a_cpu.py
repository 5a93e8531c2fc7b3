"""Host memory beside a CPU's budget: plans choose between it and the disk, its budget holds, bits stay."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import penstock
from penstock import machine
from penstock.errors import InvalidArgument
from penstock.storage import host_memory
from tests.support.families import FAMILIES
from tests.support.runs import (
    ACCELERATED,
    EVERYTHING,
    HARDWARE,
    budgets,
    differences,
    family_training,
    in_memory,
    offloaded,
)

STEPS = 6  # one that makes the optimizer's state, one traced, three recorded, one at full speed
PAGE = 4096
AMPLE = "64MiB"
HOST_PATH = "memory copy"
MEMFD = "/memfd:penstock (deleted)"


def descriptors() -> list[str]:
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:  # that of the listing itself
            continue
    return links


@pytest.fixture(autouse=True)
def given_back() -> Iterator[None]:
    """After each test no memory of a tier is open or mapped."""
    yield
    assert MEMFD not in descriptors()
    assert MEMFD not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("name", FAMILIES)
def test_all_that_leaves_goes_there_while_it_has_room(name: str, tmp_path: Path) -> None:
    program = family_training(name, STEPS)
    (budget_bytes,) = budgets(program, tmp_path, 0.5 if name == "dynamic" else 0.2)
    found, report = offloaded(program, budget_bytes, tmp_path, hardware=ACCELERATED, host_budget=AMPLE)
    assert differences(in_memory(program), found) == []
    assert report.peak_bytes <= budget_bytes
    assert report.evicted_bytes + report.recomputed_bytes > 0
    if name != "dynamic":  # there the arena writes to its own file on disk what no plan foresaw
        assert report.disk_written_bytes == 0
    assert set(report.moved_bytes_by_io_path) <= {HOST_PATH}
    assert 0 < report.host_bytes <= 64 << 20


@pytest.mark.parametrize("name", ["gpt", "cnn", "lstm"])
@pytest.mark.parametrize("policy", ["optimal", "modnn"])
def test_what_has_no_room_there_goes_to_disk(name: str, policy: str, tmp_path: Path) -> None:
    program = family_training(name, STEPS)
    (budget_bytes,) = budgets(program, tmp_path, 0.2)
    machine = replace(ACCELERATED, disk_read_bytes_per_s=5e8, disk_write_bytes_per_s=5e8)
    options = {"policy": policy, "recompute": False, "hardware": machine}
    _, ample = offloaded(program, budget_bytes, tmp_path, host_budget=AMPLE, **options)
    host_bytes = ample.evicted_bytes // 4 // PAGE * PAGE
    found, report = offloaded(program, budget_bytes, tmp_path, host_budget=host_bytes, **options)
    assert differences(in_memory(program), found) == []
    assert report.policy == policy
    assert report.peak_bytes <= budget_bytes
    assert report.host_bytes == host_bytes
    assert {"device_to_host", "disk_write"} <= set(report.rates_bytes_per_s)
    assert 0 < report.disk_written_bytes < report.evicted_bytes
    text = str(report)
    assert "device_to_host" in text and HOST_PATH in text and "host: " in text


def test_the_prediction_and_the_timeline_name_both_links(tmp_path: Path) -> None:
    program = family_training("gpt", STEPS)
    (budget_bytes,) = budgets(program, tmp_path, 0.2)
    torch.manual_seed(7)
    with penstock.offload(
        device_budget=budget_bytes,
        host_budget="256KiB",
        spill_dir=tmp_path,
        hardware=ACCELERATED,
        planning=penstock.PlanOptions(recompute=False, smallest_bytes=EVERYTHING),
    ) as run:
        found = program(run.step)
        plan, trace, timeline = run.plan, run.trace, run.timeline
        assert plan is not None and trace is not None and timeline is not None
        assert run.hardware.host_bytes == 256 << 10
        predicted = penstock.simulate(trace, plan, run.hardware)
        both = {"device_to_host", "host_to_device", "disk_write", "disk_read"}
        assert both <= {span.stream for span in predicted.spans}
        assert both <= {span.stream for span in timeline.spans}
        assert {evict.tier for evict in plan.evictions} == {"host", "disk"}
    assert differences(in_memory(program), found) == []


def test_unplanned_steps_fill_it_first(tmp_path: Path) -> None:
    """The first step follows no plan."""
    program = family_training("gpt", 1)
    (budget_bytes,) = budgets(family_training("gpt", STEPS), tmp_path, 0.1)
    moved = {}
    for host_budget in (AMPLE, "128KiB", None):
        found, report = offloaded(
            program, budget_bytes, tmp_path, hardware=ACCELERATED, host_budget=host_budget
        )
        assert differences(in_memory(program), found) == []
        moved[host_budget] = report.moved_bytes_by_io_path
    assert set(moved[AMPLE]) == {HOST_PATH}
    assert HOST_PATH in moved["128KiB"] and len(moved["128KiB"]) > 1
    assert HOST_PATH not in moved[None]


def test_compressed_copies_go_there(tmp_path: Path) -> None:
    program = family_training("cnn", STEPS)
    (budget_bytes,) = budgets(program, tmp_path, 0.2)
    slow = replace(
        ACCELERATED,
        device_to_host_bytes_per_s=1e7,
        host_to_device_bytes_per_s=1e7,
        disk_read_bytes_per_s=1e6,
        disk_write_bytes_per_s=1e6,
    )
    torch.manual_seed(7)
    with penstock.offload(
        device_budget=budget_bytes,
        host_budget=AMPLE,
        spill_dir=tmp_path,
        hardware=slow,
        planning=penstock.PlanOptions(recompute=False, smallest_bytes=EVERYTHING),
    ) as run:
        found = program(run.step)
        assert run.plan is not None
        packed = [evict for evict in run.plan.evictions if evict.codec != "raw"]
        assert packed and {evict.tier for evict in packed} == {"host"}
        assert {"compress", "device_to_host"} <= set(run.report().rates_bytes_per_s)
    assert differences(in_memory(program), found) == []


def test_a_given_plan_says_the_tier_of_each_tensor(tmp_path: Path) -> None:
    """Also where the steps before it, which have no plan, put the tensor elsewhere."""
    program = family_training("gpt", STEPS)
    (budget_bytes,) = budgets(program, tmp_path, 0.2)
    torch.manual_seed(7)
    planning = penstock.PlanOptions(recompute=False, compress=False, smallest_bytes=EVERYTHING)
    with penstock.offload(
        device_budget=budget_bytes,
        host_budget=AMPLE,
        spill_dir=tmp_path,
        hardware=ACCELERATED,
        planning=planning,
    ) as run:
        program(run.step)
        plan = run.plan
    assert plan is not None
    tensors = {evict.tensor for evict in plan.evictions}
    on_disk = {tensor for tensor in tensors if tensor % 2}
    plan = replace(
        plan,
        evictions=tuple(
            replace(evict, tier="disk" if evict.tensor in on_disk else "host") for evict in plan.evictions
        ),
    )
    torch.manual_seed(7)
    with penstock.offload(
        device_budget=budget_bytes,
        host_budget=AMPLE,
        spill_dir=tmp_path,
        hardware=ACCELERATED,
        plan=plan,
        planning=planning,
    ) as run:
        found = program(run.step)
        timeline = run.timeline
    assert differences(in_memory(program), found) == []
    assert timeline is not None
    written = [span for span in timeline.spans if span.stream in ("device_to_host", "disk_write")]
    planned = [span for span in written if span.index in tensors]
    assert {(span.index in on_disk) == (span.stream == "disk_write") for span in planned} == {True}


def test_its_rates_are_measured(tmp_path: Path) -> None:
    hardware = penstock.probe(tmp_path, time_limit_s=0.5, host_budget="32MiB")
    assert hardware.host_bytes == 32 << 20
    assert hardware.disk_shares_bus is False
    for link in ("device_to_host", "host_to_device"):
        assert all(1e7 < rate < 1e12 for _, rate in hardware.measured_rates[link])
        assert hardware.rate_bytes_per_s(link) == hardware.measured_rates[link][-1][1]
    with penstock.offload(device_budget="64MiB", host_budget="32MiB", spill_dir=tmp_path) as run:
        assert run.hardware.reaches("host") and run.hardware.host_bytes == 32 << 20


def test_a_forked_process_reads_what_is_there(tmp_path: Path) -> None:
    with penstock.offload(
        device_budget="8MiB", host_budget="64MiB", spill_dir=tmp_path, hardware=ACCELERATED
    ) as run:
        with run.step():
            tensors = [torch.full((1 << 20,), float(number)) for number in range(8)]
        assert run.report().disk_written_bytes == 0 and run.report().evicted_bytes > 0
        child = os.fork()
        if not child:
            right = all(bool((tensor == number).all()) for number, tensor in enumerate(tensors))
            os._exit(0 if right else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        del tensors


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"host_budget": "900TiB"},
            "host_budget is 900.0 TiB, and there are .* of memory to be had: give less",
        ),
        ({"host_budget": "8MiB", "host_node": 999}, "host_node is 999: this machine has"),
        ({"host_node": 0}, "host_node is 0, and there is no host_budget: say how much"),
        ({"host_budget": "8MiB", "hardware": HARDWARE}, "hardware does not say how fast host memory is"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, object], said: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=said):
        penstock.offload(device_budget="64MiB", spill_dir=tmp_path, **{"hardware": ACCELERATED} | options)


def test_nodes_are_those_that_the_system_names(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"this machine has no NUMA nodes\. Give no host_node"):
        machine.node_available_bytes(0, tmp_path)
    (tmp_path / "has_memory").write_text("0-1,3\n")
    with pytest.raises(InvalidArgument, match=r"has memory on NUMA node 0, 1, 3\. Give another"):
        machine.node_available_bytes(2, tmp_path)
    (tmp_path / "node3").mkdir()
    names = {"MemTotal": 900, "MemFree": 100, "Active(file)": 20, "Inactive(file)": 3, "SReclaimable": 1}
    text = "".join(f"Node 3 {name}: {value} kB\n" for name, value in names.items())
    (tmp_path / "node3" / "meminfo").write_text(text)
    assert machine.node_available_bytes(3, tmp_path) == 124 << 10


@pytest.mark.skipif(not Path("/sys/devices/system/node/node0").exists(), reason="no NUMA nodes")
def test_its_pages_come_from_the_node(tmp_path: Path) -> None:
    memory = host_memory.HostMemory(4 << 20, 0)
    try:
        memory.grow_to(1 << 20)
        maps = Path("/proc/self/numa_maps").read_text().splitlines()
        assert [" bind:0 " in line for line in maps if "memfd" in line] == [True]
    finally:
        memory.close()
    program = family_training("gpt", STEPS)
    (budget_bytes,) = budgets(program, tmp_path, 0.2)
    found, report = offloaded(
        program, budget_bytes, tmp_path, hardware=ACCELERATED, host_budget=AMPLE, host_node=0
    )
    assert differences(in_memory(program), found) == []
    assert report.host_bytes > 0 and report.disk_written_bytes == 0
