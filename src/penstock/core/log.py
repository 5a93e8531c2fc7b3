"""What is logged once."""

from __future__ import annotations

import functools
import logging

logger = logging.getLogger("penstock")


@functools.cache
def log_once(text: str, level: int = logging.WARNING) -> None:
    """Log a text, once in this process."""
    logger.log(level, "%s", text)
