"""Run by torchrun: trains from a sample store, and goes on where the last checkpoint says. One rank is killed
in the first attempt. At the end each rank compares all with a training that nothing interrupted."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

import penstock
from penstock import samples
from penstock.checkpoint.dcp import Reader, Writer
from tests.support.ranks import leave
from tests.support.runs import HARDWARE, PAGED

WIDTH, SAMPLES, BATCH, STEPS = 128, 66, 4, 13  # eight batches an epoch
SAVED_EVERY, KILLED_AT = 3, 5


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    notes = folder / f"rank-{dist.get_rank()}-attempt-{attempt}"
    found = train(folder, notes, folder / "checkpoint", dies=attempt == 0)
    wanted = train(folder, folder / f"rank-{dist.get_rank()}-whole", None, dies=False)
    assert found == wanted, (found, wanted)
    print(f"rank {dist.get_rank()} trained in attempt {attempt} to {found}\n", end="", flush=True)
    leave()


def train(folder: Path, notes: Path, checkpoint: Path | None, dies: bool) -> str:
    """A digest of everything that training made. Without a checkpoint: in memory, and in one go."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + rank)  # for dropout
    store = samples.mount(folder / "store", cache_bytes="1MiB", group=dist.group.WORLD)
    loader = samples.Loader(store, batch_size=BATCH, drop_last=True)
    run = None
    if checkpoint is not None:
        run = penstock.offload(
            model,
            optimizer,
            device_budget="640KiB",
            spill_dir=folder / "spill",
            hardware=HARDWARE,
            planning=PAGED,
        )
    step = 0
    if checkpoint is not None and Reader.validate_checkpoint_id(checkpoint):
        state = state_of(model, optimizer, loader, step)
        dcp.load(state, storage_reader=Reader(checkpoint))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        loader.load_state_dict(state["loader"])
        torch.set_rng_state(state[f"generator of rank {rank}"])
        step = state["step"]
    with notes.open("w", buffering=1) as noted:
        while step < STEPS:
            for batch in loader:
                with run.step() if run else contextlib.nullcontext():
                    model(batch["x"]).square().mean().backward()
                    if dies and rank == 1 and step == KILLED_AT:
                        os.kill(os.getpid(), signal.SIGKILL)
                    optimizer.step()
                    optimizer.zero_grad()
                noted.write(json.dumps([step, batch["number"].tolist()]) + "\n")
                step += 1
                if checkpoint is not None and step % SAVED_EVERY == 0:
                    state = state_of(model, optimizer, loader, step)
                    dcp.save(state, storage_writer=Writer(checkpoint))
                if step == STEPS:
                    break
    digest = hashlib.sha256()
    for tensor in (
        *model.parameters(),
        *(value for each in optimizer.state.values() for value in each.values()),
    ):
        digest.update(tensor.detach().numpy().tobytes())
    digest.update(torch.get_rng_state().numpy().tobytes())
    weights = folder / "weights.safetensors"
    if run is None:
        for name, tensor in penstock.load(weights).items():
            assert torch.equal(model.state_dict()[name], tensor), name
    else:
        penstock.save(model.state_dict(), weights, group=dist.group.WORLD)
        assert run.report().evicted_bytes > 0
        run.close()
    return digest.hexdigest()


def state_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: samples.Loader, step: int
) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {
        "model": weights,
        "optimizer": moments,
        "loader": loader.state_dict(),
        "step": step,
        f"generator of rank {dist.get_rank()}": torch.get_rng_state(),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
