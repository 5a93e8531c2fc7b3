"""DH-HMAC-CHAP: who does not show the key gets nothing, host or target, and no text shows a key.

The other end is written in Python, with hashlib's hashes; both ends of penstock's own meet in the last tests.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import _native
from penstock.errors import InvalidArgument, SampleError
from penstock.samples import discover, mount, serve
from penstock.samples.remote.serving import Server
from penstock.storage.nvme.keys import Keys, keys_for
from tests.support.nvme_chap import (
    BITS,
    CHALLENGE,
    CHAP,
    COMMON,
    FAILURE1,
    FAILURE2,
    HASHES,
    RECEIVE,
    SEND,
    SUCCESS1,
    ControllerEnd,
    HostEnd,
    Key,
    negotiation,
    transfer,
)
from tests.support.nvme_host import DISCOVERY, HOST_ID, HOST_NQN, Host, Queue, StatusError
from tests.support.sample_stores import epoch, some_samples
from tests.support.stores import write_store

NQN = "nqn.2026-11.test:s0"
SAMPLES = some_samples(40, seed=5)
UNAUTHENTICATED, INVALID_FIELD, SEQUENCE = 0x191, 0x02, 0x0C
HOST_KEY, CONTROLLER_KEY = Key(bytes(range(32)), 1), Key(bytes(range(100, 164)), 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "a.store"
    write_store(folder, SAMPLES)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    """It has both keys."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_NVME_KEY", f"{HOST_KEY} {CONTROLLER_KEY}")
        with serve(folder, "127.0.0.1:0") as server:
            yield server


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def use(*keys: object) -> None:
        monkeypatch.setenv("PENSTOCK_NVME_KEY", " ".join(map(str, keys)))

    return use


def nqn_of(server: Server) -> str:
    return server.url.rpartition("/")[2].partition("?")[0]


def connected(server: Server) -> Queue:
    queue = Queue(tuple(server.portal), nqn_of(server), 0, 32, kato_ms=60_000)
    assert queue.authentication == 1
    return queue


def end_of(server: Server, queue: Queue, key: Key = HOST_KEY, **options: Any) -> HostEnd:
    return HostEnd(queue, HOST_NQN, nqn_of(server), key, **options)


# -- A target, and hosts that know the key or do not


@pytest.mark.parametrize("hash_id", HASHES)
@pytest.mark.parametrize("group", [0, 1, 2])
@pytest.mark.parametrize("controller", [None, CONTROLLER_KEY], ids=["one way", "both ways"])
def test_hosts_that_know_the_key_are_let_in(
    server: Server, hash_id: int, group: int, controller: Key | None
) -> None:
    queue = connected(server)
    end_of(server, queue, controller=controller, hash_id=hash_id, group=group).authenticate()
    sqe = queue.sqe(0x06, 0)
    struct.pack_into("<I", sqe, 40, 1)
    assert b"penstock" in queue.run(sqe, read_bytes=4096)[1]
    queue.close()


def test_without_the_key_nothing_can_be_asked(server: Server) -> None:
    """Not before, not meanwhile, and not on a queue of a host that was let in."""
    queue = connected(server)
    end = end_of(server, queue, controller=CONTROLLER_KEY)
    for step in (lambda: None, end.negotiate, lambda: transfer(queue, SEND, end.reply())):
        step()
        for opcode, kind in ((0x7F, 4), (0x7F, 0), (0x06, 0), (0x02, 0), (0x18, 0), (0x0C, 0), (0x09, 0)):
            sqe = queue.sqe(opcode, 0)
            sqe[4] = kind
            with pytest.raises(StatusError) as refused:
                queue.run(sqe)
            assert refused.value.status == UNAUTHENTICATED
    end.finish()
    queue.run(queue.sqe(0x18, 0))
    sqe = queue.sqe(0x7F, 0)
    struct.pack_into("<B3xIQ", sqe, 40, 0, 0x14, 1 | 6 << 16 | 4 << 20)
    queue.run(sqe)
    sqe = queue.sqe(0x09, 0)
    struct.pack_into("<II", sqe, 40, 7, 0)
    queue.run(sqe)
    io = Queue(tuple(server.portal), nqn_of(server), 1, 16, cntlid=queue.cntlid)
    assert io.authentication == 1
    with pytest.raises(StatusError) as refused:
        io.run(io.sqe(0x02, 1))
    assert refused.value.status == UNAUTHENTICATED
    end_of(server, io, hash_id=3, group=1).authenticate()
    sqe = io.sqe(0x02, 1)
    assert io.run(sqe, read_bytes=512)[1].startswith(b"penstock-samples")
    io.close()
    queue.close()


def test_a_wrong_key_ends_the_connection(server: Server) -> None:
    denied = server.served().denied
    for hash_id, group in ((1, 0), (3, 2)):
        queue = connected(server)
        end = end_of(server, queue, Key(), hash_id=hash_id, group=group)
        end.negotiate()
        transfer(queue, SEND, end.reply())
        said = transfer(queue, RECEIVE)
        assert (said[0], said[1], said[7]) == (COMMON, FAILURE1, 1)
        assert not any(said[8:])
        with pytest.raises((EOFError, ConnectionError)):
            end.negotiate()
    assert server.served().denied == denied + 2


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_changed_reply_is_accepted(server: Server, data: st.DataObject) -> None:
    group = data.draw(st.sampled_from([0, 0, 0, 1]))
    queue = connected(server)
    end = end_of(server, queue, controller=CONTROLLER_KEY, group=group)
    end.negotiate()
    reply = bytearray(end.reply())
    # The response, and what it is made of; the host's own challenge it may choose as it likes.
    places = [*range(2), *range(4, 7), 10, 11, *range(16, 48), *range(80, len(reply))]
    place = data.draw(st.sampled_from(places))
    reply[place] ^= data.draw(st.integers(1, 255))
    size = data.draw(st.sampled_from([len(reply)] * 5 + [8, 15, 16, 47, len(reply) - 1]))
    try:
        transfer(queue, SEND, bytes(reply[:size]))
        said = transfer(queue, RECEIVE)
        assert (said[0], said[1]) == (COMMON, FAILURE1)
    except StatusError as error:
        assert error.status == SEQUENCE
    with pytest.raises((EOFError, ConnectionError, StatusError)):
        queue.run(queue.sqe(0x18, 0))
    queue.close()


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [b""],
        [b"\0" * 4],
        [b"\xff" * 3000],
        [negotiation(1, [1], [0])[:71]],
        [negotiation(1, [1], [0]), negotiation(1, [1], [0])],
        [struct.pack("<BBHH", CHAP, 4, 0, 1).ljust(16, b"\0")],
        [struct.pack("<BBHHBB", COMMON, FAILURE2, 0, 1, 1, 1)],
    ],
    ids=["nothing", "empty", "short", "noise", "cut", "twice", "success at once", "failure"],
)
def test_messages_out_of_place_let_nobody_in(server: Server, messages: list[bytes]) -> None:
    queue = connected(server)
    with pytest.raises((StatusError, EOFError, ConnectionError)):
        for message in messages:
            transfer(queue, SEND, message)
        transfer(queue, RECEIVE)
    with pytest.raises((StatusError, EOFError, ConnectionError)):
        queue.run(queue.sqe(0x18, 0))
    queue.close()


@pytest.mark.parametrize(
    ("hashes", "groups", "reason"), [([9], [0], 4), ([], [0], 4), ([1], [9, 5], 5), ([1] * 31, [0], 6)]
)
def test_what_cannot_be_agreed_on_is_told(
    server: Server, hashes: list[int], groups: list[int], reason: int
) -> None:
    queue = connected(server)
    message = bytearray(negotiation(7, hashes[:30], groups))
    message[10] = len(hashes)
    transfer(queue, SEND, bytes(message))
    said = transfer(queue, RECEIVE)
    assert (said[0], said[1], said[7]) == (COMMON, FAILURE1, reason)
    queue.close()


@pytest.mark.parametrize("wrong", [{"protocol": 0xEA}, {"length": 71}, {"length": 1 << 20}])
def test_commands_that_are_no_authentication(server: Server, wrong: dict[str, int]) -> None:
    queue = connected(server)
    with pytest.raises(StatusError) as refused:
        transfer(queue, SEND, negotiation(7, [1], [0]), **wrong)
    assert refused.value.status == INVALID_FIELD
    queue.close()


def test_a_challenge_is_not_a_question_of_the_target(server: Server) -> None:
    """A host that knows no key asks the target what it was asked itself."""
    queue = connected(server)
    end = end_of(server, queue)
    end.negotiate()
    reply = bytearray(end.reply())
    reply[8] = 1
    transfer(queue, SEND, bytes(reply[:48]) + bytes(32))
    assert transfer(queue, RECEIVE)[1] == SUCCESS1  # of its own challenge it may choose the bytes
    queue.close()


def test_discovery_needs_no_key(server: Server) -> None:
    host = Host(tuple(server.portal), DISCOVERY)
    assert host.admin.authentication == 0
    assert nqn_of(server).encode() in host.log(0x70, 2048)


# -- A host, and targets that know the key or do not


def association(target: ControllerEnd, host: Key | None, controller: Key | None = None) -> tuple[str, str]:
    """What becomes of it: no target here gets further than authentication."""
    made = {"host_key": host, "controller_key": controller}
    keys = {name: bytes([key.bound]) + key.octets for name, key in made.items() if key}
    with pytest.raises(_native.NvmeError) as error:
        _native.NvmeController(
            target.address,
            target.port,
            NQN,
            host_nqn=HOST_NQN,
            host_id=HOST_ID,
            connect_timeout_s=20.0,
            **keys,
        )
    kind, text = error.value.args
    for key in (host, controller):
        assert key is None or (key.octets.hex() not in text and str(key) not in text)
    return kind, text


@pytest.mark.parametrize("hash_id", HASHES)
@pytest.mark.parametrize("group", [0, *BITS])
@pytest.mark.parametrize("both", [False, True], ids=["one way", "both ways"])
def test_targets_that_know_the_key_are_believed(hash_id: int, group: int, both: bool) -> None:
    keys = Key(os.urandom([32, 48, 64][hash_id - 1]), hash_id), Key(bound=0) if both else None
    with ControllerEnd(*keys, hash_id=hash_id, group=group) as target:
        kind, text = association(target, *keys)
    assert target.accepted
    assert kind == "lost" and "authentication required" in text  # what it answers to all that comes after


def test_a_host_without_a_key_says_so() -> None:
    with ControllerEnd(HOST_KEY) as target:
        kind, text = association(target, None)
    assert kind == "unauthenticated" and "this host has no key" in text
    assert target.heard == [b""]


def test_a_wrong_key_is_not_accepted() -> None:
    with ControllerEnd(HOST_KEY) as target:
        kind, text = association(target, Key())
    assert (kind, target.accepted) == ("unauthenticated", False)
    assert "does not accept the key of this host" in text


def changed(place: int, value: bytes, of: int) -> Callable[[int, bytes], bytes]:
    def change(message: int, data: bytes) -> bytes:
        return data[:place] + value + data[place + len(value) :] if message == of else data

    return change


IMPOSTORS: dict[str, tuple[dict[str, Any], str]] = {
    "another key": ({"controller": Key()}, "does not show"),
    "no key": ({"controller": None}, "does not show"),
    "no need": ({"asks": 0}, "asks for no authentication"),
    "says it need not show": ({"change": changed(8, b"\0", SUCCESS1)}, "does not show"),
    "a shorter response": ({"change": changed(6, b"\1", SUCCESS1)}, "does not show"),
    "zeros": ({"change": changed(16, bytes(32), SUCCESS1)}, "does not show"),
    "success at once": ({"change": changed(1, bytes([SUCCESS1]), CHALLENGE)}, "does not have here"),
    "another transaction": (
        {"change": lambda _, data: data[:4] + bytes([data[4] ^ 1]) + data[5:]},
        "not have here",
    ),
    "a hash of nobody": ({"change": changed(8, b"\x09", CHALLENGE)}, "a hash that was not offered"),
    "a hash of another size": ({"change": changed(6, b"\x30", CHALLENGE)}, "a hash that was not offered"),
    "a group of nobody": ({"change": changed(9, b"\x09", CHALLENGE)}, "a group that was not offered"),
    "a value without a group": ({"change": changed(10, b"\0\1", CHALLENGE)}, "another size"),
    "a value that is too long": ({"group": 1, "change": changed(10, b"\xff\xff", CHALLENGE)}, "another size"),
    "a value of 0": ({"group": 1, "change": changed(48, bytes(256), CHALLENGE)}, "none of its group"),
    "a value of 1": ({"group": 1, "change": changed(48, bytes(255) + b"\1", CHALLENGE)}, "none of its group"),
    "a value beyond": ({"group": 1, "change": changed(48, b"\xff" * 256, CHALLENGE)}, "none of its group"),
    "a secure channel": ({"asks": 2}, "asks for TLS"),
}


@pytest.mark.parametrize("how", IMPOSTORS)
def test_a_target_that_does_not_show_its_key_is_named(how: str) -> None:
    options, expected = IMPOSTORS[how]
    with ControllerEnd(HOST_KEY, **{"controller": CONTROLLER_KEY, **options}) as target:
        kind, text = association(target, HOST_KEY, CONTROLLER_KEY)
    assert kind == ("not_supported" if how == "a secure channel" else "unauthenticated")
    assert expected in text
    assert not target.accepted


@settings(max_examples=100, deadline=None)
@given(message=st.sampled_from([CHALLENGE, SUCCESS1]), noise=st.binary(max_size=600), kept=st.integers(0, 16))
def test_noise_is_no_key(message: int, noise: bytes, kept: int) -> None:
    def change(of: int, data: bytes) -> bytes:
        return data[:kept] + noise if of == message else data

    with ControllerEnd(HOST_KEY, CONTROLLER_KEY, change=change) as target:
        kind, _ = association(target, HOST_KEY, CONTROLLER_KEY)
    assert (kind, target.accepted) == ("unauthenticated", False)


# -- Both ends of penstock


def test_stores_are_read_where_both_know_the_keys(server: Server, use: Callable[..., None]) -> None:
    use(HOST_KEY, CONTROLLER_KEY)
    with mount(server.url + "&queues=3", cache_bytes="64KiB") as store:
        store.sequence(seed=1, epoch=0)
        assert epoch(store) == {index: data for index, (_, data) in enumerate(SAMPLES)}
    use(HOST_KEY)  # the target need not show one
    with mount(server.url) as store:
        assert len(store) == len(SAMPLES)
    assert discover(str(server.portal))[0].holds == "a store"


def test_a_lost_target_is_asked_again(folder: Path, use: Callable[..., None]) -> None:
    use(HOST_KEY, CONTROLLER_KEY)
    with serve(folder, "127.0.0.1:0") as first:
        store = mount(first.url, cache_bytes="64KiB", timeout_s=20.0)
        assert bytes(store.read(0)) == SAMPLES[0][1]
    with store, serve(folder, str(first.portal)) as second:
        assert [bytes(data) for data in store.read_many(range(len(SAMPLES)))] == [data for _, data in SAMPLES]
        assert second.served().denied == 0


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ([], "has no key for it"),
        ([Key()], "does not accept the key of this host"),
        ([HOST_KEY, Key()], "does not show that it knows its key"),
    ],
    ids=["none", "another", "another of the target"],
)
def test_errors_say_what_to_do(
    server: Server, monkeypatch: pytest.MonkeyPatch, keys: list[Key], expected: str
) -> None:
    monkeypatch.setenv("PENSTOCK_NVME_KEY", " ".join(map(str, keys)))
    with pytest.raises(SampleError) as error:
        mount(server.url)
    text = str(error.value)
    assert expected in text and "PENSTOCK_NVME_KEY" in text
    assert not any(str(key) in text or key.octets.hex() in text for key in (*keys, HOST_KEY, CONTROLLER_KEY))


def test_without_libcrypto_it_is_said(folder: Path, tmp_path: Path) -> None:
    """Files of no bytes take its place. Without keys a store is served all the same."""
    for version in ("3", "1.1"):
        (tmp_path / f"libcrypto.so.{version}").touch()
    code = "import sys; from penstock.samples import serve; serve(sys.argv[1], '127.0.0.1:0').close()"
    for key, expected in (("", ""), (str(HOST_KEY), "needs OpenSSL's libcrypto")):
        environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PENSTOCK_NVME_KEY": key}
        command = [sys.executable, "-c", code, str(folder)]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode != 0) == bool(key) and expected in done.stderr


# -- Where keys come from


def test_keys_of_a_file_go_by_subsystem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = Key(os.urandom(48), 2), Key(bound=0)
    path = tmp_path / "keys"
    path.write_text(f"# ours\n\n{NQN} {one} {other}  # both ways\n* {other}\n{NQN} {other}\n")
    path.chmod(0o600)
    monkeypatch.delenv("PENSTOCK_NVME_KEY", raising=False)
    assert keys_for(NQN) == Keys()
    monkeypatch.setenv("PENSTOCK_NVME_KEY_FILE", str(path))
    assert keys_for(NQN) == Keys(b"\2" + one.octets, b"\0" + other.octets)
    assert keys_for("nqn.2026-11.test:s1") == Keys(b"\0" + other.octets)
    assert repr(one.octets) not in repr(keys_for(NQN))
    path.write_text(f"{NQN} {one}\n")
    assert keys_for("nqn.2026-11.test:s1") == Keys()
    path.chmod(0o640)
    with pytest.raises(InvalidArgument, match="chmod 600"):
        keys_for(NQN)
    path.unlink()
    with pytest.raises(InvalidArgument, match="No such file"):
        keys_for(NQN)


GOOD = str(HOST_KEY)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("secret", "the form"),
        (GOOD[:-1], "the form"),
        (GOOD.replace("DHHC-1", "DHHC-2"), "the form"),
        (GOOD.replace(":01:", ":04:"), "the form"),
        (GOOD.replace("A", "*", 1), "not base64"),
        ("DHHC-1:00:AAAA:", "bytes, not 32, 48 or 64"),
        (GOOD.replace("AAEC", "AAED"), "its checksum is wrong"),
        (" ".join([GOOD] * 3), "has 3 keys"),
    ],
)
def test_keys_that_cannot_be_used_are_not_shown(use: Callable[..., None], text: str, problem: str) -> None:
    use(text)
    with pytest.raises(InvalidArgument) as error:
        keys_for(NQN)
    assert problem in str(error.value)
    assert "PENSTOCK_NVME_KEY" in str(error.value) and text not in str(error.value)
