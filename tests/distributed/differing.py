"""Run on each rank: trains where ranks' steps differ; prints what each has planned, and what it logged."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import penstock
from tests.support.ranks import leave
from tests.support.runs import HARDWARE, PAGED

STEPS = 8
ODD = 1  # the rank whose steps differ
# By how training goes: steps of the odd rank that leave out a layer.
SKIPPED = {"first": [0], "later": [4, 5, 6], "roomy": [4, 5, 6], "alone": []}


class Layers(nn.Module):
    """Of which the first can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(128, 128)
        self.rest = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.Tanh())])

    def forward(self, x: torch.Tensor, skips: bool) -> torch.Tensor:
        result: torch.Tensor = self.rest(x if skips else self.first(x))
        return result


def train(how: str, spill_dir: str) -> dict[str, Any]:
    """
    how   one rank leaves out a layer in the "first" step, or in "later" ones, also where the others have a
          "roomy" budget; or it evaluates "alone", in steps of its own
    """
    logged: list[tuple[str, str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append((record.levelname, record.getMessage()))  # type: ignore[method-assign]
    logger = logging.getLogger("penstock")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    torch.manual_seed(0)
    layers = Layers()
    model = DistributedDataParallel(layers, find_unused_parameters=True)
    is_odd = dist.get_rank() == ODD
    budget = "64MiB" if how == "roomy" and not is_odd else "1MiB"
    run = penstock.offload(
        model, device_budget=budget, spill_dir=spill_dir, hardware=HARDWARE, planning=PAGED
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plans = []
    for step in range(STEPS):
        skips = is_odd and step in SKIPPED[how]
        with run.step():
            model(torch.randn(64, 128), skips).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        plan = run.plan
        plans.append(
            hashlib.sha256(repr(plan and (plan.evictions, plan.recomputations)).encode()).hexdigest()
        )
        if how == "alone" and is_odd and step < 4:
            with run.step(), torch.no_grad():
                layers(torch.randn(64, 128), False)
    run.close()
    logger.removeHandler(handler)
    return {"plans": plans, "logged": logged}


def main(spill_dir: str, *hows: str) -> None:
    dist.init_process_group("gloo")
    for how in hows:
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, train(how, spill_dir))
        if dist.get_rank() == 0:
            print("ranks", json.dumps(every), flush=True)
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
