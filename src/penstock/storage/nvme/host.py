"""Who this machine says it is: its host NQN and host identifier."""

from __future__ import annotations

import contextlib
import uuid
from pathlib import Path
from typing import NamedTuple

from penstock.storage.nvme.url import LARGEST_NQN_BYTES

_PREFIX = "nqn.2014-08.org.nvmexpress:uuid:"
_SPACE = uuid.UUID("5b2d7e0a-4f0e-5c5d-9d56-70656e73746b")  # penstock's own, for uuids made of names


class Host(NamedTuple):
    """nqn: its name. identifier: 16 bytes."""

    nqn: str
    identifier: bytes


def this_host(nqn: str | None = None, root: Path = Path("/")) -> Host:
    """This machine's identity.

    nqn    to be used instead of its own
    root   below which its files lie

    It is that of nvme-cli, ``/etc/nvme/hostnqn`` and ``/etc/nvme/hostid``, where these can be read. Otherwise
    both are made of ``/etc/machine-id``, which stays the same, or of the machine's network address.
    """
    own_nqn, own_id = _line(root / "etc/nvme/hostnqn"), _uuid(_line(root / "etc/nvme/hostid"))
    if own_nqn and len(own_nqn.encode()) <= LARGEST_NQN_BYTES and nqn in (None, own_nqn):
        return Host(own_nqn, (own_id or _uuid_of(own_nqn)).bytes)
    if nqn is not None:
        return Host(nqn, _uuid_of(nqn).bytes)
    made = own_id or uuid.uuid5(_SPACE, _line(root / "etc/machine-id") or f"{uuid.getnode():012x}")
    return Host(f"{_PREFIX}{made}", made.bytes)


def _uuid_of(nqn: str) -> uuid.UUID:
    """The one in the name, or one made of it: one name always goes with one identifier."""
    return _uuid(nqn.removeprefix(_PREFIX)) or uuid.uuid5(_SPACE, nqn)


def _uuid(text: str) -> uuid.UUID | None:
    with contextlib.suppress(ValueError):
        found = uuid.UUID(text)
        return found if found.int else None
    return None


def _line(path: Path) -> str:
    """The first line of a small file; empty where it cannot be read."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.readline(1024).strip()
    except (OSError, UnicodeError):
        return ""
