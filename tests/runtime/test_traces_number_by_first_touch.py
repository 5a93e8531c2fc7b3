"""Kernels and tensors have the numbers that a run gives them as it meets them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import penstock
from penstock.capture.operators import describe
from penstock.capture.phases import FORWARD, GRADIENT, INPUT, OPTIMIZER_STATE, WEIGHT, Phases
from penstock.capture.recorder import KernelRecord, TensorRecord, make_trace
from penstock.core.columns import KINDS, PHASES
from tests.support.families import FAMILIES, Family


class Numbering(TorchDispatchMode):
    """Numbers storages as it meets them, and notes what each kernel touches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.touched: list[list[int]] = []
        self.bytes: list[int] = []
        self._numbers: dict[int, int] = {}
        self._kept: list[torch.UntypedStorage] = []  # so that no address is used twice

    def _touch(self, values: object) -> None:
        for tensor in tree_leaves(values):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._numbers:
                    self._numbers[storage._cdata] = len(self._numbers)
                    self._kept.append(storage)
                    self.bytes.append(storage.nbytes())
                number = self._numbers[storage._cdata]
                if number not in self.touched[-1]:
                    self.touched[-1].append(number)

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not describe(operator).is_kernel:
            return operator(*args, **kwargs)
        self.names.append(describe(operator).name)
        self.touched.append([])
        if not describe(operator).reads_shapes:
            self._touch(args)
            self._touch(list(kwargs.values()))
        result = operator(*args, **kwargs)
        self._touch(result)
        return result


def step_of(family: Family) -> Any:
    torch.manual_seed(7)
    model = family.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step() -> None:
        optimizer.zero_grad()
        family.backward(family.loss(model, 0))
        optimizer.step()

    return step


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "lstm"])
@pytest.mark.parametrize("fake", [True, False], ids=["fake", "real"])
def test_a_trace_has_the_numbers_of_a_run(name: str, fake: bool) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        traced = penstock.trace(step_of(FAMILIES[name]), fake=fake, **({"device": "h100"} if fake else {}))
        step = step_of(FAMILIES[name])
        step()  # the optimizer's state exists
        with Numbering() as run:
            step()
    finally:
        torch.set_num_threads(threads)
    assert list(traced.kernel_name) == run.names
    for kernel, touched in enumerate(run.touched):
        both = [*traced.inputs[kernel].tolist(), *traced.outputs[kernel].tolist()]
        assert list(dict.fromkeys(both)) == touched, (kernel, run.names[kernel])
    assert traced.tensor_bytes[: len(run.bytes)].tolist() == run.bytes
    untouched = range(len(run.bytes), traced.tensors)
    assert all(len(traced.uses[tensor]) == 0 for tensor in untouched)


def test_gradients_of_the_step_before_are_there_until_they_are_given_up() -> None:
    traced = penstock.trace(step_of(FAMILIES["gpt"]), device="h100")
    gradient = KINDS.index("gradient")
    made = np.flatnonzero((traced.tensor_kind == gradient) & ~traced.tensor_persistent)
    assert len(made) and (traced.tensor_death[made] == traced.kernels).all()
    assert (traced.tensor_birth[made] > 0).all()
    assert not traced.tensor_persistent[traced.tensor_kind == gradient].any()


def test_a_sparse_gradient_is_its_indices_and_values() -> None:
    torch.manual_seed(0)
    table = torch.nn.Embedding(1000, 16, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    words = torch.arange(8)

    def step() -> None:
        optimizer.zero_grad()
        table(words).sum().backward()
        optimizer.step()

    trace = penstock.trace(step, fake=False)
    gradients = np.flatnonzero((trace.tensor_kind == KINDS.index("gradient")) & (trace.tensor_birth > 0))
    assert sorted(trace.tensor_bytes[gradients].tolist()) == [8 * 8, 8 * 16 * 4]
    (update,) = (kernel for kernel in range(trace.kernels) if trace.kernel_phase[kernel] == 2)
    assert set(gradients) <= set(trace.inputs[update].tolist())


def test_a_compiled_region_is_one_kernel() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Linear(32, 32))
    compiled, batch = torch.compile(model), torch.ones(8, 32)

    def step() -> None:
        compiled(batch).sum().backward()
        model.zero_grad()

    trace = penstock.trace(step, fake=False)
    regions = [kernel for kernel, name in enumerate(trace.kernel_name) if name == "inductor_compiled_code"]
    assert [PHASES[trace.kernel_phase[kernel]] for kernel in regions] == ["forward", "backward"]
    assert "addmm" not in trace.kernel_name
    weights = {32 * 32 * 4, 32 * 4}
    assert weights <= {int(trace.tensor_bytes[tensor]) for tensor in trace.inputs[regions[0]]}
    assert set(trace.outputs[regions[0]]) & set(trace.inputs[regions[1]]), "what backward needs of forward"


def records() -> tuple[list[KernelRecord], list[TensorRecord]]:
    """b reads tensor 3 and makes 1; c edits 1 and makes 0; nobody touches 2."""
    kernels = [
        KernelRecord("b", 1.0, (3, 3), (1,), 5, FORWARD, in_use_bytes=1000),
        KernelRecord("c", 2.0, (1, 3), (1, 0), 0, FORWARD, 1.0, 3.0),
    ]
    tensors = [
        TensorRecord(10, OPTIMIZER_STATE, False, 1, None, itemsize=8),
        TensorRecord(20, GRADIENT, False, 0, None, density=0.5),
        TensorRecord(30, INPUT, True, 0, 1, movable=False),
        TensorRecord(40, WEIGHT, True, 0, None),
    ]
    return kernels, tensors


def test_records_become_a_trace() -> None:
    trace = make_trace(*records(), measured=True, notes={"device": "none"})
    assert trace.tensor_bytes.tolist() == [40, 20, 10, 30]
    assert [trace.inputs[kernel].tolist() for kernel in range(2)] == [[0], [1, 0]]
    assert [trace.outputs[kernel].tolist() for kernel in range(2)] == [[1], [1, 2]]
    assert trace.tensor_persistent.tolist() == [True, False, True, False]
    assert trace.tensor_birth.tolist() == [0, 0, 0, 0]
    assert trace.tensor_death.tolist() == [2, 2, 2, 1]
    assert trace.tensor_movable.tolist() == [True, True, True, False]
    assert trace.tensor_itemsize.tolist() == [1, 1, 8, 1]
    assert trace.tensor_density.tolist() == [1.0, 0.5, 1.0, 1.0]
    # What is in use after a kernel and belongs to no tensor: 1000 less 40, 20, 10 and 30.
    assert trace.kernel_workspace_bytes.tolist() == [5 + 900, 0]
    assert trace.measured and trace.notes == {"device": "none"}


def test_a_producer_counts_only_where_it_alone_writes() -> None:
    kernels, tensors = records()
    tensors[0].kind, tensors[0].producer = KINDS.index("activation"), 1
    tensors[1].producer = 0
    assert make_trace(kernels, tensors, measured=False).tensor_recompute.tolist() == [-1, -1, -1, -1]
    kernels[1].outputs = (0,)
    tensors[0].death, tensors[1].death = None, 2
    assert make_trace(kernels, tensors, measured=False).tensor_recompute.tolist() == [-1, 0, 1, -1]


def test_phases_follow_autograd_and_the_optimizer() -> None:
    told: dict[int, set[int]] = {}
    phases = Phases(
        lambda tensors, kind: told.setdefault(kind, set()).update(map(torch.Tensor.data_ptr, tensors))
    )
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.Adam([weight])
    seen = []

    class Observed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            seen.append(phases.current())
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            seen.append(phases.current())
            return gradient * 2

    optimizer.register_step_pre_hook(lambda *_: seen.append(phases.current()))
    optimizer.register_step_post_hook(lambda *_: seen.append(phases.current()))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = Observed.apply(weight).sum()
        loss.backward()
        return loss

    phases.enter()
    try:
        closure()
        optimizer.step()
        optimizer.step(closure)
        optimizer.zero_grad()
        told.clear()
        optimizer.step(closure=closure)
    finally:
        phases.exit()
    seen.append(phases.current())
    assert [PHASES[phase] for phase in seen] == [
        *("forward", "backward", "optimizer", "optimizer"),
        *2 * ("optimizer", "forward", "backward", "optimizer"),
        "forward",
    ]
    assert weight.grad is not None
    state = {value.data_ptr() for value in optimizer.state[weight].values()}
    assert told == {WEIGHT: {weight.data_ptr()}, GRADIENT: {weight.grad.data_ptr()}, OPTIMIZER_STATE: state}
    optimizer.step()
    assert told[OPTIMIZER_STATE] == state, "after exit nothing is told"
