"""Penstock on a GPU against what else there is, in one table. No GPU has run this yet.

    python benchmarks/gpu.py --size small -o out/gpu-small.json
    python benchmarks/gpu.py --table out          # joins the parts to out/gpu.json, and prints the table

Every method trains the same transformer with AdamW on the same batches, in a process of its own: so each
begins with an empty device, and one that fails ends alone. What is not installed is skipped, and the table
says why. Times are medians of the steps after the first ones; memory is the peak of
reserved bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 55

# Width, layers, batch and length. small: all fits an 8 GiB device. large: weights and Adam state take 20 GB.
SIZES = {"small": (1024, 12, 8, 512), "large": (2560, 16, 4, 512)}
BUDGET_SHARES = {"small": (0.65, 0.35, 0.2), "large": (0.35, 0.2)}
STEPS, WARM = 10, 4


def model_of(size: str) -> tuple[Any, Callable[[int], Any]]:
    """The model, and its batch of each step."""
    import torch
    from torch import nn

    width, layers, batch, length = SIZES[size]
    block = nn.TransformerEncoderLayer(
        width, width // 64, 4 * width, dropout=0.0, batch_first=True, norm_first=True
    )
    model = nn.Sequential(
        nn.Embedding(8192, width),
        nn.TransformerEncoder(block, layers, enable_nested_tensor=False),
        nn.Linear(width, 8192),
    )

    def words(step: int) -> Any:
        seeded = torch.Generator().manual_seed(step)
        return torch.randint(0, 8192, (batch, length), generator=seeded).cuda()

    return model, words


def loss_of(model: Any, words: Any) -> Any:
    import torch.nn.functional as F

    return F.cross_entropy(model(words).flatten(0, 1), words.roll(-1, 1).flatten())


def plain_steps(size: str, wrap: Callable[[], Any] = contextlib.nullcontext) -> Iterator[float]:
    import torch

    torch.manual_seed(0)
    with torch.device("cuda"):
        model, words = model_of(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(STEPS):
        with wrap():
            loss = loss_of(model, words(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def save_on_cpu(size: str, budget: int) -> Iterator[float]:
    import torch

    return plain_steps(size, lambda: torch.autograd.graph.save_on_cpu(pin_memory=True))


def penstock_offload(size: str, budget: int) -> Iterator[float]:
    import torch

    import penstock

    torch.manual_seed(0)
    with penstock.offload(
        device="cuda", device_budget=budget, spill_dir=tempfile.gettempdir(), host_budget=32 << 30
    ) as run:
        with torch.device("cuda"):
            model, words = model_of(size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        for step in range(STEPS):
            with run.step():
                loss = loss_of(model, words(step))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                value = loss.item()
            yield value


def transformers_offload(size: str, budget: int) -> Iterator[float]:
    """Checkpointed blocks whose inputs go to the host, as transformers' Trainer does with
    gradient_checkpointing_kwargs={"offload": True}."""
    import torch
    import transformers

    width, layers, batch, length = SIZES[size]
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=8192, n_embd=width, n_layer=layers, n_head=width // 64, n_positions=length
    )
    with torch.device("cuda"):
        model = transformers.GPT2LMHeadModel(config)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"offload": True})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(STEPS):
        seeded = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 8192, (batch, length), generator=seeded).cuda()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def torchao_offload(size: str, budget: int) -> Iterator[float]:
    import torch
    from torchao.optim import CPUOffloadOptimizer

    torch.manual_seed(0)
    with torch.device("cuda"):
        model, words = model_of(size)
    optimizer = CPUOffloadOptimizer(
        model.parameters(), torch.optim.AdamW, offload_gradients=True, fused=True, lr=1e-4
    )
    for step in range(STEPS):
        loss = loss_of(model, words(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def fsdp2_offload(size: str, budget: int) -> Iterator[float]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    one_process()
    torch.manual_seed(0)
    model, words = model_of(size)
    mesh, policy = init_device_mesh("cuda", (1,)), CPUOffloadPolicy()
    for layer in model[1].layers:
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(STEPS):
        loss = loss_of(model, words(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def deepspeed_steps(size: str, stage: int, offload: dict[str, Any]) -> Iterator[float]:
    import deepspeed
    import torch

    one_process()
    torch.manual_seed(0)
    model, words = model_of(size)
    config = {
        "train_micro_batch_size_per_gpu": SIZES[size][2],
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage, **offload},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for step in range(STEPS):
        loss = loss_of(engine, words(step))
        engine.backward(loss)
        engine.step()
        yield loss.item()


def zero_offload(size: str, budget: int) -> Iterator[float]:
    return deepspeed_steps(size, 2, {"offload_optimizer": {"device": "cpu", "pin_memory": True}})


def zero_infinity(size: str, budget: int) -> Iterator[float]:
    disk = {"device": "nvme", "nvme_path": tempfile.gettempdir(), "pin_memory": True}
    return deepspeed_steps(size, 3, {"offload_optimizer": disk, "offload_param": disk})


def one_process() -> None:
    import os

    import torch

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    torch.distributed.init_process_group("nccl")


METHODS: dict[str, Callable[[str, int], Iterator[float]]] = {
    "in memory": lambda size, budget: plain_steps(size),
    "penstock": penstock_offload,
    "save_on_cpu": save_on_cpu,
    "transformers offload (GPT-2)": transformers_offload,
    "torchao CPU offload": torchao_offload,
    "FSDP2 CPU offload": fsdp2_offload,
    "ZeRO-Offload": zero_offload,
    "ZeRO-Infinity": zero_infinity,
}


def measure(method: str, size: str, budget: int) -> dict[str, Any]:
    """In this process."""
    import torch

    if not torch.cuda.is_available():
        return {"skipped": "no CUDA device"}
    try:
        steps = METHODS[method](size, budget)
        times, losses = [], []
        while True:
            begun_s = time.perf_counter()
            loss = next(steps, None)
            torch.cuda.synchronize()
            if loss is None:
                break
            times.append(time.perf_counter() - begun_s)
            losses.append(float(loss).hex())
            if len(losses) == WARM:
                torch.cuda.reset_peak_memory_stats()
    except ImportError as error:
        return {"skipped": f"not installed: {error}"}
    except (torch.OutOfMemoryError, RuntimeError, TypeError, ValueError) as error:
        return {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
    return {
        "step_s": times[WARM:],
        "median_s": statistics.median(times[WARM:]),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "losses": losses,
    }


def in_its_own_process(method: str, size: str, budget: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", method, "--size", size, "--budget", str(budget)]
    try:
        ran = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=ROOT
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"took more than {TIMEOUT_S} s"}
    for line in reversed(ran.stdout.splitlines()):
        if line.startswith("{"):
            return dict(json.loads(line))
    return {"failed": ran.stderr.strip()[-300:] or f"exit status {ran.returncode}"}


def run(size: str) -> dict[str, Any]:
    rows = []
    base = in_its_own_process("in memory", size, 0)
    rows.append({"method": "in memory", **base})
    peak = base.get("peak_reserved_bytes", 16 << 30)
    for share in BUDGET_SHARES[size]:
        budget = int(share * peak)
        row = in_its_own_process("penstock", size, budget)
        row["same_bits"] = row.get("losses") == base.get("losses") if "losses" in row else None
        rows.append({"method": f"penstock, {share:.0%}", "budget_bytes": budget, **row})
    for method in METHODS:
        if method not in ("in memory", "penstock"):
            rows.append({"method": method, **in_its_own_process(method, size, 0)})
    return {"size": size, "rows": rows}


def machine() -> dict[str, Any]:
    import torch

    versions = {}
    for name in ("torch", "penstock", "transformers", "torchao", "deepspeed"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device",
        "versions": versions,
        "python": sys.version.split()[0],
        "commit": commit.stdout.strip(),
        "date": datetime.date.today().isoformat(),
        "command": sys.argv,
    }


def table(directory: Path) -> None:
    parts = [json.loads(path.read_text()) for path in sorted(directory.glob("gpu-*.json"))]
    (directory / "gpu.json").write_text(json.dumps({"machine": machine(), "parts": parts}, indent=1))
    print(f"{'size':6} {'method':30} {'step':>9} {'reserved':>10}  remarks")
    for part in parts:
        for row in part["rows"]:
            step = f"{row['median_s'] * 1e3:.0f} ms" if "median_s" in row else "-"
            memory = f"{row['peak_reserved_bytes'] / 2**30:.2f} GiB" if "median_s" in row else "-"
            remarks = row.get("skipped") or row.get("failed") or ""
            if row.get("same_bits") is not None:
                remarks = "same bits" if row["same_bits"] else "OTHER BITS"
            print(f"{part['size']:6} {row['method']:30} {step:>9} {memory:>10}  {remarks}")
    print(f"written: {directory / 'gpu.json'}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--table", type=Path, metavar="DIRECTORY")
    parser.add_argument("--one", choices=METHODS, help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.size, options.budget)))
    elif options.table:
        table(options.table)
    else:
        output = options.output or ROOT / "out" / f"gpu-{options.size}.json"
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(run(options.size), indent=1))
        print(f"written: {output}")


if __name__ == "__main__":
    main()
