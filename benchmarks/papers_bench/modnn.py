"""moDNN's figures 9, 10, 12 and 13 on its own networks, from fake traces: calculated and simulated.

The least memory is that of one sample at a time, whose gradients are added up, with plain gradient descent.
In the paper's ideal case everything is resident: for each layer what it gives (Y) and its gradient (delta),
and weights and their gradients. Layers are convolutions, pooling and products: with them ResNet-34 alone fits
in 12 GB, and of the others the FCN alone in 24 GB, as in the paper. Workspaces, of which the paper says that
they are about 15 % of all, are not in these traces: with them there would be as much more to save.

Times are a roofline's of the paper's K40, without a choice of algorithms.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock
from papers_bench import lockstep
from papers_bench.modnn_networks import CLASSES, NETWORKS, PIXEL_CLASSES, Network
from papers_bench.rows import Row
from penstock.capture.datasheets import DATA_SHEETS, DataSheet
from penstock.core.columns import KINDS, PHASES
from penstock.core.memory_profile import minimum_bytes, tightest_kernel
from penstock.errors import PenstockError
from penstock.planners.microbatch import choose_micro_batch

WIDTH, SIDE = 64, 224  # the paper's
LAYERS = ("conv", "pool", "mm", "mean")  # in the names of kernels whose results are a layer's
OF_WEIGHTS = [KINDS.index("weight"), KINDS.index("gradient")]

# NVIDIA's data sheet, and what PCIe 3.0 x16 gives of its 15.8 GB/s.
K40 = DataSheet({16: 4.29e12, 32: 4.29e12, 64: 1.43e12}, 288e9, 5e-6)
MACHINE = penstock.Hardware(
    device_bytes=12 * 10**9,
    host_bytes=256 * 10**9,
    device_to_host_bytes_per_s=10e9,
    host_to_device_bytes_per_s=10e9,
    name="one K40 of moDNN's machine",
)
BUDGETS = tuple(gigabytes * 10**9 for gigabytes in (12, 8, 4, 2))  # the paper's are the first, and a figure's


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def samples(network: Network, count: int, side: int) -> tuple[Tensor, Tensor]:
    """Noise: images [count, 3, side, side], and the class of each, or of each of its pixels."""
    shape = (count, side, side) if network.pixels else (count,)
    classes = PIXEL_CLASSES if network.pixels else CLASSES
    return torch.randn(count, 3, side, side), torch.randint(classes, shape)


def captured(
    network: Network, parts: Sequence[int], width: int = WIDTH, side: int = SIDE, device: str = "cpu"
) -> penstock.Trace:
    """A step of gradient descent over parts of so many samples, each a tensor of its own."""
    mode = penstock.fake_mode()
    with mode:
        model = network.build(width, side)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        batches = [samples(network, count, side) for count in parts]

    def step() -> None:
        for batch in batches:
            (loss(model, batch) / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return penstock.trace(step, mode=mode, device=device)


@dataclass(frozen=True)
class LeastMemory:
    """Bytes of one network.

    ideal           everything resident, all of the batch at once
    equation_kept   equation 7 over the kernels of one sample, where gradients are added up in their own place
    equation_moved  the same with weights moved
    kept, moved     what a run needs: a product makes a gradient whole before it is added up
    tightest        the kernel that needs `moved`
    resident_one    the peak of one sample, nothing moved
    resident        the same of a run
    """

    ideal: int
    equation_kept: int
    equation_moved: int
    kept: int
    moved: int
    tightest: str
    resident_one: int
    resident: int


def layer_bytes(trace: penstock.Trace) -> int:
    """What all layers give: the paper's Y."""
    layers = np.zeros(trace.tensors, dtype=np.bool_)
    for kernel in np.flatnonzero(trace.kernel_phase == PHASES.index("forward")).tolist():
        if any(layer in trace.kernel_name[kernel] for layer in LAYERS):
            layers[trace.outputs[kernel]] = True
    return int(trace.tensor_bytes[layers & trace.tensor_float32].sum())


def ideal_bytes(trace: penstock.Trace) -> int:
    """What the paper's ideal case holds, of the trace of a whole batch."""
    weights = trace.tensor_kind == KINDS.index("weight")
    inputs = trace.tensor_kind == KINDS.index("input")
    return int((trace.tensor_bytes * (inputs + 2 * weights)).sum()) + 2 * layer_bytes(trace)


def equation_7(trace: penstock.Trace, kept: bool) -> int:
    """The paper's lower bound, over the kernels of forward and backward of a trace of one sample."""
    of_weights = np.isin(trace.tensor_kind, OF_WEIGHTS)
    counted = trace.tensor_bytes * ~of_weights if kept else trace.tensor_bytes
    tasks = trace.kernel_phase != PHASES.index("optimizer")
    used = [np.union1d(trace.inputs[kernel], trace.outputs[kernel]) for kernel in np.flatnonzero(tasks)]
    largest = max(int(counted[each].sum()) for each in used)
    return largest + (int(trace.tensor_bytes[of_weights].sum()) if kept else 0)


def least_memory_of(network: Network) -> LeastMemory:
    one, two = captured(network, [1]), captured(network, [1, 1])
    return LeastMemory(
        ideal=ideal_bytes(captured(network, [network.batch])),
        equation_kept=equation_7(one, True),
        equation_moved=equation_7(one, False),
        kept=minimum_bytes(two.with_weights_kept()),
        moved=minimum_bytes(two),
        tightest=two.kernel_name[tightest_kernel(two)],
        resident_one=one.peak_bytes,
        resident=two.peak_bytes,
    )


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean, which a few large ratios dominate; the paper does not say which it takes."""
    return float(np.mean(values))


def least_memory(quick: bool, tell: Callable[[str], None]) -> tuple[list[Row], dict[str, Any]]:
    """Figure 9, and of figure 13 the sub-batches alone."""
    found: dict[str, LeastMemory] = {}
    for name in ("ResNet-34",) if quick else NETWORKS:
        tell(f"calculated: least memory of {name}")
        found[name] = least_memory_of(NETWORKS[name])
    rows = []
    for claim, published, bound, equation, run in (
        ("weights resident", 59, "equation 7", "equation_kept", "kept"),
        ("weights moved", 396, "equation 7", "equation_moved", "moved"),
        ("sub-batches alone", 42, "the peak of one sample", "resident_one", "resident"),
    ):
        ratios = {
            which: {name: each.ideal / getattr(each, which) for name, each in found.items()}
            for which in (equation, run)
        }
        by_network = ", ".join(
            f"{name} {ratios[equation][name]:.0f} and {ratios[run][name]:.0f}" for name in found
        )
        average = mean(list(ratios[run].values()))
        rows.append(
            Row(
                "moDNN",
                f"least memory, {claim}, average of six networks, calculated",
                f"{published} x",
                f"{mean(list(ratios[equation].values())):.0f} x by {bound}, {average:.0f} x in a run",
                f"{len(found)} cells, calculated from fake traces, without workspaces: {by_network}",
                average / published,
            )
        )
    return rows, {name: asdict(each) for name, each in found.items()}


@cache
def _part(name: str, size: int) -> penstock.Trace:
    """Forward and backward of a part on a K40; weights, gradients and the batch stay there."""
    network, mode = NETWORKS[name], penstock.fake_mode()
    with mode:
        model, batch = network.build(WIDTH, SIDE), samples(network, size, SIDE)

    def step() -> None:
        loss(model, batch).backward()

    with patch.dict(DATA_SHEETS, k40=K40):
        trace = penstock.trace(step, mode=mode, device="k40")
    return replace(trace, tensor_movable=trace.movable & ~trace.tensor_persistent)


WAYS = ("modnn", "optimal", "vdnn_all", "vdnn_conv", *lockstep.POLICIES)
IF_NEEDED = (
    ", if needed"  # of vDNN in lock step: parts that fit are left alone, though the batch does not fit
)


def cells(name: str, budgets: Sequence[int], time_limit_s: float) -> list[dict[str, Any]]:
    """Of one network, at each budget: seconds of a batch by each way, in parts of equation 8's size."""
    whole = NETWORKS[name].batch
    found = []
    for budget_bytes in budgets:
        one: dict[str, Any] = {"network": name, "budget_bytes": budget_bytes}
        found.append(one)
        try:
            # Planned for no time, since the size is not that of the fastest plan.
            size = choose_micro_batch(
                *(lambda samples: _part(name, samples), MACHINE, whole, budget_bytes, "evict_all"),
                recompute=False,
                time_limit_s=0.0,
            ).working_set_size
        except PenstockError as error:
            one["error"] = str(error)
            continue
        trace, batch = _part(name, size), _part(name, whole)
        fits = batch.persistent_bytes + 2 * layer_bytes(batch) <= budget_bytes  # as vDNN counts
        one |= {"size": size, "ideal_s": batch.ideal_s, "parts_s": whole / size * trace.ideal_s}
        for way in WAYS:
            try:
                if way in lockstep.POLICIES:
                    part_s = lockstep.step_s(trace, MACHINE, way, budget_bytes, always=not fits)
                    if_needed_s = lockstep.step_s(trace, MACHINE, way, budget_bytes)
                    one[f"{way}{IF_NEEDED}"] = whole / size * if_needed_s
                else:
                    part_s = penstock.plan(
                        *(trace, MACHINE, way, False, False, time_limit_s), device_budget=budget_bytes
                    ).predicted_step_s
                one[way] = whole / size * part_s
            except PenstockError as error:
                one[f"{way}, error"] = str(error)
    return found


def speed(quick: bool, time_limit_s: float, tell: Callable[[str], None]) -> tuple[list[Row], dict[str, Any]]:
    """Figures 10 and 12."""
    names = ("ResNet-34",) if quick else tuple(NETWORKS)
    budgets = BUDGETS[-1:] if quick else BUDGETS
    tell(f"simulated: {len(names)} of moDNN's networks at its machine's rates, {len(budgets)} budgets")
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        work = [pool.submit(cells, name, budgets, time_limit_s) for name in names]
        found = [one for each in work for one in each.result()]
    return speed_rows(found), {"cells": found}


def speed_rows(found: Sequence[dict[str, Any]]) -> list[Row]:
    """Of cells: the first figure at their largest budget, the second over all of them."""
    done = [one for one in found if set(WAYS) <= set(one)]
    most = max((one["budget_bytes"] for one in done), default=0)
    largest = [one for one in done if one["budget_bytes"] == most]

    def over_ideal(way: str) -> float:
        return mean([one[way] / one["ideal_s"] for one in largest])

    def over(way: str, base: str = "modnn") -> float:
        return mean([one[way] / one[base] for one in done])

    every, convolutions = lockstep.POLICIES
    rate = "roofline of a K40, 10 GB/s each way, parts by equation 8, weights stay"
    return [
        Row(
            "moDNN",
            f"step time at {most / 1e9:g} GB over all resident, average",
            "1.03 x; vDNN 1.31 x",
            f"`modnn` {over_ideal('modnn'):.2f} x, `optimal` {over_ideal('optimal'):.2f} x; vDNN+ in lock "
            f"step {over_ideal(every):.2f} x (all), {over_ideal(convolutions):.2f} x (conv); penstock's "
            f"`vdnn_all` {over_ideal('vdnn_all'):.2f} x, `vdnn_conv` {over_ideal('vdnn_conv'):.2f} x",
            f"{len(largest)} cells, {rate}",
            over_ideal("modnn") / 1.03,
        ),
        Row(
            "moDNN",
            "speed over vDNN+ at the same memory, average",
            "1.26 x",
            f"over vDNN+ in lock step {over(every):.2f} x (all), {over(convolutions):.2f} x (conv); over "
            f"penstock's `vdnn_all` {over('vdnn_all'):.2f} x, `vdnn_conv` {over('vdnn_conv'):.2f} x",
            f"`modnn`, {len(done)} cells, the same at all budgets. In lock step it offloads wherever the "
            f"batch does not fit; leaving alone parts that fit, {over(every + IF_NEEDED):.2f} x (all)",
            over(every) / 1.26,
        ),
    ]
