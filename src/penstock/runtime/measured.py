"""What was measured of a step, in the terms of the simulator."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from penstock.core.timeline import Sample, Span, Stall, Timeline
from penstock.core.trace import Trace
from penstock.runtime.mover import Moved, Mover


def rates(moved: Sequence[Moved]) -> dict[str, float]:
    """Bytes per second of each link while it moved something."""
    rates = {}
    for link in sorted({transfer.link for transfer in moved}):
        spans = sorted((t.started_s, t.finished_s, t.size_bytes) for t in moved if t.link == link)
        busy_s, until_s = 0.0, 0.0
        for started_s, finished_s, _ in spans:
            busy_s += max(0.0, finished_s - max(started_s, until_s))
            until_s = max(until_s, finished_s)
        if busy_s > 0:
            rates[link] = sum(size for _, _, size in spans) / busy_s
    return rates


def moved_bytes(moved: Sequence[Moved], link: str) -> int:
    """Bytes that crossed a link."""
    return sum(transfer.size_bytes for transfer in moved if transfer.link == link)


def timeline(trace: Trace, recorder: Recorder, mover: Mover, begun_s: float, step_s: float) -> Timeline:
    """The recorded step, on the same clock and in the same terms as a simulated one."""
    kernels = [
        Span("compute", begin - begun_s, end - begun_s, name, index)
        for index, (name, begin, end) in enumerate(
            zip(trace.kernel_name, recorder.begins_s, recorder.ends_s, strict=True)
        )
    ]
    copies = []
    for moved in sorted(mover.moved, key=lambda moved: moved.started_s):
        tensor = int(trace.save_tensor[moved.number]) if moved.number >= 0 else -1
        copies.append(
            Span(
                moved.link,
                moved.started_s - begun_s,
                moved.finished_s - begun_s,
                f"tensor {tensor}",
                tensor,
                moved.size_bytes,
            )
        )
    memory = []
    for span, in_use, workspace in zip(
        kernels, recorder.in_use_bytes, trace.kernel_workspace_bytes.tolist(), strict=True
    ):
        memory += [Sample(span.start_s, in_use + workspace), Sample(span.end_s, in_use)]
    stalls = tuple(
        Stall(
            wait.started_s - begun_s,
            wait.finished_s - begun_s,
            wait.cause,
            bisect.bisect_left(recorder.begins_s, wait.started_s),
        )
        for wait in mover.waits
    )
    return Timeline(
        iteration_s=step_s,
        spans=(*kernels, *copies),
        memory={"device": tuple(memory)},
        stalls=stalls,
        source="measured",
    )
