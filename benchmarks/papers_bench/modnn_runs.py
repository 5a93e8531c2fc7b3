"""moDNN's least memory in runs, beside what is calculated for the same steps."""

from __future__ import annotations

from typing import Any

from papers_bench.programs import Config, captured
from papers_bench.rows import Row
from papers_bench.training import SMALL_BYTES, Found, Session
from penstock.core.memory_profile import minimum_bytes
from penstock.units import format_bytes

SEGMENT_BYTES = 2 << 20  # the arena's unit of memory
SIDE = 64  # pixels: two cores train at that what they cannot at the paper's 224


def least_memory(session: Session) -> Found:
    """Two of the networks, one sample at a time: the budget that works, and that of one segment less."""
    rows, data = [], {}
    width = 16 if session.quick else 64
    for network in ("ResNet-34",) if session.quick else ("VGG-16", "ResNet-34"):
        config = Config(network, 2, 0, width, SIDE)
        trace = captured(config, 1)
        for kept, what in ((True, "weights resident"), (False, "weights moved")):
            options = {"micro_batch": 1, "keep_weights": kept, "smallest_bytes": SMALL_BYTES}
            calculated = minimum_bytes(trace.with_weights_kept() if kept else trace)
            found = session.train_within(config, f"{network}, {what}", calculated, **options)
            below: dict[str, Any] = {}
            while "error" not in found and "needed_bytes" not in below:
                step = min(SEGMENT_BYTES, found["budget_bytes"] // 4)  # of --quick all is less than a segment
                less = found["budget_bytes"] - step
                below = session.train(config, f"{network}, {what}, less", device_budget=less, **options)
                if "error" in below:
                    break
                found = below | {"budget_bytes": less}
            data[f"{network}, {what}"] = {"calculated_bytes": calculated, "found": found, "below": below}
            claim = f"least memory of {network}, {what}: measured over calculated"
            conditions = (
                f"width {width}, {SIDE} pixels, batch 2, one sample at a time, plain gradient descent"
            )
            if "error" in found or "needed_bytes" not in below:
                why = found.get("error") or below.get("error", "a segment less was not refused")
                rows.append(Row("moDNN", claim, "", "failed", why[:200]))
                continue
            ratio = found["budget_bytes"] / calculated
            rows.append(
                Row(
                    "moDNN",
                    claim,
                    "calculated only",
                    f"{ratio:.3f} x",
                    f"{conditions}: {format_bytes(found['budget_bytes'])} works, "
                    f"{format_bytes(step)} less is refused; calculated {format_bytes(calculated)}; "
                    f"the recorded steps' own minimum {format_bytes(found['report']['minimum_bytes'])}",
                )
            )
    return rows, data
