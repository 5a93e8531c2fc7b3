"""The target of these tests does what the specification says, seen by a host that shares no code with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.nvme_host import DISCOVERY, StatusError, connected
from tests.support.nvme_target.process import NQN, Namespace, Subsystem, Target, random_file

SIZE = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "namespace"


@pytest.fixture(params=[{}, {"cpda": 3, "c2h_max": 3000, "r2t_max": 5000, "maxh2c": 4096, "tcp_max": 999}])
def target(request: pytest.FixtureRequest, path: Path) -> Iterator[Target]:
    random_file(path, SIZE)
    one = Subsystem(NQN.format(0), [Namespace(1, SIZE, 512, path), Namespace(7, SIZE, 4096)])
    two = Subsystem(NQN.format(1), [Namespace(3, 1 << 16)])
    with Target([one, two], options=request.param) as running:
        yield running
        assert running.violations() == []


@pytest.mark.parametrize(
    "digests", [{}, {"header_digest": True}, {"header_digest": True, "data_digest": True}]
)
@pytest.mark.parametrize("flow_control", [True, False])
def test_bytes_come_and_go(target: Target, path: Path, digests: dict[str, bool], flow_control: bool) -> None:
    content = np.memmap(path, np.uint8, "r+")
    with connected(
        (target.address, target.port), NQN.format(0), flow_control=flow_control, hpda=4, **digests
    ) as host:
        assert host.namespaces() == [1, 7]
        assert host.namespace(1).blocks * host.namespace(1).block_bytes == SIZE
        assert host.namespace(7).block_bytes == 4096
        for offset, size in ((0, 512), (SIZE - 512, 512), (4096, 65536), (512, 20480)):
            assert host.read(1, offset, size) == content[offset : offset + size].tobytes()
        for offset, size in ((1024, 512), (8192, 8192), (65536, 12288)):  # within a capsule, and by R2T
            data = np.random.default_rng(size).bytes(size)
            host.write(1, offset, data)
            assert content[offset : offset + size].tobytes() == data
        host.flush(1)
        host.keep_alive()
    found = target.stats()
    assert found["in_capsule"] == 2
    assert found["r2ts"] >= 1
    assert found["shutdowns"] == 1
    assert found["abandoned"] == 0


def test_subsystems_are_discovered(target: Target) -> None:
    with connected((target.address, target.port), DISCOVERY) as host:
        assert [nqn for _, _, nqn in host.discover()] == [NQN.format(0), NQN.format(1)]
        assert {service for _, service, _ in host.discover()} == {str(target.port)}


def test_what_is_not_there_is_refused(target: Target) -> None:
    address = (target.address, target.port)
    with pytest.raises(StatusError) as refused, connected(address, NQN.format(9)):
        pass
    assert refused.value.status == 0x182
    target.control(f"allow {NQN.format(1)} nqn.2026-11.test:friend")
    with pytest.raises(StatusError) as denied, connected(address, NQN.format(1)):
        pass
    assert denied.value.status == 0x184
    with connected(address, NQN.format(0)) as host:
        with pytest.raises(StatusError) as beyond:
            host.read(1, SIZE, 512)
        assert beyond.value.status == 0x80
        with pytest.raises(StatusError) as unknown:
            host.read(2, 0, 512)
        assert unknown.value.status == 0x0B


def test_a_host_that_errs_is_reported(path: Path) -> None:
    with Target([Subsystem(NQN.format(0), [Namespace(1, SIZE)])], options={"mdts": 1}) as target:
        with connected((target.address, target.port), NQN.format(0)) as host:
            with pytest.raises(StatusError):
                host.read(1, 0, 16384)
            assert any("MDTS" in text for text in target.violations())
            assert host.io is not None
            host.io.socket.sendall(b"\x63" + bytes(127))
            with pytest.raises((AssertionError, EOFError)):
                host.io.receive()
        assert len(target.violations()) == 2
