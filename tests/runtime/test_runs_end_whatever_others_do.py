"""A run that is closed gives back its memory, disk space, threads and files, or lingers until it can:
whatever other threads do, and however its steps ended. The next run works."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock import _native
from penstock.runtime import arena, open_runs
from tests.support.runs import (
    EVERYTHING,
    HARDWARE,
    Bits,
    Step,
    bits,
    budgets,
    family_training,
    in_memory,
    offload,
    offloaded,
)

MIB = 1 << 20
PIECE = 1 << 18  # the least that has an address range of its own


def _files() -> set[str]:
    """What this process has open, but for what is not ours."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            continue
    return {name for name in found if "penstock" in name or "deleted" in name}


def _offload(spill_dir: Path, device_budget: int | str = 4 * MIB, **options: Any) -> penstock.Offload:
    return offload(device_budget=device_budget, spill_dir=spill_dir, hardware=HARDWARE, **options)


@pytest.fixture(autouse=True)
def all_is_given_back(tmp_path: Path) -> Iterator[None]:
    assert arena.unavailable() is None  # installed
    gc.collect()
    threads, files = set(threading.enumerate()), _files()
    yield
    gc.collect()
    for left in tuple(open_runs.lingering):
        left._give_back()
    assert open_runs.lingering == []
    left_threads = [each.name for each in set(threading.enumerate()) - threads]
    assert [name for name in left_threads if "penstock" in name] == []
    assert _files() <= files
    assert list(tmp_path.iterdir()) == []
    stats = arena.stats()
    assert (stats.out_bytes, stats.swap_used_bytes) == (0, 0)
    assert stats.budget_bytes is None


def test_a_thread_allocates_while_runs_close(tmp_path: Path) -> None:
    """It needs room when a run closes, so that tensors leave for the swap file just then."""
    ended = threading.Event()
    wrong: list[object] = []

    def allocate() -> None:
        kept: list[torch.Tensor] = []
        number = 0
        while not ended.is_set():
            try:
                kept.append(torch.full((PIECE,), number % 100, dtype=torch.uint8))
            except RuntimeError:  # no room just now
                kept.clear()
            number += 1
            if len(kept) > 20:
                wrong.extend(tensor for tensor in kept if int(tensor.max()) != int(tensor.min()))
                kept.clear()

    thread = threading.Thread(target=allocate, daemon=True)
    thread.start()
    try:
        for _ in range(40):
            with _offload(tmp_path, 8 * PIECE):
                mine = [torch.full((PIECE,), float(i)) for i in range(1, 2)]
            assert all(float(tensor[-1]) == i for i, tensor in enumerate(mine, 1))
    finally:
        ended.set()
        thread.join(60)
    assert not thread.is_alive() and wrong == []


class _Experts(nn.Module):
    """A mixture of experts, of which each row is seen by one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            result = result.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        return result


def _experts_training(step: Step) -> Bits:
    torch.manual_seed(3)
    model = _Experts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(2):
        with step():
            x = torch.randn(256, 64, generator=torch.Generator().manual_seed(number))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return bits(model.parameters())


@pytest.mark.parametrize("name", ["experts", "lstm", "gpt"])
def test_a_failed_run_is_followed_by_others(name: str, tmp_path: Path) -> None:
    """Its error, and with it the frames that have its model, is kept."""
    program = _experts_training if name == "experts" else family_training(name, 2)
    expected = in_memory(program)
    least, enough = budgets(program, tmp_path, 0.0, 0.5)
    kept: list[BaseException] = []
    for _ in range(3):
        with pytest.raises((penstock.BudgetTooSmall, RuntimeError)) as refused:
            offloaded(program, least // 2, tmp_path)
        assert isinstance(refused.value, penstock.BudgetTooSmall)
        kept.append(refused.value)
        found, _ = offloaded(program, enough, tmp_path)
        assert found == expected
    kept.clear()


def test_the_next_run_works_beside_one_that_lingers(tmp_path: Path) -> None:
    """More is away than fits: its swap file stays, and is the only one."""
    with _offload(tmp_path, smallest_bytes=EVERYTHING):
        kept = [torch.full((MIB // 4,), float(i)) for i in range(12)]
    assert len(open_runs.lingering) == 1
    for _ in range(2):
        with _offload(tmp_path, smallest_bytes=EVERYTHING) as second, second.step():
            others = [torch.full((MIB // 4,), float(i)) for i in range(8)]
            assert [float(tensor[3]) for tensor in others] == list(range(8))
        del others
    assert [float(tensor[3]) for tensor in kept] == list(range(12))
    del kept
    with _offload(tmp_path, smallest_bytes=EVERYTHING):
        pass
    assert open_runs.lingering == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_run_ends_beside_more_than_its_budget_that_others_made(when: str, tmp_path: Path) -> None:
    """What a run before it, or one after it, has left in memory is not kept within its budget."""

    def others() -> list[torch.Tensor]:
        with _offload(tmp_path, 64 * MIB, smallest_bytes=EVERYTHING):
            return [torch.full((MIB // 4,), float(i)) for i in range(16)]

    if when == "before":
        made = others()
    with _offload(tmp_path, smallest_bytes=EVERYTHING):
        kept = [torch.full((MIB // 4,), float(i)) for i in range(6)]
    assert len(open_runs.lingering) == 1
    if when == "after":
        made = others()
    values = [*range(6), *range(16)]
    assert [float(tensor.numpy()[3]) for tensor in (*kept, *made)] == values  # no kernel
    assert {_native.arena_state(tensor.data_ptr()) for tensor in made} == {"in"}
    del kept[3:]
    open_runs.give_back_lingering()
    assert open_runs.lingering == []
    assert [float(tensor[3]) for tensor in (*kept, *made)] == [*range(3), *range(16)]


def test_a_run_whose_disk_hangs_at_its_end_keeps_nobody_within_its_budget(tmp_path: Path) -> None:
    opened = _offload(tmp_path)
    drain = opened._engine.drain

    def hangs() -> None:
        raise penstock.SpillError("the disk hangs")

    opened._engine.drain = hangs  # type: ignore[method-assign]
    with pytest.raises(penstock.SpillError, match="hangs"):
        opened.close()
    assert opened.closed
    assert float(torch.ones(16 * MIB).sum()) == 16 * MIB
    with _offload(tmp_path):
        pass  # the one before cannot end yet, and that is logged
    opened._engine.drain = drain  # type: ignore[method-assign]


def test_a_lease_whose_swap_file_is_in_use_lingers(tmp_path: Path) -> None:
    with open(tmp_path / "swap", "wb+") as file:
        os.unlink(tmp_path / "swap")
        lease = arena.activate(8 * MIB, (-1, file.fileno(), 1 << 30, 0))
        tensors = [torch.full((MIB,), i, dtype=torch.uint8) for i in range(12)]
        assert not lease.close()
        assert not lease.close(brings_back=True), "it does not fit"
        assert all(bool((tensor.numpy() == i).all()) for i, tensor in enumerate(tensors))
        del tensors[4:]
        assert lease.close(brings_back=True)
        assert lease.close()
        assert all(bool((tensor.numpy() == i).all()) for i, tensor in enumerate(tensors))


def test_a_lease_goes_on_with_its_own_swap_file_once_that_of_the_first_is_closed() -> None:
    with tempfile.TemporaryFile() as first_file, tempfile.TemporaryFile() as second_file:
        first = arena.activate(4 * MIB, (-1, first_file.fileno(), 1 << 30, 0))
        tensors = [torch.full((MIB,), i, dtype=torch.uint8) for i in range(6)]
        assert not first.close(), "two of them are in its file"
        second = arena.activate(4 * MIB, (-1, second_file.fileno(), 1 << 30, 0))
        del tensors[:]
        assert first.close(), "nothing is in its file"
        tensors = [torch.full((MIB,), i, dtype=torch.uint8) for i in range(8)]
        assert os.fstat(second_file.fileno()).st_size > 0
        assert all(bool((tensor.numpy() == i).all()) for i, tensor in enumerate(tensors))
        del tensors[:]
        assert second.close()


def test_who_forgot_an_open_run_is_told(tmp_path: Path) -> None:
    opened = _offload(tmp_path, "40KiB", smallest_bytes=EVERYTHING)
    with pytest.raises(penstock.BudgetTooSmall) as inside, opened.step():
        nn.functional.linear(torch.ones(64, 512), torch.ones(512, 512))
    assert "penstock.close()" not in str(inside.value)
    with pytest.raises(penstock.BudgetTooSmall, match=r"still open.*penstock\.close\(\)"):
        nn.functional.linear(torch.ones(64, 512), torch.ones(512, 512))
    penstock.close()
    assert nn.functional.linear(torch.ones(64, 512), torch.ones(512, 512)).shape == (64, 512)


def test_a_tensor_that_exceeds_the_budget_alone_opens_no_run(
    tmp_path: Path, hardware: penstock.Hardware
) -> None:
    model = nn.Linear(512, 512)
    with pytest.raises(penstock.BudgetTooSmall) as refused:
        penstock.offload(model, device_budget="512KiB", spill_dir=tmp_path, hardware=hardware)
    assert "takes 1.00 MiB alone" in str(refused.value) and "No run was opened" in str(refused.value)
    assert "still open" not in str(refused.value)
    assert refused.value.minimum_bytes == MIB
    assert torch.ones(MIB).sum() == MIB, "no budget is left behind"


def test_tensors_of_another_thread_leave_for_those_of_a_kernel(tmp_path: Path) -> None:
    """They are nobody's of the run, and count: what a kernel needs at once fits beside none of them."""

    def allocate() -> None:
        others.append(torch.full((9 * MIB // 4,), 7.0))

    with _offload(tmp_path, "16MiB") as offload:
        for _ in range(3):
            others: list[torch.Tensor] = []
            with offload.step():
                tensors = [torch.full((MIB,), float(number)) for number in range(1, 4)]
                torch.full((15 * MIB // 4,), 0.0)  # for which they leave
                thread = threading.Thread(target=allocate)
                thread.start()
                thread.join(60)
                tensors[0].addcmul_(tensors[1], tensors[2])  # twelve MiB at once
                found = [
                    bool((tensor == value).all()) for tensor, value in zip(tensors, (7, 2, 3), strict=True)
                ]
            assert found == [True, True, True]
            assert bool((others.pop() == 7).all())


def test_garbage_of_a_run_that_failed_takes_nothing_from_the_next(tmp_path: Path) -> None:
    """A step that fails leaves its tensors in cycles, as of frames."""
    gc.disable()
    try:
        with pytest.raises(penstock.SpillSpaceFull), _offload(tmp_path, disk_budget=2 * MIB) as run:
            kept: list[Any] = []
            kept.append(kept)
            for number in range(12):
                with run.step():
                    kept.append(torch.full((PIECE,), float(number)))
        del kept
        with _offload(tmp_path) as run:
            assert not open_runs.lingering
            for number in range(8):
                with run.step():
                    tensors = [torch.full((PIECE,), float(number + i)) for i in range(8)]
                    assert [float(tensor[7]) for tensor in tensors] == list(range(number, number + 8))
    finally:
        gc.enable()


def test_a_full_disk_is_told_where_steps_fitted_until_now(tmp_path: Path) -> None:
    """Operators of such steps are not seen."""
    kept = []
    with _offload(tmp_path, disk_budget=2 * MIB) as run:
        with pytest.raises(penstock.SpillSpaceFull, match="is full, and nothing can leave"):
            for number in range(12):
                with run.step():
                    kept.append(torch.full((PIECE,), float(number)))
        del kept[2:]
        with run.step():
            kept.append(torch.full((PIECE,), 3.0))
        assert [float(tensor[5]) for tensor in kept] == [0, 1, 3]


@pytest.mark.parametrize("disk_budget", [0, 6 * MIB])
def test_what_no_budget_holds_is_not_told_as_a_full_disk(tmp_path: Path, disk_budget: int) -> None:
    with (
        _offload(tmp_path, disk_budget=disk_budget) as run,
        pytest.raises(penstock.BudgetTooSmall, match="the device budget is"),
        run.step(),
    ):
        torch.empty(8 * PIECE)
