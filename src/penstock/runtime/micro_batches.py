"""A batch in parts whose gradients add up to the batch's, and how many samples a part should have."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from penstock.capture.datasheets import DATA_SHEETS
from penstock.capture.operators import OperatorMode
from penstock.capture.tracer import FakeTensorMode, trace
from penstock.core.hardware import Hardware
from penstock.core.plan import Plan
from penstock.core.trace import Trace
from penstock.errors import BudgetTooSmall, InvalidArgument, SpillSpaceFull
from penstock.options import BatchOptions, PlanOptions, choices
from penstock.planners import plan
from penstock.planners.microbatch import MicroBatch, choose_micro_batch
from penstock.runtime.batch_parts import parts, samples
from penstock.runtime.devices.drivers import make_driver
from penstock.runtime.interrupts import Interrupts
from penstock.runtime.layer_order import blocks_of, layer_by_layer

Loss = Callable[[Any], torch.Tensor]
Blocks: TypeAlias = torch.nn.Module | Iterable[torch.nn.Module]

NOTE = "micro_batch"  # of a trace: samples in a part
ORDER_NOTE = "micro_batch_order"
PART, LAYER, AUTO = choices("Order")
ORDER_PLANNING_S = 5.0  # for each order
CLEARLY = 0.95  # of the predicted time: less is worth steps of another kind
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
        self._chooses_again = self.wanted == AUTO
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

    def parts(
        self,
        batch: Any,
        loss: Loss | None,
        machine: Callable[[], dict[str, Any]],
        step: Trace | None = None,
    ) -> Iterator[Any]:
        """The parts of the batch.

        loss      of a part, where the size is to be chosen
        machine   returns the other arguments of `choose`
        step      measured, if one was: a size that was chosen is chosen once more by it
        """
        count = samples(batch)
        if self.chosen is not None and self._chooses_again and step is not None and loss is not None:
            self._choose_again(loss, batch, step, machine())
        if self.wanted == AUTO and not self.size:
            if loss is None:
                raise InvalidArgument(
                    'micro_batch="auto" traces the loss of several sizes before it decides: give it, as in '
                    "run.micro_batches(batch, loss), or give micro_batch as a number"
                )
            self.chosen = chosen = choose(loss, batch, **machine())
            assert chosen is not None
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

    def _choose_again(self, loss: Loss, batch: Any, step: Trace, machine: dict[str, Any]) -> None:
        """By what a step has measured. The size changes where the batch takes clearly less with another."""
        self._chooses_again = False
        if step.notes.get(NOTE) != str(self.size):
            return
        try:
            found = choose(loss, batch, **machine, step=step)
        except (BudgetTooSmall, SpillSpaceFull, InvalidArgument) as error:
            logger.info("the size of micro-batches stays %d: %s", self.size, error)
            return
        if found is None:
            return
        mine = next((row for row in found.table if row.size == self.size and not row.reason), None)
        if mine is None or found.predicted_s < CLEARLY * mine.predicted_s:
            logger.info("micro-batches of %d samples, as measured, not %d", found.size, self.size)
            self.size, self.chosen = found.size, found


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
    planning: PlanOptions,
    *,
    device: str = "cpu",
    mode: FakeTensorMode | None = None,
    step: Trace | None = None,
) -> MicroBatch | None:
    """How to divide the batch. The loss of parts of several sizes is traced without running it.

    planning   what plans may do
    device     as in `penstock.trace`
    mode       the fake mode that the model was built in, if it was
    step       a divided one, measured: times and workspaces of parts are taken from it. The result is None
               where its kernels are not those of parts, one after the other

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
                found = trace(step, device=device, warmup=warmup, mode=mode)
        except InvalidArgument as error:
            raise InvalidArgument(f"{error}; or give micro_batch as a number") from error
        except (ValueError, RuntimeError) as error:  # such as batch normalization of a single value
            raise InvalidArgument(
                f"the loss cannot be traced for {size} samples: {error}. Give micro_batch as a number"
            ) from error
        if planning.keep_weights:  # no optimizer says which tensors these are: they outlive a part
            found = dataclasses.replace(found, tensor_movable=found.movable & ~found.tensor_persistent)
        return found

    asked: Callable[[int], Trace] | None = trace_of
    if step is not None and (asked := as_measured(trace_of, int(step.notes[NOTE]), step)) is None:
        return None
    assert asked is not None
    return choose_micro_batch(
        *(asked, hardware, count, budget_bytes, planning.policy),
        recompute=planning.recompute,
        compress=planning.compress,
        lossy=planning.lossy,
    )


def as_measured(trace_of: Callable[[int], Trace], size: int, step: Trace) -> Callable[[int], Trace] | None:
    """Traces of parts, with what a step measured. None where the step's kernels are not those of its parts.

    Kernels take so many times their estimate as those of the step's last part do, and the workspace that
    these took, in proportion to the samples.

    trace_of   of a part of so many samples, estimated
    size       samples in the parts of the step
    step       measured
    """
    estimated = trace_of(size)
    names, count = estimated.kernel_name, estimated.kernels
    ends = range(step.kernels, count - 1, -1)
    end = next((end for end in ends if step.kernel_name[end - count : end] == names), None)
    if not step.measured or not count or end is None:
        return None
    part = slice(end - count, end)
    ratio = step.kernel_time_s[part] / np.maximum(estimated.kernel_time_s, 1e-9)
    workspace_bytes = step.kernel_workspace_bytes[part]

    def measured(samples: int) -> Trace:
        found = estimated if samples == size else trace_of(samples)
        if found.kernel_name != names:  # other kernels: they are as much slower together
            share = float(step.kernel_time_s[part].sum()) / estimated.ideal_s
            return found.with_times(found.kernel_time_s * share)
        scaled = np.ceil(workspace_bytes * (samples / size)).astype(np.int64)
        return dataclasses.replace(
            found.with_times(found.kernel_time_s * ratio), kernel_workspace_bytes=scaled
        )

    return measured


def choose_order(
    run: Callable[[str], object],
    hardware: Hardware,
    budget_bytes: int,
    planning: PlanOptions,
    *,
    device: str = "cpu",
    mode: FakeTensorMode | None = None,
) -> str:
    """The order of parts with the least predicted time; "part" where random numbers are drawn, since another
    order gives other ones.

    run        forward and backward of a batch in the order that it is given. It is traced without running it
    planning   what plans may do
    device     as in `penstock.trace`
    mode       the fake mode that the model was built in, if it was

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
                *(found, hardware, planning.policy, planning.recompute, planning.compress, ORDER_PLANNING_S),
                device_budget=budget_bytes,
                lossy=planning.lossy,
            ).predicted_step_s
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


class OperatorFinder(OperatorMode):
    """Notes what ``look`` finds in the operators of forward, while it is entered."""

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
