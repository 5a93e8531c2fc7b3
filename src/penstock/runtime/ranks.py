"""The processes of a job on one machine: they share its links, and its budgets are divided among them."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import torch.distributed

from penstock.core.job import attempt
from penstock.errors import InvalidArgument
from penstock.options import Explorers, read
from penstock.storage.spill import SpillSpace

logger = logging.getLogger("penstock")

# Processes of one job begin at about the same time. They wait so long for each other.
WAIT_S = 30.0
_LONGEST_PAUSE_S = 0.05

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

    Raises InvalidArgument for other explorers.
    """
    read("Explorers", explorers)
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
    store.add(key, 1)
    if wait_until(lambda: store.add(key, 0) >= processes, WAIT_S):
        return True
    logger.warning(
        "%d of %d processes on this machine called penstock.offload within %.0f s: links are measured "
        "without the others, which share them",
        store.add(key, 0),
        processes,
        WAIT_S,
    )
    return False


def wait_until(is_so: Callable[[], bool], limit_s: float) -> bool:
    """Whether it is so within the limit. It is asked again and again, at least once: a wait in a store would
    keep other threads from it."""
    deadline_s, pause_s = time.monotonic() + limit_s, 1e-3
    while not is_so():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, _LONGEST_PAUSE_S)
    return True
