"""A backend of torch.compile: Inductor, with a graph that needs much divided into parts, each one kernel.

It is Inductor's own compile_fx with another inner_compile: what compiles a graph once autograd has been
traced, the forward and the backward by themselves.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch._guards import CompileContext, TracingContext
from torch.fx import GraphModule, Node

from penstock.capture.division import CannotDivide, DivisibleGraph, GraphPart, hint
from penstock.errors import BudgetTooSmall
from penstock.units import format_bytes_up, parse_bytes

# Of a run's budget. A part, those before it that leave, and those after it that come, are there at once.
_PARTS_OF_A_BUDGET = 8
_SMALLEST_PART_BYTES = 1 << 20
_DEFAULT_PART_BYTES = 64 << 20

logger = logging.getLogger("penstock")

_part_bytes: list[int] = []  # of the run that is open


@contextlib.contextmanager
def regions_divided(budget_bytes: int) -> Iterator[None]:
    """Inside, what torch.compile gives to Inductor is divided where it needs much of the budget."""
    part_bytes = max(budget_bytes // _PARTS_OF_A_BUDGET, _SMALLEST_PART_BYTES)
    kind = torch._TorchCompileInductorWrapper
    call = kind.__call__

    @functools.wraps(call)
    def divided(*args: Any, **kwargs: Any) -> Any:
        with _dividing(part_bytes):
            return call(*args, **kwargs)

    _part_bytes.append(part_bytes)
    kind.__call__ = divided
    try:
        yield
    finally:
        kind.__call__ = call
        _part_bytes.pop()


@contextlib.contextmanager
def _dividing(part_bytes: int) -> Iterator[None]:
    """Inside, Inductor divides what it compiles."""
    from torch._functorch import config as functorch
    from torch._inductor import compile_fx as inductor

    plain = inductor.compile_fx

    def compile_fx(*args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("inner_compile", _compiler(part_bytes))  # it calls itself, with what it was given
        return plain(*args, **kwargs)

    inductor.compile_fx = compile_fx
    try:
        with functorch.patch(enable_autograd_cache=False):  # it knows a graph as it is before it is divided
            yield
    finally:
        inductor.compile_fx = plain


def backend(
    module: GraphModule,
    inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> Any:
    """``torch.compile(model, backend="penstock")``: divides as a run does, without a run, too.

    options   part_bytes: what a part needs at most, all that it is given and makes, where it can be divided
              so; the default is an eighth of the open run's budget, and 64 MiB without a run. All others are
              Inductor's
    """
    from torch._inductor import compile_fx as inductor
    from torch._inductor import list_mode_options

    patches = {**(list_mode_options(mode) if mode and mode != "default" else {}), **(options or {})}
    default = _part_bytes[-1] if _part_bytes else _DEFAULT_PART_BYTES
    part_bytes = parse_bytes(patches.pop("part_bytes", default))
    with _dividing(part_bytes):
        return inductor.compile_fx(module, inputs, config_patches=patches)


def _compiler(part_bytes: int) -> Callable[..., Any]:
    """What compiles a graph: in parts where it needs more than two of them may."""

    def compile_graph(module: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        from torch._inductor import compile_fx as inductor
        from torch._inductor import config

        with config.patch(wrap_inductor_compiled_regions=True):
            graph = DivisibleGraph(module)
            if graph.needs_bytes <= 2 * part_bytes:
                return inductor.compile_fx_inner(module, inputs, **kwargs)
            name, need = _name(kwargs), format_bytes_up(graph.needs_bytes)
            try:
                parts = graph.divide(part_bytes)
            except CannotDivide as error:
                logger.info("%s needs %s, and is not divided: %s", name, need, error)
                run = inductor.compile_fx_inner(module, inputs, **kwargs)
                return _Whole(run, f"{name}, which is not divided, as {error}")
            logger.info(
                "%s needs %s and runs in %d parts; so it does, without a run, too, with torch.compile(..., "
                'backend="penstock", options={"part_bytes": %d})',
                *(name, need, len(parts), part_bytes),
            )
            return _compile_parts(inductor.compile_fx_inner, graph, parts, inputs, kwargs, name)

    return compile_graph


def _name(kwargs: dict[str, Any]) -> str:
    direction = "backward" if kwargs.get("is_backward") else "forward"
    region = kwargs.get("compile_region_name") or CompileContext.current_compile_id()
    return f"the {direction} graph of torch.compile's region {region}"


class _Compiled(NamedTuple):
    """A part of a graph, compiled. Values have slots: those that the graph is given the first.

    run      takes a list of its inputs, which it empties
    inputs   slots of what it is given
    last     of these, what nobody reads afterwards
    outputs  slots of what it returns
    name     for people
    """

    run: Callable[[list[Any]], Sequence[Any]]
    inputs: list[int]
    last: list[int]
    outputs: list[int]
    name: str


class _Whole:
    """A graph that runs as one, though it needs much."""

    def __init__(self, run: Callable[[list[Any]], Any], name: str) -> None:
        self._boxed_call = True  # it is given a list, which it empties
        self._run = run
        self._name = name

    def __call__(self, inputs: list[Any]) -> Any:
        return _run(self._run, inputs, self._name)


class _Parts:
    """A graph that runs part by part."""

    def __init__(self, parts: list[_Compiled], slots: int, returned: list[Any]) -> None:
        self._boxed_call = True
        self._parts = parts
        self._slots = slots
        self._returned = returned  # slots; or a list of a constant

    def __call__(self, inputs: list[Any]) -> list[Any]:
        values = [*inputs, *[None] * (self._slots - len(inputs))]
        inputs.clear()
        for part in self._parts:
            given = [values[slot] for slot in part.inputs]
            for slot in part.last:
                values[slot] = None
            results = _run(part.run, given, part.name)
            for slot, result in zip(part.outputs, results, strict=True):
                values[slot] = result
            results = result = None
        return [values[slot] if isinstance(slot, int) else slot[0] for slot in self._returned]


def _run(run: Callable[[list[Any]], Any], inputs: list[Any], name: str) -> Any:
    try:
        return run(inputs)
    except BudgetTooSmall as error:
        raise BudgetTooSmall(f"{name}: {error}", error.minimum_bytes) from None


def _compile_parts(
    compile_part: Callable[..., Any],
    graph: DivisibleGraph,
    parts: list[GraphPart],
    inputs: Sequence[Any],
    kwargs: dict[str, Any],
    name: str,
) -> _Parts:
    """Compile one part after another: Inductor chooses the strides of what goes from one to the next."""
    slots: dict[Node, int] = {node: number for number, node in enumerate(graph.inputs)}
    values: dict[Node, Any] = dict(zip(graph.inputs, inputs, strict=True))
    strides: dict[Node, Any] = {}
    static = {graph.inputs[number] for number in kwargs.get("static_input_idxs", ())}
    donated = {graph.inputs[number] for number in (_donated() if kwargs.get("is_backward") else ())}
    last_part = {node: number for number, part in enumerate(parts) for node in part.inputs}
    compiled = []
    for number, part in enumerate(parts):
        last = [node for node in part.inputs if last_part[node] == number and node not in graph.returned]
        own = {**kwargs, "static_input_idxs": _places(part.inputs, static)}
        own_donated = _places(part.inputs, donated.intersection(last))
        with _donating(own_donated), TracingContext.report_output_strides() as told:
            run = compile_part(part.module, [values[node] for node in part.inputs], **own)
        for place, node in enumerate(part.outputs):
            slots[node] = len(slots)
            strides[node] = told[place] if told else None
            values[node] = _restrided(node.meta["val"], strides[node])
        compiled.append(
            _Compiled(
                run,
                [slots[node] for node in part.inputs],
                [slots[node] for node in last],
                [slots[node] for node in part.outputs],
                f"part {number + 1} of {len(parts)} of {name}{part.where and f' ({part.where})'}",
            )
        )
    context = TracingContext.try_get()
    if context is not None and context.output_strides is not None:
        context.output_strides.extend(strides.get(node) for node in graph.returned)
    returned = [slots[node] if isinstance(node, Node) else [node] for node in graph.returned]
    return _Parts(compiled, len(slots), returned)


def _places(nodes: list[Node], wanted: set[Node]) -> list[int]:
    return [place for place, node in enumerate(nodes) if node in wanted]


def _donated() -> Sequence[int]:
    """Of a backward graph: which of its inputs nobody else has."""
    context = TracingContext.try_get()
    return (context is not None and context.fw_metadata and context.fw_metadata.bw_donated_idxs) or ()


@contextlib.contextmanager
def _donating(places: list[int]) -> Iterator[None]:
    context = TracingContext.try_get()
    if context is None or not context.fw_metadata:
        yield
        return
    metadata = context.fw_metadata
    before, metadata.bw_donated_idxs = metadata.bw_donated_idxs, places
    try:
        yield
    finally:
        metadata.bw_donated_idxs = before


def _restrided(value: Any, strides: Sequence[Any] | None) -> Any:
    """What an output looks like that Inductor gave these strides."""
    if strides is None or not isinstance(value, torch.Tensor):
        return value
    if all(hint(one) == hint(other) for one, other in zip(value.stride(), strides, strict=True)):
        return value
    return value.as_strided(value.size(), strides)
