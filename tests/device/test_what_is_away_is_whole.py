"""Tensors that have left an accelerator: whoever reads them gets their bytes, or an error."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import penstock
from penstock.runtime.storage_methods import held_bytes
from tests.support.accelerator import orders, wanted
from tests.support.runs import ACCELERATED

DEVICE = wanted("emu")
MIB = 1 << 20
COUNT = 16


@pytest.fixture
def tensors(configure: Callable[..., None], tmp_path: Path) -> Iterator[list[torch.Tensor]]:
    """Sixteen of 1 MiB, of which less than half have room; each is full of its number."""
    configure(order="stepped", seed=1)
    with penstock.offload(
        device=DEVICE, device_budget=8 * MIB, spill_dir=tmp_path, hardware=ACCELERATED, host_budget="128MiB"
    ):
        made = [torch.full((MIB // 4,), float(number), device=DEVICE) for number in range(COUNT)]
        assert sum(not held_bytes(tensor.untyped_storage()) for tensor in made) >= COUNT // 2
        yield made


def saved(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    file = io.BytesIO()
    torch.save(tensors, file)
    file.seek(0)
    return torch.load(file, map_location="cpu")


SEEN: dict[str, Callable[[list[torch.Tensor]], list[torch.Tensor]]] = {
    ".cpu()": lambda tensors: [tensor.cpu() for tensor in tensors],
    "numbers": lambda tensors: [torch.tensor(tensor[:4].tolist()) for tensor in tensors],
    "views": lambda tensors: [tensor.view(-1, 4)[5:9].clone().cpu() for tensor in tensors],
    "kernels": lambda tensors: [(tensor * 1).cpu() for tensor in tensors],
    "foreach": lambda tensors: [
        one.cpu() for part in range(0, COUNT, 2) for one in torch._foreach_mul(tensors[part : part + 2], 1)
    ],
    "numpy": lambda tensors: [torch.from_numpy(np.asarray(tensor.cpu())) for tensor in tensors],
}


@pytest.mark.parametrize("how", SEEN)
def test_operators_bring_it_back(tensors: list[torch.Tensor], how: str) -> None:
    found = SEEN[how](tensors)
    assert [bool((tensor == number).all()) for number, tensor in enumerate(found)] == [True] * COUNT


STORAGE_ACCESSES: dict[str, Callable[[list[torch.Tensor]], list[torch.Tensor]]] = {
    "torch.save": saved,
    "pickle": lambda tensors: [tensor.cpu() for tensor in pickle.loads(pickle.dumps(tensors))],
    "deepcopy": lambda tensors: [tensor.cpu() for tensor in copy.deepcopy(tensors)],
}


@pytest.mark.parametrize("how", STORAGE_ACCESSES)
def test_accesses_to_its_storage_bring_it_back(tensors: list[torch.Tensor], how: str) -> None:
    found = STORAGE_ACCESSES[how](tensors)
    assert [bool((tensor == number).all()) for number, tensor in enumerate(found)] == [True] * COUNT


def test_its_text_has_its_numbers(tensors: list[torch.Tensor], capsys: pytest.CaptureFixture[str]) -> None:
    expected = [
        f"{torch.full((MIB // 4,), float(number))}".replace(")", f", device='{DEVICE}:0')")
        for number in range(COUNT)
    ]
    assert [repr(tensor) for tensor in tensors] == expected
    assert not held_bytes(tensors[0].untyped_storage())
    print(tensors[0], f"{tensors[1]}", sep="\n")
    assert capsys.readouterr().out == f"{expected[0]}\n{expected[1]}\n"
    assert f"{tensors[2][7]:.1f} {tensors[3][7]}" == "2.0 3.0"


READ_BY_A_WORKER: dict[str, Callable[[torch.Tensor], object]] = {
    "an element": lambda tensor: tensor[3],
    "a kernel": lambda tensor: (tensor + 1).tolist(),
    "its text": repr,
    "torch.save": lambda tensor: saved([tensor]),
    "its address": lambda tensor: tensor.data_ptr(),
    "DLPack": lambda tensor: tensor.__dlpack__(),
    "its size": lambda tensor: tensor.untyped_storage().nbytes(),
    "bytes": lambda tensor: bytes(tensor.untyped_storage().cpu()),
}


class Read:
    """A data set of what a worker finds by each."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.plain = tensor, torch.arange(3.0)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> dict[str, str]:
        found = {"another tensor": f"{self.plain} {saved([self.plain])}"}
        for name, read in READ_BY_A_WORKER.items():
            try:
                found[name] = f"read: {read(self.tensor)}"
            except (RuntimeError, penstock.InvalidArgument) as refused:
                found[name] = str(refused)
        return found


@pytest.mark.parametrize("host_budget", ["128MiB", "64MiB"], ids=["host", "disk"])
def test_a_worker_made_by_fork_is_refused(
    configure: Callable[..., None], tmp_path: Path, host_budget: str
) -> None:
    with penstock.offload(
        device=DEVICE,
        device_budget=8 * MIB,
        spill_dir=tmp_path,
        hardware=ACCELERATED,
        host_budget=host_budget,
    ):
        made = [torch.full((MIB // 4,), float(number), device=DEVICE) for number in range(COUNT)]
        assert not held_bytes(made[0].untyped_storage())
        how: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork", "timeout": 60}
        loader = DataLoader(Read(made[0]), None, **how)  # type: ignore[arg-type]
        (found,) = loader
        plain = torch.arange(3.0)
        assert found.pop("another tensor") == f"{plain} {[plain]}"
        assert not any(text.startswith("read:") for text in found.values()), found
        del found["an element"], found["a kernel"]  # torch refuses these
        assert all("made by fork" in text for text in found.values()), found
        assert [float(tensor.mean()) for tensor in made] == list(map(float, range(COUNT)))


def test_a_state_larger_than_the_budget_is_loaded_inside(
    configure: Callable[..., None], tmp_path: Path
) -> None:
    """To the device, and by an optimizer that takes it over from the CPU."""
    configure(order="stepped", seed=1)
    numbers = range(COUNT)
    penstock.save([torch.full((MIB // 4,), float(number)) for number in numbers], tmp_path / "saved")
    with penstock.offload(
        device=DEVICE, device_budget=8 * MIB, spill_dir=tmp_path, hardware=ACCELERATED, host_budget="128MiB"
    ):
        found = penstock.load(tmp_path / "saved", map_location=DEVICE)
        assert sum(not held_bytes(tensor.untyped_storage()) for tensor in found) >= COUNT // 2
        optimizer = torch.optim.SGD(found, lr=1.0)
        state = optimizer.state_dict()
        momenta = penstock.load(tmp_path / "saved")
        state["state"] = {number: {"momentum_buffer": momenta[number]} for number in numbers}
        optimizer.load_state_dict(state)
        del state, momenta
        taken = [optimizer.state[tensor]["momentum_buffer"] for tensor in found]
        away = [not held_bytes(tensor.untyped_storage()) for tensor in (*found, *taken)]
        assert sum(away) >= 3 * COUNT // 2
        for tensors in (found, taken):
            assert [
                (tensor.device.type, bool((tensor == number).all())) for number, tensor in enumerate(tensors)
            ] == [(torch.device(DEVICE).type, True)] * COUNT


def test_what_comes_back_after_the_run_is_whole(configure: Callable[..., None], tmp_path: Path) -> None:
    configure(order="lazy")
    with penstock.offload(
        device=DEVICE, device_budget=8 * MIB, spill_dir=tmp_path, hardware=ACCELERATED, host_budget="64MiB"
    ):
        made = [torch.full((MIB // 4,), float(number), device=DEVICE) for number in range(COUNT)]
    assert [float(tensor.mean()) for tensor in saved(made)] == list(map(float, range(COUNT)))


def test_a_model_that_was_there_counts(configure: Callable[..., None], tmp_path: Path) -> None:
    made = [torch.full((MIB // 4,), float(number), device=DEVICE) for number in range(COUNT)]
    with penstock.offload(
        torch.nn.ParameterList(made),
        device_budget=8 * MIB,
        spill_dir=tmp_path,
        hardware=ACCELERATED,
        host_budget="128MiB",
    ) as run:
        for _ in range(2):
            with run.step():
                for tensor in made:
                    (tensor * 1).add_(1)
        assert run.report().peak_bytes <= 8 * MIB


def test_a_block_of_the_host_is_free_when_its_copies_are_over(
    configure: Callable[..., None], tmp_path: Path
) -> None:
    """Of two copies that kernels wait for: one out of the device, one back."""
    with penstock.offload(
        device=DEVICE, device_budget=8 * MIB, spill_dir=tmp_path, hardware=ACCELERATED, host_budget="65MiB"
    ) as run:
        tensor = torch.full((MIB // 4,), 1.0, device=DEVICE)
        managed, device, engine = run._clock.storages.find(tensor.untyped_storage()), run._device, run._engine
        out, into = device._copies._to_host, device._copies._from_host
        assert managed is not None

        def is_free() -> bool:
            slot = device.reserve(managed, "host")
            device.free_slot(managed, slot)
            return bool(slot.tier == "host")

        with into._reporting:  # to the host none is over
            with out._reporting, engine.lock:
                engine.evict(managed, release=True)
                assert engine.leave_now(managed)
                engine.demand([managed])
                engine.will_write(managed)
                device.free_slot(managed, managed.slot)
                managed.slot = None
                assert not is_free()
            torch.accelerator.synchronize()
            device.poll()
            assert not is_free()
        engine.drain()
        assert is_free() and float(tensor.mean()) == 1


@pytest.mark.parametrize("order", orders(DEVICE, "lazy", "stepped", "random", "newest"))
def test_kernels_on_other_streams_are_waited_for(
    configure: Callable[..., None], order: str, tmp_path: Path
) -> None:
    configure(order=order, seed=3)
    side, main = torch.Stream(device=DEVICE), torch.accelerator.current_stream()
    with penstock.offload(
        device=DEVICE, device_budget=10 * MIB, spill_dir=tmp_path, hardware=ACCELERATED, host_budget="128MiB"
    ):
        tensors = [torch.full((MIB // 4,), float(number), device=DEVICE) for number in range(COUNT)]
        for turn in range(6):
            side.wait_stream(main)
            with side:
                for tensor in tensors[turn % 2 :: 2]:
                    tensor.add_(1)
            main.wait_stream(side)
            for tensor in tensors:
                tensor.mul_(1)
        assert [float(tensor.mean()) for tensor in tensors] == [number + 3.0 for number in range(COUNT)]
