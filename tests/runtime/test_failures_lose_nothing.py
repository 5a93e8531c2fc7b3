"""What goes wrong is said in one clear error, leaves no file behind, and does not stop the next step."""

from __future__ import annotations

import errno
import gc
import logging
import os
import random
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.runtime import recording
from penstock.storage.native import PosixTransport
from penstock.storage.paths import TRANSPORTS
from penstock.storage.transfer import PREFETCH, Transfer
from tests.support import training
from tests.support.families import FAMILIES, iterate, small_gpt, weights
from tests.support.faulty_transport import FaultyTransport
from tests.support.runs import PAGED, bits


def test_a_budget_below_the_largest_kernel_is_refused_with_what_it_needs(
    tmp_path: Path, hardware: penstock.Hardware
) -> None:
    model, optimizer = small_gpt()
    with (
        penstock.offload(device_budget="40KiB", spill_dir=tmp_path, hardware=hardware, planning=PAGED) as run,
        pytest.raises(penstock.BudgetTooSmall) as refusal,
        run.step(),
    ):
        iterate(model, optimizer, 0)
    assert refusal.value.minimum_bytes > 40 << 10


def test_small_tensors_that_a_kernel_needs_at_once_are_refused_by_name_of_the_minimum(
    tmp_path: Path, hardware: penstock.Hardware
) -> None:
    """Nothing is allocated that could be refused: accesses bring them in, which are served in any case."""
    with penstock.offload(device_budget="40KiB", spill_dir=tmp_path, hardware=hardware) as run:
        first, second = torch.ones(7680), torch.ones(7680)
        with pytest.raises(penstock.BudgetTooSmall, match="needs 60") as refusal, run.step():
            first.add_(second)
        assert refusal.value.minimum_bytes == 2 * 7680 * 4


def test_a_plan_for_more_memory_than_there_is_is_refused_with_its_minimum(
    tmp_path: Path, hardware: penstock.Hardware
) -> None:
    model, optimizer = small_gpt()
    trace = penstock.trace(lambda: iterate(model, optimizer, 0))
    plan = penstock.plan(trace, replace(hardware, device_bytes=1 << 30))
    with pytest.raises(penstock.BudgetTooSmall, match="raise the budget to") as refusal:
        penstock.offload(
            device_budget=plan.minimum_bytes - 1, spill_dir=tmp_path, hardware=hardware, plan=plan
        )
    assert refusal.value.minimum_bytes == plan.minimum_bytes


def test_tensors_from_before_do_not_lend_their_place_to_the_budget(
    tmp_path: Path, hardware: penstock.Hardware
) -> None:
    with penstock.offload(device_budget="64MiB", spill_dir=tmp_path, hardware=hardware):
        before = torch.ones(1 << 20)
    with penstock.offload(
        device_budget="200KiB", spill_dir=tmp_path, hardware=hardware, planning=PAGED
    ) as run:
        del before
        with run.step(), pytest.raises(penstock.BudgetTooSmall) as refusal:
            torch.ones(1 << 19)
        assert refusal.value.minimum_bytes == 4 << 19


def test_a_budget_below_what_a_kernel_reads_is_refused_with_what_it_needs(
    tmp_path: Path, hardware: penstock.Hardware
) -> None:
    with penstock.offload(
        device_budget="200KiB", spill_dir=tmp_path, hardware=hardware, planning=PAGED
    ) as run:
        with run.step():
            first, second = torch.ones(512, 64), torch.ones(512, 64)
            with pytest.raises(penstock.BudgetTooSmall) as refusal:
                first + second
        assert refusal.value.minimum_bytes >= 2 * 512 * 64 * 4
        with run.step():
            assert (first.sum() + second.sum()).item() == 2 * 512 * 64


def test_a_kernel_is_not_refused_for_what_another_of_its_name_took(
    tmp_path: Path, hardware: penstock.Hardware
) -> None:
    side = 512
    square_bytes = side * side * 4
    budget_bytes = 3 * square_bytes + square_bytes // 4

    def multiply() -> torch.Tensor:
        large = torch.ones(side, side) @ torch.ones(side, side)  # takes a square more
        row, wide = torch.ones(1, side), torch.ones(side, 3 * side)  # a row more
        return row @ wide + large.sum()

    expected = multiply()
    with penstock.offload(device_budget=budget_bytes, spill_dir=tmp_path, hardware=hardware) as run:
        with run.step():
            found = multiply()
        assert run.report().peak_bytes <= budget_bytes
    assert torch.equal(found, expected)


def test_a_full_disk_budget_is_one_clear_error_and_the_model_trains_on(
    tmp_path: Path, hardware: penstock.Hardware
) -> None:
    model, optimizer = small_gpt()
    before = weights(model)
    with (
        penstock.offload(
            device_budget="300KiB", spill_dir=tmp_path, disk_budget="64KiB", hardware=hardware, planning=PAGED
        ) as run,
        pytest.raises(penstock.SpillSpaceFull, match="disk_budget"),
        run.step(),
    ):
        iterate(model, optimizer, 0)
    assert weights(model) == before
    optimizer.zero_grad()
    with (
        penstock.offload(
            device_budget="500KiB", spill_dir=tmp_path, hardware=hardware, planning=PAGED
        ) as run,
        run.step(),
    ):
        iterate(model, optimizer, 0)
    expected, same = small_gpt()
    iterate(expected, same, 0)
    assert weights(model) == weights(expected)


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError


def test_what_a_failed_backward_had_ready_does_not_keep_a_closed_run(
    tmp_path: Path, hardware: penstock.Hardware
) -> None:
    with penstock.offload(device_budget="300KiB", spill_dir=tmp_path, hardware=hardware) as run:
        weight = torch.ones(64, 64, requires_grad=True)
        saved = weight.exp()
        squared = saved.square()
        with pytest.raises(ArithmeticError), run.step():
            (squared + _Failing.apply(weight)).sum().backward()  # autograd begins with the latest
        kept = weakref.ref(saved)
        del saved, squared
    gc.collect()
    assert kept() is None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 128 KiB."""
    point = tmp_path / "small"
    point.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(point)], capture_output=True, check=False
    )
    if mount.returncode:
        pytest.skip("mounting a small file system needs root")
    yield point
    subprocess.run(["umount", "-l", str(point)], check=True)


def test_a_full_disk_is_one_clear_error(small_disk: Path, hardware: penstock.Hardware) -> None:
    model, _ = small_gpt()
    with (
        penstock.offload(
            device_budget="300KiB", spill_dir=small_disk, hardware=hardware, planning=PAGED
        ) as run,
        pytest.raises(penstock.SpillSpaceFull, match=str(small_disk)),
        run.step(),
    ):
        FAMILIES["gpt"].loss(model, 0).backward()
    assert not list(small_disk.iterdir())


def test_a_run_that_began_with_a_full_disk_goes_on_once_there_is_room(
    tmp_path: Path, hardware: penstock.Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is free as it begins says nothing of later."""

    def full(file: int) -> os.statvfs_result:
        found = list(os.statvfs(file))
        return os.statvfs_result([*found[:3], 0, 0, *found[5:]])

    (model, optimizer), (expected, same) = small_gpt(), small_gpt()
    with monkeypatch.context() as patched:
        patched.setattr(os, "fstatvfs", full)
        run = penstock.offload(
            model, optimizer, device_budget="400KiB", spill_dir=tmp_path, hardware=hardware, planning=PAGED
        )
    with run:
        for step in range(3):
            with run.step():
                iterate(model, optimizer, step)
            iterate(expected, same, step)
    assert weights(model) == weights(expected)


def test_a_directory_that_is_not_there_or_is_a_file_is_refused(tmp_path: Path) -> None:
    model, optimizer = small_gpt()
    (tmp_path / "file").write_text("")
    for path in ("missing", "file"):
        with pytest.raises(penstock.SpillError, match=path):
            penstock.offload(model, optimizer, device_budget="1GiB", spill_dir=tmp_path / path)


def test_an_unwritable_directory_is_refused(tmp_path: Path) -> None:
    model, optimizer = small_gpt()
    tmp_path.chmod(0o500)
    user = os.geteuid()
    if user == 0:  # who may write anywhere
        os.seteuid(65534)
    try:
        with pytest.raises(penstock.SpillError, match=str(tmp_path)):
            penstock.offload(model, optimizer, device_budget="1GiB", spill_dir=tmp_path)
    finally:
        os.seteuid(user)


@pytest.mark.parametrize("budget", ["8 gigs", "", "-1", -1, 1.5, None, True])
def test_a_budget_that_is_no_size_is_refused(budget: object, tmp_path: Path) -> None:
    model, optimizer = small_gpt()
    with pytest.raises(penstock.InvalidSize):
        penstock.offload(model, optimizer, device_budget=budget, spill_dir=tmp_path)  # type: ignore[arg-type]


def test_a_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with pytest.raises(penstock.DeviceUnavailable, match="meta"):
        penstock.offload(model, torch.optim.SGD(model.parameters()), device_budget="1GiB", spill_dir=tmp_path)
    if not torch.cuda.is_available():
        with pytest.raises(penstock.DeviceUnavailable, match="cuda"):
            penstock.probe(tmp_path, device="cuda")


@pytest.mark.parametrize("failing", [0, 1, 3, 5])
def test_training_goes_on_after_an_exception_with_the_same_bits(
    failing: int, tmp_path: Path, hardware: penstock.Hardware
) -> None:
    class Interruption(Exception):
        pass

    def train(offloaded: bool) -> list[bytes]:
        model, optimizer = small_gpt()
        run = None
        if offloaded:
            run = penstock.offload(
                device_budget="300KiB", spill_dir=tmp_path, hardware=hardware, planning=PAGED
            )
        for step in range(7):
            if step == failing:
                if run:
                    with pytest.raises(Interruption), run.step():
                        FAMILIES["gpt"].loss(model, step)
                        raise Interruption
                continue
            if run:
                with run.step():
                    iterate(model, optimizer, step)
            else:
                iterate(model, optimizer, step)
        if run:
            assert run.report().evicted_bytes > 0
            run.close()
        return weights(model)

    assert train(offloaded=True) == train(offloaded=False)


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_anywhere_leaves_a_model_that_can_go_on(tmp_path: Path, hardware: penstock.Hardware) -> None:
    """As in a notebook: the step is given up, wherever it is, and the next one gives the same bits."""
    model, _ = small_gpt()
    rng, before = random.Random(0), signal.getsignal(signal.SIGINT)

    def gradients() -> list[bytes]:
        FAMILIES["gpt"].loss(model, 0).backward()
        found = bits(parameter.grad for parameter in model.parameters())
        model.zero_grad()
        return found

    expected, saved = gradients(), weights(model)
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    interrupted = 0
    with penstock.offload(
        device_budget="400KiB", spill_dir=tmp_path, hardware=hardware, planning=PAGED
    ) as run:
        for number in range(120):
            began_s = time.perf_counter()
            with run.step():
                assert gradients() == expected
            step_s = time.perf_counter() - began_s
            if number < 5:
                continue
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-4, step_s))
                    with run.step():
                        gradients()
                finally:  # the timer may fire in here, too
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
            model.zero_grad()
        assert run.report().evicted_bytes > 0
        assert run.report().peak_bytes <= 400 << 10
    assert interrupted > 20
    assert weights(model) == saved
    assert signal.getsignal(signal.SIGINT) is before


def test_a_step_inside_a_step_and_a_step_after_close_are_refused(
    tmp_path: Path, hardware: penstock.Hardware
) -> None:
    model, optimizer = small_gpt()
    run = penstock.offload(model, optimizer, device_budget="1GiB", spill_dir=tmp_path, hardware=hardware)
    with run.step(), pytest.raises(penstock.InvalidArgument, match="already open"), run.step():
        pass
    run.close()
    run.close()
    with pytest.raises(penstock.InvalidArgument, match="closed"), run.step():
        pass


def test_a_second_run_at_once_is_refused(tmp_path: Path, hardware: penstock.Hardware) -> None:
    with (
        penstock.offload(device_budget="1GiB", spill_dir=tmp_path, hardware=hardware),
        pytest.raises(penstock.InvalidArgument, match="another run is open"),
    ):
        penstock.offload(device_budget="1GiB", spill_dir=tmp_path)


def test_runs_one_after_the_other_on_the_same_model(tmp_path: Path, hardware: penstock.Hardware) -> None:
    """What a closed run left on its disk space is there in the next one, whatever its budget."""
    model, optimizer = small_gpt()
    expected, same = small_gpt()
    for step, budget in enumerate(["240KiB", "300KiB", "1GiB", "240KiB"]):
        with penstock.offload(
            model, optimizer, device_budget=budget, spill_dir=tmp_path, hardware=hardware, planning=PAGED
        ) as run:
            for part in range(3):
                with run.step():
                    iterate(model, optimizer, 3 * step + part)
                iterate(expected, same, 3 * step + part)
        assert weights(model) == weights(expected)


def test_a_run_closed_inside_its_step(tmp_path: Path, hardware: penstock.Hardware) -> None:
    model, optimizer = small_gpt()
    run = penstock.offload(device_budget="1GiB", spill_dir=tmp_path, hardware=hardware)
    with pytest.raises(penstock.InvalidArgument, match="step"), run.step():
        run.close()
    iterate(model, optimizer, 0)
    run.close()


def test_a_graph_outlives_its_step(tmp_path: Path, hardware: penstock.Hardware) -> None:
    gradients = []
    for offloaded in (False, True):
        model, optimizer = small_gpt()
        if not offloaded:
            FAMILIES["gpt"].loss(model, 0).backward()
        else:
            with penstock.offload(
                model, optimizer, device_budget="1GiB", spill_dir=tmp_path, hardware=hardware
            ) as run:
                with run.step():
                    loss = FAMILIES["gpt"].loss(model, 0)
                loss.backward()
        gradients.append([parameter.grad.numpy().tobytes() for parameter in model.parameters()])  # type: ignore[union-attr]
    assert gradients[0] == gradients[1]


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill"])
def test_a_process_that_is_ended_leaves_nothing(kind: signal.Signals, tmp_path: Path) -> None:
    running = training.start(budget="100MiB", spill_dir=str(tmp_path), steps=10_000, batch=1)
    running.wait_for("step 4\n")
    os.kill(running.process.pid, kind)
    ended = running.end(60)
    assert ended.returncode == (1 if kind is signal.SIGINT else -kind)
    assert not list(tmp_path.iterdir())
    assert ("KeyboardInterrupt" in ended.stderr) == (kind is signal.SIGINT)


def test_what_is_looked_at_as_a_step_fails_is_given_back(
    tmp_path: Path, hardware: penstock.Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nobody would ever get its addresses again."""
    looked_at: list[int] = []

    def fails(address: int, size_bytes: int, itemsize: int) -> float:
        looked_at.append(address)
        raise MemoryError("no room to look")

    monkeypatch.setattr(recording, "sampled_density", fails)
    with penstock.offload(device_budget=64 << 20, spill_dir=tmp_path, hardware=hardware) as run:
        with pytest.raises(MemoryError, match="to look"), run.step():
            torch.ones(1 << 20)
        gc.collect()
        kept = [torch.empty(1 << 20) for _ in range(4)]
        assert looked_at[0] in [tensor.data_ptr() for tensor in kept]


def test_a_prefetch_that_failed_is_logged_once_with_no_lock_held(
    tmp_path: Path, hardware: penstock.Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler of the program's may wait for a thread that needs the lock."""
    failing: list[Transfer] = []

    def fault(request: Transfer) -> int:
        if request.priority == PREFETCH:
            failing.append(request)
            return errno.EIO
        return 0

    said: list[tuple[str, bool]] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            def need() -> None:
                with run._engine.lock:
                    pass

            other = threading.Thread(target=need, daemon=True)
            other.start()
            other.join(10)
            said.append((record.getMessage(), other.is_alive()))

    monkeypatch.setitem(TRANSPORTS, "posix", lambda: FaultyTransport(PosixTransport(), fault))
    handler = Handler(logging.WARNING)
    logging.getLogger("penstock").addHandler(handler)
    try:
        with penstock.offload(
            device_budget=64 << 20,
            spill_dir=tmp_path,
            hardware=hardware,
            io=penstock.IoOptions(paths="posix direct"),
        ) as run:
            for number in range(1, 3):
                with run.step():
                    tensor = torch.full((1 << 20,), float(number))
                    with run._engine.lock:
                        managed = run._clock.storages.track(tensor.untyped_storage())
                        run._engine.evict(managed, release=True)
                        run._engine.drain()
                        run._engine.prefetch(managed)
                        run._engine.drain()
                    assert bool((tensor == number).all())
            assert run.report().failed_prefetches == len(failing) == 2
    finally:
        logging.getLogger("penstock").removeHandler(handler)
    assert [(message[:17], waited) for message, waited in said] == [("a prefetch failed", False)]
