"""Run on each rank: they save and load one file."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import penstock
from tests.support.ranks import leave


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32))


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def refused(error: type[Exception], words: str, act: object, *args: object, **named: object) -> None:
    try:
        act(*args, **named)  # type: ignore[operator]
    except error as problem:
        assert re.search(words, str(problem)), problem
    else:
        raise AssertionError(f"{words}: nothing was raised")


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    dist.distributed_c10d._tensor_to_object = unpickled
    rank = dist.get_rank()
    everyone = dist.group.WORLD
    model, plain = DistributedDataParallel(network(0)), network(0)

    # One writes for all: the file is there when any of them goes on, and it is the first one's.
    state = {"model": model.state_dict(), "rank": rank}
    penstock.save(state, folder / "together", group=everyone)
    assert penstock.load(folder / "together")["rank"] == 0
    dist.barrier()
    inode = os.stat(folder / "together").st_ino
    highest = torch.tensor(inode)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    assert inode == highest, "nobody has replaced it"

    # Alone, and each for itself, nobody waits.
    if rank == 0:
        penstock.save(plain.state_dict(), folder / "plain")
    penstock.save({"rank": rank}, folder / f"own-{rank}")
    assert penstock.load(folder / f"own-{rank}") == {"rank": rank}

    # An error reaches all.
    blocked = folder / "together" / "file\udcff"
    words = "cannot be written" if rank == 0 else "rank 0, which writes .* failed: CheckpointError: "
    refused(penstock.CheckpointError, words, penstock.save, state, blocked, group=everyone)
    words = "lambda|function" if rank == 0 else "rank 0, which writes .* failed: InvalidArgument"
    kind = penstock.InvalidArgument if rank == 0 else penstock.CheckpointError
    refused(kind, words, penstock.save, {"f": network}, folder / "bad", group=everyone)
    refused(
        penstock.InvalidArgument, "wait=False", penstock.save, {}, folder / "x", wait=False, group=everyone
    )
    pair = dist.new_group([1])
    if rank == 0:
        refused(penstock.InvalidArgument, "is in", penstock.save, {}, folder / "x", group=pair)
    else:
        penstock.save({"by": 1}, folder / "subgroup", group=pair)

    # With and without the wrapper, both ways.
    other = DistributedDataParallel(network(1))
    assert not same(other, model)
    penstock.load(folder / "plain", into=other)
    assert same(other, model)
    bare = network(2)
    penstock.load(folder / "together", into={"model": bare, "rank": None})
    assert same(bare, plain)

    # Shards are for torch.distributed.checkpoint.
    sharded = fully_shard(network(0)[0], mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    words = r"'weight' cannot be saved: .*penstock\.checkpoint\.dcp\.Writer"
    refused(penstock.InvalidArgument, words, penstock.save, sharded.state_dict(), folder / "shards")
    penstock.save(network(0)[0].state_dict(), folder / f"layer-{rank}")
    words = r"penstock\.checkpoint\.dcp\.Reader.*Nothing was changed"
    refused(penstock.InvalidArgument, words, penstock.load, folder / f"layer-{rank}", into=sharded)
    print(f"rank {rank} saved\n", end="", flush=True)
    leave()


def unpickled(*_: object) -> None:
    raise AssertionError("a rank unpickles what another one says")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
