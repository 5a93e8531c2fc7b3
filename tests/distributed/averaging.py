"""Run on each rank: averages tensors in host memory, as each argument says, and prints what was found."""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from penstock.distributed import HostAccumulation, host_accumulation_hook
from penstock.distributed.exchange import Exchange
from penstock.distributed.segment import SharedSegment
from penstock.errors import DistributedError
from tests.support import accelerator
from tests.support.checked import CheckedDriver

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
ELEMENTS = (0, 1, 63, 4097, 1 << 20, 2_500_001)  # of less than a piece, and of several


def drawn(rank: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Of magnitudes so different that the order of a sum shows in its bits."""
    generator = torch.Generator().manual_seed(1000 * elements + rank)
    scale = torch.rand(elements, generator=generator).mul(8).exp2()
    return torch.randn(elements, generator=generator, dtype=torch.float64).mul(scale).to(dtype)


def expected(elements: int, dtype: torch.dtype, backwards: bool = False) -> torch.Tensor:
    """The mean, added up in the order of the ranks."""
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    ranks = range(dist.get_world_size())
    first, *others = (drawn(rank, elements, dtype).to(wide) for rank in (ranks[::-1] if backwards else ranks))
    for other in others:
        first = first + other
    return (first / dist.get_world_size()).to(dtype)


def average_all(
    submit: Callable[[torch.Tensor], torch.futures.Future[torch.Tensor]],
    device: str = "cpu",
    sizes: Sequence[int] = ELEMENTS,
) -> int:
    """All are on their way before any other rank comes, and nobody waits for it; how many there were."""
    cases = [(elements, dtype) for dtype in DTYPES for elements in sizes]
    tensors = [drawn(dist.get_rank(), *case).to(device) for case in cases]
    if dist.get_rank() > 0:
        dist.barrier()
    futures = [submit(tensor) for tensor in tensors]
    if dist.get_rank() == 0:
        assert not any(
            future.done() for future, (elements, _) in zip(futures, cases, strict=True) if elements
        )
        dist.barrier()
    for case, tensor, future in zip(cases, tensors, futures, strict=True):
        assert future.wait().data_ptr() == tensor.data_ptr()
        assert torch.equal(tensor.cpu(), expected(*case)), case
    return len(cases)


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:penstock")


def exact() -> dict[str, object]:
    with HostAccumulation() as state:
        inside = mappings()
        cases = average_all(state.average)
    # Else another order would have done as well.
    ordered = [not torch.equal(expected(4097, dtype), expected(4097, dtype, True)) for dtype in DTYPES[:2]]
    return {"cases": cases, "inside": inside, "after": mappings(), "order shows": all(ordered)}


def checked() -> dict[str, object]:
    """As on an accelerator: copies run late, on a stream of their own."""
    driver = CheckedDriver(seed=dist.get_rank())
    exchange = Exchange(dist.group.WORLD, driver, 60, piece_bytes=4 << 10)
    with driver.mode:  # it sees what makes and uses the tensors
        cases = average_all(lambda tensor: exchange.submit(tensor).future, sizes=[1, 4097, 20_001])
    exchange.close()
    driver.check()
    return {"cases": cases}


def gradient(state: HostAccumulation) -> float:
    """The mean of twice the rank's number, which counts from 1."""
    model = DistributedDataParallel(nn.Linear(300, 300))
    model.register_comm_hook(state, host_accumulation_hook)
    model(torch.full((2, 300), 1.0 + dist.get_rank())).sum().backward()
    return model.module.weight.grad[0, 0].item()


def gpu() -> dict[str, object]:
    """All ranks on one accelerator. gloo takes no tensors of the emulated one, to measure all-reduce with."""
    kind = accelerator.wanted("cuda")
    accelerator.load(kind)
    how: dict[str, Any] = {"method": "auto", "bucket_sizes": ["64KiB", "4MiB"]}
    if kind != "cuda":
        how = {"timeout": timedelta(seconds=60)}
    with HostAccumulation(device=f"{kind}:0", **how) as state:
        return {"cases": average_all(state.average, f"{kind}:0"), "sizes": len(state.measured)}


def auto() -> dict[str, object]:
    with HostAccumulation(method="auto", bucket_sizes=["64KiB", "4MiB"]) as state:
        return {
            "measured": [(row.size_bytes, row.host_s, row.all_reduce_s) for row in state.measured],
            "predicted": [(row.predicted_host_s, row.predicted_all_reduce_s) for row in state.measured],
            "methods": [state.method_of(row.size_bytes) for row in state.measured],
            "reason": state.reason,
            "gradient": gradient(state),
        }


def apart() -> dict[str, object]:
    """The ranks do not see each other's processes."""
    try:
        HostAccumulation()
    except DistributedError as error:
        state = HostAccumulation(method="auto")
        found = {"method": state.method, "reason": state.reason, "gradient": gradient(state)}
        return {"error": str(error), **found}
    return {}


def unpickled(*_: object) -> None:
    raise AssertionError("a rank unpickles what another one says")


def strange() -> dict[str, object]:
    """Rank 1 says something that would run code where it is unpickled."""
    if dist.get_rank() == 1:
        evil = pickle.dumps(Evil()).ljust(4096, b"\xc1")
        said = torch.frombuffer(bytearray(evil), dtype=torch.uint8)
        dist.all_gather([torch.empty_like(said) for _ in range(dist.get_world_size())], said)
        return {}
    try:
        SharedSegment(dist.group.WORLD, 1 << 20)
    except DistributedError as error:
        return {"error": str(error)}
    return {}


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (3,)


def failing(how: str) -> dict[str, object]:
    """Rank 1 does not do what the others wait for; they say what they saw."""
    state = HostAccumulation(timeout=timedelta(seconds=1) if how == "late" else None)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(300, 300))
    model.register_comm_hook(state, host_accumulation_hook)
    for _ in range(3):  # in the second one DistributedDataParallel makes its buckets anew, together
        model(torch.ones(2, 300)).sum().backward()
    fails = dist.get_rank() == 1
    if fails and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fails and how == "closed":
        state.close()
    if fails and how == "late":
        time.sleep(2)
    found: list[str] = []
    for _ in range(2):
        try:
            if how == "other":
                state.average(torch.ones(8 + dist.get_rank())).wait()
            else:
                model(torch.ones(2, 300)).sum().backward()
        except RuntimeError as error:
            found.append(f"{type(error).__name__}: {error}")
    if how != "killed":
        dist.barrier()
    return {"pid": os.getpid(), "found": found}


def main(names: list[str]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends the others as soon as one has failed
    dist.init_process_group("gloo")
    dist.distributed_c10d._tensor_to_object = unpickled
    actions = {action.__name__: action for action in (exact, checked, gpu, auto, apart, strange)}
    for name in names:
        found = actions[name]() if name in actions else failing(name)
        # In one piece: other ranks write to the same pipe.
        os.write(sys.stdout.fileno(), f"rank {json.dumps([dist.get_rank(), name, found])}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1:])
