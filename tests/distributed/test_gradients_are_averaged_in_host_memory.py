"""Host accumulation: exact, the same with and without a budget, and with an end to every wait."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import penstock
from penstock.distributed import HostAccumulation
from penstock.units import format_bytes
from tests.support.ranks import ROOT, started, together

AVERAGING = Path(__file__).parent / "averaging.py"
TRAINING = Path(__file__).parent / "training.py"

# Started together: a process takes longer to begin than to train.
PROGRAMS = ("ddp_host --clip --parts 2", "ddp_host_views --steps 5")


def found_in(printed: str) -> dict[str, dict[int, Any]]:
    """What each rank found, by what it did."""
    found: dict[str, dict[int, Any]] = {}
    for line in printed.splitlines():
        if line.startswith("rank "):
            rank, name, said = json.loads(line.removeprefix("rank "))
            found.setdefault(name, {})[rank] = said
    return found


@pytest.mark.slow
def test_the_same_bits_within_budgets_and_as_without_the_hook(tmp_path: Path) -> None:
    """On two ranks, whose sum has one order only."""
    arguments = " --then ".join(f"{program} --spill {tmp_path}" for program in PROGRAMS).split(" ")
    printed = together(2, TRAINING, *arguments)
    assert printed.count("as plain True") == len(PROGRAMS)
    found = [json.loads(line[5:]) for line in printed.splitlines() if line.startswith("rows ")]
    assert len(found) == len(PROGRAMS)
    for every in found:
        assert len(every) == 2
        for roomy, half, least in every:
            for row in (roomy, half, least):
                assert row["same"]
                # The run sees each bucket, and keeps it on the device until it is done.
                assert row["collectives"].count("penstock::host_average_") > 1
            assert roomy["evicted"] == 0
            assert half["evicted"] > 0 and least["evicted"] > 0
            assert half["peak"] <= half["budget"] and least["peak"] <= least["budget"]


@pytest.mark.slow
def test_exact_on_three_ranks() -> None:
    found = found_in(together(3, AVERAGING, "exact", "checked", "auto"))
    # Many tensors of all types in flight, in the order of the ranks; nothing is left when it is closed.
    exact = {"cases": 24, "inside": 1, "after": 0, "order shows": True}
    assert found["exact"] == dict.fromkeys(range(3), exact)
    late = {"cases": 12}  # the same by copies that run late, as those of an accelerator do
    assert found["checked"] == dict.fromkeys(range(3), late)
    check_auto(*found["auto"].values())


def check_auto(one: Any, *others: Any) -> None:
    """All take what was faster."""
    assert len(others) == 2 and all(other == one for other in others)
    for (size_bytes, host_s, all_reduce_s), method in zip(one["measured"], one["methods"], strict=True):
        assert host_s > 0 and all_reduce_s > 0
        assert method == ("host" if host_s < all_reduce_s else "all_reduce")
        assert format_bytes(size_bytes) in one["reason"]
    assert all(predicted_s > 0 for row in one["predicted"] for predicted_s in row)
    assert one["gradient"] == pytest.approx(4.0)  # the mean of 2, 4 and 6


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_one_rank_keeps_its_gradients(dtype: torch.dtype) -> None:
    drawn = [torch.randn(elements).to(dtype) for elements in (0, 1, 5000, 3 << 20)]
    with HostAccumulation() as state:
        tensors = [tensor.clone() for tensor in drawn]
        futures = [state.average(tensor) for tensor in tensors]
        assert all(future.wait() is not None for future in futures)
    assert all(map(torch.equal, tensors, drawn))
    with pytest.raises(penstock.DistributedError, match="is closed"):
        state.average(tensors[1])


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "words, attempt",
    [
        ("no method 'nccl'", lambda state: HostAccumulation(method="nccl")),
        ("no sizes", lambda state: HostAccumulation(method="auto", bucket_sizes=[])),
        ("for all-reduce only", lambda state: HostAccumulation(method="all_reduce").average(torch.ones(4))),
        ("torch.int64", lambda state: state.average(torch.ones(4, dtype=torch.int64))),
        ("not contiguous", lambda state: state.average(torch.ones(4, 4).t()[1:])),
        ("make it with device='meta'", lambda state: state.average(torch.ones(4, device="meta"))),
    ],
)
def test_what_cannot_be_done_is_said(words: str, attempt: Callable[[HostAccumulation], Any]) -> None:
    with HostAccumulation() as state, pytest.raises(penstock.InvalidArgument, match=words):
        attempt(state)


def test_without_a_process_group() -> None:
    with pytest.raises(penstock.InvalidArgument, match="call init_process_group first"):
        HostAccumulation()


def test_what_a_rank_says_runs_no_code() -> None:
    found = found_in(together(2, AVERAGING, "strange"))["strange"]
    assert found[1] == {}
    assert "a rank sends what penstock does not" in found[0]["error"]


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named() -> None:
    done = started(2, AVERAGING, "other", "closed", "late", "killed", timeout_s=120)
    assert done.returncode != 0
    found = found_in(done.stdout)
    words = {
        "other": "rank 1 brought 9 elements of torch.float32, and rank 0 8 of",
        "closed": "it has stopped exchanging gradients",
        "late": "it has not brought its gradients within the time limit of the process group, 1.00 s",
        "killed": "its process has ended",
    }
    assert set(found) == set(words), done.stderr
    pid = found["late"][1]["pid"]
    for how, text in words.items():
        first, again = found[how][0]["found"]
        assert "DistributedError: rank " in first and text in first
        assert again.startswith("DistributedError: rank ") and text in again
        if how != "other":
            assert "rank 0 waited " in first and f" for the gradients of rank 1, process {pid}: " in first
    assert "rank 1 waited " in found["late"][1]["found"][0]
    assert 1 not in found["killed"]


def can_separate() -> bool:
    command = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "true"]
    return shutil.which("unshare") is not None and subprocess.run(command, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not can_separate(), reason="processes cannot be given a view of their own here")
def test_ranks_that_share_no_machine_are_told() -> None:
    """The second rank cannot see the first one's process, as if it were elsewhere."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    ranks = []
    for rank in range(2):
        apart = ["unshare", "--user", "--map-root-user", "--pid", "--fork"] if rank else []
        ranks.append(
            subprocess.Popen(
                [*apart, sys.executable, str(AVERAGING), "apart"],
                env={**environment, "RANK": str(rank), "WORLD_SIZE": "2"},
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    try:
        printed = "".join(process.communicate(timeout=120)[0] for process in ranks)
    finally:
        for process in ranks:
            process.kill()
    found = found_in(printed)["apart"]
    assert set(found) == {0, 1}
    for said in found.values():
        assert "the 2 ranks of this process group are in 2" in said["error"]
        assert said["method"] == "all_reduce" and said["reason"] == said["error"]
        assert said["gradient"] == 3.0
