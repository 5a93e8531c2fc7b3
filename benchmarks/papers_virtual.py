"""The papers' own policies on the papers' machines, in virtual time: no GPU is used, and nothing was measured
on one.

    python benchmarks/papers_virtual.py -o out/papers_virtual.json [--cells vgg-16 vit-h-64]

Each cell is a network, a batch and a memory of a paper, on the emulated device at the rates of the paper's
machine (tests/device/emu/machines.py). The paper's policies and `optimal` are planned and carried out as in
benchmarks/virtual_time.py. What a step takes is given over the same step with everything in memory, beside
the paper's own figure. Real kernels do not reach what a data sheet allows: here they hide fewer copies.

All is in float32, without dropout. FlashNeuron's batches are as many times the largest that fits as the
paper's: it says neither the length of its sequences nor where its ResNet is deeper. G10's kernels were slower
than their data sheet, and its tensors larger than PyTorch's: products and convolutions are slowed down until
a step in memory takes what is published, and the batch is that whose peak is the published trace's (of
ResNet152, whose trace a clone does not have, the paper's). Batch, memories and times are a quarter of G10's:
there can be no more host memory than there is.

See `--quick` for a check that it all works; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from papers_bench import modnn_networks
from rich.table import Table
from step_time import add_common_arguments, heading, wide_console, write
from virtual_time import (
    HOST_BYTES,
    STAGING_BYTES,
    Model,
    Train,
    begin,
    carried_out,
    emu,
    hardware,
    plain_step,
    planned,
    traced,
    trained,
    words_of,
)

import penstock
from penstock.errors import PenstockError
from penstock.units import format_bytes, format_seconds

SGD, MOMENTUM = torch.optim.SGD, partial(torch.optim.SGD, momentum=0.9)
G10_SCALE = 4

Optimizer = Callable[..., torch.optim.Optimizer]


def bert(blocks: int, batch: int, length: int, width: int = 768, optimizer: Optimizer = SGD) -> Train:
    with torch.device("emu"):
        model = transformers.BertForSequenceClassification(
            transformers.BertConfig(
                num_hidden_layers=blocks, hidden_size=width, intermediate_size=4 * width,
                num_attention_heads=width // 64, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
            )
        )  # fmt: skip
        words, labels = words_of(30522, batch, length), words_of(2, batch, 1).flatten()
    loss = lambda: F.cross_entropy(model(words).logits, labels)  # noqa: E731
    return trained(model, loss, autocast=False, optimizer_of=optimizer)


def vit(blocks: int, batch: int, width: int, heads: int, patch: int) -> Train:
    with torch.device("emu"):
        model = transformers.ViTForImageClassification(
            transformers.ViTConfig(
                num_hidden_layers=blocks, hidden_size=width, intermediate_size=4 * width,
                num_attention_heads=heads, patch_size=patch, num_labels=1000,
            )
        )  # fmt: skip
    return images(model, batch, lambda x: model(x).logits)


def images(
    model: torch.nn.Module,
    batch: int,
    forward: Callable[[torch.Tensor], torch.Tensor] | None = None,
    optimizer: Optimizer = SGD,
    parts: int = 1,
) -> Train:
    """Trains with images of 224 x 224."""
    with torch.device("emu"):
        seen, labels = torch.zeros(batch // parts, 3, 224, 224), words_of(1000, batch // parts, 1).flatten()
    loss = lambda: F.cross_entropy((forward or model)(seen), labels)  # noqa: E731
    return trained(model, loss, autocast=False, optimizer_of=optimizer, parts=parts)


def resnet(blocks: int, batch: int, optimizer: Optimizer = SGD, parts: int = 1) -> Train:
    """ResNet-152 has 36 blocks in its third stage, and in a deeper one what is added is there."""
    with torch.device("emu"):
        model = modnn_networks.resnet((3, 8, blocks, 3), 64, bottleneck=True)
    return images(model, batch, optimizer=optimizer, parts=parts)


def vgg(blocks: int, batch: int, parts: int = 1) -> Train:
    """VGG-16 has 3 convolutions in each of its last stages."""
    with torch.device("emu"):
        model = modnn_networks.vgg((2, 2, blocks, blocks, blocks), 64, 224)
    return images(model, batch, parts=parts)


class Cell(NamedTuple):
    """host_bytes   beside the disk; None: host memory is the only tier
    plannings   the paper's; `OPTIMAL` comes on top
    published   what the paper has, and where
    plain_s     a step in memory there, where that is published
    """

    paper: str
    what: str
    model: Model
    machine: str
    budget_bytes: int
    host_bytes: int | None
    plannings: tuple[penstock.PlanOptions, ...]
    published: str
    plain_s: float = 0.0


def own(*policies: Any, **more: Any) -> tuple[penstock.PlanOptions, ...]:
    return tuple(
        penstock.PlanOptions(policy=policy, recompute=False, compress=False, **more) for policy in policies
    )


def flashneuron(what: str, build: Callable[[int], Train], blocks: int, published: str) -> Cell:
    policies = own("flashneuron", keep_weights=True)
    return Cell(
        "FlashNeuron", what, Model(build, blocks, 2), "v100-pm1725b", 16 * 10**9, 0, policies, published
    )


def modnn(what: str, model: Model, published: str) -> Cell:
    policies = own("modnn", "vdnn_all", "vdnn_conv", keep_weights=True)
    budget_bytes = 23 << 29  # "a little smaller than 12 GB" are free
    return Cell("moDNN", what, model, "k40", budget_bytes, None, policies, published)


def g10(what: str, model: Model, ideal_s: float, published: str) -> Cell:
    sizes = (40 << 30) // G10_SCALE, (128 << 30) // G10_SCALE
    return Cell(
        "G10", what, model, "a100-znand", *sizes, own("g10", "flashneuron"), published, ideal_s / G10_SCALE
    )


def fastensor(what: str, model: Model, megabytes: int, published: str) -> Cell:
    return Cell("Fastensor", what, model, "a100-980", megabytes << 20, 0, own("evict_all"), published)


CELLS = {
    "bert-xlarge-9": flashneuron(
        "BERT-XLarge, batch 9 where 3 fit", lambda b: bert(b, 9, 512, 1024, torch.optim.AdamW), 48,
        "batch 3 where 1 fits: forward is not slower (4.2, table 3)",
    ),
    "bert-xlarge-42": flashneuron(
        "BERT-XLarge, batch 42", lambda b: bert(b, 42, 512, 1024, torch.optim.AdamW), 48,
        "batch 14, the largest that runs (table 3)",
    ),
    "resnet-1922-10": flashneuron(
        "ResNet-1922, batch 10 where 6 fit", lambda b: resnet(b, 10, MOMENTUM), 626,
        "batch 7 where 4 fit: forward is not slower (4.2, table 3)",
    ),
    "vgg-16": modnn(
        "VGG-16, batch 224, whole: 256 would be refused for fragments", Model(lambda b: vgg(b, 224), 3, 1),
        "moDNN 1.28 x at the least memory (7.3), vDNN 1.31 x (figure 10): averages of six",
    ),
    "vgg-16-parts": modnn(
        "VGG-16, batch 256 in 4 parts", Model(lambda b: vgg(b, 256, 4), 3, 1),
        "moDNN 1.03 x, average of six (figure 10)",
    ),
    "resnet-152": modnn(
        "ResNet-152, batch 256, whole", Model(lambda b: resnet(b, 256), 36, 2),
        "moDNN 1.28 x at the least memory (7.3), vDNN 1.31 x (figure 10): averages of six",
    ),
    "bert-256": g10(
        "BERT-256", Model(lambda b: bert(b, 142, 128), 12, 2), 7.2855,
        "G10 1.00 x, FlashNeuron 1.40 x (figure 11)",
    ),
    "vit-1280": g10(
        "VIT-1280", Model(lambda b: vit(b, 925, 384, 6, 32), 12, 2), 3.7160,
        "G10 1.49 x, FlashNeuron fails (figure 11)",
    ),
    "resnet152-1280": g10(
        "ResNet152-1280", Model(lambda b: resnet(b, 1280 // G10_SCALE), 36, 2), 112.589,
        "G10 1.02 x, FlashNeuron 1.56 x (figure 11)",
    ),
    "vit-h-64": fastensor(
        "ViT-H/14, batch 64", Model(lambda b: vit(b, 64, 1280, 16, 14), 32, 2), 9146,
        "16.4 x; torch's files 40.9 x (table 11)",
    ),
    "bert-2048": fastensor(
        "BERT, batch 2,048", Model(lambda b: bert(b, 2048, 32, optimizer=torch.optim.AdamW), 12, 2), 6858,
        "27.6 x; torch's files 66.7 x (table 10)",
    ),
}  # fmt: skip
OPTIMAL = penstock.PlanOptions(compress=False)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS), help="default: all")
    parser.add_argument("--steps", type=int, default=3, help="that are timed; default: %(default)s")
    add_common_arguments(parser, "papers_virtual")
    options = parser.parse_args(arguments)
    console = wide_console()
    rows = []
    for name in options.cells:
        cell = CELLS[name]
        rows.append({"cell": name, **carried(cell, options.steps, options.spill_dir, options.quick)})
        console.print(drawn(rows[-1]))
        write({**heading("papers_virtual"), "is_virtual": True, "rows": rows}, options.output, console)
    return 0


def carried(cell: Cell, steps: int, spill_dir: str, quick: bool) -> dict[str, Any]:
    """The cell by each policy of the paper, and by `optimal`."""
    machine, model = emu.MACHINES[cell.machine], cell.model
    if quick:
        model = model._replace(blocks=model.few)
    begin(machine)
    plain_s, peak_bytes, small_bytes = plain_step(model, steps)
    if cell.plain_s:
        machine = slowed(model, machine, plain_s, cell.plain_s)
        begin(machine)
        plain_s, _, _ = plain_step(model, steps)
    begin(machine)
    trace = traced(model, machine, OPTIMAL, spill_dir)
    budget_bytes = peak_bytes * 3 // 4 if quick else cell.budget_bytes
    given = hardware(machine, budget_bytes, "host" if cell.host_bytes is None else "disk")
    if cell.host_bytes:
        given = replace(given, host_bytes=min(cell.host_bytes, HOST_BYTES["host"] - STAGING_BYTES))
    row: dict[str, Any] = {
        "paper": cell.paper,
        "what": cell.what,
        "published": cell.published,
        "machine": asdict(machine),
        "budget_bytes": budget_bytes,
        "host_bytes": given.host_bytes,
        "peak_bytes": peak_bytes,
        "plain_s": plain_s,
        "policies": {},
    }
    for planning in (*cell.plannings, OPTIMAL):
        begin(machine)
        try:
            plan = planned(trace, given, planning, small_bytes)
            found = carried_out(model, machine, trace, given, planning, plan, steps, spill_dir)
        except PenstockError as error:
            found = {"refused": str(error)}
        row["policies"][planning.policy] = found
    return row


def slowed(model: Model, machine: emu.Machine, plain_s: float, wanted_s: float) -> emu.Machine:
    """Its products and convolutions take so many times as long that a step in memory takes what is wanted."""

    def by(factor: float) -> emu.Machine:
        rates = ("fp64", "fp32", "tf32", "bf16")
        return replace(machine, **{rate: getattr(machine, rate) / factor for rate in rates})

    first, second = 1.0, wanted_s / plain_s
    while True:  # a step's time is linear, but for products that memory bounds
        begin(by(second))
        second_s, _, _ = plain_step(model, 1)
        if abs(second_s - wanted_s) < wanted_s / 1000:
            return by(second)
        slope = (second_s - plain_s) / (second - first)
        first, plain_s, second = second, second_s, second + (wanted_s - second_s) / slope


def drawn(row: dict[str, Any]) -> Table:
    memory = f"{format_bytes(row['budget_bytes'])} of {format_bytes(row['peak_bytes'])}"
    plain_s = row["plain_s"]
    table = Table(
        *("", "predicted", "carried out", "ratio", "to the host", "to the disk", "back"),
        title=f"VIRTUAL time, no GPU was used: {row['paper']}, {row['what']}, {memory}, in memory "
        f"{format_seconds(plain_s)}; the paper: {row['published']}",
        box=None,
        padding=(0, 1),
    )
    for policy, found in row["policies"].items():
        if "refused" in found:
            table.add_row(policy, found["refused"])
            continue
        moved = (found["moved_bytes"][kind] for kind in ("to_host", "disk_write", "to_device"))
        table.add_row(
            policy,
            f"{found['predicted_s'] / plain_s:.3f} x",
            f"{found['carried_s'] / plain_s:.3f} x",
            f"{found['ratio']:.3f}",
            *(f"{size_bytes / 1e9:.2f} GB" for size_bytes in moved),
        )
    return table


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
