"""A device address for every tensor of a plan: fragmentation as a number.

A tensor has one address for its whole life, and comes back to it. All lifetimes are known, so every method
is an order in which the blocks are placed, and a rule for the gap that each one takes among those it
shares a moment with.

A plan that keeps to its budget byte by byte may still need more address space than that. Where the budget
has to hold with addresses, plan with less: ``budget / (1 + fragmentation)``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from penstock.core.columns import FloatArray, IntArray
from penstock.core.plan import Plan
from penstock.core.trace import Trace
from penstock.errors import InvalidArgument
from penstock.planners.occupancy import Occupancy, occupancy

ALIGNMENT_BYTES = 256  # what CUDA's allocator promises
PLACED_AT_MOST = 40_000  # blocks that "best" places in its attempts to improve: about two seconds
ATTEMPTS_AT_MOST = 100
SMALL = 1 / 2_000  # of the peak
WINDOWS = 100  # that an iteration is divided into, to place blocks by when they come
NEAR_THE_TOP = 0.02  # of the extent: what ends this close to it is taken to be the cause of it

# A rule picks one of the gaps that fit. gaps: [G] their lengths, the last without end. size: what is to fit.
_Rule = Callable[[IntArray, int], int]


@dataclass(frozen=True, slots=True)
class Placement:
    """Addresses in bytes from the start of the device's space.

    method             name in METHODS
    offsets            [T] of each tensor, -1 for one that never occupies any
    workspace_offsets  [K] of each kernel's workspace, -1 where it has none
    extent_bytes       address space in use, from 0 to the highest byte
    peak_bytes         the most bytes in use at any moment: the least extent that there could be
    """

    method: str
    offsets: tuple[int, ...]
    workspace_offsets: tuple[int, ...]
    extent_bytes: int
    peak_bytes: int

    @property
    def fragmentation(self) -> float:
        """Address space beyond the peak, as a fraction of the peak."""
        return self.extent_bytes / self.peak_bytes - 1 if self.peak_bytes else 0.0


def place(
    trace: Trace,
    plan: Plan,
    method: str = "best",
    *,
    alignment_bytes: int = ALIGNMENT_BYTES,
    enough_bytes: int = 0,
) -> Placement:
    """Give every tensor, and every kernel's workspace, an address.

    method            name in METHODS
    alignment_bytes   every address is a multiple of it
    enough_bytes      an extent of no more than this need not be improved
    """
    if method not in METHODS:
        raise InvalidArgument(f"there is no placement {method!r}: choose {', '.join(METHODS)}")
    if alignment_bytes < 1:
        raise InvalidArgument(f"alignment_bytes is {alignment_bytes}: give 1 or more")
    blocks = occupancy(trace, plan)
    aligned = replace(blocks, size_bytes=-(-blocks.size_bytes // alignment_bytes) * alignment_bytes)
    offsets = METHODS[method](aligned, plan, enough_bytes)
    placed = offsets >= 0
    ends = (offsets + blocks.size_bytes)[placed]
    return Placement(
        method=method,
        offsets=tuple(offsets[: trace.tensors].tolist()),
        workspace_offsets=tuple(offsets[trace.tensors : trace.tensors + trace.kernels].tolist()),
        extent_bytes=int(ends.max(initial=0)),
        peak_bytes=blocks.peak_bytes,
    )


def exact_fit(blocks: Occupancy, plan: Plan, enough_bytes: int) -> IntArray:
    """moDNN section 3.3: as tensors come into being, a gap of exactly their size, or the first that fits."""
    return _pack(blocks, _as_they_come(blocks), _exact_first)


def two_ended(blocks: Occupancy, plan: Plan, enough_bytes: int) -> IntArray:
    """FlashNeuron section 3.2: what stays from the lowest end, what leaves from the highest, first fit.

    The space is as small as keeps the two apart.
    """
    leaves = {evict.tensor for evict in plan.evictions} | {again.tensor for again in plan.recomputations}
    order = _as_they_come(blocks)
    ephemeral = np.isin(blocks.tensor[order], list(leaves))
    low = _pack(blocks, order[~ephemeral], _first)
    high = _pack(blocks, order[ephemeral], _first)  # distance of the far end from the top
    below = np.zeros(blocks.moments, dtype=np.int64)  # by moment: where what stays ends
    above = np.zeros(blocks.moments, dtype=np.int64)
    for block, since, until in zip(blocks.block, blocks.start, blocks.end, strict=True):
        side, offsets = (below, low) if low[block] >= 0 else (above, high)
        np.maximum(side[since:until], offsets[block] + blocks.size_bytes[block], out=side[since:until])
    space = int((below + above).max(initial=0))
    return np.where(high >= 0, space - high - blocks.size_bytes, low)


def best(blocks: Occupancy, plan: Plan, enough_bytes: int) -> IntArray:
    """The least extent of several orders, each with the first and with the tightest gap, then improved;
    no more than `exact_fit` needs.

    Small blocks come last, by size: they find gaps that the others leave.
    """
    size, exist = blocks.size_bytes, _as_they_come(blocks)
    simple = exact_fit(blocks, plan, enough_bytes)
    if _extent(blocks, simple) <= max(enough_bytes, blocks.peak_bytes):
        return simple
    is_small = size[exist] <= blocks.peak_bytes * SMALL
    large, small = exist[~is_small], exist[is_small]
    small = small[np.argsort(-size[small], kind="stable")]
    attempts = min(max(PLACED_AT_MOST // max(len(large), 1), 1), ATTEMPTS_AT_MOST)
    random = np.random.default_rng(0)
    least, goal = _peak(blocks, large), max(enough_bytes, blocks.peak_bytes)
    found = _best_order(blocks, large, goal)
    while True:
        found, attempts = _improved(blocks, large, found, (attempts, max(goal, least)), random)
        whole = _pack(blocks, small, _tightest, found.offsets)
        if attempts == 0 or found.extent_bytes <= least or _extent(blocks, whole) <= goal:
            return min(whole, simple, key=lambda offsets: _extent(blocks, offsets))
        goal = found.extent_bytes - 1  # the small ones did not fit beside it


class _Packing(NamedTuple):
    """extent_bytes, the addresses that need it, and how they were found: an order of blocks and a rule."""

    extent_bytes: int
    offsets: IntArray
    rank: FloatArray
    rule: _Rule


def _best_order(blocks: Occupancy, some: IntArray, enough_bytes: int) -> _Packing:
    found: _Packing | None = None
    for keys in _orders(blocks, some):
        ranked = np.lexsort(keys)
        for rule in (_first, _tightest):
            if found is not None and found.extent_bytes <= enough_bytes:
                return found
            offsets = _pack(blocks, some[ranked], rule)
            extent = _extent(blocks, offsets)
            if found is None or extent < found.extent_bytes:
                rank = np.empty(len(some))
                rank[ranked] = np.arange(len(some))
                found = _Packing(extent, offsets, rank, rule)
    assert found is not None
    return found


def _improved(
    blocks: Occupancy,
    some: IntArray,
    found: _Packing,
    limits: tuple[int, int],
    random: np.random.Generator,
) -> tuple[_Packing, int]:
    """Place what ends too high sooner, and pack again (squeaky wheel).

    Every other attempt goes on from the attempt before, the others from the best so far: one alone gets
    stuck. How much sooner is drawn at random.

    limits   how many attempts, and the extent that is good enough
    returns  the best, and how many attempts are left
    """
    attempts, enough_bytes = limits
    peak = _peak(blocks, some)
    count = len(some)
    wheel = found
    for attempt in range(attempts):
        if found.extent_bytes <= enough_bytes:
            return found, attempts - attempt
        ends = (wheel if attempt % 2 == 0 else found).offsets[some] + blocks.size_bytes[some]
        if attempt % 2 == 0:
            sooner = (ends > peak) * (0.25 if attempt % 4 else 0.5 * random.random())
            rank = wheel.rank - count * sooner
        else:
            above = ends >= found.extent_bytes * (1 - NEAR_THE_TOP * random.random())
            draws = random.random(1 if attempt % 4 == 1 else count)
            rank = found.rank - count * above * draws
        offsets = _pack(blocks, some[np.argsort(rank, kind="stable")], found.rule)
        tried = _Packing(_extent(blocks, offsets), offsets, rank, found.rule)
        wheel = tried if attempt % 2 == 0 else wheel
        if tried.extent_bytes <= found.extent_bytes:
            found = tried._replace(rank=np.argsort(np.argsort(rank, kind="stable")).astype(np.float64))
    return found, 0


METHODS: dict[str, Callable[[Occupancy, Plan, int], IntArray]] = {
    "two_ended": two_ended,
    "exact_fit": exact_fit,
    "best": best,
}


def _as_they_come(blocks: Occupancy) -> IntArray:
    """The blocks that are ever in use, by the first moment, then by number."""
    block, row = np.unique(blocks.block, return_index=True)  # rows of a block ascend by start
    return block[np.argsort(blocks.start[row], kind="stable")]


def _orders(blocks: Occupancy, some: IntArray) -> list[tuple[IntArray, ...]]:
    """Sort keys, the last one first in importance, for the blocks ``some``."""
    size, held = blocks.size_bytes[some], blocks.held[some]
    start = blocks.start[np.searchsorted(blocks.block, some)]
    end = blocks.end[np.searchsorted(blocks.block, some, side="right") - 1]
    used = blocks.in_use
    crowd = np.zeros(len(blocks.size_bytes), dtype=np.int64)  # the most in use during a block's life
    for block, since, until in zip(blocks.block, blocks.start, blocks.end, strict=True):
        crowd[block] = max(crowd[block], used[since:until].max())
    return [
        (-held, -size),
        (-size * np.sqrt(held),),
        (-held, -size, -crowd[some]),
        (-size, start),
        (-held, start // max(blocks.moments // WINDOWS, 1)),
        (-size, -end),
    ]


def _peak(blocks: Occupancy, some: IntArray) -> int:
    """The most bytes that the blocks ``some`` use at any moment."""
    sizes = np.zeros(len(blocks.size_bytes), dtype=np.int64)
    sizes[some] = blocks.size_bytes[some]
    return replace(blocks, size_bytes=sizes).peak_bytes


def _extent(blocks: Occupancy, offsets: IntArray) -> int:
    placed = offsets >= 0
    return int((offsets + blocks.size_bytes)[placed].max(initial=0))


def _first(gaps: IntArray, size: int) -> int:
    return int((gaps >= size).argmax())


def _exact_first(gaps: IntArray, size: int) -> int:
    exact = gaps == size
    return int(exact.argmax()) if exact.any() else _first(gaps, size)


def _tightest(gaps: IntArray, size: int) -> int:
    return int(np.where(gaps >= size, gaps, np.iinfo(np.int64).max).argmin())


def _pack(blocks: Occupancy, order: IntArray, rule: _Rule, given: IntArray | None = None) -> IntArray:
    """[N] addresses of the blocks in ``order``, placed one after the other; -1 for all others.

    given   [N] addresses of blocks that are in place before
    """
    size = blocks.size_bytes
    offsets = np.full(len(size), -1, dtype=np.int64) if given is None else given.copy()
    present = np.flatnonzero(offsets[blocks.block] >= 0)
    present = present[np.argsort(offsets[blocks.block[present]], kind="stable")]
    rows = len(blocks.block)
    # Rows in place, ascending by address: moments [start, end), bytes [low, high).
    start, end, low, high = table = np.zeros((4, rows), dtype=np.int64)
    count = len(present)
    start[:count], end[:count] = blocks.start[present], blocks.end[present]
    low[:count] = offsets[blocks.block[present]]
    high[:count] = low[:count] + size[blocks.block[present]]

    firsts = np.searchsorted(blocks.block, np.arange(len(size) + 1)).tolist()
    starts, ends, sizes = blocks.start.tolist(), blocks.end.tolist(), size.tolist()
    endless = np.iinfo(np.int64).max
    for block in order.tolist():
        spans = range(firsts[block], firsts[block + 1])
        meets = np.zeros(count, dtype=np.bool_)
        for row in spans:
            meets |= (start[:count] < ends[row]) & (end[:count] > starts[row])
        met = np.flatnonzero(meets)
        floor = np.concatenate([[0], np.maximum.accumulate(high[met])])
        gaps = np.concatenate([low[met], [endless]]) - floor
        address = offsets[block] = int(floor[rule(gaps, sizes[block])])
        place_at = int(np.searchsorted(low[:count], address))
        new = len(spans)
        table[:, place_at + new : count + new] = table[:, place_at:count].copy()
        table[:, place_at : place_at + new] = [
            [starts[row] for row in spans],
            [ends[row] for row in spans],
            [address] * new,
            [address + sizes[block]] * new,
        ]
        count += new
    return offsets
