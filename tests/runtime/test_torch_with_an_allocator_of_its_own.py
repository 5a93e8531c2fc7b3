"""Where torch has an allocator of its own, as for ARM, its memory comes from the arena all the same."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
    import json
    import penstock
    import torch
    from penstock import _native
    from penstock.runtime import arena
    from torch import nn

    installed = _native.arena_install("/libc10.so", through_torch=True)  # the first counts
    MIB = 1 << 20

    def train(run=None):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)))
        for seed in range(3):
            batch = torch.randn(64, 256, generator=torch.Generator().manual_seed(seed))
            with run.step() if run else torch.enable_grad():
                model(batch).square().mean().backward()
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter -= parameter.grad
                        parameter.grad = None
        return [parameter.detach().clone() for parameter in model.parameters()]

    expected = train()
    before = arena.unavailable()
    with penstock.offload(device_budget="3MiB", planning=penstock.PlanOptions(policy="evict_all")) as run:
        found = train(run)
        equal = all(torch.equal(*pair) for pair in zip(expected, found, strict=True))
        try:
            torch.ones(5 * MIB // 4)
            refused = ""
        except penstock.errors.BudgetTooSmall as error:
            refused = str(error)
    held = arena.stats().in_use_bytes
    tensor = torch.ones(MIB)
    del found, tensor
    print(json.dumps({
        "installed": installed, "unavailable": before, "equal": equal, "refused": refused,
        "peak_bytes": run.report().peak_bytes, "left_bytes": arena.stats().in_use_bytes, "held_bytes": held,
    }))
"""


@pytest.mark.slow
def test_a_budget_holds_and_every_bit_is_kept() -> None:
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["installed"] and found["unavailable"] is None and found["equal"]
    assert 0 < found["peak_bytes"] <= 3 << 20
    assert "5.00 MiB" in found["refused"]
    assert found["left_bytes"] < found["held_bytes"]
