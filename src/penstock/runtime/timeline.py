"""What was measured of a step, in the terms of the simulator."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from penstock.core.columns import KINDS
from penstock.core.hardware import LINKS
from penstock.core.timeline import Sample, Span, Stall, Timeline, busy_s
from penstock.core.trace import Trace
from penstock.runtime.copy_engine import Moved, Wait
from penstock.runtime.recording import Recording


def rates(moved: Sequence[Moved]) -> dict[str, float]:
    """Bytes per second of each link, and of what compresses and expands, while it moved something."""
    rates = {}
    for link in sorted({transfer.link for transfer in moved}):
        took_s = busy_s(
            (transfer.started_s, transfer.finished_s) for transfer in moved if transfer.link == link
        )
        if took_s > 0:
            rates[link] = moved_bytes(moved, link) / took_s
    return rates


def moved_bytes(moved: Sequence[Moved], link: str) -> int:
    """Bytes that crossed a link."""
    return sum(transfer.size_bytes for transfer in moved if transfer.link == link)


def moved_bytes_by_kind(moved: Sequence[Moved], link: str) -> dict[str, int]:
    """Bytes that crossed a link, by what the tensors are."""
    totals = dict.fromkeys(("weight", "gradient", "optimizer_state", "activation"), 0)
    for transfer in moved:
        if transfer.link == link:
            kind = KINDS[transfer.kind] if transfer.kind >= 0 else "activation"
            totals[kind if kind in totals else "activation"] += transfer.size_bytes
    return totals


def timeline(
    trace: Trace,
    recording: Recording,
    moved: Sequence[Moved],
    waits: Sequence[Wait],
    begun_s: float,
    step_s: float,
) -> Timeline:
    """The recorded step, on the same clock and in the same terms as a simulated one."""
    kernels = [
        Span("compute", kernel.begun_s - begun_s, kernel.ended_s - begun_s, kernel.name, index)
        for index, kernel in enumerate(recording.kernels)
    ]
    copies = [
        Span(
            copy.link,
            copy.started_s - begun_s,
            copy.finished_s - begun_s,
            f"tensor {copy.tensor}",
            copy.tensor,
            copy.size_bytes,
        )
        for copy in sorted(moved, key=lambda copy: copy.started_s)
        if copy.link in LINKS
    ]
    memory = []
    for span, in_memory_bytes, workspace in zip(
        kernels, recording.in_memory_bytes, trace.kernel_workspace_bytes.tolist(), strict=True
    ):
        memory += [
            Sample(span.start_s, in_memory_bytes + workspace),
            Sample(span.end_s, in_memory_bytes),
        ]
    stalls = tuple(
        Stall(
            wait.started_s - begun_s,
            wait.finished_s - begun_s,
            wait.cause,
            bisect.bisect_left(recording.launched_s, wait.started_s),
        )
        for wait in waits
    )
    return Timeline(
        iteration_s=step_s,
        spans=(*kernels, *copies),
        memory={"device": tuple(memory)},
        stalls=stalls,
        source="measured",
    )
