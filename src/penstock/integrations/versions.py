"""Which versions of other libraries the integrations were run with."""

from __future__ import annotations

import functools
import logging
import re
from importlib.metadata import version

from penstock.errors import installing

# The oldest and the newest release that the tests were run with; patch releases count as their minor one.
RUN_WITH = {
    "accelerate": ("1.11", "1.15"),
    "lightning": ("2.5", "2.6"),
    "peft": ("0.18", "0.21"),
    "transformers": ("5.0", "5.23"),
    "trl": ("1.0", "1.16"),
}

logger = logging.getLogger("penstock")


def missing(library: str) -> ImportError:
    return ImportError(
        f"penstock.integrations.{library} needs {library}: {installing('integrations')}",
        name=library,
    )


@functools.cache
def warn_if_unknown(library: str) -> None:
    """Say once that this version of an installed library was never run."""
    oldest, newest = RUN_WITH[library]
    found = version(library)
    if not _minor(oldest) <= _minor(found) <= _minor(newest):
        between = oldest if oldest == newest else f"{oldest} to {newest}"
        logger.warning(
            "penstock was run with %s %s, and not with %s, which is installed: compare the first losses with "
            "those of a run without it",
            library,
            between,
            found,
        )


def _minor(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])
