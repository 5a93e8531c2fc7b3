"""Which tensors a lossy plan may round, and that planners, simulator and checker count the codec's size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.core.plan import Evict, Plan
from penstock.core.trace import Trace
from penstock.errors import InvalidArgument
from tests.support.traces import PAGE, Step, machine

SIZE = 100 * PAGE
LAYERS = 6


def _step(change: Callable[[Step, int], None] = lambda step, saved: None, kind: str = "activation") -> Trace:
    """Kernel 0 makes tensor 0, which kernel 1 reads, and after 3 others a kernel of backward."""
    step = Step()
    saved, other, grad = step.tensor(SIZE, kind), step.tensor(SIZE), step.tensor(SIZE)
    step.kernel("make", 1.0, [], [saved])
    step.kernel("use", 1.0, [saved], [other])
    for _ in range(3):
        step.kernel("busy", 1.0, [other], [other])
    step.kernel("backward", 1.0, [other], [grad], phase="backward")
    step.kernel("backward of it", 1.0, [saved, grad], [grad], phase="backward")
    change(step, saved)
    step.kernel("last", 1.0, [grad], [grad], phase="backward")
    step.kernel("update", 1.0, [grad], [grad], phase="optimizer")
    trace = step.trace()
    return replace(trace, tensor_float32=np.ones(trace.tensors, dtype=np.bool_))


def _stashed(trace: Trace) -> list[int]:
    return np.flatnonzero(trace.with_lossy("fp16").tensor_stashed).tolist()


def _forward_again(step: Step, saved: int) -> None:
    step.kernel("recomputed forward", 1.0, [saved], [])


def _written(step: Step, saved: int) -> None:
    step.kernel("in place", 1.0, [saved], [saved], phase="backward")


def _optimizer(step: Step, saved: int) -> None:
    step.kernel("optimizer", 1.0, [saved], [], phase="optimizer")


def test_an_activation_that_backward_alone_reads_again() -> None:
    assert _stashed(_step()) == [0]


@pytest.mark.parametrize("change", [_forward_again, _written, _optimizer])
def test_what_others_read_or_write_keeps_its_bits(change: Callable[[Step, int], None]) -> None:
    assert _stashed(_step(change)) == []


@pytest.mark.parametrize("kind", ["weight", "gradient", "optimizer_state", "input", "workspace"])
def test_only_activations(kind: str) -> None:
    assert _stashed(_step(kind=kind)) == []


def test_only_float32_that_dies_in_backward_and_is_not_smaller_without_loss() -> None:
    trace = _step()
    assert _stashed(replace(trace, tensor_float32=np.zeros(3, dtype=np.bool_))) == []
    death = trace.tensor_death.copy()
    death[0] = trace.kernels  # the program still has it, and may look at it
    assert _stashed(replace(trace, tensor_death=death)) == []
    density = np.ones(3)
    density[0] = 0.2
    sparse = replace(trace, tensor_density=density)
    assert _stashed(sparse) == [] and sparse.with_lossy("fp16").codec(0) == "csr"
    with pytest.raises(InvalidArgument, match="float32"):
        replace(trace, tensor_float32=np.zeros(0, dtype=np.bool_)).with_lossy("fp16")
    with pytest.raises(InvalidArgument, match="fp16 or bf16"):
        trace.with_lossy("fp8")


def _hardware(**options: Any) -> penstock.Hardware:
    rates = {"fp16": (50.0 * SIZE, 100.0 * SIZE)}
    return replace(machine(SIZE / 2.0), measured_codecs=rates, **options)


@pytest.mark.parametrize("policy", ["optimal", "flashneuron"])
def test_plans_and_timelines_count_half(policy: str) -> None:
    step = Step()
    layers = [step.tensor(SIZE) for _ in range(LAYERS)]
    for index, layer in enumerate(layers):
        step.kernel("forward", 1.0, layers[max(index - 1, 0) : index], [layer])
    grad = step.tensor(SIZE)
    for layer in reversed(layers):
        step.kernel("backward", 1.0, [layer], [grad], phase="backward")
    step.kernel("last", 1.0, [grad], [], phase="backward")
    step.kernel("update", 1.0, [grad], [grad], phase="optimizer")
    trace = replace(step.trace(), tensor_float32=np.ones(LAYERS + 1, dtype=np.bool_))
    budget_bytes = 4 * SIZE + 2 * PAGE
    found = {
        lossy: penstock.plan(trace, _hardware(), policy, device_budget=budget_bytes, lossy=lossy)
        for lossy in (None, "fp16")
    }
    exact, lossy = found[None], found["fp16"]
    assert exact.lossy is None and lossy.lossy == "fp16"
    assert lossy.predicted_step_s < exact.predicted_step_s
    assert lossy.lower_bound_s <= lossy.predicted_step_s
    assert penstock.check(trace, lossy, _hardware()) == []
    timeline = penstock.simulate(trace, lossy, _hardware())
    sizes = {span.label: span.size_bytes for span in timeline.spans if span.stream == "disk_write"}
    for evict in lossy.evictions:
        if evict.codec == "fp16":
            written = evict.prefetch_at > evict.begin  # else it stays, compressed
            assert sizes.get(f"tensor {evict.tensor}", 0) == written * SIZE // 2
    work = {span.label: span.end_s - span.start_s for span in timeline.spans if span.stream == "compute"}
    first = next(evict.tensor for evict in lossy.evictions if evict.codec == "fp16")
    assert work[f"compress tensor {first}"] == pytest.approx(1 / 50)
    assert work[f"expand tensor {first}"] == pytest.approx(1 / 100)


def test_the_checker_refuses_what_must_not_be_rounded() -> None:
    trace = _step(_forward_again)
    plan = Plan(
        policy="by hand", device_budget_bytes=4 * SIZE, evictions=(Evict(0, 1, 2, 6, 6, codec="fp16"),)
    )
    (violation,) = penstock.check(trace, plan, _hardware())
    assert "lossy" in violation and "backward alone reads" in violation
    assert penstock.check(_step(), plan, _hardware()) == []
