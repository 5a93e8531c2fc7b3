"""save(wait=False) in a run on a CPU: tensors are not copied beforehand; who writes to one waits for it."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.errors import CheckpointError
from penstock.runtime import arena, resident
from penstock.runtime.run import Offload
from tests.support.held_transport import HeldTransport, held
from tests.support.object_servers import S3, Proxy, writes
from tests.support.runs import HARDWARE

__all__ = ["held"]

SIZE = 64 << 10  # of elements: 256 KiB
MIB = 1 << 20


@pytest.fixture
def run(tmp_path: Path) -> Any:
    with penstock.offload(device_budget=64 * MIB, spill_dir=tmp_path, hardware=HARDWARE) as run:
        yield run


def numbers(seed: int, size: int = SIZE) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def many(count: int, size: int = SIZE) -> dict[str, torch.Tensor]:
    return {f"t{i}": numbers(i, size) for i in range(count)}


def assert_saved(path: Path, expected: dict[str, torch.Tensor]) -> None:
    loaded = penstock.load(path, mmap=False)
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name


def by_kernel(tensor: torch.Tensor) -> None:
    tensor.mul_(3)


def by_numpy(tensor: torch.Tensor) -> None:
    tensor.numpy()[5:] += 1


def by_a_method_of_storages(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().fill_(7)


def by_other_memory(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


WRITES = [by_kernel, by_numpy, by_a_method_of_storages, by_other_memory]


@pytest.mark.parametrize("write", WRITES)
def test_who_writes_waits_until_it_is_taken(
    write: Callable[[torch.Tensor], None], held: HeldTransport, run: Offload, tmp_path: Path
) -> None:
    state = many(80)  # 20 MiB: more than is in flight
    expected = many(80)
    handle = penstock.save(state, tmp_path / "state", wait=False)
    assert held.began.wait(60)
    written = threading.Event()

    def work() -> None:
        write(state["t79"])
        written.set()

    threading.Thread(target=work).start()
    assert not written.wait(0.3) and not handle.done()
    held.goes.set()
    assert written.wait(60)
    handle.wait()
    assert_saved(tmp_path / "state", expected)


def test_what_somebody_waits_for_is_taken_next(held: HeldTransport, tmp_path: Path) -> None:
    with penstock.offload(device_budget=128 * MIB, spill_dir=tmp_path, hardware=HARDWARE):
        state = many(24, 1 << 20)
        handle = penstock.save(state, tmp_path / "state", wait=False)
        assert held.began.wait(60)
        writer = threading.Thread(target=by_kernel, args=(state["t23"],))
        writer.start()
        writer.join(0.5)
        held.goes.set()
        writer.join()
        handle.wait()
    last = held.offsets.index(max(held.offsets))
    assert len(held.offsets) == 25 and last < 12, held.offsets
    assert_saved(tmp_path / "state", many(24, 1 << 20))


def test_it_takes_no_memory_for_a_copy(held: HeldTransport, run: Offload, tmp_path: Path) -> None:
    state = many(12, 1 << 20)  # 48 MiB
    torch.stack([tensor.sum() for tensor in state.values()])
    before = resident.resident_bytes()
    handle = penstock.save(state, tmp_path / "state", wait=False)
    assert held.began.wait(60)
    assert resident.resident_bytes() - before < 24 * MIB
    held.goes.set()
    handle.wait()
    assert_saved(tmp_path / "state", many(12, 1 << 20))


def test_what_is_away_is_saved(run: Offload, tmp_path: Path) -> None:
    """Of 160 MiB in a budget of 64."""
    state = many(40, 1 << 20)
    handle = penstock.save(state, tmp_path / "state", wait=False)
    for tensor in state.values():
        tensor.neg_()
    handle.wait()
    for tensor in state.values():
        tensor.neg_()
    run.close()
    assert_saved(tmp_path / "state", many(40, 1 << 20))
    for i, tensor in enumerate(state.values()):
        assert torch.equal(tensor, numbers(i, 1 << 20))


def test_what_was_away_and_came_back_by_a_write_is_saved_as_written(run: Offload, tmp_path: Path) -> None:
    """No kernel has run since, so that only the arena knows of it."""
    state = many(40, 1 << 20)
    for tensor in state.values():
        tensor.neg_()
    for name, tensor in state.items():
        by_numpy(tensor)
        penstock.save({name: tensor}, tmp_path / name, wait=False).wait()
    run.close()
    for name, tensor in state.items():
        assert torch.equal(penstock.load(tmp_path / name)[name], tensor), name


def test_parts_of_large_tensors_are_taken_one_by_one(tmp_path: Path) -> None:
    size = 20 << 20  # 80 MiB, divided
    with penstock.offload(device_budget=200 * MIB, spill_dir=tmp_path, hardware=HARDWARE) as run:
        weight = torch.nn.Parameter(numbers(1, size))
        optimizer = torch.optim.SGD([weight], lr=0.5)
        for _ in range(2):
            with run.step():
                (weight * 2).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        expected = weight.detach().numpy().copy()
        state = {"weight": weight, "end": weight.detach()[size // 2 + 5 :]}
        handle = penstock.save(state, tmp_path / "state", wait=False)
        with torch.no_grad():
            weight.zero_()
        handle.wait()
        assert not weight.any()
    loaded = penstock.load(tmp_path / "state", mmap=False)
    assert (loaded["weight"].detach().numpy() == expected).all()
    assert (loaded["end"].numpy() == expected[size // 2 + 5 :]).all()


def test_training_goes_on_where_the_save_hangs(held: HeldTransport, run: Offload, tmp_path: Path) -> None:
    run._clock.recomputation.snapshots.timeout_s = 0.5
    state = many(80)
    held.goes.set()
    penstock.save({"old": 1}, tmp_path / "state")
    held.goes.clear()
    handle = penstock.save(state, tmp_path / "state", wait=False)
    for tensor in state.values():
        tensor.mul_(2)
    assert all(torch.equal(tensor, numbers(i) * 2) for i, tensor in enumerate(state.values()))
    held.goes.set()
    with pytest.raises(CheckpointError, match="training cannot wait longer"):
        handle.wait()
    assert penstock.load(tmp_path / "state") == {"old": 1}


def test_a_failed_save_lets_go(held: HeldTransport, run: Offload, tmp_path: Path) -> None:
    state = many(80)
    handle = penstock.save(state, tmp_path / "state", wait=False)
    assert held.began.wait(60)
    held.inner = _Full()
    held.goes.set()
    with pytest.raises(CheckpointError, match="No space left"):
        handle.wait()
    for tensor in state.values():
        tensor.mul_(2)
    assert all(torch.equal(tensor, numbers(i) * 2) for i, tensor in enumerate(state.values()))


def test_the_error_of_a_save_keeps_no_tensors(held: HeldTransport, run: Offload, tmp_path: Path) -> None:
    held.inner = _Full()
    held.goes.set()

    def save() -> None:
        state = many(8)
        handle = penstock.save(state, tmp_path / "state", wait=False)
        with contextlib.suppress(CheckpointError):
            handle.wait()

    save()
    gc.collect()
    assert arena.stats().in_use_bytes < SIZE


class _Full:
    methods = None

    def submit(self, transfers: Any) -> None:
        for transfer in transfers:
            transfer.error_number = 28
            transfer.on_done(transfer)

    def cancel(self, transfers: Any) -> int:
        return 0

    def close(self) -> None:
        pass


def test_a_run_that_closes_waits(held: HeldTransport, tmp_path: Path) -> None:
    with penstock.offload(device_budget=64 * MIB, spill_dir=tmp_path, hardware=HARDWARE):
        state = many(80)
        handle = penstock.save(state, tmp_path / "state", wait=False)
        threading.Timer(0.3, held.goes.set).start()
    for tensor in state.values():
        tensor.mul_(2)
    handle.wait()
    assert_saved(tmp_path / "state", many(80))


def test_a_forked_process_writes_at_once(held: HeldTransport, run: Offload, tmp_path: Path) -> None:
    state = many(80)
    handle = penstock.save(state, tmp_path / "state", wait=False)
    assert held.began.wait(60)
    child = os.fork()
    if child == 0:
        for tensor in state.values():
            tensor.numpy()[:] = 3
        os._exit(0 if all(bool((tensor.numpy() == 3).all()) for tensor in state.values()) else 1)
    assert os.waitpid(child, 0)[1] == 0
    held.goes.set()
    handle.wait()
    assert_saved(tmp_path / "state", many(80))


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_order_of_writes_and_saves(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("run")
    sizes = data.draw(st.lists(st.sampled_from([1, 5000, SIZE, 3 * SIZE, 1 << 20]), min_size=1, max_size=12))
    budget = data.draw(st.sampled_from([8, 16, 64])) * MIB
    with penstock.offload(device_budget=budget, spill_dir=folder, hardware=HARDWARE):
        state = {f"t{i}": numbers(i, size) for i, size in enumerate(sizes)}
        plain = {name: tensor.numpy().copy() for name, tensor in state.items()}
        saves: list[tuple[Any, Path, dict[str, Any]]] = []
        for number in range(data.draw(st.integers(1, 20))):
            name = data.draw(st.sampled_from(sorted(state)))
            what = data.draw(st.sampled_from(["save", "kernel", "numpy", "other thread"]))
            if what == "save":
                path = folder / f"save{number}"
                some = {key: state[key] for key in data.draw(st.sets(st.sampled_from(sorted(state))))}
                taken = {key: plain[key].copy() for key in some}
                saves.append((penstock.save(some, path, wait=False), path, taken))
                continue
            plain[name] += 1
            if what == "kernel":
                state[name].add_(1)
            elif what == "numpy":
                state[name].numpy()[:] += 1
            else:
                other = threading.Thread(target=state[name].add_, args=(1,))
                other.start()
                other.join()
        for handle, path, taken in saves:
            handle.wait()
            loaded = penstock.load(path, mmap=False)
            assert all((loaded[key].numpy() == array).all() for key, array in taken.items())
        assert all((state[name].numpy() == array).all() for name, array in plain.items())


def test_a_save_to_a_url_waits_for_a_disk(s3: S3, proxy: Proxy, run: Offload) -> None:
    """And not for the network, which hangs meanwhile; nor does it keep a copy in memory."""
    url, begun, goes_on, answered = (
        s3.url("in-a-run/state"),
        threading.Event(),
        threading.Event(),
        list[str](),
    )
    penstock.save({"first": 1}, url)  # starts the threads of obstore

    def hang(line: str, number: int) -> None:
        if writes(line):
            begun.set()
            goes_on.wait(60)
            answered.append(line)

    proxy.answer = hang
    state = many(12, 1 << 20)  # 48 MiB
    torch.stack([tensor.sum() for tensor in state.values()])
    before = resident.resident_bytes()
    handle = penstock.save(state, url, wait=False)
    for tensor in state.values():
        tensor.mul_(2)
    assert begun.wait(60)
    assert resident.resident_bytes() - before < 24 * MIB
    assert not answered
    goes_on.set()
    handle.wait()
    run.close()
    loaded = penstock.load(url)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in many(12, 1 << 20).items())
