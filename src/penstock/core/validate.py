"""The rules that every trace obeys, on which planners and simulator rely; one of them is which tensors can be
recomputed by running one kernel again, without harm to any other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.core.columns import KINDS, PHASES, BoolArray, IntArray, Lists
from penstock.errors import InvalidArgument
from penstock.options import LOSSY

if TYPE_CHECKING:
    from penstock.core.trace import Trace

# Beyond these a number is a mistake; below them, sums stay exact in 64 bits.
MOST_BYTES = 2**53
MOST_S = 1e9

_MADE_INSIDE = [KINDS.index("activation"), KINDS.index("workspace")]


def validate(trace: Trace) -> None:
    """Raise InvalidArgument, which says where and why, unless ``trace`` is one that can have happened."""
    _lengths(trace)
    _numbers(trace)
    _indices(trace)
    _lifetimes(trace)
    _production(trace)
    if (trace.tensor_recompute != -1).any():
        _recomputation(trace)


def _lengths(trace: Trace) -> None:
    kernels, tensors = trace.kernels, trace.tensors
    optional = ("movable", "recompute", "density", "itemsize", "float32", "stashed")
    for length, names in (
        (kernels, ["kernel_time_s", "kernel_workspace_bytes", "kernel_phase", "inputs", "outputs"]),
        (kernels, ["kernel_variants"] if trace.kernel_variants else []),
        (tensors, ["tensor_kind", "tensor_persistent", "tensor_birth", "tensor_death"]),
        (tensors, [f"tensor_{name}" for name in optional if len(getattr(trace, f"tensor_{name}"))]),
    ):
        for name in names:
            if len(getattr(trace, name)) != length:
                raise InvalidArgument(f"{name} has {len(getattr(trace, name))} entries, not {length}")
    for name in ("inputs", "outputs"):
        lists: Lists = getattr(trace, name)
        starts = lists.starts
        if starts[0] != 0 or starts[-1] != len(lists.values) or bool((np.diff(starts) < 0).any()):
            raise InvalidArgument(f"{name} does not divide its {len(lists.values)} values among the kernels")


def _numbers(trace: Trace) -> None:
    """Sizes are whole and times are finite; neither is negative or absurd."""
    for name in ("tensor_bytes", "kernel_workspace_bytes"):
        _in_range(trace, name, "bytes", 0, MOST_BYTES, whole=True)
    _in_range(trace, "kernel_time_s", "s", 0.0, MOST_S)
    _in_range(trace, "kernel_phase", "", 0, len(PHASES) - 1, whole=True)
    _in_range(trace, "tensor_kind", "", 0, len(KINDS) - 1, whole=True)
    if len(trace.tensor_density):
        _in_range(trace, "tensor_density", "", 0.0, 1.0)
    if len(trace.tensor_itemsize):
        _in_range(trace, "tensor_itemsize", "bytes", 1, 1024, whole=True)
    if trace.lossy not in ("", *LOSSY) or bool(trace.lossy) != bool(len(trace.tensor_stashed)):
        raise InvalidArgument(f"lossy is {trace.lossy!r}: make it with Trace.with_lossy")
    everything = int(trace.tensor_bytes.sum())
    if everything > MOST_BYTES:
        raise InvalidArgument(f"the tensors take {everything} bytes together, above {MOST_BYTES}")
    for kernel, variants in enumerate(trace.kernel_variants):
        for name, time_s, workspace_bytes in variants:
            if not (0 <= time_s <= MOST_S and 0 <= workspace_bytes <= MOST_BYTES):
                raise InvalidArgument(
                    f"the variant {name!r} of {_kernel(trace, kernel)} takes {time_s} s and "
                    f"{workspace_bytes} bytes: neither can be negative or absurd"
                )


def _in_range(trace: Trace, name: str, unit: str, least: float, most: float, whole: bool = False) -> None:
    values: Any = getattr(trace, name)
    if whole and values.dtype.kind not in "iu":
        raise InvalidArgument(f"{name} holds {values.dtype} numbers: they have to be whole")
    wrong = np.flatnonzero(~((values >= least) & (values <= most)))  # what is not a number is wrong too
    if len(wrong):
        first = int(wrong[0])
        who = _kernel(trace, first) if name.startswith("kernel") else f"tensor {first}"
        raise InvalidArgument(
            f"{name} of {who} is {values[first]}{' ' * bool(unit)}{unit}: it has to lie between {least} "
            f"and {most}"
        )


def _indices(trace: Trace) -> None:
    """Every tensor that a kernel names is there."""
    tensors = trace.tensors
    for named in (trace.inputs.values, trace.outputs.values):
        if len(named) and not 0 <= named.min() <= named.max() < tensors:
            raise InvalidArgument(f"a trace of {tensors} tensors names one that is not among them")


def _lifetimes(trace: Trace) -> None:
    count, birth, death = trace.kernels, trace.tensor_birth, trace.tensor_death
    _raise_first(
        (birth < 0) | (birth > death) | (death > count),
        lambda tensor: (
            f"tensor {tensor} occupies memory during kernels [{birth[tensor]}, {death[tensor]}) of a trace "
            f"of {count} kernels"
        ),
    )
    _raise_first(
        trace.tensor_persistent & ((birth != 0) | (death != count)),
        lambda tensor: (
            f"tensor {tensor} is persistent, but alive during kernels [{birth[tensor]}, {death[tensor]}) only"
        ),
    )
    uses = trace.uses
    used = np.flatnonzero(np.diff(uses.starts))
    first, last = uses.values[uses.starts[used]], uses.values[uses.starts[used + 1] - 1]
    _raise_first(
        first < birth[used],
        lambda index: (
            f"{_kernel(trace, int(first[index]))} uses tensor {used[index]} before its birth at kernel "
            f"{birth[used[index]]}"
        ),
    )
    _raise_first(
        last >= death[used],
        lambda index: (
            f"{_kernel(trace, int(last[index]))} uses tensor {used[index]} after its death at kernel "
            f"{death[used[index]]}"
        ),
    )


def _production(trace: Trace) -> None:
    """What the iteration makes is made before it is read: no cycles, no kernel before its inputs.

    Inputs and what outlives the iteration are there from the start, and so may a gradient of the
    iteration before be that is given up in this one.
    """
    uses, writers = trace.uses, trace.writers
    used = np.flatnonzero(np.diff(uses.starts))
    first = uses.values[uses.starts[used]]
    first_read = np.full(trace.tensors, trace.kernels, dtype=np.int64)
    np.minimum.at(first_read, trace.inputs.values, trace.inputs.owners)
    kind = trace.tensor_kind[used]
    there = trace.tensor_persistent[used] | (kind == KINDS.index("input"))
    there |= (trace.tensor_birth[used] == 0) & ~np.isin(kind, _MADE_INSIDE)

    def sentence(index: int) -> str:
        tensor, kernel = int(used[index]), int(first[index])
        later = [producer for producer in writers[tensor].tolist() if producer > kernel]
        who = f"{_kernel(trace, kernel)} reads tensor {tensor}, which "
        if not later:
            return f"{who}no kernel makes"
        return (
            f"{who}is made only later, by {_kernel(trace, later[0])}: the kernels are in an impossible order"
        )

    _raise_first(~there & (first_read[used] == first), sentence)


def _recomputation(trace: Trace) -> None:
    """Running the kernel again recomputes the tensor and changes nothing else."""
    producers = trace.tensor_recompute
    linked = producers != -1
    _raise_first(
        linked & ((producers < 0) | (producers >= trace.kernels)),
        lambda tensor: f"tensor {tensor} is recomputed by kernel {producers[tensor]}, which is not there",
    )
    possible = harmless_producers(producers, trace.inputs, trace.outputs, trace.tensor_persistent)
    _raise_first(
        linked & (possible != producers),
        lambda tensor: (
            f"tensor {tensor} cannot be recomputed by {_kernel(trace, int(producers[tensor]))}: it is not "
            "the one kernel that writes it, or it edits a tensor, or writes one that outlives the iteration "
            "or is written again later"
        ),
    )


def _raise_first(wrong: Any, sentence: Callable[[int], str]) -> None:
    """Raise InvalidArgument with the sentence about the first index that is wrong, if any is."""
    found = np.flatnonzero(wrong)
    if len(found):
        more = f", and so are {len(found) - 1} more" if len(found) > 1 else ""
        raise InvalidArgument(f"{sentence(int(found[0]))}{more}")


def _kernel(trace: Trace, index: int) -> str:
    return f"kernel {index} `{trace.kernel_name[index]}`"


def sole_writers(outputs: Lists, tensors: int) -> IntArray:
    """[T] the one kernel that writes each tensor, -1 where none or several do."""
    first, last = np.full(tensors, len(outputs), dtype=np.int64), np.full(tensors, -1, dtype=np.int64)
    np.minimum.at(first, outputs.values, outputs.owners)
    np.maximum.at(last, outputs.values, outputs.owners)
    found: IntArray = np.where(first == last, first, -1)
    return found


def harmless_producers(producers: IntArray, inputs: Lists, outputs: Lists, persistent: BoolArray) -> IntArray:
    """[T] ``producers``, and -1 where that kernel is not the only one that writes the tensor, or changes
    more, when it runs again, than the tensors it is there to make.

    That is so where it edits a tensor in place, and where it writes one that is written again later, or
    that outlives the iteration and is not one it is there to make.

    producers   [T] kernel that recomputes each tensor, -1 where none
    """
    tensors, kernels = len(producers), len(outputs)
    reader, read = inputs.owners, inputs.values
    writer, wrote = outputs.owners, outputs.values
    kept = np.where(sole_writers(outputs, tensors) == producers, producers, -1)
    last = np.full(tensors, -1, dtype=np.int64)
    np.maximum.at(last, wrote, writer)
    edits = np.isin(writer * tensors + wrote, reader * tensors + read)
    lasting = persistent[wrote] & (kept[wrote] != writer)
    harm = np.zeros(kernels + 1, dtype=np.bool_)  # the last entry is of no kernel
    harm[writer[edits | lasting | (last[wrote] > writer)]] = True
    found: IntArray = np.where(harm[kept], -1, kept)
    return found
