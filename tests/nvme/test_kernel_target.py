"""The Linux kernel's NVMe/TCP target and host, in an emulated machine: what they say is what NVMe/TCP is."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from penstock import _native
from tests.support.nvme_host import HOST_ID, HOST_NQN, connected
from tests.support.nvme_native import controller, guarded, guards_hold, requests
from tests.support.nvme_target.kernel.machine import NQN, Machine, Unavailable
from tests.support.nvme_target.process import Namespace, Subsystem, Target, random_file

pytestmark = [pytest.mark.kernel_target]

SIZE = 8 << 20
BLOCKS = (512, 512, 512, 4096)  # of four disks

# An emulated processor takes its time.
SLOW = {"command_timeout_s": 30.0, "connect_timeout_s": 8.0, "reconnect_timeout_s": 60.0}
DIGESTS = [{}, {"header_digest": True}, {"header_digest": True, "data_digest": True}]


@pytest.fixture(scope="module")
def disks(tmp_path_factory: pytest.TempPathFactory) -> list[npt.NDArray[np.uint8]]:
    folder = tmp_path_factory.mktemp("disks")
    return [random_file(folder / str(number), SIZE, seed=number) for number in range(len(BLOCKS))]


@pytest.fixture(scope="module")
def machine(disks: list[Any]) -> Iterator[Machine]:
    try:
        started = Machine([(Path(disk.filename), blocks) for disk, blocks in zip(disks, BLOCKS, strict=True)])
    except Unavailable as reason:
        pytest.skip(f"the kernel's NVMe/TCP target cannot be had here: {reason}")
    with started:
        yield started


@pytest.mark.parametrize("digests", DIGESTS, ids=["no digests", "header digests", "both digests"])
@pytest.mark.parametrize("io_uring", [True, False], ids=["io_uring", "epoll"])
def test_every_byte_of_four_subsystems(
    machine: Machine, disks: list[npt.NDArray[np.uint8]], digests: dict[str, bool], io_uring: bool
) -> None:
    with ExitStack() as stack:
        moves = stack.enter_context(requests())
        moved, memory = [], []
        for number in range(len(disks)):
            opened = stack.enter_context(controller(machine, number, io_uring=io_uring, **SLOW, **digests))
            namespace = opened.open_namespace(1)
            assert namespace["block_bytes"] == BLOCKS[number]
            assert namespace["block_bytes"] * namespace["blocks"] == SIZE
            assert opened.identify()["model"] == "Linux"
            parts = [guarded(size) for size in (SIZE, 4096, 65536)]
            offsets = [0, 12288, SIZE - 65536]
            moved += moves.begin("read", namespace, offsets, [one for one, _ in parts])
            memory += [
                (disks[number], offset, one, whole)
                for offset, (one, whole) in zip(offsets, parts, strict=True)
            ]
        assert set(moves.errors(moved)) == {0}
        for disk, offset, one, whole in memory:
            assert np.array_equal(one, disk[offset : offset + one.size])
            assert guards_hold(one, whole)


@pytest.mark.parametrize("digests", DIGESTS, ids=["no digests", "header digests", "both digests"])
def test_what_is_written_lies_on_the_disk(
    machine: Machine, disks: list[npt.NDArray[np.uint8]], digests: dict[str, bool]
) -> None:
    random = np.random.default_rng(len(digests))
    for number in (0, 3):
        expected = disks[number].copy()
        with controller(machine, number, **SLOW, **digests) as opened, requests(piece_bytes=1 << 18) as moves:
            namespace = opened.open_namespace(1)
            for blocks in (1, 4, 5, 33, 171, 256):  # within a capsule, and by R2T
                size = blocks * BLOCKS[number]
                offset = BLOCKS[number] * int(random.integers(0, SIZE // BLOCKS[number] - blocks))
                part = random.bytes(size)
                moves.write(namespace, offset, part)
                expected[offset : offset + size] = np.frombuffer(part, np.uint8)
            opened.flush(1)
            assert moves.read(namespace, 0, SIZE) == expected.tobytes()
        assert np.array_equal(disks[number], expected)
        with connected((machine.address, machine.port), NQN.format(number)) as host:
            found = host.read(1, 0, SIZE, block_bytes=BLOCKS[number], most=65536)
        assert found == expected.tobytes()


def read_everything(port: int, number: int, results: Any) -> None:
    with controller(Machine.Address(port), number, **SLOW) as opened, requests() as moves:
        data = moves.read(opened.open_namespace(1), 0, SIZE)
    results.put((number, hashlib.sha256(data).hexdigest()))


def test_several_processes_at_once(machine: Machine, disks: list[npt.NDArray[np.uint8]]) -> None:
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    numbers = [0, 1, 0, 1]
    processes = [spawn.Process(target=read_everything, args=(machine.port, n, results)) for n in numbers]
    for process in processes:
        process.start()
    found = sorted(results.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    expected = [hashlib.sha256(disks[number].tobytes()).hexdigest() for number in (0, 1)]
    assert found == [(0, expected[0]), (0, expected[0]), (1, expected[1]), (1, expected[1])]


def through(
    machine: Machine, disk: npt.NDArray[np.uint8], disturb: Callable[[], None]
) -> tuple[dict[str, int], str]:
    """Reads a disk twice over while something happens."""
    offsets = list(range(0, SIZE, 16384)) * 2
    memory = [np.zeros(16384, np.uint8) for _ in offsets]
    with controller(machine, 1, **SLOW) as opened, requests() as moves:
        namespace = opened.open_namespace(1)
        moved = moves.begin("read", namespace, offsets, memory)
        while opened.counters()["read_bytes"] < SIZE // 8:
            time.sleep(0.002)
        disturb()
        assert set(moves.errors(moved, 120.0)) == {0}, _native.nvme_error_of(namespace["handle"])
        assert np.array_equal(np.concatenate(memory), np.tile(disk, 2))
        return opened.counters(), opened.last_loss()


def test_a_subsystem_that_goes_and_comes_back(machine: Machine, disks: list[npt.NDArray[np.uint8]]) -> None:
    link = f"/sys/kernel/config/nvmet/ports/1/subsystems/{NQN.format(1)}"

    def away() -> None:
        machine.run(f"rm {link}; sleep 1; ln -s /sys/kernel/config/nvmet/subsystems/{NQN.format(1)} {link}")

    counters, loss = through(machine, disks[1], away)
    assert counters["reconnects"] >= 1
    assert loss != ""


def test_a_machine_that_is_killed_and_started_again(
    machine: Machine, disks: list[npt.NDArray[np.uint8]]
) -> None:
    def restart() -> None:
        machine.kill()
        machine.start()

    counters, loss = through(machine, disks[1], restart)
    assert counters["reconnects"] >= 1
    assert loss != ""


def test_discovery_agrees_with_nvme_cli(machine: Machine) -> None:
    told = json.loads(machine.run("nvme discover -t tcp -a 127.0.0.1 -s 4420 -o json"))["records"]
    found = _native.nvme_discover(
        machine.address, machine.port, host_nqn=HOST_NQN, host_id=HOST_ID, timeout_s=30.0
    )
    assert [entry["subsystem_nqn"] for entry in found] == [entry["subnqn"] for entry in told]
    assert {NQN.format(number) for number in range(len(BLOCKS))} <= {entry["subnqn"] for entry in told}


def test_identity_agrees_with_nvme_cli(machine: Machine) -> None:
    machine.run(f"nvme connect -t tcp -a 127.0.0.1 -s 4420 -n {NQN.format(3)}; sleep 0.5")
    try:
        told = json.loads(machine.run("nvme id-ctrl /dev/nvme0 -o json"))
        space = json.loads(machine.run("nvme id-ns /dev/nvme0n1 -o json"))
        with controller(machine, 3, **SLOW) as opened:
            found = opened.identify()
            assert found["model"] == told["mn"].strip()
            assert found["serial"] == told["sn"].strip()
            assert found["firmware"] == told["fr"].strip()
            assert found["mdts_bytes"] == (4096 << told["mdts"] if told["mdts"] else 0)
            namespace = opened.open_namespace(1)
        assert namespace["blocks"] == space["nsze"]
        assert namespace["block_bytes"] == 1 << space["lbafs"][space["flbas"] & 15]["ds"]
    finally:
        machine.run("nvme disconnect-all; sleep 0.2")


@pytest.mark.parametrize("digests", ["", "--hdr-digest --data-digest"], ids=["no digests", "digests"])
@pytest.mark.parametrize(
    "options",
    [{}, {"c2h_max": 3000, "r2t_max": 5000, "maxh2c": 4096, "jitter_us": 200, "success": 0}],
    ids=["plain", "in pieces"],
)
def test_the_kernels_host_accepts_the_test_target(
    machine: Machine, tmp_path: Path, options: dict[str, int], digests: str
) -> None:
    """The target that injects faults elsewhere is right where none is asked for."""
    content = random_file(tmp_path / "namespace", SIZE, seed=3)
    subsystem = Subsystem(NQN.format(7), [Namespace(1, SIZE, 512, tmp_path / "namespace")])
    with Target([subsystem], options=options) as target:
        at = f"-t tcp -a 10.0.2.2 -s {target.port}"
        try:
            assert NQN.format(7) in machine.run(f"nvme discover {at}")
            machine.run(f"nvme connect {at} -n {NQN.format(7)} {digests}; sleep 0.5")
            summed = machine.run("dd if=/dev/nvme0n1 bs=1M iflag=direct 2>/dev/null | md5sum")
            assert summed.split()[0] == hashlib.md5(content.tobytes()).hexdigest()
            machine.run("dd if=/dev/vdc of=/dev/nvme0n1 bs=64k seek=3 count=50 oflag=direct; sync")
            source = machine.run("dd if=/dev/vdc bs=64k count=50 2>/dev/null | md5sum")
            assert source.split()[0] == hashlib.md5(content[3 << 16 : 53 << 16].tobytes()).hexdigest()
        finally:
            machine.run("nvme disconnect-all; sleep 0.2")
        assert target.violations() == []
