"""Keys by which hosts and targets know each other (DH-HMAC-CHAP), as `nvme gen-dhchap-key` writes them.

A key is the text ``DHHC-1:xx:base64:`` of NVM Express (Base 2.0, section 8.13.5.8). It comes from the
environment or from a file, never from a URL, and no text of penstock's shows it:

PENSTOCK_NVME_KEY        ``HOST_KEY`` or ``HOST_KEY CONTROLLER_KEY``, for every subsystem
PENSTOCK_NVME_KEY_FILE   a file that only its owner can read, of lines ``SUBSYSTEM_NQN HOST_KEY
                         [CONTROLLER_KEY]``; ``*`` stands for any subsystem, ``#`` begins a comment, and the
                         first line that fits counts
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
from typing import NamedTuple

from penstock.errors import InvalidArgument

KEY_VARIABLE, FILE_VARIABLE = "PENSTOCK_NVME_KEY", "PENSTOCK_NVME_KEY_FILE"

_HASHES = {"00": 0, "01": 1, "02": 2, "03": 3}  # that bind a key to a name: none, SHA-256, -384, -512
_KEY_BYTES = (32, 48, 64)
_MOST_FILE_BYTES = 1 << 20


class Keys(NamedTuple):
    """Of one subsystem, each as the native side takes it: the number of a hash, then 32, 48 or 64 bytes.
    Empty bytes are no key.

    host        what the host shows to the target
    controller  what the target shows to the host; without one it need not show any
    """

    host: bytes = b""
    controller: bytes = b""

    def __repr__(self) -> str:
        return f"Keys(host={bool(self.host)}, controller={bool(self.controller)})"


def keys_for(subsystem_nqn: str) -> Keys:
    """The keys for a subsystem; none where neither variable is set, or no line of the file fits.

    Raises InvalidArgument where a key, or the file, cannot be used.
    """
    if text := os.environ.get(KEY_VARIABLE):
        return _keys(text.split(), KEY_VARIABLE)
    if path := os.environ.get(FILE_VARIABLE):
        for number, line in enumerate(_private_lines(path), 1):
            name, *keys = line.partition("#")[0].split() or [""]
            if name in ("*", subsystem_nqn):
                return _keys(keys, f"line {number} of {path} ({FILE_VARIABLE})")
    return Keys()


def _keys(texts: list[str], where: str) -> Keys:
    if not 1 <= len(texts) <= 2:
        raise InvalidArgument(
            f"{where} has {len(texts)} keys: give the host's key, and after a blank the controller's if the "
            "target is to show one"
        )
    return Keys(*(_decoded(text, where) for text in texts))


def _decoded(text: str, where: str) -> bytes:
    """[33, 49 or 65 bytes]"""
    kind, _, rest = text.partition(":")
    number, _, encoded = rest.partition(":")
    problem = "it does not have the form DHHC-1:xx:...:"
    if kind == "DHHC-1" and number in _HASHES and encoded.endswith(":"):
        try:
            data = base64.b64decode(encoded[:-1], validate=True)
        except binascii.Error:
            problem = "it is not base64"
        else:
            key, crc = data[:-4], data[-4:]
            if len(key) not in _KEY_BYTES:
                problem = f"it has {len(key)} bytes, not 32, 48 or 64"
            elif binascii.crc32(key).to_bytes(4, "little") != crc:
                problem = "its checksum is wrong"
            else:
                return bytes([_HASHES[number]]) + key
    raise InvalidArgument(
        f"a key in {where} cannot be used: {problem}. Give it as `nvme gen-dhchap-key` writes it"
    )


def _private_lines(path: str) -> list[str]:
    try:
        with open(path, "rb") as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode) or about.st_size > _MOST_FILE_BYTES:
                raise InvalidArgument(f"{path} ({FILE_VARIABLE}) is not a file of keys")
            if about.st_mode & 0o077:
                raise InvalidArgument(
                    f"{path} ({FILE_VARIABLE}) can be read or written by others: chmod 600 {path}"
                )
            return file.read().decode().splitlines()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise InvalidArgument(f"{path} ({FILE_VARIABLE}) cannot be read: {reason}") from error
