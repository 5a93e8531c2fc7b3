"""One training iteration as a pure value: its kernels in order, and the tensors they use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from penstock.core import files
from penstock.core.columns import KINDS, PHASES, BoolArray, FloatArray, IntArray, Lists, sum_over
from penstock.core.tables import html_table
from penstock.core.validate import validate
from penstock.errors import InvalidArgument
from penstock.options import LOSSY
from penstock.units import format_bytes, format_seconds


def csr_bytes(elements: IntArray, itemsize: IntArray, density: FloatArray) -> IntArray:
    """What elements take as bitmask-CSR, of which the share ``density`` is not zero: where each row of 128
    begins, a bit for each, and those that are not zero (penstock.codecs.bitmask)."""
    head_bytes: IntArray = (-(-elements // 128) + 1) * 4 + -(-elements // 8)
    return head_bytes + np.ceil(elements * density).astype(np.int64) * itemsize


class Variant(NamedTuple):
    """Another algorithm for a kernel, with the same results (moDNN section 5.3)."""

    name: str
    time_s: float
    workspace_bytes: int


class InactivePeriod(NamedTuple):
    """Kernels ``[begin, end)`` during which a live tensor is not used (G10 section 4.2).

    The tensor is used by the kernel before `begin` and by kernel `end`. A persistent tensor's last
    period reaches into the next iteration: there, kernel ``K + k`` is kernel k of the next iteration.

    ready   index of the last kernel that must finish before the tensor can be copied: the last
            that writes it; -1 when it can be copied before the first kernel
    """

    tensor: int
    begin: int
    end: int
    ready: int


@dataclass(frozen=True, eq=False)
class Periods:
    """P inactive periods as columns, [P] each: see `InactivePeriod`. By begin, then by tensor.

    size_bytes   of the tensor
    """

    tensor: IntArray
    begin: IntArray
    end: IntArray
    ready: IntArray
    size_bytes: IntArray

    def __len__(self) -> int:
        return len(self.tensor)


@dataclass(frozen=True, eq=False)
class Trace(files.Saveable):
    """One iteration: K kernels in execution order and T tensors.

    A tensor is a storage: views are uses of it. Indices of kernels are half-open: a tensor
    occupies device memory during kernels ``[birth, death)`` when nothing is evicted.

    Captured traces number tensors in the order in which kernels first touch them: for each kernel, the
    storages of its arguments in order, then those of its results. Tensors that no kernel touches come
    last. A run numbers storages in the same way, and follows a plan by these numbers.

    Kernels
        kernel_name             [K] names
        kernel_time_s           [K] duration with every tensor resident
        kernel_workspace_bytes  [K] bytes that live during the kernel only
        kernel_phase            [K] index into PHASES
        inputs, outputs         K lists of tensors. A tensor edited in place is in both
    Tensors
        tensor_bytes       [T] on the device
        tensor_kind        [T] index into KINDS
        tensor_persistent  [T] alive before the iteration and after it
        tensor_birth       [T] first kernel during which it occupies memory
        tensor_death       [T] first kernel during which it no longer does, K when alive at the end
        tensor_movable     [T] it can leave the device: False where it is too small to be worth it, or lies
                           in memory that is not the run's; empty where all can
    What a planner may do beyond moving tensors
        kernel_variants    K tuples of other algorithms, or empty where no kernel has any
        tensor_recompute   [T] kernel that can be run again to recompute the tensor, bit for bit, -1
                           where none can; empty where nothing can be recomputed
        tensor_density     [T] fraction of the elements that are not zero, 1.0 where not measured; empty
                           where none was
        tensor_itemsize    [T] bytes of an element; empty where unknown, then 4
        tensor_float32     [T] all elements are float32; empty where unknown
        tensor_stashed     [T] the tensor may leave in the codec `lossy` when forward is over: see
                           `with_lossy`; empty where none may
    lossy      a codec of LOSSY, or empty
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
    tensor_movable: BoolArray = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    kernel_variants: tuple[tuple[Variant, ...], ...] = ()
    tensor_recompute: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    tensor_density: FloatArray = field(default_factory=lambda: np.zeros(0))
    tensor_itemsize: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    tensor_float32: BoolArray = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    tensor_stashed: BoolArray = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    lossy: str = ""
    measured: bool = False
    notes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        validate(self)

    def __repr__(self) -> str:
        times = "measured" if self.measured else "estimated"
        return (
            f"<penstock.Trace: {self.kernels} kernels, {self.tensors} tensors, peak "
            f"{format_bytes(self.peak_bytes)}, {format_seconds(self.ideal_s)} {times}>"
        )

    def _repr_html_(self) -> str:
        """In a notebook."""
        rows = []
        for index, phase in enumerate(PHASES):
            times_s = self.kernel_time_s[self.kernel_phase == index]
            rows.append((f"kernels, {phase}", f"{len(times_s):,}", format_seconds(float(times_s.sum()))))
        for index, kind in enumerate(KINDS):
            if len(sizes := self.tensor_bytes[self.tensor_kind == index]):
                name = f"tensors, {kind.replace('_', ' ')}"
                rows.append((name, f"{len(sizes):,}", format_bytes(int(sizes.sum()))))
        rows.append(("peak with everything in memory", "", format_bytes(self.peak_bytes)))
        rows += [(name, "", str(value)) for name, value in self.notes.items()]
        times = "measured" if self.measured else "estimated"
        title = f"penstock trace: {format_seconds(self.ideal_s)} with everything in memory, {times}"
        return html_table(rows, ("", "count", "time or size"), title)

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
    def fastest_time_s(self) -> FloatArray:
        """[K] duration of each kernel in its fastest variant."""
        time_s: FloatArray = self.kernel_time_s.copy()
        for kernel, variants in enumerate(self.kernel_variants):
            time_s[kernel] = min([time_s[kernel], *(variant.time_s for variant in variants)])
        return time_s

    @cached_property
    def fastest_s(self) -> float:
        """As `ideal_s`, with the fastest variant of each kernel."""
        return float(self.fastest_time_s.sum())

    @cached_property
    def start_s(self) -> FloatArray:
        """[K + 1] when each kernel starts, and the last ends, with every tensor resident."""
        return np.concatenate([[0.0], np.cumsum(self.kernel_time_s)])

    @cached_property
    def live_bytes(self) -> IntArray:
        """[K] device bytes during each kernel, workspace included, with every tensor resident."""
        born, dead = (np.minimum(each, self.kernels) for each in (self.tensor_birth, self.tensor_death))
        live: IntArray = sum_over(self.kernels, born, dead, self.tensor_bytes) + self.kernel_workspace_bytes
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
        kernel = np.concatenate([self.inputs.owners, self.outputs.owners])
        tensor = np.concatenate([self.inputs.values, self.outputs.values])
        return Lists.by_value(self.tensors, tensor, kernel, self.kernels)

    @cached_property
    def writers(self) -> Lists:
        """T lists: the kernels that write each tensor, ascending, each once."""
        return Lists.by_value(self.tensors, self.outputs.values, self.outputs.owners, self.kernels)

    @cached_property
    def periods(self) -> Periods:
        """Every period in which a movable tensor could be away from the device (G10 section 4.2)."""
        starts, values = self.uses.starts, self.uses.values
        owner = self.uses.owners
        used = np.flatnonzero(np.diff(starts))
        last = np.zeros(len(values), dtype=np.bool_)
        last[starts[used + 1] - 1] = True
        following = np.append(values[1:], 0)
        following[last] = values[starts[used]] + self.kernels
        kept = self.movable[owner] & (values + 1 < following) & (~last | self.tensor_persistent[owner])
        tensor, begin, end = owner[kept], values[kept] + 1, following[kept]
        order = np.lexsort((tensor, begin))
        tensor, begin, end = tensor[order], begin[order], end[order]
        ready = self.writers.last_below(tensor, begin)
        return Periods(tensor, begin, end, ready, self.tensor_bytes[tensor])

    @cached_property
    def inactive_periods(self) -> tuple[InactivePeriod, ...]:
        """`periods` one by one."""
        periods = self.periods
        columns = (periods.tensor, periods.begin, periods.end, periods.ready)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return tuple(InactivePeriod(*row) for row in rows)

    @cached_property
    def recomputable_until(self) -> IntArray:
        """[T] the last kernel before which each tensor can be recomputed: what its producer reads is alive
        then, and has not been written since. -1 where nothing can recompute it."""
        until: IntArray = np.full(self.tensors, -1, dtype=np.int64)
        if len(self.tensor_recompute):
            made = np.flatnonzero(self.tensor_recompute >= 0)
            until[made] = self.kernels
            row, parent = self.inputs.select(self.tensor_recompute[made])
            alive = np.where(self.tensor_persistent[parent], self.kernels, self.tensor_death[parent] - 1)
            # Before the kernel that writes it next, it is still as it was.
            same = self.writers.first_above(parent, self.tensor_recompute[made][row], self.kernels)
            np.minimum.at(until, made[row], np.minimum(alive, same))
        return until

    @property
    def movable(self) -> BoolArray:
        """[T] `tensor_movable`, also where that is empty."""
        return self.tensor_movable if len(self.tensor_movable) else np.ones(self.tensors, dtype=np.bool_)

    @cached_property
    def released(self) -> Trace:
        """The same iteration with tensors out of memory as soon as no kernel needs them any more.

        Under a budget, what no kernel of the iteration reads again leaves first, such as a gradient between
        the optimizer and `zero_grad`, and stays away until the program gives it up. So movable tensors that
        are not persistent die right after their last use here, and those that no kernel uses take no memory
        at all, persistent or not. Kernels and tensors keep their numbers.
        """
        uses = self.uses
        last = np.full(self.tensors, -1, dtype=np.int64)
        used = np.diff(uses.starts) > 0
        last[used] = uses.values[uses.starts[1:][used] - 1]
        goes = self.movable & (~self.tensor_persistent | ~used)
        death = np.where(goes, np.where(used, last + 1, self.tensor_birth), self.tensor_death)
        if np.array_equal(death, self.tensor_death):
            return self
        return replace(self, tensor_death=death, tensor_persistent=self.tensor_persistent & ~(goes & ~used))

    def with_weights_kept(self) -> Trace:
        """The same iteration, in which weights and their gradients do not leave the device (moDNN section
        3.2)."""
        kept = np.isin(self.tensor_kind, [KINDS.index("weight"), KINDS.index("gradient")])
        return replace(self, tensor_movable=self.movable & ~kept)

    @cached_property
    def packed_bytes(self) -> IntArray:
        """[T] what each tensor takes compressed. As bitmask-CSR (FlashNeuron section 3.2): a bit for each
        element, those that are not zero, and where each row of them begins; its own size where that is not
        less, or its density is not known. In the lossy codec, half."""
        if self.lossy:
            return np.where(self.tensor_stashed, self.tensor_bytes // 2, self._csr_bytes)
        return self._csr_bytes

    @cached_property
    def _csr_bytes(self) -> IntArray:
        if not len(self.tensor_density):
            return self.tensor_bytes
        itemsize = self.tensor_itemsize if len(self.tensor_itemsize) else np.full(self.tensors, 4)
        elements = self.tensor_bytes // itemsize
        packed: IntArray = np.minimum(self.tensor_bytes, csr_bytes(elements, itemsize, self.tensor_density))
        return packed

    def compressed_bytes(self, tensor: int) -> int:
        """`packed_bytes` of one tensor."""
        return int(self.packed_bytes[tensor])

    def codec(self, tensor: int) -> str:
        """In which the tensor leaves where it leaves compressed."""
        return self.lossy if self.lossy and self.tensor_stashed[tensor] else "csr"

    def period_bytes(self, compress: bool) -> IntArray:
        """[P] what the tensor of each period takes if it leaves compressed; its size where it cannot.

        compress   as bitmask-CSR; without, only in the lossy codec
        """
        periods, tensor = self.periods, self.periods.tensor
        stashed = self.tensor_stashed[tensor] if self.lossy else np.zeros(len(tensor), dtype=np.bool_)
        possible = np.where(stashed, self.saves_for_backward(periods.begin, periods.end), compress)
        found: IntArray = np.where(possible, self.packed_bytes[tensor], periods.size_bytes)
        return found

    def saves_for_backward(self, begin: IntArray, end: IntArray) -> BoolArray:
        """[N] whether the period ``[begin, end)`` is between forward and backward."""
        phase = self.kernel_phase
        last, first = phase[np.maximum(begin - 1, 0)], phase[np.minimum(end, self.kernels - 1)]
        crosses: BoolArray = (begin > 0) & (end < self.kernels) & (last == PHASES.index("forward"))
        crosses &= first == PHASES.index("backward")
        return crosses

    def with_lossy(self, codec: str | None) -> Trace:
        """The same iteration, where what is saved for backward may leave in a lossy codec of 2 bytes an
        element, and comes back rounded (delayed precision reduction: FlashNeuron section 3.2).

        These are float32 activations that forward kernels make and backward kernels alone read after the
        last forward kernel that uses them, that nobody writes then, and that are freed before backward is
        over, so that nothing else can read them. What bitmask-CSR makes at least as small is left to it.

        codec   of LOSSY; None for none

        Raises InvalidArgument.
        """
        codec = codec or ""
        if codec == self.lossy:
            return self
        if not codec:
            return replace(self, lossy="", tensor_stashed=np.zeros(0, dtype=np.bool_))
        if codec not in LOSSY:
            raise InvalidArgument(f"there is no lossy codec {codec!r}: choose {' or '.join(LOSSY)}")
        if not len(self.tensor_float32):
            raise InvalidArgument(
                "this trace does not say which tensors are float32, which a lossy stash needs: trace again"
            )
        tensor, begin, end = self.periods.tensor, self.periods.begin, self.periods.end
        backward = np.flatnonzero(self.kernel_phase == PHASES.index("backward"))
        chosen = self.saves_for_backward(begin, end) & self.tensor_float32[tensor]
        chosen &= self.tensor_kind[tensor] == KINDS.index("activation")
        chosen &= ~self.tensor_persistent[tensor] & (self._csr_bytes[tensor] > self.tensor_bytes[tensor] // 2)
        if len(backward):
            chosen &= self.tensor_death[tensor] <= backward[-1]
        chosen &= self.writers.last_below(tensor, np.full(len(tensor), self.kernels)) < begin
        stashed = np.zeros(self.tensors, dtype=np.bool_)
        for period in np.flatnonzero(chosen).tolist():
            later = self.uses[int(tensor[period])]
            later = later[later >= end[period]]
            stashed[tensor[period]] = bool((self.kernel_phase[later] == PHASES.index("backward")).all())
        return replace(self, lossy=codec, tensor_stashed=stashed)

    def scaled(self, time: float = 1.0) -> Trace:
        """The same iteration on a device whose kernels take ``time`` times as long."""
        if not time > 0:
            raise InvalidArgument(f"a trace cannot be scaled by {time}: give a factor above zero")
        return self.with_times(self.kernel_time_s * time)

    def with_times(self, time_s: FloatArray) -> Trace:
        """The same iteration with kernels that take so long, [K], and their variants in proportion."""
        ratios = time_s / np.maximum(self.kernel_time_s, 1e-12)
        variants = tuple(
            tuple(variant._replace(time_s=variant.time_s * ratio) for variant in variants)
            for variants, ratio in zip(self.kernel_variants, ratios.tolist(), strict=False)
        )
        return replace(self, kernel_time_s=time_s, kernel_variants=variants)

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


def within_budget(trace: Trace, budget_bytes: int, lossy: str | None = None) -> Trace:
    """The iteration as a run with this device budget carries it out before any plan: as it is where all of
    it fits, since then nothing moves; else with what is of no more use released.

    lossy   of the plan: see `Trace.with_lossy`
    """
    if lossy is not None:
        trace = trace.with_lossy(lossy)
    return trace if trace.peak_bytes <= budget_bytes else trace.released
