"""One training iteration as a pure value: its kernels in order, and the tensors they use."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.core import files
from penstock.errors import InvalidArgument

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

PHASES = ("forward", "backward", "optimizer")
KINDS = ("weight", "gradient", "optimizer_state", "activation", "input", "workspace")
EVICTABLE = ("saved", "all")


@dataclass(frozen=True, slots=True, eq=False)
class Lists:
    """Lists of integers, one after the other: list i is ``values[starts[i]:starts[i + 1]]``."""

    starts: IntArray
    values: IntArray

    def __getitem__(self, index: int) -> IntArray:
        return self.values[self.starts[index] : self.starts[index + 1]]

    def __len__(self) -> int:
        return len(self.starts) - 1

    @classmethod
    def of(cls, lists: list[list[int]]) -> Lists:
        lengths = [len(entry) for entry in lists]
        return cls(
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            np.array([value for entry in lists for value in entry], dtype=np.int64),
        )


class Variant(NamedTuple):
    """Another algorithm for a kernel, with the same results (moDNN section 5.3)."""

    name: str
    time_s: float
    workspace_bytes: int


class InactivePeriod(NamedTuple):
    """Kernels ``[begin, end)`` during which a live tensor is neither used nor held by the program.

    G10 section 4.2. The tensor is used by the kernel before `begin` (or held until it) and
    by kernel `end`. A persistent tensor's last period reaches into the next iteration: there,
    kernel ``K + k`` is kernel k of the next iteration.

    ready   index of the last kernel that must finish before the tensor can be copied: the last
            that writes it; -1 when it can be copied before the first kernel
    """

    tensor: int
    begin: int
    end: int
    ready: int


@dataclass(frozen=True, eq=False)
class Trace:
    """One iteration: K kernels in execution order and T tensors.

    A tensor is a storage: views are uses of it. Indices of kernels are half-open: a tensor
    occupies device memory during kernels ``[birth, death)`` when nothing is evicted.

    Kernels
        kernel_name             [K] names
        kernel_time_s           [K] duration with every tensor resident
        kernel_workspace_bytes  [K] bytes that live during the kernel only
        kernel_phase            [K] index into PHASES
        inputs, outputs         K lists of tensors. A tensor edited in place is in both. A tensor
                                that autograd saved is an input of every kernel of the backward
                                node that saved it, from its unpacking to its release.
    Tensors
        tensor_bytes       [T]
        tensor_kind        [T] index into KINDS
        tensor_persistent  [T] alive before the iteration and after it
        tensor_birth       [T] first kernel during which it occupies memory
        tensor_death       [T] first kernel during which it no longer does, K when alive at the end
        tensor_held_until  [T] first kernel during which only autograd holds it: before that,
                           evicting it frees nothing. Equals death when autograd never holds it alone.
    Saved tensors (autograd's saves and loads are the clock by which the runtime carries out a plan)
        save_tensor, save_kernel  [S] the n-th storage autograd saved (each storage and version
                                  once), and the kernel that comes next
        load_tensor, load_kernel  [L] unpackings in the order they happened, and the kernel next
    What a planner may do beyond moving what autograd saved
        evictable          "saved": nothing but what autograd saved can leave the device, and its copy
                           stays until the tensor dies, as the runtime does it. "all": every tensor can
                           leave whenever no kernel uses it, and its copy is given up when it is back
                           for the last time, or when it is written
        kernel_variants    K tuples of other algorithms, or empty where no kernel has any
        tensor_recompute   [T] kernel that can be run again to make the tensor anew, bit for bit, -1
                           where none can; empty where nothing can be recomputed
        tensor_density     [T] fraction of the elements that are not zero, 1.0 where not measured; empty
                           where none was
        tensor_itemsize    [T] bytes of an element; empty where unknown, then 4
    measured   times come from a run on this machine, not from an estimate
    notes      free text by name, such as the device and the model
    """

    kernel_name: tuple[str, ...]
    kernel_time_s: FloatArray
    kernel_workspace_bytes: IntArray
    kernel_phase: IntArray
    inputs: Lists
    outputs: Lists
    tensor_bytes: IntArray
    tensor_kind: IntArray
    tensor_persistent: BoolArray
    tensor_birth: IntArray
    tensor_death: IntArray
    tensor_held_until: IntArray
    save_tensor: IntArray
    save_kernel: IntArray
    load_tensor: IntArray
    load_kernel: IntArray
    evictable: str = "saved"
    kernel_variants: tuple[tuple[Variant, ...], ...] = ()
    tensor_recompute: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    tensor_density: FloatArray = field(default_factory=lambda: np.zeros(0))
    tensor_itemsize: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    measured: bool = False
    notes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from penstock.core.validate import validate  # it knows traces

        validate(self)

    @property
    def kernels(self) -> int:
        return len(self.kernel_name)

    @property
    def tensors(self) -> int:
        return len(self.tensor_bytes)

    @cached_property
    def ideal_s(self) -> float:
        """Iteration time with every tensor resident: the sum of the kernels' times."""
        return float(self.kernel_time_s.sum())

    @cached_property
    def fastest_s(self) -> float:
        """As `ideal_s`, with the fastest variant of each kernel."""
        variants = self.kernel_variants or ((),) * self.kernels
        times = self.kernel_time_s.tolist()
        return float(
            sum(
                min([time_s, *(variant.time_s for variant in others)])
                for time_s, others in zip(times, variants, strict=True)
            )
        )

    @cached_property
    def start_s(self) -> FloatArray:
        """[K + 1] when each kernel starts, and the last ends, with every tensor resident."""
        return np.concatenate([[0.0], np.cumsum(self.kernel_time_s)])

    @cached_property
    def live_bytes(self) -> IntArray:
        """[K] device bytes during each kernel, workspace included, with every tensor resident."""
        change = np.zeros(self.kernels + 1, dtype=np.int64)
        np.add.at(change, np.minimum(self.tensor_birth, self.kernels), self.tensor_bytes)
        np.subtract.at(change, np.minimum(self.tensor_death, self.kernels), self.tensor_bytes)
        live: IntArray = np.cumsum(change)[: self.kernels] + self.kernel_workspace_bytes
        return live

    @property
    def peak_bytes(self) -> int:
        """The most device bytes alive during any kernel, with every tensor resident."""
        return int(self.live_bytes.max(initial=self.persistent_bytes))

    @cached_property
    def persistent_bytes(self) -> int:
        return int(self.tensor_bytes[self.tensor_persistent].sum())

    @cached_property
    def uses(self) -> Lists:
        """T lists: the kernels that use each tensor, ascending, each once."""
        count = self.kernels
        kernel = np.concatenate(
            [np.repeat(np.arange(count), np.diff(lists.starts)) for lists in (self.inputs, self.outputs)]
        )
        tensor = np.concatenate([self.inputs.values, self.outputs.values])
        keys = np.unique(tensor * max(count, 1) + kernel)
        starts = np.searchsorted(keys, np.arange(self.tensors + 1) * max(count, 1))
        return Lists(starts.astype(np.int64), (keys % max(count, 1)).astype(np.int64))

    @cached_property
    def writers(self) -> Lists:
        """T lists: the kernels that write each tensor, ascending, each once."""
        count = max(self.kernels, 1)
        kernel = np.repeat(np.arange(self.kernels), np.diff(self.outputs.starts))
        keys = np.unique(self.outputs.values * count + kernel)
        starts = np.searchsorted(keys, np.arange(self.tensors + 1) * count)
        return Lists(starts.astype(np.int64), (keys % count).astype(np.int64))

    @cached_property
    def inactive_periods(self) -> tuple[InactivePeriod, ...]:
        """Every period in which a tensor could be away from the device (G10 section 4.2)."""
        periods = self._periods_of_all() if self.evictable == "all" else self._periods_of_saved()
        return tuple(sorted(periods, key=lambda period: (period.begin, period.tensor)))

    def _periods_of_saved(self) -> Iterator[InactivePeriod]:
        ready = dict(zip(self.save_tensor[::-1].tolist(), (self.save_kernel[::-1] - 1).tolist(), strict=True))
        for tensor, ready_after in ready.items():
            uses = self.uses[tensor]
            held_until = int(self.tensor_held_until[tensor])
            for before, after in zip(uses[:-1].tolist(), uses[1:].tolist(), strict=True):
                begin = max(before + 1, held_until)
                # Before it is saved, a tensor is the program's alone, and nobody can take it away.
                if begin < after and ready_after < begin:
                    yield InactivePeriod(tensor, begin, after, ready_after)

    def _periods_of_all(self) -> Iterator[InactivePeriod]:
        for tensor in range(self.tensors):
            uses = self.uses[tensor].tolist()
            if not uses:
                continue
            writers = self.writers[tensor].tolist()
            following = uses[1:] + ([uses[0] + self.kernels] if self.tensor_persistent[tensor] else [])
            for before, after in zip(uses, following, strict=False):
                if before + 1 < after:
                    ready = max((kernel for kernel in writers if kernel <= before), default=-1)
                    yield InactivePeriod(tensor, before + 1, after, ready)

    def compressed_bytes(self, tensor: int) -> int:
        """What the tensor takes as bitmask-CSR (FlashNeuron section 3.2): a bit for each element, and
        those that are not zero. Its own size where that is not less, or its density is not known."""
        size_bytes = int(self.tensor_bytes[tensor])
        if not len(self.tensor_density):
            return size_bytes
        itemsize = int(self.tensor_itemsize[tensor]) if len(self.tensor_itemsize) else 4
        elements = size_bytes // max(itemsize, 1)
        packed = -(-elements // 8) + math.ceil(elements * float(self.tensor_density[tensor])) * itemsize
        return min(size_bytes, packed)

    def scaled(self, time: float = 1.0) -> Trace:
        """The same iteration on a device whose kernels take ``time`` times as long."""
        if not time > 0:
            raise InvalidArgument(f"a trace cannot be scaled by {time}: give a factor above zero")
        variants = tuple(
            tuple(variant._replace(time_s=variant.time_s * time) for variant in variants)
            for variants in self.kernel_variants
        )
        return replace(self, kernel_time_s=self.kernel_time_s * time, kernel_variants=variants)

    def with_density(self, by_kernel: Mapping[str, float]) -> Trace:
        """The same iteration, assuming what fraction of some kernels' results is not zero.

        by_kernel   densities by name of the kernel that last wrote the tensor, such as ``{"relu": 0.5}``
        """
        for name, fraction in by_kernel.items():
            if not 0 <= fraction <= 1:
                raise InvalidArgument(f"the density of {name!r} is {fraction}: give a fraction from 0 to 1")
        density = np.ones(self.tensors)
        for kernel, name in enumerate(self.kernel_name):
            density[self.outputs[kernel]] = by_kernel.get(name, 1.0)
        return replace(self, tensor_density=density)

    def save(self, path: str | Path) -> None:
        """Write to ``path`` as versioned JSON, gzipped where the name ends in ``.gz``."""
        files.save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read what `save` wrote, or a published trace (penstock.core.published).

        Raises InvalidFile where the file holds something else.
        """
        from penstock.core import published  # it makes traces

        source = files.read(path)
        return (
            published.trace(path)
            if source.schema == published.TRACE_SCHEMA
            else files.value(cls, source, path)
        )
