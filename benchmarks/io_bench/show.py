"""The tables on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from io_bench.adaptive import CHOICES
from io_bench.formats import FORMATS
from io_bench.rows import IN_FLIGHT, KINDS
from io_bench.targets import Target
from io_bench.transfers import ALL_ROWS
from penstock.units import format_bytes, format_seconds


def show_transfers(console: Console, sizes: Mapping[str, Any]) -> None:
    for kind in (*KINDS, *IN_FLIGHT):
        columns = {size: rates(part["rows"], kind) for size, part in sizes.items()}
        if any(columns.values()):
            title = f"{kind}, GB/s: median, quartiles"
            console.print(by_size(title, ALL_ROWS, columns))
    for kind in ("write", "cold read"):
        columns = {size: cpu(part["rows"], kind) for size, part in sizes.items()}
        if any(columns.values()):
            console.print(by_size(f"{kind}, CPU seconds per GB: median", ALL_ROWS, columns))


def rates(rows: Mapping[str, Any], kind: str) -> dict[str, str]:
    measured = {name: kinds[kind] for name, kinds in rows.items() if kind in kinds}
    return {name: rate(found) for name, found in measured.items()}


def rate(found: Mapping[str, Any]) -> str:
    lower, upper = (gigabytes(value) for value in found["quartiles_bytes_per_s"])
    return f"{gigabytes(found['median_bytes_per_s'])}\n[dim]{lower}-{upper}[/dim]"


def gigabytes(rate_bytes_per_s: float) -> str:
    return f"{rate_bytes_per_s / 1e9:.{2 if rate_bytes_per_s < 99.5e8 else 1}f}"


def cpu(rows: Mapping[str, Any], kind: str) -> dict[str, str]:
    return {
        name: f"{kinds[kind]['median_cpu_s_per_gb']:.3f}" for name, kinds in rows.items() if kind in kinds
    }


def by_size(title: str, names: Iterable[str], columns: Mapping[str, Mapping[str, str]]) -> Table:
    """A row for each name that has a cell, a column for each size."""
    table = plain_table("", *(format_bytes(int(size)) for size in columns), title=title)
    for name in names:
        cells = [column.get(name, "") for column in columns.values()]
        if any(cells):
            table.add_row(name, *cells)
    return table


def show_checkpoints(console: Console, part: Mapping[str, Any]) -> None:
    kinds = ("save+fsync", "cold load", "warm load")
    title = f"a state of {format_bytes(part['bytes'])} in {part['tensors']} tensors, GB/s: median, quartiles"
    table = plain_table("", *kinds, *(f"{kind}, CPU s/GB" for kind in kinds), title=title)
    for name in FORMATS:
        if found := part["rows"].get(name):
            table.add_row(
                name,
                *(rate(found[kind]) if kind in found else "" for kind in kinds),
                *(f"{found[kind]['median_cpu_s_per_gb']:.3f}" if kind in found else "" for kind in kinds),
            )
    console.print(table)


def show_adaptive(console: Console, part: Mapping[str, Any]) -> None:
    measured = {format_bytes(int(size)): compared for size, compared in part.get("sizes", {}).items()}
    if "step" in part:
        measured["a step"] = part["step"]
    names = list(next(iter(measured.values()))["contenders"])
    table = plain_table("", *measured, title="writing and reading back: median time")
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.no_wrap = False  # names of ways are long
    for name in names:
        table.add_row(
            name, *(format_seconds(one["contenders"][name]["median_s"]) for one in measured.values())
        )
    for choice in CHOICES:
        table.add_section()
        table.add_row(
            f"{choice}: speed of the best",
            *(share(one["contenders"][choice].get("speed_of_best_single")) for one in measured.values()),
        )
        table.add_row("which is", *(one["best_single"].get(choice, "") for one in measured.values()))
    console.print(table)
    texts = part.get("step", part)["choices"]
    for choice, text in texts.items():
        console.print(f"\n[bold]{choice}: what it learned, and who won its rounds[/bold]")
        console.print(text["costs_text"], text["rounds_text"], sep="\n\n", markup=False, soft_wrap=True)


def share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def show_targets(console: Console, targets: Iterable[Target]) -> None:
    table = plain_table("target", "bound", "worst", "at", "against", "", title="targets")
    for target in targets:
        value, compared = target.at[target.worst]
        table.add_row(
            target.name,
            f"{'>=' if target.at_least else '<='} {target.bound:g}",
            f"{value:.3g}",
            target.worst,
            compared,
            "[green]pass[/green]" if target.passed else "[red]FAIL[/red]",
        )
    console.print(table)


def show_notes(console: Console, does: Mapping[str, str], absent: Mapping[str, str]) -> None:
    for name, text in does.items():
        console.print(f"[bold]{name}[/bold]: {text}")
    for name, reason in absent.items():
        console.print(f"[bold]{name}[/bold]: [red]left out[/red], {reason}")


def plain_table(*columns: str, title: str) -> Table:
    table = Table(*columns, title=title, title_justify="left", title_style="bold", box=None)
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    return table
