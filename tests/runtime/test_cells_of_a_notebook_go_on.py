"""In a notebook cells are run twice, interrupted and fail; what failed is kept, and the next cell goes on."""

from __future__ import annotations

import code
import sys
from pathlib import Path

import pytest

import penstock

SETUP = """
import signal
import torch
from torch import nn
import penstock

torch.manual_seed(0)
inputs = torch.randn(256, 256)

def build():
    torch.manual_seed(1)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(4)])
    return model, torch.optim.AdamW(model.parameters())

def step(between=lambda: None):
    loss = model(inputs).square().mean()
    loss.backward()
    between()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
"""
OPEN = """
penstock.close()
g10 = penstock.PlanOptions(policy="g10")
run = penstock.offload(device_budget=BUDGET, spill_dir=folder, hardware=hardware, planning=g10)
model, optimizer = build()
losses = []
"""
TRAIN = """
for _ in range(3):
    with run.step():
        step()
"""
INTERRUPTED = """
with run.step():
    step(lambda: signal.raise_signal(signal.SIGINT))
"""
FAILING = """
with run.step():
    step(lambda: 1 / 0)
"""
BUDGET = 2 << 20


class Notebook(code.InteractiveInterpreter):
    """Names that all cells share; as in a shell, `sys.last_value` keeps the frames of what failed."""

    said = ""

    def write(self, data: str) -> None:
        self.said += data

    def cell(self, source: str) -> str:
        """Run a cell. Gives the last line of its error, "" where there is none."""
        self.said = ""
        assert not self.runsource(source, symbol="exec"), "the cell is not complete"
        return self.said.strip().rpartition("\n")[2]


@pytest.mark.usefixtures("interruptible")
def test_cells(tmp_path: Path, hardware: penstock.Hardware, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        monkeypatch.setattr(sys, name, None, raising=False)  # let go of after the test
    # Once a process group was made, torch prints errors by itself.
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    memory = Notebook({})
    for cell in (SETUP, "model, optimizer = build(); losses = []; [step() for _ in range(9)]"):
        assert memory.cell(cell) == ""

    notebook = Notebook({"folder": tmp_path, "hardware": hardware, "BUDGET": BUDGET})
    assert notebook.cell(SETUP) == ""
    for lose_the_name in ("", "del run", "run = None"):
        assert notebook.cell(lose_the_name) == ""
        assert notebook.cell(OPEN) == ""
        assert notebook.cell(TRAIN) == ""
        assert notebook.cell(INTERRUPTED) == "KeyboardInterrupt"
        assert notebook.cell("optimizer.zero_grad()") == ""
        assert notebook.cell(TRAIN) == ""
        assert notebook.cell(FAILING) == "ZeroDivisionError: division by zero"
        assert notebook.cell("optimizer.zero_grad()") == ""
        assert notebook.cell(TRAIN) == ""
        assert notebook.locals["losses"] == memory.locals["losses"]
        report = notebook.locals["run"].report()
        assert report.evicted_bytes > 0 and report.peak_bytes <= BUDGET
        refused = notebook.cell(OPEN.replace("penstock.close()", ""))
        assert "another run is open" in refused and "penstock.close()" in refused
    notebook.cell("penstock.close()")
    notebook.cell("with run.step(): pass")
    assert "this run is closed" in notebook.said
