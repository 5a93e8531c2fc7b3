"""Samples on the Linux kernel's NVMe/TCP target: every one right, whoever reads them and whatever happens."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.samples import Store, mount, upload, verify
from tests.support.nvme_target.kernel.machine import NQN, Machine, Unavailable
from tests.support.nvme_target.process import random_file
from tests.support.sample_stores import epoch, some_samples
from tests.support.stores import extract_namespace, read_store, write_store

pytestmark = [pytest.mark.kernel_target]

SIZE = 16 << 20
BLOCKS = (512, 4096, 512, 512)  # of four subsystems
SHARES = [some_samples(150, seed=number) for number in range(len(BLOCKS))]
CONTENT = {index: data for index, (_, data) in enumerate(sample for share in SHARES for sample in share)}
TIMEOUT_S = 120.0  # an emulated processor takes its time


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kernel")
    for number, samples in enumerate(SHARES):
        write_store(folder / f"store-{number}", samples, data_file_bytes=70_000)
        random_file(folder / f"disk-{number}", SIZE)[: 1 << 20] = 0
    return folder


@pytest.fixture(scope="module")
def machine(folder: Path) -> Iterator[Machine]:
    try:
        started = Machine([(folder / f"disk-{number}", blocks) for number, blocks in enumerate(BLOCKS)])
    except Unavailable as reason:
        pytest.skip(f"the kernel's NVMe/TCP target cannot be had here: {reason}")
    with started:
        for number in range(len(BLOCKS)):
            upload(folder / f"store-{number}", url_of(started, number))
        yield started


def url_of(machine: Machine, number: int, options: str = "") -> str:
    return f"nvme+tcp://{machine.address}:{machine.port}/{NQN.format(number)}?ns=1{options}"


def mounted(urls: list[str], order: str = "chunk") -> Store:
    """With so little memory that an epoch is read while it is taken."""
    return mount(urls, order, "40KiB", timeout_s=TIMEOUT_S, prefetch_bytes="8KiB")


@pytest.mark.parametrize("options", ["", "&hdgst=1", "&hdgst=1&ddgst=1"])
@pytest.mark.parametrize("numbers", [[0], [0, 1], [0, 1, 2, 3]], ids=["one", "two", "four"])
def test_every_sample_comes_back(machine: Machine, numbers: list[int], options: str) -> None:
    expected = [data for number in numbers for _, data in SHARES[number]]
    with mounted([url_of(machine, number, options) for number in numbers]) as store:
        found = epoch(store)
        assert [found[index] for index in range(len(expected))] == expected


def test_the_disks_hold_what_the_format_says(machine: Machine, folder: Path, tmp_path: Path) -> None:
    """Read from their raw bytes by code that shares none with penstock."""
    for number, samples in enumerate(SHARES):
        verify(url_of(machine, number))
        image = (folder / f"disk-{number}").read_bytes()
        (partition,) = extract_namespace(image, tmp_path / str(number))
        assert read_store(partition) == samples


def read_share(urls: list[str], rank: int, world_size: int, queue: Any) -> None:
    with mount(urls, "chunk", "40KiB", rank, world_size, timeout_s=TIMEOUT_S) as store:
        store.sequence(seed=5)
        queue.put(json.dumps({index: data.hex() for index, data in epoch(store).items()}))


def test_several_processes_share_an_epoch(machine: Machine) -> None:
    """Every one of them reads from every target."""
    spawn = multiprocessing.get_context("spawn")
    queue = spawn.Queue()
    urls = [url_of(machine, number) for number in range(4)]
    processes = [spawn.Process(target=read_share, args=(urls, rank, 3, queue)) for rank in range(3)]
    for process in processes:
        process.start()
    found: dict[int, bytes] = {}
    for _ in processes:
        mine = {int(index): bytes.fromhex(data) for index, data in json.loads(queue.get(timeout=240)).items()}
        assert not found.keys() & mine.keys()
        found |= mine
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert found == CONTENT


@pytest.mark.parametrize("how", ["killed", "unlinked"])
def test_a_target_that_comes_back_costs_no_sample(machine: Machine, how: str) -> None:
    link = f"/sys/kernel/config/nvmet/ports/1/subsystems/{NQN.format(1)}"
    with mounted([url_of(machine, number) for number in range(4)]) as store:
        found = {}
        for _ in range(6):
            batch = store.bread(7)
            assert batch is not None
            found |= {int(index): bytes(data) for index, data in zip(batch.indices, batch, strict=True)}
        if how == "killed":
            machine.kill()
            machine.start()
        else:
            machine.run(
                f"rm {link}; sleep 1; ln -s /sys/kernel/config/nvmet/subsystems/{NQN.format(1)} {link}"
            )
        rest = epoch(store)
        assert not found.keys() & rest.keys()
        assert found | rest == CONTENT
