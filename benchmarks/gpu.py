"""Penstock on a GPU against what else there is, in one table.

    python benchmarks/gpu.py --size small --methods penstock -o out/gpu-small-penstock.json
    python benchmarks/gpu.py --size small --methods others -o out/gpu-small-others.json
    python benchmarks/gpu.py --table out          # joins the parts to out/gpu.json, and prints the table

Every method trains the same transformer with AdamW on the same batches, in a process of its own: so each
begins with an empty device, and one that fails ends alone. What is not installed is skipped, and the table
says why. All use kernels that give the same bits each time. Times are medians of the steps after the first
ones; memory is the peak of reserved bytes in these steps, and the peak that nvidia-smi saw from beginning to
end, which has what CUDA itself takes, too. A part ends within ten minutes: what is left then is not measured.

With PENSTOCK_TEST_DEVICE=emu and --size tiny all runs on the emulated accelerator of the tests, in place of
nvidia-smi a shell counts, and the figures mean nothing: `make gpu-rehearsal`.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.support import accelerator  # noqa: E402

DEVICE = accelerator.wanted("cuda")
NOT_REHEARSED = accelerator.NOT_REHEARSED
TIMEOUT_S = 150  # with the import of torch, page-locking and plans
PART_S = 560  # for all methods of a part

# Width, layers, batch and length. small: all fits an 8 GiB device. large: weights and Adam state take 20 GB.
SIZES = {"tiny": (256, 4, 4, 64), "small": (1024, 12, 8, 512), "large": (2560, 16, 4, 512)}
# Of the peak in memory: what each run of penstock gets, by which policy, and the tiers below the device.
RUNS = [
    (0.65, "optimal", "host and disk"),
    (0.35, "optimal", "host and disk"),
    (0.25, "optimal", "host and disk"),
    (0.65, "flashneuron", "host and disk"),  # moves activations only
    (0.35, "g10", "host and disk"),
    (0.35, "optimal", "disk"),
    (0.65, "flashneuron", "disk"),
    (0.35, "g10", "disk"),
]
HOST_BYTES = {"small": 8 << 30, "large": 32 << 30}  # page-locked, of which a second takes 8 GB
DISK_HOST_BYTES = 512 << 20  # all of it is staging
STEPS, WARM = 24, 14  # the first are recorded, planned, and carried out by plans that are replaced
SMI = ["nvidia-smi", "-i", "0", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-lms", "100"]
if DEVICE != "cuda":
    SMI = ["sh", "-c", "while echo 1024; do sleep 0.1; done"]
    HOST_BYTES["tiny"], DISK_HOST_BYTES = 1 << 30, 64 << 20
    STEPS, WARM, TIMEOUT_S = 5, 3, 300
    RUNS = [RUNS[1], RUNS[6], RUNS[7]]


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
        return torch.randint(0, 8192, (batch, length), generator=seeded).to(DEVICE)

    return model, words


def loss_of(model: Any, words: Any) -> Any:
    import torch.nn.functional as F

    return F.cross_entropy(model(words).flatten(0, 1), words.roll(-1, 1).flatten())


def plain_steps(size: str, wrap: Callable[[], Any] = contextlib.nullcontext) -> Iterator[float]:
    import torch

    torch.manual_seed(0)
    with torch.device(DEVICE):
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


def penstock_offload(size: str, budget: int, policy: str, tiers: str) -> Iterator[float]:
    import torch

    import penstock

    torch.manual_seed(0)
    with penstock.offload(
        device=DEVICE,
        device_budget=budget,
        spill_dir=tempfile.gettempdir(),
        host_budget=DISK_HOST_BYTES if tiers == "disk" else HOST_BYTES[size],
        planning=penstock.PlanOptions(policy=policy),
    ) as run:
        with torch.device(DEVICE):
            model, words = model_of(size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        for step in range(STEPS):
            with run.step():
                loss = loss_of(model, words(step))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                value = loss.item()
            if step == STEPS - 1:
                report = run.report()
                SAID.update(policy=report.policy, evicted_bytes=report.evicted_bytes)
            yield value


def transformers_offload(size: str, budget: int) -> Iterator[float]:
    """Checkpointed blocks whose inputs go to the host, as newer versions of transformers have it."""
    import torch
    import transformers

    width, layers, batch, length = SIZES[size]
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=8192, n_embd=width, n_layer=layers, n_head=width // 64, n_positions=length
    )
    with torch.device(DEVICE):
        model = transformers.GPT2LMHeadModel(config)
    model.gradient_checkpointing_enable(offload=True)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(STEPS):
        seeded = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 8192, (batch, length), generator=seeded).to(DEVICE)
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def torchao_offload(size: str, budget: int) -> Iterator[float]:
    import torch
    from torchao.optim import CPUOffloadOptimizer

    torch.manual_seed(0)
    with torch.device(DEVICE):
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
    mesh, policy = init_device_mesh(DEVICE, (1,)), CPUOffloadPolicy()
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


# What a method says beside its losses.
SAID: dict[str, Any] = {}


class NotRehearsed(Exception):
    """What it says has no stand-in."""


def one_process() -> None:
    import torch

    if DEVICE != "cuda":
        raise NotRehearsed("NCCL, and with it FSDP2's and DeepSpeed's rows")

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    torch.distributed.init_process_group("nccl")


METHODS: dict[str, Callable[..., Iterator[float]]] = {
    "in memory": lambda size, budget: plain_steps(size),
    "penstock": penstock_offload,
    "save_on_cpu": save_on_cpu,
    "transformers offload (GPT-2)": transformers_offload,
    "torchao CPU offload": torchao_offload,
    "FSDP2 CPU offload": fsdp2_offload,
    "ZeRO-Offload": zero_offload,
    "ZeRO-Infinity": zero_infinity,
}


@contextlib.contextmanager
def watched() -> Iterator[list[int]]:
    """At its end the list holds what nvidia-smi saw in use, in MiB, ten times a second."""
    seen: list[int] = []
    try:
        smi = subprocess.Popen(SMI, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except FileNotFoundError:
        yield seen
        return
    try:
        yield seen
    finally:
        smi.terminate()
        seen += [int(line) for line in smi.communicate()[0].split() if line.isdigit()]


def measure(method: str, size: str, budget: int, how: list[str]) -> dict[str, Any]:
    """In this process."""
    import torch

    try:
        accelerator.load(DEVICE)
    except accelerator.NoAccelerator as reason:
        return {"skipped": str(reason)}
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        steps = METHODS[method](size, budget, *how)
        times, losses, peaks = [], [], []
        for _ in range(STEPS):
            begun_s = time.perf_counter()
            loss = next(steps)
            torch.accelerator.synchronize()
            times.append(time.perf_counter() - begun_s)
            losses.append(float(loss).hex())
            peaks.append(torch.accelerator.max_memory_reserved())  # a run has it begin at each step
            if len(losses) == WARM:
                torch.accelerator.reset_peak_memory_stats()
    except ImportError as error:
        return {"skipped": f"not installed: {error}"}
    except NotRehearsed as what:
        return {"skipped": f"{NOT_REHEARSED}{what}"}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
    return {
        "step_s": times[WARM:],
        "median_s": statistics.median(times[WARM:]),
        "peak_reserved_bytes": max(peaks[WARM:]),
        "losses": losses,
        **SAID,
    }


def in_its_own_process(
    method: str, size: str, budget: int, end_s: float, how: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Until that time of the clock at most."""
    limit_s = min(TIMEOUT_S, end_s - time.monotonic())
    if limit_s <= 0:
        return {"skipped": f"the {PART_S} s of this part were over"}
    command = [sys.executable, __file__, "--one", method, "--size", size, "--budget", str(budget), *how]
    try:
        with watched() as seen_mib:
            ran = subprocess.run(
                command, check=False, capture_output=True, text=True, timeout=limit_s, cwd=ROOT
            )
    except subprocess.TimeoutExpired:
        return {"failed": f"took more than {limit_s:.0f} s"}
    for line in reversed(ran.stdout.splitlines()):
        if line.startswith("{"):
            return {**json.loads(line), "smi_peak_bytes": max(seen_mib, default=0) << 20}
    return {"failed": ran.stderr.strip()[-300:] or f"exit status {ran.returncode}"}


def run(size: str, methods: str) -> dict[str, Any]:
    end_s = time.monotonic() + PART_S
    base = in_its_own_process("in memory", size, 0, end_s)
    left_out = [] if DEVICE == "cuda" else ["nvidia-smi itself"]
    rows = [{"method": "in memory", "not_rehearsed": left_out, **base}]
    if methods == "others":
        for method in METHODS:
            if method not in ("in memory", "penstock"):
                rows.append({"method": method, **in_its_own_process(method, size, 0, end_s)})
        return {"size": size, "methods": methods, "rows": rows}
    for share, policy, tiers in RUNS:
        budget = int(share * base.get("peak_reserved_bytes", 16 << 30))
        row = in_its_own_process("penstock", size, budget, end_s, (policy, tiers))
        row["same_bits"] = row.get("losses") == base.get("losses") if "losses" in row else None
        rows.append({"method": f"penstock {share:.0%} {policy}, {tiers}", "budget_bytes": budget, **row})
    return {"size": size, "methods": methods, "rows": rows}


def machine() -> dict[str, Any]:
    import torch

    versions = {}
    for name in ("torch", "penstock", "transformers", "torchao", "deepspeed"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    try:
        accelerator.load(DEVICE)
        name = torch.get_device_module(DEVICE).get_device_properties(0).name
    except accelerator.NoAccelerator as reason:
        name = str(reason)
    return {
        "device": name,
        "versions": versions,
        "python": sys.version.split()[0],
        "commit": commit.stdout.strip(),
        "date": datetime.date.today().isoformat(),
        "command": sys.argv,
    }


def table(directory: Path) -> int:
    """The number of rows that must not be: of penstock's, those that failed or have other bits."""
    parts = [json.loads(path.read_text()) for path in sorted(directory.glob("gpu-*.json"))]
    (directory / "gpu.json").write_text(json.dumps({"machine": machine(), "parts": parts}, indent=1))
    wrong = 0
    print(f"{'size':6} {'method':42} {'step':>9} {'reserved':>10} {'nvidia-smi':>10}  remarks")
    for part in parts:
        for row in part["rows"]:
            measured = "median_s" in row
            step = f"{row['median_s'] * 1e3:.0f} ms" if measured else "-"
            reserved, smi = (
                f"{row[name] / 2**30:.2f} GiB" if measured and row[name] else "-"
                for name in ("peak_reserved_bytes", "smi_peak_bytes")
            )
            remarks = row.get("skipped") or row.get("failed") or ""
            if row.get("same_bits") is not None:
                remarks = "same bits" if row["same_bits"] else "OTHER BITS"
                if row["peak_reserved_bytes"] > row["budget_bytes"]:
                    remarks += ", ABOVE ITS BUDGET"
                    wrong += 1
                if row["policy"] not in row["method"]:
                    remarks += f", no plan: {row['policy']}"
            ours = DEVICE != "cuda" or row["method"].startswith(("in memory", "penstock"))
            wrong += ours and ("failed" in row or row.get("same_bits") is False)
            print(f"{part['size']:6} {row['method']:42} {step:>9} {reserved:>10} {smi:>10}  {remarks}")
    print(f"written: {directory / 'gpu.json'}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--methods", choices=("penstock", "others"), default="penstock")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--table", type=Path, metavar="DIRECTORY")
    parser.add_argument("--one", choices=METHODS, help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("how", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.size, options.budget, options.how)), flush=True)
        os._exit(0)  # at the end of a run everything would come back, which is no part of its peak
    elif options.table:
        sys.exit(table(options.table) > 0)
    else:
        output = options.output or ROOT / "out" / f"gpu-{options.size}-{options.methods}.json"
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(run(options.size, options.methods), indent=1))
        print(f"written: {output}")


if __name__ == "__main__":
    main()
