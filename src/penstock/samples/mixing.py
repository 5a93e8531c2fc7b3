"""How well an order mixes, as a number.

Two numbers, each beside the one that a full shuffle gives on average:

- *distinct*: from how many chunks a batch draws. The same for equal ranges of the stored order, such as
  20: that can be compared with shards, and with classes where the store is sorted by class.
- *displacement*: how far samples move from their stored order, as a share of the store: the mean of
  |place in the epoch - index| / samples, about 1/3 where all is shuffled. Beside it stands the correlation of
  place and index, which is 1 in stored order and about 0 where all is shuffled.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock import _native
from penstock.errors import InvalidArgument

GROUPS = 20
MOST_BATCHES = 4096

Indices = npt.NDArray[np.int64]


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
