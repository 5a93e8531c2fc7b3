"""A run is closed, and the device has no memory for all that is away: it is served until it has died or is
back."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import penstock
from penstock.capture.phases import OPTIMIZER_STATE, WEIGHT
from penstock.runtime import open_runs
from penstock.runtime.storage_methods import held_bytes
from tests.device.test_what_is_away_is_whole import saved
from tests.support.accelerator import wanted
from tests.support.runs import ACCELERATED

DEVICE = wanted("emu")
MIB = 1 << 20
COUNT = 24
MEMORY = 12 * MIB


def opened(tmp_path: Path, model: torch.nn.Module | None = None, **options: object) -> penstock.Offload:
    given = {"device_budget": 8 * MIB, "host_budget": "80MiB", "spill_dir": tmp_path} | options
    return penstock.offload(model, device=DEVICE, hardware=ACCELERATED, **given)


def full(number: float) -> torch.Tensor:
    return torch.full((MIB // 4,), float(number), device=DEVICE)


def is_away(tensor: torch.Tensor) -> bool:
    return not held_bytes(tensor.untyped_storage())


def values(tensors: list[torch.Tensor]) -> list[float]:
    assert all(bool((tensor == tensor[0]).all()) for tensor in tensors)
    return [float(tensor[0]) for tensor in tensors]


@pytest.fixture
def tensors(configure: Callable[..., None], tmp_path: Path) -> list[torch.Tensor]:
    """Twice as much as the device has memory for, of a run that is closed."""
    configure(memory=f"{MEMORY // MIB}MiB", order="stepped", seed=1)
    with opened(tmp_path):
        made = [full(number) for number in range(COUNT)]
    assert COUNT // 4 <= sum(map(is_away, made)) < COUNT
    return made


def as_safetensors(tensors: list[torch.Tensor], path: Path = Path("saved.safetensors")) -> list[torch.Tensor]:
    save_file({str(number): tensor for number, tensor in enumerate(tensors)}, path)
    found = load_file(path)
    return [found[str(number)] for number in range(COUNT)]


def of_state_dict(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    file = io.BytesIO()
    torch.save(torch.nn.ParameterList(tensors).state_dict(), file)
    file.seek(0)
    return list(torch.load(file, map_location="cpu").values())


def on_another_thread(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.extend(saved(tensors)))
    thread.start()
    thread.join()
    return found


READS: dict[str, Callable[[list[torch.Tensor]], list[torch.Tensor]]] = {
    "operator": lambda tensors: [(tensor * 1).cpu() for tensor in tensors],
    "view": lambda tensors: [tensor.view(-1, 4)[2:9].reshape(-1).cpu() for tensor in tensors],
    ".cpu()": lambda tensors: [tensor.cpu() for tensor in tensors],
    ".numpy()": lambda tensors: [torch.from_numpy(tensor.numpy(force=True)) for tensor in tensors],
    "torch.save": saved,
    "torch.save on another thread": on_another_thread,
    "state_dict": of_state_dict,
    "pickle": lambda tensors: [tensor.cpu() for tensor in pickle.loads(pickle.dumps(tensors))],
    "deepcopy": lambda tensors: [copy.deepcopy(tensor).cpu() for tensor in tensors],
    "safetensors": as_safetensors,
}


@pytest.mark.parametrize("way", READS)
def test_reading(
    tensors: list[torch.Tensor], way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found: list[torch.Tensor] = []
    if way == "pickle":  # on the device there is no room for all of them twice
        for tensor in tensors:
            found += READS[way]([tensor])
    else:
        found = READS[way](tensors)
    assert values(found) == list(range(COUNT))


def test_writes_stay(tensors: list[torch.Tensor]) -> None:
    for turn in range(2):
        for tensor in tensors[turn::2]:
            tensor.add_(100)
    for number, tensor in enumerate(tensors):
        tensor.untyped_storage().copy_(torch.full((MIB // 4,), number + 200.0).untyped_storage())
    assert values(saved(tensors)) == [number + 200 for number in range(COUNT)]


def test_all_is_given_back_when_the_rest_has_died(tensors: list[torch.Tensor], tmp_path: Path) -> None:
    (left,) = open_runs.lingering
    threads = {thread.name for thread in threading.enumerate()}
    assert any("penstock" in name for name in threads)
    del tensors[6:]
    gc.collect()
    assert values(tensors) == list(range(6))  # what is away comes back, and nothing is then
    assert open_runs.lingering == []
    assert list(tmp_path.iterdir()) == []
    assert not any("penstock-host" in thread.name for thread in threading.enumerate())
    assert "data_ptr" not in vars(torch.Tensor)
    assert left.closed and values(tensors) == list(range(6))
    with opened(tmp_path):
        pass
    assert torch._C._len_torch_dispatch_stack() == 0


def test_weights_come_back_first(configure: Callable[..., None], tmp_path: Path) -> None:
    configure(memory=f"{MEMORY // MIB}MiB")
    with opened(tmp_path) as run:
        made = [full(number) for number in range(COUNT)]
        away = [tensor for tensor in made if is_away(tensor)]
        weights, state = away[::2], away[1::2]
        for kind, tensors in ((WEIGHT, weights), (OPTIMIZER_STATE, state)):
            for tensor in tensors:
                managed = run._clock.storages.find(tensor.untyped_storage())
                assert managed is not None
                managed.kind = kind
    back = sum(not is_away(tensor) for tensor in away)
    assert 0 < back < len(weights)
    assert sum(not is_away(tensor) for tensor in weights) == back


def test_training_larger_than_the_device_is_saved_after_it(
    configure: Callable[..., None], tmp_path: Path
) -> None:
    configure(memory=f"{MEMORY // MIB}MiB", order="random", seed=2)

    def trained(train: Callable[[torch.nn.Module, torch.optim.Optimizer], None]) -> dict[str, object]:
        torch.manual_seed(1)
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(20))).to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        train(model, optimizer)
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}, file)
        file.seek(0)
        return torch.load(file, map_location="cpu")

    def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: Callable[..., object]) -> None:
        for _ in range(2):
            with step():
                model(torch.ones(4, 256, device=DEVICE)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()

    def offloaded(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for budget in (8 * MIB, 7 * MIB):  # the second run takes over what the first has left
            with opened(tmp_path, model, device_budget=budget) as run:
                steps(model, optimizer, run.step)
            assert len(open_runs.lingering) == 1

    def plain(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(2):
            steps(model, optimizer, torch.enable_grad)

    found = trained(offloaded)
    gc.collect()
    open_runs.give_back_lingering()
    configure(memory="64MiB")
    expected = trained(plain)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_the_next_run_takes_it_over(tensors: list[torch.Tensor], tmp_path: Path) -> None:
    with opened(tmp_path) as run:
        assert open_runs.lingering == []
        with run.step():
            for tensor in tensors:
                tensor.add_(1)
        assert values(tensors) == [number + 1 for number in range(COUNT)]
        assert run.report().peak_bytes <= 8 * MIB
    assert values(saved(tensors)) == [number + 1 for number in range(COUNT)]


@pytest.mark.parametrize("budget", [6 * MIB, MIB // 2])
def test_what_the_next_run_has_no_room_for_is_not_lost(
    tensors: list[torch.Tensor], budget: int, tmp_path: Path
) -> None:
    with pytest.raises(penstock.SpillSpaceFull):
        opened(tmp_path, device_budget=budget, host_budget="65MiB", disk_budget=2 * MIB)
    assert open_runs.opened == []
    assert values(saved(tensors)) == list(range(COUNT))


def test_a_run_on_another_device_is_refused(tensors: list[torch.Tensor], tmp_path: Path) -> None:
    with pytest.raises(penstock.InvalidArgument, match="delete them, or move them to the CPU"):
        penstock.offload(device_budget="64MiB", spill_dir=tmp_path, hardware=ACCELERATED)
    assert values(saved(tensors)) == list(range(COUNT))


def test_a_copy_that_cannot_be_read_is_an_error(
    configure: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(memory=f"{MEMORY // MIB}MiB")
    with opened(tmp_path, host_budget="64MiB") as run:  # the host has no tier: all of it is on the disk
        made = [full(number) for number in range(COUNT)]

        def fails(copy: object, priority: int) -> None:
            raise penstock.SpillError("the disk is broken")

        monkeypatch.setattr(run._device._copies._from_disk, "_carry_out", fails)
    away = [tensor for tensor in made if is_away(tensor)]
    assert away
    for read in (lambda: saved(away), away[0].cpu):
        with pytest.raises(penstock.SpillError, match="the disk is broken"):
            read()
    monkeypatch.undo()
    assert values(saved(made)) == list(range(COUNT))


def test_the_process_ends(tmp_path: Path) -> None:
    program = f"""
import sys
from tests.support import accelerator
emu = accelerator.load({DEVICE!r})
import torch
from pathlib import Path
from tests.device import test_what_does_not_fit_outlives_its_run as t
from penstock.runtime import open_runs
if emu is not None:
    emu.configure(memory="12MiB")
with t.opened(Path({str(tmp_path)!r})):
    made = [t.full(number) for number in range(t.COUNT)]
assert open_runs.lingering
print("reached")
"""
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(root)])}
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, check=False, cwd=root, env=environment, capture_output=True, timeout=120)
    assert (ended.returncode, ended.stdout.strip()) == (0, b"reached"), ended.stderr.decode()
    assert list(tmp_path.iterdir()) == []
