"""What is noted of each kernel and each tensor of one iteration, and the Trace that it makes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import numpy as np

from penstock.capture.phases import (
    ACTIVATION,
    GRADIENT,
    INPUT,
    OPTIMIZER,
    OPTIMIZER_STATE,
    WEIGHT,
    WORKSPACE,
)
from penstock.capture.slices import slice_bounds
from penstock.core.columns import IntArray, Lists, sum_over
from penstock.core.trace import Trace, Variant
from penstock.core.validate import harmless_producers

_LISTS = "_foreach_"  # names of operators on lists of tensors begin so
SMALLEST_MOVABLE_BYTES = 4096  # what is smaller is not worth a transfer


@dataclass(slots=True)
class KernelRecord:
    """One kernel that ran.

    inputs            tensors among its arguments, as positions in the list of TensorRecords, in order
    outputs           those that it wrote or made: arguments first, then results, in order
    workspace_bytes   that lived during the kernel only
    phase             index into PHASES
    begun_s, ended_s  by time.perf_counter; 0 where it was not executed
    in_use_bytes      device bytes in use after it, by the allocator; 0 where that is not known
    variants          what it could have run as instead
    """

    name: str
    time_s: float
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    workspace_bytes: int
    phase: int
    begun_s: float = 0.0
    ended_s: float = 0.0
    in_use_bytes: int = 0
    variants: tuple[Variant, ...] = ()

    def scale(self, factor: float) -> None:
        """It takes so many times as long, and so do its variants."""
        self.time_s *= factor
        self.variants = tuple(variant._replace(time_s=variant.time_s * factor) for variant in self.variants)


@dataclass(slots=True)
class TensorRecord:
    """One storage.

    kind       index into KINDS
    before     it existed before the iteration
    birth      kernel that makes it; 0 where it was there before
    death      kernels that had run when its memory was freed; None where it is alive at the end
    itemsize   bytes of an element
    float32    all elements are float32
    density    fraction of the elements that are not zero, None where not measured
    producer   kernel that makes it again, bit for bit, if it runs again; -1 for none
    movable    it can leave the device
    """

    size_bytes: int
    kind: int
    before: bool
    birth: int
    death: int | None
    itemsize: int = 1
    float32: bool = False
    density: float | None = None
    producer: int = -1
    movable: bool = True


def make_trace(
    kernels: Sequence[KernelRecord],
    tensors: Sequence[TensorRecord],
    *,
    measured: bool,
    notes: Mapping[str, str] | None = None,
) -> Trace:
    """The Trace of these records, its tensors numbered in the order in which kernels first touch them.

    Persistent are tensors that were there before and are there afterwards, and weights and optimizer
    state that the iteration made and left. A gradient made in the iteration is not: the next one makes
    its own.
    """
    order = list(dict.fromkeys([*_touched(kernels), *range(len(tensors))]))
    number = np.empty(len(order), dtype=np.int64)
    number[order] = np.arange(len(order))
    records = [tensors[index] for index in order]
    count = len(kernels)
    made = (WEIGHT, OPTIMIZER_STATE)
    lasts = [record.death is None and (record.before or record.kind in made) for record in records]
    lasting = np.array(lasts, dtype=np.bool_)
    birth = np.where(lasting, 0, _integers(record.birth for record in records))
    death = _integers(count if record.death is None else record.death for record in records)
    sizes = _integers(record.size_bytes for record in records)
    inputs = Lists.of([list(dict.fromkeys(number[list(kernel.inputs)].tolist())) for kernel in kernels])
    outputs = Lists.of([list(dict.fromkeys(number[list(kernel.outputs)].tolist())) for kernel in kernels])
    producers = _integers(record.producer for record in records)
    measured_zeros = any(record.density is not None for record in records)
    densities = [1.0 if record.density is None else record.density for record in records]
    return Trace(
        kernel_name=tuple(kernel.name for kernel in kernels),
        kernel_time_s=np.array([kernel.time_s for kernel in kernels], dtype=np.float64),
        kernel_workspace_bytes=_integers(kernel.workspace_bytes for kernel in kernels)
        + _unknown_bytes(kernels, birth, death, sizes),
        kernel_phase=_integers(kernel.phase for kernel in kernels),
        inputs=inputs,
        outputs=outputs,
        tensor_bytes=sizes,
        tensor_kind=_integers(_kind(record) for record in records),
        tensor_persistent=lasting,
        tensor_birth=birth,
        tensor_death=death,
        tensor_movable=np.array([record.movable for record in records], dtype=np.bool_),
        tensor_recompute=harmless_producers(producers, inputs, outputs, lasting),
        tensor_itemsize=_integers(record.itemsize for record in records),
        tensor_float32=np.array([record.float32 for record in records], dtype=np.bool_),
        tensor_density=np.array(densities if measured_zeros else [], dtype=np.float64),
        kernel_variants=tuple(k.variants for k in kernels) if any(k.variants for k in kernels) else (),
        measured=measured,
        notes=dict(notes or {}),
    )


class Records(NamedTuple):
    """Of an iteration that has not run.

    tensors   that it has, in the order in which kernels first touch them
    numbers   [T] their positions among those of the iteration that it was derived from
    """

    kernels: list[KernelRecord]
    tensors: list[TensorRecord]
    numbers: list[int]


def with_state_there(
    kernels: Sequence[KernelRecord], tensors: Sequence[TensorRecord], device_type: str
) -> Records | None:
    """The iteration that follows the one of these records, which has made the optimizer's state: there it is,
    and goes on. None where no state was made.

    Kernels that only make state do not run again. What was made as a copy of what the iteration computed, as
    SGD's momentum is of the first gradient, is multiplied and added to from then on, in lists of tensors if
    the next kernel works on these. An optimizer may go on in another way.
    """
    made = {
        index
        for index, record in enumerate(tensors)
        if record.kind == OPTIMIZER_STATE and not record.before and record.death is None
    }
    if not made:
        return None

    def only_makes_state(index: int) -> bool:
        born = [tensor in made and tensors[tensor].birth == index for tensor in kernels[index].outputs]
        return kernels[index].phase == OPTIMIZER and bool(born) and all(born)

    def goes_on(kernel: KernelRecord) -> bool:
        source = tensors[kernel.inputs[0]] if kernel.name == "clone" else None
        return source is not None and (not source.before or source.kind == GRADIENT)

    later: list[KernelRecord] = []
    position: list[int] = []  # among these, of each kernel
    for is_made, group in groupby(range(len(kernels)), only_makes_state):
        run = list(group)
        if not is_made:
            position += range(len(later), len(later) + len(run))
            later += kernels[run[0] : run[-1] + 1]
            continue
        position.append(len(later))
        copies = list(filter(goes_on, (kernels[index] for index in run)))
        in_lists = any(kernel.name.startswith(_LISTS) for kernel in kernels[run[-1] + 1 : run[-1] + 2])
        for together in [copies] if copies and in_lists else [[copy] for copy in copies]:
            later += _updates(together, _LISTS if in_lists else "", tensors, device_type)
        position += [len(later)] * (len(run) - 1)
    position.append(len(later))
    lasting = (index for index, record in enumerate(tensors) if record.death is None)
    numbers = list(dict.fromkeys([*_touched(later), *lasting]))
    number = {index: new for new, index in enumerate(numbers)}
    return Records(
        [
            replace(
                kernel,
                inputs=tuple(number[index] for index in kernel.inputs),
                outputs=tuple(number[index] for index in kernel.outputs),
            )
            for kernel in later
        ],
        [
            replace(
                record,
                before=record.before or index in made,
                density=None if index in made else record.density,  # it begins as zeros, and does not stay so
                birth=position[record.birth],
                death=None if record.death is None else position[record.death],
                producer=-1 if record.producer < 0 else position[record.producer],
            )
            for index, record in ((index, tensors[index]) for index in numbers)
        ],
        numbers,
    )


def _updates(
    copies: Sequence[KernelRecord], prefix: str, tensors: Sequence[TensorRecord], device_type: str
) -> Iterator[KernelRecord]:
    """Kernels that multiply the copies, and add to them what was copied."""
    state, sources = [copy.outputs[0] for copy in copies], [copy.inputs[0] for copy in copies]
    for name, lists in (("mul_", [state]), ("add_", [state, sources])):
        sizes = [len(lists) * tensors[tensor].size_bytes for tensor in state]
        for begin, end in slice_bounds(sizes, device_type):
            yield replace(
                copies[0],
                name=prefix + name,
                time_s=sum(copy.time_s for copy in copies[begin:end]),
                inputs=tuple(tensor for entries in lists for tensor in entries[begin:end]),
                outputs=tuple(state[begin:end]),
                variants=(),
            )


def _touched(kernels: Iterable[KernelRecord]) -> Iterator[int]:
    """The tensors of each kernel, in order."""
    return (index for kernel in kernels for index in (*kernel.inputs, *kernel.outputs))


def _kind(record: TensorRecord) -> int:
    """What an earlier iteration computed is an input to this one."""
    return INPUT if record.before and record.kind in (ACTIVATION, WORKSPACE) else record.kind


def _unknown_bytes(
    kernels: Sequence[KernelRecord], birth: IntArray, death: IntArray, sizes: IntArray
) -> IntArray:
    """[K] bytes in use after each kernel that belong to no tensor: what the program carries along from
    earlier iterations and never touches."""
    count = len(kernels)
    known = sum_over(count, np.minimum(birth, count), np.minimum(death, count), sizes)
    in_use = _integers(kernel.in_use_bytes for kernel in kernels)
    unknown: IntArray = np.maximum(in_use - known, 0)
    return unknown


def _integers(values: Iterable[int]) -> IntArray:
    return np.fromiter(values, dtype=np.int64)
