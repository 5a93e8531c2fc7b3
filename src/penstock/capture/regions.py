"""Regions of torch.compile: which inputs each one writes, found in the FX graph it was compiled from."""

from __future__ import annotations

import contextlib
import operator
import sys
import weakref
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from penstock.capture.operators import describe


def compiled_regions_visible() -> contextlib.AbstractContextManager[object]:
    """Have each region that torch.compile compiles inside run as one operator, which dispatch modes see. What
    was compiled before stays invisible to them."""
    if "torch._dynamo" in sys.modules:  # else nothing was handed to torch.compile
        from torch._inductor import config

        if hasattr(config, "wrap_inductor_compiled_regions"):
            patched: contextlib.AbstractContextManager[object] = config.patch(
                wrap_inductor_compiled_regions=True
            )
            return patched
    return contextlib.nullcontext()


class RegionInputs(NamedTuple):
    """Tensors among a region's inputs. All others are only read.

    written   by the graph
    spare     neither written nor returned: the region may reuse their memory for a result, where nothing else
              references them (PyTorch's donated buffers)
    """

    written: list[torch.Tensor]
    spare: list[torch.Tensor]


class _GraphInputs(NamedTuple):
    """Indices of the inputs that the graph writes, and of those that its outputs may alias."""

    written: frozenset[int]
    returned: frozenset[int]


_graphs: weakref.WeakKeyDictionary[Any, _GraphInputs | None] = weakref.WeakKeyDictionary()


def region_inputs(args: tuple[Any, ...]) -> RegionInputs | None:
    """The inputs of an operator without a schema; None where any may be written. Call it before the region
    runs, which clears its list of inputs."""
    if len(args) != 2 or not isinstance(args[1], list | tuple):
        return None
    region, inputs = args
    if (module := getattr(region, "original_gm", None)) is None:
        return None
    if region not in _graphs:
        _graphs[region] = _analyse(module, len(inputs))
    if (graph := _graphs[region]) is None:
        return None
    tensors = {number: value for number, value in enumerate(inputs) if isinstance(value, torch.Tensor)}
    used = graph.written | graph.returned
    return RegionInputs(
        [tensor for number, tensor in tensors.items() if number in graph.written],
        [tensor for number, tensor in tensors.items() if number not in used],
    )


def _analyse(module: torch.fx.GraphModule, inputs: int) -> _GraphInputs | None:
    """None where the graph has not so many inputs."""
    shared: dict[Node, frozenset[int]] = {}  # by node: inputs that its tensors may lie in
    written = returned = frozenset[int]()
    placeholders = 0

    def lie_in(values: Any) -> frozenset[int]:
        found: list[Node] = []
        torch.fx.node.map_arg(values, found.append)
        return frozenset().union(*(shared[node] for node in found))

    for node in module.graph.nodes:
        everything = (node.args, node.kwargs)
        if node.op == "placeholder":
            shared[node] = frozenset((placeholders,))
            placeholders += 1
        elif node.op == "output":
            returned = lie_in(everything)
        elif node.op == "get_attr":
            shared[node] = frozenset()
        elif node.target is operator.getitem:
            shared[node] = lie_in(everything)
        elif isinstance(node.target, torch._ops.OpOverload) and not describe(node.target).is_opaque:
            for position, name in describe(node.target).written:
                written |= lie_in(node.args[position] if position < len(node.args) else node.kwargs.get(name))
            shared[node] = lie_in(everything) if _may_return_inputs(node.target) else frozenset()
        else:
            written |= lie_in(everything)
            shared[node] = lie_in(everything)
    return _GraphInputs(written, returned) if placeholders == inputs else None


def _may_return_inputs(overload: torch._ops.OpOverload) -> bool:
    aliases = any(result.alias_info is not None for result in overload._schema.returns)
    return aliases or overload is torch.ops.aten._unsafe_view.default
