"""Several processes: started as users start them, with torchrun, or forked as it would start them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist

from tests.support import apart

ROOT = Path(__file__).parents[2]


def leave() -> None:
    """End a rank. A thread of gloo may let go of a collective's tensors a moment after the collective: torch
    2.13 aborts where the interpreter ends meanwhile."""
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def torchrun(ranks: int, script: Path, *args: object, timeout_s: float = 600, restarts: int = 0) -> str:
    """What the script's processes print. Raises AssertionError, with that, where one of them fails."""
    done = started(ranks, script, *args, timeout_s=timeout_s, restarts=restarts)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def started(
    ranks: int, script: Path, *args: object, timeout_s: float = 600, restarts: int = 0
) -> subprocess.CompletedProcess[str]:
    """The same, however it ends."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [f"--max-restarts={restarts}", str(script), *map(str, args)]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, env=environment, check=False
    )


def together(ranks: int, script: Path, *args: object, timeout_s: float = 600) -> str:
    """What the script's processes print, of which none imports torch. Raises AssertionError as `torchrun`."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "OMP_NUM_THREADS": "1"}
    places |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_WORLD_SIZE": "1"}
    places |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    programs = [
        apart.Program(script, args, {**places, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]
    done = apart.ended(*programs, timeout_s=timeout_s)
    assert not any(each.returncode for each in done), "\n".join(
        f"rank {rank} ends with {each.returncode}\n{each.stdout}{each.stderr}"
        for rank, each in enumerate(done)
    )
    return "".join(each.stdout for each in done)
