"""Processes on one machine divide its memory, whatever has started them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch.distributed as dist

from penstock.errors import InvalidArgument
from penstock.runtime import ranks
from tests.support import apart

LAUNCHERS = (
    *("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    *("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"),
)


@pytest.fixture(autouse=True)
def started_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*LAUNCHERS, "SLURM_NODEID"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("said", "processes"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "4", "SLURM_NTASKS_PER_NODE": "2"}, 4),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, 3),
        ({"SLURM_NTASKS_PER_NODE": "8"}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_NTASKS_PER_NODE": "8"}, 1),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2),4", "SLURM_NODEID": "1"}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2),4", "SLURM_NODEID": "2"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "8,4", "SLURM_NODEID": "9"}, 8),
    ],
)
def test_as_what_started_them_says(
    said: dict[str, str], processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    assert ranks.local_world_size() == processes


@pytest.mark.parametrize("name", LAUNCHERS)
@pytest.mark.parametrize("value", ["", "0", "many"])
def test_what_is_no_number_is_refused(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(InvalidArgument, match=f"{name} is '{value}': give a number of processes"):
        ranks.local_world_size()


PROGRAM = """
import sys
import torch, torch.distributed as dist
import penstock
from tests.support.ranks import leave
from tests.support.runs import HARDWARE

dist.init_process_group("gloo", init_method=sys.argv[1], rank=int(sys.argv[2]), world_size=2)
with penstock.offload(
    device_budget="16MiB", disk_budget=64 << 20, spill_dir=sys.argv[3], hardware=HARDWARE
) as run:
    with run.step():
        torch.ones(8).sum()
    print("found", run.report().processes, run.hardware.disk_bytes)
leave()
"""


def test_ranks_that_nobody_has_counted_count_themselves(tmp_path: Path) -> None:
    """As those of torch.multiprocessing.spawn."""
    places = [(f"file://{tmp_path}/group", rank, tmp_path) for rank in range(2)]
    done = apart.ended(*(apart.Program(PROGRAM, place) for place in places), timeout_s=120)
    assert not any(each.returncode for each in done), "".join(each.stderr for each in done)
    assert [each.stdout.strip() for each in done] == [f"found 2 {32 << 20}"] * 2


def counted(store: dist.Store, others: dict[str, int]) -> int:
    """What a rank finds that comes after these, by their machines, in a group of 4."""
    for machine, count in others.items():
        store.add(f"penstock/machines/0/{machine}", count)
        store.add("penstock/machines/0", count)
    ranks._ranks_here.cache_clear()
    return ranks._ranks_here(store, 4)


def test_ranks_of_other_machines_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "WAIT_S", 0.0)
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "3")  # which is not asked
    assert counted(dist.HashStore(), {ranks._machine(): 1, "elsewhere": 2}) == 2


@pytest.mark.parametrize(("launched", "processes"), [(None, 4), ("2", 2)])
def test_ranks_that_do_not_come_are_not_waited_for_twice(
    launched: str | None, processes: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ranks, "WAIT_S", 0.0)
    if launched is not None:
        monkeypatch.setenv("SLURM_NTASKS_PER_NODE", launched)
    store = dist.HashStore()
    with caplog.at_level(logging.WARNING, "penstock"):
        assert counted(store, {"elsewhere": 1}) == ranks._ranks_here(store, 4) == processes
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "2 of 4 ranks called penstock.offload within 0 s"
    ]
