"""What the schema of a PyTorch operator says: whether it runs a kernel, and what that kernel writes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass


class OperatorMode(TorchDispatchMode):
    """A mode that sees each operator once, compiled or not."""

    supports_higher_order_operators = True  # such as a compiled region, which is one kernel

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


# Operators that ask for metadata only, or tell an allocator or a profiler something.
_NAMESPACES_WITHOUT_KERNELS = ("prim", "profiler")
_METADATA = frozenset(
    ("sym_size", "sym_stride", "sym_numel", "sym_storage_offset", "sym_is_contiguous")
    + ("is_coalesced", "sparse_dim", "dense_dim", "_dimI", "_dimV", "_nnz")
    + ("is_contiguous", "is_strides_like_format", "is_non_overlapping_and_dense", "size", "stride", "dim")
    + ("record_stream",)
)
# Whose schemas are true, with a tag or without.
_OF_TORCH = ("aten", "prims")
# Operators on lists of tensors.
LIST_PREFIXES = ("_foreach_", "_fused_", "_amp_foreach_")
# Each element of the result depends on one element of each argument, and has the same bits whether it is
# computed in a vector or as a scalar.
_ELEMENTWISE = frozenset(
    ("abs", "add", "addcdiv", "addcmul", "clone", "copy", "_to_copy", "div", "fill", "lerp", "maximum")
    + ("minimum", "mul", "neg", "reciprocal", "sign", "sqrt", "sub", "zero")
    # Of these the two differ; but only the end of a tensor is computed by scalars.
    + ("_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad")
)
# Of their tensors these read shapes and types only.
_OF_SHAPES = frozenset(
    ("empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like")
    + ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros")
)
# These add up, or write to one place, in the order in which their threads come: on accelerators, and some
# on a CPU. torch.use_deterministic_algorithms lists them, and most backward kernels.
_UNORDERED = frozenset(
    ("bincount", "cumprod", "cumsum", "histc", "index_add", "index_copy", "index_put", "_unsafe_index_put")
    + ("index_reduce", "kthvalue", "logcumsumexp", "_logcumsumexp", "max_unpool2d", "max_unpool3d", "median")
    + ("nanmedian", "nll_loss2d_forward", "put", "scatter", "scatter_add", "scatter_reduce")
    + ("_cudnn_ctc_loss",)
    # Their dropout draws from a state of cuDNN's own.
    + ("_cudnn_rnn", "miopen_rnn")
)
# Norms write their running statistics, which these schemas do not say.
_SILENT_WRITES = {
    "native_batch_norm": ("running_mean", "running_var"),
    "cudnn_batch_norm": ("running_mean", "running_var"),
    "miopen_batch_norm": ("running_mean", "running_var"),
}


# Between processes. Their schemas do not say that those whose names end in "_" write their first argument.
COLLECTIVES = ("c10d", "_c10d_functional", "penstock")
_WAIT = "_c10d_functional::wait_tensor"


class Operator(NamedTuple):
    """What the runtime knows of an operator before it runs.

    name           without the namespace "aten": "mm"; with any other one: "mylib::scale"
    is_kernel      False for views and for questions about metadata: they read and write no memory
    written        (position, name) of the arguments that it writes to
    is_repeatable  it can run again where it failed: it has written nothing, and drawn no random numbers
    draws          it is repeatable but for the random numbers that it draws from a generator
    is_unordered   it may give other bits each time, as it adds up in any order
    is_opaque      it has no schema, such as a compiled region, or one that says of no write and that nobody
                   vouches for: any of its inputs may be written, unless penstock.capture.regions knows more
    takes_lists    of tensors, each for itself: see penstock.capture.slices
    is_elementwise it may run in segments of its tensors: see there
    reads_shapes   of its tensors, and no element
    resizes        it may give the storage of what it writes to other memory
    is_collective  other processes take part. It goes on when it has returned: what it reads and writes has
                   to stay until it is waited for
    """

    name: str
    is_kernel: bool
    written: tuple[tuple[int, str], ...]
    is_repeatable: bool
    draws: bool = False
    is_unordered: bool = False
    is_opaque: bool = False
    takes_lists: bool = False
    is_elementwise: bool = False
    reads_shapes: bool = False
    resizes: bool = False
    is_collective: bool = False

    @property
    def can_run_again(self) -> bool:
        """It gives the same bits again, with the same random numbers."""
        return (self.is_repeatable or self.draws) and not self.is_unordered


@cache
def describe(operator: Any) -> Operator:
    """What is known of ``operator``, a torch._ops.OpOverload or a higher-order operator."""
    schema = getattr(operator, "_schema", None)
    if schema is None:
        return Operator(str(operator), True, (), False, is_opaque=True)
    name = str(schema.name).removeprefix("aten::")
    silent: tuple[str, ...] = _SILENT_WRITES.get(name, ())
    is_collective = operator.namespace in COLLECTIVES and name != _WAIT
    if (is_collective and name.endswith("_")) or name == _WAIT:
        silent = (schema.arguments[0].name,)
    written = tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write) or argument.name in silent
    )
    returns = schema.returns
    is_of_torch = operator.namespace in _OF_TORCH
    is_opaque = not (written or is_collective or is_of_torch) and not _has_tag(operator, "pt2_compliant_tag")
    # What others draw from, and in which order they add up, no schema and no tag says.
    is_known = is_of_torch and not (written or _has_tag(operator, "nondeterministic_bitwise"))
    is_random = _has_tag(operator, "nondeterministic_seeded")
    is_view = bool(returns) and not written and all(entry.alias_info is not None for entry in returns)
    is_metadata = operator.namespace in _NAMESPACES_WITHOUT_KERNELS or name in _METADATA
    return Operator(
        name,
        not (is_view or is_metadata),
        written,
        is_known and not is_random,
        draws=is_known and is_random,
        is_unordered=name in _UNORDERED or "_backward" in name,
        is_opaque=is_opaque and not is_view,
        takes_lists=name.startswith(LIST_PREFIXES),
        reads_shapes=operator.namespace == "aten" and name in _OF_SHAPES,
        is_elementwise=operator.namespace == "aten" and base_name(name) in _ELEMENTWISE,
        resizes="resize" in name or name == "set_" or any(argument.is_out for argument in schema.arguments),
        is_collective=is_collective,
    )


def gives_the_same_bits(operator: Any, args: tuple[Any, ...]) -> bool:
    """Whether it does so each time it runs with these arguments, and the same random numbers."""
    transposed = operator is torch.ops.aten.convolution.default and args[6]  # a backward kernel of cuDNN's
    return describe(operator).can_run_again and not (transposed and args[0].device.type != "cpu")


def base_name(name: str) -> str:
    """Of an operator's forms: on lists, and in place."""
    return name.removeprefix("_foreach_").removesuffix("_")


def _has_tag(operator: Any, *names: str) -> bool:
    tags = getattr(operator, "tags", ())
    return any((tag := getattr(torch.Tag, name, None)) is not None and tag in tags for name in names)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def tensors_in(values: object) -> Iterator[torch.Tensor]:
    """The tensors in arguments or results of an operator, which nest lists at most, in order.

    Each has a storage: in the place of a sparse one come its indices and its values, and in the place of one
    that wraps others, such as a DTensor, those.
    """
    if isinstance(values, torch.Tensor):
        if is_traceable_wrapper_subclass(values):
            names, _ = values.__tensor_flatten__()
            yield from tensors_in([getattr(values, name) for name in names])
        elif values.layout is torch.strided:
            yield values
        else:
            yield from _parts(values)
    elif isinstance(values, tuple | list):
        for value in values:
            if type(value) in _PLAIN and value.layout is torch.strided:
                yield value
            else:
                yield from tensors_in(value)
    elif isinstance(values, dict):
        for value in values.values():
            yield from tensors_in(value)


def storages_in(values: object) -> list[torch.UntypedStorage]:
    """The storages that hold the values of the tensors: none of an opaque one."""
    found = []
    for tensor in tensors_in(values):
        try:  # `suppress` takes longer than all else here
            found.append(tensor.untyped_storage())
        except (NotImplementedError, RuntimeError):
            continue
    return found


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What a tensor that is not strided keeps its elements in."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()  # of another library, such as oneDNN: its memory is its own


def written_tensors(
    operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[torch.Tensor]:
    """The tensors among the arguments that the operator writes to."""
    for position, name in operator.written:
        yield from tensors_in(args[position] if position < len(args) else kwargs.get(name))


@cache
def out_overloads(operator: Any) -> list[tuple[torch._ops.OpOverload, str]]:
    """The overloads with the same arguments that write to one more, each with the name of that one."""
    wanted = [(argument.name, str(argument.type)) for argument in operator._schema.arguments]
    found = []
    for name in operator.overloadpacket.overloads():
        overload = getattr(operator.overloadpacket, name)
        arguments = overload._schema.arguments
        others = [(argument.name, str(argument.type)) for argument in arguments if not argument.is_out]
        out = [argument.name for argument in arguments if argument.is_out]
        if len(out) == 1 and others == wanted:
            found.append((overload, out[0]))
    return found
