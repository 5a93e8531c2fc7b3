"""DH-HMAC-CHAP with Python's own hashes and powers: both ends, written from the specification alone."""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import hmac
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.support.nvme_host import COMMAND, ICREQ, ICRESP, LAST, RESPONSE, SUCCESS, Queue

C2H_DATA = 7
HASHES = {1: "sha256", 2: "sha384", 3: "sha512"}
BITS = {1: 2048, 2: 3072, 3: 4096, 4: 6144, 5: 8192}
_X = {1: 560316, 2: 2625351, 3: 5736041, 4: 15705020, 5: 10965728}
COMMON, CHAP = 0, 1
NEGOTIATE, CHALLENGE, REPLY, SUCCESS1, SUCCESS2, FAILURE2, FAILURE1 = 0, 1, 2, 3, 4, 0xF0, 0xF1
SEND, RECEIVE = 5, 6


@functools.cache
def prime(group: int) -> int:
    """Of RFC 7919, whose digits are those of e."""
    bits = BITS[group]
    term = e = 1 << (bits + 200)
    divisor = 1
    while term:
        term //= divisor
        e, divisor = e + term, divisor + 1
    return (1 << bits) - (1 << (bits - 64)) + ((e >> 330) + _X[group] << 64) - 1


@dataclass(frozen=True)
class Key:
    octets: bytes = field(default_factory=lambda: os.urandom(32))
    bound: int = 1

    def __str__(self) -> str:
        crc = struct.pack("<I", binascii.crc32(self.octets))
        return f"DHHC-1:{self.bound:02}:{base64.b64encode(self.octets + crc).decode()}:"

    def of(self, nqn: str) -> bytes:
        if not self.bound:
            return self.octets
        return hmac.digest(self.octets, nqn.encode() + b"NVMe-over-Fabrics", HASHES[self.bound])


def response(
    key: Key,
    role: str,
    hash_id: int,
    challenge: bytes,
    session: bytes,
    numbers: bytes,
    first: str,
    second: str,
) -> bytes:
    name = HASHES[hash_id]
    if session:
        challenge = hmac.digest(hashlib.new(name, session).digest(), challenge, name)
    text = challenge + numbers + b"\0" + role.encode() + first.encode() + b"\0" + second.encode()
    return hmac.digest(key.of(first), text, name)


def transfer(queue: Queue, kind: int, data: bytes = b"", size: int = 4096, **wrong: int) -> bytes:
    """Authentication Send of `data`, or Authentication Receive of `size` bytes."""
    sqe = queue.sqe(0x7F, 0)
    sqe[4], sqe[41], sqe[42], sqe[43] = kind, 1, 1, wrong.get("protocol", 0xE9)
    struct.pack_into("<I", sqe, 44, wrong.get("length", len(data) if kind == SEND else size))
    if kind == SEND:
        return queue.run(sqe, data, in_capsule=True)[1]
    return queue.run(sqe, read_bytes=size)[1]


def negotiation(transaction: int, hashes: list[int], groups: list[int]) -> bytes:
    lists = bytes(hashes).ljust(30, b"\0") + bytes(groups).ljust(30, b"\0")
    head = struct.pack("<BBHHBBBBBB", COMMON, NEGOTIATE, 0, transaction, 0, 1, 1, 0, len(hashes), len(groups))
    return head + lists


@dataclass
class HostEnd:
    """Shows the host's key on a queue, step by step. `controller` is asked for where it is given."""

    queue: Queue
    host_nqn: str
    subsystem_nqn: str
    host: Key
    controller: Key | None = None
    hash_id: int = 1
    group: int = 0
    transaction: int = field(default_factory=lambda: secrets.randbits(16))

    def negotiate(self) -> None:
        transfer(self.queue, SEND, negotiation(self.transaction, [self.hash_id], [self.group]))

    def reply(self) -> bytes:
        """The reply to the controller's challenge."""
        said = transfer(self.queue, RECEIVE)
        kind, message, _, transaction, size, _, hash_id, group, value_bytes, sequence = struct.unpack_from(
            "<BBHHBBBBHI", said
        )
        assert (kind, message, transaction) == (CHAP, CHALLENGE, self.transaction), said[:16]
        assert (hash_id, group) == (self.hash_id, self.group)
        assert size == hashlib.new(HASHES[hash_id]).digest_size
        challenge, value = said[16 : 16 + size], said[16 + size : 16 + size + value_bytes]
        assert not any(said[16 + size + value_bytes :])
        self.session = own = b""
        if group:
            modulus, secret = prime(group), secrets.randbits(400)
            assert value_bytes == BITS[group] // 8
            own = pow(2, secret, modulus).to_bytes(value_bytes, "big")
            self.session = pow(int.from_bytes(value, "big"), secret, modulus).to_bytes(value_bytes, "big")
        numbers = struct.pack("<IH", sequence, transaction)
        shown = response(
            self.host,
            "HostHost",
            hash_id,
            challenge,
            self.session,
            numbers,
            self.host_nqn,
            self.subsystem_nqn,
        )
        self.challenge = os.urandom(size) if self.controller else bytes(size)
        self.sequence = secrets.randbits(31) + 1 if self.controller else 0
        head = (CHAP, REPLY, 0, transaction, size, 0, bool(self.controller), 0, len(own), self.sequence)
        return struct.pack("<BBHHBBBBHI", *head) + shown + self.challenge + own

    def finish(self) -> None:
        """Raises AssertionError where the controller does not accept the key, or show its own."""
        said = transfer(self.queue, RECEIVE)
        kind, message, _, transaction, size, _, shows = struct.unpack_from("<BBHHBBB", said)
        assert (kind, message, transaction) == (CHAP, SUCCESS1, self.transaction), said[:16].hex()
        if self.controller is None:
            return
        numbers = struct.pack("<IH", self.sequence, transaction)
        expected = response(
            self.controller,
            "Controller",
            self.hash_id,
            self.challenge,
            self.session,
            numbers,
            self.subsystem_nqn,
            self.host_nqn,
        )
        assert shows == 1 and said[16 : 16 + size] == expected
        transfer(self.queue, SEND, struct.pack("<BBHH", CHAP, SUCCESS2, 0, transaction).ljust(16, b"\0"))

    def authenticate(self) -> None:
        self.negotiate()
        transfer(self.queue, SEND, self.reply())
        self.finish()


class ControllerEnd:
    """A target that knows of connecting and of authentication alone, for one host: after that it refuses all.

    asks      in the result of a connect: 1 authentication, 2 a secure channel
    change    what becomes of what it says, by its message: the challenge, or the success
    accepted  whether the host has shown its key, and has accepted the controller's
    """

    address = "127.0.0.1"

    def __init__(
        self,
        host: Key,
        controller: Key | None = None,
        *,
        hash_id: int = 1,
        group: int = 0,
        asks: int = 1,
        change: Callable[[int, bytes], bytes] = lambda message, data: data,
    ) -> None:
        self.host, self.controller, self.hash_id, self.group = host, controller, hash_id, group
        self.asks, self.change, self.accepted, self.heard = asks, change, False, [b""]
        self._listener = socket.create_server((self.address, 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __enter__(self) -> ControllerEnd:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self._thread.join(20)

    def _serve(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        with connection:
            connection.settimeout(20)
            try:
                self._speak(connection)
            except (OSError, EOFError):
                return

    def _speak(self, connection: socket.socket) -> None:
        def take(size: int) -> bytes:
            parts = b""
            while len(parts) < size:
                part = connection.recv(size - len(parts))
                if not part:
                    raise EOFError
                parts += part
            return parts

        def respond(sqe: bytes, status: int = 0, result: int = 0) -> None:
            body = struct.pack("<QHH2sH", result, 0, 0, sqe[2:4], status << 1)
            connection.sendall(struct.pack("<BBBBI", RESPONSE, 0, 24, 0, 24) + body)

        assert take(128)[0] == ICREQ
        connection.sendall(struct.pack("<BBBBIHBBI", ICRESP, 0, 128, 0, 128, 0, 0, 0, 8192).ljust(128, b"\0"))
        said = b""
        while True:
            kind, _, _, begin, size = struct.unpack("<BBBBI", take(8))
            assert kind == COMMAND
            rest = take(size - 8)
            sqe, data = rest[:64], rest[begin - 8 :] if begin else b""
            if sqe[0] != 0x7F or sqe[4] not in (1, SEND, RECEIVE):
                respond(sqe, 0x4191)
            elif sqe[4] == 1:
                names = data[512:768].rstrip(b"\0").decode(), data[256:512].rstrip(b"\0").decode()
                respond(sqe, result=1 | self.asks << 17)
            elif sqe[4] == SEND:
                self.heard.append(data)
                said = self._answer(data, *names)
                respond(sqe)
            else:
                length = struct.unpack_from("<I", sqe, 44)[0]
                head = struct.pack("<BBBBI", C2H_DATA, LAST | SUCCESS * 0, 24, 24, 24 + length)
                head += sqe[2:4] + struct.pack("<HIII", 0, 0, length, 0)
                connection.sendall(head + said.ljust(length, b"\0"))
                respond(sqe)

    def _answer(self, data: bytes, host_nqn: str, subsystem_nqn: str) -> bytes:
        kind, message, _, transaction = struct.unpack_from("<BBHH", data)
        digest_bytes = hashlib.new(HASHES[self.hash_id]).digest_size
        if (kind, message) == (COMMON, NEGOTIATE):
            self.challenge, self.sequence = os.urandom(digest_bytes), secrets.randbits(31) + 1
            value = b""
            if self.group:
                self.secret = secrets.randbits(400)
                value = pow(2, self.secret, prime(self.group)).to_bytes(BITS[self.group] // 8, "big")
            head = (CHAP, CHALLENGE, 0, transaction, digest_bytes, 0, self.hash_id, self.group, len(value))
            said = struct.pack("<BBHHBBBBHI", *head, self.sequence) + self.challenge + value
            return self.change(CHALLENGE, said)
        if (kind, message) == (CHAP, REPLY):
            size, _, asked, _, value_bytes, sequence = struct.unpack_from("<BBBBHI", data, 6)
            shown, challenge = data[16 : 16 + size], data[16 + size : 16 + 2 * size]
            session = b""
            if self.group:
                value = int.from_bytes(data[16 + 2 * size :], "big")
                session = pow(value, self.secret, prime(self.group)).to_bytes(value_bytes, "big")
            numbers = struct.pack("<IH", self.sequence, transaction)
            expected = response(
                self.host, "HostHost", self.hash_id, self.challenge, session, numbers, host_nqn, subsystem_nqn
            )
            if shown != expected:
                return struct.pack("<BBHHBB", COMMON, FAILURE1, 0, transaction, 1, 1)
            self.accepted = not asked
            own = b""
            if asked and self.controller:
                numbers = struct.pack("<IH", sequence, transaction)
                own = response(
                    self.controller,
                    "Controller",
                    self.hash_id,
                    challenge,
                    session,
                    numbers,
                    subsystem_nqn,
                    host_nqn,
                )
            head = (CHAP, SUCCESS1, 0, transaction, digest_bytes, 0, bool(own))
            return self.change(SUCCESS1, struct.pack("<BBHHBBB7x", *head) + own)
        self.accepted = (kind, message) == (CHAP, SUCCESS2)
        return b""
