"""Gradients of DistributedDataParallel averaged in host memory, as a communication hook.

::

    state = HostAccumulation(method="auto")
    model.register_comm_hook(state, host_accumulation_hook)
"""

from penstock.distributed.hook import HostAccumulation, Measured, host_accumulation_hook

__all__ = ["HostAccumulation", "Measured", "host_accumulation_hook"]
