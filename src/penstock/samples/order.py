"""In which order samples come, a pure function of seed, epoch and how the epoch is divided; and how well it
mixes.

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

**Of some samples only** (`Store.sequence(kept=...)`), the n that are kept are numbered through, chunk by
chunk; the order is that of n samples in as many chunks, and number i is sample kept[i].

**How well an order mixes** is two numbers, each beside the one that a full shuffle gives on average:

- *distinct*: from how many chunks a batch draws. The same for equal ranges of the stored order, such as
  20: that can be compared with shards, and with classes where the store is sorted by class.
- *displacement*: how far samples move from their stored order, as a share of the store: the mean of
  |place in the epoch - index| / samples, about 1/3 where all is shuffled. Beside it stands the correlation of
  place and index, which is 1 in stored order and about 0 where all is shuffled.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock import _native
from penstock.errors import InvalidArgument
from penstock.samples.layout import buffer_bytes
from penstock.units import format_bytes_up

ORDERS = ("full", "chunk")
AHEAD = 32  # most chunks that are read ahead of their slot, of each store or partition


Slots: TypeAlias = int | tuple[int, ...]


class Segment(NamedTuple):
    """What was taken of an epoch while it was divided in one way. An epoch that was resumed has several.

    replicas  into how many: processes times workers
    slots     chunks that each replica mixed; of a mixture, of each of its sources
    taken     samples that each replica has given, or one number that holds for all
    """

    replicas: int
    slots: Slots
    taken: tuple[int, ...]


class CacheShape(NamedTuple):
    """How the sample cache is used.

    slots   chunks that samples are picked from
    ahead   further chunks that are read meanwhile
    """

    slots: int
    ahead: int


def cache_shape(cache_bytes: int, chunk_bytes: int, chunks: int, stores: int = 1) -> CacheShape:
    """Divide ``cache_bytes`` into buffers. Where all ``chunks`` fit, they all are slots.

    stores   stores or partitions that the chunks are of. Each may lie on a drive of its own, and chunks come
             in random order: only where about ten reads of each are under way none of them waits for work
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
    ahead = min(AHEAD * stores, max(buffers // (8 if stores == 1 else 4), 1), buffers - 1)
    return CacheShape(buffers - ahead, ahead)


Indices = npt.NDArray[np.int64]


class ReplicaShare(NamedTuple):
    """What one replica is to have of an epoch, as `Store.sequence` says."""

    seed: int
    epoch: int
    after: Sequence[Segment]
    replica: int
    replicas: int
    skip: int


def order_of(
    kind: str,
    samples: int,
    share: ReplicaShare,
    firsts: npt.NDArray[np.uint64] | None = None,
    slots: int = 0,
    kept: npt.NDArray[np.uint64] | None = None,
) -> _native.SampleOrder:
    """The order of a share. ``firsts``, ``slots``: of "chunk"; ``kept``: as above. Raises InvalidArgument."""
    after: Any = [(each.replicas, each.slots, list(each.taken)) for each in share.after]
    try:
        numbers = [operator.index(number) for number in (*share[:2], *share[3:])]
        if not all(0 <= number < 1 << 64 for number in numbers):
            raise ValueError("give numbers from 0, below 2**64")
        seed, epoch, replica, replicas, skip = numbers
        bounds = np.empty(0, np.uint64) if firsts is None else firsts
        order = _native.SampleOrder(kind, samples, bounds, seed, epoch, replicas, replica, slots, after, kept)
        order.skip(skip)
    except (ValueError, TypeError, OverflowError) as error:
        asked = ", ".join(f"{name}={value}" for name, value in share._asdict().items() if name != "after")
        raise InvalidArgument(f"no such sequence, {asked}: {str(error).splitlines()[0]}") from error
    return order


GROUPS = 20
MOST_BATCHES = 4096


@dataclass(frozen=True, slots=True)
class Mixing:
    """The mixing of an order, for batches of one size.

    batches              from how many batches this was measured, spread evenly over the order
    chunks, ideal_chunks                 that a batch draws from, on average
    groups, ideal_groups                 the same, of `of_groups` equal ranges of the stored order
    displacement, ideal_displacement     how far samples move, as a share of the store
    correlation          of a sample's place in the epoch and its index
    """

    batch_size: int
    batches: int
    chunks: float
    ideal_chunks: float
    of_groups: int
    groups: float
    ideal_groups: float
    displacement: float
    ideal_displacement: float
    correlation: float

    @property
    def ratio(self) -> float:
        """Chunks against the ideal: 1 where a batch by chance draws from more."""
        return min(self.chunks / self.ideal_chunks, 1.0)

    @property
    def groups_ratio(self) -> float:
        """Groups against the ideal, in the same way."""
        return min(self.groups / self.ideal_groups, 1.0)

    def __str__(self) -> str:
        return (
            f"a batch of {self.batch_size} draws from {self.chunks:.1f} chunks "
            f"({self.ratio:.1%} of {self.ideal_chunks:.1f}) and {self.groups:.1f} of {self.of_groups} ranges "
            f"({self.groups_ratio:.1%} of {self.ideal_groups:.1f}); samples move by {self.displacement:.3f} "
            f"of the store (shuffled: {self.ideal_displacement:.3f}), correlation {self.correlation:.3f}"
        )


def mixing_of(
    indices: npt.ArrayLike, firsts: npt.ArrayLike, batch_size: int, *, groups: int = GROUPS
) -> Mixing:
    """Measure an epoch, or its beginning, that was delivered.

    indices   [n] in the order of delivery
    firsts    [chunks + 1] ascending: the first sample of each chunk, then how many samples the store has

    A last batch that is shorter does not count, unless it is the only one. Raises InvalidArgument where there
    are no samples.
    """
    delivered = np.asarray(indices, np.int64)
    batch_size = _batch_size(batch_size, len(delivered))
    rows = delivered[: len(delivered) // batch_size * batch_size].reshape(-1, batch_size)
    chosen = _spread(len(rows), MOST_BATCHES)
    places = chosen[:, None] * batch_size + np.arange(batch_size)
    return _mixing(rows[chosen], places, np.asarray(firsts, np.int64), groups)


def expected_mixing(
    kind: str,
    firsts: npt.ArrayLike,
    *,
    slots: int,
    batch_size: int,
    seed: int = 0,
    epoch: int = 0,
    replicas: int = 1,
    groups: int = GROUPS,
    batches: int = MOST_BATCHES,
) -> Mixing:
    """What an order will give, before anything is read: the order of the first replica is drawn and measured.

    firsts    [chunks + 1] ascending: the first sample of each chunk, then how many samples the store has
    slots     chunks that the replica mixes: of a cache, `cache_shape(...).slots`
    batches   how many are looked at, at most, spread evenly over the epoch

    Raises InvalidArgument where the replica has no samples.
    """
    bounds = np.asarray(firsts, np.uint64)
    order = _native.SampleOrder(kind, int(bounds[-1]), bounds, seed, epoch, replicas, 0, slots, [])
    batch_size = _batch_size(batch_size, order.size)
    chosen = _spread(order.size // batch_size, batches)
    rows = np.empty((len(chosen), batch_size), np.int64)
    for row, batch in zip(rows, chosen, strict=True):
        order.skip(int(batch) * batch_size - order.taken)
        row[:] = order.take(batch_size)
    places = (chosen[:, None] * batch_size + np.arange(batch_size)) * replicas
    return _mixing(rows, places, bounds.astype(np.int64), groups)


def _batch_size(wanted: int, samples: int) -> int:
    if wanted < 1 or samples < 1:
        raise InvalidArgument(f"no batches of {wanted} can be made of {samples} samples")
    return min(wanted, samples)


def _spread(count: int, most: int) -> Indices:
    """At most so many numbers below ``count``, evenly."""
    return np.arange(count) if count <= most else (np.arange(most) * count + count // 2) // most


def _mixing(rows: Indices, places: Indices, firsts: Indices, groups: int) -> Mixing:
    """rows, places: [batches, batch size], indices of samples and their places in the epoch."""
    samples = int(firsts[-1])
    ranges = np.arange(groups + 1) * samples // groups
    flat = places.ravel().astype(np.float64)
    constant = samples == 1 or flat.size == 1
    return Mixing(
        batch_size=rows.shape[1],
        batches=len(rows),
        chunks=_distinct(rows, firsts),
        ideal_chunks=ideal_distinct(np.diff(firsts), rows.shape[1]),
        of_groups=groups,
        groups=_distinct(rows, ranges),
        ideal_groups=ideal_distinct(np.diff(ranges), rows.shape[1]),
        displacement=float(np.abs(rows - places).mean()) / samples,
        # Of a place p, over all indices i: the mean of |p - i|.
        ideal_displacement=float(
            (flat * (flat + 1) + (samples - 1 - flat) * (samples - flat)).mean() / 2 / samples / samples
        ),
        correlation=0.0 if constant else float(np.corrcoef(rows.ravel(), flat)[0, 1]),
    )


def _distinct(rows: Indices, firsts: Indices) -> float:
    """From how many ranges a row draws, on average."""
    ranges = np.sort(np.searchsorted(firsts, rows, side="right"), axis=1)
    return 1 + float((np.diff(ranges, axis=1) != 0).sum()) / len(rows)


def ideal_distinct(sizes: npt.ArrayLike, batch_size: int) -> float:
    """From how many ranges of these sizes ``batch_size`` different samples come on average, drawn at random.

    Exactly: of n samples, b miss a range of m with the probability C(n - m, b) / C(n, b).
    """
    kinds, counts = np.unique(np.asarray(sizes, np.int64), return_counts=True)
    samples = int((kinds * counts).sum())
    left = samples - np.arange(min(batch_size, samples), dtype=np.float64)
    with np.errstate(divide="ignore"):  # a range that cannot be missed
        missed = [np.exp(np.log1p(-np.minimum(size / left, 1)).sum()) for size in kinds]
    return float((counts * (1 - np.array(missed))).sum())
