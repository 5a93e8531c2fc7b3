"""One training iteration as a pure value: its kernels in order, and the tensors they use."""

from __future__ import annotations

from collections.abc import Mapping
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


class InactivePeriod(NamedTuple):
    """Kernels ``[begin, end)`` during which a live tensor is neither used nor held by the program.

    G10 section 4.2. The tensor is used by the kernel before `begin` (or held until it) and
    by kernel `end`.

    ready   index of the last kernel that must finish before the tensor can be copied;
            -1 when it can be copied before the first kernel
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
    measured: bool = False
    notes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kernels, tensors = self.kernels, self.tensors
        for length, names in (
            (kernels, ("kernel_time_s", "kernel_workspace_bytes", "kernel_phase", "inputs", "outputs")),
            (tensors, ("tensor_kind", "tensor_persistent")),
            (tensors, ("tensor_birth", "tensor_death", "tensor_held_until")),
            (len(self.save_tensor), ("save_kernel",)),
            (len(self.load_tensor), ("load_kernel",)),
        ):
            for name in names:
                if len(getattr(self, name)) != length:
                    raise InvalidArgument(f"{name} has {len(getattr(self, name))} entries, not {length}")
        for named in (self.inputs.values, self.outputs.values, self.save_tensor, self.load_tensor):
            if len(named) and not 0 <= named.min() <= named.max() < tensors:
                raise InvalidArgument(f"a trace of {tensors} tensors names one that is not among them")

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
    def inactive_periods(self) -> tuple[InactivePeriod, ...]:
        """Every period in which a saved tensor could be away from the device (G10 section 4.2)."""
        ready = dict(zip(self.save_tensor[::-1].tolist(), (self.save_kernel[::-1] - 1).tolist(), strict=True))
        periods = []
        for tensor, ready_after in ready.items():
            uses = self.uses[tensor]
            held_until = int(self.tensor_held_until[tensor])
            for before, after in zip(uses[:-1].tolist(), uses[1:].tolist(), strict=True):
                begin = max(before + 1, held_until)
                # Before it is saved, a tensor is the program's alone, and nobody can take it away.
                if begin < after and ready_after < begin:
                    periods.append(InactivePeriod(tensor, begin, after, ready_after))
        return tuple(sorted(periods, key=lambda period: (period.begin, period.tensor)))

    def scaled(self, time: float = 1.0) -> Trace:
        """The same iteration on a device whose kernels take ``time`` times as long."""
        if not time > 0:
            raise InvalidArgument(f"a trace cannot be scaled by {time}: give a factor above zero")
        return replace(self, kernel_time_s=self.kernel_time_s * time)

    def save(self, path: str | Path) -> None:
        """Write to ``path`` as versioned JSON, gzipped where the name ends in ``.gz``."""
        files.save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read what `save` wrote. Raises InvalidFile where it is something else."""
        return files.load(cls, path)
