"""What is dropped is made again by the kernel that made it, with the same bits, whoever asks for it."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import penstock
from penstock import _native
from penstock.runtime import recompute
from penstock.runtime.storages import DROPPED
from tests.support.families import FAMILIES
from tests.support.forced import recompute_everything
from tests.support.runs import (
    EVERYTHING,
    HARDWARE,
    PAGED,
    Bits,
    Program,
    Step,
    bits,
    budgets,
    differences,
    family_training,
    in_memory,
    offload,
    offloaded,
    state_bits,
)

GENEROUS = 1 << 30
SLOW = replace(HARDWARE, disk_read_bytes_per_s=1e6, disk_write_bytes_per_s=1e6)
WIDTH, BATCH = 128, 512  # an activation has 256 KiB: chunks of addresses of its own in the arena


def forced(program: Program, spill_dir: Path) -> tuple[Bits, penstock.Report, penstock.Plan]:
    """Run the program with a plan that recomputes everything."""
    torch.manual_seed(7)
    with penstock.offload(
        device_budget=GENEROUS, spill_dir=spill_dir, hardware=HARDWARE, planning=PAGED
    ) as run:
        program(run.step)
        trace = run.trace
    assert trace is not None
    plan = recompute_everything(trace, GENEROUS)
    found, report = offloaded(program, GENEROUS, spill_dir, plan=plan)
    return found, report, plan


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "dynamic"])
def test_a_family(name: str, tmp_path: Path) -> None:
    program = family_training(name, 4)
    expected = in_memory(program)
    found, report, plan = forced(program, tmp_path)
    assert differences(expected, found) == []
    assert len(plan.recomputations) > 0
    assert report.recomputed_bytes > 0
    assert report.unrecomputed == 0
    if name != "lstm":  # oneDNN's backward writes to what it was given to read
        assert report.unplanned_accesses == 0


@pytest.mark.parametrize("name", ["gpt", "cnn"])
def test_plans_recompute_where_the_disk_is_slow(name: str, tmp_path: Path) -> None:
    program = family_training(name, 6)
    expected = in_memory(program)
    (budget_bytes,) = budgets(program, tmp_path, 0.6)
    for recomputes in (True, False):
        torch.manual_seed(7)
        with penstock.offload(
            device_budget=budget_bytes,
            spill_dir=tmp_path,
            hardware=SLOW,
            planning=penstock.PlanOptions(smallest_bytes=EVERYTHING, recompute=recomputes),
        ) as run:
            assert differences(expected, program(run.step)) == []
            report = run.report()
            assert run.plan is not None
            assert bool(run.plan.recomputations) == recomputes
            assert report.peak_bytes <= budget_bytes


# -- what nobody announced ---------------------------------------------------------------------


class _Chain(nn.Module):
    """Its activations can all be recomputed: from the weights, and from each other."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, seen: Callable[[str, torch.Tensor], None]) -> torch.Tensor:
        x = nn.functional.gelu(self.first(x))
        seen("first", x)
        x = nn.functional.gelu(self.second(x))
        seen("second", x)
        return x.square()


def chain_training(
    step: Step, during: Callable[[dict[str, torch.Tensor], nn.Module], Any] = lambda kept, model: None
) -> Bits:
    """Between forward and backward `during` sees the activations, which are kept."""
    model = _Chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    found: Bits = []
    for number in range(3):
        kept: dict[str, torch.Tensor] = {}
        with step():
            x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(number))
            loss = model(x, kept.__setitem__).square().sum()
            during(kept, model)
            loss.backward()
            found += bits([loss, *(p.grad for p in model.parameters())])
            kept.clear()
            optimizer.step()
            optimizer.zero_grad()
    return found + bits(model.parameters())


@contextmanager
def chain_plan(spill_dir: Path) -> Iterator[penstock.Offload]:
    """A run whose plan drops what the chain made, after the forward pass."""
    torch.manual_seed(7)
    options: dict[str, Any] = {
        "device_budget": GENEROUS,
        "spill_dir": spill_dir,
        "hardware": HARDWARE,
        "smallest_bytes": EVERYTHING,
    }
    with offload(**options) as run:
        chain_training(run.step)
        assert run.trace is not None
        trace = run.trace
    plan = recompute_everything(trace, GENEROUS)
    assert len(plan.recomputations) >= 2
    torch.manual_seed(7)
    with offload(**options, plan=plan) as run:
        yield run


def _through_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A view that no kernel of torch is asked for."""
    return tensor.detach().numpy()


def test_numpy_reads_what_was_dropped(tmp_path: Path) -> None:
    def sums(found: list[float]) -> Callable[[dict[str, torch.Tensor], nn.Module], None]:
        def during(kept: dict[str, torch.Tensor], model: nn.Module) -> None:
            found.extend(float(_through_numpy(tensor).sum()) for tensor in kept.values())

        return during

    plain: list[float] = []
    expected = in_memory(lambda step: chain_training(step, sums(plain)))
    seen: list[float] = []
    with chain_plan(tmp_path) as run:
        assert differences(expected, chain_training(run.step, sums(seen))) == []
        assert run.report().recomputed_bytes > 0
    assert seen == plain


def test_a_list_of_what_was_dropped(tmp_path: Path) -> None:
    """`tolist` reads memory itself, and holds the interpreter."""
    plain: list[Any] = []
    in_memory(lambda step: chain_training(step, lambda kept, _: plain.append(kept["first"][0].tolist())))
    seen: list[Any] = []
    with chain_plan(tmp_path) as run:
        chain_training(run.step, lambda kept, _: seen.append(kept["first"][0].tolist()))
    assert seen == plain


def test_another_thread_reads_what_was_dropped(tmp_path: Path) -> None:
    """Its kernels are not seen by the run."""

    def summed(found: list[float]) -> Callable[[dict[str, torch.Tensor], nn.Module], None]:
        def during(kept: dict[str, torch.Tensor], model: nn.Module) -> None:
            def work() -> None:
                found.extend(float(tensor.detach().double().sum()) for tensor in kept.values())

            thread = threading.Thread(target=work)
            thread.start()
            thread.join(60)
            assert not thread.is_alive()

        return during

    plain: list[float] = []
    expected = in_memory(lambda step: chain_training(step, summed(plain)))
    seen: list[float] = []
    with chain_plan(tmp_path) as run:
        assert differences(expected, chain_training(run.step, summed(seen))) == []
    assert seen == plain


def test_numpy_writes_what_others_are_made_from(tmp_path: Path) -> None:
    """What depends on the old bytes is made first: backward computes what it computes in memory."""

    def during(kept: dict[str, torch.Tensor], model: nn.Module) -> None:
        with torch.no_grad():
            weight = model.get_parameter("first.weight")
        _through_numpy(weight)[0, 0] += 1.0

    expected = in_memory(lambda step: chain_training(step, during))
    with chain_plan(tmp_path) as run:
        assert differences(expected, chain_training(run.step, during)) == []


def test_a_kernel_writes_what_others_are_made_from(tmp_path: Path) -> None:
    def during(kept: dict[str, torch.Tensor], model: nn.Module) -> None:
        model.get_parameter("first.bias").data.add_(1.0)  # autograd does not notice

    expected = in_memory(lambda step: chain_training(step, during))
    with chain_plan(tmp_path) as run:
        assert differences(expected, chain_training(run.step, during)) == []


def test_a_child_reads_what_was_dropped(tmp_path: Path) -> None:
    plain: list[float] = []
    in_memory(
        lambda step: chain_training(
            step, lambda kept, _: plain.append(float(_through_numpy(kept["second"]).sum()))
        )
    )
    seen: list[float] = []

    def in_a_child(kept: dict[str, torch.Tensor], model: nn.Module) -> None:
        view = _through_numpy(kept["second"])
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writer, np.float64(view.sum()).tobytes())
            os._exit(0)
        os.close(writer)
        seen.append(float(np.frombuffer(os.read(reader, 8))[0]))
        os.close(reader)
        assert os.waitpid(child, 0)[1] == 0

    with chain_plan(tmp_path) as run:
        chain_training(run.step, in_a_child)
    assert seen == plain


def test_a_run_closes_with_what_was_dropped(tmp_path: Path) -> None:
    """The program keeps activations, and leaves the step before backward needs them."""

    class _Enough(Exception):
        pass

    def leave_with(kept: dict[str, torch.Tensor]) -> Callable[[dict[str, torch.Tensor], nn.Module], None]:
        def during(found: dict[str, torch.Tensor], model: nn.Module) -> None:
            kept.update(found)
            raise _Enough

        return during

    plain: dict[str, torch.Tensor] = {}
    with pytest.raises(_Enough):
        in_memory(lambda step: chain_training(step, leave_with(plain)))
    seen: dict[str, torch.Tensor] = {}
    with chain_plan(tmp_path) as run, pytest.raises(_Enough):
        chain_training(run.step, leave_with(seen))
    assert differences(bits(plain.values()), bits(seen.values())) == []


@pytest.fixture
def impatient() -> Iterator[None]:
    """An access that nobody answers ends this process soon."""
    _native.arena_set_fault_timeout(20.0)
    yield
    _native.arena_set_fault_timeout(120.0)


def _views_of_dropped(run: penstock.Offload) -> list[np.ndarray]:
    dropped = [each.storage() for each in run._clock.storages.all() if each.state == DROPPED]
    assert len(dropped) > 1
    return [torch.empty(0).set_(storage).numpy() for storage in dropped if storage is not None]


class _Cycle:
    """Garbage that only the collector finds."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call, self.cycle = call, self

    def __del__(self) -> None:
        self.call()


def test_a_finalizer_reads_what_was_dropped_amid_the_engines_work(impatient: None, tmp_path: Path) -> None:
    """Whoever makes it needs the engine's lock, and the finalizer's thread has that."""
    expected = in_memory(chain_training)
    seen: list[tuple[float, float]] = []
    with chain_plan(tmp_path) as run:

        def during(kept: dict[str, torch.Tensor], _: nn.Module) -> None:
            for view in _views_of_dropped(run) if not seen else ():
                found: list[float] = []
                _Cycle(lambda view=view, found=found: found.append(float(view.sum())))
                with run._engine.lock:
                    gc.collect()
                seen.append((*found, float(view.sum())))

        assert differences(expected, chain_training(run.step, during)) == []
    assert seen and all(first == second for first, second in seen)


def test_who_has_the_lock_asks_while_another_is_answered(
    impatient: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = in_memory(chain_training)
    made_again, done = recompute.made_again, list[bool]()
    with chain_plan(tmp_path) as run:

        def during(kept: dict[str, torch.Tensor], _: nn.Module) -> None:
            if done:
                return
            done.append(True)
            first, second = _views_of_dropped(run)[:2]
            begun, locked = threading.Event(), threading.Event()

            def slowly(*args: Any) -> torch.UntypedStorage:
                begun.set()
                assert locked.wait(60)
                return made_again(*args)

            monkeypatch.setattr(recompute, "made_again", slowly)
            found: list[float] = []
            thread = threading.Thread(target=lambda: found.append(float(first.sum())))
            thread.start()
            assert begun.wait(60)
            with run._engine.lock:
                locked.set()
                assert second.sum() == second.sum()
            thread.join(60)
            assert found == [float(first.sum())]

        assert differences(expected, chain_training(run.step, during)) == []


# -- random numbers, and switches --------------------------------------------------------------


def noisy_training(step: Step) -> Bits:
    """Random numbers that a kernel makes from nothing, before and after the forward pass."""
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    found: Bits = []
    for number in range(3):
        with step():
            x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(number))
            hidden = torch.tanh(x @ weight) * torch.rand(BATCH, WIDTH)
            hidden = hidden * torch.randn(BATCH, WIDTH)
            loss = torch.sigmoid(hidden).square().sum()
            torch.rand(3)
            loss.backward()
            found += bits([loss, weight.grad, torch.rand(5)])
            with torch.no_grad():
                assert weight.grad is not None
                weight -= 1e-3 * weight.grad
            weight.grad = None
    return found + bits([weight, torch.random.get_rng_state()])


def test_random_numbers(tmp_path: Path) -> None:
    expected = in_memory(noisy_training)
    found, report, _ = forced(noisy_training, tmp_path)
    assert differences(expected, found) == []
    assert report.recomputed_bytes > 0
    assert report.unrecomputed == 0


def switched_training(step: Step) -> Bits:
    """Forward and backward run with other switches, which other kernels follow."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 8, 3), nn.Sigmoid())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    found: Bits = []
    threads = torch.get_num_threads()
    try:
        for number in range(3):
            with step():
                x = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(number))
                torch.set_num_threads(1)
                with torch.backends.mkldnn.flags(enabled=False):
                    loss = model(x).square().sum()
                torch.set_num_threads(2)
                loss.backward()
                found += bits([loss, *(p.grad for p in model.parameters())])
                optimizer.step()
                optimizer.zero_grad()
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    return found + bits(model.parameters()) + state_bits(optimizer)


def test_switches(tmp_path: Path) -> None:
    expected = in_memory(switched_training)
    found, report, _ = forced(switched_training, tmp_path)
    assert differences(expected, found) == []
    assert report.recomputed_bytes > 0
