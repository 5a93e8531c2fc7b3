"""A sweep says of each machine what limits the plan, and in one sentence whether the disk is fast enough."""

from __future__ import annotations

from dataclasses import replace

import pytest

import penstock
from penstock.core.check import check
from penstock.core.memory_profile import tier_bytes
from penstock.errors import InvalidArgument
from penstock.report.sweep import Cell, cases, cell, sweep, to_host, verdict, with_disks
from tests.support.traces import gpt

FAST, SLOW = 1e12, 1e8


def machine(**given: float) -> penstock.Hardware:
    """Every link fast, no host memory, and what is given."""
    return penstock.Hardware(
        **{  # type: ignore[arg-type]
            "device_bytes": 1 << 40,
            "disk_bytes": 1 << 40,
            "device_to_host_bytes_per_s": FAST,
            "host_to_device_bytes_per_s": FAST,
            "disk_write_bytes_per_s": FAST,
            "disk_read_bytes_per_s": FAST,
            **given,
        }
    )


def answer(hardware: penstock.Hardware, policy: str = "g10", fraction: float = 0.5) -> Cell:
    trace = gpt()
    budget = int(trace.peak_bytes * fraction)
    (asked,) = cases({"gpt": trace}, hardware, [budget], policy=policy)
    return cell(asked)


@pytest.mark.parametrize(
    ("given", "limit"),
    [
        ({}, "compute"),
        ({"disk_write_bytes_per_s": SLOW}, "disk write"),
        ({"disk_read_bytes_per_s": SLOW}, "disk read"),
        ({"device_to_host_bytes_per_s": SLOW, "host_to_device_bytes_per_s": SLOW}, "bus"),
        (
            {"host_bytes": 64 << 20, "disk_write_bytes_per_s": SLOW, "disk_read_bytes_per_s": SLOW},
            "host capacity",
        ),
    ],
)
def test_what_is_scarce_is_named(given: dict[str, float], limit: str) -> None:
    found = answer(machine(**given))
    assert found.summary is not None and found.if_doubled_s is not None
    assert found.limits == limit
    assert all(seconds > 0 for seconds in found.if_doubled_s.values())


def test_a_disk_is_enough_where_a_faster_one_would_not_help() -> None:
    fast, slow = answer(machine()), answer(machine(disk_write_bytes_per_s=SLOW))
    assert fast.uses_disk and fast.disk_is_enough
    assert slow.uses_disk and not slow.disk_is_enough
    assert slow.summary is not None and slow.fast_disk_s < slow.summary.predicted_step_s
    everything = answer(machine(), fraction=1.0)
    assert not everything.uses_disk


def test_disks_work_as_one() -> None:
    hardware = replace(
        machine(disk_bytes=1000, disk_write_bytes_per_s=2e9, disk_read_bytes_per_s=3e9),
        measured_rates={"disk_write": ((4096, 1e9), (1 << 20, 2e9)), "host_to_device": ((4096, 5e9),)},
    )
    three = with_disks(hardware, 3)
    assert (three.disk_bytes, three.disk_write_bytes_per_s, three.disk_read_bytes_per_s) == (3000, 6e9, 9e9)
    assert three.measured_rates["disk_write"] == ((4096, 3e9), (1 << 20, 6e9))
    assert three.measured_rates["host_to_device"] == hardware.measured_rates["host_to_device"]
    (given,) = cases({"gpt": gpt()}, hardware, [], disks=[2], disk_rate_bytes_per_s=1e9)
    assert given.hardware.disk_read_bytes_per_s == 2e9 and "disk_write" not in given.hardware.measured_rates
    with pytest.raises(InvalidArgument, match="above zero"):
        cases({"gpt": gpt()}, hardware, [], disk_rate_bytes_per_s=0.0)


def test_every_combination_is_asked_in_order() -> None:
    asked = cases({"a": gpt(), "b": gpt()}, machine(), [3 << 30, 2 << 30], [0, 1 << 30], [1, 2])
    assert len(asked) == 16
    assert [case.label for case in asked] == ["a"] * 8 + ["b"] * 8
    assert [case.hardware.device_bytes for case in asked[:8]] == [3 << 30] * 4 + [2 << 30] * 4
    assert [case.disks for case in asked[:4]] == [1, 2, 1, 2]


@pytest.mark.parametrize("room", [0, 10 << 20, 40 << 20, 1 << 40])
def test_copies_move_to_the_host_only_as_far_as_they_fit(room: int) -> None:
    trace, hardware = gpt(), machine(host_bytes=1)
    made = penstock.plan(trace, hardware, "g10", device_budget=trace.peak_bytes // 2)
    moved = to_host(trace, made, room)
    held = {evict.tensor: evict.tier for evict in moved.evictions}
    assert tier_bytes(trace, moved.evictions).get("host", trace.tensor_bytes[:1] * 0).max() <= room
    assert [replace(evict, tier="disk") for evict in moved.evictions] == list(made.evictions)
    if room == 1 << 40:
        assert set(held.values()) == {"host"}


def test_no_plan_has_its_reason() -> None:
    found = answer(machine(), fraction=0.01)
    assert found.summary is None and "raise the budget" in found.reason
    assert verdict([found]).startswith("No plan fits any of these machines")


def test_the_verdict_is_one_sentence() -> None:
    fast, slow = answer(machine()), answer(machine(disk_write_bytes_per_s=SLOW))
    unused = answer(machine(), fraction=1.0)
    assert verdict([unused]).startswith("The disk is not needed")
    assert verdict([fast, unused]).startswith(
        "Yes, the disk is fast enough in the one case that uses it, and not needed in 1 more"
    )
    no = verdict([slow, slow])
    assert no.startswith("No, the disk is not fast enough in any of the 2 cases")
    assert "1 disk (100.00 MB/s)" in no and "x the ideal" in no
    both = verdict([slow, replace(fast, case=replace(fast.case, disks=4))])
    assert both.startswith("It depends: the disk is fast enough in 1 of 2 cases")
    assert both.endswith("; in all of them with 4 disks (1000.00 GB/s).")
    neither = verdict([slow, fast])
    assert neither.endswith("; not in all of them with 1 disk (100.00 MB/s).")
    for said in (no, both, neither, verdict([unused])):
        assert said.endswith(".") and said.count(". ") == 0


def test_more_of_anything_never_takes_longer() -> None:
    trace, scarce = gpt(4), machine(disk_write_bytes_per_s=SLOW, disk_read_bytes_per_s=SLOW)
    budgets = [trace.peak_bytes * part // 8 for part in (4, 6, 8)]
    hosts, disks = [0, 16 << 20], [1, 3]
    cells = sweep(cases({"gpt": trace}, scarce, budgets, hosts, disks, policy="evict_all"), workers=1)
    for one in cells:
        assert one.plan is not None and not check(trace, one.plan, one.case.hardware)
        assert one.plan.device_budget_bytes == one.case.budget_bytes
        for other in cells:
            more = (
                one.case.budget_bytes <= other.case.budget_bytes
                and one.case.hardware.host_bytes <= other.case.hardware.host_bytes
                and one.case.disks <= other.case.disks
            )
            if more and one.summary and other.summary:
                assert other.summary.predicted_step_s <= one.summary.predicted_step_s * (1 + 1e-9) + 1e-12


@pytest.mark.slow
def test_more_workers_answer_the_same() -> None:
    trace = gpt(2)
    asked = cases({"gpt": trace}, machine(), [trace.peak_bytes * 3 // 4], disks=[1, 2], policy="g10")
    assert _times(sweep(asked, workers=2)) == _times(sweep(asked, workers=1))


def _times(cells: list[Cell]) -> list[tuple[float, float]]:
    return [(found.case.disks, found.summary.predicted_step_s) for found in cells if found.summary]
