"""In which order samples come: a pure function of seed, epoch and how the epoch is divided.

This is the specification. `penstock._native.SampleOrder` carries it out; the tests compare it, number by
number, with slow Python code that was written from this text.

**Random numbers** are hashes of what they are for, in 64 bits, modulo 2^64. G is 0x9E3779B97F4A7C15::

    mix(x)         x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9; x = (x ^ x >> 27) * 0x94D049BB133111EB; x ^ x >> 31
    key(w1, ...)   k = 0; for each word w: k = mix(k + G ^ w)
    draw(k, i)     mix(k + (i + 1) * G), i = 0, 1, ...: the sequence of splitmix64

A *permutation* of [0, n) under a key is a Feistel network over 2^b numbers, where b is the bits of n - 1,
and at least 8: of the b bits, ``low`` has b // 2 and ``high`` the others. Six rounds, by turns, change
``high ^= mix(low ^ draw(key, round))`` and ``low ^= mix(high ^ draw(key, round))``, cut to their bits. The
network is applied until the result is below n.

**Replicas** share an epoch: each process, or each DataLoader worker of each process, is one. Of n samples,
replica s of S has n // S, and one more where s < n % S.

**Full order**: sample p(i) for the positions i = s, s + S, s + 2 S, ..., where p permutes all samples, under
key(seed, epoch, 1). After earlier segments, the positions are those that nobody took, in ascending order.

**Chunk order** (DLFS, section III-D.2, with a bounded cache) goes by *items*. An item is samples of one
chunk: of the chunk's own order, those from one position up to another. Position j of m samples is sample
``(start + j * stride) % m``; with k = key(seed, epoch, 5, chunk), start is draw(k, 0) % m, and stride is the
first number from 1 + draw(k, 1) % min(m - 1, 2^20) on that has no divisor in common with m (1 where m is 1).

1. The pool is an item for each chunk with samples, in stored order. The items are permuted, under
   key(seed, epoch, 2, g), where g counts earlier segments. Their samples, one item after the other, are cut
   into replicas. A cut may fall inside an item.
2. A replica keeps `slots` items under way, at first its first ones in order. For number i, from 0 on, of its
   samples, w = draw(key(seed, epoch, 3, g, replica), i) names two slots, ``(w >> 32) * slots >> 32`` and
   ``(w % 2^32) * slots >> 32``. The sample is the next one of the item in the second, if that slot was picked
   from before the first was (never counts as number 0), else of the item in the first. An item that ends
   gives its slot to the replica's next one.

   Two are better than one: with three times as many slots as a batch has samples, a batch draws from 96 % of
   the chunks that a full shuffle draws from, and from 85 % otherwise.

   Slots begin at once. Were they all equally likely, they would end at about the same time, and their
   successors, too, and chunks would be wanted in bursts. So, for as many samples as the first items have,
   the slot is the larger of the two where w is odd, and the first of them where it is even. The last slot is
   then three times as likely as the first, and afterwards ages differ evenly. No chunk is read twice for it.
3. As soon as no item is left to begin, the r samples that are left come by a permutation of [0, r), under
   key(seed, epoch, 4, g, replica): the rank that it gives falls to a slot, each having as many ranks as
   samples left, in order, and that slot's next sample comes. So mixing does not fade at the end, and where
   all chunks fit, the order is as good as a full one.

After earlier segments, the pool is what they left, replica by replica, and in a replica in the order of its
items: of those that were begun, the rest.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.errors import InvalidArgument
from penstock.samples.format.layout import buffer_bytes
from penstock.units import format_bytes_up

ORDERS = ("full", "chunk")
AHEAD = 32  # most chunks that are read ahead of their slot


class Segment(NamedTuple):
    """What was taken of an epoch while it was divided in one way. An epoch that was resumed has several.

    replicas  into how many: processes times workers
    slots     chunks that each replica mixed
    taken     samples that each replica has given, or one number that holds for all
    """

    replicas: int
    slots: int
    taken: tuple[int, ...]


class CacheShape(NamedTuple):
    """How the sample cache is used.

    slots   chunks that samples are picked from
    ahead   further chunks that are read meanwhile
    """

    slots: int
    ahead: int


def cache_shape(cache_bytes: int, chunk_bytes: int, chunks: int) -> CacheShape:
    """Divide ``cache_bytes`` into buffers. Where all ``chunks`` fit, they all are slots.

    One buffer is one slot, whose samples are mixed among themselves. Raises InvalidArgument where there is
    no room for it.
    """
    buffers = cache_bytes // buffer_bytes(chunk_bytes)
    if buffers >= chunks:
        return CacheShape(max(1, chunks), 0)
    if buffers < 1:
        raise InvalidArgument(
            f"cache_bytes={cache_bytes} has no room for a chunk: give at least "
            f"{format_bytes_up(buffer_bytes(chunk_bytes))}"
        )
    ahead = min(AHEAD, max(buffers // 8, 1), buffers - 1)
    return CacheShape(buffers - ahead, ahead)
