"""FlashNeuron (Bae et al., FAST 2021, sections 3.2 and 3.3): offload what the forward pass buffers.

Phase 1 takes feature maps from the beginning of the forward pass on, until those that stay fit beside what
never leaves. Phase 2 runs where the copies take longer than the forward pass and tensors may be compressed:
it exchanges the last of those taken that do not compress for those that compress best. Tensors come back
when its runtime would fetch them, which the planner simulates. It fails where activations alone do not make
enough room.

What never leaves is (section 3.3) all that a profiled iteration has in memory beside the tensors that are
buffered for the backward pass, such as weights and temporary workspace.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from penstock.core.columns import BoolArray, IntArray
from penstock.core.memory_profile import resident_bytes, spread
from penstock.core.plan import Evict
from penstock.core.trace import Trace
from penstock.errors import InvalidArgument
from penstock.planners.heuristics.flashneuron_simulation import simulate_flashneuron
from penstock.planners.heuristics.prefetch import advance, latest_safe
from penstock.planners.heuristics.room import Room, spill_full
from penstock.planners.heuristics.vitality import Candidates, boundary
from penstock.planners.problem import Decision, Problem
from penstock.units import format_bytes, format_bytes_up


def flashneuron(problem: Problem) -> Decision:
    """Both phases, to the disk; to the host where there is no disk.

    Raises InvalidArgument where offloading activations alone cannot keep to the budget, and SpillSpaceFull
    where the tier cannot hold them.
    """
    trace = problem.trace
    if trace.peak_bytes <= problem.budget_bytes:
        return FITS
    evictions = choose(problem, int(_other_bytes(trace).max(initial=0)))
    try:
        return decide(problem, evictions)
    except InvalidArgument:  # penstock's runtime places no tensor at an address: it needs no extent
        issue = latest_safe(trace, evictions, problem.hardware)
        return Decision(
            evictions=advance(trace, evictions, issue, problem.budget_bytes),
            reason="activations alone make enough room; FlashNeuron's memory manager would find no extent",
        )


FITS = Decision(reason="everything fits: nothing is offloaded")


def decide(problem: Problem, evictions: list[Evict]) -> Decision:
    """These evictions, fetched when FlashNeuron's own runtime would.

    Raises InvalidArgument where its memory manager finds no extent that holds a tensor.
    """
    trace, budget_bytes = problem.trace, problem.budget_bytes
    simulation = simulate_flashneuron(trace, evictions, budget_bytes, problem.hardware)
    issue = [simulation.prefetch_at.get(evict.tensor, evict.end) for evict in evictions]
    return Decision(
        evictions=advance(trace, evictions, issue, budget_bytes),
        reason="activations alone make enough room; FlashNeuron's own runtime, whose backward pass waits for "
        f"all copies, would take {simulation.iteration_s:.3f} s",
    )


def choose(problem: Problem, reserved_bytes: int) -> list[Evict]:
    """What is offloaded, returning on demand, with which the budget and the tier are kept to.

    reserved_bytes   that never leave, beside what outlives the iteration
    """
    trace, budget_bytes = problem.trace, problem.budget_bytes
    tier = "disk" if problem.hardware.disk_bytes else "host"
    options = Candidates.of(trace)
    evictions = _selected(problem, reserved_bytes, options, tier)
    _require_room(problem, evictions, tier)
    resident = resident_bytes(trace, evictions)
    while bool((resident > budget_bytes).any()):
        plain = _without_compression(evictions, resident > budget_bytes)
        if plain == evictions:
            if problem.packs:  # what phase 2 exchanged is too much: phase 1 alone may do
                return choose(replace(problem, compress=False, lossy=None), reserved_bytes)
            raise _cannot(problem, int(resident.max()), _least_bytes(problem, reserved_bytes, options))
        evictions, resident = plain, resident_bytes(trace, plain)
    return evictions


def _in_order(trace: Trace, options: Candidates) -> dict[int, int]:
    """The tensors that can be offloaded, in the order of phase 1, each with its place in the options."""
    offered = {int(options.tensor[index]): index for index in np.flatnonzero(options.feature_map).tolist()}
    return {tensor: offered[tensor] for tensor in _buffered(trace).tolist() if tensor in offered}


def _least_bytes(problem: Problem, reserved_bytes: int, options: Candidates) -> int:
    """The smallest budget, above the one given, at which what phase 1 takes is enough."""
    trace = problem.trace
    order = _in_order(trace, options)
    evictions = [options.evict(index, "disk") for index in order.values()]
    line_bytes = trace.persistent_bytes + reserved_bytes + int(trace.tensor_bytes[_buffered(trace)].sum())
    found = trace.peak_bytes  # where nothing leaves
    most_bytes = trace.peak_bytes - 1
    for taken in range(len(order) + 1):
        # The budgets at which phase 1 takes so many: beyond the line, up to the line before.
        if taken:
            most_bytes = min(line_bytes, trace.peak_bytes - 1)
            line_bytes -= _size(trace, evictions[taken - 1].tensor)
        least_bytes = max(
            line_bytes + (taken < len(order)),
            int(resident_bytes(trace, evictions[:taken]).max(initial=0)),
            problem.budget_bytes + 1,
        )
        if least_bytes <= most_bytes:
            found = min(found, least_bytes)
        if line_bytes < problem.budget_bytes:
            break
    return found


def _selected(problem: Problem, reserved_bytes: int, options: Candidates, tier: str) -> list[Evict]:
    """What both phases offload: on demand, in the order of the forward pass."""
    trace = problem.trace
    offered = _in_order(trace, options)
    stay_bytes = int(trace.tensor_bytes[_buffered(trace)].sum())
    line_bytes = problem.budget_bytes - trace.persistent_bytes - reserved_bytes
    chosen: list[int] = []
    order = list(offered)
    for tensor in order:
        if stay_bytes < line_bytes:
            break
        chosen.append(tensor)
        stay_bytes -= _size(trace, tensor)
    if stay_bytes > line_bytes:
        needed_bytes = problem.budget_bytes + stay_bytes - line_bytes
        raise _cannot(problem, needed_bytes, _least_bytes(problem, reserved_bytes, options))
    periods = zip(*(column.tolist() for column in trace.periods), strict=True)
    stored = dict(
        zip(
            ((tensor, begin) for tensor, begin, *_ in periods),
            trace.period_bytes(problem.compress).tolist(),
            strict=True,
        )
    )
    packed = {tensor: stored[tensor, int(options.begin[offered[tensor]])] for tensor in order}
    if problem.packs:
        chosen = _compression_aware(problem, chosen, order, packed, tier)
    evictions = []
    for tensor in chosen:
        evict = options.evict(offered[tensor], tier)
        if packed[tensor] < _size(trace, tensor):
            evict = replace(evict, after=evict.begin - 1, codec=trace.codec(tensor))
        evictions.append(evict)
    return evictions


def _buffered(trace: Trace) -> IntArray:
    """The tensors that the forward pass leaves to the backward pass, in the order of their first use."""
    first_backward = boundary(trace)
    starts, values = trace.uses.starts, trace.uses.values
    used = np.flatnonzero(np.diff(starts))
    first, last = values[starts[used]], values[starts[used + 1] - 1]
    crosses = ~trace.tensor_persistent[used] & (first < first_backward) & (last >= first_backward)
    found: IntArray = used[crosses]
    return found[np.argsort(first[crosses], kind="stable")]


def _other_bytes(trace: Trace) -> IntArray:
    """[K] bytes on the device that are neither persistent nor buffered for the backward pass."""
    buffered = _buffered(trace)
    born, dead = trace.tensor_birth[buffered], np.minimum(trace.tensor_death[buffered], trace.kernels)
    held = spread(trace.kernels, born, dead, trace.tensor_bytes[buffered])
    found: IntArray = trace.live_bytes - trace.persistent_bytes - held
    return found


def _compression_aware(
    problem: Problem, chosen: list[int], order: list[int], packed: dict[int, int], tier: str
) -> list[int]:
    """Phase 2: exchange what does not compress, the last first, for what compresses best, until the copies
    take no longer than the forward pass or there is nothing left to exchange."""
    trace = problem.trace
    forward_s = float(trace.start_s[boundary(trace)])
    selected = set(chosen)
    write_s = {tensor: problem.hardware.evict_s(tier, packed[tensor]) for tensor in order}
    total_s = sum(write_s[tensor] for tensor in selected)
    friendly = [
        tensor for tensor in order if packed[tensor] < _size(trace, tensor) and tensor not in selected
    ]
    friendly.sort(key=lambda tensor: (packed[tensor] / _size(trace, tensor), -_size(trace, tensor)))
    for tensor in reversed(chosen):
        if total_s <= forward_s or not friendly:
            break
        if packed[tensor] < _size(trace, tensor):
            continue
        instead, covered = [], 0
        while friendly and covered < _size(trace, tensor):
            instead.append(friendly.pop(0))
            covered += _size(trace, instead[-1])
        if covered < _size(trace, tensor):
            break
        selected.remove(tensor)
        selected.update(instead)
        total_s += sum(write_s[other] for other in instead) - write_s[tensor]
    return [tensor for tensor in order if tensor in selected]


def _without_compression(evictions: list[Evict], over: BoolArray) -> list[Evict]:
    """The same evictions, uncompressed where compressing or expanding them takes more than there is."""
    return [
        replace(evict, codec="raw")
        if evict.codec != "raw" and (over[evict.begin] or over[evict.end])
        else evict
        for evict in evictions
    ]


def _size(trace: Trace, tensor: int) -> int:
    return int(trace.tensor_bytes[tensor])


def _require_room(problem: Problem, evictions: list[Evict], tier: str) -> None:
    room = Room(problem.trace, problem.hardware)
    for evict in evictions:
        if not room.fits(tier, evict):
            raise spill_full(problem.trace, evictions, problem.budget_bytes, problem.hardware)
        room.take(tier, evict)


def _cannot(problem: Problem, needed_bytes: int, least_bytes: int) -> InvalidArgument:
    """needed_bytes: with what it would take at this budget; least_bytes: the budget that it needs"""
    excess_bytes = needed_bytes - problem.budget_bytes
    return InvalidArgument(
        f"flashneuron offloads activations only, and {format_bytes_up(excess_bytes)} too much would stay: "
        f"it needs a device budget of {format_bytes_up(least_bytes)}, and the budget is "
        f"{format_bytes(problem.budget_bytes)}. Raise it, or choose a policy that moves other tensors too, "
        "such as g10"
    )
