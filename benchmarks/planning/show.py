"""Tables and plots of what was measured."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock.units import format_seconds

NAMES = {"lru": "Base UVM", "deepUM": "DeepUM+", "FlashNeuron": "FlashNeuron", "prefetch_lru": "G10"}
ROUNDED = 1e-6  # published times have six digits


def show_published(console: Console, part: Mapping[str, Any]) -> None:
    cells = part["cells"]
    for figure in sorted({cell["figure"] for cell in cells}):
        console.print(cells_table(figure, [cell for cell in cells if cell["figure"] == figure]))
    console.print(summary(cells))


def cells_table(figure: int, cells: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title=f"Figure {figure}: seconds an iteration", title_justify="left", box=None)
    table.add_column("cell", no_wrap=True)
    for name in (
        "ideal",
        "Base UVM",
        "DeepUM+",
        "FlashNeuron",
        "G10",
        "penstock g10_artifact",
        "optimal",
        "recompute",
    ):
        table.add_column(name, justify="right")
    table.add_column("over bound", justify="right")
    for cell in cells:
        published, outcomes = cell["published_s"], cell["outcomes"]
        optimal = outcomes["optimal"]
        table.add_row(
            cell["cell"],
            seconds(optimal["ideal_s"]),
            *(
                both(published, name, outcomes.get(way))
                for name, way in (("lru", "lru"), ("deepUM", "deepUM"), ("FlashNeuron", "flashneuron_g10"))
            ),
            seconds(published.get("prefetch_lru")),
            seconds(outcomes["g10_artifact"]["predicted_s"]),
            seconds(optimal["predicted_s"]),
            seconds(outcomes.get("optimal, recompute", {}).get("predicted_s")),
            percent(gap(optimal)),
        )
    return table


def both(published: Mapping[str, Any], name: str, outcome: Mapping[str, Any] | None) -> str:
    """Published, and penstock's simulation of the same policy."""
    if outcome is None:
        return "-"
    theirs = seconds(published[name]) if name in published else "-"
    return f"{theirs} / {seconds(outcome['predicted_s'])}"


def summary(cells: Sequence[Mapping[str, Any]]) -> Table:
    """The figures that the planners have to reach."""
    table = Table(title="against the published results", title_justify="left", box=None)
    table.add_column("what", no_wrap=True)
    table.add_column("measured")
    for what, measured in facts(cells):
        table.add_row(what, measured)
    return table


def facts(cells: Sequence[Mapping[str, Any]]) -> Iterable[tuple[str, str]]:
    flash = [cell for cell in cells if cell["figure"] == 15]
    finite = [cell for cell in flash if cell["published_s"].get("FlashNeuron")]
    if finite:
        off = [
            abs(ours / cell["published_s"]["FlashNeuron"] - 1)
            for cell in finite
            if (ours := cell["outcomes"]["flashneuron_g10"]["predicted_s"])
        ]
        near = sum(value <= 0.02 for value in off)
        yield "FlashNeuron, figure 15: within 2 %", f"{near} of {len(finite)}; largest {max(off):.2%}"
        failing = [cell for cell in flash if cell["published_s"].get("FlashNeuron") is None]
        failed = sum(cell["outcomes"]["flashneuron_g10"]["predicted_s"] is None for cell in failing)
        yield "FlashNeuron, figure 15: fails where it failed", f"{failed} of {len(failing)}"
    g10 = [cell for cell in cells if cell["published_s"].get("prefetch_lru") and cell["figure"] != 11]
    if g10:
        points = [
            100
            * (
                cell["outcomes"]["g10_artifact"]["ideal_s"] / cell["outcomes"]["g10_artifact"]["predicted_s"]
                - cell["outcomes"]["g10_artifact"]["ideal_s"] / cell["published_s"]["prefetch_lru"]
            )
            for cell in g10
            if cell["outcomes"]["g10_artifact"]["predicted_s"]
        ]
        near = sum(abs(point) <= 3 for point in points)
        median = statistics.median(map(abs, points))
        yield (
            "g10_artifact: percentage of ideal within 3 points of the published",
            f"{near} of {len(g10)} ({near / len(g10):.0%}); median difference {median:.2f}",
        )
    for name in ("lru", "deepUM"):
        ratios = [
            cell["outcomes"][name]["predicted_s"] / cell["published_s"][name]
            for cell in cells
            if name in cell["outcomes"] and cell["published_s"].get(name)
        ]
        if ratios:
            off = statistics.median(abs(ratio - 1) for ratio in ratios)
            yield (
                f"{NAMES[name]}: median difference, and of the times' ratio the median",
                f"{off:.1%}; {statistics.median(ratios):.3f} over {len(ratios)} cells",
            )
    ordered = [cell for cell in cells if {"lru", "deepUM"} <= set(cell["outcomes"]) and order_of(cell)]
    if ordered:
        same = sum(order_of(cell) == "same" for cell in ordered)
        yield "Base UVM, DeepUM+, G10 in the published order", f"{same} of {len(ordered)}"
    won = [cell for cell in cells if cell["published_s"].get("prefetch_lru")]
    if won:
        ratios = [
            cell["outcomes"]["optimal"]["predicted_s"] / cell["published_s"]["prefetch_lru"]
            if cell["outcomes"]["optimal"]["predicted_s"]
            else float("inf")
            for cell in won
        ]
        beaten = sum(ratio <= 1 + ROUNDED for ratio in ratios)
        yield (
            "optimal: at least as fast as the published G10",
            f"{beaten} of {len(won)}; worst {max(ratios):.4f} of its time, "
            f"median {statistics.median(ratios):.4f}",
        )
        ours = [
            cell["outcomes"]["optimal"]["predicted_s"] / cell["outcomes"]["g10_artifact"]["predicted_s"]
            for cell in won
            if cell["outcomes"]["optimal"]["predicted_s"] and cell["outcomes"]["g10_artifact"]["predicted_s"]
        ]
        as_fast, faster = sum(ratio <= 1 + ROUNDED for ratio in ours), sum(ratio < 0.99 for ratio in ours)
        yield (
            "optimal against penstock's own g10_artifact, in the same simulator",
            f"at least as fast in {as_fast} of {len(ours)}, by more than 1 % in {faster}; time over g10's: "
            f"median {statistics.median(ours):.4f}, best {min(ours):.4f}, worst {max(ours):.4f}",
        )
    for way in ("optimal", "optimal, recompute"):
        five = [cell["outcomes"][way] for cell in cells if cell["figure"] == 11 and way in cell["outcomes"]]
        if five and all(one["predicted_s"] for one in five):
            of_ideal = [one["ideal_s"] / one["predicted_s"] for one in five]
            yield (
                f"{way}: figure 11, of ideal",
                f"{statistics.geometric_mean(of_ideal):.2%} "
                f"({', '.join(f'{value:.1%}' for value in of_ideal)})",
            )
            yield f"{way}: figure 11, over the bound", ", ".join(percent(gap(one)) for one in five)
            noise = [value for one in five for value in one["noisy"]]
            if noise:
                yield (
                    f"{way}: figure 11, kernel times off by up to 20 %",
                    f"mean {statistics.fmean(noise):+.2%}, worst {max(noise):+.2%}",
                )
    unique = {cell["cell"]: cell["outcomes"]["optimal"] for cell in cells}
    gaps = sorted(value for one in unique.values() if (value := gap(one)) is not None)
    if len(gaps) > 1:
        tenths = statistics.quantiles(gaps, n=10)
        yield (
            f"optimal: over its bound, {len(gaps)} problems",
            f"median {statistics.median(gaps):.2%}, 90 % of them at most {tenths[-1]:.2%}, "
            f"worst {gaps[-1]:.2%}",
        )
    longest = max(cells, key=lambda cell: cell["outcomes"]["optimal"]["planning_s"], default=None)
    if longest:
        yield (
            "optimal: longest planning",
            f"{longest['outcomes']['optimal']['planning_s']:.1f} s ({longest['cell']})",
        )
        slow = max(cells, key=lambda cell: cell["outcomes"]["g10_artifact"]["planning_s"])
        yield (
            "g10_artifact: longest planning",
            f"{slow['outcomes']['g10_artifact']['planning_s']:.1f} s ({slow['cell']})",
        )


def order_of(cell: Mapping[str, Any]) -> str:
    """Whether the three come out in the order that was published; ties count as either."""
    names = {"lru": "lru", "deepUM": "deepUM", "prefetch_lru": "g10_artifact"}
    published = {name: cell["published_s"].get(name) for name in names}
    ours = {name: cell["outcomes"].get(way, {}).get("predicted_s") for name, way in names.items()}
    if None in published.values() or None in ours.values():
        return ""
    for one, other in (("lru", "deepUM"), ("deepUM", "prefetch_lru"), ("lru", "prefetch_lru")):
        if published[one] > published[other] * 1.005 and ours[one] < ours[other] * 0.995:
            return "other"
        if published[one] < published[other] * 0.995 and ours[one] > ours[other] * 1.005:
            return "other"
    return "same"


def show_cases(console: Console, part: Mapping[str, Any]) -> None:
    """Time over ideal by case and way, with what each way proves."""
    by_group: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for case in part["cases"]:
        by_group[case["group"]].append(case)
    for group, cases in by_group.items():
        ways = list(dict.fromkeys(way for case in cases for way in case["outcomes"]))
        table = Table(title=f"{group}: time over ideal (over the own bound)", title_justify="left", box=None)
        table.add_column("case", no_wrap=True)
        table.add_column("ideal", justify="right")
        for way in ways:
            table.add_column(way, justify="right")
        for case in cases:
            first = next(iter(case["outcomes"].values()))
            table.add_row(
                case["case"],
                seconds(first["ideal_s"]),
                *(over_ideal(case["outcomes"].get(way)) for way in ways),
            )
        console.print(table)


def over_ideal(outcome: Mapping[str, Any] | None) -> str:
    if outcome is None:
        return ""
    if outcome["predicted_s"] is None:
        return "cannot"
    text = f"{outcome['predicted_s'] / outcome['ideal_s']:.3f}"
    proven = outcome["way"].startswith("optimal")
    return f"{text} ({percent(gap(outcome))})" if proven else text


def gap(outcome: Mapping[str, Any]) -> float | None:
    if outcome["predicted_s"] is None or not outcome["bound_s"]:
        return None
    return outcome["predicted_s"] / outcome["bound_s"] - 1


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def seconds(value: float | None) -> str:
    return "-" if value is None else format_seconds(value)


SHOW: dict[str, Callable[[Console, Mapping[str, Any]], None]] = {
    "published": show_published,
    "real": show_cases,
    "demo": show_cases,
}


def plot(part: str, document: Mapping[str, Any], folder: Path) -> list[Path]:
    """Plots of a part, as PNG; the files written."""
    import matplotlib

    matplotlib.use("Agg")
    if part == "published":
        figures = sorted({cell["figure"] for cell in document["cells"]})
        return [
            plot_figure(
                figure,
                [cell for cell in document["cells"] if cell["figure"] == figure],
                folder / f"planners_figure_{figure}.png",
            )
            for figure in figures
        ]
    return [plot_cases(document["cases"], folder / f"planners_{part}.png")]


def plot_figure(figure: int, cells: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Percent of the ideal speed, a row for each family of models."""
    from matplotlib import pyplot

    families: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for cell in cells:
        families["all" if figure == 11 else cell["model"].partition("-")[0]].append(cell)
    drawn, rows = pyplot.subplots(
        len(families), figsize=(11, 1.2 + 2.1 * len(families)), squeeze=False, sharey=True
    )
    for axes, (family, some) in zip(rows[:, 0], families.items(), strict=True):
        for label, marker, values in (
            ("bound", "_", [of_ideal(cell, cell["outcomes"]["optimal"]["bound_s"]) for cell in some]),
            ("optimal", "o", [of_ideal(cell, cell["outcomes"]["optimal"]["predicted_s"]) for cell in some]),
            (
                "penstock g10_artifact",
                "+",
                [of_ideal(cell, cell["outcomes"]["g10_artifact"]["predicted_s"]) for cell in some],
            ),
            (
                "published G10",
                "x",
                [of_ideal(cell, cell["published_s"].get("prefetch_lru")) for cell in some],
            ),
        ):
            axes.plot(range(len(some)), values, marker, label=label, markersize=5)
        axes.set_xticks(range(len(some)), [short(figure, cell) for cell in some], rotation=90, fontsize=6)
        axes.set_ylabel(f"{'' if family == 'all' else family}\n% of ideal", fontsize=7)
        axes.tick_params(axis="y", labelsize=6)
        axes.grid(axis="y", linewidth=0.3)
    rows[0, 0].set_title(f"Figure {figure} of G10, with the artifact's settings", fontsize=9)
    rows[0, 0].legend(fontsize=6, loc="lower left", ncols=4)
    return save(drawn, path)


def short(figure: int, cell: Mapping[str, Any]) -> str:
    """What distinguishes the cell in its figure."""
    model, host, disk, _ = cell["cell"].split(", ")
    batch = model.partition("-")[2]
    return {11: model, 15: batch, 16: f"{batch}, {host}", 18: disk}[figure]


def plot_cases(cases: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Time over ideal, on a logarithmic axis."""
    from matplotlib import pyplot

    ways = list(dict.fromkeys(way for case in cases for way in case["outcomes"]))
    drawn, axes = pyplot.subplots(figsize=(max(6.0, 0.45 * len(cases) + 2), 6))
    for way in ways:
        values = [
            outcome["predicted_s"] / outcome["ideal_s"]
            if (outcome := case["outcomes"].get(way)) and outcome["predicted_s"]
            else float("nan")
            for case in cases
        ]
        axes.plot(range(len(cases)), values, "o", label=way, markersize=4)
    axes.set_xticks(range(len(cases)), [case["case"] for case in cases], rotation=90, fontsize=6)
    axes.set_yscale("log")
    axes.set_ylabel("iteration time over ideal")
    axes.grid(axis="y", which="both", linewidth=0.3)
    axes.legend(fontsize=6)
    return save(drawn, path)


def save(drawn: Any, path: Path) -> Path:
    from matplotlib import pyplot

    drawn.tight_layout()
    drawn.savefig(path, dpi=110)
    pyplot.close(drawn)
    return path


def of_ideal(cell: Mapping[str, Any], time_s: float | None) -> float:
    return 100 * cell["outcomes"]["optimal"]["ideal_s"] / time_s if time_s else float("nan")
