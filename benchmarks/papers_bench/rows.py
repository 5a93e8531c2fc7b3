"""A claim, what was published, and what was found: a row of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One claim.

    paper       who claims it
    claim       in a few words, with the paper's conditions
    published   the paper's figure as text
    ours        what was found as text; why not, where it cannot be found here
    conditions  of what was found
    ratio       ours over the published figure, where both are one number and mean the same; None else
    """

    paper: str
    claim: str
    published: str
    ours: str
    conditions: str
    ratio: float | None = None


def markdown(rows: Sequence[Row]) -> str:
    """A table. The ratio is ours over the paper's."""
    lines = ["| paper | claim, and the paper's conditions | paper | ours | our conditions | ours / paper |"]
    lines.append("|---|---|---|---|---|---|")
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        lines.append(
            f"| {row.paper} | {row.claim} | {row.published} | {row.ours} | {row.conditions} | {ratio} |"
        )
    return "\n".join(lines)
