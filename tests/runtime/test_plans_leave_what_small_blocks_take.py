"""What segments of small blocks have free is no room for other tensors, and plans do not count on it."""

from __future__ import annotations

import pytest

from penstock.core.trace import Trace
from penstock.runtime.devices.reserved import PIECES_SHARE, spare_bytes
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
