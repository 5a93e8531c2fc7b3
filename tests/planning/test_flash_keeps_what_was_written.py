"""Inside a drive: nothing is lost, and garbage collection costs what theory says."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidArgument
from penstock.studies.flash import Drive, Flash, uniform_write_amplification


def drive(pages: int, per_block: int, over_provisioning: float) -> Drive:
    return Drive(
        Flash(
            capacity_bytes=pages,
            page_bytes=1,
            pages_per_block=per_block,
            over_provisioning=over_provisioning,
        )
    )


@settings(max_examples=40, deadline=None)
@given(
    st.integers(40, 200),
    st.integers(2, 8),
    st.lists(st.tuples(st.booleans(), st.integers(0, 1 << 16), st.integers(1, 150)), max_size=30),
)
def test_every_page_is_in_one_place_and_can_be_found(
    pages: int, per_block: int, operations: list[tuple[bool, int, int]]
) -> None:
    device = drive(pages, per_block, 4 * per_block / pages + 0.1)
    written: set[int] = set()
    total = 0
    for trimmed, at, count in operations:
        first = at % pages
        touched = np.arange(first, min(first + count, pages))
        if trimmed:
            device.trim(touched)
            written.difference_update(touched.tolist())
        else:
            device.write(touched)
            written.update(touched.tolist())
            total += len(touched)
    assert device.owners().tolist() == sorted(written)
    assert device.valid_pages == len(written)
    places = [device.place(page) for page in sorted(written)]
    assert len(set(places)) == len(places)
    assert all(device.place(page) == -1 for page in range(pages) if page not in written)
    assert device.host_pages == total
    assert device.write_amplification >= 1


def test_a_page_written_twice_at_once_holds_the_last() -> None:
    device = drive(100, 8, 0.5)
    device.write(np.array([5, 7, 5]))
    assert device.valid_pages == 2
    assert device.place(5) == device.place(7) + 1


@pytest.mark.parametrize("over_provisioning", [0.15, 0.28, 0.5, 1.0])
def test_random_writes_cost_what_theory_says(over_provisioning: float) -> None:
    pages = 1 << 14
    device = drive(pages, 64, over_provisioning)
    device.write_extent(0, pages)
    generator = np.random.default_rng(0)
    device.write(generator.integers(0, pages, size=4 * pages))
    device.reset_counters()
    device.write(generator.integers(0, pages, size=4 * pages))
    expected = uniform_write_amplification(over_provisioning)
    assert device.write_amplification == pytest.approx(expected, rel=0.06)
    assert device.erase_count.max() < 1.6 * device.erase_count.mean()  # blocks wear alike


def test_theory_is_what_the_literature_has() -> None:
    # FlashNeuron section 3.4: random writes cost at least 3.5 times as much as sequential ones.
    assert uniform_write_amplification(0.15) > 3.5
    assert uniform_write_amplification(100.0) == pytest.approx(1.0)
    spare = [0.05, 0.1, 0.2, 0.4, 0.8]
    costs = [uniform_write_amplification(share) for share in spare]
    assert costs == sorted(costs, reverse=True)
    for share, cost in zip(spare, costs, strict=True):
        left = 1 - 1 / cost
        assert left == pytest.approx(np.exp(-(1 + share) * (1 - left)))


def test_extents_written_in_order_cost_nothing_more() -> None:
    pages = 1 << 13
    device = drive(pages, 64, 0.07)
    for _ in range(6):
        device.write_extent(0, pages)
    assert device.write_amplification == 1.0


def test_scattering_costs_more_than_order_on_the_same_drive() -> None:
    pages = 1 << 13
    ordered, scattered = drive(pages, 64, 0.28), drive(pages, 64, 0.28)
    generator = np.random.default_rng(0)
    for _ in range(4):
        ordered.write_extent(0, pages)
        scattered.write(generator.permutation(pages))
    assert ordered.write_amplification == 1.0
    assert scattered.write_amplification > 1.3


def test_more_spare_flash_and_trimming_cost_less() -> None:
    pages = 1 << 13
    generator = np.random.default_rng(0)
    writes = generator.integers(0, pages // 2, size=4 * pages)
    full, trimmed = drive(pages, 64, 0.1), drive(pages, 64, 0.1)
    for device in (full, trimmed):
        device.write_extent(0, pages)
    trimmed.trim(np.arange(pages // 2, pages))
    for device in (full, trimmed):
        device.reset_counters()
        device.write(writes)
    assert trimmed.write_amplification < full.write_amplification


def test_a_drive_without_room_to_collect_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="spare blocks"):
        drive(1000, 64, 0.07)
    with pytest.raises(InvalidArgument, match="pages 0 to 99"):
        drive(100, 8, 0.5).write(np.array([100]))
