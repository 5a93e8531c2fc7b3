"""Run on each rank: trains on several ranks with and without penstock, and compares the bits."""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import penstock
from penstock.distributed import HostAccumulation, host_accumulation_hook
from tests.support import accelerator
from tests.support.ranks import leave
from tests.support.runs import ACCELERATED, HARDWARE
from tests.support.staged_group import StagedGroup

BATCH, CLASSES = 32, 10
SMALLEST_BYTES = 4096
TIMEOUT = timedelta(minutes=2)
SPARE_BYTES = 8 << 20  # beside the least that a plan can keep, for an accelerator's allocator


def network(width: int, depth: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


def distributed(model: nn.Sequential, how: str, precision: str, device: str) -> nn.Module:
    if how.startswith("ddp"):
        wrapped = DistributedDataParallel(
            model,
            process_group=StagedGroup(dist.group.WORLD) if device == "emu" else None,
            bucket_cap_mb=0.1,
            gradient_as_bucket_view="views" in how,
        )
        if "host" in how:
            state = HostAccumulation(device=f"{device}:0" if device != "cpu" else "cpu", timeout=TIMEOUT)
            wrapped.register_comm_hook(state, host_accumulation_hook)
        return wrapped
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16) if precision == "bf16" else MixedPrecisionPolicy()
    )
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def train(arguments: argparse.Namespace, budget: int | str | None) -> tuple[str, dict[str, Any]]:
    """A digest of everything that training made, and what the run reports."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    run = None
    device = arguments.device
    model = network(arguments.width, arguments.depth).to(device)
    model = distributed(model, arguments.how, arguments.precision, device)
    if budget is not None:
        gc.collect()  # what is left of others would be beside the budget
        run = penstock.offload(
            model,
            device_budget=budget,
            spill_dir=arguments.spill,
            hardware=HARDWARE if device == "cpu" else ACCELERATED,
            **({} if device == "cpu" else {"device": device, "host_budget": arguments.host}),
            planning=penstock.PlanOptions(smallest_bytes=SMALLEST_BYTES, policy=arguments.policy),
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = hashlib.sha256()
    cast = torch.autocast(device, torch.bfloat16, enabled=arguments.precision == "autocast")
    for step in range(arguments.steps):
        with run.step() if run else contextlib.nullcontext():
            for part in range(arguments.parts):
                seed = (step * arguments.parts + part) * 100 + rank
                seeded = torch.Generator().manual_seed(seed)
                x = torch.randn(BATCH, arguments.width, generator=seeded).to(device)
                y = torch.randint(CLASSES, (BATCH,), generator=seeded).to(device)
                is_last = part == arguments.parts - 1
                waits = arguments.how.startswith("ddp") and not is_last
                with model.no_sync() if waits else contextlib.nullcontext():
                    if not arguments.how.startswith("ddp"):
                        model.set_requires_gradient_sync(is_last)
                    with cast:
                        loss = F.cross_entropy(model(x).float(), y) / arguments.parts
                    loss.backward()
                    found.update(loss.detach().cpu().numpy().tobytes())
            if arguments.clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    for tensor in (*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        found.update(local.detach().cpu().numpy().tobytes())
    said: dict[str, Any] = {}
    if run is not None:
        report = run.report()
        said = {
            "peak": report.peak_bytes,
            "minimum": report.minimum_bytes,
            "evicted": report.evicted_bytes,
            "step_s": report.step_s,
            "predicted_s": report.predicted_step_s,
            "mismatches": report.trace_mismatches,
            "processes": report.processes,
            "plan": hashlib.sha256(repr(run.plan and run.plan.evictions).encode()).hexdigest(),
            "collectives": [name for name in run.trace.kernel_name if "::" in name] if run.trace else [],
            "all": run.trace.peak_bytes if run.trace is not None else 0,
        }
        run.close()
    return found.hexdigest(), said


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("how", choices=["ddp", "ddp_views", "ddp_host", "ddp_host_views", "fsdp"])
    parser.add_argument("--spill", required=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--clip", action="store_true")
    parser.add_argument("--precision", default="full", choices=["full", "bf16", "autocast"])
    parser.add_argument("--policy", default="optimal")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--device", default="cpu", choices=["cpu", "emu"])
    parser.add_argument("--host", help="bytes of the host tier of a device")
    parser.add_argument("--order", help="in which the emulated device carries out work")
    parser.add_argument("--then", nargs=argparse.REMAINDER, help="another program, as the first")
    dist.init_process_group("gloo")
    left = sys.argv[1:]
    while left:
        arguments = parser.parse_args(left)
        if arguments.device != "cpu":
            accelerator.load(arguments.device).configure(order=arguments.order, seed=dist.get_rank())
        compare(arguments)
        left = arguments.then
    leave()


def compare(arguments: argparse.Namespace) -> None:
    """Train in less and less memory, and print what each rank found."""
    wanted, _ = train(arguments, None)
    if "host" in arguments.how:
        plain = argparse.Namespace(**{**vars(arguments), "how": arguments.how.replace("_host", "")})
        plainly, _ = train(plain, None)
        if dist.get_rank() == 0:
            print("as plain", plainly == wanted, flush=True)
    found, roomy = train(arguments, "1GiB")
    rows = [{"budget": "1GiB", "same": found == wanted, **roomy}]
    numbers = torch.tensor([roomy["all"], roomy["minimum"]])
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    most, least = numbers.tolist()
    if arguments.device != "cpu":
        least += SPARE_BYTES
    for budget in (max(most // 2, least), least):
        found, said = train(arguments, budget)
        rows.append({"budget": budget, "same": found == wanted, **said})
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, rows)
    if dist.get_rank() == 0:
        print("rows", json.dumps(every), flush=True)


if __name__ == "__main__":
    main()
