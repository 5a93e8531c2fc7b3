"""Opens a run: checks the arguments, probes the machine, and makes the parts of the run."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from penstock.capture.operators import storages_in
from penstock.capture.phases import OPTIMIZER_STATE, WEIGHT
from penstock.capture.probe import device_name, probe
from penstock.capture.roofline import measure_cpu
from penstock.core.arguments import require_types, type_phrase
from penstock.core.hardware import LINKS, Hardware
from penstock.core.plan import Plan
from penstock.errors import BudgetTooSmall, InvalidArgument, SpillError
from penstock.machine import available_bytes
from penstock.options import BatchOptions, Directories, IoOptions, PlanOptions
from penstock.planners import require_policy
from penstock.runtime import failures, joint_planning, open_runs, ranks, resident
from penstock.runtime.devices import Device
from penstock.runtime.devices.accelerator import AcceleratorDevice
from penstock.runtime.devices.cpu import CpuDevice
from penstock.runtime.devices.drivers import device_of, make_driver
from penstock.runtime.micro_batches import AUTO, Splitter
from penstock.runtime.requirements import require_torch
from penstock.runtime.run import Offload
from penstock.runtime.steps import StepKinds
from penstock.storage.host_memory import host_budget_bytes
from penstock.storage.nvme.url import Url
from penstock.storage.spill import SpillSpace, as_paths
from penstock.units import format_bytes, format_bytes_up, share_bytes

PROBE_S = 2.0

logger = logging.getLogger("penstock")


def open_run(
    model: torch.nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    *,
    device_budget: int | str,
    spill_dir: Directories | None,
    host_budget: int | str | None,
    host_node: int | None,
    disk_budget: int | None,
    device: str | torch.device | None,
    plan: Plan | None,
    hardware: Hardware | None,
    io: IoOptions,
    planning: PlanOptions,
    batches: BatchOptions,
) -> Offload:
    """The implementation of `penstock.offload`."""
    with failures.shared(), _system_errors_hidden(), contextlib.ExitStack() as undo:
        _require_types(model, optimizer, plan, hardware)
        require_policy(planning.policy)
        if plan is not None and plan.lossy not in (None, planning.lossy):
            raise InvalidArgument(
                f"this plan rounds what is saved for backward to {plan.lossy}: say "
                f"PlanOptions(lossy={plan.lossy!r}) if that is what you want"
            )
        splitter = Splitter(batches, plan)
        spill_dirs = as_paths(resident.default_spill_dir() if spill_dir is None else spill_dir)
        require_torch()
        open_runs.require_none()
        if device_budget == 0:
            raise InvalidArgument(f"a device_budget of {device_budget} bytes is not one: give more than 0")
        open_runs.give_back_lingering()
        processes = ranks.local_world_size()
        remote = next((place for place in spill_dirs if isinstance(place, Url)), None)
        if remote is not None and processes > 1:
            raise InvalidArgument(
                f"{remote} cannot be shared by the {processes} processes of this job on this machine: each "
                "would overwrite what the others spill. Give a directory as spill_dir"
            )
        if disk_budget is not None:
            disk_budget //= processes
        name = _device_of(model, device)
        on_cpu = name.type == "cpu"
        # On a GPU a hanging collective could delay signals.
        failures.report_cause_at_exit(to_signals=on_cpu)
        if on_cpu and AUTO in (splitter.wanted, splitter.order):
            measure_cpu()  # now, while there is no budget to keep
        resident.release_free_memory()
        held_bytes = _bytes_of(model, optimizer) if on_cpu else 0
        resident_before_bytes = resident.resident_bytes() - held_bytes
        device_budget = device_budget_bytes(device_budget, name, held_bytes, processes)
        host_bytes = host_bytes_of(name, host_budget, host_node)
        if on_cpu:
            _warn_if_memory_ends_before(device_budget, host_bytes or 0, held_bytes)
        # Before the run opens the spill space: only one run can have a namespace.
        probed = hardware is None
        machine = hardware or _probe_together(
            spill_dirs, name, processes, host_budget=host_bytes if on_cpu else None, host_node=host_node
        )
        host_bytes = (machine.host_bytes // 8 if host_bytes is None else host_bytes) // processes
        if on_cpu and host_bytes and not machine.reaches("host"):
            raise InvalidArgument(
                "host_budget is given, and hardware does not say how fast host memory is: measure it with "
                "penstock.probe(host_budget=...), or leave out hardware"
            )
        spill = SpillSpace(
            spill_dirs,
            io,
            capacity_bytes=disk_budget,
            host_bytes=host_bytes if on_cpu else 0,
            host_node=host_node,
            accelerator=device_name(str(name)),
            gpu=not on_cpu,
        )
        undo.callback(spill.close)
        made, host_tier_bytes = _make_device(name, spill, device_budget, host_bytes)
        undo.callback(made.close)
        ranks.share_io_costs(spill, io.explorers)
        hardware = replace(
            machine,
            device_bytes=device_budget,
            host_bytes=host_tier_bytes,
            disk_bytes=machine.disk_bytes // processes if disk_budget is None else disk_budget,
        )
        peak_is_known = resident.reset_peak()
        together = joint_planning.open_joint_planning(f"{device_budget} {planning}")
        kinds = StepKinds(planning, hardware, together, made, measures=probed)
        if plan is not None:
            kinds.follow_given(plan)
        before_bytes = resident_before_bytes if peak_is_known else None
        run = Offload(made, name, spill, kinds, splitter, before_bytes, processes)
        open_runs.take_over(run)
        try:
            for tensor, kind in _known_tensors(model, optimizer):
                run._clock.set_kind([tensor], kind)
        except BudgetTooSmall as error:
            need = format_bytes_up(error.minimum_bytes)
            raise BudgetTooSmall(
                f"a tensor of the model or its optimizer takes {need} alone; the device budget is "
                f"{format_bytes(device_budget)}. Raise it above {need}: kernels use other tensors beside it. "
                "No run was opened.",
                error.minimum_bytes,
            ) from None
        resident.release_free_memory()  # what they took before
        undo.pop_all()
        run._begin()
        return run


@contextlib.contextmanager
def _system_errors_hidden() -> Iterator[None]:
    try:
        yield
    except SpillError as error:
        raise error from None  # its text contains the system's error


def _probe_together(
    spill_dirs: Sequence[Path | Url],
    device: torch.device,
    processes: int,
    host_budget: int | None,
    host_node: int | None,
) -> Hardware:
    """Probe the machine in all its processes at the same time, for the rates that each gets meanwhile."""
    together = ranks.wait_for_local_ranks(processes)
    machine = probe(
        spill_dirs,
        device=str(device),
        time_limit_s=PROBE_S,
        host_budget=host_budget or None,
        host_node=host_node if host_budget else None,
    )
    return (
        machine
        if together
        else machine.scaled({link: 1 / processes for link in LINKS if machine.rate_bytes_per_s(link)})
    )


def device_budget_bytes(
    budget: int | str, device: torch.device, held_bytes: int = 0, processes: int = 1
) -> int:
    """Bytes of a device budget. ``held_bytes`` of it are in use already; processes share a CPU's memory."""
    if isinstance(budget, int):
        return budget
    if device.type == "cpu":
        left_bytes = available_bytes() // processes + held_bytes
        return share_bytes(budget, left_bytes, left_bytes)
    driver = make_driver(device)
    return share_bytes(budget, driver.total_bytes, driver.free_bytes + driver.memory().reserved_bytes)


def host_bytes_of(device: torch.device, budget: int | str | None, node: int | None) -> int | None:
    """Bytes of a budget of host memory. None: what the machine has decides."""
    if device.type == "cpu":
        if budget is None and node is not None:
            raise InvalidArgument(
                f"host_node is {node}, and there is no host_budget: say how much memory of it to use"
            )
        return 0 if budget is None else host_budget_bytes(budget, node)
    if node is not None:
        raise InvalidArgument(
            f"host_node is {node}, and {device} copies to pinned memory wherever its driver has it: leave "
            "host_node out, or run the process on that node (numactl)"
        )
    left_bytes = available_bytes()
    return None if budget is None else share_bytes(budget, left_bytes, left_bytes)


def _warn_if_memory_ends_before(budget_bytes: int, host_bytes: int, held_bytes: int) -> None:
    """Warn where the budgets exceed the memory that is left. ``held_bytes`` of it are in use already."""
    left_bytes = available_bytes() + held_bytes
    if budget_bytes + host_bytes > left_bytes:
        logger.warning(
            "device_budget is %s%s, and %s of memory are available: the system may end this process before "
            "the budget is full. Lower it, or raise the limit of the container",
            format_bytes(budget_bytes),
            f" and host_budget {format_bytes(host_bytes)}" if host_bytes else "",
            format_bytes(left_bytes),
        )


def _make_device(
    name: torch.device, spill: SpillSpace, budget_bytes: int, host_bytes: int
) -> tuple[Device, int]:
    """The device, and bytes of the host tier below it."""
    if name.type == "cpu":
        return CpuDevice(spill, budget_bytes), host_bytes
    left_bytes = available_bytes()
    if host_bytes > left_bytes:
        raise InvalidArgument(
            f"host_budget is {format_bytes(host_bytes)}, all of it page-locked, and there are "
            f"{format_bytes(left_bytes)} of memory to be had here: give less"
        )
    device = AcceleratorDevice(spill, make_driver(name), budget_bytes, host_bytes)
    return device, device.host_tier_bytes


def _known_tensors(
    model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[torch.Tensor, int]]:
    if model is not None:
        for tensor in (*model.parameters(), *model.buffers()):
            yield tensor, WEIGHT
    if optimizer is not None:
        for state in optimizer.state.values():
            if isinstance(state, dict):
                for value in state.values():
                    if isinstance(value, torch.Tensor):
                        yield value, OPTIMIZER_STATE


def _bytes_of(model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None) -> int:
    tensors = (tensor for tensor, _ in _known_tensors(model, optimizer))
    storages = {storage._cdata: storage for tensor in tensors for storage in storages_in(tensor)}
    return sum(storage.nbytes() for storage in storages.values() if storage.device.type == "cpu")


def _require_types(model: object, optimizer: object, plan: object, hardware: object) -> None:
    given = {"plan": plan, "hardware": hardware}
    require_types(**{name: value for name, value in given.items() if value is not None})
    if model is not None and not isinstance(model, torch.nn.Module):
        raise InvalidArgument(
            f"model is {type_phrase(model)}: give a torch.nn.Module; of several, a torch.nn.ModuleList"
        )
    if optimizer is not None and (isinstance(optimizer, type) or not hasattr(optimizer, "param_groups")):
        raise InvalidArgument(f"optimizer is {type_phrase(optimizer)}: give a torch.optim.Optimizer")


def _device_of(model: torch.nn.Module | None, device: str | torch.device | None) -> torch.device:
    found = {parameter.device for parameter in model.parameters()} if model is not None else set()
    if device is not None:
        return device_of(device)
    if len(found) > 1:
        named = ", ".join(sorted(map(str, found)))
        raise InvalidArgument(f"the model's parameters are on {named}: put all of them on one device")
    return device_of(found.pop() if found else "cpu")
