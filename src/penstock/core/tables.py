"""HTML tables for notebooks."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def html_table(rows: Iterable[Sequence[str]], head: Sequence[str] = (), title: str = "") -> str:
    """A table as HTML. Every argument is plain text, and is escaped."""
    lines = [f"<p>{html_text(title)}</p>"] if title else []
    lines.append("<table>")
    if head:
        lines.append(html_row(head, "th"))
    lines += [html_row(row) for row in rows]
    return "".join([*lines, "</table>"])


def html_row(cells: Sequence[str], tag: str = "td") -> str:
    return f"<tr>{''.join(f'<{tag}>{html_text(cell)}</{tag}>' for cell in cells)}</tr>"


def html_text(text: str) -> str:
    """Escape text. Lone surrogates, which names that are not UTF-8 have, become backslash escapes."""
    return html.escape(text.encode("utf-8", "backslashreplace").decode())
