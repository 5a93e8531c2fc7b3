"""A store that is served is read by others as it is, and changed by nobody, whatever peers send."""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidArgument, SampleError
from penstock.samples import Loader, Store, discover, info, mount, serve, upload, verify
from penstock.samples.collective import gather
from penstock.samples.remote.serving import Server
from tests.samples.test_samples_mount_collectively import partition, run, write_parts
from tests.support.nvme_host import (
    C2H_TERM,
    COMMAND,
    DISCOVERY,
    H2C_DATA,
    ICREQ,
    Host,
    Queue,
    StatusError,
    connected,
)
from tests.support.sample_stores import epoch, some_samples
from tests.support.stores import write_store

ANY = "127.0.0.1:0"
SAMPLES = some_samples(120, seed=3) + [("large", bytes(range(256)) * 1200), ("empty", b"")]
TIMEOUT_S = 20.0
WRITE_PROTECTED, OUT_OF_RANGE, INVALID_FIELD, CONNECT = 0x20, 0x80, 0x02, 0x182


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "a.store"
    labels = [index % 2 for index in range(len(SAMPLES))]
    write_store(folder, SAMPLES, data_file_bytes=70_000, labels=labels, classes=["even", "odd"])
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serve(folder, ANY) as server:
        yield server


def nqn_of(server: Server) -> str:
    return server.url.rpartition("/")[2].partition("?")[0]


def mounted(url: Any, **options: Any) -> Store:
    return mount(url, **{"cache_bytes": "64KiB", "timeout_s": TIMEOUT_S, **options})


def reads_all(url: Any, samples: list[tuple[str, bytes]], **options: Any) -> None:
    with mounted(url, **options) as store:
        assert list(store.names()) == [name for name, _ in samples]
        assert [bytes(data) for data in store.read_many(range(len(samples)))] == [data for _, data in samples]
        store.sequence(seed=1, epoch=0)
        assert epoch(store) == {index: data for index, (_, data) in enumerate(samples)}


# What peers get


@pytest.mark.parametrize("order", ["chunk", "full"])
@pytest.mark.parametrize("options", ["", "&hdgst=1&ddgst=1&queues=2&depth=4"], ids=["plain", "digests"])
def test_every_sample_comes_back(server: Server, order: str, options: str) -> None:
    assert server.samples == len(SAMPLES)
    before = server.served()
    reads_all(server.url + options, SAMPLES, order=order)
    done = server.served()
    assert done.read_bytes - before.read_bytes >= sum(len(data) for _, data in SAMPLES)
    assert (done.refused_writes, done.violations) == (before.refused_writes, before.violations)


def test_it_is_looked_after_as_any_other(server: Server) -> None:
    assert verify(server.url).sound
    assert info(server.url).samples == len(SAMPLES)
    (found,) = discover(str(server.portal))
    assert (found.url, found.holds, found.block_bytes) == (server.url, "a store", 512)


def test_workers_of_a_loader_connect_for_themselves(server: Server) -> None:
    from torch.utils.data import DataLoader

    with mounted(server.url) as store:
        loader = Loader(store, batch_size=7, decode=_numbered, collate_fn=list)
        batches = DataLoader(loader, batch_size=None, num_workers=2, multiprocessing_context="fork")
        assert dict(pair for batch in batches for pair in batch) == dict(
            enumerate(data for _, data in SAMPLES)
        )


def _numbered(sample: Any) -> tuple[int, bytes]:
    return sample.index, bytes(sample.data)


def test_all_partitions_of_a_folder_are_served_together(tmp_path: Path) -> None:
    samples = write_parts(tmp_path, 3)
    with serve(tmp_path, ANY) as server:
        reads_all(server.url, samples)
        with mounted(f"{server.url}#part-00001-of-00003") as one:
            assert list(one.names()) == [name for name, _ in samples[20:40]]


def test_a_store_that_is_served_again_is_the_same(folder: Path) -> None:
    """A peer that has mounted it goes on."""
    with serve(folder, ANY) as first:
        port = first.portal.port
        store = mounted(first.url)
        assert store.read(0) == SAMPLES[0][1]
    with store, serve(folder, f"127.0.0.1:{port}") as second:
        assert second.url == first.url
        assert store.read(1) == SAMPLES[1][1]


def _serves_and_mounts(private: Path, world_size: int) -> Any:
    """The body of a process: it serves its partition, which no other sees, and mounts them all."""

    def body(rank: int) -> dict[str, Any]:
        mine = partition(private / f"node-{rank}", rank, world_size)
        with serve(mine, ANY) as server:
            with mount(mine, group=dist.group.WORLD, served_at=server.url, cache_bytes="64KiB") as store:
                store.sequence(seed=7, epoch=0)
                mine_of_epoch = {
                    index: hashlib.sha256(data).hexdigest() for index, data in epoch(store).items()
                }
                names = list(store.names())
            dist.barrier()  # nobody stops to serve before all have read
            return {"epoch": list(mine_of_epoch.items()), "names": names, "reads": server.served().reads}

    return body


@pytest.mark.parametrize("world_size", [2, 4])
def test_processes_that_serve_their_partitions_mount_each_others(tmp_path: Path, world_size: int) -> None:
    samples = []
    for rank in range(world_size):
        samples = write_parts(tmp_path / f"node-{rank}", world_size)
        for other in set(range(world_size)) - {rank}:  # each node has its own alone
            partition(tmp_path / f"node-{rank}", other, world_size).rename(tmp_path / f"gone-{rank}-{other}")
    said = run(_serves_and_mounts(tmp_path, world_size), tmp_path, world_size)
    assert [code for code, _ in said] == [0] * world_size
    given_out = [tuple(pair) for _, one in said for pair in one["epoch"]]
    wanted = {index: hashlib.sha256(data).hexdigest() for index, (_, data) in enumerate(samples)}
    assert len(given_out) == len(samples) and dict(given_out) == wanted  # each exactly once
    for _, one in said:
        assert one["names"] == [name for name, _ in samples]
        assert one["reads"] > 0  # by the others: it reads its own partition from its disk


# Nobody changes it


def test_writes_are_refused(folder: Path, server: Server, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    refused = server.served().refused_writes
    with connected(server.portal, nqn_of(server)) as host:
        for size in (512, 8192, 65536):  # in a capsule, and with data that are never asked for
            with pytest.raises(StatusError) as error:
                host.write(1, 0, bytes(size))
            assert error.value.status == WRITE_PROTECTED
        assert host.io is not None
        for opcode in (0x04, 0x08, 0x09):  # write uncorrectable, write zeroes, deallocate
            with pytest.raises(StatusError) as error:
                host.io.run(host.io.sqe(opcode, 1))
            assert error.value.status == WRITE_PROTECTED
        host.flush(1)
        assert host.identify(0, 1)[99] & 1  # write protected, as it says
    assert server.served().refused_writes == refused + 6
    write_store(tmp_path, SAMPLES[:9])
    with pytest.raises(SampleError, match="write protected"):
        upload(tmp_path, server.url, overwrite=True)
    assert upload(folder, server.url).written_bytes == 0  # it is there already
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    reads_all(server.url, SAMPLES)


def test_a_store_that_changes_is_no_longer_given_out(tmp_path: Path) -> None:
    write_store(tmp_path / "a.store", SAMPLES)
    data = tmp_path / "a.store" / "data-00000.bin"
    with serve(tmp_path / "a.store", ANY) as server, mounted(server.url, order="full") as store:
        server.check()
        assert store.read(0) == SAMPLES[0][1]
        with open(data, "r+b") as file:
            file.write(b"other bytes")
        with pytest.raises(SampleError, match="unrecovered read error"):
            store.read(1)
        with pytest.raises(SampleError, match=r"data-00000\.bin was changed, replaced or removed"):
            server.wait()


def test_a_store_that_is_replaced_is_noticed(tmp_path: Path) -> None:
    write_store(tmp_path / "a.store", SAMPLES)
    write_store(tmp_path / "other", SAMPLES[:5])
    with serve(tmp_path / "a.store", ANY) as server, mounted(server.url) as store:
        (tmp_path / "a.store").rename(tmp_path / "old")
        (tmp_path / "other").rename(tmp_path / "a.store")
        assert store.read(1) == SAMPLES[1][1]  # still the one that was mounted
        with pytest.raises(SampleError, match="was changed, replaced or removed"):
            server.check()


# Bad input


def test_what_cannot_be_served_is_said(folder: Path, server: Server, tmp_path: Path) -> None:
    with pytest.raises(SampleError, match="is not a sample store"):
        serve(tmp_path, ANY)
    with pytest.raises(SampleError, match="cannot be opened: No such file"):
        serve(tmp_path / "missing", ANY)
    with pytest.raises(InvalidArgument, match="on another machine already"):
        serve(server.url, ANY)
    with pytest.raises(SampleError, match=rf"cannot listen on {server.portal}: .*in use"):
        serve(folder, str(server.portal))
    for address in ("192.0.2.1:4420", "no.such.host.invalid:4420"):
        with pytest.raises(SampleError, match=rf"cannot listen on {address}: [\w ,]+\. Give an address"):
            serve(folder, address)
    for listen in ("127.0.0.1:x", "", "a b:1", "127.0.0.1:70000"):
        with pytest.raises(InvalidArgument, match="cannot listen there"):
            serve(folder, listen)


def test_where_it_is_served_has_to_fit(folder: Path, server: Server) -> None:
    with pytest.raises(InvalidArgument, match="give group="):
        mount(folder, served_at=server.url)
    with pytest.raises(InvalidArgument, match="the URL of one store"):
        gather([folder], None, served_at=server.url)
    with pytest.raises(InvalidArgument, match="names one partition"):
        gather(folder, None, served_at=f"{server.url}#part-00000-of-00002")


def test_it_listens_where_it_is_told_alone(folder: Path) -> None:
    with serve(folder, ANY) as server:
        assert server.portal.host == "127.0.0.1"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", server.portal.port), 5)
    with pytest.raises(ConnectionRefusedError):  # and no longer than it should
        socket.create_connection(server.portal, 5)
    server.close()
    with serve(folder, f"0.0.0.0:{server.portal.port}") as everywhere:
        assert f"//{socket.gethostname()}:" in everywhere.url
        socket.create_connection(("127.0.0.2", everywhere.portal.port), 5).close()


# The command


def command(*arguments: object) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "penstock", "samples", "serve", *map(str, arguments)]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # the shell may ignore it
    try:
        return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)


def test_commands_serve_a_partition_each(tmp_path: Path) -> None:
    samples = write_parts(tmp_path, 2)
    running = [command(partition(tmp_path, number, 2), "--listen", ANY, "--json") for number in range(2)]
    try:
        urls = [json.loads(str(each.stdout.readline()))["url"] for each in running if each.stdout]
        reads_all(urls, samples)
        for each, number in zip(running, (signal.SIGTERM, signal.SIGINT), strict=True):
            each.send_signal(number)
            assert each.communicate(timeout=60) == ("", "")
            assert each.returncode == 0
    finally:
        for each in running:
            each.kill()
            each.communicate()


def test_the_command_says_where_and_what_it_has_served(folder: Path) -> None:
    with command(folder, "--listen", ANY) as running:
        assert running.stdout is not None
        first, second = running.stdout.readline(), running.stdout.readline()
        assert f"{len(SAMPLES)} samples, served on 127.0.0.1:" in first
        reads_all(second.removeprefix("mount it by ").strip(), SAMPLES)
        running.send_signal(signal.SIGTERM)
        rest, errors = running.communicate(timeout=60)
        assert rest.startswith("served ") and " reads" in rest and not errors
        assert running.returncode == 0


def test_the_command_ends_when_the_store_changes(tmp_path: Path) -> None:
    write_store(tmp_path / "a.store", SAMPLES)
    with command(tmp_path / "a.store", "--listen", ANY) as running:
        assert running.stdout is not None
        running.stdout.readline()
        os.truncate(tmp_path / "a.store" / "data-00000.bin", 4096)
        _, errors = running.communicate(timeout=60)
    assert running.returncode == 1
    assert errors.startswith("penstock: error: ") and "Serve the store again" in errors
    assert errors.count("\n") == 1


# Hostile peers


def address_of(server: Server) -> tuple[str, int]:
    return server.portal


def ended(connection: socket.socket) -> bytes:
    """What comes until the other side ends it. Raises TimeoutError where it does not."""
    connection.settimeout(TIMEOUT_S)
    found = b""
    try:
        while part := connection.recv(1 << 16):
            found += part
    except ConnectionResetError:
        pass
    return found


def pdu(kind: int, *, flags: int = 0, hlen: int = 72, pdo: int = 0, plen: int = 72, size: int = 72) -> bytes:
    return struct.pack("<BBBBI", kind, flags, hlen, pdo, plen).ljust(size, b"\0")


@pytest.mark.parametrize(
    "hostile",
    [
        pdu(COMMAND, plen=1 << 30),
        pdu(COMMAND, plen=7),
        pdu(COMMAND, plen=71, hlen=72),
        pdu(COMMAND, hlen=80, plen=80, size=80),
        pdu(COMMAND, flags=1),  # a digest that was not agreed on
        pdu(COMMAND, pdo=8, plen=80, size=80),  # data within the header
        pdu(COMMAND, pdo=76, plen=76, size=76),  # no data
        pdu(COMMAND, plen=80, size=80),
        pdu(H2C_DATA, hlen=24, pdo=24, plen=32, size=32),  # which nobody has asked for
        pdu(ICREQ, hlen=128, plen=128, size=128),  # again
        pdu(9, hlen=24, plen=24, size=24),
        pdu(0xFF),
    ],
)
def test_what_breaks_the_protocol_ends_the_association(server: Server, hostile: bytes) -> None:
    before = server.served().violations
    host = Host(address_of(server), nqn_of(server))
    assert host.io is not None
    host.admin.socket.sendall(hostile)
    assert ended(host.admin.socket)[0] == C2H_TERM
    assert ended(host.io.socket) == b""  # the whole association
    host.io.close()
    host.admin.close()
    assert server.served().violations == before + 1
    with connected(address_of(server), nqn_of(server)) as honest:
        assert honest.namespaces() == [1]


def test_a_wrong_digest_ends_the_association(server: Server) -> None:
    queue = Queue(address_of(server), nqn_of(server), 0, 32, kato_ms=60_000, header_digest=True)
    queue.socket.sendall(pdu(COMMAND, flags=1, plen=76) + bytes(4))
    assert ended(queue.socket)[0] == C2H_TERM
    queue.close()


def test_more_commands_than_the_queue_holds_end_the_association(server: Server) -> None:
    queue = Queue(address_of(server), nqn_of(server), 0, 4, kato_ms=60_000)
    for _ in range(6):  # event requests, which stay
        queue.send(COMMAND, bytes(queue.sqe(0x0C, 0)))
    assert C2H_TERM in ended(queue.socket)
    queue.close()


def test_commands_that_cannot_be_are_refused(server: Server) -> None:
    with connected(address_of(server), nqn_of(server)) as host:
        assert host.io is not None
        blocks = host.namespace(1).blocks
        for block, count, status in ((blocks, 1, OUT_OF_RANGE), (blocks - 1, 2, OUT_OF_RANGE)):
            with pytest.raises(StatusError) as error:
                host.read(1, 512 * block, 512 * count)
            assert error.value.status == status
        with pytest.raises(StatusError) as error:
            host.read(1, (1 << 64) - 512, 512)
        assert error.value.status == OUT_OF_RANGE
        with pytest.raises(StatusError) as error:  # more than MDTS, where the namespace had it
            host.io.run(_read(host.io, 0, 2048), read_bytes=1 << 20)
        assert error.value.status in (INVALID_FIELD, OUT_OF_RANGE)
        with pytest.raises(StatusError) as error:  # fewer bytes than blocks
            host.io.run(_read(host.io, 0, 2), read_bytes=512)
        assert error.value.status == INVALID_FIELD
        with pytest.raises(StatusError):
            host.read(2, 0, 512)
        assert host.read(1, 0, 512)  # and the association goes on
    with pytest.raises(StatusError) as error:
        Host(address_of(server), "nqn.2014-08.org.example:other")
    assert error.value.status == CONNECT
    with pytest.raises(StatusError) as error:  # a queue of an association that is not its own
        Queue(address_of(server), nqn_of(server), 1, 16, cntlid=4711)
    assert error.value.status == CONNECT
    with connected(address_of(server), DISCOVERY) as host:
        assert host.discover() == [("127.0.0.1", str(server.portal.port), nqn_of(server))]


def _read(queue: Queue, block: int, blocks: int) -> bytearray:
    sqe = queue.sqe(2, 1)
    struct.pack_into("<QI", sqe, 40, block, blocks - 1)
    return sqe


def _spoken(server: Server) -> bytes:
    """What an honest host says until it reads: an association's admin queue."""
    data = bytes(range(1, 17)) + b"\xff\xff"
    data = (
        data.ljust(256, b"\0")
        + nqn_of(server).encode().ljust(256, b"\0")
        + b"nqn.2014-08.org:h".ljust(512, b"\0")
    )
    connect = bytearray(64)
    struct.pack_into("<BBHBxxx", connect, 0, 0x7F, 0x40, 1, 1)
    struct.pack_into("<QI3xB", connect, 24, 0, 1024, 1)
    struct.pack_into("<HHHBxI", connect, 40, 0, 0, 31, 0, 60_000)
    said = pdu(ICREQ, hlen=128, plen=128, size=128)
    said += struct.pack("<BBBBI", COMMAND, 0, 72, 72, 72 + 1024) + bytes(connect) + data
    for cid, (opcode, nsid, word) in enumerate(
        ((6, 0, 1), (6, 1, 0), (6, 0, 2), (2, 0, 2 | 127 << 16), (0x18, 0, 0))
    ):
        entry = bytearray(64)
        struct.pack_into("<BBHI", entry, 0, opcode, 0x40, cid + 2, nsid)
        struct.pack_into("<QI3xBI", entry, 24, 0, 4096 if opcode == 6 else 512, 0x5A, word)
        said += struct.pack("<BBBBI", COMMAND, 0, 72, 0, 72) + bytes(entry)
    return said


@settings(max_examples=150, deadline=None)
@given(draw=st.data())
def test_no_bytes_harm_the_server(server: Server, draw: st.DataObject) -> None:
    said = bytearray(_spoken(server))
    for _ in range(draw.draw(st.integers(0, 6))):
        at = draw.draw(st.integers(0, len(said) - 1))
        said[at : at + draw.draw(st.integers(0, 3))] = draw.draw(st.binary(max_size=4))
    with socket.create_connection(address_of(server), TIMEOUT_S) as connection:
        connection.sendall(said)
        connection.shutdown(socket.SHUT_WR)
        ended(connection)
    with connected(address_of(server), nqn_of(server)) as honest:
        assert honest.read(1, 0, 512).startswith(b"penstock-samples")


def test_connections_and_memory_are_bounded(folder: Path) -> None:
    """Peers that connect without end, and such as ask and take nothing, leave it able to serve."""
    with command(folder, "--listen", ANY, "--json") as running:
        assert running.stdout is not None
        url = json.loads(running.stdout.readline())["url"]
        portal, _, rest = url.removeprefix("nvme+tcp://").partition("/")
        address = (portal.partition(":")[0], int(portal.partition(":")[2]))
        nqn = rest.partition("?")[0]
        deaf = []
        for _ in range(16):
            host = Host(address, nqn, depth=1000)
            assert host.io is not None
            blocks = min(host.namespace(1).blocks, 1024)
            for _ in range(500):  # of up to half a MiB each
                sqe = _read(host.io, 0, blocks)
                struct.pack_into("<QI3xB", sqe, 24, 0, 512 * blocks, 0x5A)
                host.io.send(COMMAND, bytes(sqe))
            deaf.append(host)
        others = []
        for _ in range(700):
            others.append(socket.create_connection(address, TIMEOUT_S))
        poller = select.poll()
        for each in others:
            poller.register(each, select.POLLIN)
        deadline_s = time.monotonic() + TIMEOUT_S
        while len(poller.poll(100)) < 700 - 512:  # the server says nothing: it has closed these
            assert time.monotonic() < deadline_s
        peak_kib = next(
            int(line.split()[1])
            for line in Path(f"/proc/{running.pid}/status").read_text().splitlines()
            if line.startswith("VmHWM")
        )
        assert peak_kib < 700 << 10  # Python, and 16 connections of at most 2.5 MiB
        for each in others:
            each.close()
        for host in deaf:
            assert host.io is not None
            host.io.socket.close()
            host.admin.socket.close()
        deadline_s = time.monotonic() + TIMEOUT_S
        while True:  # the server needs a moment to see them go
            try:
                reads_all(url, SAMPLES)
                break
            except SampleError:
                assert time.monotonic() < deadline_s
        running.send_signal(signal.SIGTERM)
        running.communicate(timeout=60)
        assert running.returncode == 0


def test_peers_that_fall_silent_are_forgotten(server: Server) -> None:
    before = server.served().connections
    queue = Queue(address_of(server), nqn_of(server), 0, 32, kato_ms=1000)
    assert ended(queue.socket) == b""
    queue.close()
    assert server.served().connections <= before


def test_a_forked_child_does_not_serve(folder: Path) -> None:
    with serve(folder, ANY) as server:
        if (child := os.fork()) == 0:
            server.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        reads_all(server.url, SAMPLES)
