"""Whoever reads or writes a tensor that is away gets its bytes: NumPy, files, copies, threads, processes."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import penstock
from tests.support.runs import HARDWARE, PAGED

LAYERS, WIDTH = 8, 512
WEIGHT_BYTES = WIDTH * WIDTH * 4


class Training:
    """Layers that exceed the budget, in training; what they must hold is computed beside, in memory."""

    def __init__(self, spill_dir: Path) -> None:
        torch.manual_seed(5)
        self.run = penstock.offload(
            device_budget=6 * WEIGHT_BYTES, spill_dir=spill_dir, hardware=HARDWARE, planning=PAGED
        )
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, number: int = 0) -> None:
        with self.run.step():
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))
            self.model(x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    @property
    def accesses(self) -> int:
        return self.run.report().unplanned_accesses


def expected(steps: int) -> list[np.ndarray]:
    """The weights after so many steps, without penstock."""
    torch.manual_seed(5)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(steps):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().numpy().copy() for parameter in model.parameters()]


WANTED = expected(4)


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    made = Training(tmp_path)
    for number in range(4):
        made.step(number)
    assert made.run.report().evicted_bytes > 0
    yield made
    made.run.close()


def same(found: object, wanted: object) -> bool:
    return bool(
        all(
            np.array_equal(np.asarray(one), np.asarray(other))
            for one, other in zip(found, wanted, strict=True)
        )  # type: ignore[call-overload]
    )


def test_numpy_views_taken_long_ago(tmp_path: Path) -> None:
    made = Training(tmp_path)
    views = [parameter.detach().numpy() for parameter in made.model.parameters()]
    addresses = [view.ctypes.data for view in views]
    for number in range(4):
        made.step(number)
    before = made.accesses
    assert same(views, WANTED)
    assert made.accesses > before
    assert [parameter.data_ptr() for parameter in made.model.parameters()] == addresses
    for view in views:
        view *= 2  # in place, behind torch's back
    for parameter, wanted in zip(made.model.parameters(), WANTED, strict=True):
        assert torch.equal(parameter.detach(), torch.from_numpy(2 * wanted))
    made.step(4)
    made.run.close()
    assert same(views, [parameter.detach().numpy() for parameter in made.model.parameters()])
    assert not same(views, [2 * wanted for wanted in WANTED]), "the step has changed them"


def test_copies(training: Training) -> None:
    clone = copy.deepcopy(training.model)
    assert same([p.detach().numpy() for p in clone.parameters()], WANTED)
    state = training.model.state_dict()
    assert same([value.numpy() for value in state.values()], WANTED)
    fresh = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    fresh.load_state_dict(state)
    assert same([p.detach().numpy() for p in fresh.parameters()], WANTED)


def test_torch_save_to_memory(training: Training) -> None:
    buffer = io.BytesIO()
    torch.save(training.model.state_dict(), buffer)
    buffer.seek(0)
    assert same([value.numpy() for value in torch.load(buffer).values()], WANTED)


def test_torch_save_to_a_file(training: Training, tmp_path: Path) -> None:
    torch.save(training.model.state_dict(), tmp_path / "model.pt")
    assert same([value.numpy() for value in torch.load(tmp_path / "model.pt").values()], WANTED)


def test_penstock_save(training: Training, tmp_path: Path) -> None:
    penstock.save(training.model.state_dict(), tmp_path / "model.safetensors")
    loaded = penstock.load(tmp_path / "model.safetensors")
    assert same([loaded[name].numpy() for name in training.model.state_dict()], WANTED)


def test_pickle(training: Training) -> None:
    loaded = pickle.loads(pickle.dumps(training.model))
    assert same([p.detach().numpy() for p in loaded.parameters()], WANTED)


def touched(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes, after each page has been read."""
    flat = tensor.detach().reshape(-1).numpy().view(np.uint8)
    flat[::4096].sum()
    return memoryview(flat)


def test_system_calls_on_what_is_away_fail_or_do_their_work(training: Training, tmp_path: Path) -> None:
    """A system call serves no faults: it gives an error, and never other bytes."""
    path = tmp_path / "weights.bin"
    refused = 0
    for parameter, wanted in zip(training.model.parameters(), WANTED, strict=True):
        for write in (
            lambda p=parameter: p.detach().numpy().tofile(path),
            lambda p=parameter: path.open("wb", buffering=0).write(
                memoryview(p.detach().numpy()).cast("B")  # type: ignore[arg-type]
            ),
        ):
            try:
                write()
            except OSError:
                refused += 1
            else:
                assert path.read_bytes() == wanted.tobytes()
        touched(parameter).obj.tofile(path)  # type: ignore[attr-defined]
        assert path.read_bytes() == wanted.tobytes()
    assert refused > 0


def test_files_read_into_what_is_away(training: Training, tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    for parameter, wanted in zip(training.model.parameters(), WANTED, strict=True):
        path.write_bytes((3 * wanted).tobytes())
        try:
            with path.open("rb", buffering=0) as raw:
                assert raw.readinto(memoryview(parameter.detach().numpy()).cast("B")) == wanted.nbytes
        except OSError:
            assert np.array_equal(parameter.detach().numpy(), wanted)
        else:
            assert np.array_equal(parameter.detach().numpy(), 3 * wanted)


def test_print_and_tolist(training: Training) -> None:
    weight = next(training.model.parameters())
    text = repr(weight)
    assert f"{weight.tolist()[0][0]:.4f}" in text
    assert np.array_equal(np.array(weight.tolist(), dtype=np.float32), WANTED[0])


def test_another_thread(training: Training) -> None:
    found: list[list[np.ndarray]] = []
    sums: list[float] = []

    def read() -> None:
        found.append([parameter.detach().numpy().copy() for parameter in training.model.parameters()])
        x = torch.ones(4, WIDTH)
        with torch.no_grad():
            for _ in range(20):
                x = torch.tanh(training.model(x))
        sums.append(float(x.sum()))

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 3 and all(same(one, WANTED) for one in found)
    assert len(set(sums)) == 1


def test_another_thread_while_the_model_trains(training: Training) -> None:
    """Weights are read while steps run: each is whole, whatever it is."""
    over = threading.Event()
    frozen = torch.arange(WIDTH * WIDTH, dtype=torch.float32).reshape(WIDTH, WIDTH)
    wanted = frozen.numpy().copy()
    problems: list[str] = []

    def read() -> None:
        view = frozen.numpy()
        while not over.is_set():
            if not np.array_equal(view, wanted):
                problems.append("other bytes")

    thread = threading.Thread(target=read)
    thread.start()
    for number in range(4, 12):
        training.step(number)
    over.set()
    thread.join(60)
    assert not thread.is_alive() and not problems


class Rows(Dataset[torch.Tensor]):
    """Rows of a tensor that may be away in the process that forks."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.table[index] * 2


def test_workers_made_by_fork_read_what_is_away(training: Training) -> None:
    for layer, wanted in zip(training.model, WANTED[::2], strict=True):  # they do not all fit
        rows = Rows(layer.weight.detach())
        loader = DataLoader(rows, batch_size=64, num_workers=2, multiprocessing_context="fork")
        found = torch.cat(list(loader))
        assert np.array_equal(found.numpy(), 2 * wanted)
    training.step(6)


def _sum(connection: object, weights: list[torch.Tensor]) -> None:
    connection.send([float(weight.double().sum()) for weight in weights])  # type: ignore[attr-defined]


def test_a_forked_process_runs_kernels_on_what_is_away(training: Training) -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    weights = [parameter.detach() for parameter in training.model.parameters()]
    process = context.Process(target=_sum, args=(there, weights))
    process.start()
    assert here.poll(60)
    found = here.recv()
    process.join(60)
    assert process.exitcode == 0
    assert found == [float(torch.from_numpy(wanted).double().sum()) for wanted in WANTED]


def test_a_tensor_shared_between_processes_stays_where_it_is(training: Training) -> None:
    shared = torch.arange(1 << 16, dtype=torch.float32).share_memory_()
    for number in range(4, 7):
        training.step(number)
    shared += 1
    assert torch.equal(shared, torch.arange(1 << 16, dtype=torch.float32) + 1)
