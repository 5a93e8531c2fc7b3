"""The name of a namespace: ``nvme+tcp://HOST:PORT/NQN?ns=1``. Pure: nothing is looked up or opened.

After the NQN (the name of the NVM subsystem, percent-encoded where it needs be) come options: docs/samples.md
says what each does, and `Url` what it is where it is not given. ``ns`` has to be. A fragment,
``#part-00000-of-00002``, names one of several partitions of a sample store.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import quote, unquote_to_bytes

from penstock.errors import InvalidArgument

SCHEME = "nvme+tcp"
DEFAULT_PORT = 4420
LARGEST_NQN_BYTES = 223
DISCOVERY_NQN = "nqn.2014-08.org.nvmexpress.discovery"
LARGEST_NAMESPACE = 0xFFFFFFFE
MOST_QUEUES = 64
MOST_DEPTH = 1023

_FORM = f"{SCHEME}://HOST:PORT/NQN?ns=1"
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(/+)(.*)", re.DOTALL)
_HOST = re.compile(r"[A-Za-z0-9._-]+")
_HOST6 = re.compile(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?")
_OPTIONS = ("ns", "hdgst", "ddgst", "queues", "depth", "takeover", "encrypt", "hostnqn")
_KEPT = ":@!$'()*,;/"  # in an NQN, besides letters, digits and _.-~


class Portal(NamedTuple):
    """Where a target listens.

    host   a name or an address, IPv6 without brackets
    """

    host: str
    port: int

    @property
    def is_here(self) -> bool:
        """On the loopback, by its name or address alone."""
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return self.host.lower() in ("localhost", "localhost.")

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True, kw_only=True)
class Url:
    """A namespace, and how to speak to its target; see the module.

    subsystem_nqn   of the NVM subsystem
    namespace       its number there, from 1 on (ns)
    header_digest   ask for CRC-32C over what frames the data (hdgst), and over the data (ddgst)
    queues          I/O queues, each a TCP connection
    depth           commands in flight on each
    takeover        write to it although a run of another machine, which is gone, has not said that it ended
    encrypt         spilled tensors; None: where the host is another machine
    host_nqn        the name that this machine gives itself (hostnqn); None: see `this_host`
    fragment        what follows #, empty for all of it
    """

    host: str
    port: int = DEFAULT_PORT
    subsystem_nqn: str
    namespace: int
    header_digest: bool = False
    data_digest: bool = False
    queues: int = 1
    depth: int = 128
    takeover: bool = False
    encrypt: bool | None = None
    host_nqn: str | None = None
    fragment: str = ""

    @property
    def portal(self) -> Portal:
        return Portal(self.host, self.port)

    def __str__(self) -> str:
        options = [f"ns={self.namespace}"]
        options += ["hdgst=1"] if self.header_digest else []
        options += ["ddgst=1"] if self.data_digest else []
        options += [f"queues={self.queues}"] if self.queues != 1 else []
        options += [f"depth={self.depth}"] if self.depth != 128 else []
        options += ["takeover=1"] if self.takeover else []
        options += [] if self.encrypt is None else [f"encrypt={self.encrypt:d}"]
        options += [] if self.host_nqn is None else [f"hostnqn={quote(self.host_nqn, safe=_KEPT)}"]
        fragment = f"#{quote(self.fragment, safe=_KEPT)}" if self.fragment else ""
        name = quote(self.subsystem_nqn, safe=_KEPT)
        return f"{SCHEME}://{self.portal}/{name}?{'&'.join(options)}{fragment}"


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether it is meant as a URL, of whatever kind, and not as a path."""
    match = _URL.fullmatch(os.fspath(path))
    return match is not None and (len(match[2]) > 1 or match[1].lower().startswith("nvme+"))


def parse_url(text: str, others: str = "") -> Url:
    """The namespace that ``text`` names. Raises InvalidArgument, which says what is wrong with it.

    others   what else could be given, where it is of another kind
    """
    try:
        rest, hash_mark, fragment = _after_scheme(text).partition("#")
        if hash_mark and not fragment:
            raise _Wrong("ends with an empty fragment: leave # out")
        rest, _, query = rest.partition("?")
        authority, _, name = rest.partition("/")
        portal = _portal(authority)
        if not name:
            raise _Wrong("names no subsystem: `penstock samples discover HOST:PORT` lists those of a target")
        options = _options(query)
        if "ns" not in options:
            raise _Wrong("names no namespace: add ?ns=1, or which one it is")
        return Url(
            host=portal.host,
            port=portal.port,
            subsystem_nqn=_nqn(name, "the NQN"),
            namespace=_number("ns", options["ns"], LARGEST_NAMESPACE),
            header_digest=_switch("hdgst", options),
            data_digest=_switch("ddgst", options),
            takeover=_switch("takeover", options),
            encrypt=_switch("encrypt", options) if "encrypt" in options else None,
            queues=_number("queues", options.get("queues", "1"), MOST_QUEUES),
            depth=_number("depth", options.get("depth", "128"), MOST_DEPTH),
            host_nqn=_nqn(options["hostnqn"], "hostnqn") if "hostnqn" in options else None,
            fragment=_decoded(fragment, "the fragment"),
        )
    except _Wrong as problem:
        also = f"{others}, or " if others and isinstance(problem, _WrongKind) else ""
        raise InvalidArgument(f"{text!r} {problem}. Give {also}{_FORM}") from None


def parse_portal(text: str) -> Portal:
    """Of ``HOST``, ``HOST:PORT`` or a URL that begins so: where a target listens. Raises InvalidArgument."""
    try:
        return _portal(re.split("[/?#]", _after_scheme(text) if is_url(text) else text, maxsplit=1)[0])
    except _Wrong as problem:
        raise InvalidArgument(f"{text!r} {problem}. Give HOST:PORT, or {SCHEME}://HOST:PORT") from None


class _Wrong(Exception):
    """What is wrong with a URL."""


class _WrongKind(_Wrong):
    """It is none of NVMe."""


def _after_scheme(text: str) -> str:
    match = _URL.fullmatch(text)
    if match is None:
        raise _WrongKind("is not a URL")
    scheme = match[1].lower()
    if scheme == "nvme+tls":
        raise InvalidArgument(
            f"{text!r} asks for TLS, which penstock does not speak. Use {SCHEME}:// in a network that you "
            "trust, or through an encrypted tunnel (WireGuard, IPsec)"
        )
    if scheme != SCHEME:
        raise _WrongKind(f"is of the kind {scheme}://, which penstock does not speak")
    if len(match[2]) == 1:
        raise _Wrong("has lost a slash, as a URL does in a Path: give it as text")
    return match[2][2:] + match[3]


def _portal(authority: str) -> Portal:
    if "@" in authority:
        raise _Wrong("has a user name, which NVMe has not")
    if authority.startswith("["):
        host, bracket, port = authority[1:].partition("]")
        if not bracket or not _HOST6.fullmatch(host) or ":" not in host:
            raise _Wrong("has no IPv6 address between its brackets")
        if port and not port.startswith(":"):
            raise _Wrong("has something other than a port after its address")
        given, port = bool(port), port[1:]
    else:
        host, colon, port = authority.partition(":")
        given = bool(colon)
        if ":" in port:
            raise _Wrong("has an IPv6 address without brackets: write [::1]:4420")
        if not host:
            raise _Wrong("names no host")
        if not _HOST.fullmatch(host):
            raise _Wrong(f"has a host, {host!r}, that is neither a name nor an address")
    return Portal(host, _number("port", port, 65535) if given else DEFAULT_PORT)


def _options(query: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for part in query.split("&") if query else []:
        name, equals, value = part.partition("=")
        if name not in _OPTIONS:
            raise _Wrong(f"has the option {name!r}, which is none of {', '.join(_OPTIONS)}")
        if not equals or not value:
            raise _Wrong(f"gives {name} no value")
        if name in options:
            raise _Wrong(f"gives {name} twice")
        options[name] = value
    return options


def _number(name: str, text: str, most: int) -> int:
    if not (text.isascii() and text.isdecimal()) or len(text) > 10 or not 1 <= int(text) <= most:
        raise _Wrong(f"has {name}={text}: it is a number from 1 to {most}")
    return int(text)


def _switch(name: str, options: dict[str, str]) -> bool:
    if (value := options.get(name, "0")) not in ("0", "1"):
        raise _Wrong(f"has {name}={value}: it is 0 or 1")
    return value == "1"


def _nqn(text: str, what: str) -> str:
    name = _decoded(text, what)
    if (size_bytes := len(name.encode())) > LARGEST_NQN_BYTES:
        most = f"at most {LARGEST_NQN_BYTES} are possible"
        raise _Wrong(f"is too long: {what} has {size_bytes} bytes, and {most}")
    return name


def _decoded(text: str, what: str) -> str:
    try:
        decoded = unquote_to_bytes(text).decode()
    except UnicodeError:
        raise _Wrong(f"cannot be read: {what} is not UTF-8") from None
    if any(ord(letter) < 0x21 or ord(letter) == 0x7F for letter in decoded):
        raise _Wrong(f"cannot be used: {what} has a space or a control character")
    return decoded
