"""A step traced without memory is the step that runs, and tracing it leaves no trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import penstock
from penstock import _native
from penstock.runtime import arena
from tests.support.families import FAMILIES, Family
from tests.support.runs import HARDWARE

GIB = 1 << 30

# Of every kernel and tensor of the trace; their times are the only thing that is estimated.
PER_KERNEL = ("live_bytes", "kernel_phase")
PER_TENSOR = (
    "tensor_bytes",
    "tensor_kind",
    "tensor_persistent",
    "tensor_birth",
    "tensor_death",
    "tensor_movable",
    "tensor_recompute",
    "tensor_itemsize",
)

# The one family whose sizes are not known before it runs: oneDNN's LSTM asks for its workspace then.
KNOWN_BEFORE = [name for name in FAMILIES if name != "lstm"]

Step = Callable[[], None]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small kernels on many threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def training(family: Family) -> tuple[nn.Module, torch.optim.Optimizer, Step]:
    """A model, its optimizer and one iteration, the same each time."""
    torch.manual_seed(7)
    model = family.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step() -> None:
        family.backward(family.loss(model, 0))
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def traced_fake(step: Step, **options: Any) -> penstock.Trace:
    """Of a data sheet: the processor need not be measured each time."""
    return penstock.trace(step, device="h100", **options)


def both(family: Family) -> tuple[penstock.Trace, penstock.Trace]:
    """Traced without memory, and of a real run."""
    return traced_fake(training(family)[2]), penstock.trace(training(family)[2], fake=False)


def differences(left: penstock.Trace, right: penstock.Trace) -> list[str]:
    """The fields in which two traces differ, but for times."""
    found = [
        name
        for name in (*PER_KERNEL, *PER_TENSOR)
        if not np.array_equal(getattr(left, name), getattr(right, name))
    ]
    for name in ("inputs", "outputs"):
        one, other = getattr(left, name), getattr(right, name)
        if not (np.array_equal(one.starts, other.starts) and np.array_equal(one.values, other.values)):
            found.append(name)
    if left.kernel_name != right.kernel_name:
        found.append("kernel_name")
    return found


# -- the same trace --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KNOWN_BEFORE)
def test_the_same_kernels_tensors_and_lifetimes(name: str) -> None:
    fake, real = both(FAMILIES[name])
    assert differences(fake, real) == []
    assert fake.inactive_periods == real.inactive_periods
    assert not fake.measured and real.measured
    assert fake.kernels > 20 and fake.ideal_s > 0 and real.ideal_s > 0


def test_of_an_lstm_only_the_size_of_its_workspace_is_unknown() -> None:
    fake, real = both(FAMILIES["lstm"])
    assert set(differences(fake, real)) <= {"tensor_bytes", "live_bytes", "tensor_movable"}
    makers = [kernel for kernel, name in enumerate(real.kernel_name) if name.startswith("mkldnn_rnn_layer")]
    made = {tensor for kernel in makers for tensor in real.outputs[kernel].tolist()}
    unknown = np.flatnonzero(fake.tensor_bytes != real.tensor_bytes).tolist()
    assert set(unknown) <= made
    assert (fake.tensor_bytes[unknown] == 0).all(), "an estimate is left out, not invented"


def test_a_second_trace_is_the_same() -> None:
    _, _, step = training(FAMILIES["gpt"])
    assert differences(traced_fake(step), traced_fake(step)) == []


def test_a_model_built_without_memory_has_the_same_trace() -> None:
    mode = penstock.fake_mode()
    with mode:
        _, _, step = training(FAMILIES["tied_embeddings"])
    real = penstock.trace(training(FAMILIES["tied_embeddings"])[2], fake=False)
    assert differences(traced_fake(step, mode=mode), real) == []


# -- no memory -------------------------------------------------------------------------------------


def status_bytes(name: str) -> int:
    """A line of /proc/self/status, such as VmHWM, the most resident bytes so far."""
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("resident bytes are read from /proc")
    (line,) = (line for line in status.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def test_a_model_that_no_machine_holds_can_be_traced() -> None:
    width, layers = 65536, 8
    before = status_bytes("VmHWM")
    mode = penstock.fake_mode()
    with mode:
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.randn(1024, width)

    def step() -> None:
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    trace = traced_fake(step, mode=mode)
    weights_bytes = layers * width * width * 4
    assert trace.peak_bytes > 4 * weights_bytes, "weights, gradients and two moments, and activations"
    assert trace.peak_bytes > 500 * GIB
    assert status_bytes("VmHWM") - before < GIB // 4


# -- nothing is touched ----------------------------------------------------------------------------


def bits(tensors: Iterator[torch.Tensor | None]) -> list[bytes | None]:
    return [None if tensor is None else tensor.detach().numpy().tobytes() for tensor in tensors]


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything a training step changes."""
    return {
        "weights": bits(iter(model.parameters())),
        "buffers": bits(iter(model.buffers())),
        "gradients": bits(parameter.grad for parameter in model.parameters()),
        "gradient objects": [id(parameter.grad) for parameter in model.parameters()],
        "optimizer state": {
            index: {
                key: bits(iter([value]))[0] if torch.is_tensor(value) else value
                for key, value in entry.items()
            }
            for index, entry in enumerate(optimizer.state.values())
        },
        "parameter groups": [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ],
        "random numbers": torch.get_rng_state().numpy().tobytes(),
        "training": [module.training for module in model.modules()],
    }


@pytest.mark.parametrize("name", ["cnn", "dropout", "bf16_autocast", "checkpoint_inside"])
@pytest.mark.parametrize("trained", [False, True], ids=["fresh", "trained"])
def test_nothing_is_changed(name: str, trained: bool) -> None:
    family = FAMILIES[name]
    model, optimizer, step = training(family)
    if trained:
        step()
        family.backward(family.loss(model, 1))  # gradients that wait to be used
    before = state_of(model, optimizer)
    traced_fake(step)
    assert state_of(model, optimizer) == before


def test_measuring_the_processor_draws_no_random_numbers() -> None:
    _, _, step = training(FAMILIES["dynamic"])
    before = torch.get_rng_state()
    penstock.trace(step, device="cpu")
    assert torch.equal(torch.get_rng_state(), before)


class Averaging(nn.Module):
    """Puts a new tensor in the place of its buffer, and keeps its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.register_buffer("average", torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.layer(x)
        self.average = 0.9 * self.average + self.kept.detach().mean(0)
        return self.kept - self.average


def test_what_the_step_puts_in_a_models_place_is_put_back() -> None:
    family = Family(Averaging, FAMILIES["unused_branch"].loss)
    model, optimizer, step = training(family)
    step()
    kept = model.kept
    before = state_of(model, optimizer)
    traced_fake(step)
    assert model.kept is kept
    assert state_of(model, optimizer) == before


def test_training_goes_on_as_if_nothing_had_been_traced() -> None:
    results = []
    for look in (False, True):
        model, optimizer, step = training(FAMILIES["dropout"])
        step()
        if look:
            traced_fake(step)
        step()
        results.append(state_of(model, optimizer)["weights"])
    assert results[0] == results[1]


def reads_the_loss(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step() -> None:
        loss = FAMILIES["gpt"].loss(model, 0)
        loss.backward()
        loss.item()
        optimizer.step()

    return step


def test_a_step_that_reads_its_loss_is_refused_and_undone() -> None:
    family = FAMILIES["gpt"]
    model, optimizer, step = training(family)
    step()
    family.backward(family.loss(model, 1))
    before = state_of(model, optimizer)
    with pytest.raises(penstock.InvalidArgument, match=r"\.item\(\).*fake=False"):
        traced_fake(reads_the_loss(model, optimizer))
    assert state_of(model, optimizer) == before
    assert penstock.trace(reads_the_loss(model, optimizer), fake=False).kernels > 0


def test_an_error_of_the_step_passes_through_and_is_undone() -> None:
    model, optimizer, _ = training(FAMILIES["cnn"])

    def step() -> None:
        FAMILIES["cnn"].loss(model, 0).backward()
        raise LookupError("the step's own")

    before = state_of(model, optimizer)
    with pytest.raises(LookupError, match="the step's own"):
        traced_fake(step)
    assert state_of(model, optimizer) == before


def test_a_device_without_a_data_sheet_is_refused() -> None:
    with pytest.raises(penstock.InvalidArgument, match=r"no data sheet for 'abacus'.*a100"):
        penstock.trace(lambda: None, device="abacus")


def test_times_come_from_the_data_sheet_and_nothing_else_does() -> None:
    _, _, step = training(FAMILIES["gpt"])
    slow, fast = (penstock.trace(step, device=device) for device in ("v100", "h100"))
    assert differences(slow, fast) == []
    assert (slow.kernel_time_s >= fast.kernel_time_s).all() and slow.ideal_s > fast.ideal_s


# -- an oracle of its own --------------------------------------------------------------------------


class Watcher(TorchDispatchMode):
    """The bytes of all storages that are alive after each operator, by torch's own counting of references."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._note(tensors)

    def _note(self, values: object) -> None:
        for tensor in tree_leaves(values):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._alive.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._note((args, kwargs))
        result = operator(*args, **kwargs)
        self._note(result)
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._alive.values()))
        return result


def owned(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    state = [
        value for entry in optimizer.state.values() for value in entry.values() if torch.is_tensor(value)
    ]
    return [*model.parameters(), *model.buffers(), *state]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_peak_is_that_of_the_storages_alive(name: str) -> None:
    """Watched without the recorder, and without its saved-tensor hooks."""
    model, optimizer, step = training(FAMILIES[name])
    step()
    with Watcher(owned(model, optimizer)) as watcher:
        step()
    assert penstock.trace(step, fake=False, warmup=0).peak_bytes == watcher.peak_bytes


@pytest.mark.skipif(arena.unavailable() is not None, reason="needs the arena")
@pytest.mark.parametrize("name", ["gpt", "tied_embeddings", "dropout", "checkpoint_inside", "dense"])
def test_the_peak_is_what_the_allocator_gave_out(name: str) -> None:
    """But for what the arena leaves to the C library, tensors below a page; and kernels' workspace."""
    with arena.activate(1 << 40):
        start = arena.stats()
        model, optimizer, step = training(FAMILIES[name])
        step()
        _native.arena_reset_peak()
        step()
        end = arena.stats()
        trace = penstock.trace(step, fake=False, warmup=0)
        del model, optimizer, step
    measured = end.peak_in_memory_bytes - start.in_memory_bytes
    small = int(trace.tensor_bytes[trace.tensor_bytes < 4096].sum())
    workspace = 128 << 10
    assert trace.peak_bytes - small <= measured <= trace.peak_bytes + workspace


@pytest.mark.parametrize("is_last", [True, False])
def test_a_tensor_ends_with_the_kernel_before_it_dies_whoever_uses_it(tmp_path: Path, is_last: bool) -> None:
    """A collective that is in flight, or another thread, may use it yet."""
    with penstock.offload(
        device_budget=GIB,
        spill_dir=tmp_path,
        hardware=HARDWARE,
        planning=penstock.PlanOptions(smallest_bytes=0),
    ) as run:
        with run.step():
            x = torch.ones(1024)
            dying = x + 1
            managed = run._clock.storages.find(dying.untyped_storage())
            managed.pins += 1
            del dying
            if not is_last:
                x.mul_(2)
        managed.pins -= 1
        trace = run.trace
    assert trace is not None
    death = dict(zip(trace.tensor_birth.tolist(), trace.tensor_death.tolist(), strict=True))
    assert death[1] == 2
