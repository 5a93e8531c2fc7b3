"""The name of a namespace: ``nvme+tcp://HOST:PORT/NQN?ns=1``. Pure: nothing is looked up or opened.

After the NQN (the name of the NVM subsystem, percent-encoded where it needs be) come options:

ns       the namespace, from 1 on; it has to be given
hdgst    1: ask for header digests, CRC-32C over what frames the data; 0, the default: do not
ddgst    1: ask for data digests, CRC-32C over the data; 0, the default: do not
queues   I/O queues, each a TCP connection; default 1
depth    commands in flight on each; default 128
takeover 1: spill to it although a run of another machine, which is gone, has not said that it has ended;
         0, the default: do not
hostnqn  the name that this machine gives itself; default: that of /etc/nvme/hostnqn, or one made of its id

A fragment, ``#part-00000-of-00002``, names one of several partitions of a sample store.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, NoReturn
from urllib.parse import quote, unquote_to_bytes

from penstock.errors import InvalidArgument

SCHEME = "nvme+tcp"
DEFAULT_PORT = 4420
LARGEST_NQN_BYTES = 223
LARGEST_NAMESPACE = 0xFFFFFFFE
MOST_QUEUES = 64
MOST_DEPTH = 1023

_FORM = f"{SCHEME}://HOST:PORT/NQN?ns=1"
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(/+)(.*)", re.DOTALL)
_HOST = re.compile(r"[A-Za-z0-9._-]+")
_HOST6 = re.compile(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?")
_OPTIONS = ("ns", "hdgst", "ddgst", "queues", "depth", "takeover", "hostnqn")
_KEPT = ":@!$'()*,;/"  # in an NQN, besides letters, digits and _.-~


class Portal(NamedTuple):
    """Where a target listens.

    host   a name or an address, IPv6 without brackets
    """

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True, kw_only=True)
class Url:
    """A namespace, and how to speak to its target; see the module.

    subsystem_nqn   of the NVM subsystem
    namespace       its number there, from 1 on
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
        options += [] if self.host_nqn is None else [f"hostnqn={quote(self.host_nqn, safe=_KEPT)}"]
        fragment = f"#{quote(self.fragment, safe=_KEPT)}" if self.fragment else ""
        name = quote(self.subsystem_nqn, safe=_KEPT)
        return f"{SCHEME}://{self.portal}/{name}?{'&'.join(options)}{fragment}"


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether it is meant as a URL, of whatever kind, and not as a path."""
    match = _URL.fullmatch(os.fspath(path))
    return match is not None and (len(match[2]) > 1 or match[1].lower().startswith("nvme+"))


def parse_url(text: str) -> Url:
    """The namespace that ``text`` names. Raises InvalidArgument, which says what is wrong with it."""

    def refuse(problem: str) -> NoReturn:
        raise InvalidArgument(f"{text!r} {problem}. Give {_FORM}")

    rest = _after_scheme(text, refuse)
    rest, hash_mark, fragment = rest.partition("#")
    if hash_mark and not fragment:
        refuse("ends with an empty fragment: leave # out")
    rest, _, query = rest.partition("?")
    authority, slash, name = rest.partition("/")
    portal = _portal(authority, refuse)
    if not slash or not name:
        refuse("names no subsystem: `penstock samples discover HOST:PORT` lists those of a target")
    options = _options(query, refuse)
    if "ns" not in options:
        refuse("names no namespace: add ?ns=1, or which one it is")
    host_nqn = options.get("hostnqn")
    return Url(
        host=portal.host,
        port=portal.port,
        subsystem_nqn=_nqn(name, "the NQN", refuse),
        namespace=_number("ns", options["ns"], LARGEST_NAMESPACE, refuse),
        header_digest=_switch("hdgst", options, refuse),
        data_digest=_switch("ddgst", options, refuse),
        takeover=_switch("takeover", options, refuse),
        queues=_number("queues", options.get("queues", "1"), MOST_QUEUES, refuse),
        depth=_number("depth", options.get("depth", "128"), MOST_DEPTH, refuse),
        host_nqn=None if host_nqn is None else _nqn(host_nqn, "hostnqn", refuse),
        fragment=_decoded(fragment, "the fragment", refuse),
    )


def parse_portal(text: str) -> Portal:
    """Of ``HOST``, ``HOST:PORT`` or a URL that begins so: where a target listens. Raises InvalidArgument."""

    def refuse(problem: str) -> NoReturn:
        raise InvalidArgument(f"{text!r} {problem}. Give HOST:PORT, or {SCHEME}://HOST:PORT")

    rest = _after_scheme(text, refuse) if is_url(text) else text
    return _portal(re.split("[/?#]", rest, maxsplit=1)[0], refuse)


_Refuse = Callable[[str], NoReturn]


def _after_scheme(text: str, refuse: _Refuse) -> str:
    match = _URL.fullmatch(text)
    if match is None:
        refuse("is not a URL")
    scheme = match[1].lower()
    if scheme == "nvme+tls":
        raise InvalidArgument(
            f"{text!r} asks for TLS, which penstock does not speak. Use {SCHEME}:// in a network that you "
            "trust, or through an encrypted tunnel (WireGuard, IPsec)"
        )
    if scheme != SCHEME:
        refuse(f"is of the kind {scheme}://, which penstock does not speak")
    if len(match[2]) == 1:
        refuse("has lost a slash, as a URL does in a Path: give it as text")
    return match[2][2:] + match[3]


def _portal(authority: str, refuse: _Refuse) -> Portal:
    if "@" in authority:
        refuse("has a user name, which NVMe has not")
    if authority.startswith("["):
        host, bracket, port = authority[1:].partition("]")
        if not bracket or not _HOST6.fullmatch(host) or ":" not in host:
            refuse("has no IPv6 address between its brackets")
        if port and not port.startswith(":"):
            refuse("has something other than a port after its address")
        given, port = bool(port), port[1:]
    else:
        host, colon, port = authority.partition(":")
        given = bool(colon)
        if ":" in port:
            refuse("has an IPv6 address without brackets: write [::1]:4420")
        if not host:
            refuse("names no host")
        if not _HOST.fullmatch(host):
            refuse(f"has a host, {host!r}, that is neither a name nor an address")
    return Portal(host, _number("port", port, 65535, refuse) if given else DEFAULT_PORT)


def _options(query: str, refuse: _Refuse) -> dict[str, str]:
    options: dict[str, str] = {}
    for part in query.split("&") if query else []:
        name, equals, value = part.partition("=")
        if name not in _OPTIONS:
            refuse(f"has the option {name!r}, which is none of {', '.join(_OPTIONS)}")
        if not equals or not value:
            refuse(f"gives {name} no value")
        if name in options:
            refuse(f"gives {name} twice")
        options[name] = value
    return options


def _number(name: str, text: str, most: int, refuse: _Refuse) -> int:
    if not (text.isascii() and text.isdecimal()) or len(text) > 10 or not 1 <= int(text) <= most:
        refuse(f"has {name}={text}: it is a number from 1 to {most}")
    return int(text)


def _switch(name: str, options: dict[str, str], refuse: _Refuse) -> bool:
    value = options.get(name, "0")
    if value not in ("0", "1"):
        refuse(f"has {name}={value}: it is 0 or 1")
    return value == "1"


def _nqn(text: str, what: str, refuse: _Refuse) -> str:
    name = _decoded(text, what, refuse)
    size_bytes = len(name.encode())
    if size_bytes > LARGEST_NQN_BYTES:
        refuse(f"is too long: {what} has {size_bytes} bytes, and at most {LARGEST_NQN_BYTES} are possible")
    return name


def _decoded(text: str, what: str, refuse: _Refuse) -> str:
    try:
        decoded = unquote_to_bytes(text).decode()
    except UnicodeError:
        refuse(f"cannot be read: {what} is not UTF-8")
    if any(ord(letter) < 0x21 or ord(letter) == 0x7F for letter in decoded):
        refuse(f"cannot be used: {what} has a space or a control character")
    return decoded
