"""How long a drive lasts: the papers' estimates, and what a plan's writes do to one."""

import math

import pytest

from penstock.core.check import check
from penstock.core.hardware import Hardware
from penstock.core.plan import Evict, Plan
from penstock.core.trace import Trace
from penstock.errors import InvalidArgument, SpillSpaceFull
from penstock.studies.flash import Flash, lifetime_s, wear
from tests.support.traces import Step

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
YEAR_S = 365 * DAY_S
MB = 1_000_000
GB = 1000 * MB


def test_flashneuron_estimates_307_days() -> None:
    pm1725b = Flash(capacity_bytes=8000 * GB, drive_writes_per_day=3)
    lasts_s = lifetime_s(pm1725b, 3.3e9, write_fraction=0.5)
    assert lasts_s / HOUR_S == pytest.approx(7374, abs=0.5)
    assert lasts_s / DAY_S == pytest.approx(307, abs=0.5)


def test_sequential_writes_last_longer_than_the_rating() -> None:
    # FlashNeuron section 3.4: producers rate random writes, which cost at least 3.5 times as much.
    plain = Flash(capacity_bytes=8000 * GB, drive_writes_per_day=3)
    rated = Flash(capacity_bytes=8000 * GB, drive_writes_per_day=3, rated_write_amplification=3.5)
    assert lifetime_s(rated, 3.3e9) == pytest.approx(3.5 * lifetime_s(plain, 3.3e9))
    assert lifetime_s(rated, 3.3e9, write_amplification=3.5) == pytest.approx(lifetime_s(plain, 3.3e9))


def test_g10_estimates_3_7_years() -> None:
    sz985 = Flash(capacity_bytes=3200 * GB, drive_writes_per_day=30)
    assert lifetime_s(sz985, 3e9, write_fraction=0.5) / YEAR_S == pytest.approx(3.7, abs=0.005)


def test_a_drive_that_nothing_is_written_to_lasts_for_ever() -> None:
    assert lifetime_s(Flash(capacity_bytes=GB), 0.0) == math.inf


def step_and_plan() -> tuple[Trace, Plan]:
    """Three activations of 100 MB leave for the disk and one for the host; one is sent away twice
    without being written in between."""
    step = Step()
    made = []
    for index in range(4):
        tensor = step.tensor(100 * MB)
        step.kernel(f"f{index}", 1.0, [], [tensor])
        made.append(tensor)
    step.kernel("loss", 1.0, [], [])
    step.kernel("again", 1.0, [made[0]], [])
    step.kernel("between", 1.0, [], [])
    for index, tensor in enumerate(reversed(made)):
        step.kernel(f"b{index}", 1.0, [tensor], [], phase="backward")
    evictions = [
        Evict(made[0], after=0, begin=1, end=5, prefetch_at=5, tier="disk"),
        Evict(made[1], after=1, begin=2, end=9, prefetch_at=9, tier="disk"),
        Evict(made[2], after=2, begin=3, end=8, prefetch_at=8, tier="host"),
        Evict(made[3], after=3, begin=4, end=7, prefetch_at=7, tier="disk"),
        Evict(made[0], after=5, begin=6, end=10, prefetch_at=10, tier="disk"),
    ]
    return step.trace(), Plan(
        policy="test", device_budget_bytes=GB, evictions=tuple(evictions), predicted_s=10.0
    )


def test_a_plan_wears_by_what_it_writes_to_the_disk() -> None:
    trace, plan = step_and_plan()
    machine = Hardware(
        device_bytes=GB,
        host_bytes=GB,
        disk_bytes=GB,
        device_to_host_bytes_per_s=1e9,
        host_to_device_bytes_per_s=1e9,
        disk_read_bytes_per_s=1e9,
        disk_write_bytes_per_s=1e9,
    )
    assert check(trace, plan, machine) == []
    flash = Flash(capacity_bytes=GB, drive_writes_per_day=1)
    found = wear(trace, plan, flash)
    assert found.written_bytes_per_iteration == 300 * MB  # the second eviction of the first is clean
    assert found.write_amplification == pytest.approx(1.0, abs=1e-3)
    assert found.write_bytes_per_s == pytest.approx(30e6)
    assert found.lifetime_s == pytest.approx(1825 * GB / 30e6, rel=1e-3)
    assert found.lifetime_years == pytest.approx(found.lifetime_s / YEAR_S)
    assert wear(trace, plan, flash, iteration_s=20.0).lifetime_s == pytest.approx(2 * found.lifetime_s)


def test_extents_in_order_wear_less_than_scattered_pages() -> None:
    trace, plan = step_and_plan()
    flash = Flash(capacity_bytes=GB)
    in_order = wear(trace, plan, flash, filled=0.6)
    scattered = wear(trace, plan, flash, layout="scattered", filled=0.6)
    assert in_order.write_amplification == pytest.approx(1.0, abs=0.01)
    assert scattered.write_amplification > 1.5
    assert scattered.lifetime_s < in_order.lifetime_s / 1.5


def test_a_plan_that_writes_nothing_wears_nothing() -> None:
    trace, plan = step_and_plan()
    kept = Plan(policy="keep", device_budget_bytes=plan.device_budget_bytes, predicted_s=1.0)
    found = wear(trace, kept, Flash(capacity_bytes=GB))
    assert (found.written_bytes_per_iteration, found.lifetime_s) == (0, math.inf)


def test_bad_drives_and_questions_are_refused() -> None:
    trace, plan = step_and_plan()
    flash = Flash(capacity_bytes=GB)
    for wrong in (
        {"capacity_bytes": 0},
        {"capacity_bytes": GB, "over_provisioning": 0.0},
        {"capacity_bytes": GB, "drive_writes_per_day": float("nan")},
        {"capacity_bytes": GB, "rated_write_amplification": 0.5},
    ):
        with pytest.raises(InvalidArgument):
            Flash(**wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="write_fraction"):
        lifetime_s(flash, 1e9, write_fraction=1.5)
    with pytest.raises(InvalidArgument, match="write_amplification"):
        lifetime_s(flash, 1e9, write_amplification=0.9)
    with pytest.raises(InvalidArgument, match="sequential, scattered"):
        wear(trace, plan, flash, layout="random")
    with pytest.raises(SpillSpaceFull, match="larger drive"):
        wear(trace, plan, flash, filled=0.8)
    with pytest.raises(InvalidArgument, match="iteration_s"):
        wear(trace, plan, flash, iteration_s=0.0)
