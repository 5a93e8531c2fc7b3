"""Drives of other machines: namespaces of NVMe over Fabrics targets that speak TCP (NVMe/TCP).

Nothing is mounted, and no kernel module or root is needed: the initiator is in C++ (`csrc/nvme/`). Bytes
cross the network as they are, as plain TCP has them: for networks that you trust.
"""

from __future__ import annotations

from penstock.storage.nvme.namespace import (
    DEFAULT_TIMEOUT_S,
    Host,
    Namespace,
    Subsystem,
    TargetError,
    namespaces_of,
    subsystems_of,
    this_host,
)
from penstock.storage.nvme.url import SCHEME, Portal, Url, is_url, parse_portal, parse_url

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "SCHEME",
    "Host",
    "Namespace",
    "Portal",
    "Subsystem",
    "TargetError",
    "Url",
    "is_url",
    "namespaces_of",
    "parse_portal",
    "parse_url",
    "subsystems_of",
    "this_host",
]
