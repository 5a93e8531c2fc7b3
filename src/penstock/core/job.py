"""What the processes of a job know of it from torchrun."""

from __future__ import annotations

import os


def attempt() -> str:
    """Names what is this start of the job's in a key-value store that earlier starts wrote to as well.

    torchrun counts restarts on each machine by itself: where there are several, the counts can differ, and
    no name is made of them.
    """
    machines = os.environ.get("GROUP_WORLD_SIZE", "1")
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if machines == "1" else "0"
