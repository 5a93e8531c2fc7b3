"""The largest batch that runs, the largest that is not slowed down, and the fastest, without running any."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import penstock
from penstock import cli
from penstock.core.check import check
from penstock.core.hardware import Hardware
from penstock.core.memory_profile import minimum_bytes
from penstock.core.plan import Plan
from penstock.core.trace import Trace
from penstock.planners import Problem, solve
from penstock.planners.batch_sizes import BatchSizes, choose_batch_size
from tests.support.traces import Step, machine


def layers_of(samples: int, layers: int = 5, sample_bytes: int = 10, weight_bytes: int = 100) -> Trace:
    """Forward keeps an activation a layer for backward; time and activations grow with the batch."""
    step = Step()
    weights = [step.tensor(weight_bytes, kind="weight", persistent=True) for _ in range(layers)]
    saved = [step.tensor(sample_bytes * samples) for _ in range(layers)]
    for layer, weight in enumerate(weights):
        step.kernel(
            f"forward{layer}",
            0.01 * samples,
            inputs=[weight, *saved[layer - 1 : layer]],
            outputs=[saved[layer]],
        )
    for layer in reversed(range(layers)):
        step.kernel(
            f"backward{layer}", 0.02 * samples, inputs=[weights[layer], saved[layer]], phase="backward"
        )
    return step.trace()


def choose(
    trace_of: Callable[[int], Trace],
    hardware: Hardware,
    budget_bytes: int,
    policy: str = "optimal",
    *,
    least: int = 1,
    most: int = 1 << 20,
    slowdown: float = 0.05,
    recompute: bool = True,
) -> BatchSizes:
    def plan_of(trace: Trace) -> Plan:
        return solve(Problem(trace, hardware, budget_bytes, recompute, time_limit_s=2.0), policy)

    return choose_batch_size(trace_of, plan_of, budget_bytes, least=least, most=most, slowdown=slowdown)


@given(
    sample_bytes=st.integers(1, 300),
    weight_bytes=st.integers(0, 3000),
    room=st.integers(0, 20_000),
    layers=st.integers(1, 4),
)
@settings(max_examples=40, deadline=None)
def test_one_sample_more_does_not_run(sample_bytes: int, weight_bytes: int, room: int, layers: int) -> None:
    def trace_of(samples: int) -> Trace:
        return layers_of(samples, layers, sample_bytes, weight_bytes)

    budget = minimum_bytes(trace_of(1)) + room
    found = choose(trace_of, machine(), budget, "evict_all", most=10_000)
    size = found.largest
    assert size.plan is not None
    assert check(trace_of(size.samples), size.plan, machine()) == []
    assert size.minimum_bytes == minimum_bytes(trace_of(size.samples)) <= budget
    assert size.samples == 10_000 or minimum_bytes(trace_of(size.samples + 1)) > budget
    if found.in_memory is not None:
        assert trace_of(found.in_memory.samples).peak_bytes <= budget
        assert found.in_memory is size or trace_of(found.in_memory.samples + 1).peak_bytes > budget
    assert found.fastest.sample_s == min(one.sample_s for one in found.tried if one.plan)


def test_a_slow_disk_slows_down_what_does_not_fit_in_memory() -> None:
    fast, slow = (
        machine(),
        machine(disk_bytes_per_s=100.0),
    )
    on_fast = choose(layers_of, fast, 1000, recompute=False)
    assert on_fast.unslowed is on_fast.largest
    on_slow = choose(layers_of, slow, 1000, recompute=False)
    assert on_slow.largest.samples == on_fast.largest.samples
    assert on_slow.in_memory is not None and on_slow.unslowed is not None
    assert on_slow.in_memory.samples <= on_slow.unslowed.samples < on_slow.largest.samples
    assert on_slow.unslowed.slowdown <= 1.05
    slower = [size for size in on_slow.tried if size.slowdown > 1.05]
    assert slower and min(size.samples for size in slower) <= max(
        1.05 * on_slow.unslowed.samples, on_slow.unslowed.samples + 1
    )


def test_what_the_disk_cannot_hold_does_not_run() -> None:
    small = machine(disk_bytes=300)
    found = choose(layers_of, small, 1000, "evict_all")
    assert found.largest.plan is not None
    assert check(layers_of(found.largest.samples), found.largest.plan, small) == []
    roomy = choose(layers_of, machine(), 1000, "evict_all")
    assert found.largest.samples < roomy.largest.samples
    assert any(size.reason for size in found.tried)


def test_one_sample_that_does_not_fit_says_what_it_needs() -> None:
    with pytest.raises(
        penstock.BudgetTooSmall, match=r"`forward1` alone needs .*\(weight 100 B, activation 20 B\)"
    ):
        choose(layers_of, machine(), 109)


def test_a_step_that_ignores_its_batch_is_refused() -> None:
    with pytest.raises(penstock.InvalidArgument, match="the same memory and time"):
        choose(lambda _: layers_of(4), machine(), 10_000)


@pytest.mark.parametrize(("least", "most", "slowdown"), [(0, 4, 0.1), (5, 4, 0.1), (1, 4, -0.1)])
def test_limits_that_make_no_sense_are_refused(least: int, most: int, slowdown: float) -> None:
    with pytest.raises(penstock.InvalidArgument, match="give"):
        choose(layers_of, machine(), 1000, least=least, most=most, slowdown=slowdown)


# -- of steps in PyTorch ---------------------------------------------------------------------------


def make_step(samples: int) -> Callable[[], None]:
    model = nn.Sequential(
        *[part for _ in range(2) for part in (nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GELU())]
    )
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(samples, 64)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def test_a_step_is_made_for_each_size_and_not_run(hardware: penstock.Hardware) -> None:
    found = penstock.best_batch(make_step, hardware, device_budget="1MiB", least=2, time_limit_s=0.2)
    assert found.in_memory is not None
    assert 2 < found.in_memory.samples < found.largest.samples
    trace = found.largest.plan.trace if found.largest.plan else None
    assert trace is not None and not trace.measured
    with pytest.raises(penstock.InvalidArgument, match=r"batch of 1 cannot be traced.*`least`"):
        penstock.best_batch(make_step, hardware, device_budget="1MiB")
    with pytest.raises(penstock.InvalidArgument, match="give a function"):
        penstock.best_batch(3, hardware)  # type: ignore[arg-type]


SCRIPT = """
import torch

def build():
    layers = [part for _ in range(3) for part in (torch.nn.Linear(64, 64), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers)
    batches = [{"x": torch.randn(8, 64), "names": list("abcdefgh"), "classes": ["one", "two"]}]
    return model, torch.optim.AdamW(model.parameters()), batches, loss

def loss(model, batch):
    assert len(batch["names"]) == len(batch["x"]) and batch["classes"] == ["one", "two"]
    return model(batch["x"]).square().mean()
"""


def test_the_command_confirms_what_it_names(
    tmp_path: Path,
    hardware: penstock.Hardware,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(SCRIPT)
    hardware.save(tmp_path / "given.json")
    command = [
        "batch",
        "model.py:build",
        "--hardware",
        "given.json",
        "--device-budget",
        "1MiB",
        "--time-limit",
        "0.2",
    ]
    assert cli.main([*command, "--run", "--spill-dir", str(tmp_path), "--json", "-o", "found"]) == 0
    found = json.loads(capsys.readouterr().out)
    measured = {size["samples"]: size for size in found["tried"] if "measured_step_s" in size}
    named = {found[name] for name in ("largest", "unslowed", "in_memory", "fastest") if name in found}
    assert measured.keys() == named
    assert all(0 < size["measured_peak_bytes"] <= 1 << 20 for size in measured.values())
    for name in found.keys() - {"tried", "written"}:
        assert penstock.Plan.load(tmp_path / "found" / f"{name}.json").device_budget_bytes == 1 << 20
    assert cli.main(command) == 0
    assert f"{found['largest']}: the largest that runs" in capsys.readouterr().out
    assert cli.main([*command, "--run", "--device", "h100"]) == 1
    assert "leave it out with --run" in capsys.readouterr().err
    assert cli.main([*command[:5], "10KiB", "-o", "none"]) == 3
    assert "alone needs" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
