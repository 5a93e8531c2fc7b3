"""Where a graph of torch.compile is divided, and the parts that it is divided into.

A part is a range of the graph's kernels. All that it is given and all that it makes has to be on the device
at once, and no kernel is fused across its ends: so a part takes at most a number of bytes where it can, and
ends where few bytes go from one kernel to another, as they do between the blocks of a model. Views cost
nothing; each part that uses one makes it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from penstock.capture.operators import describe

# What one more part costs, in bytes that could be written and read instead.
_PART_COST_BYTES = 1 << 20
_ATEN = torch.ops.aten


class CannotDivide(Exception):
    """Why a graph cannot be divided."""


class GraphPart(NamedTuple):
    """A part of a graph.

    module    what it runs
    inputs    nodes of the whole graph whose values it is given
    outputs   nodes of the whole graph whose values it returns
    where     the modules whose code it is of, for people
    """

    module: GraphModule
    inputs: list[Node]
    outputs: list[Node]
    where: str


class DivisibleGraph:
    """A graph as kernels in order, and the values that go from one to another.

    inputs        what it is given
    returned      what it returns: nodes and constants
    needs_bytes   all that is on the device while it runs as one
    """

    def __init__(self, module: GraphModule) -> None:
        self._module = module
        nodes = list(module.graph.nodes)
        self.inputs = [node for node in nodes if node.op == "placeholder"]
        self.returned: list[Any] = [*nodes[-1].args[0]]
        self._kernels = [node for node in nodes if _is_kernel(node)]
        # Of each value, also of an element of a tuple:
        self._maker = {kernel: kernel for kernel in self._kernels}
        self._sources: dict[Node, dict[Node, None]] = {}  # of any node: the values that it is, or is made of
        for node in nodes[:-1]:
            parent = node.args[0] if node.target is operator.getitem else None
            if isinstance(parent, Node) and parent in self._maker:
                self._maker[node] = self._maker[parent]
                self._sources[node] = {node: None}
            elif node.op == "placeholder" or node in self._maker:
                self._sources[node] = {node: None}
            else:
                self._sources[node] = self._read_by(node)
        self._put_writes_early()
        self._position = {kernel: number for number, kernel in enumerate(self._kernels)}
        self._reads = [self._read_by(kernel) for kernel in self._kernels]
        self._makes: list[list[Node]] = [[] for _ in self._kernels]
        for value, kernel in self._maker.items():
            if isinstance(value.meta.get("val"), torch.Tensor):
                self._makes[self._position[kernel]].append(value)
        self._last_use: dict[Node, int] = {}
        for number, values in enumerate(self._reads):
            self._last_use.update(dict.fromkeys(values, number))
        self._kept = {
            source for node in self.returned if isinstance(node, Node) for source in self._sources[node]
        }
        self._bytes = {value: _bytes_of(value) for value in self._sources}
        self._crossing_bytes = self._bytes_at_each_cut()
        self.needs_bytes = max((need for _, need in self._needs_from(0)), default=0)

    def _read_by(self, node: Node) -> dict[Node, None]:
        return {source: None for argument in node.all_input_nodes for source in self._sources[argument]}

    def _put_writes_early(self) -> None:
        """Inputs are written at the end of a graph: do it after their last use."""
        position: dict[Node, float] = {kernel: number for number, kernel in enumerate(self._kernels)}
        last_use: dict[Node, float] = {}
        writes = dict.fromkeys(kernel for kernel in self._kernels if _is_write_of_an_input(kernel))
        for kernel in self._kernels:
            if kernel not in writes:
                last_use.update(dict.fromkeys(self._read_by(kernel), position[kernel]))
        for write in writes:
            made = (position[self._maker[source]] for source in self._read_by(write) if source in self._maker)
            position[write] = max((last_use.get(write.args[0], -1.0), *made)) + 0.5
        self._kernels.sort(key=position.__getitem__)

    def _bytes_at_each_cut(self) -> list[int]:
        """Before each kernel: bytes that were made before, are read after, and would not be written if both
        were one part."""
        changes = [0] * (len(self._kernels) + 1)
        for number, values in enumerate(self._makes):
            for value in values:
                if value not in self._kept and (last := self._last_use.get(value, number)) > number:
                    changes[number + 1] += self._bytes[value]
                    changes[last + 1] -= self._bytes[value]
        total, found = 0, []
        for change in changes:
            total += change
            found.append(total)
        return found

    def _needs_from(self, first: int) -> Iterator[tuple[int, int]]:
        """(end, bytes that the kernels from ``first`` to ``end`` need as one part), ever larger."""
        given_bytes = live_bytes = most_bytes = 0
        given: set[Node] = set()
        made: set[Node] = set()
        for number in range(first, len(self._kernels)):
            for value in self._makes[number]:
                made.add(value)
                live_bytes += self._held_bytes(value)
            most_bytes = max(most_bytes, live_bytes)
            for value in self._reads[number]:
                if value in made:
                    if self._last_use[value] == number and value not in self._kept:
                        live_bytes -= self._held_bytes(value)
                elif value not in given:
                    given.add(value)
                    given_bytes += self._bytes[value]
            yield number + 1, given_bytes + most_bytes

    def _held_bytes(self, value: Node) -> int:
        """What a value takes where it is made: nothing if it is fused into what reads it."""
        return self._bytes[value] if value in self._kept or not _is_pointwise(value) else 0

    # -- dividing ------------------------------------------------------------------------------

    def divide(self, part_bytes: int) -> list[GraphPart]:
        """Parts that need at most so many bytes each, or are one kernel. Raises CannotDivide."""
        for node in self._module.graph.nodes:
            if node.meta.get("unbacked_bindings"):
                raise CannotDivide(f"sizes in it depend on values of tensors ({node.target})")
        for kernel in self._kernels:
            if isinstance(kernel.target, torch._ops.OpOverload) and describe(kernel.target).takes_lists:
                raise CannotDivide(f"it works on lists of tensors ({kernel.target})")
        ends = self._ends(part_bytes)
        if len(ends) < 2:
            raise CannotDivide(
                f"it is one kernel ({self._kernels[0].target})" if ends else "it has no kernel"
            )
        number_of = [number for number, (begin, end) in enumerate(_ranges(ends)) for _ in range(begin, end)]
        part_of = {value: number_of[self._position[maker]] for value, maker in self._maker.items()}
        returned: list[list[Node]] = [[] for _ in ends]
        for node in dict.fromkeys(self.returned):
            if isinstance(node, Node) and node.op != "placeholder":
                number = max((part_of.get(source, 0) for source in self._sources[node]), default=0)
                returned[number].append(node)
        return [self._part(begin, end, returned[number]) for number, (begin, end) in enumerate(_ranges(ends))]

    def _ends(self, part_bytes: int) -> list[int]:
        """The cuts through which the fewest bytes go in all, as the ends of parts."""
        count, crossing = len(self._kernels), self._crossing_bytes
        narrow = [
            number == count
            or (crossing[number] <= crossing[number - 1] and crossing[number] < crossing[number + 1])
            for number in range(1, count + 1)
        ]
        best: list[tuple[int, int] | None] = [(0, 0)] + [None] * count  # bytes, where the last part begins
        for begin in range(count):
            if (reached := best[begin]) is None:
                continue
            furthest = begin + 1
            found: list[int] = []
            for end, need_bytes in self._needs_from(begin):
                if need_bytes > part_bytes and end > begin + 1:
                    break
                furthest = end
                if narrow[end - 1]:
                    found.append(end)
            for end in found or [furthest]:
                cost = reached[0] + crossing[end] + _PART_COST_BYTES
                if (old := best[end]) is None or cost < old[0]:
                    best[end] = (cost, begin)
        ends: list[int] = []
        end = count
        while end > 0:
            ends.append(end)
            last = best[end]
            assert last is not None
            end = last[1]
        return ends[::-1]

    def _part(self, begin: int, end: int, returned: list[Node]) -> GraphPart:
        kernels = self._kernels[begin:end]
        inside = set(kernels)
        made = [value for value, maker in self._maker.items() if maker in inside]
        read = dict.fromkeys(
            source
            for values in (*self._reads[begin:end], *(self._sources[node] for node in returned))
            for source in values
            if self._maker.get(source) not in inside
        )
        outputs = dict.fromkeys([value for value in made if self._last_use.get(value, -1) >= end] + returned)
        graph = Graph()
        copies: dict[Node, Node] = {}
        nodes = [*read, *made, *outputs]
        inputs = [*self._sizes_for(nodes, read), *read]
        for number, node in enumerate(inputs):
            copies[node] = _copy_meta(node, graph.placeholder(f"input_{number}"))

        def copied(node: Node) -> Node:
            if node not in copies:
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), copied)
                # Names tell nothing of the place in the whole: equal parts are compiled once.
                name = node.name if node.op == "get_attr" else None
                copies[node] = _copy_meta(
                    node, graph.create_node(node.op, node.target, tuple(args), dict(kwargs), name)
                )
            return copies[node]

        for kernel in sorted(kernels, key=_is_write_of_an_input):
            copied(kernel)
        visible = set(self._module.graph.output_node().meta.get("user_visible_output_idxs", ()))
        visible_nodes = {self.returned[number] for number in visible}
        output = graph.output(tuple(copied(node) for node in outputs))
        output.meta["user_visible_output_idxs"] = [
            number for number, node in enumerate(outputs) if node in visible_nodes
        ]
        return GraphPart(GraphModule(self._module, graph), inputs, list(outputs), _modules_of(kernels))

    def _sizes_for(self, nodes: Iterable[Node], inputs: Iterable[Node]) -> list[Node]:
        """The inputs of the whole graph that say what the symbols in the sizes of these nodes are."""
        symbols = {symbol for node in nodes for symbol in _symbols_of(node)}
        if not symbols:
            return []
        told: dict[Any, Node] = {}
        for node in self.inputs:
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt):
                told.setdefault(value.node.expr, node)
        unknown = [symbol for symbol in symbols if symbol not in told]
        if unknown:
            raise CannotDivide(f"no input says what the size {unknown[0]} is")
        given = set(inputs)
        return [node for symbol in sorted(symbols, key=str) if (node := told[symbol]) not in given]


def _ranges(ends: list[int]) -> Iterator[tuple[int, int]]:
    return zip([0, *ends[:-1]], ends, strict=True)


def _is_kernel(node: Node) -> bool:
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return describe(node.target).is_kernel and node.target is not _ATEN._unsafe_view.default
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def _is_write_of_an_input(node: Node) -> bool:
    if node.target is not _ATEN.copy_.default or node.users:
        return False
    written = node.args[0]
    return isinstance(written, Node) and written.op == "placeholder"


def _is_pointwise(node: Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _bytes_of(node: Node) -> int:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0
    if value.layout is not torch.strided:
        return hint(value.numel()) * value.element_size()
    elements = 1
    for size, stride in zip(value.shape, value.stride(), strict=True):
        if hint(size) == 0:
            return 0
        elements += (hint(size) - 1) * hint(stride)
    return elements * value.element_size()


def hint(size: int | torch.SymInt) -> int:
    """The size that it was compiled for, without a guard."""
    if isinstance(size, torch.SymInt):
        return int(size.node.hint) if size.node.hint is not None else 1
    return size


def _symbols_of(node: Node) -> set[Any]:
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return set(value.node.expr.free_symbols)
    if not isinstance(value, torch.Tensor):
        return set()
    sizes = [*value.shape, *(value.stride() if value.layout is torch.strided else ())]
    return {
        symbol for size in sizes if isinstance(size, torch.SymInt) for symbol in size.node.expr.free_symbols
    }


def _copy_meta(node: Node, copy: Node) -> Node:
    copy.meta = dict(node.meta)
    return copy


def _modules_of(kernels: list[Node]) -> str:
    """Such as "blocks.3 to blocks.4": the modules that the kernels belong to."""
    found: dict[str, None] = {}
    for kernel in kernels:
        stack = kernel.meta.get("nn_module_stack") or kernel.meta.get("fwd_nn_module_stack") or {}
        if stack:
            path = str(list(stack.values())[-1][0])
            found[path.removeprefix("L['self'].")] = None
    names = list(found)
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}" if names else ""
