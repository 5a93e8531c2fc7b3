"""A tensor that is shared with other processes gets other memory, on whatever thread, while it leaves or
comes: the bytes are right, and nothing of what it had is left behind."""

from __future__ import annotations

import functools
import queue
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.multiprocessing
from torch.utils.data import DataLoader, Dataset

import penstock
from penstock import _native
from penstock.runtime import arena
from penstock.runtime.recording import Recording
from penstock.runtime.storages import AWAY, COMING, DROPPED, LEAVING, RESIDENT
from tests.runtime.test_recomputed_tensors_keep_every_bit import chain_plan, chain_training
from tests.support.runs import EVERYTHING, HARDWARE, differences, in_memory, offload

ELEMENTS = 1 << 18
SIZE = ELEMENTS * 4


def _offload(spill_dir: Path, tensors: float = 6, **options: object) -> penstock.Offload:
    return offload(
        device_budget=int(tensors * SIZE),
        spill_dir=spill_dir,
        hardware=HARDWARE,
        smallest_bytes=EVERYTHING,
        **options,  # type: ignore[arg-type]
    )


def _nothing_is_left(run: penstock.Offload) -> None:
    engine, device = run._engine, run._device
    with engine.lock:
        engine.drain()
        device.storages.remove_dead()
        assert engine.in_flight_bytes == (0, 0)
        assert engine.freeing_bytes == 0
        assert not device._staging and not device._packed  # type: ignore[attr-defined]
        assert not run._spill.used_bytes
        assert not device.memory.unmanaged_bytes
    assert arena.stats().in_use_bytes == arena.stats().foreign_bytes


@pytest.mark.parametrize("on", ["this thread", "another thread"])
@pytest.mark.parametrize("state", [RESIDENT, LEAVING, AWAY, COMING, "packed"])
def test_in_each_state(state: object, on: str, tmp_path: Path) -> None:
    with _offload(tmp_path) as run:
        content = torch.relu(torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(1)) - 1)
        tensor = content.clone()
        managed = run._clock.storages.track(tensor.untyped_storage())
        with run._engine.lock:
            if state != RESIDENT:
                run._engine.evict(managed, release=state != LEAVING, packs=4 if state == "packed" else 0)
        if state in (AWAY, COMING):
            run._engine.drain()
            assert managed.state == AWAY
        if state == COMING:
            with run._engine.lock:
                run._engine.prefetch(managed)
        _call(on, tensor.share_memory_)
        assert tensor.is_shared()
        assert torch.equal(tensor, content)
        tensor += 1
        with run.step():
            others = [torch.full((ELEMENTS,), float(i)) for i in range(12)]
            assert [float(other[7]) for other in others] == list(range(12))
        assert torch.equal(tensor, content + 1)
        assert run._device.memory.unmanaged_bytes == SIZE
        del tensor, content, others
        _nothing_is_left(run)


def _call(on: str, call: Callable[[], object]) -> None:
    if on == "this thread":
        call()
        return
    thread = threading.Thread(target=call)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("state", [RESIDENT, LEAVING, AWAY, COMING, "packed"])
def test_unannounced(state: object, tmp_path: Path) -> None:
    """As a library in C++ may do it: nobody asks the run before the memory changes."""
    with _offload(tmp_path) as run:
        content = torch.relu(torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(1)) - 1)
        tensor = content.clone()
        storage = tensor.untyped_storage()
        managed = run._clock.storages.track(storage)
        with run._engine.lock:
            if state != RESIDENT:
                run._engine.evict(managed, release=state != LEAVING, packs=4 if state == "packed" else 0)
            if state in (AWAY, COMING):
                run._engine.drain()
            if state == COMING:
                run._engine.prefetch(managed)
            _call("another thread", functools.partial(torch._C.StorageBase._share_fd_cpu_, storage))
        others = [torch.full((ELEMENTS,), float(i)) for i in range(12)]
        assert [float(other[7]) for other in others] == list(range(12))
        assert torch.equal(tensor, content)
        assert managed.state == RESIDENT
        del tensor, storage, content, others
        _nothing_is_left(run)


def test_what_was_dropped_is_viewed_and_shared_in_a_recorded_step(tmp_path: Path) -> None:
    """What is recorded looks at the bytes that kernels wrote, and a view writes none."""
    expected = in_memory(chain_training)
    with chain_plan(tmp_path) as run:

        def during(kept: dict[str, torch.Tensor], _: object) -> None:
            dropped = [each.storage() for each in run._clock.storages.all() if each.state == DROPPED]
            assert len(dropped) > 1
            for storage in dropped:
                torch.empty(0).set_(storage)
            dropped[0].share_memory_()

        run._kinds.recording = lambda name: Recording(zeros=True)  # type: ignore[method-assign]
        run._kinds.record = lambda *_: False  # type: ignore[method-assign]
        assert differences(expected, chain_training(run.step, during)) == []


@pytest.mark.parametrize("seed", range(3))
def test_a_feeder_shares_while_steps_run(seed: int, tmp_path: Path) -> None:
    """As the thread of a multiprocessing queue does. In a budget of a quarter."""
    draw = random.Random(seed)
    feed: queue.Queue[int | None] = queue.Queue()
    tensors = [torch.full((ELEMENTS,), float(i)) for i in range(24)]
    values = [float(i) for i in range(24)]
    fed: list[int] = []
    failed: list[BaseException] = []

    def feeder() -> None:
        while (number := feed.get()) is not None:
            try:
                tensors[number].share_memory_()
            except BaseException as error:
                failed.append(error)
            fed.append(number)

    thread = threading.Thread(target=feeder, daemon=True)
    with _offload(tmp_path, 8) as run:
        tensors = [tensor.clone() for tensor in tensors]
        thread.start()
        end_s, feeds = time.monotonic() + 2, 0
        while time.monotonic() < end_s and not failed:
            with run.step():
                for _ in range(30):
                    number, other = draw.randrange(24), draw.randrange(24)
                    assert float(tensors[number][:: 1 << 12].sum()) == values[number] * (ELEMENTS >> 12)
                    values[other] = float(draw.randrange(1000))
                    tensors[other] = torch.full((ELEMENTS,), values[other])
                    if not feeds and draw.random() < 0.5:
                        feeds += 1
                        feed.put(draw.randrange(24))
                    while fed:
                        feeds -= 1
                        number = fed.pop()
                        tensors[number] = torch.full((ELEMENTS,), values[number])
        feed.put(None)
        thread.join(60)
        assert not failed and not thread.is_alive()
        tensors.clear()
        run._clock._from_last_step.clear()
        run._clock._kernels.begin_step(None)
        run._clock._kernels.in_step = False
        _nothing_is_left(run)


def test_a_step_that_shares_more_than_the_budget_is_not_refused(tmp_path: Path) -> None:
    """One after the other: each could leave until it was shared."""
    with _offload(tmp_path, 6) as run:
        tensors = [torch.full((ELEMENTS,), float(i)) for i in range(12)]
        for _ in range(2):
            with run.step():
                shared = []
                for number, tensor in enumerate(tensors):
                    torch._C.StorageBase._share_fd_cpu_(tensor.untyped_storage())
                    tensors[number] = torch.full((ELEMENTS,), float(number))
                    shared = [*shared[-3:], tensor]
                    assert [float(each[7]) for each in shared] == list(range(number + 1))[-4:]
        assert run.report().peak_bytes <= 7 * SIZE


class _Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((ELEMENTS // 4,), float(index))


@pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
def test_workers_return_and_are_given_tensors(strategy: str, tmp_path: Path) -> None:
    torch.multiprocessing.set_sharing_strategy(strategy)
    try:
        with _offload(tmp_path, 12) as run:
            kept = [torch.full((ELEMENTS,), float(i)) for i in range(16)]
            for _ in range(2):
                total = 0.0
                loader = DataLoader(_Rows(), batch_size=4, num_workers=2, multiprocessing_context="fork")
                for batch in loader:
                    with run.step():
                        total += float(batch[:, 0].sum())
                        assert [float(tensor[5]) for tensor in kept] == list(range(16))
                assert total == sum(range(24))
            given, answers = torch.multiprocessing.Queue(), torch.multiprocessing.Queue()
            worker = torch.multiprocessing.get_context("fork").Process(
                target=_add_one, args=(given, answers), daemon=True
            )
            worker.start()
            for number in range(8):
                with run.step():
                    given.put(kept[number])
                    for tensor in kept[8:]:
                        tensor.mul_(1)
                    assert answers.get(timeout=60) == number * ELEMENTS
                    assert float(kept[number][-1]) == number + 1
            worker.join(60)
            assert worker.exitcode == 0
    finally:
        torch.multiprocessing.set_sharing_strategy("file_descriptor")


def _add_one(given: torch.multiprocessing.Queue, answers: torch.multiprocessing.Queue) -> None:
    for _ in range(8):
        tensor = given.get()
        answer = float(tensor.double().sum())
        tensor += 1
        answers.put(answer)


def test_torch_has_its_own_methods_back(tmp_path: Path) -> None:
    names = ("share_memory_", "_share_fd_cpu_", "_share_filename_cpu_", "resize_")
    before = [torch.UntypedStorage.__dict__.get(name) for name in names]
    with _offload(tmp_path):
        assert [torch.UntypedStorage.__dict__.get(name) for name in names] != before
    assert [torch.UntypedStorage.__dict__.get(name) for name in names] == before
    assert _native.arena_stats().out_bytes == 0
