"""A batch in parts whose gradients add up to the batch's, and how many samples a part should have."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from penstock.capture.datasheets import DATA_SHEETS
from penstock.capture.tracer import FakeTensorMode, trace
from penstock.core.hardware import Hardware
from penstock.core.plan import Plan
from penstock.core.trace import Trace
from penstock.errors import BudgetTooSmall, InvalidArgument, SpillSpaceFull
from penstock.options import BatchOptions, choices
from penstock.planners import plan
from penstock.planners.microbatch import MicroBatch, choose_micro_batch
from penstock.runtime.devices.drivers import make_driver
from penstock.runtime.interrupts import Interrupts
from penstock.runtime.layer_order import blocks_of, layer_by_layer

Loss = Callable[[Any], torch.Tensor]
Blocks: TypeAlias = torch.nn.Module | Iterable[torch.nn.Module]

NOTE = "micro_batch"  # of a trace: samples in a part
ORDER_NOTE = "micro_batch_order"
PART, LAYER, AUTO = choices("Order")
ORDER_PLANNING_S = 5.0  # for each order
SLOWEST_GPU = "v100"  # whose times are taken for a GPU without a data sheet

logger = logging.getLogger("penstock")


class Splitter:
    """Divides the batches of a run.

    batches   how they are divided
    plan      that is followed; where it is for a step that divides batches, they are divided so

    wanted   samples of a part, "auto" to choose that for the first batch, None not to divide
    order    "part": one part after the other; "layer": all pass a block before the next block begins;
             "auto": to choose that for the first batch, which makes it one of the others
    size     samples of a part, 0 where that is not known or batches are not divided
    count    parts of the latest batch
    chosen   how the size was, None where it was given

    Raises InvalidArgument where the two contradict each other, or whole batches have an order of parts.
    """

    def __init__(self, batches: BatchOptions, plan: Plan | None = None) -> None:
        notes = plan.trace.notes if plan is not None and plan.trace is not None else {}
        wanted, order = batches.micro_batch, batches.micro_batch_order
        if NOTE in notes:
            planned: dict[str, Any] = {NOTE: int(notes[NOTE]), ORDER_NOTE: notes.get(ORDER_NOTE, PART)}
            for name, asked in ((NOTE, wanted), (ORDER_NOTE, order)):
                if asked not in (None, planned[name]):
                    raise InvalidArgument(
                        f"the plan is for a {name} of {planned[name]!r}, and {name} is {asked!r}: "
                        "leave one of them out"
                    )
            wanted, order = planned[NOTE], planned[ORDER_NOTE]
        self.order = order or PART
        if self.order != PART and wanted is None:
            raise InvalidArgument(
                f"a micro_batch_order of {order!r} is of batches in parts: give micro_batch, too"
            )
        self.wanted = wanted
        self.size = wanted if isinstance(wanted, int) else 0
        self.count = 0
        self.chosen: MicroBatch | None = None
        self._most = 0  # samples of a batch so far
        self._inspects = wanted is not None
        self._inexact = OperatorFinder(_inexact)
        self._random = OperatorFinder(_random)

    @property
    def notes(self) -> dict[str, str]:
        """For traces of steps."""
        return {NOTE: str(self.size), ORDER_NOTE: self.order} if self.size else {}

    def begin_step(self) -> contextlib.ExitStack:
        """A step begins: close the result when it ends. The first one that divides a batch is inspected."""
        stack = contextlib.ExitStack()
        if self._inspects:
            self.count = 0
            stack.callback(self._warn)
            stack.enter_context(self._inexact)
        return stack

    def finding_random(self) -> contextlib.AbstractContextManager[object]:
        """While parts run: what they draw, in the step that is inspected."""
        return self._random if self._inspects and self.order == LAYER else contextlib.nullcontext()

    def _warn(self) -> None:
        """Say what makes the sum of gradients inexact."""
        self._inspects = not self.count
        if self.count > 1:
            for what in self._inexact.found:
                logger.warning("micro-batches of %d samples give other results: %s", self.size, what)
            for what in self._random.found:
                logger.warning("micro-batches layer by layer give other results: %s", what)

    def parts(self, batch: Any, loss: Loss | None, machine: Callable[[], dict[str, Any]]) -> Iterator[Any]:
        """The parts of the batch.

        loss      of a part, where the size is to be chosen
        machine   returns the other arguments of `choose`
        """
        count = samples(batch)
        if self.wanted == AUTO and not self.size:
            if loss is None:
                raise InvalidArgument(
                    'micro_batch="auto" traces the loss of several sizes before it decides: give it, as in '
                    "run.micro_batches(batch, loss), or give micro_batch as a number"
                )
            self.chosen = chosen = choose(loss, batch, **machine())
            logger.info(
                "batches of %d samples are divided into micro-batches of %d; moDNN's equation 8 says %d",
                count,
                chosen.size,
                chosen.working_set_size,
            )
            self.size = chosen.size
        self._most = max(self._most, count)
        if self.size > self._most:
            raise InvalidArgument(
                f"a micro-batch of {self.size} samples is larger than the batch, which has {count}: give "
                f"{count} or fewer"
            )
        size = min(self.size or count, count)  # the last batch of an epoch may be smaller
        self.count = -(-count // size)
        return parts(batch, size)


def samples(batch: Any) -> int:
    """How many samples a batch has: the first dimension of its tensors. Raises InvalidArgument."""
    sizes = dict.fromkeys(len(leaf) for leaf in _leaves(batch) if _is_array(leaf))
    if not any(isinstance(leaf, torch.Tensor) and leaf.ndim for leaf in _leaves(batch)):
        raise InvalidArgument(
            f"a batch of type {type(batch).__name__} has no tensor to divide: give a tensor, or a tuple, "
            "list, mapping or dataclass of tensors whose first dimension counts samples"
        )
    if len(sizes) > 1:
        raise InvalidArgument(
            f"the tensors of the batch have first dimensions of {' and '.join(map(str, sizes))}: it has to "
            "be the number of samples in all of them. Give what all samples share to the loss in another way"
        )
    (count,) = sizes
    if not count:
        raise InvalidArgument("the batch has no samples: leave empty batches out")
    return count


def parts(batch: Any, size: int) -> Iterator[Any]:
    """Parts of ``size`` samples, of the batch's own type; the last one may be smaller.

    Tensors and arrays are divided by their first dimension, and so are lists of as many other things, such as
    names. What else is in the batch comes with every part. ``part.weight`` is the part's share of samples.
    """
    count = samples(batch)
    for begin in range(0, count, size):
        end = min(begin + size, count)
        yield _part(batch, slice(begin, end), count, weight=(end - begin) / count)


def repeated(batch: Any, size: int) -> Any:
    """A batch of ``size`` samples, of the batch's own type: its own, again and again where they are fewer."""
    count = samples(batch)
    return _part(batch, [sample % count for sample in range(size)], count)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _leaves(getattr(value, field.name))
    else:
        yield value


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim > 0


def _part(value: Any, which: slice | list[int], count: int, weight: float | None = None) -> Any:
    """Some of ``count`` samples; with a weight, where one is given."""

    def inner(item: Any) -> Any:
        return _part(item, which, count)

    made: Any
    kind: Any = type(value) if weight is None else _weighted(type(value))  # type: ignore[arg-type]
    if _is_array(value):
        made = value[which]
    elif isinstance(value, tuple):
        made = tuple.__new__(kind, map(inner, value))
    elif isinstance(value, list):
        whole = len(value) == count and not any(map(_is_array, _leaves(value)))
        items = value[which] if isinstance(which, slice) else map(value.__getitem__, which)
        made = kind(items if whole else map(inner, value))
    elif isinstance(value, dict) and not type(value).__dictoffset__:
        made = (dict if weight is None else _weighted(dict))((k, inner(item)) for k, item in value.items())
    elif isinstance(value, Mapping):
        made = copy.copy(value)
        for key, item in value.items():
            made[key] = inner(item)  # type: ignore[index]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = object.__new__(kind)
        for name, item in getattr(value, "__dict__", {}).items():
            object.__setattr__(made, name, item)
        for field in dataclasses.fields(value):
            object.__setattr__(made, field.name, inner(getattr(value, field.name)))
    else:
        made = value
    if weight is not None:
        set_attribute = object.__setattr__ if dataclasses.is_dataclass(made) else setattr
        set_attribute(made, "weight", weight)
    return made


@cache
def _weighted(kind: Any) -> Any:
    """A type like ``kind`` whose instances have room for a weight."""
    fields = getattr(kind, "_fields", ()) or getattr(kind, "__dataclass_fields__", ())
    if "weight" in fields:
        raise InvalidArgument(
            f"batches of type {kind.__name__} have a field `weight`, and `part.weight` is the part's share "
            "of the samples: give the field another name, or batches as a dict"
        )
    if not kind.__dictoffset__:
        return type(kind.__name__, (kind,), {"__module__": kind.__module__})
    return kind


def accumulate(
    parts: Iterable[Any],
    loss: Loss,
    order: str = PART,
    blocks: Blocks | None = None,
    interrupts: Interrupts | None = None,
) -> torch.Tensor:
    """Forward and backward of each part. The loss of the batch, without its graph.

    blocks   where the parts hand over to each other in the order of layers, or the model that has them

    Raises what `blocks_of` and `layer_by_layer` raise.
    """

    def run(part: Any) -> torch.Tensor:
        weighted = loss(part) * part.weight
        weighted.backward()
        return weighted.detach()

    bodies = [partial(run, part) for part in parts]
    if order == LAYER and len(bodies) > 1:
        losses = layer_by_layer(bodies, _blocks(blocks), interrupts or Interrupts())
    else:
        losses = [body() for body in bodies]
    return torch.stack(losses).sum()


def _blocks(given: Blocks | None) -> Sequence[torch.nn.Module]:
    if isinstance(given, torch.nn.Module) and not isinstance(given, torch.nn.ModuleList):
        return blocks_of(given)
    blocks = list(given or ())
    if not blocks:
        raise InvalidArgument("parts hand over at the blocks of the model: give it as `blocks`, or give them")
    return blocks


# -- how many samples, and in which order ----------------------------------------------------------


def choose(
    loss: Loss,
    batch: Any,
    hardware: Hardware,
    budget_bytes: int,
    policy: str,
    *,
    device: str = "cpu",
    mode: FakeTensorMode | None = None,
) -> MicroBatch:
    """How to divide the batch. The loss of parts of several sizes is traced without running it.

    device   as in `penstock.trace`
    mode     the fake mode that the model was built in, if it was

    Raises what `penstock.trace` and `choose_micro_batch` raise.
    """
    count = samples(batch)

    def trace_of(size: int) -> Trace:
        part = next(parts(batch, size))

        def step() -> None:
            (loss(part) * part.weight).backward()

        # All of the batch makes its gradients; parts, but for the first, add to those of the parts before.
        warmup = int(size < count)
        try:
            # Compiled for fake tensors, regions would be compiled again for real ones.
            with _disable_current_modes(), torch.compiler.set_stance("force_eager"):
                return trace(step, device=device, warmup=warmup, mode=mode)
        except InvalidArgument as error:
            raise InvalidArgument(f"{error}; or give micro_batch as a number") from error
        except (ValueError, RuntimeError) as error:  # such as batch normalization of a single value
            raise InvalidArgument(
                f"the loss cannot be traced for {size} samples: {error}. Give micro_batch as a number"
            ) from error

    return choose_micro_batch(trace_of, hardware, count, budget_bytes, policy)


def choose_order(
    run: Callable[[str], object],
    hardware: Hardware,
    budget_bytes: int,
    policy: str,
    *,
    device: str = "cpu",
    mode: FakeTensorMode | None = None,
) -> str:
    """The order of parts with the least predicted time; "part" where random numbers are drawn, since another
    order gives other ones.

    run      forward and backward of a batch in the order that it is given. It is traced without running it
    device   as in `penstock.trace`
    mode     the fake mode that the model was built in, if it was

    Raises what `penstock.trace` raises, and what `penstock.plan` raises where no order fits.
    """
    random = OperatorFinder(_random)

    def traced(order: str) -> Trace:
        def step() -> None:
            with random:
                run(order)

        with _disable_current_modes(), torch.compiler.set_stance("force_eager"):
            return trace(step, device=device, warmup=0, mode=mode)

    try:
        traces = {PART: traced(PART)}
    except InvalidArgument as error:
        raise InvalidArgument(f'{error}; or give micro_batch_order as "{PART}" or "{LAYER}"') from error
    if random.found:
        return PART
    traces[LAYER] = traced(LAYER)
    predicted_s: dict[str, float] = {}
    failed: list[Exception] = []
    for order, found in traces.items():
        try:
            predicted_s[order] = plan(
                found, hardware, policy, False, False, ORDER_PLANNING_S, device_budget_bytes=budget_bytes
            ).predicted_s
        except (BudgetTooSmall, SpillSpaceFull) as error:
            failed.append(error)
    if not predicted_s:
        raise failed[0]
    logger.info("predicted for a batch, by the order of its parts: %s", predicted_s)
    # Where nothing moves, both take the same but for rounding.
    return min(predicted_s, key=lambda order: predicted_s[order] * (1.01 if order == LAYER else 1.0))


def data_sheet(device: torch.device) -> str:
    """The device to estimate times for, as `penstock.trace` names it."""
    if device.type == "cpu":
        return "cpu"
    name = make_driver(device).name.lower().replace(" ", "")
    return next((sheet for sheet in DATA_SHEETS if sheet in name), SLOWEST_GPU)


# -- what parts cannot give ------------------------------------------------------------------------


class OperatorFinder(TorchDispatchMode):
    """Notes what ``look`` finds in the operators of forward, while it is entered."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, look: Callable[[Any, Mapping[str, Any], Any], Iterable[str]]) -> None:
        super().__init__()
        self._look = look
        self.found: dict[str, None] = {}

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        if torch._C._current_autograd_node() is None and (schema := getattr(operator, "_schema", None)):
            given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)}
            self.found.update(dict.fromkeys(self._look(operator, given | (kwargs or {}), result)))
        return result


def _random(operator: Any, given: Mapping[str, Any], _: Any) -> Iterable[str]:
    name = operator._schema.name
    if torch.Tag.nondeterministic_seeded in operator.tags and (
        "dot_product" not in name or given.get("dropout_p")
    ):
        yield f"`{name}` draws random numbers, in the order of layers instead of parts"


def _inexact(operator: Any, given: Mapping[str, Any], result: Any) -> Iterable[str]:
    name = operator._schema.name
    if "batch_norm" in name and given.get("training", "with_update" in name):
        yield "batch normalization in training mode takes its statistics from the samples of each part"
    if given.get("reduction") == 2:
        yield (
            f"`{name}` adds up over the samples, and `part.weight` is for means: leave the weight out for it"
        )
    if "nll_loss" in name and given.get("reduction") == 1:
        with _disable_current_modes():
            is_mean = float(result[1]) == given["target"].numel()
        if not is_mean:
            yield (
                f"`{name}` is a mean over targets that are not ignored, or weighted ones, of which parts "
                "have unequal shares"
            )
