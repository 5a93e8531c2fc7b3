"""Whatever a target offers and however it cuts and orders its answers, every byte comes and goes right."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock import _native
from tests.support.nvme_host import HOST_ID, HOST_NQN
from tests.support.nvme_native import LIMITS, Failed, controller, guarded, guards_hold, requests
from tests.support.nvme_target.process import NQN, Namespace, Subsystem, Target, random_file

SIZE = 4 << 20

# How a target may be, and what the host asks of it.
TARGETS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "plain": ({}, {}),
    "epoll": ({}, {"io_uring": False}),
    "no flow control's flag": ({"success": 0}, {}),
    "header digests": ({}, {"header_digest": True}),
    "both digests": ({"c2h_max": 8192}, {"header_digest": True, "data_digest": True}),
    "small transfers": ({"mdts": 1}, {}),
    "a queue of four": ({"mqes": 3}, {}),
    "a queue of two": ({"mqes": 1}, {}),
    "no data in capsules": ({"ioccsz": 64}, {}),
    "data in capsules elsewhere": ({"icdoff": 4}, {}),
    "cut into pieces": ({"c2h_max": 3000, "r2t_max": 5000, "maxh2c": 4096, "cpda": 31}, {}),
    "small segments": ({"tcp_max": 601, "c2h_max": 1236}, {"header_digest": True}),
    "out of order": ({"jitter_us": 300, "c2h_max": 4096}, {}),
    "out of order, with digests": (
        {"jitter_us": 300, "c2h_max": 2048, "cpda": 7},
        {"header_digest": True, "data_digest": True, "queues": 3},
    ),
    "out of order by epoll": ({"jitter_us": 300, "c2h_max": 4096}, {"io_uring": False}),
}


@pytest.fixture
def content(tmp_path: Path) -> npt.NDArray[np.uint8]:
    return random_file(tmp_path / "namespace", SIZE)


def subsystems(path: Path) -> list[Subsystem]:
    return [
        Subsystem(NQN.format(0), [Namespace(1, SIZE, 512, path / "namespace"), Namespace(5, SIZE, 4096)]),
        Subsystem(NQN.format(1), [Namespace(2, SIZE, 512)]),
    ]


@pytest.fixture(params=TARGETS, ids=str)
def case(request: pytest.FixtureRequest, tmp_path: Path, content: object) -> Iterator[tuple[Target, Any]]:
    options, wanted = TARGETS[request.param]
    with Target(subsystems(tmp_path), options=options) as target:
        yield target, wanted
        assert target.violations() == []


@pytest.fixture
def target(tmp_path: Path, content: object) -> Iterator[Target]:
    with Target(subsystems(tmp_path)) as running:
        yield running
        assert running.violations() == []


def test_every_byte_is_right(case: tuple[Target, Any], content: npt.NDArray[np.uint8]) -> None:
    target, wanted = case
    random = np.random.default_rng(5)
    with controller(target, **wanted) as opened, requests(depth=64, piece_bytes=1 << 18) as moves:
        namespace = opened.open_namespace(1)
        assert (namespace["block_bytes"], namespace["blocks"]) == (512, SIZE // 512)
        offsets = [int(block) * 512 for block in random.integers(0, SIZE // 512 - 8, 150)]
        memory = [guarded(4096) for _ in offsets]
        moved = moves.begin("read", namespace, offsets, [one for one, _ in memory])
        large, whole = guarded(SIZE)
        moved += moves.begin("read", namespace, [0], [large])
        assert set(moves.errors(moved)) == {0}
        assert np.array_equal(large, content)
        assert guards_hold(large, whole)
        for offset, (one, around) in zip(offsets, memory, strict=True):
            assert np.array_equal(one, content[offset : offset + 4096])
            assert guards_hold(one, around)
        # What is written at once lies apart: the last quarter, in pieces of all sizes.
        expected, at = content.copy(), SIZE * 3 // 4
        offsets, parts = [], []
        while at < SIZE:
            size = min(512 * int(random.choice([1, 8, 16, 17, 200, 700])), SIZE - at)
            part = np.frombuffer(random.bytes(size), np.uint8)
            expected[at : at + size] = part
            offsets.append(at)
            parts.append(part)
            at += size
        assert set(moves.errors(moves.begin("write", namespace, offsets, parts))) == {0}
        opened.flush(1)
        assert np.array_equal(content, expected)
        found = opened.counters()
        assert found["read_bytes"] >= SIZE
        assert found["write_bytes"] >= SIZE // 4
        assert (found["reconnects"], found["violations"], found["timeouts"]) == (0, 0, 0)
        assert opened.last_loss() == ""
        if wanted.get("io_uring") is False:
            assert found["uses_io_uring"] == 0
    seen = target.stats()
    assert seen["flushes"] == 1
    assert (seen["shutdowns"], seen["abandoned"]) == (1, 0)
    assert seen["term_requests"] == 0


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_offset_and_size(target: Target, content: npt.NDArray[np.uint8], data: st.DataObject) -> None:
    """Of reads; writes are of whole blocks."""
    with controller(target) as opened, requests(piece_bytes=1 << 16, slot_bytes=1 << 16) as moves:
        namespace = opened.open_namespace(data.draw(st.sampled_from([1, 5])))
        other = opened.open_namespace(1)
        model = np.frombuffer(moves.read(namespace, 0, SIZE), np.uint8).copy()
        for _ in range(data.draw(st.integers(1, 8))):
            writes = data.draw(st.booleans())
            unit = namespace["block_bytes"] if writes else data.draw(st.sampled_from([1, 512]))
            offset = unit * data.draw(st.integers(0, SIZE // unit - 1))
            size = unit * data.draw(st.integers(1, min(300_000, SIZE - offset) // unit or 1))
            size = min(size, SIZE - offset)
            if writes:
                part = np.random.default_rng(offset).bytes(size)
                moves.write(namespace, offset, part)
                model[offset : offset + size] = np.frombuffer(part, np.uint8)
            else:
                assert moves.read(namespace, offset, size) == model[offset : offset + size].tobytes()
        assert moves.read(namespace, 0, SIZE) == model.tobytes()
        assert moves.read(other, 0, SIZE) == content.tobytes()


@pytest.mark.parametrize(("offset", "size"), [(100, 412), (0, 100), (512, 1000), (100, 2000)])
def test_a_write_of_a_part_of_a_block_is_refused(
    target: Target, content: npt.NDArray[np.uint8], offset: int, size: int
) -> None:
    before = content.copy()
    with controller(target) as opened, requests() as moves:
        with pytest.raises(Failed) as refused:
            moves.write(opened.open_namespace(1), offset, bytes(size))
        assert refused.value.number == errno.EINVAL
        assert "block" in refused.value.text
    outside = np.ones(SIZE, bool)
    outside[offset : offset + size] = False
    assert np.array_equal(content[outside], before[outside])


def test_nothing_is_beyond_the_end(target: Target) -> None:
    with controller(target) as opened, requests() as moves:
        namespace = opened.open_namespace(1)
        for offset, size in ((SIZE, 512), (SIZE - 512, 1024), (1 << 62, 512), ((1 << 63) - 512, 512)):
            with pytest.raises(Failed):
                moves.read(namespace, offset, size)
            with pytest.raises(Failed):
                moves.write(namespace, offset, bytes(size))
        assert len(moves.read(namespace, SIZE - 512, 512)) == 512


def test_commands_fill_the_queue_and_no_more(target: Target, content: npt.NDArray[np.uint8]) -> None:
    with controller(target, depth=48) as opened, requests(depth=128) as moves:
        namespace = opened.open_namespace(1)
        target.set(delay_us=2000)
        memory = [np.zeros(4096, np.uint8) for _ in range(1000)]
        offsets = [number * 4096 for number in range(1000)]
        assert set(moves.errors(moves.begin("read", namespace, offsets, memory))) == {0}
        assert np.array_equal(np.concatenate(memory), content[: 1000 * 4096])
    assert 32 <= target.stats()["max_in_flight"] <= 48


def test_queues_share_an_association(target: Target, content: npt.NDArray[np.uint8]) -> None:
    with ExitStack() as stack:
        opened = stack.enter_context(controller(target, queues=3))
        namespace = opened.open_namespace(1)
        moves = [stack.enter_context(requests()) for _ in range(3)]
        memory = [np.zeros(SIZE, np.uint8) for _ in moves]
        moved = [one.begin("read", namespace, [0], [data]) for one, data in zip(moves, memory, strict=True)]
        for one, mine, data in zip(moves, moved, memory, strict=True):
            assert one.errors(mine) == [0]
            assert np.array_equal(data, content)
    seen = target.stats()
    assert seen["connects"] == 1
    assert 3 <= seen["io_connects"] <= 9  # each of the users has three, where it stays for long enough
    assert (seen["shutdowns"], seen["abandoned"]) == (1, 0)


def test_more_users_than_queues(target: Target, content: npt.NDArray[np.uint8]) -> None:
    target.set(queues=1)
    with ExitStack() as stack:
        opened = stack.enter_context(controller(target, queues=4))
        namespace = opened.open_namespace(1)
        moves = [stack.enter_context(requests()) for _ in range(3)]
        memory = [np.zeros(1 << 20, np.uint8) for _ in moves]
        moved = [one.begin("read", namespace, [0], [data]) for one, data in zip(moves, memory, strict=True)]
        for one, mine, data in zip(moves, moved, memory, strict=True):
            assert one.errors(mine) == [0]
            assert np.array_equal(data, content[: 1 << 20])
    assert target.stats()["io_connects"] == 1


def test_two_controllers_of_a_subsystem_are_one_association(target: Target) -> None:
    with controller(target) as first:
        namespace = first.open_namespace(1)
        with controller(target) as second:
            assert second.namespaces() == [1, 5]
        with requests() as moves:  # the first goes on
            assert len(moves.read(namespace, 0, 4096)) == 4096
    assert target.stats()["connects"] == 1


def test_two_subsystems_at_once(target: Target, content: npt.NDArray[np.uint8]) -> None:
    with controller(target, 0) as first, controller(target, 1) as second, requests() as moves:
        namespaces = [first.open_namespace(1), second.open_namespace(2)]
        assert namespaces[0]["handle"] != namespaces[1]["handle"]
        part = np.random.default_rng(1).bytes(1 << 20)
        moves.write(namespaces[1], 4096, part)
        assert moves.read(namespaces[0], 0, SIZE) == content.tobytes()
        assert moves.read(namespaces[1], 4096, 1 << 20) == part


def test_files_and_namespaces_in_one(target: Target, content: npt.NDArray[np.uint8], tmp_path: Path) -> None:
    other = random_file(tmp_path / "file", 1 << 20, seed=9)
    with controller(target) as opened, requests() as moves, open(tmp_path / "file", "rb") as file:
        namespace = opened.open_namespace(1)
        memory = [np.zeros(4096, np.uint8) for _ in range(200)]
        moved = []
        for number, one in enumerate(memory):
            offset = number * 4096
            if number % 2:
                moved += moves.begin("read", namespace, [offset], [one])
            else:
                there = {"descriptor": file.fileno(), "handle": -1, "block_bytes": 512}
                moved += moves.begin("read", there, [offset], [one], "buffered")
        assert set(moves.errors(moved)) == {0}
        for number, one in enumerate(memory):
            source = content if number % 2 else other
            assert np.array_equal(one, source[number * 4096 : number * 4096 + 4096])


def test_what_a_controller_says_of_itself(target: Target) -> None:
    target.set(mdts=5)
    with controller(target, header_digest=True) as opened:
        found = opened.identify()
        assert found["model"] == "penstock test target"
        assert found["mdts_bytes"] == 128 << 10
        assert found["io_capsule_bytes"] == 8192
        assert (found["header_digest"], found["data_digest"]) == (True, False)
        assert found["volatile_write_cache"] is True
        assert opened.namespaces() == [1, 5]
        one, five = opened.open_namespace(1), opened.open_namespace(5)
        assert (five["block_bytes"], five["blocks"]) == (4096, SIZE // 4096)
        assert len(one["nguid"]) == 16
        assert one["nguid"] != five["nguid"]
        with pytest.raises(_native.NvmeError) as unknown:
            opened.open_namespace(3)
        assert unknown.value.args[0] == "namespace"


@pytest.mark.parametrize("header", [0, 1, 2])
@pytest.mark.parametrize("data", [0, 1, 2])
@pytest.mark.parametrize("asked", [False, True])
def test_digests_are_as_agreed(
    target: Target, content: npt.NDArray[np.uint8], header: int, data: int, asked: bool
) -> None:
    """The target refuses them (0), leaves them to the host (1), or wants them (2): never silently without."""
    target.set(hdgst=header, ddgst=data)
    agreed = [rule == 2 or (rule == 1 and asked) for rule in (header, data)]
    try:
        with controller(target, header_digest=asked, data_digest=asked) as opened, requests() as moves:
            assert moves.read(opened.open_namespace(1), 0, SIZE) == content.tobytes()
            found = opened.identify()
            assert [found["header_digest"], found["data_digest"]] == agreed
        assert (target.stats()["header_digests"] > 0) == agreed[0]
    except _native.NvmeError as error:
        assert [asked, asked] != agreed
        assert "digest" in error.args[1]


def test_discovery(target: Target) -> None:
    asked = {"host_nqn": HOST_NQN, "host_id": HOST_ID, "timeout_s": 5.0}
    found = _native.nvme_discover(target.address, target.port, **asked)
    assert [entry["subsystem_nqn"] for entry in found] == [NQN.format(0), NQN.format(1)]
    target.set(gen_bumps=3)  # the log changes while it is read
    assert len(_native.nvme_discover(target.address, target.port, **asked)) == 2
    seen = target.stats()
    assert (seen["shutdowns"], seen["abandoned"]) == (2, 0)


def test_an_idle_association_stays_alive_and_costs_nothing(target: Target) -> None:
    with controller(target, keep_alive_s=1.0) as opened, requests() as moves:
        namespace = opened.open_namespace(1)
        moves.read(namespace, 0, 4096)
        before_s = time.process_time()
        time.sleep(1.3)
        used_s = time.process_time() - before_s
        moves.read(namespace, 0, 4096)
        assert opened.counters()["reconnects"] == 0
    assert target.stats()["keep_alives"] >= 2
    assert used_s < 0.2


def test_a_closed_controller(target: Target) -> None:
    opened = _native.NvmeController(
        target.address, target.port, NQN.format(0), host_nqn=HOST_NQN, host_id=HOST_ID, **LIMITS
    )
    namespace = opened.open_namespace(1)
    with requests() as moves:
        moves.read(namespace, 0, 4096)
        opened.close()
        opened.close()
        memory = np.zeros(4096, np.uint8)
        assert moves.errors(moves.begin("read", namespace, [0], [memory])) != [0]
    with pytest.raises(_native.NvmeError) as closed:
        opened.namespaces()
    assert closed.value.args[0] == "closed"
    assert target.stats()["shutdowns"] == 1
