"""A target that goes away and comes back costs time and no byte; one that stays away costs a bounded time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from penstock import _native
from tests.support.apart import python
from tests.support.nvme_host import HOST_ID, HOST_NQN
from tests.support.nvme_native import LIMITS, Failed, controller, guarded, guards_hold, requests
from tests.support.nvme_target.process import NQN, Namespace, Subsystem, Target, random_file

SIZE = 4 << 20
PART = 1 << 16
SHORT = {"command_timeout_s": 0.5, "connect_timeout_s": 0.5, "reconnect_timeout_s": 1.0}


@pytest.fixture
def content(tmp_path: Path) -> npt.NDArray[np.uint8]:
    return random_file(tmp_path / "namespace", SIZE)


@pytest.fixture
def target(tmp_path: Path, content: object) -> Iterator[Target]:
    namespace = Namespace(1, SIZE, 512, tmp_path / "namespace", capacity_bytes=2 * SIZE)
    with Target([Subsystem(NQN.format(0), [namespace])]) as running:
        yield running
        assert running.violations() == []


def every_part(
    target: Target, content: npt.NDArray[np.uint8], disturb: object, **wanted: object
) -> tuple[dict[str, int], str]:
    """Reads everything, several times over, while `disturb` is called in the midst of it."""
    offsets = list(range(0, SIZE, 4096)) * 2
    memory = [np.zeros(4096, np.uint8) for _ in offsets]
    target.set(rate=24 << 20)
    with controller(target, **{"reconnect_timeout_s": 20.0, **wanted}) as opened, requests() as moves:
        namespace = opened.open_namespace(1)
        tokens = moves.begin("read", namespace, offsets, memory)
        while opened.counters()["read_bytes"] < SIZE // 8:
            time.sleep(0.005)
        assert callable(disturb)
        disturb()
        assert set(moves.errors(tokens)) == {0}, _native.nvme_error_of(namespace["handle"])
        assert np.array_equal(np.concatenate(memory), np.tile(content, 2))
        return opened.counters(), opened.last_loss()


@pytest.mark.parametrize("io_uring", [True, False], ids=["io_uring", "epoll"])
def test_a_target_that_is_killed_and_comes_back(
    target: Target, content: npt.NDArray[np.uint8], io_uring: bool
) -> None:
    def restart() -> None:
        target.kill()
        time.sleep(0.3)
        target.start()

    counters, loss = every_part(target, content, restart, io_uring=io_uring, queues=2)
    assert counters["reconnects"] == 1
    assert counters["retries"] >= 1
    assert loss != ""


def test_connections_that_are_reset(target: Target, content: npt.NDArray[np.uint8]) -> None:
    counters, _ = every_part(target, content, lambda: target.control("drop_connections"), queues=2)
    assert counters["reconnects"] == 1


def test_a_target_that_is_silent_for_a_while(target: Target, content: npt.NDArray[np.uint8]) -> None:
    def pause() -> None:
        target.freeze()
        time.sleep(1.2)
        target.thaw()

    counters, loss = every_part(target, content, pause, **{**SHORT, "reconnect_timeout_s": 20.0})
    assert counters["reconnects"] >= 1
    assert counters["timeouts"] >= 1
    assert loss != ""


def test_a_target_that_is_busy_for_less_than_the_limit(
    target: Target, content: npt.NDArray[np.uint8]
) -> None:
    def pause() -> None:
        target.freeze()
        time.sleep(0.5)
        target.thaw()

    counters, _ = every_part(target, content, pause)
    assert (counters["reconnects"], counters["timeouts"]) == (0, 0)


@pytest.mark.parametrize("kind", ["silence", "silence_all", "pause", "drop"])
def test_an_answer_that_does_not_come(target: Target, content: npt.NDArray[np.uint8], kind: str) -> None:
    target.fault(kind, "read", after=1)
    with controller(target, **{**SHORT, "reconnect_timeout_s": 10.0}) as opened, requests() as moves:
        namespace = opened.open_namespace(1)
        assert moves.read(namespace, 0, PART) == content[:PART].tobytes()
        assert moves.read(namespace, PART, PART) == content[PART : 2 * PART].tobytes()
        assert opened.counters()["timeouts"] >= 1
        assert "1" in opened.last_loss()


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_a_target_that_stays_away(target: Target, how: str) -> None:
    memory, whole = guarded(PART)
    with controller(target, **SHORT) as opened, requests() as moves:
        namespace = opened.open_namespace(1)
        moves.read(namespace, 0, PART)
        if how == "killed":
            target.kill()
        else:
            target.freeze()
        assert moves.errors(moves.begin("read", namespace, [0], [memory]), 30.0) != [0]
        text = _native.nvme_error_of(namespace["handle"])
        assert str(target.port) in text
        assert NQN.format(0) in text
        assert " s" in text  # how long it was waited for
        assert guards_hold(memory, whole)
        with pytest.raises(Failed):
            moves.read(namespace, 0, PART, 30.0)
        if how == "frozen":
            target.thaw()


def test_one_that_was_given_up_can_come_back(target: Target, content: npt.NDArray[np.uint8]) -> None:
    with controller(target, **SHORT) as opened, requests() as moves:
        namespace = opened.open_namespace(1)
        target.kill()
        with pytest.raises(Failed):
            moves.read(namespace, 0, PART, 30.0)
        target.start()
        deadline_s = time.monotonic() + 30.0
        while True:
            try:
                found = moves.read(namespace, 0, PART)
                break
            except Failed:
                assert time.monotonic() < deadline_s
                time.sleep(0.05)
        assert found == content[:PART].tobytes()


def test_what_is_written_over_a_loss(target: Target, content: npt.NDArray[np.uint8]) -> None:
    parts = [np.frombuffer(np.random.default_rng(n).bytes(PART), np.uint8) for n in range(SIZE // PART)]
    target.set(rate=16 << 20)
    with controller(target, reconnect_timeout_s=20.0) as opened, requests() as moves:
        namespace = opened.open_namespace(1)
        offsets = [number * PART for number in range(len(parts))]
        tokens = moves.begin("write", namespace, offsets, parts)
        for _ in range(3):
            time.sleep(0.05)
            target.control("drop_connections")
        assert set(moves.errors(tokens)) == {0}
        assert np.array_equal(content, np.concatenate(parts))
        assert opened.counters()["reconnects"] >= 1


def test_late_data_touch_nothing(target: Target, content: npt.NDArray[np.uint8]) -> None:
    """A command that timed out has given its memory back."""
    limits = {**SHORT, "reconnect_timeout_s": 0.5}
    memory, whole = guarded(PART)
    with controller(target, **limits) as opened, requests() as moves:
        namespace = opened.open_namespace(1)
        target.set(delay_us=1_000_000)
        errors = moves.errors(moves.begin("read", namespace, [0], [memory]))
        whole[:] = 0xA5
        time.sleep(1.1)
        assert errors != [0]
        assert (whole == 0xA5).all()
        target.set(delay_us=0)
        assert moves.read(namespace, 0, PART) == content[:PART].tobytes()


def test_the_keep_alive_is_lost(target: Target, content: npt.NDArray[np.uint8]) -> None:
    """Without any I/O: the admin queue alone is silent."""
    target.fault("silence", "keep_alive", after=1)
    with controller(target, keep_alive_s=1.0, command_timeout_s=1.0) as opened, requests() as moves:
        namespace = opened.open_namespace(1)
        deadline_s = time.monotonic() + 15
        while opened.counters()["reconnects"] == 0 and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert opened.counters()["reconnects"] == 1
        assert "eep" in opened.last_loss()  # keep-alive
        assert moves.read(namespace, 0, PART) == content[:PART].tobytes()


def test_a_namespace_that_shrank(target: Target, content: npt.NDArray[np.uint8]) -> None:
    with controller(target) as opened, requests() as moves:
        namespace = opened.open_namespace(1)
        target.control(f"resize {NQN.format(0)} 1 {SIZE // 1024}")
        with pytest.raises(Failed):  # before anybody knows, the target refuses
            moves.read(namespace, SIZE - PART, PART)
        target.control("drop_connections")
        with pytest.raises(Failed) as failed:
            for _ in range(3):
                moves.read(namespace, 0, PART)
                time.sleep(0.1)
        assert NQN.format(0) in failed.value.text


def test_a_namespace_that_grew(target: Target, content: npt.NDArray[np.uint8]) -> None:
    with controller(target) as opened, requests() as moves:
        namespace = opened.open_namespace(1)
        target.control(f"resize {NQN.format(0)} 1 {2 * SIZE // 512}")
        target.control("drop_connections")
        assert moves.read(namespace, 0, SIZE) == content.tobytes()


def test_a_namespace_that_is_another(target: Target) -> None:
    with controller(target) as opened, requests() as moves:
        namespace = opened.open_namespace(1)
        moves.read(namespace, 0, PART)
        target.control(f"identity {NQN.format(0)} 1 {'5a' * 16}")
        target.control("drop_connections")
        with pytest.raises(Failed) as failed:
            for _ in range(3):
                moves.read(namespace, 0, PART)
                time.sleep(0.1)
        assert NQN.format(0) in failed.value.text


def test_a_subsystem_that_is_gone(target: Target) -> None:
    with controller(target, **SHORT) as opened, requests() as moves:
        namespace = opened.open_namespace(1)
        target.control(f"hide {NQN.format(0)}")
        target.control("drop_connections")
        with pytest.raises(Failed):
            for _ in range(3):
                moves.read(namespace, 0, PART, 30.0)
                time.sleep(0.1)


def kind_of_failure(address: str, port: int, nqn: str = NQN.format(0)) -> str:
    with pytest.raises(_native.NvmeError) as error:
        _native.NvmeController(address, port, nqn, host_nqn=HOST_NQN, host_id=HOST_ID, **{**LIMITS, **SHORT})
    kind, text = error.value.args
    assert address in text
    assert str(port) in text
    return str(kind)


def test_a_connection_that_cannot_be_made(target: Target) -> None:
    assert kind_of_failure(target.address, target.port, NQN.format(8)) == "not_found"
    target.control(f"allow {NQN.format(0)} nqn.2026-11.test:friend")
    assert kind_of_failure(target.address, target.port) == "denied"
    target.control("listen 0")
    assert kind_of_failure(target.address, target.port) == "refused"
    target.control("listen 1")
    target.freeze()
    assert kind_of_failure(target.address, target.port) == "timeout"
    target.thaw()


def test_closing_does_not_wait_for_a_silent_target(target: Target) -> None:
    opened = _native.NvmeController(
        target.address, target.port, NQN.format(0), host_nqn=HOST_NQN, host_id=HOST_ID, **LIMITS
    )
    namespace = opened.open_namespace(1)
    with requests() as moves:
        target.freeze()
        memory = np.zeros(PART, np.uint8)
        tokens = moves.begin("read", namespace, [0], [memory])
        closing = threading.Thread(target=opened.close, args=(0.5,))
        closing.start()
        closing.join(30.0)
        assert not closing.is_alive()
        assert moves.errors(tokens, 30.0) != [0]
        target.thaw()


def test_a_silent_target_holds_up_no_other(target: Target, content: npt.NDArray[np.uint8]) -> None:
    """However many requests wait for it, and whoever came first."""
    with Target([Subsystem(NQN.format(1), [Namespace(1, SIZE)])]) as other:
        with controller(target) as one, controller(other, 1) as two, requests(depth=32) as moves:
            namespaces = [one.open_namespace(1), two.open_namespace(1)]
            part = np.random.default_rng(0).bytes(SIZE)
            moves.write(namespaces[1], 0, part)
            target.freeze()
            waiting = [np.zeros(4096, np.uint8) for _ in range(200)]
            tokens = moves.begin("read", namespaces[0], range(0, 200 * 4096, 4096), waiting)
            for _ in range(5):
                assert (
                    moves.read(namespaces[1], 0, SIZE) == part
                )  # in four pieces, while none of the others ends
            with pytest.raises(AssertionError):
                moves.errors(tokens, 0.0)
            target.thaw()
            assert set(moves.errors(tokens)) == {0}
            assert np.array_equal(np.concatenate(waiting), content[: 200 * 4096])
        assert other.violations() == []


FORK = """
import os, sys
from tests.support.nvme_native import Failed, controller, requests
from tests.support.nvme_target.kernel.machine import Machine

with controller(Machine.Address(int(sys.argv[1]))) as opened, requests() as moves:
    namespace = opened.open_namespace(1)
    before = moves.read(namespace, 0, 65536)
    child = os.fork()
    if child == 0:
        with requests() as mine:
            try:
                mine.read(namespace, 0, 4096, 20.0)
            except Failed:
                with controller(Machine.Address(int(sys.argv[1]))) as again:
                    assert mine.read(again.open_namespace(1), 0, 65536) == before
                os._exit(0)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert moves.read(namespace, 0, 65536) == before
    assert opened.counters()["reconnects"] == 0
"""


def test_a_forked_process_makes_an_association_of_its_own(target: Target) -> None:
    done = python(FORK, target.port)
    assert done.returncode == 0, done.stderr
    assert target.stats()["connects"] == 2


def test_requests_of_a_target_that_stays_away_end_together(target: Target) -> None:
    """They wait for it once, not a queue's worth after the other."""
    with controller(target, **SHORT) as opened, requests(depth=4) as moves:
        namespace = opened.open_namespace(1)
        moves.read(namespace, 0, PART)
        target.kill()
        memory = [np.zeros(4096, np.uint8) for _ in range(400)]
        tokens = moves.begin("read", namespace, range(0, 400 * 4096, 4096), memory)
        assert 0 not in moves.errors(tokens, 25.0)  # one after the other: 100 s
