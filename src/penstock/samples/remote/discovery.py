"""What the targets of a network have to offer, and what lies there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.errors import InvalidArgument, InvalidFile
from penstock.samples.reader.failures import from_target
from penstock.samples.remote.device import Device, contents, read_superblock
from penstock.storage.nvme import (
    DEFAULT_TIMEOUT_S,
    Namespace,
    Subsystem,
    TargetError,
    namespaces_of,
    parse_portal,
    parse_url,
    subsystems_of,
)


@dataclass(frozen=True, kw_only=True)
class RemoteNamespace:
    """A namespace that a target has to offer, or a subsystem of which none can be used.

    url          of the namespace, as `mount` and `upload` take it; of a subsystem without ``?ns=``
    size_bytes   None where it cannot be used
    block_bytes  None where it cannot be used
    holds        what lies there, such as "a store of 137 GiB", or "nothing"
    problem      why it cannot be used; empty where it can
    """

    url: str
    size_bytes: int | None = None
    block_bytes: int | None = None
    holds: str = ""
    problem: str = ""


def discover(portal: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[RemoteNamespace]:
    """What the target at ``portal`` lets this host use. Nothing is written.

    portal     HOST, HOST:PORT, or a URL that begins so
    timeout_s  longest wait for an answer

    Raises SampleError where the target cannot be reached, InvalidArgument for what is no address.
    """
    try:
        found = subsystems_of(parse_portal(portal), timeout_s)
    except TargetError as error:
        raise from_target(error) from error
    return [each for subsystem in found if subsystem.kind == "nvme" for each in _found(subsystem, timeout_s)]


def _found(subsystem: Subsystem, timeout_s: float) -> Iterator[RemoteNamespace]:
    url = str(subsystem.url(1))
    name = url.rpartition("?")[0]
    try:
        parse_url(url)
    except InvalidArgument as error:
        yield RemoteNamespace(url=name, problem=f"what the target says of it cannot be used: {error}")
        return
    if subsystem.transport != "tcp":
        yield RemoteNamespace(url=name, problem=f"it speaks {subsystem.transport}, and penstock TCP")
    elif subsystem.security:
        yield RemoteNamespace(url=name, problem="it asks for TLS, which penstock does not speak")
    else:
        try:
            numbers = namespaces_of(subsystem, timeout_s)
        except TargetError as error:
            yield RemoteNamespace(url=name, problem=str(error))
            return
        if not numbers:
            yield RemoteNamespace(url=name, problem="it has no namespace for this host")
        for number in numbers:
            yield _namespace(subsystem, number, timeout_s)


def _namespace(subsystem: Subsystem, number: int, timeout_s: float) -> RemoteNamespace:
    url = subsystem.url(number)
    try:
        with Namespace(url, timeout_s) as namespace:
            return RemoteNamespace(
                url=str(url),
                size_bytes=namespace.size_bytes,
                block_bytes=namespace.block_bytes,
                holds=_held(namespace, str(url)),
            )
    except TargetError as error:
        return RemoteNamespace(url=str(url), problem=str(error))


def _held(device: Device, name: str) -> str:
    try:
        superblock = read_superblock(device, name).superblock
    except InvalidFile as error:
        return f"a damaged store: {error}"
    if superblock is None:
        return contents(device) or "nothing"
    return "a store" if superblock.complete else "part of a store, whose upload was not finished"
