"""What a captured trace says of recomputation and compression, and of machines that are not there."""

from __future__ import annotations

import pytest
import torch

import penstock
from benchmarks.planning.machines import MEMORY_BYTES, machine_of
from penstock.capture.datasheets import DATA_SHEETS
from penstock.core.columns import KINDS
from penstock.errors import InvalidArgument
from tests.support.traces import machine


def captured(**options: object) -> penstock.Trace:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Dropout(), torch.nn.Linear(64, 64)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(32, 64)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()

    return penstock.trace(step, **options)  # type: ignore[arg-type]


def made_by(trace: penstock.Trace, name: str) -> int:
    """The first result of the first kernel of this name."""
    return int(trace.outputs[trace.kernel_name.index(name)][0])


@pytest.mark.parametrize("fake", [True, False])
def test_results_of_repeatable_kernels_can_be_made_anew(fake: bool) -> None:
    trace = captured(fake=fake)
    for name in ("addmm", "relu"):
        assert trace.tensor_recompute[made_by(trace, name)] == trace.kernel_name.index(name)


def test_random_numbers_edited_tensors_and_gradients_cannot() -> None:
    trace = captured(fake=False)
    random = made_by(trace, "bernoulli_")
    assert trace.tensor_recompute[random] == -1
    backward = [kernel for kernel in range(trace.kernels) if trace.kernel_phase[kernel] == 1]
    for kernel in backward:
        assert (trace.tensor_recompute[trace.outputs[kernel]] == -1).all()


def test_the_zeros_of_what_is_saved_are_counted() -> None:
    trace = captured(fake=False)
    rectified = made_by(trace, "relu")
    assert 0.3 < trace.tensor_density[rectified] < 0.7
    size_bytes = 32 * 64 * 4
    assert trace.tensor_itemsize[rectified] == 4
    packed = trace.compressed_bytes(rectified)
    rows_bytes = (32 * 64 // 128 + 1) * 4
    assert packed == size_bytes // 32 + round(trace.tensor_density[rectified] * 32 * 64) * 4 + rows_bytes
    assert not len(captured().tensor_density)
    assert penstock.plan(captured(), machine()).evictions == ()  # nothing is compressed


def test_a_real_run_without_zeros_says_so() -> None:
    layer = torch.nn.Linear(64, 64)
    batch = torch.randn(32, 64)
    trace = penstock.trace(lambda: layer(batch).square().sum().backward(), fake=False)
    assert len(trace.tensor_density) == trace.tensors
    assert penstock.plan(trace, machine(), compress=True).evictions == ()


def test_a_density_can_be_assumed() -> None:
    trace = captured().with_density({"relu": 0.25})
    assert trace.tensor_density[made_by(trace, "relu")] == 0.25
    assert trace.tensor_density[made_by(trace, "addmm")] == 1.0
    with pytest.raises(InvalidArgument, match=r"density of 'relu' is 1\.5"):
        trace.with_density({"relu": 1.5})


def test_weights_may_leave_over_the_end_of_the_iteration() -> None:
    trace = captured()
    wrapping = {period.tensor for period in trace.inactive_periods if period.end >= trace.kernels}
    assert {"weight"} <= {KINDS[trace.tensor_kind[tensor]] for tensor in wrapping}
    assert all(trace.tensor_persistent[list(wrapping)])
    assert all(trace.tensor_movable[period.tensor] for period in trace.inactive_periods)
    assert (trace.tensor_bytes[~trace.tensor_movable] < 4096).all() and not trace.tensor_movable.all()


def test_data_sheets_make_machines() -> None:
    one = machine_of("h200", bus="pcie5", drives=1, drive="pcie5", host_bytes=1 << 30)
    four = machine_of("h200", bus="pcie5", drives=4, drive="pcie5")
    assert four.disk_read_bytes_per_s == 4 * one.disk_read_bytes_per_s
    assert one.disk_shares_bus
    assert machine_of("a100", drives=0).disk_bytes == 0
    assert set(MEMORY_BYTES) == set(DATA_SHEETS)
