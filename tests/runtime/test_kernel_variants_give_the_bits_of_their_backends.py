"""Other algorithms for kernels: measured without a trace in the results, chosen by plans, and carried out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import penstock
from penstock import cli
from penstock.capture.recorder import make_trace
from penstock.planners import plan as make_plan
from penstock.report import Record
from penstock.runtime.recording import Recording
from penstock.runtime.schedule import Schedule, schedule
from penstock.storage.spill import SpillSpace
from tests.support import runs
from tests.support.checked import checked_run
from tests.support.runs import HARDWARE, Bits, Program, Step, bits, differences, run_in_memory, state_bits

needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch is built without oneDNN"
)


def training(model: Callable[[], torch.nn.Module], x: torch.Tensor, steps: int = 5) -> Program:
    def program(step: Step) -> Bits:
        trained = model()
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
        found: Bits = []
        for _ in range(steps):
            with step():
                loss = trained(x).float().square().mean()
                loss.backward()
                found += bits([loss, *(parameter.grad for parameter in trained.parameters())])
                optimizer.step()
                optimizer.zero_grad()
        return found + bits(trained.parameters()) + state_bits(optimizer)

    return program


class Attention(torch.nn.Module):
    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal
        self.project = torch.nn.Linear(32, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.project(x).unflatten(-1, (3, 4, 8)).movedim(-3, 0).transpose(-3, -2)
        return F.scaled_dot_product_attention(*heads, is_causal=self.causal).transpose(1, 2).flatten(2)


def convolutions() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(16, 8, 3, stride=2)
    )


def products() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(96, 160), torch.nn.Linear(160, 64)).bfloat16()


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def without_onednn() -> contextlib.AbstractContextManager[Any]:
    return torch.backends.mkldnn.flags(enabled=False)


def math_attention() -> contextlib.AbstractContextManager[Any]:
    return sdpa_kernel(SDPBackend.MATH)


CASES = {
    "convolutions": pytest.param(
        training(convolutions, drawn(4, 3, 32, 32)),
        "without oneDNN",
        without_onednn,
        {"convolution", "convolution_backward"},
        marks=needs_onednn,
    ),
    "products": pytest.param(
        training(products, drawn(64, 96).bfloat16()),
        "without oneDNN",
        without_onednn,
        {"addmm", "mm"},
        marks=needs_onednn,
    ),
    "causal attention": (
        training(Attention, drawn(2, 48, 32)),
        "math attention",
        math_attention,
        {
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention_for_cpu_backward",
        },
    ),
    "attention": (
        training(lambda: Attention(causal=False), drawn(2, 48, 32)),
        "math attention",
        math_attention,
        {
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention_for_cpu_backward",
        },
    ),
}


def recorded(program: Program, spill_dir: Path, budget: str = "1GiB", **options: Any) -> tuple[Bits, Any]:
    torch.manual_seed(7)
    with runs.offload(
        device_budget=budget, spill_dir=spill_dir, hardware=HARDWARE, smallest_bytes=4096, **options
    ) as run:
        return program(run.step), (run.trace, run.plan, run.report())


def forced(trace: penstock.Trace, name: str, kernels: set[str] | None = None) -> penstock.Plan:
    """A plan in which every kernel that can runs as the variant, or those of these operators."""
    names = [[variant.name for variant in variants] for variants in trace.kernel_variants]
    chosen = [
        found.index(name) if name in found and (kernels is None or operator in kernels) else -1
        for found, operator in zip(names, trace.kernel_name, strict=True)
    ]
    made = make_plan(replace(trace, kernel_variants=()), HARDWARE, "keep", device_budget=1 << 30)
    return replace(made, variants=tuple(chosen), trace=trace)


@pytest.mark.parametrize(("program", "name", "backend", "operators"), CASES.values(), ids=CASES)
def test_variants_give_the_bits_of_their_backends(
    program: Program, name: str, backend: Callable[[], Any], operators: set[str], tmp_path: Path
) -> None:
    as_it_is = run_in_memory(program)
    with backend():
        by_hand = run_in_memory(program)
    # Measuring changes nothing: the first step runs as it is.
    _, (trace, _, _) = recorded(program, tmp_path, variants=True)
    found = {
        operator
        for operator, variants in zip(trace.kernel_name, trace.kernel_variants, strict=True)
        if variants
    }
    assert operators <= found  # on ARM products of 32 bits are oneDNN's too
    chosen, (_, plan, report) = recorded(program, tmp_path, plan=forced(trace, name))
    assert differences(by_hand, chosen) == []
    assert report.trace_mismatches <= 1  # the first step makes the optimizer's state
    assert report.variants == {name: sum(variant >= 0 for variant in plan.variants)}
    assert f"{report.variants[name]} {name}" in str(report) and report.variants[name] >= 2
    kept, _ = recorded(program, tmp_path, plan=forced(trace, "none of them"))
    assert differences(as_it_is, kept) == []


def test_measuring_changes_nothing_that_the_program_sees(tmp_path: Path) -> None:
    program = training(Attention, drawn(2, 48, 32), steps=1)
    measured, (trace, _, report) = recorded(program, tmp_path, variants=True)
    assert differences(run_in_memory(program), measured) == []
    assert any(trace.kernel_variants) and report.steps == report.profiled_steps == 1
    _, (plain, _, _) = recorded(program, tmp_path)
    assert plain.kernel_variants == () and plain.kernel_name == trace.kernel_name
    assert plain.tensor_bytes.tolist() == trace.tensor_bytes.tolist()
    assert plain.kernel_workspace_bytes.tolist() == trace.kernel_workspace_bytes.tolist()


def test_workspace_and_time_of_each_are_told(tmp_path: Path) -> None:
    program = training(Attention, drawn(2, 256, 32), steps=2)
    _, (trace, _, _) = recorded(program, tmp_path, variants=True)
    scores_bytes = 2 * 4 * 256 * 256 * 4
    for variants in trace.kernel_variants:
        for variant in variants:
            assert variant.time_s > 0
            assert variant.workspace_bytes >= scores_bytes


def test_forward_and_backward_may_differ(tmp_path: Path) -> None:
    program = training(Attention, drawn(2, 48, 32))
    _, (trace, _, _) = recorded(program, tmp_path, variants=True)
    forward = forced(trace, "math attention", {"_scaled_dot_product_flash_attention_for_cpu"})
    mixed, _ = recorded(program, tmp_path, plan=forward)
    found = {}
    for name, backend in (("math", math_attention), ("fused", contextlib.nullcontext)):
        with backend():
            found[name] = run_in_memory(program)
    assert differences(found["math"][:1], mixed[:1]) == []  # the first loss
    assert differences(found["fused"], mixed)
    for expected, got in zip(found["fused"], mixed, strict=True):
        values = [
            torch.frombuffer(bytearray(found[found.index(b")") + 1 :]), dtype=torch.float32)
            for found in (expected, got)
        ]
        torch.testing.assert_close(*values, rtol=1e-4, atol=1e-5)


def test_plans_choose_where_it_pays(tmp_path: Path) -> None:
    """Whatever is fastest here, a plan that was made while training is carried out inside the budget."""
    program = training(convolutions, drawn(16, 3, 64, 64), steps=8)
    _, (_, _, wide) = recorded(program, tmp_path)
    budget = (wide.minimum_bytes + wide.peak_bytes) // 2
    _, (trace, plan, report) = recorded(program, tmp_path, str(budget), variants=True)
    assert penstock.check(trace, plan, replace(HARDWARE, device_bytes=budget)) == []
    assert report.peak_bytes <= budget and report.loaded_bytes + report.recomputed_bytes > 0
    assert sum(report.variants.values()) == sum(variant >= 0 for variant in plan.variants)


@needs_onednn
def test_a_kernel_whose_workspace_does_not_fit_runs_otherwise(tmp_path: Path) -> None:
    """25 times the input is what PyTorch's own convolution unfolds it to; oneDNN's does with less."""
    program = training(lambda: torch.nn.Conv2d(16, 16, 5, padding=2), drawn(1, 16, 192, 192), steps=4)
    by_hand = run_in_memory(program)
    with without_onednn():
        with pytest.raises(penstock.BudgetTooSmall):
            recorded(program, tmp_path, "24MiB")
        found, (_, _, report) = recorded(program, tmp_path, "24MiB", variants=True)
    assert differences(by_hand, found) == []
    assert report.variants == {"with oneDNN": 2} and report.peak_bytes <= 24 << 20


@needs_onednn
def test_an_accelerator_measures_and_runs_them(tmp_path: Path) -> None:
    x, weight = drawn(2, 8, 24, 24), drawn(8, 8, 3, 3).requires_grad_()

    def convolve() -> list[torch.Tensor]:
        weight.grad = None
        output = F.conv2d(x, weight)
        output.square().mean().backward()
        return [output.detach().clone(), weight.grad.clone()]

    with without_onednn():
        by_hand = convolve()
    with (
        SpillSpace(
            tmp_path, penstock.IoOptions(paths=["posix buffered"], page_cache_budget=64 << 20)
        ) as spill,
        checked_run(spill, 1 << 20, variants=True) as run,
    ):
        known: list[Schedule] = []
        for name in ("none of them", "without oneDNN", ""):
            recording = Recording() if name else None
            run.engine.begin_step()
            run.device.begin_step()
            run.clock.begin_step(known, recording)
            found = convolve()
            run.clock.end_step()
            if recording is not None:
                trace = make_trace(recording.kernels, recording.tensors, measured=True)
                assert sum(map(bool, trace.kernel_variants)) == 2
                known = [schedule(trace, forced(trace, "without oneDNN"))]
        assert run.clock.followed is known[0] and run.clock.variants.counts == {"without oneDNN": 2}
        assert all(map(torch.equal, by_hand, found))


def test_variants_that_nobody_knows_are_refused(tmp_path: Path) -> None:
    program = training(Attention, drawn(2, 48, 32), steps=2)
    _, (trace, _, _) = recorded(program, tmp_path, variants=True)
    renamed = replace(
        trace,
        kernel_variants=tuple(
            tuple(variant._replace(name="winograd") for variant in variants)
            for variants in trace.kernel_variants
        ),
    )
    with pytest.raises(penstock.InvalidArgument, match="runs kernels as winograd, which no run can choose"):
        recorded(program, tmp_path, plan=forced(renamed, "winograd"))


def test_what_has_no_equal_is_left_alone(tmp_path: Path) -> None:
    """Dropout draws random numbers, and masks may hide whole rows: neither has an equal alternative."""

    class Dropped(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = self.project(x).unflatten(-1, (3, 4, 8)).movedim(-3, 0).transpose(-3, -2)
            mask = torch.zeros(x.shape[1], x.shape[1])
            return F.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2).flatten(2)

    _, (trace, _, _) = recorded(training(Dropped, drawn(2, 48, 32), steps=2), tmp_path, variants=True)
    assert not any(trace.kernel_variants)


def test_the_command_line_asks_for_variants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(
        "import torch\n"
        "def build():\n"
        "    model = torch.nn.MultiheadAttention(32, 4, batch_first=True)\n"
        "    def loss(model, x): return model(x, x, x, need_weights=False)[0].square().mean()\n"
        "    return model, torch.optim.SGD(model.parameters(), lr=0.1), [torch.randn(2, 48, 32)] * 4, loss\n"
    )
    HARDWARE.save(tmp_path / "given.json")
    arguments = ["run", "model.py:build", "--hardware", "given.json", "--device-budget", "64MiB"]
    assert cli.main([*arguments, "--spill-dir", ".", "--variants"]) == 0
    trace = "penstock-run/trace.json.gz"
    assert penstock.Trace.load(trace).kernel_variants
    assert cli.main(["plan", trace, *arguments[2:], "--policy", "modnn"]) == 0
    assert cli.main([*arguments, "--spill-dir", ".", "--plan", "plan.json", "-o", "planned"]) == 0
    chosen = sum(variant >= 0 for variant in penstock.Plan.load("plan.json").variants)
    assert sum(Record.load("planned").report.variants.values()) == chosen
    assert cli.main([*arguments, "--spill-dir", ".", "-o", "plain"]) == 0
    assert not penstock.Trace.load(tmp_path / "plain" / "trace.json.gz").kernel_variants
    capsys.readouterr()
