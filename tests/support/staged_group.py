"""A process group for devices that gloo does not know: its collectives, by way of host memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

Tensors = list[torch.Tensor]


class StagedGroup(dist.ProcessGroup):
    """What DistributedDataParallel needs of a group. Each collective is over when it returns.

    group   of gloo, which carries them out on the host
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self.group = group

    def allreduce(self, tensors: Tensors, options: Any = None) -> Any:
        staged = [tensor.cpu() for tensor in tensors]
        self.group.allreduce(staged, options or dist.AllreduceOptions()).wait()
        return _over(tensors, staged)

    def broadcast(self, tensors: Tensors, options: Any = None) -> Any:
        staged = [tensor.cpu() for tensor in tensors]
        self.group.broadcast(staged, options or dist.BroadcastOptions()).wait()
        return _over(tensors, staged)

    def allgather(self, results: list[Tensors], tensors: Tensors, options: Any = None) -> Any:
        staged = [[result.cpu() for result in row] for row in results]
        self.group.allgather(staged, [tensor.cpu() for tensor in tensors]).wait()
        return _over([result for row in results for result in row], [one for row in staged for one in row])

    def getBackendName(self) -> str:
        return "staged"


def _over(targets: Tensors, sources: Tensors) -> Any:
    with torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
    done: Future[Tensors] = Future()
    done.set_result(targets)
    return torch._C._distributed_c10d._create_work_from_future(done)
