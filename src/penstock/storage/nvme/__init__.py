"""Drives of other machines: namespaces of NVMe over Fabrics targets that speak TCP (NVMe/TCP).

Nothing is mounted, and no kernel module or root is needed: the initiator is in C++ (`csrc/nvme/`). Bytes
cross the network as they are, as plain TCP has them: for networks that you trust.
"""

from __future__ import annotations

from penstock.storage.nvme.namespace import DEFAULT_TIMEOUT_S as DEFAULT_TIMEOUT_S
from penstock.storage.nvme.namespace import Namespace as Namespace
from penstock.storage.nvme.namespace import Subsystem as Subsystem
from penstock.storage.nvme.namespace import TargetError as TargetError
from penstock.storage.nvme.namespace import namespaces_of as namespaces_of
from penstock.storage.nvme.namespace import subsystems_of as subsystems_of
from penstock.storage.nvme.namespace import this_host as this_host
from penstock.storage.nvme.url import Portal as Portal
from penstock.storage.nvme.url import Url as Url
from penstock.storage.nvme.url import is_url as is_url
from penstock.storage.nvme.url import parse_portal as parse_portal
from penstock.storage.nvme.url import parse_url as parse_url
