"""The ranks of a job on this machine, which share its links and divide its memory."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import torch.distributed

from penstock.core.job import restart_id
from penstock.errors import InvalidArgument
from penstock.options import Explorers, read
from penstock.storage.spill import SpillSpace

logger = logging.getLogger("penstock")

# Processes of one job start at about the same time. They wait this long for each other.
WAIT_S = 30.0
_LONGEST_PAUSE_S = 0.05

_barriers = itertools.count()


def local_world_size() -> int:
    """Processes of this job on this machine: torchrun's LOCAL_WORLD_SIZE; 1 without torchrun."""
    value = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if not value.isdigit() or int(value) < 1:
        raise InvalidArgument(
            f"the environment variable LOCAL_WORLD_SIZE is {value!r}: give a number of processes"
        )
    return int(value)


def shared_store() -> Any:
    """The key-value store of the process group; None where there is none, or one rank."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return None
    return distributed.distributed_c10d._get_default_store()


def share_io_costs(spill: SpillSpace, explorers: Explorers) -> bool:
    """Share measured costs of I/O paths with the other ranks. False: there are no other ranks.

    Raises InvalidArgument for other explorers.
    """
    read("Explorers", explorers)
    store = shared_store()
    if store is not None and explorers != "each":
        spill.share(store, explorers, torch.distributed.get_rank(), torch.distributed.get_world_size())
    return store is not None


def wait_for_local_ranks(processes: int) -> bool:
    """A barrier of the processes on this machine. False: no process group, or not all came in time."""
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
    key = f"penstock/barrier/{restart_id()}/{socket.gethostname()}/{next(_barriers)}"
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


def wait_until(condition: Callable[[], bool], limit_s: float) -> bool:
    """Poll until ``condition()`` is true; False: not within the limit. For conditions on a store, whose own
    `wait` blocks other threads."""
    deadline_s, pause_s = time.monotonic() + limit_s, 1e-3
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, _LONGEST_PAUSE_S)
    return True
