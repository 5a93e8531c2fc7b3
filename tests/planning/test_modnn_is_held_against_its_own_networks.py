"""What benchmarks/papers.py calculates of moDNN's networks, by hand on small ones: the ideal case, equation 7
in both forms, and vDNN in lock step."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch import nn

import penstock
from penstock.core.check import check
from penstock.core.memory_profile import minimum_bytes
from tests.support.traces import Step, machine

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from papers_bench import lockstep, modnn
from papers_bench.modnn_networks import NETWORKS, Network

# torchvision's, of the same networks: FCN-32s and VGG-101 are in none of its releases.
PARAMETERS = {
    "VGG-16": 138_357_544,
    "VGG-19": 143_667_240,
    "ResNet-34": 21_797_672,
    "ResNet-152": 60_192_808,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_networks_have_the_weights_that_they_are_known_for(name: str) -> None:
    with penstock.fake_mode():
        model = NETWORKS[name].build(modnn.WIDTH, modnn.SIDE)
    assert sum(weight.numel() for weight in model.parameters()) == PARAMETERS[name]


SIDE = 16


def small(width: int, side: int) -> nn.Module:
    layers = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width * (side // 2) ** 2, 1000, bias=False))


def test_the_ideal_case_and_equation_7() -> None:
    network = Network(small, 5)
    width = 64
    image, convolved, pooled, classes = 3 * SIDE**2, width * SIDE**2, width * SIDE**2 // 4, 1000
    first, last = 27 * width, pooled * classes
    one = modnn.captured(network, [1], width, SIDE)
    whole = modnn.captured(network, [5], width, SIDE)
    numbers = 5 * (image + 2 * (convolved + pooled + classes)) + 2 * (first + last)
    assert modnn.ideal_bytes(whole) == 4 * numbers + 5 * 8  # a label of 8 bytes for each image
    # The last product's weight and its gradient are 32 MB each; forward needs one, and its vectors.
    assert modnn.equation_7(one, False) == 4 * (last + pooled + classes)
    # Backward of the ReLU: what it gave, and two gradients.
    assert modnn.equation_7(one, True) == 4 * (2 * (first + last) + 3 * convolved)
    two = modnn.captured(network, [1, 1], width, SIDE)
    assert minimum_bytes(two.with_weights_kept()) >= modnn.equation_7(one, True)
    assert minimum_bytes(two) >= modnn.equation_7(one, False)


def maps() -> penstock.Trace:
    """Three convolutions of a second each, whose inputs, 100 bytes each, their backward kernels read."""
    step = Step()
    made = [step.tensor(100)]
    step.kernel("load", 1.0, [], [made[0]])
    for index in range(3):
        made.append(step.tensor(100))
        step.kernel(f"conv{index}", 1.0, [made[-2]], [made[-1]])
    for index in reversed(range(3)):
        gradient = step.tensor(50, "gradient")
        step.kernel(f"conv{index}.backward", 1.0, [made[index]], [gradient], phase="backward")
    return step.trace()


@pytest.mark.parametrize(("bytes_per_s", "longer_s"), [(1000.0, 0.0), (50.0, 1.0)])
def test_a_kernel_in_lock_step_takes_as_long_as_the_copies_beside_it(
    bytes_per_s: float, longer_s: float
) -> None:
    trace, hardware = maps(), machine(bytes_per_s / 4, host_bytes=1 << 20)
    held, plan = lockstep.lockstep(trace, hardware, "vdnn_all_lockstep", 300)
    assert check(trace, plan, hardware) == []
    assert plan.evictions
    beside = {evict.begin - 1 for evict in plan.evictions}
    ahead = {evict.prefetch_at for evict in plan.evictions if evict.prefetch_at < evict.end}
    expected = [1.0 + longer_s * (kernel in beside | ahead) for kernel in range(trace.kernels)]
    assert held.kernel_time_s.tolist() == expected
    locked_s = lockstep.step_s(trace, hardware, "vdnn_all_lockstep", 300)
    assert locked_s >= sum(expected)
    free = penstock.plan(trace, hardware, "vdnn_all", False, False, device_budget=300)
    assert locked_s >= free.predicted_step_s


def test_in_lock_step_all_maps_leave_where_the_batch_does_not_fit() -> None:
    trace, hardware = maps(), machine(50.0 / 4, host_bytes=1 << 20)
    assert lockstep.step_s(trace, hardware, "vdnn_all_lockstep", 1 << 20) == trace.ideal_s
    held, plan = lockstep.lockstep(trace, hardware, "vdnn_all_lockstep", 1 << 20, always=True)
    assert {evict.tensor for evict in plan.evictions} >= {0, 1}
    assert held.ideal_s > trace.ideal_s
