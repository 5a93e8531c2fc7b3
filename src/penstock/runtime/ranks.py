"""The ranks of a job on this machine, which share its links and divide its memory."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed

from penstock.core.job import restart_id
from penstock.errors import InvalidArgument
from penstock.machine import lines
from penstock.options import Explorers, read
from penstock.storage.spill import SpillSpace

logger = logging.getLogger("penstock")

# Processes of one job start at about the same time. They wait this long for each other.
WAIT_S = 30.0
_LONGEST_PAUSE_S = 0.05

_barriers = itertools.count()


# In which launchers tell a process how many they have started on its machine. Open MPI's and Slurm's do not
# count what these have started in turn, so that a process group knows better.
_TORCHRUN = "LOCAL_WORLD_SIZE"
_OTHER_LAUNCHERS = ("OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")


def local_world_size() -> int:
    """Processes of this job on this machine: as torchrun says; else ranks of the process group here, which
    wait for each other once, for up to WAIT_S; else as mpirun or srun say; else 1."""
    if _TORCHRUN in os.environ:
        return _started_by(_TORCHRUN)
    store = shared_store()
    return _launched() or 1 if store is None else _ranks_here(store, torch.distributed.get_world_size())


def _launched() -> int:
    """By mpirun or srun; 0: by neither."""
    return next((_started_by(name) for name in _OTHER_LAUNCHERS if name in os.environ), 0)


def _started_by(variable: str) -> int:
    value = text = os.environ[variable]
    if variable.startswith("SLURM"):  # "8(x2),4" is of three nodes
        groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", value)
        nodes = [number for number, times in groups for _ in range(int(times or 1))]
        node = int(os.environ.get("SLURM_NODEID", "0"))
        text = nodes[node] if node < len(nodes) else max(nodes, key=int, default="")
    if not text.isdigit() or int(text) < 1:
        raise InvalidArgument(f"the environment variable {variable} is {value!r}: give a number of processes")
    return int(text)


@functools.lru_cache(maxsize=1)  # of one process group
def _ranks_here(store: Any, ranks: int) -> int:
    """Ranks of the process group on this machine. They count themselves in its store. Where not all come in
    time, the number can be too high: less memory is taken than there is, not more."""
    key = f"penstock/machines/{restart_id()}"
    store.add(f"{key}/{_machine()}", 1)
    store.add(key, 1)
    if wait_until(lambda: store.add(key, 0) >= ranks, WAIT_S):
        return int(store.add(f"{key}/{_machine()}", 0))
    processes = _launched() or ranks
    logger.warning(
        "%d of %d ranks called penstock.offload within %.0f s: host and disk budgets are divided as if %d "
        "were on this machine. Set %s to how many are",
        store.add(key, 0),
        ranks,
        WAIT_S,
        processes,
        _TORCHRUN,
    )
    return processes


@functools.cache
def _machine() -> str:
    """Of machines with the same name, and of containers on one, each has another."""
    return "/".join([socket.gethostname(), *lines(Path("/proc/sys/kernel/random/boot_id"))])


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
    key = f"penstock/barrier/{restart_id()}/{_machine()}/{next(_barriers)}"
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
