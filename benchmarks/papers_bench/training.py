"""What is measured with real training."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from papers_bench.programs import Config, captured
from papers_bench.rows import Row
from papers_bench.train import train
from penstock.core.memory_profile import minimum_bytes
from penstock.units import format_bytes, format_lifetime, format_seconds

Answer = dict[str, Any]
Found = tuple[list[Row], dict[str, Any]]

HUGE = 1 << 40  # a budget that holds everything
SMALL_BYTES = 4096  # may leave, where the least memory is looked for
BASELINE_DEPTH = 2
SLOW_BYTES_PER_S = 40 << 20  # what moves cannot hide behind the kernels

PM1725B_BYTES = 3 * 5 * 365 * 8000 * 10**9  # FlashNeuron: 3 drive writes a day for five years, of 8 TB
SZ985_BYTES = 30 * 5 * 365 * 3200 * 10**9  # G10: 30 of 3.2 TB


@dataclass(frozen=True)
class Session:
    """What all parts share.

    steps   settled ones of each training
    """

    spill_dir: str
    hardware_file: Path
    quick: bool
    steps: int
    tell: Callable[[str], None]

    def networks(self) -> dict[str, Config]:
        if self.quick:
            return {"GPT": Config("gpt", 4, 2, 64, 32)}
        return {
            "GPT": Config("gpt", 4, 6, 256, 64),
            "ViT": Config("vit", 4, 6, 192, 64),
            "ResNet": Config("resnet", 4, 18, 16, 32),
        }

    def vgg(self) -> Config:
        return Config("vgg", 16, 1, 8, 32) if self.quick else Config("vgg", 64, 2, 32, 64)

    def train(self, config: Config, what: str, steps: int = 0, **offload: Any) -> Answer:
        """With these arguments of `penstock.offload`; in memory where there are none."""
        self.tell(what)
        more = {key: offload.pop(key) for key in ("groups", "addresses") if key in offload}
        hardware_file = None if offload.pop("probe", False) else self.hardware_file
        if offload:
            small = {"smallest_bytes": SMALL_BYTES} if self.quick else {}  # its tensors are small
            offload = {"spill_dir": self.spill_dir, **small, **offload}
        found = train(config, steps or self.steps, offload or None, hardware_file=hardware_file, **more)
        if "error" in found:
            self.tell(f"{what}: {found['error']}")
        return found

    def train_within(self, config: Config, what: str, budget_bytes: int, **offload: Any) -> Answer:
        """At this budget, or at the least that works: a trace does not know what workspace kernels take."""
        for _ in range(4):
            found = self.train(config, what, device_budget=budget_bytes, **offload)
            found["budget_bytes"] = budget_bytes
            if "needed_bytes" not in found:
                break
            budget_bytes = max(found["needed_bytes"], budget_bytes + (64 << 10))
        return found

    def train_least(self, config: Config, what: str, budget_bytes: int, **offload: Any) -> Answer:
        """As `train_within`; small tensors leave too."""
        return self.train_within(config, what, budget_bytes, smallest_bytes=SMALL_BYTES, **offload)


def times(value: float) -> str:
    return f"{value:.1f} x" if value < 100 else f"{value:.0f} x"


def spread(found: Mapping[str, Any]) -> str:
    lower, upper = found["quartiles_s"]
    return f"{format_seconds(found['median_s'])} ({format_seconds(lower)} to {format_seconds(upper)})"


def shown(config: Config) -> str:
    return f"{config.model}, {config.depth} deep, {config.width} wide, batch {config.batch}"


def batch(session: Session) -> Found:
    """The largest batch in the memory that a batch of four takes."""
    rows, data = [], {}
    for name, small in session.networks().items():
        plain = session.train(small, f"batch, {name}: {small.batch} in memory")
        all_fits = session.train(small, f"batch, {name}: what it takes", 1, device_budget=HUGE)
        if "error" in plain or "error" in all_fits:
            rows.append(Row("FlashNeuron", f"batch, {name}", "", "failed", str(plain.get("error"))))
            continue
        budget = all_fits["report"]["peak_bytes"]

        def least(count: int, small: Config = small) -> int:
            return minimum_bytes(captured(replace(small, batch=count)))

        slope = (least(64) - least(32)) / 32
        count = max(small.batch, int((budget - least(32)) / slope + 32))
        found: Answer = {}
        for _ in range(6):  # workspaces are known only when a kernel runs
            large = replace(small, batch=count)
            found = session.train(
                large, f"batch, {name}: {count}", 2, device_budget=budget, smallest_bytes=SMALL_BYTES
            )
            if "error" not in found:
                break
            count = min(count - 1, int(count * min(0.97, budget / found.get("needed_bytes", budget / 0.9))))
        data[name] = {"budget_bytes": budget, "batch": count, "in_memory": plain, "penstock": found}
        if "error" in found:
            rows.append(Row("FlashNeuron", f"batch, {name}", "", "failed", found["error"]))
            continue
        ratio = count / small.batch
        rate = count / found["median_s"] / (small.batch / plain["median_s"])
        conditions = (
            f"{shown(small)} takes {format_bytes(budget)} in memory; batch {count} ran in that, peak "
            f"{format_bytes(found['report']['peak_bytes'])}; {times(rate)} the samples a second of batch "
            f"{small.batch} in memory; moved and recomputed, not divided"
        )
        data[name]["throughput_ratio"] = rate
        if name == "ResNet":
            rows.append(
                Row(
                    "FlashNeuron",
                    "largest batch, ResNet-1922, 16 GB, where 4 fit",
                    "14.0 x",
                    times(ratio),
                    conditions,
                    ratio / 14,
                )
            )
        elif name == "GPT":
            rows.append(
                Row(
                    "FlashNeuron",
                    "largest batch, BERT-XLarge, 16 GB, where 1 fits",
                    "14.0 x",
                    times(ratio),
                    conditions,
                    ratio / 14,
                )
            )
            rows.append(
                Row(
                    "Fastensor",
                    "largest batch, BERT, 80 GB, 40,960 where 2,048 fit",
                    "20 x",
                    times(ratio),
                    "as above",
                    ratio / 20,
                )
            )
        else:
            rows.append(
                Row(
                    "Fastensor",
                    "largest batch, ViT-H, 80 GB, 960 where 64 fit",
                    "15 x",
                    times(ratio),
                    conditions,
                    ratio / 15,
                )
            )
    return rows, data


def depth(session: Session) -> Found:
    """As many layers as Fastensor's ratio, in the memory that four take."""
    if session.quick:
        shallow = Config("vit", 4, BASELINE_DEPTH, 64, 32)
    else:
        shallow = replace(session.networks()["ViT"], batch=8, depth=BASELINE_DEPTH)
    all_fits = session.train(shallow, "depth: what it takes", 1, device_budget=HUGE)
    if "error" in all_fits:
        return [Row("Fastensor", "depth", "31 x", "failed", all_fits["error"])], {}
    budget = all_fits["report"]["peak_bytes"]
    deep = replace(shallow, depth=4 if session.quick else BASELINE_DEPTH * 32)
    plain = session.train(deep, f"depth: {deep.depth} in memory", 2)
    found = session.train(deep, f"depth: {deep.depth}", 2, device_budget=budget)
    data = {"budget_bytes": budget, "in_memory": plain, "penstock": found, "depth": deep.depth}
    claim = "layers of a ViT-H in 80 GB, batch 64: 1,000 where 32 fit"
    if "error" in found or "error" in plain:
        return [Row("Fastensor", claim, "31 x", "failed", found.get("error", plain.get("error", "")))], data
    ratio = deep.depth / shallow.depth
    conditions = (
        f"{shown(shallow)} takes {format_bytes(budget)}; {deep.depth} layers ran in that, "
        f"{found['median_s'] / plain['median_s']:.2f} x the step in memory without a budget; more were "
        f"not tried"
    )
    return [Row("Fastensor", claim, "31 x", times(ratio), conditions, ratio / 31.25)], data


def throughput(session: Session) -> Found:
    """Samples a second as the batch grows, at a budget and without one."""
    small = session.networks()["GPT"]
    all_fits = session.train(small, "throughput: what it takes", 1, device_budget=HUGE)
    if "error" in all_fits:
        return [Row("FlashNeuron", "throughput", "", "failed", all_fits["error"])], {}
    budget = all_fits["report"]["peak_bytes"]
    rates: dict[str, dict[int, float]] = {"in memory": {}, "penstock": {}}
    data: dict[str, Any] = {"budget_bytes": budget}
    for count in (2, 4) if session.quick else (4, 8, 16, 32):
        config = replace(small, batch=count)
        for name, options in (("in memory", {}), ("penstock", {"device_budget": budget})):
            found = session.train(config, f"throughput: {name}, batch {count}", **options)
            data[f"{name}, {count}"] = found
            if "error" not in found:
                rates[name][count] = count / found["median_s"]
    fits = {count: rate for count, rate in rates["in memory"].items() if count <= small.batch}
    base, best = max(fits.values()), max(rates["penstock"].values())
    at = max(rates["penstock"], key=rates["penstock"].__getitem__)
    points = "; ".join(
        f"{count}: {rates['in memory'].get(count, 0):.1f}, {rates['penstock'].get(count, 0):.1f}"
        for count in rates["penstock"]
    )
    conditions = (
        f"{shown(small)} fits in {format_bytes(budget)}; samples/s in memory without a budget, and in "
        f"that budget, by batch: {points}. Best at {at}"
    )
    gain = best / base
    return [
        Row(
            "FlashNeuron",
            "throughput at the best batch over the largest that fits (figure 8), average of four",
            "1.30 x",
            f"{gain:.2f} x",
            conditions,
            gain / 1.303,
        ),
        Row(
            "FlashNeuron",
            "throughput by layer at that batch (figure 9)",
            "1.0 to 2 x, as a figure",
            "not measured",
            "kernels of a small batch already fill two cores; the row above is of the whole step",
        ),
    ], {**data, "rates": rates}


def least_memory(session: Session) -> Found:
    """A VGG in the least memory that works, and in a quarter, beside vDNN."""
    config = session.vgg()
    plain = session.train(config, "least memory: in memory")
    all_fits = session.train(config, "least memory: what it takes", 1, device_budget=HUGE)
    if "error" in plain or "error" in all_fits:
        return [Row("moDNN", "least memory", "", "failed", str(plain.get("error")))], {}
    peak = all_fits["report"]["peak_bytes"]
    data: dict[str, Any] = {"peak_bytes": peak, "in_memory": plain}
    whole = minimum_bytes(captured(config))
    one = minimum_bytes(captured(replace(config, batch=2), 1))
    weights = sum(size for size in _weights_bytes(config))

    def run(name: str, budget: int, least: bool = True, **options: Any) -> Answer:
        ask = session.train_least if least else session.train
        what = f"least memory: {name}"
        found = (
            ask(config, what, budget, **options)
            if least
            else session.train(config, what, device_budget=budget, **options)
        )
        data[name] = found
        return found

    divided = run("one sample at a time", one, micro_batch=1)
    held = run("one at a time, room for weights", one + 2 * weights, micro_batch=1)
    whole_found = run("whole batch", whole)
    least_budget = whole_found.get("budget_bytes", whole)
    quarter = max(peak // 4, int(1.5 * one))
    rivals = {
        policy: run(f"{policy}, least", least_budget, False, policy=policy, recompute=False)
        for policy in ("vdnn_all", "vdnn_conv")
    }
    at_quarter = run("a quarter", quarter, False)
    auto = run("a quarter, auto", quarter, False, micro_batch="auto")
    size = auto.get("report", {}).get("micro_batch") or None  # vDNN+: with the sub-batches of moDNN
    quarter_rivals = {
        policy: run(f"{policy}, a quarter", quarter, False, policy=policy, recompute=False, micro_batch=size)
        for policy in ("vdnn_all", "vdnn_conv")
    }

    def slower(found: Answer) -> str:
        if "error" in found:
            return f"fails ({found['error'][:70]})"
        return f"{found['median_s'] / plain['median_s']:.2f} x"

    def memory(found: Answer) -> float:
        return peak / found["report"]["peak_bytes"]

    rows = []
    ideal = (
        f"VGG, {config.depth} convolutions a stage, {config.width} wide, {config.side} pixels, batch "
        f"{config.batch}: {format_bytes(peak)} all resident, step {spread(plain)}"
    )
    for found, claim, published, what in (
        (
            divided,
            "least memory with weights moved, average of six networks, calculated",
            396,
            "one sample at a time, weights and momentum moved",
        ),
        (
            held,
            "least memory, weights resident, average of six, calculated",
            59,
            "one at a time, with room for weights and gradients in the budget",
        ),
        (
            whole_found,
            "offloading and prefetching alone, average",
            4.1,
            "whole batch: moved and recomputed, weights too",
        ),
    ):
        if "error" in found:
            rows.append(Row("moDNN", claim, times(published), "failed", found["error"][:200]))
            continue
        ratio = memory(found)
        rows.append(
            Row(
                "moDNN",
                claim,
                times(published),
                times(ratio),
                f"{ideal}; {what}: measured peak {format_bytes(found['report']['peak_bytes'])}; step "
                f"{slower(found)} in memory",
                ratio / published,
            )
        )
    if "error" not in at_quarter or "error" not in auto:
        best = min((one for one in (at_quarter, auto) if "error" not in one), key=lambda one: one["median_s"])
        degradation = best["median_s"] / plain["median_s"]
        rows.append(
            Row(
                "moDNN",
                "step time at 12 GB, networks that need up to 100 GB, over all resident",
                "1.03 x; vDNN 1.31 x",
                f"{degradation:.2f} x",
                f"as above, a quarter of the memory: whole batch {slower(at_quarter)}, "
                f'micro_batch="auto" {slower(auto)}; '
                + "; ".join(
                    f"penstock's {policy} {slower(found)}" for policy, found in quarter_rivals.items()
                ),
                degradation / 1.03,
            )
        )
        finished = [found["median_s"] for found in quarter_rivals.values() if "error" not in found]
        if finished:
            gain = min(finished) / best["median_s"]
            rows.append(
                Row(
                    "moDNN",
                    "speed over vDNN+ at the same memory, average",
                    "1.26 x",
                    f"{gain:.2f} x",
                    "the better of the two vDNN policies above; they do not recompute",
                    gain / 1.26,
                )
            )
    if "error" not in whole_found:
        rows.append(
            Row(
                "moDNN",
                "vDNN at the least memory",
                "vDNN fails below a threshold",
                "; ".join(f"{policy} {slower(found)}" for policy, found in rivals.items()),
                f"the least of the whole batch, {format_bytes(least_budget)}, where optimal takes "
                f"{slower(whole_found)}; penstock's vDNN also moves weights where the budget asks for it",
            )
        )
    return rows, data


def _weights_bytes(config: Config) -> Iterator[int]:
    from papers_bench.programs import build

    for parameter in build(config)[0].parameters():
        yield parameter.nbytes


def csr(session: Session) -> Found:
    """Compression, and a stash in half precision, on a net of ReLUs and a slow disk."""
    config = session.vgg()
    if not session.quick:
        config = replace(config, batch=32)
    claims: dict[str, tuple[str, str, dict[str, Any]]] = {
        "CSR": ("gain of CSR over no offloading (figure 8)", "1.07 x", {"compress": True}),
        "FP16": (
            "gain of moving as FP16 over no offloading (figure 8)",
            "1.21 x",
            {"compress": False, "lossy": "fp16"},
        ),
    }

    def without_figures(kind: str, why: str) -> list[Row]:
        return [Row("FlashNeuron", claim, gain, kind, why) for claim, gain, _ in claims.values()]

    try:
        with _slow_disk(session.spill_dir) as group:
            all_fits = session.train(config, "codecs: what it takes", 1, device_budget=HUGE)
            if "error" in all_fits:
                return without_figures("failed", all_fits["error"][:200]), {}
            budget = _share(config, all_fits["report"]["peak_bytes"], 0.72)
            found = {
                name: session.train_within(
                    config, f"codecs: {name}", budget, recompute=False, probe=True, groups=(group,), **offload
                )
                for name, offload in {
                    "raw": {"compress": False},
                    **{name: offload for name, (_, _, offload) in claims.items()},
                }.items()
            }
    except OSError as error:
        return without_figures("not measured", f"no disk can be slowed down here: {error}"), {}
    data = {"budget_bytes": budget, **found}
    if errors := [f"{name}: {one['error']}" for name, one in found.items() if "error" in one]:
        return without_figures("failed", "; ".join(errors)[:200]), data
    rows = []
    for name, (claim, published, _) in claims.items():
        gain = found["raw"]["median_s"] / found[name]["median_s"]
        written = [format_bytes(found[one]["report"]["disk_written_bytes"]) for one in ("raw", name)]
        conditions = (
            f"VGG as above, batch {config.batch}, 72 % of its memory, recompute=False, the system limits the "
            f"disk to {format_bytes(SLOW_BYTES_PER_S)}/s each way; step {spread(found['raw'])} without, "
            f"{spread(found[name])} with; written {written[0]} and {written[1]}"
        )
        rows.append(Row("FlashNeuron", claim, published, f"{gain:.2f} x, over moving without", conditions))
    return rows, data


@contextmanager
def _slow_disk(directory: str) -> Iterator[Path]:
    """A control group (version 1, root) whose direct reads and writes of the disk are slow."""
    device = os.stat(directory).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    group = Path("/sys/fs/cgroup/blkio") / f"penstock-papers-{os.getpid()}"
    group.mkdir()
    try:
        for kind in ("read", "write"):
            (group / f"blkio.throttle.{kind}_bps_device").write_text(f"{number} {SLOW_BYTES_PER_S}")
        yield group
    finally:
        with suppress(OSError):
            group.rmdir()


def addresses(session: Session) -> Found:
    """Where a step's writes lie, and how long a drive would last."""
    rows, data = [], {}
    networks = {"GPT": replace(session.networks()["GPT"], batch=16), "VGG": session.vgg()}
    for name, config in networks.items():
        peak = captured(config).peak_bytes
        found = session.train_within(
            config, f"addresses: {name}", _share(config, peak, 0.4), addresses=True, recompute=False
        )
        data[name] = found
        if "error" in found:
            rows.append(Row("FlashNeuron", f"addresses, {name}", "", "failed", found["error"][:200]))
            continue
        writes, reads = found["addresses"]["write"], found["addresses"]["read"]
        if not writes["bytes"]:
            rows.append(Row("FlashNeuron", f"addresses, {name}", "", "nothing was written", shown(config)))
            continue
        report = found["report"]
        rows.append(
            Row(
                "FlashNeuron",
                f"addresses of a step's writes are sequential (figure 11), {name}",
                "in address order, as a figure",
                f"{writes['right_after']:.0%} of the bytes right after the last write",
                f"{shown(config)} in {found['budget_bytes'] / peak:.0%} of its memory, "
                f"recompute=False: {writes['transfers']} "
                f"writes of {format_bytes(writes['bytes'])}, "
                f"{writes['jumps']} jumps; reads: {reads['right_before'] or 0:.0%} of bytes right before "
                f"the last, {reads['right_after'] or 0:.0%} right after; "
                "in the order in which the runtime asks, last step",
            )
        )
        per_day = found["written_bytes_per_day"]
        lives = [drive / per_day * 86400 if per_day else 0.0 for drive in (PM1725B_BYTES, SZ985_BYTES)]
        written = (
            f"{format_bytes(report['disk_written_bytes'])} a step of {format_seconds(report['step_s'])}, "
            "without a pause"
        )
        rows.append(
            Row(
                "FlashNeuron",
                f"life of an 8 TB PM1725b (3 drive writes a day for five years) at 3.3 GB/s, half writes, "
                f"{name}",
                "307 days",
                format_lifetime(lives[0]),
                f"{written}; bytes of the host, {shown(config)}",
            )
        )
        rows.append(
            Row(
                "G10",
                f"life of a 3.2 TB SZ985 (30 drive writes a day for five years) at 3 GB/s, half writes, "
                f"{name}",
                "3.7 years",
                format_lifetime(lives[1]),
                f"the same run: {written}",
            )
        )
    return rows, data


def _share(config: Config, peak_bytes: int, share: float) -> int:
    """A part of the memory that a step takes; of tiny networks more, where one kernel needs more."""
    return max(int(peak_bytes * share), int(1.5 * minimum_bytes(captured(config))))


LOADS = {
    "processor": "import torch\ntorch.set_num_threads(1)\na = torch.randn(512, 512)\nwhile True: a @ a",
    "memory": (
        "import torch\ntorch.set_num_threads(1)\na, b = torch.zeros(1 << 26), torch.zeros(1 << 26)\n"
        "while True: b.copy_(a)"
    ),
}


def isolation(session: Session) -> Found:
    """Training beside a program that loads the processor, or the memory."""
    config = replace(session.networks()["GPT"], batch=8 if session.quick else 16)
    budget = _share(config, captured(config).peak_bytes, 0.4)
    methods: dict[str, dict[str, Any]] = {
        "in memory": {},
        "penstock, direct": {"device_budget": budget, "recompute": False},
        "penstock, page cache": {
            "device_budget": budget,
            "recompute": False,
            "paths": "posix buffered",
            "page_cache_budget": 2 << 30,
        },
    }
    data: dict[str, Any] = {}
    loads = ("memory",) if session.quick else tuple(LOADS)
    for load in ("none", *loads):
        with _loaded(load):
            for name, options in methods.items():
                data[f"{name}, {load}"] = session.train(config, f"isolation: {name}, {load}", **options)
    slow: dict[str, dict[str, float]] = {}
    for load in loads:
        for name in methods:
            one, alone = data[f"{name}, {load}"], data[f"{name}, none"]
            if "error" not in one and "error" not in alone:
                slow.setdefault(load, {})[name] = one["median_s"] / alone["median_s"]
    rows = []
    for load, by_method in slow.items():
        own = by_method.get("penstock, direct")
        if own is None or "in memory" not in by_method:
            continue
        published = (
            "SSD within 1.09 x, host memory up to 3.1 x"
            if load == "memory"
            else "1.02 x SSD, 1.38 x host memory (beside inference)"
        )
        rows.append(
            Row(
                "FlashNeuron",
                f"training beside a program that loads the {load}: slow-down over alone, GPU training",
                published,
                f"{own:.2f} x; in memory {by_method['in memory']:.2f} x; through the page cache "
                f"{by_method.get('penstock, page cache', float('nan')):.2f} x",
                f"{shown(config)} in 40 % of its memory, recompute=False; one process "
                + ("multiplies matrices" if load == "processor" else "copies 256 MiB without a pause")
                + "; the device itself is the processor here, so the program takes its time too: held "
                "against in memory, "
                + f"penstock loses {own / by_method['in memory'] - 1:+.0%}; alone: "
                + "; ".join(
                    f"{name} {spread(data[f'{name}, none'])}"
                    for name in methods
                    if "error" not in data[f"{name}, none"]
                ),
            )
        )
    if not rows:
        rows.append(
            Row(
                "FlashNeuron",
                "isolation",
                "",
                "failed",
                str({k: v.get("error") for k, v in data.items()})[:300],
            )
        )
    return rows, data


@contextmanager
def _loaded(load: str) -> Iterator[None]:
    if load == "none":
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", LOADS[load]])
    try:
        yield
    finally:
        process.kill()
        process.wait()
