"""Which tensors can be recomputed by running one kernel again, without harm to any other."""

from __future__ import annotations

import numpy as np

from penstock.core.columns import BoolArray, IntArray, Lists


def sole_writers(outputs: Lists, tensors: int) -> IntArray:
    """[T] the one kernel that writes each tensor, -1 where none or several do."""
    kernel, tensor = outputs.owners, outputs.values
    first = np.full(tensors, len(outputs), dtype=np.int64)
    last = np.full(tensors, -1, dtype=np.int64)
    np.minimum.at(first, tensor, kernel)
    np.maximum.at(last, tensor, kernel)
    found: IntArray = np.where(first == last, first, -1)
    return found


def harmful(producers: IntArray, inputs: Lists, outputs: Lists, persistent: BoolArray) -> BoolArray:
    """[K] whether running a kernel again changes more than the tensors it is there to make.

    That is so where it edits a tensor in place, and where it writes one that is written again later, or
    that outlives the iteration and is not one it is there to make.

    producers   [T] kernel that recomputes each tensor, -1 where none
    """
    tensors = len(producers)
    reader, read = inputs.owners, inputs.values
    writer, wrote = outputs.owners, outputs.values
    last = np.full(tensors, -1, dtype=np.int64)
    np.maximum.at(last, wrote, writer)
    edits = np.isin(writer * tensors + wrote, reader * tensors + read)
    lasting = persistent[wrote] & (producers[wrote] != writer)
    harm = np.zeros(len(outputs), dtype=np.bool_)
    harm[writer[edits | lasting | (last[wrote] > writer)]] = True
    return harm


def harmless_producers(producers: IntArray, inputs: Lists, outputs: Lists, persistent: BoolArray) -> IntArray:
    """[T] ``producers``, and -1 where that kernel is not the only one that writes the tensor, or harmful."""
    sole = sole_writers(outputs, len(producers))
    kept = np.where((producers >= 0) & (sole == producers), producers, -1)
    harm = harmful(kept, inputs, outputs, persistent)
    found: IntArray = np.where((kept >= 0) & harm[kept], -1, kept) if len(harm) else kept
    return found
