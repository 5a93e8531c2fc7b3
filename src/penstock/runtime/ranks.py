"""The processes of a job on one machine: they share its links, and its budgets are divided among them."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import time
from typing import Any

import torch.distributed

from penstock.core.job import attempt
from penstock.errors import InvalidArgument
from penstock.storage.autotune.exchange import EXPLORERS, Explorers
from penstock.storage.spill import SpillSpace

logger = logging.getLogger("penstock")

# Processes of one job begin at about the same time. They wait so long for each other.
WAIT_S = 30.0
_POLL_S = 0.01

_meetings = itertools.count()


def on_this_machine() -> int:
    """How many processes of this job there are on this machine, as torchrun says; 1 without it."""
    said = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if not said.isdigit() or int(said) < 1:
        raise InvalidArgument(
            f"the environment variable LOCAL_WORLD_SIZE is {said!r}: give a number of processes"
        )
    return int(said)


def shared_store() -> Any:
    """The key-value store of the process group; None where there is none, or one rank."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return None
    return distributed.distributed_c10d._get_default_store()


def share_io_costs(spill: SpillSpace, explorers: Explorers) -> bool:
    """Share what is learned of I/O paths with the other ranks. False: there is no process group of several.

    Raises InvalidArgument for other explorers than EXPLORERS.
    """
    if explorers not in EXPLORERS:
        raise InvalidArgument(f"I/O paths are explored {explorers!r}: give one of {', '.join(EXPLORERS)}")
    store = shared_store()
    if store is not None and explorers != "each":
        spill.share(store, explorers, torch.distributed.get_rank(), torch.distributed.get_world_size())
    return store is not None


def meet(processes: int) -> bool:
    """Wait until all of them on this machine are here. False: they cannot be waited for, or do not come."""
    if processes == 1:
        return True
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        logger.warning(
            "%d processes share this machine, and its links are measured by each alone: call "
            "torch.distributed.init_process_group before penstock.offload, so that they are measured "
            "together",
            processes,
        )
        return False
    store = torch.distributed.distributed_c10d._get_default_store()
    key = f"penstock/meet/{attempt()}/{socket.gethostname()}/{next(_meetings)}"
    here = store.add(key, 1)
    deadline_s = time.monotonic() + WAIT_S
    while here < processes:
        if time.monotonic() > deadline_s:
            logger.warning(
                "%d of %d processes on this machine called penstock.offload within %.0f s: links are "
                "measured without the others, which share them",
                here,
                processes,
                WAIT_S,
            )
            return False
        time.sleep(_POLL_S)
        here = store.add(key, 0)
    return True
