"""In which order samples come, as penstock.samples.order specifies it: slow, and written from its text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.errors import InvalidArgument
from penstock.samples.order import ORDERS, Segment

Words = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int64]

_word = np.uint64
_GOLDEN = _word(0x9E3779B97F4A7C15)
_FULL, _ITEMS, _PICKS, _REST, _INSIDE = 1, 2, 3, 4, 5  # what a key is for
_LEAST_BITS, _ROUNDS = 8, 6
_LARGEST_STRIDE = 1 << 20


def replica_size(samples: int, replicas: int, replica: int) -> int:
    """How many of ``samples`` a replica gets."""
    return samples // replicas + (replica < samples % replicas)


def draw_order(
    kind: str,
    firsts: npt.ArrayLike,
    *,
    seed: int = 0,
    epoch: int = 0,
    replicas: int = 1,
    replica: int = 0,
    slots: int = 1,
    after: Sequence[Segment] = (),
) -> Indices:
    """The indices of a replica's samples, in its order.

    firsts   [chunks + 1] ascending: the first sample of each chunk, then how many samples there are
    after    how the epoch was divided before, and what was taken then

    Raises InvalidArgument for what contradicts itself, such as more taken than there was.
    """
    bounds = np.asarray(firsts, np.int64)
    _check(kind, seed, epoch, [Segment(replicas, slots, (0,)), *after])
    if not 0 <= replica < replicas:
        raise InvalidArgument(f"there is no replica {replica} of {replicas}")
    if kind == "full":
        return _draw_full(int(bounds[-1]), seed, epoch, replicas, replica, after)
    pool = [
        _Item(chunk, int(bounds[chunk]), int(m), 0, int(m)) for chunk, m in enumerate(np.diff(bounds)) if m
    ]
    for generation, segment in enumerate(after):
        left: list[_Item] = []
        for number, items in enumerate(_divide(pool, segment.replicas, (seed, epoch, _ITEMS, generation))):
            way = _Way(items, segment.slots, seed, epoch, generation, number)
            taken = _taken_of(segment, number, sum(item.until - item.begin for item in items))
            for _ in zip(range(taken), way, strict=False):  # range first: it ends without taking one more
                pass
            left += [item for item in way.left if item.begin < item.until]
        pool = left
    generation = len(after)
    items = list(_divide(pool, replicas, (seed, epoch, _ITEMS, generation)))[replica]
    return np.fromiter(_Way(items, slots, seed, epoch, generation, replica), np.int64)


def _check(kind: str, seed: int, epoch: int, segments: Sequence[Segment]) -> None:
    if kind not in ORDERS:
        raise InvalidArgument(f'there is no order "{kind}": choose one of {", ".join(ORDERS)}')
    for name, value in (("seed", seed), ("epoch", epoch)):
        if not 0 <= value < 1 << 64:
            raise InvalidArgument(f"{name}={value} is not in [0, 2^64)")
    for replicas, slots, taken in segments:
        if replicas < 1:
            raise InvalidArgument("an epoch is divided into at least one replica")
        if kind == "chunk" and slots < 1:
            raise InvalidArgument("chunk order needs at least one slot")
        if len(taken) not in (1, replicas):
            raise InvalidArgument(
                f"a segment of {replicas} replicas says of {len(taken)} how many samples they gave"
            )


def _taken_of(segment: Segment, replica: int, size: int) -> int:
    """What a replica of ``size`` samples has given in a segment."""
    if len(segment.taken) == 1:
        return min(segment.taken[0], size)
    taken = segment.taken[replica]
    if not 0 <= taken <= size:
        raise InvalidArgument(
            f"replica {replica} of {segment.replicas} cannot have given {taken} samples: its share was {size}"
        )
    return taken


def mix(x: Words) -> Words:
    """The finaliser of splitmix64 (Stafford's variant 13)."""
    x = (x ^ x >> _word(30)) * _word(0xBF58476D1CE4E5B9)
    x = (x ^ x >> _word(27)) * _word(0x94D049BB133111EB)
    mixed: Words = x ^ x >> _word(31)
    return mixed


def key_of(*words: int) -> Words:
    """One number for several: [1]."""
    key = np.zeros(1, np.uint64)
    for word in words:
        key = mix(key + _GOLDEN ^ _word(word))
    return key


def draw(key: Words, counters: Words) -> Words:
    """The numbers of a key: [n]."""
    return mix((counters + _word(1)) * _GOLDEN + key)


def permute(size: int, key: Words, positions: Words) -> Words:
    """Where a permutation of [0, size) puts ``positions``: [n], below size."""
    bits = max(_LEAST_BITS, (size - 1).bit_length())
    rounds = [draw(key, _numbers(_ROUNDS)[i : i + 1]) for i in range(_ROUNDS)]
    # Where there are few numbers, it may take many steps.
    table = _network(bits, rounds, _numbers(1 << bits)) if bits == _LEAST_BITS else None

    def network(x: Words) -> Words:
        return _network(bits, rounds, x) if table is None else table[x]

    found = network(positions)
    while (outside := found >= size).any():
        found[outside] = network(found[outside])
    return found


def _network(bits: int, keys: Sequence[Words], x: Words) -> Words:
    low_bits, one = _word(bits // 2), _word(1)
    low_mask, high_mask = (one << low_bits) - one, (one << _word(bits) - low_bits) - one
    low, high = x & low_mask, x >> low_bits
    for first, second in zip(keys[::2], keys[1::2], strict=True):
        high = high ^ mix(low ^ first) & high_mask
        low = low ^ mix(high ^ second) & low_mask
    joined: Words = high << low_bits | low
    return joined


def _numbers(count: int) -> Words:
    return np.arange(count, dtype=np.uint64)


def _draw_full(
    samples: int, seed: int, epoch: int, replicas: int, replica: int, after: Sequence[Segment]
) -> Indices:
    positions = _numbers(samples)
    for segment in after:
        left = np.ones(len(positions), bool)
        for number in range(segment.replicas):
            size = replica_size(len(positions), segment.replicas, number)
            left[number :: segment.replicas][: _taken_of(segment, number, size)] = False
        positions = positions[left]
    return permute(samples, key_of(seed, epoch, _FULL), positions[replica::replicas]).astype(np.int64)


class _Item(NamedTuple):
    """Of a chunk's samples, those from position ``begin`` up to ``until`` of its own order."""

    chunk: int
    first: int
    samples: int
    begin: int
    until: int


def _divide(pool: Sequence[_Item], replicas: int, key: tuple[int, ...]) -> Iterator[list[_Item]]:
    """Shuffle the items, and cut them into a list for each replica."""
    order = permute(len(pool), key_of(*key), _numbers(len(pool)))
    shuffled = iter([pool[i] for i in order])
    samples = sum(item.until - item.begin for item in pool)
    rest: _Item | None = None
    for replica in range(replicas):
        share, wanted = [], replica_size(samples, replicas, replica)
        while wanted:
            item = rest or next(shuffled)
            cut = min(item.until, item.begin + wanted)
            share.append(item._replace(until=cut))
            wanted -= cut - item.begin
            rest = item._replace(begin=cut) if cut < item.until else None
        yield share


class _Way:
    """A replica's way through its items.

    left   what is left of each item
    """

    def __init__(
        self, items: list[_Item], slots: int, seed: int, epoch: int, generation: int, replica: int
    ) -> None:
        self.left = items
        self._slots = slots
        self._seed_epoch = seed, epoch
        self._picks = key_of(seed, epoch, _PICKS, generation, replica)
        self._rest = key_of(seed, epoch, _REST, generation, replica)
        self._insides: dict[int, tuple[int, int]] = {}  # by chunk: start and stride

    def __iter__(self) -> Iterator[int]:
        under_way = list(range(min(self._slots, len(self.left))))  # the number of the item in each slot
        begun, slots, spread = len(under_way), len(under_way), sum(map(self._samples, under_way))
        last_picked = [0] * slots
        for picked, word in enumerate(
            draw(self._picks, _numbers(sum(map(self._samples, range(len(self.left))))))
        ):
            if begun == len(self.left):
                break
            high, low = divmod(int(word), 1 << 32)
            slot, other = high * slots >> 32, low * slots >> 32
            if picked < spread:
                slot = max(slot, other) if low & 1 else slot
            elif last_picked[other] < last_picked[slot]:
                slot = other
            last_picked[slot] = picked
            yield self._next(under_way[slot])
            if not self._samples(under_way[slot]):
                under_way[slot] = begun
                begun += 1
        ends = np.cumsum([self._samples(item) for item in under_way], dtype=np.uint64)
        samples = int(ends[-1]) if under_way else 0
        for slot in np.searchsorted(ends, permute(samples, self._rest, _numbers(samples)), side="right"):
            yield self._next(under_way[slot])

    def _samples(self, number: int) -> int:
        item = self.left[number]
        return item.until - item.begin

    def _next(self, number: int) -> int:
        item = self.left[number]
        self.left[number] = item._replace(begin=item.begin + 1)
        start, stride = self._inside(item)
        return item.first + (start + item.begin * stride) % item.samples

    def _inside(self, item: _Item) -> tuple[int, int]:
        if item.chunk not in self._insides:
            start, stride = map(int, draw(key_of(*self._seed_epoch, _INSIDE, item.chunk), _numbers(2)))
            stride = 1 + stride % max(1, min(item.samples - 1, _LARGEST_STRIDE))
            while math.gcd(stride, item.samples) != 1:
                stride += 1
            self._insides[item.chunk] = start % item.samples, stride
        return self._insides[item.chunk]
