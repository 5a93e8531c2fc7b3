"""How long the kernels of a step take where the host only launches them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

# Less of the program's between two kernels is mostly what a recording costs: views, and memory that is freed.
PAUSE_S = 1e-3


class Timed(NamedTuple):
    """A kernel between two events of its stream, as torch.Event with `enable_timing`.

    was_idle   the device had done all that it was given when the kernel was launched: from the first event on
               it waited for the launch
    waited     the launch went on until the device had done all that it was given before: it waited, as that
               of `item` does
    """

    begun: Any
    ended: Any
    was_idle: bool
    waited: bool


class Launch(NamedTuple):
    """What the host did for a kernel.

    program_s   of the program, since the kernel before
    call_s      the call that launched it
    """

    program_s: float
    call_s: float


def times_s(timed: Sequence[tuple[Launch, Timed]]) -> Iterator[tuple[float, float]]:
    """Seconds that each kernel takes on the device, and by how much the plain step is longer with it.

    In a plain step the host launches as fast as it can, and the device follows: a kernel begins when it is
    launched, or when the one before is over, whichever is later. So the second ones add up to about what the
    slower of the two takes. The host's part is that of the calls, and of the program where it pauses: what a
    recording takes beside them is not in it.
    """
    host_s = device_s = 0.0
    for launch, kernel in timed:
        took_s = kernel.begun.elapsed_time(kernel.ended) / 1e3
        if kernel.was_idle:
            took_s = max(took_s - launch.call_s, 0.0)
        host_s += launch.program_s if launch.program_s > PAUSE_S else 0.0
        host_s += 0.0 if kernel.waited else launch.call_s
        over_s = max(device_s, host_s) + took_s
        if kernel.waited:
            host_s = over_s
        yield took_s, over_s - device_s
        device_s = over_s
