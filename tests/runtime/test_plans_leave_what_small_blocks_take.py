"""What segments of small blocks have free is no room for other tensors, and plans do not count on it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from penstock import plan
from penstock.core.memory_profile import minimum_bytes
from penstock.core.trace import Trace
from penstock.runtime.devices.reserved import PIECES_SHARE, plannable, spare_bytes
from tests.support.runs import ACCELERATED
from tests.support.traces import Step

MIB = 1 << 20
BUDGET_BYTES = 100 * MIB
PIECES_BYTES = int(PIECES_SHARE * BUDGET_BYTES)


def small_beside_large(large_bytes: int) -> Trace:
    """A weight of 1 MiB; six activations of 1 MiB, of which the first two are there in the kernels that have
    something large, and all in the last one."""
    step = Step()
    weight = step.tensor(MIB, "weight", persistent=True)
    first = [step.tensor(MIB) for _ in range(2)]
    step.kernel("small", 1.0, inputs=[weight], outputs=first)
    large = step.tensor(large_bytes)
    step.kernel("large", 1.0, inputs=first, outputs=[large])
    step.kernel("sum", 1.0, inputs=[large, *first])
    others = [step.tensor(MIB) for _ in range(4)]
    step.kernel("more", 1.0, inputs=first, outputs=others)
    return step.trace()


@pytest.mark.parametrize("segments_bytes", [3 * MIB, 7 * MIB, 20 * MIB])
def test_what_others_cannot_have_is_left_free(segments_bytes: int) -> None:
    """3 MiB of the segments are in use where memory is short."""
    trace = small_beside_large(2 * BUDGET_BYTES)
    assert spare_bytes(trace, BUDGET_BYTES, segments_bytes) == PIECES_BYTES + segments_bytes - 3 * MIB


def test_only_memory_in_pieces_is_where_no_kernel_is_short_of_memory() -> None:
    assert spare_bytes(small_beside_large(MIB), BUDGET_BYTES, 20 * MIB) == PIECES_BYTES


def with_many_small_weights() -> Trace:
    """40 weights of 1 MiB, 2 of 20 MiB, and an activation of 30 MiB."""
    step = Step()
    small = [step.tensor(MIB, "weight", persistent=True) for _ in range(40)]
    large = [step.tensor(20 * MIB, "weight", persistent=True) for _ in range(2)]
    made = step.tensor(30 * MIB)
    step.kernel("first", 1.0, inputs=[*small[:20], large[0]], outputs=[made])
    step.kernel("second", 1.0, inputs=[*small[20:], large[1], made])
    return step.trace()


def test_small_tensors_stay_where_there_is_room() -> None:
    trace = with_many_small_weights()
    planned, budget_bytes = plannable(trace, BUDGET_BYTES, 40 * MIB)
    assert budget_bytes == BUDGET_BYTES - PIECES_BYTES
    assert planned.tensor_bytes[planned.movable].min() == 20 * MIB
    hardware = replace(ACCELERATED, device_bytes=BUDGET_BYTES)
    moved = {each.tensor for each in plan(planned, hardware, device_budget=budget_bytes).evictions}
    assert moved and not moved & set(np.flatnonzero(trace.tensor_bytes == MIB).tolist())


def test_where_there_is_none_small_tensors_leave_too() -> None:
    trace = with_many_small_weights()
    least_bytes = minimum_bytes(trace)
    assert least_bytes == 70 * MIB
    assert plannable(trace, 80 * MIB, 40 * MIB) == (trace, 80 * MIB - int(PIECES_SHARE * 80 * MIB))
    assert plannable(trace, least_bytes, 40 * MIB) == (trace, least_bytes)
