"""A storage that the program frees and allocates again in a step is another one to the run, as for FSDP2."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.storage.spill import SpillSpace
from penstock.storage.transfer import Transfer
from tests.support.checked import checked_run
from tests.support.gathered import Gathered
from tests.support.runs import HARDWARE, PAGED

WIDTH, LAYERS = 128, 8
BYTES = WIDTH * WIDTH * 4


def train(
    steps: int, budget: int | None, spill_dir: Path
) -> tuple[list[torch.Tensor], penstock.Report | None]:
    program = Gathered(WIDTH, LAYERS)
    run = None
    if budget is not None:
        run = penstock.offload(device_budget=budget, spill_dir=spill_dir, hardware=HARDWARE, planning=PAGED)
    report = None
    for number in range(steps):
        if run is None:
            program.step(number)
        else:
            with run.step():
                program.step(number)
    if run is not None:
        report = run.report()
        run.close()
    return [weight.detach().clone() for weight in program.weights], report


def test_same_bits_within_the_budget(tmp_path: Path) -> None:
    wanted, _ = train(6, None, tmp_path)
    found, roomy = train(6, 1 << 30, tmp_path)
    assert roomy is not None and roomy.evicted_bytes == 0
    assert all(map(torch.equal, found, wanted))
    for budget in (LAYERS * BYTES, roomy.minimum_bytes):
        found, report = train(6, budget, tmp_path)
        assert report is not None
        assert all(map(torch.equal, found, wanted))
        assert report.evicted_bytes > 0
        assert report.peak_bytes <= budget


@pytest.mark.parametrize("seed", range(4))
def test_on_an_accelerator_too(tmp_path: Path, seed: int) -> None:
    width = 16
    size_bytes = width * width * 4
    weights = [torch.full((width, width), float(n + 1)) for n in range(LAYERS)]
    expected = [weight.clone() for weight in weights]
    with (
        SpillSpace(tmp_path, penstock.IoOptions(paths=["posix direct"])) as spill,
        checked_run(spill, LAYERS * size_bytes, seed=seed, refuses=True) as run,
    ):
        moved = [weight.mul(1) for weight in weights]
        gathered = [torch.empty(width, width) for _ in range(LAYERS)]

        def resize(buffer: torch.Tensor, bytes_then: int) -> None:
            storage = buffer.untyped_storage()
            if not bytes_then:
                run.driver.dropped.add(storage._cdata)  # nobody wants a copy of it
            assert storage.resize_(bytes_then) is storage
            assert storage.nbytes() == bytes_then

        for buffer in gathered:
            resize(buffer, 0)
        for _ in range(3):
            for weight, buffer in zip(moved, gathered, strict=True):
                resize(buffer, size_bytes)
                buffer.copy_(weight)
                weight.add_(buffer)
            for buffer in reversed(gathered):
                buffer.add_(1)
                resize(buffer, 0)
        assert run.device.meter.peak_bytes() <= LAYERS * size_bytes
        found = [weight.mul(1).tolist() for weight in moved]
    assert found == [weight.mul(8).tolist() for weight in expected]


@pytest.mark.parametrize("way", ["resize_", "out", "grow", "set_"])
def test_a_tensor_that_grew_counts(way: str, tmp_path: Path) -> None:
    """Kernels that use it have it in memory, and what does not fit beside it is refused."""
    large, small = 100 << 10, 15 << 10  # elements

    def use(run: penstock.Offload | None) -> list[float]:
        weights, grown = torch.arange(float(large)), torch.empty(0)
        found = []
        for number in range(4):
            with contextlib.nullcontext() if run is None else run.step():
                if way == "grow":
                    grown.resize_(small + number * 1024)
                elif way == "resize_":
                    grown = torch.empty(0).resize_(small)
                elif way == "set_":
                    storage = torch.empty(0).untyped_storage()
                    grown = torch.empty(0).set_(storage, 0, (small,), (1,))  # type: ignore[call-overload]
                else:
                    grown = torch.empty(0)
                    torch.add(torch.ones(small), 1, out=grown)
                grown.fill_(number + 1)
                found.append(float((grown[:1024] + weights[number : number + 1024]).sum()))
                weights.mul_(1.01)
                found.append(float(grown.sum()))
        return found

    expected = use(None)
    fits_bytes = 4 * (large + small + 3 * 1024 + 1024)
    with penstock.offload(
        device_budget=fits_bytes + 4096, spill_dir=tmp_path, hardware=HARDWARE, planning=PAGED
    ) as run:
        assert use(run) == expected
        assert run.report().peak_bytes <= fits_bytes + 4096
    needed_bytes = 4 * (large + small)
    with (
        penstock.offload(
            device_budget=needed_bytes - 4096, spill_dir=tmp_path, hardware=HARDWARE, planning=PAGED
        ) as run,
        pytest.raises(penstock.BudgetTooSmall) as refused,
    ):
        use(run)
    assert refused.value.minimum_bytes >= needed_bytes


def test_what_is_leaving_when_set_resizes_it_has_its_slot_until_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, written = SpillSpace.write, []

    def late(self: SpillSpace, *args: Any, **options: Any) -> Transfer:
        *given, on_done = args

        def over(transfer: Transfer) -> None:
            written.append(transfer)
            on_done(transfer)

        return write(
            self, *given, lambda transfer: threading.Timer(0.3, over, (transfer,)).start(), **options
        )

    monkeypatch.setattr(SpillSpace, "write", late)
    with penstock.offload(
        device_budget="64MiB", spill_dir=tmp_path, hardware=HARDWARE, planning=PAGED
    ) as run:
        tensor = torch.arange(1 << 20)
        storage = tensor.untyped_storage()
        managed = run._clock.storages.find(storage)
        assert managed is not None
        with run._engine.lock:
            run._engine.evict(managed, "disk", release=True)
        larger = torch.empty(0, dtype=torch.int64).set_(storage, 0, (1 << 21,), (1,))  # type: ignore[call-overload]
        assert len(written) == 1
        larger.fill_(7)
        assert tensor.unique().tolist() == [7]


def test_resize_is_torchs_own_again_when_the_run_is_closed(tmp_path: Path) -> None:
    before = torch.UntypedStorage.resize_
    run = penstock.offload(device_budget="64MiB", spill_dir=tmp_path, hardware=HARDWARE)
    assert torch.UntypedStorage.resize_ is not before
    tensor = torch.arange(1000.0)
    assert tensor.untyped_storage().resize_(8000) is not None
    assert torch.equal(tensor, torch.arange(1000.0))
    with pytest.raises(RuntimeError):
        torch.from_numpy(tensor.numpy()).untyped_storage().resize_(16000)
    run.close()
    assert torch.UntypedStorage.resize_ is before
    assert "resize_" not in vars(torch.UntypedStorage)
