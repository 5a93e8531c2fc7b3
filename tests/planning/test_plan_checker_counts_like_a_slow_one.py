"""What the plan checker sums up with arrays equals what a kernel-by-kernel walk finds, tensor by tensor."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.hardware import Hardware
from penstock.core.memory_profile import minimum_bytes, required_bytes, resident_bytes, tier_bytes
from penstock.core.plan import Evict, Plan
from penstock.core.trace import Trace
from tests.support.traces import legal_plans, machines, traces, whole_traces

any_trace = st.one_of(traces(), whole_traces())


def hit(kernel: int, begin: int, end: int, count: int) -> bool:
    """Whether [begin, end), which may reach into the next iteration, covers the kernel."""
    return begin <= kernel < end or begin <= kernel + count < end


def walked(trace: Trace, plan: Plan) -> list[int]:
    """Device bytes at each kernel by the rules, one tensor after the other."""
    count, most = trace.kernels, []
    for kernel in range(count):
        held: dict[int, int] = {}
        for tensor in range(trace.tensors):
            if not trace.tensor_birth[tensor] <= kernel < trace.tensor_death[tensor]:
                continue
            held[tensor] = int(trace.tensor_bytes[tensor])
        packed = 0
        for evict in plan.evictions:
            small = trace.compressed_bytes(evict.tensor)
            if hit(kernel, evict.begin, evict.prefetch_at, count):
                del held[evict.tensor]
            elif evict.codec == "csr" and hit(kernel, evict.prefetch_at, evict.end, count):
                held[evict.tensor] = small
            if evict.codec == "csr" and hit(kernel, evict.end, evict.end + 1, count):
                packed += small
        for entry in plan.recomputations:
            if hit(kernel, entry.begin, entry.end, count):
                del held[entry.tensor]
        now = sum(held.values()) + packed
        needs = [now + workspace(trace, plan, kernel)]
        born = sum(
            int(trace.tensor_bytes[tensor])
            for tensor in range(trace.tensors)
            if trace.tensor_birth[tensor] == kernel and not trace.tensor_persistent[tensor]
        )
        for entry in plan.recomputations:
            if entry.end % count == kernel:
                producer = int(trace.tensor_recompute[entry.tensor])
                extra = workspace(trace, plan, producer)
                for tensor in trace.outputs[producer].tolist():
                    whole = int(trace.tensor_bytes[tensor])
                    if tensor != entry.tensor and (
                        tensor not in held or compressed_at(plan, tensor, kernel, count)
                    ):
                        extra += whole
                needs.append(now - born + extra)
        leaving = [e for e in plan.evictions if e.codec == "csr" and e.begin % count == kernel]
        if leaving:
            whole = sum(int(trace.tensor_bytes[e.tensor]) for e in leaving)
            needs.append(now - born + whole + max(trace.compressed_bytes(e.tensor) for e in leaving))
        most.append(max(needs))
    return most


def workspace(trace: Trace, plan: Plan, kernel: int) -> int:
    if plan.variants and plan.variants[kernel] >= 0:
        return trace.kernel_variants[kernel][plan.variants[kernel]].workspace_bytes
    return int(trace.kernel_workspace_bytes[kernel])


def compressed_at(plan: Plan, tensor: int, kernel: int, count: int) -> bool:
    return any(
        evict.codec == "csr" and evict.tensor == tensor and hit(kernel, evict.prefetch_at, evict.end, count)
        for evict in plan.evictions
    )


def assert_a_kernel_needs_what_it_uses(trace: Trace) -> None:
    """With everything away whenever it can be, of no tier and at no cost."""
    away = tuple(
        Evict(tensor, begin - 1, begin, end, end) for tensor, begin, end, _ in trace.inactive_periods
    )
    workspaces = [
        [int(traced), *(variant.workspace_bytes for variant in others)]
        for traced, others in zip(
            trace.kernel_workspace_bytes, trace.kernel_variants or ((),) * trace.kernels, strict=True
        )
    ]
    variants = tuple(sizes.index(min(sizes)) - 1 for sizes in workspaces)
    made = Plan(policy="all away", device_budget_bytes=0, evictions=away, variants=variants)
    least = walked(trace, made)
    assert required_bytes(trace).tolist() == least
    assert minimum_bytes(trace) == max(least)
    for kernel in range(trace.kernels):
        used = {*trace.inputs[kernel].tolist(), *trace.outputs[kernel].tolist()}
        sizes = sum(int(trace.tensor_bytes[tensor]) for tensor in used)
        assert least[kernel] == sizes + min(workspaces[kernel])


def copies_in_use(trace: Trace, plan: Plan, iterations: int = 4) -> dict[str, list[int]]:
    """Bytes on each tier at each kernel of the last iteration but one, by following versions of tensors:
    a copy is made unless one of the same version is there, and kept while somebody still comes for it."""
    count = trace.kernels
    wraps = any(evict.end >= count for evict in plan.evictions)
    made: list[tuple[str, int, int, int]] = []  # tier, bytes, first kernel, past the last
    newest: dict[tuple[int, str, str], list[int]] = {}  # kernel after which copied, end, row of `made`
    rounds = iterations if wraps else 1
    steps = [
        (n * count, evict) for n in range(rounds) for evict in sorted(plan.evictions, key=lambda e: e.begin)
    ]
    for shift, evict in steps:
        key = (evict.tensor, evict.tier, evict.codec)
        if not trace.tensor_persistent[evict.tensor]:
            key = (evict.tensor, evict.tier, f"{evict.codec} of iteration {shift}")
        writes = [k + n * count for n in range(rounds) for k in trace.writers[evict.tensor].tolist()]
        known = newest.get(key)
        small = trace.compressed_bytes(evict.tensor)
        size = small if evict.codec == "csr" else int(trace.tensor_bytes[evict.tensor])
        if known and not any(known[0] < kernel < shift + evict.begin for kernel in writes):
            tier, size, first, _ = made[known[1]]
            made[known[1]] = (tier, size, first, shift + evict.end + 1)
        else:
            newest[key] = [shift + evict.after, len(made)]
            made.append((evict.tier, size, shift + evict.after + 1, shift + evict.end + 1))
    begin = (rounds - 2) * count if wraps else 0
    found: dict[str, list[int]] = {}
    for tier, size, first, last in made:
        row = found.setdefault(tier, [0] * count)
        for kernel in range(count):
            row[kernel] += size * (first <= begin + kernel < last)
    return found


@given(data=st.data(), trace=any_trace, hardware=machines)
@settings(max_examples=80)
def test_memory_of_the_device_and_of_the_tiers(data: st.DataObject, trace: Trace, hardware: Hardware) -> None:
    plan = data.draw(legal_plans(trace, hardware))
    found = resident_bytes(trace, plan.evictions, plan.recomputations, plan.variants)
    assert found.tolist() == walked(trace, plan)
    counted = tier_bytes(trace, plan.evictions)
    assert {tier: row.tolist() for tier, row in counted.items()} == copies_in_use(trace, plan)
    assert_a_kernel_needs_what_it_uses(trace)
