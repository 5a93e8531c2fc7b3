"""Token sequences packed into blocks of one length, with nothing between them but their own ends.

A block's sequences are known from the lengths alone, so blocks are samples like any others: an epoch shuffles
and divides them, and a position in it is theirs.
"""

from __future__ import annotations

import collections
import hashlib
import operator
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock import _native
from penstock.errors import InvalidArgument, SampleError
from penstock.samples.encoding import DTYPES
from penstock.samples.order import Indices, ReplicaShare, order_of
from penstock.samples.store import Batch, Store
from penstock.samples.threads import DaemonThreads
from penstock.samples.views import (
    Filtered,
    Iteration,
    Made,
    checked_source,
    evaluated,
    joint_identity,
)

if TYPE_CHECKING:
    import torch

    from penstock.samples.decode import Sample

NO_LABEL = -100  # what losses of PyTorch leave out
_AHEAD = 3  # batches that are read ahead

Tokens = npt.NDArray[np.int64]


class Pieces(NamedTuple):
    """Runs of tokens, block by block.

    samples, begins, lengths   [pieces] int64: of which sample, from which token on, how many
    firsts                     [blocks + 1] int64: the first piece of each block, then how many there are
    """

    samples: Indices
    begins: Indices
    lengths: Indices
    firsts: Indices


def packed(
    store: Store | Filtered,
    block: int,
    tokens: str | Callable[[Sample], npt.ArrayLike],
    *,
    window: int = 8192,
    pad: int = 0,
) -> Packed:
    """The token sequences of a store in blocks of ``block`` tokens, as samples for a Loader or a Mixture.

    store    each sample is a sequence: a Store, or what filtered returns
    tokens   what a sample's tokens are: a dtype such as "uint16" where its bytes are tokens; a field's name
             where it has fields; or a pure function of a `Sample` that returns [tokens] integers. Lengths of
             bytes, and of fields of fixed shape, come from the store's table; otherwise the store is read
             once here
    window   samples whose sequences share blocks, in stored order: they fill blocks longest first, each where
             it leaves least room. Larger windows waste less
    pad      the token that fills what is left of a block

    A sequence longer than a block is cut; what is left after whole blocks is packed with others. Packing a
    million sequences takes some ten seconds, in each process. Batches are dicts of [batch, block] int64,
    such as models of transformers take:

    input_ids      tokens, then ``pad``
    labels         the same; -100 for padding and for the first token of each sequence, which nothing predicts
    position_ids   from 0 in each sequence, and 0 for padding: `document_mask` makes the mask of them, and
                   transformers does so itself, without a cache

    Which sequences share a block depends on nothing else than these arguments; which blocks come when, on
    the Loader. Batches are read ahead, each sample by itself, whatever the store's order; a long sequence is
    read for each of its blocks. A damaged sample raises SampleError, also with on_damage="skip".

    Raises InvalidArgument for a block shorter than one token, and for samples that are not tokens.
    """
    block, window, pad = _whole("block", block), _whole("window", window), _whole("pad", pad)
    if block < 1:
        raise InvalidArgument(f"a block of {block} tokens holds none: give block= at least 1")
    if window < 1:
        raise InvalidArgument(f"a window of {window} samples holds none: give window= at least 1")
    if not isinstance(store, Store | Filtered):
        checked_source(store)
        raise InvalidArgument(f"a {type(store).__name__} cannot be packed: pack its stores, then make it")
    root = store.store if isinstance(store, Filtered) else store
    read = _reading_of(root, tokens)
    samples = store.kept if isinstance(store, Filtered) else np.arange(len(store))
    lengths = _lengths(store, root, samples, tokens, read)
    pieces = _pieces(samples, lengths, block, window)
    if len(pieces.firsts) == 1:
        raise InvalidArgument(f"{store!r} has no tokens to pack: its sequences are empty")
    what = tokens if isinstance(tokens, str) else "function"
    lengths_sum = hashlib.sha256(lengths.astype("<i8").tobytes()).hexdigest()  # of functions, which differ
    identity = joint_identity("packed", store.identity, str(block), what, str(window), str(pad), lengths_sum)
    return Packed(root, identity, pieces, block, pad, read)


class Packed(Made):
    """Blocks of tokens, made by `packed`: a source for a Loader or a Mixture.

    block   tokens of each
    waste   share of all blocks' tokens that is padding
    """

    encoding, order, slots = "record", "full", 0

    def __init__(
        self, store: Store, identity: str, pieces: Pieces, block: int, pad: int, read: _Reading
    ) -> None:
        """`packed` does this."""
        self.store, self.identity, self.block = store, identity, block
        self.rank, self.world_size = store.rank, store.world_size
        self._pieces, self._pad, self._read = pieces, pad, read
        self.indices_end = len(self)
        self.waste = 1 - int(pieces.lengths.sum()) / (len(self) * block)

    def __len__(self) -> int:
        """Blocks."""
        return len(self._pieces.firsts) - 1

    def __repr__(self) -> str:
        return f"Packed({self.store!r}: {len(self)} blocks of {self.block} tokens, {self.waste:.1%} padding)"

    def _begin(self, share: ReplicaShare) -> Iteration:
        return _ReadAhead(order_of(self.order, len(self), share), self._batch)

    def _batch(self, blocks: Indices) -> PackedBatch:
        """Read these blocks."""
        pieces, block = self._pieces, self.block
        counts = pieces.firsts[blocks + 1] - pieces.firsts[blocks]
        firsts = np.cumsum([0, *counts])
        chosen = np.arange(firsts[-1]) + np.repeat(pieces.firsts[blocks] - firsts[:-1], counts)
        samples, places = np.unique(pieces.samples[chosen], return_inverse=True)
        found = self._read(self.store.read_many(samples))
        runs = []
        for place, begin, length in zip(
            places.tolist(), pieces.begins[chosen].tolist(), pieces.lengths[chosen].tolist(), strict=True
        ):
            end, there = begin + length, len(found[place])
            # A piece that is no whole block is the last of its sequence.
            if there < end or (there > end and length < block):
                sample = int(samples[place])
                raise SampleError(
                    f"sample {sample} ({self.store.name(sample)!r}) has {there} tokens, "
                    f"{'fewer' if there < end else 'more'} than when it was packed: tokens= must be a pure "
                    "function"
                )
            runs.append(found[place][begin:end])
        return PackedBatch(blocks, runs, firsts, block, self._pad)


class _ReadAhead:
    """Reads batches of the size that was asked for last, in order, before they are asked for."""

    def __init__(self, order: _native.SampleOrder, read: Callable[[Indices], PackedBatch]) -> None:
        self._order, self._read, self.taken = order, read, order.taken
        self._thread = DaemonThreads("penstock-blocks")
        self._given: collections.deque[tuple[Indices, Future[PackedBatch]]] = collections.deque()
        self._again: Indices = np.empty(0, np.int64)  # drawn, in batches that nobody wants

    def bread(self, n: int) -> PackedBatch | None:
        if self._thread.inherited:
            raise InvalidArgument(
                "this process was forked during an epoch, which goes on in its parent: call sequence()"
            )
        if self._given and len(self._given[0][0]) != n:
            self._again = np.concatenate([blocks for blocks, _ in self._given] + [self._again])
            self._thread.cancel()
            self._given.clear()
        while len(self._given) <= _AHEAD and len(blocks := self._draw(n)):
            self._given.append((blocks, self._thread.submit(self._read, blocks)))
        if not self._given:
            return None
        batch = self._given.popleft()[1].result()
        self.taken += len(batch)
        return batch

    def _draw(self, n: int) -> Indices:
        again, self._again = self._again[:n], self._again[n:]
        return np.concatenate([again, self._order.take(n - len(again))])

    def __del__(self) -> None:
        self._thread.cancel()
        self._thread.close()


class PackedBatch(Batch):
    """Blocks of tokens. ``indices`` are numbers of blocks, and ``batch[i]`` the int64 tokens of one."""

    __slots__ = ("_block", "_firsts", "_pad", "_runs")

    def __init__(
        self, blocks: Indices, runs: Sequence[Tokens], firsts: Indices, block: int, pad: int
    ) -> None:
        """runs: the blocks' pieces; firsts: [blocks + 1] the first one of each."""
        self._runs, self._firsts, self._block, self._pad = runs, firsts, block, pad
        tokens = np.concatenate(runs)
        ends = np.cumsum([0, *map(len, runs)])
        self.indices, self.data = blocks, tokens.view(np.uint8)
        self.offsets = ends[firsts] * tokens.itemsize

    @property
    def labels(self) -> None:
        return None

    def names(self) -> list[str]:
        """The number of each block."""
        return [str(block) for block in self.indices.tolist()]

    def decoded(self) -> dict[str, Tokens]:
        """input_ids, labels and position_ids, as `packed` says."""
        shape = len(self.indices), self._block
        tokens, labels = np.full(shape, self._pad, np.int64), np.full(shape, NO_LABEL, np.int64)
        positions = np.zeros(shape, np.int64)
        for row in range(len(self.indices)):
            at = 0
            for run in self._runs[self._firsts[row] : self._firsts[row + 1]]:
                end = at + len(run)
                tokens[row, at:end] = labels[row, at:end] = run
                labels[row, at] = NO_LABEL
                positions[row, at:end] = np.arange(len(run))
                at = end
        return {"input_ids": tokens, "labels": labels, "position_ids": positions}

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedBatch, (self.indices, self._runs, self._firsts, self._block, self._pad)


def document_mask(position_ids: torch.Tensor) -> torch.Tensor:
    """Which tokens each may attend to: those of its own sequence up to itself.

    position_ids   [batch, block], as batches of `packed` have them

    Returns [batch, 1, block, block] bool, as ``attn_mask`` of scaled_dot_product_attention.
    """
    documents = (position_ids == 0).cumsum(1)
    same = documents[:, :, None] == documents[:, None, :]
    return same.tril()[:, None]


def _reading_of(store: Store, tokens: Any) -> _Reading:
    """What gives the tokens of each sample of a batch. Raises InvalidArgument."""
    if callable(tokens):
        return partial(_tokens_of, tokens)
    if not isinstance(tokens, str):
        raise InvalidArgument(
            f"tokens={tokens!r}: give a dtype, the name of a field, or a function of a sample"
        )
    if store.encoding == "raw":
        dtype = DTYPES.get(_little_endian(tokens))
        if dtype is None or dtype.kind not in "iu":
            raise InvalidArgument(
                f"tokens={tokens!r} is no integer dtype: the samples are bytes, so say of which tokens, such "
                "as 'uint16'; they have to be little-endian"
            )
        return partial(_tokens_in_bytes, dtype)
    return partial(_tokens_in_field, tokens)


def _little_endian(text: str) -> str:
    """The dtype's own name; nothing for what is none, or says that it is another byte order."""
    try:
        dtype = np.dtype(text)
    except (TypeError, ValueError, SyntaxError):
        return ""
    return "" if text.startswith(">") else dtype.newbyteorder("<").str


def _whole(name: str, value: Any) -> int:
    try:
        found = operator.index(value)
    except TypeError:
        found = None
    if found is None or isinstance(value, bool) or not -(1 << 63) <= found < 1 << 63:
        raise InvalidArgument(f"{name}={value!r} is no whole number of 64 bits: give an int")
    return found


_Reading: TypeAlias = "partial[list[Tokens]]"  # of a batch, the tokens of each sample


def _tokens_in_bytes(dtype: np.dtype[Any], batch: Batch) -> list[Tokens]:
    return [_checked(np.frombuffer(sample, dtype)) for sample in batch]


def _tokens_in_field(name: str, batch: Batch) -> list[Tokens]:
    decoded = batch.decoded()
    values = decoded.get(name) if isinstance(decoded, dict) else [each.get(name) for each in decoded]
    if values is None or any(each is None for each in values):
        raise InvalidArgument(f"not every sample has a field {name!r}: tokens= names one that all have")
    return [_checked(each) for each in values]


def _tokens_of(function: Callable[[Sample], npt.ArrayLike], batch: Batch) -> list[Tokens]:
    from penstock.samples.decode import decoded

    return [_checked(each) for each in decoded(function, batch)]


def _checked(tokens: Any) -> Tokens:
    array = np.asarray(tokens)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidArgument(
            f"tokens of shape {array.shape} and dtype {array.dtype} cannot be packed: give [tokens] integers"
        )
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise InvalidArgument(f"the token {array.max()} does not fit into int64, of which batches are")
    return array.astype(np.int64)


def _lengths(store: Store | Filtered, root: Store, samples: Indices, tokens: Any, read: _Reading) -> Indices:
    """[n] tokens of each of the samples."""
    if isinstance(tokens, str) and root.encoding == "raw":
        sizes, dtype = root.sizes(samples), np.dtype(tokens)
        if (uneven := np.flatnonzero(sizes % dtype.itemsize)).size:
            sample = int(samples[uneven[0]])
            raise InvalidArgument(
                f"sample {sample} ({root.name(sample)!r}) has {sizes[uneven[0]]} bytes, which are not whole "
                f"tokens of {dtype.name}: give tokens= the dtype that they were packed with"
            )
        return sizes // dtype.itemsize
    if isinstance(tokens, str) and root.encoding == "record":
        shapes = {field.name: field.shape for field in root.fields}
        if len(shapes.get(tokens, ())) != 1:
            raise InvalidArgument(
                f"tokens={tokens!r} is no field of [tokens]: the fields are {', '.join(shapes)}"
            )
        return np.full(len(samples), shapes[tokens][0], np.int64)
    return evaluated(store, lambda batch: [len(each) for each in read(batch)], np.int64)[samples]


def _pieces(samples: Indices, lengths: Indices, block: int, window: int) -> Pieces:
    """Sequences cut into whole blocks, and the rests packed window by window."""
    whole, rests = lengths // block, lengths % block
    of_whole = np.repeat(np.arange(len(samples)), whole)
    number = np.arange(len(of_whole)) - np.repeat(np.cumsum(whole) - whole, whole)
    blocks = np.arange(len(of_whole))
    count, of_rest, in_block = len(of_whole), [], []
    for begin in range(0, len(samples), window):
        here = begin + np.flatnonzero(rests[begin : begin + window])
        chosen, bins = _best_fit(rests[here], block)
        of_rest.append(here)
        in_block.append(chosen + count)
        count += bins
    which = np.concatenate([of_whole, *of_rest])
    order = np.argsort(np.concatenate([blocks, *in_block]), kind="stable")
    begins = np.concatenate([number * block, *(whole[here] * block for here in of_rest)])[order]
    taken = np.concatenate([np.full(len(of_whole), block), *(rests[here] for here in of_rest)])[order]
    in_order = np.concatenate([blocks, *in_block])[order]
    return Pieces(samples[which[order]], begins, taken, np.searchsorted(in_order, np.arange(count + 1)))


def _best_fit(lengths: Indices, block: int) -> tuple[Indices, int]:
    """Into which block each goes, longest first, each where it leaves least room; and how many blocks."""
    chosen = np.empty(len(lengths), np.int64)
    rooms: dict[int, list[int]] = {}  # blocks by the room that they have left
    has_room, blocks = 0, 0  # bit r: some block has room for r tokens
    sizes = lengths.tolist()
    for place in np.argsort(-lengths, kind="stable").tolist():
        size = sizes[place]
        if fitting := has_room >> size:
            room = size + (fitting & -fitting).bit_length() - 1
            found = rooms[room].pop()
            if not rooms[room]:
                has_room ^= 1 << room
        else:
            room, found, blocks = block, blocks, blocks + 1
        chosen[place] = found
        if room > size:
            if not rooms.get(room - size):
                rooms[room - size] = []
                has_room |= 1 << (room - size)
            rooms[room - size].append(found)
    return chosen, blocks
