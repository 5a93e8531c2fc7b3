"""A GPT large enough that its activations matter, trained in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.support import apart
from tests.support.apart import ROOT

SCRIPT = """
import contextlib, json, resource, sys
options = json.loads(sys.argv[1])
import torch, torch._dynamo, penstock
import torch.nn.functional as F
from tests.support.families import _Gpt

def status(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024

if limit := options.get("growth_limit"):  # more than this of writable private memory is refused
    bound = status("VmData") + limit
    resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))
before = status("VmRSS")
torch.manual_seed(0)
model = _Gpt(width=256, blocks=6, heads=4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
hardware = penstock.Hardware(
    device_bytes=1 << 40, disk_bytes=8 << 30, disk_shares_bus=False,
    disk_read_bytes_per_s=2e9, disk_write_bytes_per_s=2e9,
)
run = None
if "budget" in options:
    run = penstock.offload(
        model, optimizer, device_budget=options["budget"], spill_dir=options["spill_dir"], hardware=hardware
    )
losses = []
for step in range(options.get("steps", 5)):
    print("step", step, file=sys.stderr, flush=True)
    with run.step() if run else contextlib.nullcontext():
        seeded = torch.Generator().manual_seed(step)
        words = torch.randint(0, 64, (options.get("batch", 4), 256), generator=seeded)
        loss = F.cross_entropy(model(words).flatten(0, 1), words.roll(-1, 1).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
report = run.report() if run else None
print(json.dumps({
    "growth_bytes": status("VmHWM") - before,
    "losses": losses,
    "report": {name: getattr(report, name) for name in (
        "minimum_bytes", "peak_bytes", "predicted_peak_bytes", "evicted_bytes", "step_s", "predicted_step_s",
        "peak_resident_bytes")} if report else None,
}))
"""


def start(**options: Any) -> apart.Running:
    """Begin to train. Steps are announced on stderr, the outcome is printed on stdout."""
    return apart.Running(apart.Program(SCRIPT, (json.dumps(options),)))


def outcome(**options: Any) -> dict[str, Any]:
    """Train to the end, in a process that is started anew: one that is forked meets the pages of torch's
    libraries as it runs, and they would count."""
    command = [sys.executable, "-c", SCRIPT, json.dumps(options)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    return dict(json.loads(ended.stdout))
