"""With `keep_weights` no plan moves a weight or a gradient, the minimum has room for them (moDNN's equation 7
in its resident form), and the plan checker names a plan that moves one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.check import check
from penstock.core.columns import KINDS
from penstock.core.hardware import Hardware
from penstock.core.memory_profile import least_workspace_bytes, minimum_bytes
from penstock.core.trace import Trace
from penstock.errors import BudgetTooSmall
from penstock.planners import POLICIES, plan
from penstock.simulator import simulate
from tests.support.traces import PAGE, Step, gpt, machine, machines, traces, whole_traces

EVICTING = [name for name in POLICIES if name not in ("keep", "flashneuron")]


def kept(trace: Trace) -> np.ndarray:
    return np.isin(trace.tensor_kind, [KINDS.index("weight"), KINDS.index("gradient")])


@given(trace=st.one_of(traces(), whole_traces()), hardware=machines, fraction=st.floats(0, 1))
@settings(max_examples=60)
def test_no_policy_moves_them(trace: Trace, hardware: Hardware, fraction: float) -> None:
    least = minimum_bytes(trace.with_weights_kept())
    the_minimum_holds_all_that_are_alive_and_one_kernel(trace, least)
    budget = least + int(fraction * (trace.peak_bytes - least))
    for policy in EVICTING:
        made = plan(trace, hardware, policy, time_limit_s=0.1, device_budget=budget, keep_weights=True)
        moved = [evict.tensor for evict in made.evictions] + [again.tensor for again in made.recomputations]
        assert not kept(trace)[moved].any()
        assert made.trace is not None and made.minimum_bytes == least
        assert check(made.trace, made, hardware) == [] and check(trace, made, hardware) == []
        assert simulate(made.trace, made, hardware).peak_bytes <= budget


def the_minimum_holds_all_that_are_alive_and_one_kernel(trace: Trace, least: int) -> None:
    of_weights = kept(trace)
    needed = []
    for kernel in range(trace.kernels):
        alive = (trace.tensor_birth <= kernel) & (kernel < trace.tensor_death)
        used = np.zeros(trace.tensors, dtype=np.bool_)
        used[[*trace.inputs[kernel], *trace.outputs[kernel]]] = True
        held = used | (of_weights & alive)
        needed.append(int(trace.tensor_bytes[held].sum() + least_workspace_bytes(trace)[kernel]))
    assert least >= max(needed) >= minimum_bytes(trace)


def two_layers() -> Trace:
    """Two weights of ten pages, each used in forward and in backward, beside maps of a page."""
    step = Step()
    weights = [step.tensor(10 * PAGE, "weight", persistent=True) for _ in range(2)]
    maps = [step.tensor(PAGE, "input")]
    for index, weight in enumerate(weights):
        maps.append(step.tensor(PAGE))
        step.kernel(f"forward{index}", 1.0, [maps[-2], weight], [maps[-1]])
    for index in reversed(range(2)):
        step.kernel(f"backward{index}", 1.0, [maps[index], weights[index]], [], phase="backward")
    return step.trace()


def test_equation_7_in_both_forms() -> None:
    trace = two_layers()
    assert minimum_bytes(trace) == 12 * PAGE
    assert minimum_bytes(trace.with_weights_kept()) == 22 * PAGE
    with pytest.raises(BudgetTooSmall) as raised:
        plan(trace, machine(), device_budget=21 * PAGE, keep_weights=True)
    assert raised.value.minimum_bytes == 22 * PAGE


def test_the_plan_checker_names_a_weight_that_moves() -> None:
    trace = two_layers()
    moving = plan(trace, machine(), "evict_all", device_budget=12 * PAGE)
    assert check(trace, moving, machine()) == []
    violations = check(trace.with_weights_kept(), moving, machine())
    assert any("stays on the device (kind: weight)" in each for each in violations)


def test_activations_alone_move_in_a_gpt() -> None:
    trace = gpt()
    least, most = minimum_bytes(trace.with_weights_kept()), trace.peak_bytes
    made = plan(trace, machine(), device_budget=(least + most) // 2, keep_weights=True)
    kinds = {KINDS[trace.tensor_kind[evict.tensor]] for evict in made.evictions}
    assert kinds and kinds <= {"activation", "input", "optimizer_state"}
