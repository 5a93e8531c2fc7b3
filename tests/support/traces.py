"""Synthetic traces for tests: a small builder, random legal traces, and a GPT-like one."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

from penstock.core.check import check
from penstock.core.columns import KINDS, PHASES, Lists
from penstock.core.hardware import Hardware
from penstock.core.memory_profile import resident_bytes, tier_bytes
from penstock.core.plan import Evict, Plan, Recompute
from penstock.core.trace import Trace, Variant

PAGE = 4096

# Published results: in the repository. Published traces: beside it, or where the environment says.
PUBLISHED = Path(__file__).parents[1] / "data" / "g10" / "published.json"
G10_DATA = Path(os.environ.get("PENSTOCK_G10_DATA", Path(__file__).parents[3] / "shared" / "data" / "g10"))
needs_g10_data = pytest.mark.skipif(
    not G10_DATA.is_dir(), reason=f"no published traces in {G10_DATA}: set PENSTOCK_G10_DATA to their folder"
)


def published_times(figure: str) -> dict[str, dict[str, float | None]]:
    """[case][system] seconds an iteration in one of G10's figures, None where the system failed."""
    times: dict[str, dict[str, float | None]] = json.loads(PUBLISHED.read_text())[figure]
    return times


@dataclass
class Step:
    """One iteration under construction: add tensors and kernels in order, then `trace()`."""

    names: list[str] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    workspaces: list[int] = field(default_factory=list)
    phases: list[int] = field(default_factory=list)
    inputs: list[list[int]] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    persistent: list[bool] = field(default_factory=list)

    def tensor(self, size_bytes: int, kind: str = "activation", persistent: bool = False) -> int:
        self.sizes.append(size_bytes)
        self.kinds.append(KINDS.index(kind))
        self.persistent.append(persistent)
        return len(self.sizes) - 1

    def kernel(
        self,
        name: str,
        time_s: float,
        inputs: Sequence[int] = (),
        outputs: Sequence[int] = (),
        workspace_bytes: int = 0,
        phase: str = "forward",
    ) -> int:
        self.names.append(name)
        self.times_s.append(time_s)
        self.workspaces.append(workspace_bytes)
        self.phases.append(PHASES.index(phase))
        self.inputs.append(list(inputs))
        self.outputs.append(list(outputs))
        return len(self.names) - 1

    def trace(self) -> Trace:
        uses: list[list[int]] = [[] for _ in self.sizes]
        for kernel, lists in enumerate(zip(self.inputs, self.outputs, strict=True)):
            for tensor in {tensor for entry in lists for tensor in entry}:
                uses[tensor].append(kernel)
        count = len(self.names)
        birth = [0 if keep else used[0] for used, keep in zip(uses, self.persistent, strict=True)]
        death = [count if keep else used[-1] + 1 for used, keep in zip(uses, self.persistent, strict=True)]
        return Trace(
            kernel_name=tuple(self.names),
            kernel_time_s=np.array(self.times_s, dtype=np.float64),
            kernel_workspace_bytes=np.array(self.workspaces, dtype=np.int64),
            kernel_phase=np.array(self.phases, dtype=np.int64),
            inputs=Lists.of(self.inputs),
            outputs=Lists.of(self.outputs),
            tensor_bytes=np.array(self.sizes, dtype=np.int64),
            tensor_kind=np.array(self.kinds, dtype=np.int64),
            tensor_persistent=np.array(self.persistent, dtype=np.bool_),
            tensor_birth=np.array(birth, dtype=np.int64),
            tensor_death=np.array(death, dtype=np.int64),
        )


def machine(
    disk_bytes_per_s: float = 1e9,
    device_bytes: int = 2**50,
    host_bytes: int = 0,
    latency_s: float = 0.0,
    disk_bytes: int = 2**50,
    duplex: float = 1.0,
) -> Hardware:
    """A machine whose disk is reached directly, and whose host memory is four times as fast."""
    return Hardware(
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
        device_to_host_bytes_per_s=4 * disk_bytes_per_s,
        host_to_device_bytes_per_s=4 * disk_bytes_per_s,
        disk_read_bytes_per_s=disk_bytes_per_s,
        disk_write_bytes_per_s=disk_bytes_per_s,
        disk_read_latency_s=latency_s,
        disk_write_latency_s=latency_s,
        disk_shares_bus=False,
        duplex=duplex,
    )


def five_kernels() -> Trace:
    """a, b, c each make 100 bytes; y needs those of b and z those of a.

    Every kernel takes 1 s. Live bytes: 100, 200, 300, 200, 100.
    """
    step = Step()
    first, second, third = (step.tensor(100) for _ in range(3))
    step.kernel("a", 1.0, outputs=[first])
    step.kernel("b", 1.0, outputs=[second])
    step.kernel("c", 1.0, outputs=[third])
    step.kernel("y", 1.0, inputs=[second], phase="backward")
    step.kernel("z", 1.0, inputs=[first], phase="backward")
    return step.trace()


def gpt(layers: int = 12, unit_bytes: int = 2**20, unit_s: float = 1e-3, split: int = 1) -> Trace:
    """A GPT-like step: every layer makes eight activations, backward needs them in reverse order.

    unit_bytes   one activation of batch * length * width
    unit_s       time of the kernel that multiplies by a square matrix, width * width
    split        kernels that each operation is divided into
    """
    step = Step()

    def kernel(name: str, units: float, inputs: list[int], outputs: list[int], phase: str) -> None:
        for part in range(split):
            step.kernel(f"{name}.{part}", units * unit_s / split, inputs, outputs, unit_bytes // 2, phase)

    weights = [step.tensor(6 * unit_bytes, "weight", persistent=True) for _ in range(layers)]
    layout = (
        ("norm1", 1, 0.1),
        ("qkv", 3, 3.0),
        ("attention", 1, 1.0),
        ("project", 1, 1.0),
        ("norm2", 1, 0.1),
        ("up", 4, 4.0),
        ("gelu", 4, 0.2),
        ("down", 1, 4.0),
    )
    stack: list[tuple[str, float, int, int]] = []
    current = step.tensor(unit_bytes, "input")
    for layer in range(layers):
        for name, units, time in layout:
            made = step.tensor(units * unit_bytes)
            kernel(f"{layer}.{name}", time, [current, weights[layer]], [made], "forward")
            stack.append((f"{layer}.{name}.backward", time, current, layer))
            current = made
    grad = step.tensor(step.sizes[current])
    kernel("loss", 0.1, [current], [grad], "forward")
    for name, time, saved, layer in reversed(stack):
        made = step.tensor(step.sizes[saved])
        kernel(name, 2 * time, [grad, saved, weights[layer]], [made], "backward")
        grad = made
    return step.trace()


@st.composite
def traces(draw: st.DrawFn, tensors: int = 8) -> Trace:
    """Random legal steps of up to ``tensors`` activations: any order of use in backward, tensors used
    more than once, edited in place, workspaces, weights."""
    step = Step()
    size = st.integers(1, 1000).map(lambda pages: pages * PAGE)
    weight = step.tensor(draw(size), "weight", persistent=True)
    saved: list[int] = []
    time = st.sampled_from([0.0, 0.5, 1.0, 3.0])
    for index in range(draw(st.integers(1, tensors))):
        made = step.tensor(draw(size))
        read = [weight, *draw(st.lists(st.sampled_from(saved), max_size=1))] if saved else [weight]
        step.kernel(f"forward{index}", draw(time), read, [made], draw(st.sampled_from([0, 0, 200 * PAGE])))
        saved.append(made)
    count = len(saved)
    order = draw(st.permutations(saved))
    again = draw(st.lists(st.sampled_from(saved), max_size=3))
    for index, tensor in enumerate([*order, *again]):
        made = step.tensor(draw(size), "gradient")
        edits = [tensor] if index >= count and draw(st.booleans()) else []
        step.kernel(f"backward{index}", draw(time), [tensor, weight], [made, *edits], phase="backward")
    return step.trace()


machines = st.builds(
    machine,
    disk_bytes_per_s=st.sampled_from([50.0 * PAGE, 300.0 * PAGE, 1000.0 * PAGE, 1e5 * PAGE]),
    host_bytes=st.sampled_from([0, 500 * PAGE, 2**40]),
    latency_s=st.sampled_from([0.0, 0.1]),
)

_few = st.integers(0, 2000).map(lambda pages: pages * PAGE)
small_tiers = st.builds(machine, st.just(300.0 * PAGE), host_bytes=_few, disk_bytes=_few)


def one_byte_less(trace: Trace, plan: Plan, hardware: Hardware) -> Hardware:
    """The machine, with tiers that the plan's copies do not fit into."""
    used = {tier: int(occupied.max()) for tier, occupied in tier_bytes(trace, plan.evictions).items()}
    return replace(hardware, **{f"{tier}_bytes": max(most - 1, 0) for tier, most in used.items()})


@st.composite
def whole_traces(draw: st.DrawFn, kernels: int = 8) -> Trace:
    """Random legal steps of up to ``kernels`` forward kernels in which any tensor may leave: weights that
    the optimizer writes, weights that nobody does, inputs, activations of several outputs, some
    edited in place, workspaces, gradients that are summed up, kernel variants, densities, and links to the
    kernels that can be run again."""
    step = Step()
    size = st.integers(1, 1000).map(lambda pages: pages * PAGE)
    time = st.sampled_from([0.0, 0.5, 1.0, 3.0])
    weights = [step.tensor(draw(size), "weight", persistent=True) for _ in range(draw(st.integers(1, 3)))]
    made = [step.tensor(draw(size), "input")]
    for index in range(draw(st.integers(1, kernels))):
        read = draw(st.lists(st.sampled_from(made), min_size=1, max_size=2, unique=True))
        if index == 0:
            read = made[:1]
        read += draw(st.lists(st.sampled_from(weights), max_size=1))
        wrote = [step.tensor(draw(size)) for _ in range(draw(st.sampled_from([1, 1, 1, 2])))]
        made_here = list(wrote)
        if draw(st.integers(0, 3)) == 0:
            wrote.append(step.tensor(draw(size), "workspace"))
        if index and draw(st.integers(0, 5)) == 0:
            wrote.append(read[0])  # edited in place
        step.kernel(f"forward{index}", draw(time), read, wrote, draw(st.sampled_from([0, 0, 200 * PAGE])))
        made += made_here
    gradients: list[int] = []
    for index, tensor in enumerate(draw(st.permutations(made))):
        read = [tensor, *draw(st.lists(st.sampled_from(weights), max_size=1))]
        read += draw(st.lists(st.sampled_from(gradients), max_size=1)) if gradients else []
        summed = bool(gradients) and draw(st.booleans())
        wrote = [gradients[-1] if summed else step.tensor(draw(size), "gradient")]
        read += [entry for entry in wrote if entry in gradients and entry not in read]
        step.kernel(f"backward{index}", draw(time), read, wrote, phase="backward")
        gradients += [entry for entry in wrote if entry not in gradients]
    for weight in weights:
        if draw(st.booleans()):
            gradient = draw(st.sampled_from(gradients))
            step.kernel(f"update{weight}", draw(time), [weight, gradient], [weight], phase="optimizer")
    used = {entry for lists in (*step.inputs, *step.outputs) for entry in lists}
    for weight in weights:
        if weight not in used:
            step.kernel(f"norm{weight}", draw(time), [weight], phase="optimizer")
    plain = step.trace()
    variants: tuple[tuple[Variant, ...], ...] = ()
    if draw(st.booleans()):
        variant = st.builds(Variant, st.just("other"), time, st.sampled_from([0, 100 * PAGE, 900 * PAGE]))
        variants = tuple(tuple(draw(st.lists(variant, max_size=2))) for _ in range(plain.kernels))
    density = [draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])) for _ in step.sizes] if draw(st.booleans()) else []
    return replace(
        plain,
        tensor_recompute=recompute_links(plain),
        tensor_density=np.array(density, dtype=np.float64),
        kernel_variants=variants,
    )


def recompute_links(trace: Trace) -> np.ndarray:
    """[T] the forward kernel that can be run again to recompute each activation, -1 where none can."""
    links = np.full(trace.tensors, -1, dtype=np.int64)
    for kernel in range(trace.kernels):
        outputs = trace.outputs[kernel].tolist()
        alone = all(trace.writers[tensor].tolist() == [kernel] for tensor in outputs)
        reads = set(trace.inputs[kernel].tolist())
        if trace.kernel_phase[kernel] == 0 and alone and not reads & set(outputs):
            for tensor in outputs:
                if trace.tensor_kind[tensor] == KINDS.index("activation"):
                    links[tensor] = kernel
    return links


def candidates(trace: Trace) -> list[Evict]:
    """An eviction to the disk for each inactive period: copied once complete, back when it is needed."""
    found = []
    for tensor, begin, end, ready in trace.inactive_periods:
        edits = [kernel for kernel in trace.writers[tensor].tolist() if ready < kernel < begin]
        found.append(Evict(tensor, max([ready, *edits]), begin, end, prefetch_at=end))
    return found


@st.composite
def legal_plans(draw: st.DrawFn, trace: Trace, hardware: Hardware, slack_bytes: int = 0) -> Plan:
    """Random legal plans with every action that trace and machine allow. The budget is what the plan needs,
    and up to ``slack_bytes`` more."""
    made = Plan(policy="drawn", device_budget_bytes=hardware.device_bytes)
    tiers = [tier for tier in ("host", "disk") if hardware.capacity_bytes(tier) > 0]
    if trace.kernel_variants and draw(st.booleans()):
        chosen = [draw(st.integers(-1, len(others) - 1)) for others in trace.kernel_variants]
        made = replace(made, variants=tuple(chosen))
    for option in candidates(trace):
        ways = ["keep", *(["evict"] * 3 if tiers else [])]
        if len(trace.tensor_recompute) and trace.tensor_recompute[option.tensor] >= 0:
            ways += ["recompute"] * 2
        way = draw(st.sampled_from(ways))
        if way == "keep":
            continue
        begin = draw(st.integers(option.begin, min(option.end - 1, trace.kernels)))
        end = draw(st.integers(begin + 1, option.end)) if draw(st.booleans()) else option.end
        if way == "recompute":
            entries = sorted(
                (*made.recomputations, Recompute(option.tensor, begin, end)),
                key=lambda entry: (entry.end, int(trace.tensor_recompute[entry.tensor])),
            )
            longer = replace(made, recomputations=tuple(entries))
        else:
            small = trace.compressed_bytes(option.tensor) < trace.tensor_bytes[option.tensor]
            codec = draw(st.sampled_from(["raw", "csr"])) if small else "raw"
            evict = replace(
                option,
                after=begin - 1 if codec == "csr" else draw(st.integers(option.after, begin - 1)),
                begin=begin,
                end=end,
                prefetch_at=draw(st.integers(begin, end)),
                tier=draw(st.sampled_from(tiers)),
                codec=codec,
            )
            entries_out = sorted((*made.evictions, evict), key=lambda entry: (entry.after, entry.begin))
            longer = replace(made, evictions=tuple(entries_out))
        needed = max_resident(trace, longer)
        if needed <= hardware.device_bytes and not check(trace, longer, hardware):
            made = longer
    budget = max_resident(trace, made) + draw(st.integers(0, slack_bytes))
    return replace(made, device_budget_bytes=budget)


def max_resident(trace: Trace, plan: Plan) -> int:
    """The least budget at which the plan is legal, as far as the device goes."""
    resident = resident_bytes(trace, plan.evictions, plan.recomputations, plan.variants)
    return int(resident.max(initial=0))
