"""Memory of the machine, or of the container that this process is confined to. Everything that asks how much
memory there is asks here.

A container is a control group of Linux, of version 1 or 2, with a limit: its own, or one above it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from penstock.errors import InvalidArgument

_GROUPS, _ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_NODES = Path("/sys/devices/system/node")
_NO_LIMIT_BYTES = 1 << 60  # version 1 of control groups has a number just below 2**63 for none


class _Names(NamedTuple):
    """Of the files of a control group.

    limits   above `memory.high` the kernel only slows a group down, until it has given memory back
    caches   fields of `memory.stat`, of the group and of those in it
    """

    limits: tuple[str, ...]
    used: str
    caches: tuple[str, ...]


_VERSION_1 = _Names(
    ("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
)
_VERSION_2 = _Names(("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))


def memory_bytes() -> int:
    """Memory of the machine, or of the container."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(total, container_bytes() or total)


def available_bytes() -> int:
    """Memory that is available without swapping, and without leaving the container."""
    fields = dict(line.split(":", 1) for line in lines(Path("/proc/meminfo")))
    if "MemAvailable" in fields:
        machine_bytes = int(fields["MemAvailable"].split()[0]) << 10
    else:
        machine_bytes = memory_bytes()
    left_bytes = container_available_bytes()
    return machine_bytes if left_bytes is None else min(machine_bytes, left_bytes)


def node_available_bytes(node: int, nodes: Path = _NODES) -> int:
    """A NUMA node's memory that is available without swapping. Raises InvalidArgument where there is none."""
    there = [number for text in lines(nodes / "has_memory") for number in _numbers(text)]
    if node not in there:
        has = f"has memory on NUMA node {', '.join(map(str, there))}" if there else "has no NUMA nodes"
        raise InvalidArgument(
            f"host_node is {node}: this machine {has}. Give "
            + ("another, or leave host_node out" if there else "no host_node")
        )
    fields = dict(line.split(":", 1) for line in lines(nodes / f"node{node}" / "meminfo"))
    free = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
    left_bytes = sum(int(fields[f"Node {node} {name}"].split()[0]) << 10 for name in free)
    return min(left_bytes, available_bytes())


def _numbers(text: str) -> list[int]:
    """Of a list of the kernel's, such as "0-1,3"."""
    ranges = [part.partition("-") for part in text.split(",") if part]
    return [each for low, _, high in ranges for each in range(int(low), int(high or low) + 1)]


def container_bytes(groups: Path = _GROUPS, root: Path = _ROOT) -> int | None:
    """The smallest memory limit of the control groups that this process is in; None where there is none.

    groups, root   where the system names them, and where their limits lie
    """
    return min((limit_bytes for limit_bytes, _ in _limited(groups, root)), default=None)


def container_available_bytes(groups: Path = _GROUPS, root: Path = _ROOT) -> int | None:
    """Bytes that the control groups still allow, their page cache counted as free. None: no limit."""
    return min(
        (max(0, limit_bytes - used_bytes) for limit_bytes, used_bytes in _limited(groups, root)), default=None
    )


def _limited(groups: Path, root: Path) -> Iterator[tuple[int, int]]:
    """Limit, and bytes in use that cannot be given back, of each group of this process that has a limit."""
    for line in lines(groups):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root, _VERSION_2
        elif "memory" in controllers.split(","):
            base, names = root / "memory", _VERSION_1
        else:
            continue
        # A container may have its own group mounted as the root, and know it by the host's path.
        group = base / path.lstrip("/")
        for folder in dict.fromkeys((group, *group.parents, base)):
            if not folder.is_relative_to(base):
                continue
            limits = [int(text) for name in names.limits for text in lines(folder / name) if text.isdecimal()]
            limit_bytes = min(limits, default=_NO_LIMIT_BYTES)
            if limit_bytes < _NO_LIMIT_BYTES:
                yield limit_bytes, _used_bytes(folder, names)


def _used_bytes(folder: Path, names: _Names) -> int:
    used_bytes = sum(int(text) for text in lines(folder / names.used) if text.isdecimal())
    fields = dict(line.split(" ", 1) for line in lines(folder / "memory.stat"))
    return used_bytes - sum(int(fields.get(name, 0)) for name in names.caches)


def lines(path: Path) -> list[str]:
    """Of a file of the system's; empty where it cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
