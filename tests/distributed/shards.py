"""Run on each rank: saves or loads a sharded model and its optimizer, and prints a digest of the state."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from penstock.checkpoint.dcp import Reader, Writer
from tests.support.ranks import leave

WIDTH = 96


def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, 7, bias=False))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.randn(8, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    weights, state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": state, "step": step, "name": "a job"}


def digest(value: Any) -> str:
    found = hashlib.sha256()

    def add(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for key in sorted(value, key=str):
                add(value[key], f"{path}/{key}")
        elif isinstance(value, torch.Tensor):
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            found.update(f"{path} {tuple(whole.shape)} {whole.dtype}".encode())
            found.update(whole.detach().contiguous().numpy().tobytes())
        else:
            found.update(f"{path} {value!r}".encode())

    add(value, "")
    return found.hexdigest()


def main(action: str, directory: Path) -> None:
    dist.init_process_group("gloo")
    digests = []
    if action == "save":
        state = state_of(*make(0), 7)
        dcp.save(state, storage_writer=Writer(directory / "now"))
        dcp.async_save(state, storage_writer=Writer(directory / "later")).result(60)
        digests.append(digest(state))
    else:
        for how in ("now", "later"):
            model, optimizer = make(1)
            state = state_of(model, optimizer, 0)
            dcp.load(state, storage_reader=Reader(directory / how))
            weights, of_optimizer = state["model"], state["optimizer"]
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=of_optimizer)
            assert state["step"] == 7, state["step"]
            digests.append(digest(state_of(model, optimizer, 7)))
    if dist.get_rank() == 0:
        print("digest", *digests, flush=True)
    leave()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
