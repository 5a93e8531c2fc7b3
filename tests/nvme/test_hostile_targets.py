"""Whatever a target sends, only the memory of a read changes, the error says what it was, and all ends."""

from __future__ import annotations

import errno
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from penstock import _native
from tests.support.nvme_host import HOST_ID, HOST_NQN
from tests.support.nvme_native import Failed, controller, guarded, guards_hold, requests
from tests.support.nvme_target.process import DISCOVERY, NQN, Namespace, Subsystem, Target, random_file

SIZE = 4 << 20
PART = 1 << 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


@pytest.fixture(scope="module")
def content(folder: Path) -> npt.NDArray[np.uint8]:
    return random_file(folder / "namespace", SIZE)


@pytest.fixture(scope="module")
def running(folder: Path, content: object) -> Iterator[Target]:
    with Target([Subsystem(NQN.format(0), [Namespace(1, SIZE, 512, folder / "namespace")])]) as target:
        yield target
        assert target.violations() == []


@pytest.fixture
def target(running: Target) -> Iterator[Target]:
    yield running
    running.clear()
    running.set(
        fuzz_ppm=0,
        auth=0,
        ready_polls=0,
        shutdown_polls=0,
        success=1,
        hdgst=1,
        ddgst=1,
        ioccsz=8192 + 64,
        queues=16,
    )


# Of a read of 64 KiB: what goes wrong, its particulars, and what the host asked for.
READS: dict[str, tuple[str, dict[str, int | str], dict[str, Any]]] = {
    "data beyond the command": ("c2h_beyond", {}, {}),
    "data far beyond the command": ("c2h_beyond", {"size": 65536}, {}),
    "one PDU with too much": ("c2h_long", {"size": 4}, {}),
    "one PDU with much too much": ("c2h_long", {"size": 65536}, {}),
    "an offset beyond": ("c2h_offset", {"value": 65536}, {}),
    "an offset within": ("c2h_offset", {"value": 512}, {}),
    "an offset that wraps": ("c2h_offset", {"value": 0xFFFFFE00}, {}),
    "too little data": ("c2h_short", {}, {}),
    "too little data, and success": ("c2h_short_success", {}, {}),
    "no data": ("c2h_none", {}, {}),
    "data of no bytes": ("c2h_zero", {}, {}),
    "data out of order": ("c2h_order", {}, {}),
    "data twice": ("c2h_twice", {}, {}),
    "data with a gap": ("c2h_gap", {}, {}),
    "data for nobody": ("c2h_wrong_cid", {"value": 0x7000}, {}),
    "data after the end": ("c2h_after", {}, {}),
    "success before the last": ("c2h_success_only", {}, {}),
    "completed twice": ("duplicate", {}, {}),
    "completion of nobody": ("wrong_cid", {"value": 0x7000}, {}),
    "R2T for a read": ("r2t_for_read", {}, {}),
    "a bad header digest": ("bad_header_digest", {}, {"header_digest": True}),
    "a bad data digest": ("bad_data_digest", {}, {"data_digest": True}),
    "no header digest flag": ("patch_c2h", {"value": 1, "hex": "04"}, {"header_digest": True}),
    "no data digest flag": ("patch_c2h", {"value": 1, "hex": "04"}, {"data_digest": True}),
    "a digest that was not agreed": ("patch_c2h", {"value": 1, "hex": "05"}, {}),
    "an unknown PDU": ("patch_c2h", {"value": 0, "hex": "0b"}, {}),
    "a PDU of hosts": ("patch_c2h", {"value": 0, "hex": "04"}, {}),
    "a second ICResp": ("patch_rsp", {"value": 0, "hex": "01"}, {}),
    "a header of no bytes": ("patch_c2h", {"value": 2, "hex": "00"}, {}),
    "a long header": ("patch_c2h", {"value": 2, "hex": "ff"}, {}),
    "data before the header ends": ("patch_c2h", {"value": 3, "hex": "08"}, {}),
    "data far behind the header": ("patch_c2h", {"value": 3, "hex": "fc"}, {}),
    "a PDU of no bytes": ("patch_c2h", {"value": 4, "hex": "00000000"}, {}),
    "a PDU of 4 GiB": ("patch_c2h", {"value": 4, "hex": "ffffffff"}, {}),
    "a response of 4 GiB": ("patch_rsp", {"value": 4, "hex": "ffffffff"}, {}),
    "a length beyond the PDU": ("patch_c2h", {"value": 16, "hex": "ffffff7f"}, {}),
    "garbage": ("garbage", {"size": 4096}, {}),
    "garbage with digests": ("garbage", {"size": 4096}, {"header_digest": True, "data_digest": True}),
}


def read_past(
    target: Target, content: npt.NDArray[np.uint8], wanted: dict[str, Any]
) -> tuple[dict[str, int], str]:
    """A read that meets the fault must end right on a later try. Counters, and what was lost."""
    memory, whole = guarded(PART)
    others = [guarded(PART) for _ in range(3)]
    with controller(target, **wanted) as opened, requests() as moves:
        namespace = opened.open_namespace(1)
        moved = moves.begin("read", namespace, [PART], [memory])
        moved += moves.begin("read", namespace, [2 * PART] * 3, [one for one, _ in others])
        assert moves.errors(moved) == [0] * 4, _native.nvme_error_of(namespace["handle"])
        assert np.array_equal(memory, content[PART : 2 * PART])
        for one, around in others:
            assert np.array_equal(one, content[2 * PART : 3 * PART])
            assert guards_hold(one, around)
        assert guards_hold(memory, whole)
        assert target.armed() == 0
        return opened.counters(), opened.last_loss()


@pytest.mark.parametrize("io_uring", [True, False], ids=["io_uring", "epoll"])
@pytest.mark.parametrize("name", READS)
def test_a_violation_ends_the_association_and_is_tried_again(
    target: Target, content: npt.NDArray[np.uint8], name: str, io_uring: bool
) -> None:
    kind, fields, wanted = READS[name]
    target.set(success=kind != "patch_rsp")  # else no response is sent
    target.fault(kind, "read", **fields)
    counters, loss = read_past(target, content, {"io_uring": io_uring, "depth": 16, **wanted})
    assert counters["violations"] == 1
    assert counters["reconnects"] == 1
    assert loss != ""
    assert not np.any(np.frombuffer(loss.encode("utf-8"), np.uint8) < 32)


WRITES: dict[str, tuple[str, dict[str, int | str]]] = {
    "R2T beyond": ("r2t_beyond", {}),
    "R2T for 4 GiB": ("r2t_beyond", {"size": 0xFFFEFFFF}),
    "R2T at an offset": ("r2t_offset", {"value": 512}),
    "R2T at an offset that wraps": ("r2t_offset", {"value": 0xFFFFFE00}),
    "R2T of no bytes": ("r2t_zero", {}),
    "two R2T at once": ("r2t_twice", {}),
    "R2T for nobody": ("r2t_wrong_cid", {"value": 0x7000}),
    "R2T again": ("r2t_again", {}),
    "data for a write": ("c2h_for_write", {}),
    "success before the data": ("write_early", {}),
    "completed twice": ("duplicate", {}),
    "an R2T with flags of its own": ("patch_r2t", {"value": 1, "hex": "f0"}),
    "an R2T with data": ("patch_r2t", {"value": 4, "hex": "40000000"}),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_violation_in_a_write(target: Target, content: npt.NDArray[np.uint8], name: str) -> None:
    kind, fields = WRITES[name]
    target.fault(kind, "write", **fields)
    part = np.random.default_rng(len(name)).bytes(PART)
    with controller(target) as opened, requests() as moves:
        namespace = opened.open_namespace(1)
        moves.write(namespace, 3 * PART, part)
        assert content[3 * PART : 4 * PART].tobytes() == part
        assert opened.counters()["violations"] == 1
        assert target.armed() == 0


@pytest.mark.parametrize("kind", ["c2h_beyond", "c2h_none", "wrong_cid", "reset", "close", "garbage"])
def test_a_target_that_always_errs_is_given_up(target: Target, kind: str) -> None:
    target.fault(kind, "read", count=-1, value=0x7000, size=4096)
    memory, whole = guarded(PART)
    with controller(target) as opened, requests() as moves:
        namespace = opened.open_namespace(1)
        assert moves.errors(moves.begin("read", namespace, [0], [memory])) != [0]
        text = _native.nvme_error_of(namespace["handle"])
        assert str(target.port) in text
        assert NQN.format(0) in text
        assert guards_hold(memory, whole)
        assert 1 <= opened.counters()["retries"] <= 5


@pytest.mark.parametrize(
    ("status", "retried"),
    [(0x4281, False), (0x4080, False), (0x4002, False), (0x0006, True)],
    ids=[
        "unrecovered read error",
        "LBA out of range",
        "invalid field",
        "internal error that may be tried again",
    ],
)
def test_a_command_that_fails(
    target: Target, content: npt.NDArray[np.uint8], status: int, retried: bool
) -> None:
    """Its status stands in the error, and nothing else is lost."""
    target.fault("status", "read", value=status)
    with controller(target) as opened, requests() as moves:
        namespace = opened.open_namespace(1)
        if retried:
            assert moves.read(namespace, 0, 4096) == content[:4096].tobytes()
        else:
            with pytest.raises(Failed) as failed:
                moves.read(namespace, 0, 4096)
            assert NQN.format(0) in failed.value.text
        assert moves.read(namespace, 512, 4096) == content[512:4608].tobytes()
        assert opened.counters()["reconnects"] == 0


@pytest.mark.parametrize("delays", [(0, 0, 0), (1, 0, 3)], ids=["no delays", "delays"])
def test_a_retry_waits_as_long_as_the_controller_says(
    target: Target, content: npt.NDArray[np.uint8], delays: tuple[int, int, int]
) -> None:
    """The target checks that nothing comes before. Without delays, bits that name one mean nothing."""
    target.patch("identify1", 128, struct.pack("<3H", *delays))
    for delay_ms, which in ((300, 3), (0, 2), (100, 1)):
        target.fault("status", "read", value=0x0006 | which << 11, size=delay_ms)
    target.fault("status", "flush", value=0x0006 | 1 << 11)
    with controller(target) as opened, requests() as moves:
        namespace = opened.open_namespace(1)
        begun = target.stats()["reads"]
        assert moves.read(namespace, 0, 4096) == content[:4096].tobytes()
        assert target.stats()["reads"] == begun + 1
        opened.flush(1)
        counters = opened.counters()
        assert counters["retries"] == 4 and counters["reconnects"] == 0
        assert target.armed() == 0
    assert target.violations() == []


def test_closing_ends_a_wait_for_a_retry(target: Target) -> None:
    """A minute, which the controller asks for, is not waited for."""
    target.patch("identify1", 128, struct.pack("<3H", 600, 0, 0))
    target.fault("status", "read", count=-1, value=0x0006 | 1 << 11, size=60_000)
    memory, _ = guarded(PART)
    with requests() as moves:
        with controller(target) as opened:
            namespace = opened.open_namespace(1)
            moved = moves.begin("read", namespace, [0], [memory])
            while opened.counters()["retries"] == 0:
                time.sleep(0.001)
        assert moves.errors(moved) == [errno.ESHUTDOWN]


def test_an_error_after_half_of_the_data(target: Target, content: npt.NDArray[np.uint8]) -> None:
    target.fault("c2h_status", "read", value=0x4281)
    with controller(target) as opened, requests() as moves:
        namespace = opened.open_namespace(1)
        with pytest.raises(Failed):
            moves.read(namespace, 0, PART)
        assert moves.read(namespace, 0, PART) == content[:PART].tobytes()
        assert opened.counters()["violations"] == 0


@pytest.mark.parametrize("size", [0, 24, 128])
def test_a_target_that_gives_notice(target: Target, content: npt.NDArray[np.uint8], size: int) -> None:
    target.fault("term", "read", value=5, size=size)
    counters, loss = read_past(target, content, {})
    assert counters["reconnects"] == 1
    assert loss != ""


def test_a_notice_that_is_too_long(target: Target, content: npt.NDArray[np.uint8]) -> None:
    target.fault("term_kept", "read", value=5, size=5000)
    counters, loss = read_past(target, content, {})
    assert counters["reconnects"] == 1
    assert loss != ""


@pytest.mark.parametrize("kind", ["reset", "close", "truncate"])
def test_a_connection_that_ends(target: Target, content: npt.NDArray[np.uint8], kind: str) -> None:
    target.fault(kind, "read")
    counters, loss = read_past(target, content, {})
    assert counters["reconnects"] == 1
    assert counters["violations"] == 0
    assert loss != ""


def refused(target: Target, nqn: str = NQN.format(0), **wanted: Any) -> tuple[str, str]:
    limits = {"connect_timeout_s": 3.0, "reconnect_timeout_s": 1.0, **wanted}
    with pytest.raises(_native.NvmeError) as error:
        _native.NvmeController(
            target.address, target.port, nqn, host_nqn=HOST_NQN, host_id=HOST_ID, **limits
        ).open_namespace(1)
    kind, text = error.value.args
    assert str(target.port) in text
    return kind, text


# What is changed in which answer, and the kinds of error it may end in.
BAD_ANSWERS: dict[str, tuple[str, int, bytes, set[str]]] = {
    "another version": ("icresp", 8, b"\1\0", {"protocol"}),
    "another PDU": ("icresp", 0, b"\5", {"protocol"}),
    "a short ICResp": ("icresp", 4, b"\x08\0\0\0", {"protocol"}),
    "a header of another length": ("icresp", 2, b"\x18", {"protocol"}),
    "an alignment of kilobytes": ("icresp", 10, b"\xff", {"protocol"}),
    "no data from the host": ("icresp", 12, bytes(4), {"protocol"}),
    "three bytes of data": ("icresp", 12, b"\3\0\0\0", {"protocol"}),
    "no queue entries": ("property0", 0, b"\0\0", {"protocol", "not_supported"}),
    "unknown digests": ("icresp", 11, b"\xf0", {"protocol"}),
    "capsules that hold no command": ("identify1", 1792, bytes(4), {"protocol", "not_supported"}),
    "responses that hold nothing": ("identify1", 1796, bytes(4), {"protocol", "not_supported"}),
    "the identifier 0xffff": ("connect", 0, b"\xff\xff", {"protocol"}),
    "another subsystem": ("identify1", 768, b"nqn.2026-11.test:other\0", {"protocol"}),
    "no NVM commands": ("property0", 4, b"\0\0", {"protocol", "not_supported"}),
    "a fatal status": ("property28", 0, b"\2", {"protocol", "timeout", "lost"}),
    "a discovery controller": ("identify1", 111, b"\2", {"protocol", "not_supported"}),
    "blocks of 2^40 bytes": ("identify0", 130, b"\x28", {"protocol", "not_supported"}),
    "blocks of 2^255 bytes": ("identify0", 130, b"\xff", {"protocol", "not_supported"}),
    "blocks of 8 bytes": ("identify0", 130, b"\3", {"protocol", "not_supported"}),
    "a format that is not there": ("identify0", 26, b"\x0f", {"protocol", "not_supported"}),
    "metadata": ("identify0", 128, b"\x08\0", {"not_supported"}),
    "protection": ("identify0", 29, b"\1", {"not_supported"}),
    "2^64 blocks": ("identify0", 0, b"\xff" * 8, {"protocol", "not_supported", "namespace"}),
    "more bytes than 2^63": ("identify0", 0, struct.pack("<Q", 1 << 58), {"protocol", "not_supported"}),
    "no blocks": ("identify0", 0, bytes(8), {"namespace", "protocol"}),
}


@pytest.mark.parametrize("name", BAD_ANSWERS)
def test_an_answer_that_cannot_be(target: Target, name: str) -> None:
    what, offset, data, kinds = BAD_ANSWERS[name]
    target.patch(what, offset, data)
    kind, text = refused(target)
    assert kind in kinds, text


# Odd, but right: data at most as large as the least offered.
ODD_ANSWERS: dict[str, tuple[str, int, bytes]] = {
    "MDTS beyond all memory": ("identify1", 77, b"\xff"),
    "MDTS of 2^43 bytes": ("identify1", 77, b"\x1f"),
    "queues of 65536": ("property0", 0, b"\xff\xff"),
    "a model that is no text": ("identify1", 24, b"\xff\xfe\0\1"),
    "capsules of 64 GiB": ("identify1", 1792, b"\xff" * 4),
    "time to be ready": ("property0", 3, b"\xff"),
}


@pytest.mark.parametrize("name", ODD_ANSWERS)
def test_an_answer_that_is_odd(target: Target, content: npt.NDArray[np.uint8], name: str) -> None:
    target.patch(*ODD_ANSWERS[name])
    with controller(target) as opened, requests() as moves:
        assert isinstance(opened.identify()["model"], str)
        namespace = opened.open_namespace(1)
        assert moves.read(namespace, 0, SIZE) == content.tobytes()


@pytest.mark.parametrize("kind", ["garbage", "close", "reset", "silence", "truncate", "twice"])
def test_a_connection_that_is_not_initialized(target: Target, kind: str) -> None:
    target.fault(kind, "ic", size=4096, value=100, count=-1)
    found, text = refused(target, connect_timeout_s=0.3 if kind in {"silence", "twice"} else 3.0)
    assert found in {"protocol", "lost", "timeout", "refused"}, text


@pytest.mark.parametrize("operation", ["connect", "property_get", "identify", "set_features"])
@pytest.mark.parametrize("kind", ["silence", "wrong_cid", "reset", "drop", "garbage"])
def test_an_association_that_is_not_made(target: Target, operation: str, kind: str) -> None:
    target.fault(kind, operation, size=4096, value=0x7000, count=-1)
    found, text = refused(target, connect_timeout_s=0.3 if kind in {"silence", "drop"} else 3.0)
    expected = {"timeout"} if kind in {"silence", "drop"} else {"protocol", "lost"}
    assert found in expected, text


def test_data_that_fill_no_page(target: Target) -> None:
    """Identify's data end early, come twice, come for nobody."""
    for patched in ("patch_c2h",):
        for offset, data in ((16, "00080000"), (12, "00100000"), (8, "0070")):
            target.fault(patched, "identify", value=offset, hex=data, count=-1)
            assert refused(target)[0] in {"protocol", "lost"}
            target.clear()


@pytest.mark.parametrize(
    ("bits", "kind", "named"),
    [(1, "unauthenticated", "authentication"), (2, "not_supported", "TLS"), (3, "not_supported", "TLS")],
)
def test_what_a_target_asks_for_is_named(target: Target, bits: int, kind: str, named: str) -> None:
    target.set(auth=bits)
    found, text = refused(target)
    assert found == kind
    assert named in text


def test_a_controller_that_is_never_ready(target: Target) -> None:
    target.set(ready_polls=-1)
    target.patch("property0", 3, b"\2")  # it says that a second suffices
    kind, text = refused(target, connect_timeout_s=0.5)
    assert kind == "timeout", text


def test_a_controller_that_takes_its_time(target: Target) -> None:
    target.set(ready_polls=20, shutdown_polls=5)
    with controller(target) as opened:
        assert opened.namespaces() == [1]


@pytest.mark.parametrize(
    ("offset", "data"),
    [
        (0, struct.pack("<1024I", *([1] * 1024))),
        (0, struct.pack("<1024I", *range(1, 1025))),
        (0, b"\xff" * 4096),
    ],
    ids=["the same for ever", "more than there are", "the last number"],
)
def test_a_list_of_namespaces_that_does_not_end(target: Target, offset: int, data: bytes) -> None:
    target.patch("identify2", offset, data)
    with controller(target) as opened:
        try:
            assert len(opened.namespaces()) <= 1 << 20
        except _native.NvmeError as error:
            assert error.args[0] in {"protocol", "not_supported"}


@pytest.mark.parametrize(
    ("offset", "data"),
    [
        (8, b"\xff" * 8),
        (8, struct.pack("<Q", 1 << 40)),
        (16, b"\7\0"),
        (1024 + 256, b"n" * 256),
        (1024 + 32, b"\xff" * 32),
        (1024, b"\xff" * 4),
    ],
    ids=["2^64 records", "2^40 records", "another format", "an endless name", "no text", "unknown numbers"],
)
def test_a_discovery_log_that_cannot_be(target: Target, offset: int, data: bytes) -> None:
    target.patch("log112", offset, data)
    try:
        found = _native.nvme_discover(
            target.address, target.port, host_nqn=HOST_NQN, host_id=HOST_ID, timeout_s=3.0
        )
        assert len(found) <= 1
    except _native.NvmeError as error:
        assert error.args[0] in {"protocol", "not_supported"}


def test_a_log_that_always_changes(target: Target) -> None:
    target.set(gen_bumps=1_000_000)
    with pytest.raises(_native.NvmeError):
        _native.nvme_discover(target.address, target.port, host_nqn=HOST_NQN, host_id=HOST_ID, timeout_s=0.4)
    target.set(gen_bumps=0)


def test_discovery_is_no_subsystem(target: Target) -> None:
    assert refused(target, DISCOVERY)[0] in {"namespace", "not_supported", "protocol"}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("digests", [False, True])
def test_headers_with_bytes_changed_at_random(
    target: Target, content: npt.NDArray[np.uint8], seed: int, digests: bool
) -> None:
    """Right bytes or an error, all within their memory, and none too late."""
    limits = {"command_timeout_s": 0.5, "reconnect_timeout_s": 5.0, "connect_timeout_s": 1.0}
    target.set(seed=seed)
    memory = [guarded(16384) for _ in range(40)]
    offsets = [number * 16384 for number in range(40)]
    with (
        controller(target, header_digest=digests, io_uring=seed % 2 == 0, **limits) as opened,
        requests(depth=8, threads=1) as moves,
    ):
        namespace = opened.open_namespace(1)
        target.set(fuzz_ppm=20_000)
        errors = moves.errors(moves.begin("read", namespace, offsets, [one for one, _ in memory]))
        target.set(fuzz_ppm=0)
        for error, offset, (one, whole) in zip(errors, offsets, memory, strict=True):
            assert guards_hold(one, whole)
            if error == 0:
                assert np.array_equal(one, content[offset : offset + 16384])
