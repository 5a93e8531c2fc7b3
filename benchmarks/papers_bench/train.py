"""One training, in a process of its own: told on standard input what, it answers on standard output.

`train` starts it. What it could not do, it says: a budget that is too small is an answer, not a crash.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "benchmarks")]

import msgspec  # noqa: E402
import torch  # noqa: E402
from methods import UNSETTLED_STEPS  # noqa: E402

import penstock  # noqa: E402
from papers_bench import programs  # noqa: E402
from papers_bench.programs import Config  # noqa: E402
from penstock.errors import BudgetTooSmall, PenstockError  # noqa: E402
from penstock.options import grouped  # noqa: E402
from penstock.runtime import resident  # noqa: E402
from penstock.storage.spill import SpillSpace  # noqa: E402


def train(
    config: Config,
    steps: int,
    offload: Mapping[str, Any] | None = None,
    *,
    hardware_file: Path | None = None,
    groups: tuple[Path, ...] = (),
    addresses: bool = False,
    timeout_s: float = 240,
) -> dict[str, Any]:
    """Train so many settled steps.

    offload         arguments of `penstock.offload`; None to train in memory
    groups          control groups that the process joins before it begins
    addresses       also log where each transfer of the last step lies

    Gives "error" where it did not work, with "needed_bytes" where the budget was too small.
    """
    asked = {
        "config": asdict(config),
        "steps": steps,
        "offload": offload,
        "hardware_file": str(hardware_file) if hardware_file else "",
        "addresses": addresses,
    }
    command = [sys.executable, __file__]
    for group in groups:
        command = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs"), *command]
    try:
        done = subprocess.run(
            command, input=json.dumps(asked), capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {timeout_s:g} s"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _run(asked: Mapping[str, Any]) -> dict[str, Any]:
    config = Config(**asked["config"])
    divides = bool(asked["offload"] and asked["offload"].get("micro_batch"))
    programs.build(Config("vit", 2, 1, 16, 16))  # what torch loads at first use is no growth
    resident.release_free_memory()
    before_bytes = resident.resident_bytes()
    resident.reset_peak()
    log: list[tuple[str, int, int]] = []
    times_s: list[float] = []
    losses: list[str] = []
    report = shares = None
    with _logged(log) if asked["addresses"] else nullcontext(), _offloaded(asked) as run:
        model, optimizer, batches, loss_of = programs.build(config)
        for _ in range(UNSETTLED_STEPS + asked["steps"]):
            batch = next(batches)
            log.clear()
            begun_s = time.perf_counter()
            with run.step() if run is not None else nullcontext():
                total = 0.0
                parts = run.micro_batches(batch, partial(loss_of, model)) if run and divides else [batch]
                for part in parts:
                    loss = loss_of(model, part)
                    if divides:
                        loss = loss * part.weight
                    loss.backward()
                    total += loss.item()
                    del loss
                optimizer.step()
                optimizer.zero_grad()
            times_s.append(time.perf_counter() - begun_s)
            losses.append(total.hex())
            del batch, part, parts
        peak_resident_bytes = resident.peak_resident_bytes() - before_bytes
        if run is not None:
            report = run.report()
            shares = msgspec.to_builtins(run.io_report().shares)
        digest = hashlib.sha256()
        for parameter in model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
    settled_s = times_s[UNSETTLED_STEPS:]
    quartiles = statistics.quantiles(settled_s, n=4, method="inclusive") if settled_s[1:] else settled_s * 3
    answer: dict[str, Any] = {
        "median_s": statistics.median(settled_s),
        "quartiles_s": [quartiles[0], quartiles[2]],
        "samples_s": times_s,
        "losses": losses,
        "weights_sha256": digest.hexdigest(),
        "peak_resident_bytes": peak_resident_bytes,
        "torch": str(torch.__version__),
    }
    if report is not None:
        answer["report"] = msgspec.to_builtins(report)
        answer["io_shares"] = shares
        answer["written_bytes_per_day"] = report.disk_wear.written_bytes_per_day
    if asked["addresses"]:
        answer["addresses"] = {kind: in_a_row(log, kind) for kind in ("write", "read")}
    return answer


@contextmanager
def _offloaded(asked: Mapping[str, Any]) -> Iterator[penstock.Offload | None]:
    if asked["offload"] is None:
        yield None
        return
    hardware = penstock.Hardware.load(asked["hardware_file"]) if asked["hardware_file"] else None
    with penstock.offload(**grouped(asked["offload"]), hardware=hardware) as run:
        yield run


@contextmanager
def _logged(log: list[tuple[str, int, int]]) -> Iterator[None]:
    """Write down every transfer as it is asked for: what, from which offset of the spill file, how long."""
    originals = {"write": SpillSpace.write, "read": SpillSpace.read}

    def logged(kind: str) -> Any:
        original = originals[kind]

        def asked(
            self: SpillSpace, extent: Any, address: int, size_bytes: int, *rest: Any, **more: Any
        ) -> Any:
            log.append((kind, extent.offset, extent.size_bytes))
            return original(self, extent, address, size_bytes, *rest, **more)  # type: ignore[operator]

        return asked

    SpillSpace.write, SpillSpace.read = logged("write"), logged("read")  # type: ignore[method-assign]
    try:
        yield
    finally:
        SpillSpace.write, SpillSpace.read = originals["write"], originals["read"]  # type: ignore[method-assign]


def in_a_row(log: list[tuple[str, int, int]], kind: str) -> dict[str, Any]:
    """Of the bytes of one kind of transfer, the fraction that lies right after, or right before, the one
    that was asked for before it, of the same kind."""
    spans = [(offset, size) for one, offset, size in log if one == kind]
    total = sum(size for _, size in spans)
    after = before = 0
    for (last, last_size), (offset, size) in pairwise(spans):
        after += size if offset == last + last_size else 0
        before += size if offset + size == last else 0
    first = spans[0][1] if spans else 0
    jumps = sum(offset != last + last_size for (last, last_size), (offset, _) in pairwise(spans))
    return {
        "transfers": len(spans),
        "bytes": total,
        "right_after": (after + first) / total if total else None,
        "right_before": before / total if total else None,
        "jumps": jumps,
        "median_bytes": statistics.median(size for _, size in spans) if spans else None,
    }


def main() -> None:
    asked = json.load(sys.stdin)
    try:
        answer = _run(asked)
    except BudgetTooSmall as error:
        answer = {"error": f"BudgetTooSmall: {error}", "needed_bytes": error.minimum_bytes}
    except PenstockError as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
