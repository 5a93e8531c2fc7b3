"""Several sources as one, each with its share of every batch."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from numbers import Integral, Real
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from penstock.errors import InvalidArgument
from penstock.samples.catalog import Labels
from penstock.samples.interleaving import (
    MOST_SAMPLES,
    Change,
    Division,
    Left,
    PassDraws,
    Turns,
    draws_of,
    samples_until_seen,
)
from penstock.samples.order import Indices, ReplicaShare
from penstock.samples.store import Batch
from penstock.samples.views import (
    Iteration,
    Made,
    Source,
    bread_of,
    checked_source,
    joint_identity,
)

Weights = Mapping[Any, Any]  # by Source a number: type checkers would take no dict of Packed for it

_MOST_WEIGHT = sys.float_info.max


class Mixture(Made):
    """Samples of several sources, in given proportions. A Loader takes it as it takes a store.

    sources            by source its weight, such as ``{web: 0.7, books: 0.3}``: a Store, or what filtered,
                       mapped or packed return, each of them used by nothing else. Only the ratios count.
                       Or weights that change: ``{0: {...}, 1_000_000: {...}}``, by the sample from which they
                       hold, counted over all processes and epochs
    samples_per_epoch  of all processes; by default as many as it takes until every source has been seen once

    An epoch's samples are divided by the weights exactly, and spread evenly: in 10,000 in a row a source has
    its share to within 1 %, with up to 1,000 processes. A source that ends begins again, in another order:
    none of its samples comes a third time before all have come twice. Each epoch begins all sources anew.
    With weights that are the sources' sizes, an epoch is every sample once.

    The order is a pure function of seed, epoch and how the epoch is divided. Interrupted and resumed, also
    with another number of processes or workers, every remaining sample comes once. Samples count through the
    sources, in their order: sample i of the second is number ``len(first) + i``.

    Raises InvalidArgument for a mixture of nothing, and for weights that are negative or sum to zero.
    """

    def __init__(
        self,
        sources: Weights | Mapping[int, Weights],
        *,
        samples_per_epoch: int | None = None,
    ) -> None:
        stages = _stages(sources)
        self.sources: tuple[Source, ...] = tuple(dict.fromkeys(each for _, part in stages for each in part))
        sizes = [len(checked_source(each)) for each in self.sources]
        if any(isinstance(each, Mixture) for each in self.sources):
            raise InvalidArgument(
                "a Mixture cannot hold a Mixture: give all sources to one, weights multiplied"
            )
        self._schedule = [Change(begin, _shares(part, self.sources)) for begin, part in stages]
        for source, size in zip(self.sources, sizes, strict=True):
            if not size and any(part.get(source) for _, part in stages):
                raise InvalidArgument(
                    f"{source!r} holds no samples to mix: leave it out, or give it weight 0"
                )
        self.rank, self.world_size = self.sources[0].rank, self.sources[0].world_size
        for source in self.sources:
            if (source.rank, source.world_size) != (self.rank, self.world_size):
                raise InvalidArgument(
                    f"the sources of a mixture are mounted as rank {self.rank} of {self.world_size} and rank "
                    f"{source.rank} of {source.world_size}: mount all with the same rank and world_size"
                )
        if samples_per_epoch is None:
            samples_per_epoch = samples_until_seen(self._schedule, sizes)
        self._samples = _samples_of(samples_per_epoch)
        self.firsts = np.cumsum([0, *(each.indices_end for each in self.sources)])
        self.indices_end, self.sizes = int(self.firsts[-1]), tuple(sizes)
        self.slots = tuple(cast(int, source.slots) for source in self.sources)
        encodings = {source.encoding for source in self.sources}
        self.encoding = encodings.pop() if len(encodings) == 1 else "mixed"
        self.order = " ".join(source.order for source in self.sources)
        weights = [[begin, [str(weight) for weight in part]] for begin, part in self._schedule]
        parts = [each.identity for each in self.sources]
        self.identity = joint_identity("mixture", json.dumps([parts, weights, self._samples]))

    def __len__(self) -> int:
        """Samples of an epoch, of all processes."""
        return self._samples

    def __repr__(self) -> str:
        parts = ", ".join(
            f"{float(weight):.3g} of {source!r}"
            for source, weight in zip(self.sources, self._schedule[0].weights, strict=True)
        )
        return f"Mixture({parts}: {len(self)} samples an epoch)"

    def draws(self, epoch: int = 0) -> tuple[int, ...]:
        """How many samples each of the sources gives in an epoch."""
        stages = draws_of(self._schedule, epoch * self._samples, self._samples)
        return tuple(sum(counts) for counts in zip(*stages, strict=True))

    def _begin(self, share: ReplicaShare) -> Iteration:
        left = Left.whole(draws_of(self._schedule, share.epoch * self._samples, self._samples), self.sizes)
        for segment in share.after:
            left = left.after(segment)
        if not 0 <= share.replica < share.replicas:
            raise InvalidArgument(
                f"no such sequence: there is no replica {share.replica} of {share.replicas}"
            )
        return _Iteration(self, Division(left, share.replicas), share)


class _Iteration:
    """One replica's share of an epoch."""

    def __init__(self, mixture: Mixture, division: Division, share: ReplicaShare) -> None:
        self.taken = share.skip
        self._firsts = mixture.firsts
        self._turns = Turns(division, share.replica, share.skip)
        self._readings = [
            _Reading(source, division, number, share._replace(skip=int(skipped)))
            for number, (source, skipped) in enumerate(zip(mixture.sources, self._turns.skipped, strict=True))
        ]

    def bread(self, n: int) -> Batch | None:
        sources = self._turns.take(n)
        if not len(sources):
            return None
        self.taken += len(sources)
        parts: list[tuple[int, Batch]] = []
        places: list[Indices] = []
        for number, reading in enumerate(self._readings):
            at, done = np.flatnonzero(sources == number), 0
            for batch in reading.read(len(at)):
                parts.append((number, batch))
                places.append(at[done : done + len(batch)])
                done += len(batch)
        lengths = [len(batch) for _, batch in parts]
        # What was damaged and left out leaves no gap.
        rows = np.argsort(np.argsort(np.concatenate(places))) if places else np.empty(0, np.int64)
        where = [rows[begin:end] for begin, end in pairwise(np.cumsum([0, *lengths]))]
        return MixedBatch(parts, where, self._firsts)


class _Reading:
    """What one replica reads of one source: a pass after the other."""

    def __init__(self, source: Source, division: Division, number: int, share: ReplicaShare) -> None:
        self._source, self._share, self._rank = source, share, np.array([share.replica])
        rounds = division.rounds(number, share.skip)
        self._pieces: Iterator[PassDraws] = division.pieces(number, rounds)
        self._skip = share.skip - rounds * division.left.sizes[number]
        self._left, self._ahead, self._sequence = 0, 0, -1

    def read(self, samples: int) -> Iterator[Batch]:
        """Batches of so many samples together, fewer where some are damaged and left out."""
        while samples > 0:
            if not self._left:
                self._begin_pass()
            wanted = min(samples, self._left)
            samples, self._left = samples - wanted, self._left - wanted
            # Where all of a batch was damaged, the source has gone on to the next one.
            wanted, self._ahead = wanted - min(wanted, self._ahead), self._ahead - min(wanted, self._ahead)
            if not wanted:
                continue
            before = self._source.taken
            batch = bread_of(self._source, self._sequence, wanted)
            self._ahead += max(0, self._source.taken - before - wanted)
            if batch is not None and len(batch):
                yield batch

    def _begin_pass(self) -> None:
        while not self._left:
            piece = next(self._pieces)
            (number,), (draws,) = piece.shares(self._rank, self._share.replicas)
            skip = min(self._skip, int(draws))
            self._skip -= skip
            self._left = int(draws) - skip
            if self._left:
                self._ahead = 0
                epoch = self._share.epoch << 32 | piece.of.number
                mine = self._share._replace(epoch=epoch, after=piece.of.after, replica=int(number), skip=skip)
                self._source.sequence(**mine._asdict())
                self._sequence = self._source.sequences


class MixedBatch(Batch):
    """A batch of several sources' samples. What joins them copies; decoding goes source by source.

    sources   [n] int64: which source of the Mixture each sample is of
    indices   [n] int64: counted through the sources
    """

    __slots__ = ("_firsts", "_joined", "_parts", "_places", "sources")

    def __init__(
        self, parts: Sequence[tuple[int, Batch]], places: Sequence[Indices], firsts: Indices
    ) -> None:
        """parts: each source's samples; places: [n] of each part, where in the batch they are."""
        self._parts, self._places, self._firsts = parts, places, firsts
        samples = sum(map(len, places))
        self.indices, self.sources = np.empty(samples, np.int64), np.empty(samples, np.int64)
        for (source, batch), where in zip(parts, places, strict=True):
            self.indices[where] = batch.indices + firsts[source]
            self.sources[where] = source
        self._joined: tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]] | None = None

    @property
    def nbytes(self) -> int:
        return sum(batch.nbytes for _, batch in self._parts)

    def _join(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        if self._joined is None:
            pieces = self._in_places([list(batch) for _, batch in self._parts])
            offsets = np.cumsum([0, *map(len, pieces)]).astype(np.int64)
            self._joined = np.frombuffer(bytearray().join(pieces), np.uint8), offsets
        return self._joined

    @property
    def data(self) -> npt.NDArray[np.uint8]:  # type: ignore[override]
        return self._join()[0]

    @property
    def offsets(self) -> npt.NDArray[np.int64]:  # type: ignore[override]
        return self._join()[1]

    @property
    def labels(self) -> Labels | None:
        labels = [batch.labels for _, batch in self._parts]
        if all(each is None for each in labels):
            return None
        joined = np.full(len(self.indices), -1, np.int32)
        for each, where in zip(labels, self._places, strict=True):
            if each is not None:
                joined[where] = each
        return joined

    def names(self) -> list[str]:
        return self._in_places([batch.names() for _, batch in self._parts])

    def decoded(self) -> Any:
        """As each source decodes it: arrays [n, ...] by field where all give the same fields, else a list."""
        values = [batch.decoded() for _, batch in self._parts]
        if values and all(isinstance(each, dict) for each in values):
            first = values[0]
            kinds = [
                {name: (array.dtype, array.shape[1:]) for name, array in each.items()} for each in values
            ]
            if all(kind == kinds[0] for kind in kinds):
                joined = {
                    name: np.empty((len(self.indices), *array.shape[1:]), array.dtype)
                    for name, array in first.items()
                }
                for each, where in zip(values, self._places, strict=True):
                    for name, array in each.items():
                        joined[name][where] = array
                return joined
        return self._in_places(
            [_by_sample(each, len(batch)) for each, (_, batch) in zip(values, self._parts, strict=True)]
        )

    def _in_places(self, values: Sequence[Sequence[Any]]) -> list[Any]:
        joined: list[Any] = [None] * len(self.indices)
        for each, where in zip(values, self._places, strict=True):
            for place, value in zip(where.tolist(), each, strict=True):
                joined[place] = value
        return joined

    def __reduce__(self) -> tuple[Any, ...]:
        return MixedBatch, (self._parts, self._places, self._firsts)


def _by_sample(decoded: Any, samples: int) -> Sequence[Any]:
    if isinstance(decoded, dict):
        return [{name: array[i] for name, array in decoded.items()} for i in range(samples)]
    values: Sequence[Any] = decoded
    return values


def _stages(sources: Any) -> list[tuple[int, Weights]]:
    """The weights by the sample from which they hold."""
    if not isinstance(sources, Mapping):
        raise InvalidArgument(
            f"a mixture is made of a dict of stores and weights, such as {{a: 0.7, b: 0.3}}, not of a "
            f"{type(sources).__name__}"
        )
    begins = [each for each in sources if isinstance(each, int)]
    if not begins:
        return [(0, _not_empty(sources))]
    if len(begins) < len(sources) or min(begins) != 0:
        raise InvalidArgument(
            "weights that change are given by the sample from which they hold, the first from 0 on: "
            f"{{0: {{...}}, 1000: {{...}}}}, not by {', '.join(map(str, sources))}"
        )
    return [(begin, _not_empty(sources[begin])) for begin in sorted(begins)]


def _not_empty(weights: Any) -> Weights:
    if not isinstance(weights, Mapping) or not weights:
        raise InvalidArgument("a mixture of nothing gives no samples: give at least one store and its weight")
    return weights


def _samples_of(epoch: Any) -> int:
    """How many samples an epoch is to have: NumPy's integers, and 1e6, too."""
    whole = isinstance(epoch, Integral) or (isinstance(epoch, float) and epoch.is_integer())
    if not whole or not 0 < epoch <= MOST_SAMPLES:
        raise InvalidArgument(f"samples_per_epoch={epoch!r}: give a whole number from 1 to {MOST_SAMPLES}")
    return int(epoch)


def _shares(weights: Mapping[Source, float], sources: Sequence[Source]) -> tuple[Fraction, ...]:
    """Of each source, exactly, with the sum 1."""
    for source, weight in weights.items():
        if not isinstance(weight, Real) or isinstance(weight, bool) or not 0 <= weight <= _MOST_WEIGHT:
            raise InvalidArgument(f"the weight {weight!r} of {source!r} is not possible: give 0 or more")
    exact = [Fraction(str(weights.get(source, 0))) for source in sources]  # 0.1 is a tenth
    if not (total := sum(exact)):
        raise InvalidArgument("the weights of a mixture sum to zero: give at least one of them more than 0")
    return tuple(weight / total for weight in exact)
