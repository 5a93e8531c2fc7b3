"""The restart of a job, from torchrun's environment variables."""

from __future__ import annotations

import os


def restart_id() -> str:
    """A prefix of keys in a key-value store that outlives restarts: torchrun's restart count.

    Each machine counts its own restarts, and the counts can differ. So it is "0" where there are several.
    """
    machines = os.environ.get("GROUP_WORLD_SIZE", "1")
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if machines == "1" else "0"
