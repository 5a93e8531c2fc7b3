"""Headers of checkpoints, good and bad."""

from __future__ import annotations

import struct

from penstock.checkpoint.header import ITEM_BYTES, TensorEntry
from penstock.storage.checksum import crc32c

FILE = "runs/last.safetensors"


def laid_out(*tensors: tuple[str, str, tuple[int, ...]]) -> list[TensorEntry]:
    """Entries one after the other, with checksums that tell them apart."""
    entries: list[TensorEntry] = []
    end = 0
    for number, (name, dtype, shape) in enumerate(tensors):
        begin = end
        size = ITEM_BYTES[dtype]
        for length in shape:
            size *= length
        end += size
        entries.append(TensorEntry(name, dtype, shape, begin, end, (number + 1) * 0x01234567 & 0xFFFFFFFF))
    return entries


def plain(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def sealed(text: str) -> bytes:
    """A header with the checksum that its text should have, as an attacker would make it."""
    beginning = '{"__metadata__":{"penstock.header_crc32c":"'
    assert text.startswith(beginning)
    header = plain((beginning + "0" * 8 + text[len(beginning) + 8 :]).encode())
    at = 8 + len(beginning)
    return header[:at] + b"%08x" % crc32c(header) + header[at + 8 :]


ONE = '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
SIZE = '{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'

# Texts, in which @ stands for the entry above, and how many bytes of data follow.
HOSTILE: dict[str, tuple[str | bytes, int]] = {
    "nothing": ("", 0),
    "no object": ("[]", 0),
    "null": ("null", 0),
    "a text": ('"{}"', 0),
    "text after the end": ("{} x", 0),
    "zero bytes as padding": ("{}\0", 0),
    "another space": ("{}\u00a0", 0),
    "byte order mark": ("\ufeff{}", 0),
    "not UTF-8": (b'{"\xff":@}', 1),
    "a surrogate as UTF-8": (b'{"\xed\xa0\x80":@}', 1),
    "an overlong zero": (b'{"\xc0\x80":@}', 1),
    "half a surrogate pair": ('{"\\ud800":@}', 1),
    "half a pair in metadata": ('{"__metadata__":{"a":"\\udc00"}}', 0),
    "a control character": ('{"a\n":@}', 1),
    "a wrong escape": ('{"\\x41":@}', 1),
    "an open text": ('{"a', 0),
    "an open object": ('{"a":@', 1),
    "a comma too many": ('{"a":@,}', 1),
    "only a comma": ("{,}", 0),
    "a comma in an entry": ('{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],}}', 1),
    "a comma in a shape": ('{"a":{"dtype":"U8","shape":[1,],"data_offsets":[0,1]}}', 1),
    "no quotes": ("{a:@}", 1),
    "a name twice": ('{"a":@,"a":@}', 1),
    "a name twice, escaped": ('{"a":@,"\\u0061":@}', 1),
    "a name twice, empty tensors": (
        '{"a":@,"a":@}'.replace("@", ONE.replace("1", "0")),
        0,
    ),
    "a field twice": ('{"a":{"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]}}', 1),
    "a field twice for another": ('{"a":{"dtype":"U8","shape":[1],"shape":[1]}}', 1),
    "a field missing": ('{"a":{"dtype":"U8","data_offsets":[0,1]}}', 1),
    "a field too many": ('{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":1}}', 1),
    "metadata twice": ('{"__metadata__":{},"__metadata__":{}}', 0),
    "a key of metadata twice": ('{"__metadata__":{"a":"b","a":"b"}}', 0),
    "a number in metadata": ('{"__metadata__":{"a":1}}', 0),
    "null in metadata": ('{"__metadata__":{"a":null}}', 0),
    "a list as metadata": ('{"__metadata__":[]}', 0),
    "an entry that is a number": ('{"a":1}', 0),
    "an entry that is null": ('{"a":null}', 0),
    "an entry that is a list": ('{"a":["U8",[1],[0,1]]}', 1),
    "an unknown dtype": ('{"a":@}'.replace("@", ONE.replace("U8", "F128")), 1),
    "a dtype smaller than a byte": ('{"a":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}}', 3),
    "an odd number of fours": ('{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}}', 1),
    "a single four": ('{"a":{"dtype":"F4","shape":[],"data_offsets":[0,0]}}', 0),
    "a dtype that is null": ('{"a":{"dtype":null,"shape":[1],"data_offsets":[0,1]}}', 1),
    "a negative size": ('{"a":{"dtype":"U8","shape":[-1,-1],"data_offsets":[0,1]}}', 1),
    "a negative zero": ('{"a":{"dtype":"U8","shape":[1],"data_offsets":[-0,1]}}', 1),
    "a float size": ('{"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}}', 1),
    "an exponent": ('{"a":{"dtype":"U8","shape":[1e0],"data_offsets":[0,1]}}', 1),
    "a bool size": ('{"a":{"dtype":"U8","shape":[true],"data_offsets":[0,1]}}', 1),
    "a size that is a text": ('{"a":{"dtype":"U8","shape":["1"],"data_offsets":[0,1]}}', 1),
    "a leading zero": ('{"a":{"dtype":"U8","shape":[01],"data_offsets":[0,1]}}', 1),
    "an underscore": ('{"a":{"dtype":"U8","shape":[1_0],"data_offsets":[0,10]}}', 10),
    "other digits": ('{"a":{"dtype":"U8","shape":[\u0661],"data_offsets":[0,1]}}', 1),
    "not a number": ('{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,1]}}', 1),
    "a huge size": ('{"a":{"dtype":"U8","shape":[1000000000000000000000000000000],"data_offsets":[0,1]}}', 1),
    "a huge offset": ('{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,100000000000000000000000]}}', 1),
    "more digits than Python reads": (SIZE.replace("1", "9" * 5000), 1),
    "a product of 2**64": ('{"a":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]}}', 0),
    "a product of 2**64 + 1": ('{"a":{"dtype":"F32","shape":[4611686018427387905],"data_offsets":[0,4]}}', 4),
    "a large size beside none": (
        '{"a":{"dtype":"U8","shape":[4294967296,4294967296,0],"data_offsets":[0,0]}}',
        0,
    ),
    "more bytes than the file": ('{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}', 1),
    "more elements than bytes": ('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', 4),
    "fewer elements than bytes": ('{"a":{"dtype":"F32","shape":[],"data_offsets":[0,8]}}', 8),
    "an end before the beginning": ('{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,0]}}', 1),
    "three offsets": ('{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1,1]}}', 1),
    "one offset": ('{"a":{"dtype":"U8","shape":[1],"data_offsets":[0]}}', 1),
    "a hole at the beginning": ('{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}', 2),
    "a hole": ('{"a":@,"b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}}', 3),
    "an overlap": ('{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":@}', 2),
    "the same place": ('{"a":@,"b":@}', 1),
    "an empty tensor inside another": (
        '{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},'
        '"b":{"dtype":"U8","shape":[0],"data_offsets":[1,1]}}',
        2,
    ),
    "bytes of nobody": ('{"a":@}', 2),
    "much space in an entry": ('{"a":{' + " " * 300_000 + "x}}", 0),
    "much space in a shape": ('{"a":{"shape":[' + " " * 300_000 + "x]}}", 0),
    "much space after a size": ('{"a":{"shape":[1' + " " * 300_000 + "x]}}", 0),
    "much space in a list": ('{"a":{"dtype":"U8","data_offsets":[' + " " * 300_000 + "x]}}", 0),
    "much space between fields": ('{"a":{"shape":[1]' + " " * 300_000 + "," + " " * 300_000 + "x]}}", 0),
    "much space between members": ("{" + " " * 300_000 + '"a"' + " " * 300_000 + "}", 0),
    "deep lists": ('{"a":' + "[" * 100_000 + "]" * 100_000 + "}", 0),
    "deep objects": ('{"a":' * 100_000, 0),
    "deep metadata": ('{"__metadata__":' * 1000, 0),
    "65 dimensions": (SIZE.replace("1", ",".join("1" * 65), 1), 1),
}
# The library believes these, and so would not tell which of two tensors is meant, or torch cannot hold them.
ONLY_OURS = {
    "a name twice",
    "a name twice, escaped",
    "a name twice, empty tensors",
    "a key of metadata twice",
    "a field too many",
    "an entry that is a list",
    "a dtype smaller than a byte",
    "65 dimensions",
}
# A single tensor, whose description is the problem.
ONE_TENSOR = {
    name
    for name, (text, _) in HOSTILE.items()
    if str(text).startswith(('{"a":{"dtype', '{"a":1', '{"a":n')) and '"b"' not in str(text)
}


def hostile(name: str) -> tuple[bytes, int]:
    text, more = HOSTILE[name]
    return (text.encode() if isinstance(text, str) else text).replace(b"@", ONE.encode()), more
