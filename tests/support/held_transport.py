"""Saves whose writes wait until a test lets them go."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from penstock.checkpoint import pieces
from penstock.storage.native import PosixTransport
from penstock.storage.transfer import Transfer, Transport
from tests.support.faulty_transport import direct_path


class HeldTransport:
    """Requests wait until it is let go.

    offsets   of those that went on, in order
    """

    def __init__(self, inner: Transport) -> None:
        self.methods = inner.methods
        self.inner = inner
        self.goes = threading.Event()
        self.began = threading.Event()
        self.offsets: list[int] = []

    def submit(self, transfers: Sequence[Transfer]) -> None:
        self.began.set()
        assert self.goes.wait(60)
        self.offsets += [transfer.offset for transfer in transfers]
        self.inner.submit(transfers)

    def cancel(self, transfers: Sequence[Transfer]) -> int:
        return self.inner.cancel(transfers)

    def close(self) -> None:
        self.inner.close()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldTransport]:
    transport = HeldTransport(PosixTransport())
    monkeypatch.setattr(pieces, "shared_path", lambda: direct_path(transport))
    yield transport
    transport.goes.set()
    transport.close()
