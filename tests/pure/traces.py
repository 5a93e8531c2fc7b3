"""Synthetic traces for tests: a small builder, random legal traces, and a GPT-like one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from penstock.core.hardware import Hardware
from penstock.core.trace import KINDS, PHASES, Lists, Trace

PAGE = 4096


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
    saved: dict[int, int] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)

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

    def save(self, tensor: int, held_until: int | None = None) -> None:
        """Autograd saves ``tensor`` now, before the next kernel, and alone holds it from
        ``held_until`` on: the next kernel when not given."""
        self.saved[tensor] = len(self.names)
        self.held[tensor] = len(self.names) if held_until is None else held_until

    def trace(self) -> Trace:
        uses: list[list[int]] = [[] for _ in self.sizes]
        for kernel, lists in enumerate(zip(self.inputs, self.outputs, strict=True)):
            for tensor in {tensor for entry in lists for tensor in entry}:
                uses[tensor].append(kernel)
        count = len(self.names)
        birth = [0 if keep else used[0] for used, keep in zip(uses, self.persistent, strict=True)]
        death = [count if keep else used[-1] + 1 for used, keep in zip(uses, self.persistent, strict=True)]
        loads = sorted(
            (kernel, tensor)
            for tensor, saved_at in self.saved.items()
            for kernel in uses[tensor]
            if kernel >= max(saved_at, self.held[tensor])
        )
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
            tensor_held_until=np.array(
                [self.held.get(tensor, end) for tensor, end in enumerate(death)], dtype=np.int64
            ),
            save_tensor=np.array(list(self.saved), dtype=np.int64),
            save_kernel=np.array(list(self.saved.values()), dtype=np.int64),
            load_tensor=np.array([tensor for _, tensor in loads], dtype=np.int64),
            load_kernel=np.array([kernel for kernel, _ in loads], dtype=np.int64),
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
    """a, b, c each make 100 bytes, of which the first two are saved; y needs b and z needs a.

    Every kernel takes 1 s. Live bytes: 100, 200, 300, 200, 100.
    """
    step = Step()
    first, second, third = (step.tensor(100) for _ in range(3))
    step.kernel("a", 1.0, outputs=[first])
    step.save(first)
    step.kernel("b", 1.0, outputs=[second])
    step.save(second)
    step.kernel("c", 1.0, outputs=[third])
    step.kernel("y", 1.0, inputs=[second], phase="backward")
    step.kernel("z", 1.0, inputs=[first], phase="backward")
    return step.trace()


def gpt(layers: int = 12, unit_bytes: int = 2**20, unit_s: float = 1e-3, split: int = 1) -> Trace:
    """A GPT-like step: every layer saves eight activations, backward needs them in reverse order.

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
            if current not in step.saved:
                step.save(current)
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
    """Random legal steps of up to ``tensors`` saved tensors: any order of use in backward, tensors used
    more than once, edited in place, held by the program for longer, workspaces, weights."""
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
    for tensor in saved:
        step.saved[tensor] = tensor  # tensor i, after the weight, is made by kernel i - 1
        used = max(k for k in range(count) if tensor in step.inputs[k] or tensor in step.outputs[k])
        step.held[tensor] = min(count, used + 1 + draw(st.integers(0, 1)))
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
