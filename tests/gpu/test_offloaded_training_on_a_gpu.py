"""The same promises on a CUDA device: the same bits, inside the budget, over host memory and over disk.

`make gpu` runs it on one, `make gpu-rehearsal` on the emulated accelerator.
"""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import penstock
from penstock.capture.compiler import backend
from penstock.runtime.devices.accelerator import AWAY_TEXT
from penstock.runtime.devices.cuda import CudaDriver, access_errors
from penstock.runtime.devices.drivers import DRIVERS
from penstock.runtime.storage_methods import held_bytes
from tests.support.accelerator import NOT_REHEARSED, wanted
from tests.support.access_errors import AccessErrors
from tests.support.families import FAMILIES, _Gpt
from tests.support.runs import offload

pytestmark = pytest.mark.usefixtures("reproducible")

DEVICE = wanted("cuda")

STEPS = 5
MIB = 1 << 20
# cuBLAS and cuDNN keep workspaces in the allocator, and segments have 2 MiB: more than these models.
LIBRARIES_BYTES = (24 if DEVICE == "cuda" else 16) * MIB
# Of what is compressed; and a GPT's width, its batch, and the budget of its training, which needs more.
ROWS, COLUMNS = (8192, 1024) if DEVICE == "cuda" else (4096, 256)
WIDTH, BATCH, BUDGET = (512, (8, 256), 256 * MIB) if DEVICE == "cuda" else (256, (2, 32), 48 * MIB)
PARTS = {"part_bytes": BUDGET // 8}  # of a compiled model: as a run divides it
on_cuda = functools.partial(pytest.mark.skipif, DEVICE != "cuda")


def train(name: str, **options: object) -> tuple[list[bytes], penstock.Report | None]:
    family = FAMILIES[name]
    torch.manual_seed(7)
    model = family.make().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = offload(model, optimizer, **options) if options else None  # type: ignore[arg-type]
    found = []
    for step in range(STEPS):
        torch.manual_seed(step)
        with run.step() if run else nullcontext(), torch.device("cpu"):
            loss = family.loss(model, step)
            family.backward(loss)
            found += [loss.detach().cpu().numpy().tobytes()]
            found += [p.grad.cpu().numpy().tobytes() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
    found += [p.detach().cpu().numpy().tobytes() for p in model.parameters()]
    report = run.report() if run else None
    if run:
        run.close()
    return found, report


def tier_options(tier: str, tmp_path: Path, machine: penstock.Hardware) -> dict[str, Any]:
    return {
        "spill_dir": tmp_path,
        "hardware": machine,
        "host_budget": "1GiB" if tier == "host" else "64MiB",  # the latter is all staging
        "smallest_bytes": 1,
    }


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("policy", ["optimal", "evict_all"])
def test_same_bits(name: str, tier: str, policy: str, tmp_path: Path, machine: penstock.Hardware) -> None:
    expected, _ = train(name)
    options = tier_options(tier, tmp_path, machine)
    found, report = train(name, device_budget=LIBRARIES_BYTES, policy=policy, **options)
    assert found == expected
    assert report is not None and report.peak_bytes <= LIBRARIES_BYTES
    assert report.policy == policy  # steps as short as these may give up what it moves


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize(
    "lossy", [None, pytest.param("fp16", marks=on_cuda(reason=NOT_REHEARSED + "plans that choose to round"))]
)
def test_compressed_plans(tier: str, lossy: str | None, tmp_path: Path, machine: penstock.Hardware) -> None:
    """ReLUs leave compressed on a stream of their own; the bits are the same unless the user names a loss."""

    def steps(run: penstock.Offload | None) -> list[bytes]:
        torch.manual_seed(1)
        layers = [torch.nn.Linear(COLUMNS, COLUMNS, device=DEVICE) for _ in range(8)]
        for layer in layers:
            torch.nn.init.kaiming_normal_(layer.weight)  # else all is 0 after some layers
        found = []
        for step in range(STEPS):
            with run.step() if run else nullcontext():
                x = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(step)).to(DEVICE)
                for layer in layers:
                    x = torch.relu(layer(x) - 0.3)
                loss = x.square().sum()
                del x
                loss.backward()
                found += [loss.detach().cpu().numpy().tobytes()]
                found += [layer.weight.grad.cpu().numpy().tobytes() for layer in layers]
                for layer in layers:
                    layer.zero_grad()
        return found

    expected = steps(None)
    assert any(expected[0]), "the loss is 0, whatever is rounded"
    slow_bytes_per_s = 1e9 if DEVICE == "cuda" else 1e7
    slow = replace(
        machine,
        disk_write_bytes_per_s=slow_bytes_per_s,
        disk_read_bytes_per_s=slow_bytes_per_s,
        device_to_host_bytes_per_s=slow_bytes_per_s,
        host_to_device_bytes_per_s=slow_bytes_per_s,
        measured_rates={},
        compress_bytes_per_s=1e11,
        expand_bytes_per_s=1e11,
    )
    options = {**tier_options(tier, tmp_path, slow), "device": DEVICE}
    with offload(device_budget="4GiB", **options) as run:
        steps(run)
        trace = run.trace
    assert trace is not None
    if lossy is None:  # else bitmask-CSR makes them smaller than a lossy codec
        trace = trace.with_density({"aten::relu": 0.4, "relu": 0.4})
    budget_bytes = LIBRARIES_BYTES + trace.peak_bytes // 2
    hardware = replace(run.hardware, device_bytes=budget_bytes)
    plan = penstock.plan(trace, hardware, compress=lossy is None, lossy=lossy, time_limit_s=2)
    assert any(evict.codec != "raw" for evict in plan.evictions)
    with offload(device_budget=budget_bytes, plan=plan, lossy=lossy, **options) as run:
        found = steps(run)
        report = run.report()
    assert report.peak_bytes <= budget_bytes
    assert (found == expected) == (lossy is None)
    assert bool(report.lossy) == (lossy is not None)


def gpt(inside: bool, steps: Callable[[torch.nn.Module, Any], list[Any]], **options: Any) -> tuple[Any, Any]:
    """A GPT of some 100 MiB with its optimizer's state, built inside the budget."""
    torch.manual_seed(0)
    with offload(device=DEVICE, **options) if inside else nullcontext() as run:
        with torch.device(DEVICE):
            model = _Gpt(width=WIDTH, blocks=6)
        losses = steps(model, run)
        weights = [parameter.detach().cpu() for parameter in model.parameters()]
        return (losses, weights), run.report() if run else None


def loop(
    make_optimizer: Callable[..., torch.optim.Optimizer],
    context: Callable[[], Any] = nullcontext,
    scaled: bool = False,
    compiled: bool = False,
) -> Callable[[torch.nn.Module, Any], list[Any]]:
    def steps(model: torch.nn.Module, run: Any) -> list[Any]:
        optimizer = make_optimizer(model.parameters())
        scaler = torch.amp.GradScaler(DEVICE, enabled=scaled)
        forward = torch.compile(model, backend=backend, options=PARTS) if compiled else model
        losses = []
        for step in range(STEPS):
            seeded = torch.Generator().manual_seed(step)
            words = torch.randint(0, 64, BATCH, generator=seeded)
            with run.step() if run else nullcontext():
                words = words.to(DEVICE)
                with context():
                    loss = F.cross_entropy(forward(words).flatten(0, 1), words.roll(-1, 1).flatten())
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                losses.append(loss.item().hex())
        return losses

    return steps


def adamw(**how: bool) -> Callable[..., torch.optim.Optimizer]:
    return lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, **how)  # type: ignore[arg-type]


LOOPS = {
    "plain": loop(adamw(foreach=False)),
    "foreach": loop(adamw(foreach=True)),
    "fused": loop(adamw(fused=True)),
    "sgd": loop(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)),
    "bf16": loop(adamw(), lambda: torch.autocast(DEVICE, torch.bfloat16)),
    "fp16 scaled": loop(adamw(), lambda: torch.autocast(DEVICE, torch.float16), scaled=True),
    "compiled": loop(adamw(), compiled=True),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=on_cuda(reason=NOT_REHEARSED + "torch.compile") if name == "compiled" else ()
        )
        for name in LOOPS
    ],
)
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_whole_models_page_and_keep_their_bits(
    name: str, tier: str, tmp_path: Path, machine: penstock.Hardware
) -> None:
    options = tier_options(tier, tmp_path, machine)
    (losses, weights), _ = gpt(False, LOOPS[name])
    torch._dynamo.reset()
    (found, found_weights), report = gpt(True, LOOPS[name], device_budget=BUDGET, **options)
    assert found == losses
    assert all(torch.equal(one, other) for one, other in zip(found_weights, weights, strict=True))
    assert report.peak_bytes <= BUDGET and report.evicted_bytes > 0


@on_cuda(reason=NOT_REHEARSED + "torch.compile")
def test_what_was_compiled_before_the_run_keeps_its_bits(tmp_path: Path, machine: penstock.Hardware) -> None:
    """Its weights, which come back for it, are away between calls."""
    weights = [torch.full((MIB,), float(index), device=DEVICE) for index in range(16)]  # 4 MiB each
    scaled = torch.compile(lambda weight, x: (weight * x).sin())
    expected = [scaled(weight, weights[1]).cpu() for weight in weights]
    options = tier_options("host", tmp_path, machine)
    with offload(device=DEVICE, device_budget=32 * MIB, **options) as run:
        weights = [weight.clone() for weight in weights]
        for _ in range(3):
            with run.step():
                for weight, wanted in zip(weights, expected, strict=True):
                    assert torch.equal(scaled(weight, weights[1]).cpu(), wanted)
        assert run.report().evicted_bytes > 0


def test_a_budget_that_holds_everything_moves_nothing(tmp_path: Path, machine: penstock.Hardware) -> None:
    _, report = gpt(True, LOOPS["plain"], device_budget="4GiB", **tier_options("host", tmp_path, machine))
    assert report.evicted_bytes == 0


@pytest.fixture
def guarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """Elsewhere than on CUDA torch's guards of accesses are built for the test."""
    if DEVICE != "cuda":
        record_property("not rehearsed", "guards of accesses, which builds of torch for CUDA have")
        AccessErrors(tmp_path).install(monkeypatch)
        driver: Any = DRIVERS[DEVICE]
        monkeypatch.setattr(driver, "set_access_error", CudaDriver.set_access_error)
        guard = staticmethod(access_errors(torch.device(DEVICE)))
        monkeypatch.setattr(driver, "_set_access_error", guard, raising=False)


@pytest.mark.usefixtures("guarded")
def test_access_from_cpp_to_what_is_away_raises(tmp_path: Path, machine: penstock.Hardware) -> None:
    options = tier_options("host", tmp_path, machine)
    with offload(device=DEVICE, device_budget=32 * MIB, **options) as run:
        tensors = [torch.full((MIB,), float(index), device=DEVICE) for index in range(16)]  # 4 MiB each
        away = [tensor for tensor in tensors if held_bytes(tensor.untyped_storage()) == 0]
        assert away
        if run._device._driver._set_access_error is None:
            pytest.skip("this torch cannot have accesses raise")
        address_in_cpp = torch._C.TensorBase.data_ptr
        with pytest.raises(RuntimeError) as refused:
            address_in_cpp(away[0])
        assert AWAY_TEXT in str(refused.value)
        assert away[0].data_ptr() == address_in_cpp(away[0]) != 0  # that of Python brings it back
        assert [float(tensor.mean()) for tensor in tensors] == list(map(float, range(16)))


def test_what_is_away_is_saved_and_copied(tmp_path: Path, machine: penstock.Hardware) -> None:
    options = tier_options("host", tmp_path, machine)
    with offload(device=DEVICE, device_budget=32 * MIB, **options):
        tensors = [torch.full((MIB,), float(index), device=DEVICE) for index in range(16)]  # 4 MiB each
        torch.save(tensors, tmp_path / "new.pt")
        torch.save(tensors, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
        copies = [*copy.deepcopy(tensors), *map(pickle.loads, map(pickle.dumps, tensors))]
        expected = list(map(float, range(16)))
        assert [float(tensor.mean()) for tensor in copies] == expected * 2
        assert f"{tensors[3]}" == f"{torch.full((MIB,), 3.0)}".replace(")", f", device='{DEVICE}:0')")
    for name in ("new.pt", "old.pt"):
        loaded = torch.load(tmp_path / name, map_location="cpu")
        assert [float(tensor.mean()) for tensor in loaded] == expected


@on_cuda(reason=NOT_REHEARSED + "CUDA graphs")
def test_graphs_are_refused(tmp_path: Path, machine: penstock.Hardware) -> None:
    graph, x = torch.cuda.CUDAGraph(), torch.zeros(MIB, device=DEVICE)
    with torch.cuda.graph(graph):
        x.add_(1)
    with offload(device=DEVICE, device_budget="1GiB", **tier_options("host", tmp_path, machine)):
        with pytest.raises(penstock.InvalidArgument, match="replay"):
            graph.replay()
        with pytest.raises(penstock.InvalidArgument, match="graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            pass
        compiled = torch.compile(lambda x: x.sin() * 2, mode="reduce-overhead")
        with pytest.raises(Exception, match="no-cudagraphs"):
            compiled(x)
    graph.replay()
    assert float(x.mean()) == 1


def test_what_comes_back_after_the_run_is_whole(tmp_path: Path, machine: penstock.Hardware) -> None:
    options = tier_options("disk", tmp_path, machine)
    with offload(device=DEVICE, device_budget=32 * MIB, **options):
        tensors = [torch.full((MIB,), float(index), device=DEVICE) for index in range(16)]
    assert [float(tensor.mean()) for tensor in tensors] == list(map(float, range(16)))


def test_kernels_on_other_streams_are_waited_for(tmp_path: Path, machine: penstock.Hardware) -> None:
    options = tier_options("host", tmp_path, machine)
    side = torch.Stream(device=DEVICE)
    with offload(device=DEVICE, device_budget=48 * MIB, **options):
        tensors = [torch.full((MIB,), float(index), device=DEVICE) for index in range(16)]
        for turn in range(8):
            side.wait_stream(torch.accelerator.current_stream())
            with side:
                for tensor in tensors[turn % 2 :: 2]:
                    tensor.add_(1)
            torch.accelerator.current_stream().wait_stream(side)
            for tensor in tensors:
                tensor.mul_(1)
        assert [float(tensor.mean()) for tensor in tensors] == [index + 4.0 for index in range(16)]


def test_a_kernel_that_cannot_fit_is_refused(tmp_path: Path, machine: penstock.Hardware) -> None:
    options = tier_options("host", tmp_path, machine)
    with offload(device=DEVICE, device_budget=32 * MIB, **options):
        kept = torch.ones(MIB, device=DEVICE)
        with pytest.raises(penstock.BudgetTooSmall, match="device budget"):
            torch.zeros(16 * MIB, device=DEVICE)
        assert float(kept.sum()) == MIB
