"""A plain NVMe/TCP host, written from the specification alone: the second opinion beside penstock's own.

One command at a time, blocking, every answer checked. Nothing of penstock is imported.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

HOST_NQN = "nqn.2014-08.org.nvmexpress:uuid:2f6b2a1c-5f0e-4b9b-9d6a-0f5a6a1d7c11"
HOST_ID = bytes(range(1, 17))
DISCOVERY = "nqn.2014-08.org.nvmexpress.discovery"
WAIT_S = 20.0

ICREQ, ICRESP, COMMAND, RESPONSE, H2C_DATA, C2H_DATA, R2T = 0, 1, 4, 5, 6, 7, 9
C2H_TERM = 3
HDGST, DDGST, LAST, SUCCESS = 1, 2, 4, 8


class StatusError(Exception):
    """A command failed: `status` is its type (bits 8 to 10) and code."""

    def __init__(self, status: int, result: int) -> None:
        super().__init__(f"status {status:#x}")
        self.status, self.result = status & 0x7FF, result


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_TABLE = _crc_table()


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ _TABLE[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


class Queue:
    """One connection."""

    def __init__(
        self,
        address: tuple[str, int],
        nqn: str,
        qid: int,
        size: int,
        *,
        cntlid: int = 0xFFFF,
        header_digest: bool = False,
        data_digest: bool = False,
        flow_control: bool = True,
        kato_ms: int = 0,
        hpda: int = 0,
        host_nqn: str = HOST_NQN,
    ) -> None:
        self.socket = socket.create_connection(address, WAIT_S)
        self.socket.settimeout(WAIT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.header_digest = self.data_digest = False
        asked = (1 if header_digest else 0) | (2 if data_digest else 0)
        self.socket.sendall(
            struct.pack("<BBBBIHBBI", ICREQ, 0, 128, 0, 128, 0, hpda, asked, 0).ljust(128, b"\0")
        )
        answer = self._bytes(128)
        kind, _, hlen, _, plen, pfv, cpda, agreed, self.max_h2c = struct.unpack_from("<BBBBIHBBI", answer)
        assert (kind, hlen, plen, pfv) == (ICRESP, 128, 128, 0), answer[:16]
        assert cpda <= 31
        self.alignment, self.host_alignment = 4 * (cpda + 1), 4 * (hpda + 1)
        self.header_digest, self.data_digest = bool(agreed & 1), bool(agreed & 2)
        self.cid = 0
        data = HOST_ID + struct.pack("<H", cntlid)
        data = data.ljust(256, b"\0") + nqn.encode().ljust(256, b"\0") + host_nqn.encode().ljust(256, b"\0")
        sqe = self.sqe(0x7F, 0)
        sqe[4] = 1
        struct.pack_into("<HHHBxI", sqe, 40, 0, qid, size - 1, 0 if flow_control else 4, kato_ms)
        result, _ = self.run(sqe, data.ljust(1024, b"\0"), in_capsule=True)
        self.cntlid, self.authentication = result & 0xFFFF, result >> 17 & 3

    def close(self) -> None:
        self.socket.close()

    def _bytes(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = self.socket.recv(size - len(parts))
            if not part:
                raise EOFError("the target closed the connection")
            parts += part
        return bytes(parts)

    def send(self, kind: int, header: bytes, data: bytes = b"", flags: int = 0) -> None:
        hlen = 8 + len(header)
        head = hlen + (4 if self.header_digest else 0)
        pdo = -(-head // self.alignment) * self.alignment if data else 0
        flags |= (HDGST if self.header_digest else 0) | (DDGST if self.data_digest and data else 0)
        plen = (pdo + len(data) + (4 if self.data_digest else 0)) if data else head
        pdu = struct.pack("<BBBBI", kind, flags, hlen, pdo, plen) + header
        if self.header_digest:
            pdu += struct.pack("<I", crc32c(pdu))
        if data:
            pdu = pdu.ljust(pdo, b"\0") + data
            pdu += struct.pack("<I", crc32c(data)) if self.data_digest else b""
        self.socket.sendall(pdu)

    def receive(self) -> tuple[int, int, bytes, bytes]:
        """Type, flags, the header without its first 8 bytes, and the data."""
        head = self._bytes(8)
        kind, flags, hlen, pdo, plen = struct.unpack("<BBBBI", head)
        assert kind in (RESPONSE, C2H_DATA, R2T), f"PDU type {kind}"
        assert hlen == 24
        header = self._bytes(16)
        at = 24
        assert bool(flags & HDGST) == self.header_digest
        if self.header_digest:
            assert struct.unpack("<I", self._bytes(4))[0] == crc32c(head + header)
            at += 4
        if kind != C2H_DATA:
            assert (pdo, plen) == (0, at)
            return kind, flags, header, b""
        assert pdo >= at and pdo % self.host_alignment == 0
        assert self._bytes(pdo - at) == bytes(pdo - at)
        assert bool(flags & DDGST) == self.data_digest
        tail = 4 if self.data_digest else 0
        data = self._bytes(plen - pdo - tail)
        if tail:
            assert struct.unpack("<I", self._bytes(4))[0] == crc32c(data)
        return kind, flags, header, data

    def sqe(self, opcode: int, nsid: int) -> bytearray:
        sqe = bytearray(64)
        self.cid = (self.cid + 1) % 0xFFFF
        struct.pack_into("<BBHI", sqe, 0, opcode, 0x40, self.cid, nsid)
        return sqe

    def run(
        self, sqe: bytearray, data: bytes = b"", *, in_capsule: bool = False, read_bytes: int = 0
    ) -> tuple[int, bytes]:
        """The command's result and the bytes that it read. Raises StatusError."""
        cid = self.cid
        size = read_bytes or len(data)
        if size:
            struct.pack_into("<QI3xB", sqe, 24, 0, size, 0x01 if in_capsule else 0x5A)
        self.send(COMMAND, bytes(sqe), data if in_capsule else b"")
        found = bytearray()
        ended = False
        while True:
            kind, flags, header, part = self.receive()
            if kind == R2T:
                got_cid, tag, begin, length = struct.unpack_from("<HHII", header)
                assert got_cid == cid and data and not in_capsule
                assert begin + length <= len(data)
                for at in range(begin, begin + length, self.max_h2c):
                    end = min(begin + length, at + self.max_h2c)
                    fields = struct.pack("<HHII4x", cid, tag, at, end - at)
                    self.send(H2C_DATA, fields, data[at:end], LAST if end == begin + length else 0)
            elif kind == C2H_DATA:
                got_cid, _, begin, length = struct.unpack_from("<HHII", header)
                assert got_cid == cid and not ended
                assert begin == len(found) and length == len(part) and begin + length <= read_bytes
                found += part
                ended = bool(flags & LAST)
                if flags & SUCCESS:
                    assert ended and len(found) == read_bytes
                    return 0, bytes(found)
            else:
                result, _, _, got_cid, status = struct.unpack("<QHHHH", header)
                assert got_cid == cid
                if status >> 1:
                    raise StatusError(status >> 1, result)
                assert len(found) == read_bytes and (ended or not read_bytes)
                return result, bytes(found)


@dataclass(frozen=True)
class Identity:
    blocks: int
    block_bytes: int
    nguid: bytes
    eui64: bytes


class Host:
    """An association with one I/O queue; with none for discovery."""

    def __init__(
        self,
        address: tuple[str, int],
        nqn: str,
        *,
        header_digest: bool = False,
        data_digest: bool = False,
        flow_control: bool = True,
        hpda: int = 0,
        depth: int = 16,
        host_nqn: str = HOST_NQN,
    ) -> None:
        digests = {
            "header_digest": header_digest,
            "data_digest": data_digest,
            "hpda": hpda,
            "host_nqn": host_nqn,
        }
        self.kato_ms = 0 if nqn == DISCOVERY else 60_000
        self.admin = Queue(address, nqn, 0, 32, kato_ms=self.kato_ms, **digests)
        self.capabilities = self.property_get(0, wide=True)
        self.property_set(0x14, 1 | 6 << 16 | 4 << 20)
        while not self.property_get(0x1C) & 1:
            pass
        page = self.identify(1)
        self.model = page[24:64].decode().strip()
        self.mdts = page[77]
        self.capsule_bytes = 16 * struct.unpack_from("<I", page, 1792)[0] - 64
        self.in_capsule = struct.unpack_from("<H", page, 1800)[0] == 0
        self.io: Queue | None = None
        if nqn != DISCOVERY:
            sqe = self.admin.sqe(0x09, 0)
            struct.pack_into("<II", sqe, 40, 7, 0)
            self.admin.run(sqe)
            self.io = Queue(
                address, nqn, 1, depth, cntlid=self.admin.cntlid, flow_control=flow_control, **digests
            )

    def property_get(self, offset: int, wide: bool = False) -> int:
        sqe = self.admin.sqe(0x7F, 0)
        sqe[4] = 4
        struct.pack_into("<B3xI", sqe, 40, wide, offset)
        return self.admin.run(sqe)[0]

    def property_set(self, offset: int, value: int) -> None:
        sqe = self.admin.sqe(0x7F, 0)
        struct.pack_into("<B3xIQ", sqe, 40, 0, offset, value)
        self.admin.run(sqe)

    def identify(self, cns: int, nsid: int = 0) -> bytes:
        sqe = self.admin.sqe(0x06, nsid)
        struct.pack_into("<I", sqe, 40, cns)
        return self.admin.run(sqe, read_bytes=4096)[1]

    def namespaces(self) -> list[int]:
        return [number for (number,) in struct.iter_unpack("<I", self.identify(2)) if number]

    def namespace(self, nsid: int) -> Identity:
        page = self.identify(0, nsid)
        shift = page[128 + 4 * (page[26] & 15) + 2]
        return Identity(struct.unpack_from("<Q", page)[0], 1 << shift, page[104:120], page[120:128])

    def log(self, number: int, size: int, offset: int = 0) -> bytes:
        sqe = self.admin.sqe(0x02, 0)
        struct.pack_into("<IIQ", sqe, 40, number | (size // 4 - 1) << 16, 0, offset)
        return self.admin.run(sqe, read_bytes=size)[1]

    def discover(self) -> list[tuple[str, str, str]]:
        """Address, service and NQN of each subsystem."""
        count = struct.unpack_from("<Q", self.log(0x70, 1024), 8)[0]
        found = []
        for number in range(count):
            entry = self.log(0x70, 1024, 1024 * (number + 1))
            fields = [entry[512:768], entry[32:64], entry[256:512]]
            address, service, nqn = (field.rstrip(b" \0").decode() for field in fields)
            found.append((address, service, nqn))
        return found

    def keep_alive(self) -> None:
        self.admin.run(self.admin.sqe(0x18, 0))

    def _transfer(self, opcode: int, nsid: int, block: int, blocks: int) -> bytearray:
        assert self.io is not None
        sqe = self.io.sqe(opcode, nsid)
        struct.pack_into("<QI", sqe, 40, block, blocks - 1)
        return sqe

    def read(
        self, nsid: int, offset: int, size: int, *, block_bytes: int = 512, most: int = 1 << 20
    ) -> bytes:
        """Whole blocks, at most `most` bytes a command."""
        assert self.io is not None
        parts = []
        for at in range(offset, offset + size, most):
            part = min(most, offset + size - at)
            sqe = self._transfer(2, nsid, at // block_bytes, part // block_bytes)
            parts.append(self.io.run(sqe, read_bytes=part)[1])
        return b"".join(parts)

    def write(
        self, nsid: int, offset: int, data: bytes, *, block_bytes: int = 512, most: int = 1 << 20
    ) -> None:
        assert self.io is not None
        for at in range(0, len(data), most):
            part = data[at : at + most]
            sqe = self._transfer(1, nsid, (offset + at) // block_bytes, len(part) // block_bytes)
            self.io.run(sqe, part, in_capsule=self.in_capsule and len(part) <= self.capsule_bytes)

    def flush(self, nsid: int) -> None:
        assert self.io is not None
        self.io.run(self.io.sqe(0, nsid))

    def close(self) -> None:
        if self.io is not None:
            self.io.close()
        self.property_set(0x14, 1 | 6 << 16 | 4 << 20 | 1 << 14)
        while self.property_get(0x1C) >> 2 & 3 != 2:
            pass
        self.admin.close()


@contextmanager
def connected(address: tuple[str, int], nqn: str, **options: bool | int | str) -> Iterator[Host]:
    host = Host(address, nqn, **options)  # type: ignore[arg-type]
    try:
        yield host
    finally:
        host.close()
