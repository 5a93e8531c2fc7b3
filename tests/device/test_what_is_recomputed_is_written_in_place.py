"""What runs again writes to the memory of what was dropped: that is taken once, and every bit is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import penstock
from tests.support.accelerator import wanted
from tests.support.forced import recompute_everything
from tests.support.runs import ACCELERATED, EVERYTHING, bits

DEVICE = wanted("emu")
GENEROUS = 1 << 30
SIDE = 1024
STEPS = 6  # the last is not recorded: that resets the peak at each kernel

IN_PLACE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "add": lambda x: x + 1.5,
    "cast": lambda x: x.to(torch.float64),
    "transposed clone": lambda x: x.t().clone(),
    "contiguous": lambda x: x.t().contiguous(),
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "softmax": lambda x: x.softmax(-1),
    "product": lambda x: x @ x.t(),
    "linear": lambda x: torch.addmm(x[0], x, x.t(), beta=0.5),
    "cat": lambda x: torch.cat((x[:100], x[300:])),
    "convolution": lambda x: F.conv2d(x.view(16, 16, 64, 64), x[0, :256].view(16, 16, 1, 1), padding=1),
    "convolution and bias": lambda x: F.conv1d(x.view(16, 64, 1024), x[:4].view(64, 64, 1), x[0, :64]),
}
COPIED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "layer norm": lambda x: F.layer_norm(x, (SIDE,)),
    "dropout": lambda x: F.dropout(x, 0.5),
}
if DEVICE == "cuda":  # torch writes it in place by cuDNN alone, and adds a bias elsewhere
    COPIED["convolution and bias"] = IN_PLACE.pop("convolution and bias")


@pytest.mark.parametrize("name", [*IN_PLACE, *COPIED])
def test_a_kernel_has_its_result_once(name: str, tmp_path: Path) -> None:
    check((IN_PLACE | COPIED)[name], 2.1 if name in COPIED else 1.1, tmp_path)


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """cuDNN's convolution, which gets what torch gives it on CUDA: its calls."""
    calls: list[tuple[Any, ...]] = []

    def convolved(
        image: torch.Tensor,
        weight: torch.Tensor,
        padding: list[int],
        stride: list[int],
        dilation: list[int],
        groups: int,
        *flags: bool,
        out: torch.Tensor,
    ) -> torch.Tensor:
        calls.append(flags)
        zeros = [0] * len(stride)
        return torch.ops.aten.convolution.out(
            image, weight, None, stride, padding, dilation, False, zeros, groups, out=out
        )

    library = torch.library.Library("aten", "IMPL")
    library.impl("cudnn_convolution.out", convolved, torch._C._dispatch_key_for_device(DEVICE))
    backend = torch._C._ConvBackend.Cudnn
    monkeypatch.setattr(torch._C, "_select_conv_backend", lambda *_, **__: type(backend)(backend.value))
    yield calls
    library._destroy()


@pytest.mark.skipif(DEVICE == "cuda", reason="has cuDNN's own")
@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_convolutions_of_cudnn_have_their_result_once(cudnn: list[tuple[Any, ...]], tmp_path: Path) -> None:
    check(
        lambda x: F.conv2d(x.view(4, 64, 64, 64), x[:16].view(32, 32, 4, 4), None, (2, 1), (1, 2), 1, 2),
        1.1,
        tmp_path,
    )
    assert set(cudnn) == {(False, False, True)}  # torch's defaults: no search, any algorithm, with TF32


def test_transposed_convolutions_are_not_recomputed(tmp_path: Path) -> None:
    """Where cuDNN has them, they add up in any order."""
    images = torch.ones(4, 64, 16, 16, device=DEVICE)
    weight = torch.ones(64, 64, 3, 3, device=DEVICE)
    with penstock.offload(
        device=DEVICE, device_budget=GENEROUS, spill_dir=tmp_path, hardware=ACCELERATED
    ) as run:
        with run.step():
            F.conv_transpose2d(F.conv2d(images, weight), weight).sum().item()
        trace = run.trace
    assert trace is not None
    made = [kernel for kernel, name in enumerate(trace.kernel_name) if name == "convolution"]
    assert [int(trace.tensor_recompute[trace.outputs[kernel][0]]) for kernel in made] == [made[0], -1]


def check(kernel: Callable[[torch.Tensor], torch.Tensor], most_results: float, tmp_path: Path) -> None:
    weight = torch.linspace(-3, 3, SIDE * SIDE, device=DEVICE).view(SIDE, SIDE)

    def train(run: penstock.Offload) -> tuple[list[bytes], int]:
        torch.manual_seed(3)
        with run.step():
            made = kernel(weight)
            middle = weight.sum() * 2  # it is dropped before the second
            torch.accelerator.reset_peak_memory_stats()
            before = torch.accelerator.memory_allocated()
            middle = middle * 2
            found = made.sum() + middle
            taken = torch.accelerator.max_memory_allocated() - before
            return bits([made, found]), taken

    options = {
        "device": DEVICE,
        "device_budget": GENEROUS,
        "host_budget": "96MiB",
        "spill_dir": tmp_path,
        "hardware": ACCELERATED,
        "planning": penstock.PlanOptions(smallest_bytes=EVERYTHING, recompute=True),
    }
    with penstock.offload(**options) as run:
        expected, _ = train(run)
        trace = run.trace
    assert trace is not None
    plan = recompute_everything(trace, GENEROUS, least_bytes=SIDE * SIDE // 2)
    assert plan.recomputations
    with penstock.offload(**options, plan=plan) as run:
        for _ in range(STEPS):
            found, taken = train(run)
            assert found == expected
        report = run.report()
    assert report.recomputed_bytes > 0 and report.unrecomputed == 0
    result_bytes = max(int(trace.tensor_bytes[each.tensor]) for each in plan.recomputations)
    assert result_bytes <= taken < most_results * result_bytes
