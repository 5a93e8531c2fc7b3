"""The published traces of G10 (Zhang et al., MICRO 2023): kernels timed on an A100, and their tensors.

Numbers stay as published; what a trace does not say is not made up.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from penstock.core import files
from penstock.core.columns import KINDS, PHASES, FloatArray, IntArray, Lists
from penstock.core.trace import Trace
from penstock.core.validate import harmless_producers, sole_writers
from penstock.errors import InvalidArgument, InvalidFile

SCHEMA = "trace/1"
ITEMSIZE = 4  # everything is fp32
_KINDS = {
    "weight": "weight",
    "input": "input",
    "act": "activation",
    "agrad": "gradient",
    "wgrad": "gradient",
    "workspace": "workspace",
}
_NS = 1e-9


class _Kernels(msgspec.Struct):
    name: list[int]
    ns: list[float]
    inputs: list[list[int]] = msgspec.field(name="in")
    outputs: list[list[int]] = msgspec.field(name="out")
    ns_output_uvm_fault: list[float] = []
    ns_all_uvm_fault: list[float] = []


class _Tensors(msgspec.Struct):
    size_bytes: list[int] = msgspec.field(name="bytes")
    kind: list[int]


class _Trace(msgspec.Struct):
    model: str
    batch: int
    loss_kernel: int
    kernel_names: list[str]
    tensor_kinds: list[str]
    kernels: _Kernels
    tensors: _Tensors
    source: str = ""


def trace(path: str | Path) -> Trace:
    """The trace in a file of schema ``trace/1``, gzipped or not.

    Every tensor may leave, and only weights outlive the iteration; anything else
    lives from the first kernel that uses it to the last. Workspaces are tensors of one kernel. The
    files carry no densities: `Trace.tensor_density` is empty. An activation can be recomputed where
    one forward kernel alone writes it, does not read it, draws no random numbers (dropout) and
    writes nothing that outlives the iteration (the running statistics of a batch norm).
    """
    document = _read(path)
    try:
        return _trace(document)
    except OverflowError as error:
        raise InvalidFile(f"{path} is no possible trace: a number in it exceeds 63 bits") from error
    except (InvalidArgument, IndexError, KeyError) as error:
        raise InvalidFile(f"{path} does not hold a possible trace: {error}") from error


def fault_times_s(path: str | Path) -> tuple[FloatArray, FloatArray]:
    """[K], [K] kernel times when all of the kernel's outputs, or everything that it uses, is faulted in
    from host memory page by page. Never less than with all resident: where it was measured as less,
    that time is given."""
    kernels = _read(path).kernels
    resident = np.array(kernels.ns, dtype=np.float64)
    columns = []
    for name in ("ns_output_uvm_fault", "ns_all_uvm_fault"):
        column = np.array(getattr(kernels, name), dtype=np.float64)
        if len(column) != len(resident):
            raise InvalidFile(f"{path} has {len(column)} entries of {name} for {len(resident)} kernels")
        columns.append(np.maximum(column, resident) * _NS)
    return columns[0], columns[1]


def _read(path: str | Path) -> _Trace:
    source = files.read(path)
    if source.schema != SCHEMA:
        raise InvalidFile(f"{path} holds {source.schema!r}, not {SCHEMA!r}: give a published trace")
    try:
        return msgspec.json.decode(source.data, type=_Trace)
    except msgspec.MsgspecError as error:
        raise InvalidFile(f"{path} is not a whole {SCHEMA} file: {error}") from error


def _trace(document: _Trace) -> Trace:
    kernels, tensors = document.kernels, document.tensors
    count, total = len(kernels.name), len(tensors.size_bytes)
    for name, length in (("ns", len(kernels.ns)), ("in", len(kernels.inputs)), ("out", len(kernels.outputs))):
        if length != count:
            raise InvalidArgument(f"kernels.{name} has {length} entries, not {count}")
    if len(tensors.kind) != total:
        raise InvalidArgument(f"tensors.kind has {len(tensors.kind)} entries, not {total}")
    names = _looked_up(document.kernel_names, kernels.name, "kernel name")
    kinds = [_KINDS[kind] for kind in _looked_up(document.tensor_kinds, tensors.kind, "tensor kind")]
    if not 0 <= document.loss_kernel < count:
        raise InvalidArgument(f"the loss is kernel {document.loss_kernel} of {count}")
    inputs, outputs = Lists.of(kernels.inputs), Lists.of(kernels.outputs)
    persistent = np.array([kind == "weight" for kind in kinds], dtype=np.bool_)
    birth, death = _lifetimes(count, total, inputs, outputs)
    death[persistent], birth[persistent] = count, 0
    phase = np.array([PHASES.index(_phase(name, k, document.loss_kernel)) for k, name in enumerate(names)])
    producers = _makers(names, kinds, phase, outputs)
    return Trace(
        kernel_name=tuple(names),
        kernel_time_s=np.array(kernels.ns, dtype=np.float64) * _NS,
        kernel_workspace_bytes=np.zeros(count, dtype=np.int64),
        kernel_phase=phase.astype(np.int64),
        inputs=inputs,
        outputs=outputs,
        tensor_bytes=np.array(tensors.size_bytes, dtype=np.int64),
        tensor_kind=np.array([KINDS.index(kind) for kind in kinds], dtype=np.int64),
        tensor_persistent=persistent,
        tensor_birth=birth,
        tensor_death=death,
        tensor_recompute=harmless_producers(producers, inputs, outputs, persistent),
        tensor_itemsize=np.full(total, ITEMSIZE, dtype=np.int64),
        measured=False,
        notes={"model": document.model, "batch": str(document.batch), "source": document.source},
    )


def _looked_up(table: Sequence[str], indices: Sequence[int], what: str) -> list[str]:
    if indices and not 0 <= min(indices) <= max(indices) < len(table):
        raise InvalidArgument(f"a {what} is not among the {len(table)} that the file lists")
    return [table[index] for index in indices]


def _lifetimes(count: int, total: int, inputs: Lists, outputs: Lists) -> tuple[IntArray, IntArray]:
    """[T], [T]: first kernel that uses each tensor, and the one after the last; 0, 0 where none does."""
    first, last = np.full(total, count, dtype=np.int64), np.full(total, -1, dtype=np.int64)
    for lists in (inputs, outputs):
        if len(lists.values) and not 0 <= lists.values.min() <= lists.values.max() < total:
            raise InvalidArgument(f"a kernel uses a tensor that is not among the {total} of the file")
        kernel = lists.owners
        np.minimum.at(first, lists.values, kernel)
        np.maximum.at(last, lists.values, kernel)
    return np.minimum(first, last + 1), last + 1


def _phase(name: str, kernel: int, loss_kernel: int) -> str:
    if kernel <= loss_kernel:
        return "forward"
    return "optimizer" if "Apply_Grad" in name else "backward"


def _makers(names: Sequence[str], kinds: Sequence[str], phase: IntArray, outputs: Lists) -> IntArray:
    """[T] the forward kernel that makes each activation, the same every time it runs; -1 where none does."""
    writer = sole_writers(outputs, len(kinds))
    repeats = phase == PHASES.index("forward")
    repeats &= np.array(["Dropout" not in name for name in names], dtype=np.bool_)
    makes = np.array([kind == "activation" for kind in kinds], dtype=np.bool_) & (writer >= 0)
    makes[makes] = repeats[writer[makes]]
    producers: IntArray = np.where(makes, writer, -1)
    return producers
