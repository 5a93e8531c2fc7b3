"""One page that shows a plan: self-contained, so that it opens without a network."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.core.hardware import LINKS, Hardware
from penstock.core.plan import Plan
from penstock.core.tables import html_row, html_text
from penstock.core.timeline import Timeline, chrome_trace
from penstock.core.trace import Trace
from penstock.report.chart import EXTRA_COLOURS, LEGEND, PHASE_COLOURS, STALL_COLOURS, chart
from penstock.report.figure import figure, kernel_texts, stall_texts, tensor_text, tensor_texts
from penstock.report.summary import CAUSE_TEXT, CAUSES, SPILL_TIERS, Summary, percent, summarise
from penstock.report.sweep import PolicyResult
from penstock.units import format_bytes, format_seconds

LONGEST_WAITS = 10
HERE = Path(__file__).parent


def page(
    trace: Trace,
    plan: Plan,
    hardware: Hardware,
    predicted: Timeline,
    measured: Timeline | None = None,
    policies: Sequence[PolicyResult] = (),
) -> str:
    """The page's HTML. The same arguments give the same text.

    policies   what every policy makes of the same question; empty: no table of them

    Raises PenstockError where plotly is not installed.
    """
    summary = summarise(trace, plan, predicted)
    shown = chart(trace, plan, predicted, measured)
    drawn = figure(shown)
    from plotly.offline import get_plotlyjs

    tensors = tensor_texts(trace, plan, predicted)
    moved = {bar[4] for row in shown.rows for bar in row.bars if bar[3] == "t"}
    data = {
        "rows": [
            {"stream": row.stream, "source": row.source, "colours": row.colours, "bars": row.bars}
            for row in shown.rows
        ],
        "source": measured is not None,
        "kernels": kernel_texts(trace),
        "tensors": {
            tensor: tensors.get(tensor) or tensor_text(trace, tensor)
            for tensor in sorted(moved | set(tensors))
            if 0 <= tensor < trace.tensors
        },
        "stalls": stall_texts(trace, predicted),
        "measuredStalls": stall_texts(trace, measured) if measured is not None else [],
    }
    parts = {
        "title": html_text(shown.title),
        "subtitle": html_text(_subtitle(trace, plan)),
        "css": (HERE / "page.css").read_text(encoding="utf-8"),
        "js": (HERE / "page.js").read_text(encoding="utf-8"),
        "plotly": get_plotlyjs().replace("</script", "<\\/script"),
        "cards": _cards(summary, measured),
        "shares": _shares(trace, summary),
        "legend": _legend(LEGEND),
        "policies": _policies(policies, summary) if policies else "",
        "measured": _measured(predicted, measured) if measured is not None else "",
        "waits": _waits(trace, predicted),
        "chrome_trace": _chrome_trace([predicted, measured] if measured is not None else [predicted]),
        "footer": html_text(_footer(trace, hardware)),
        "figure": _script(json.loads(drawn.to_json())),
        "data": _script(data),
    }
    template = (HERE / "page.html").read_text(encoding="utf-8")
    # In one pass: what is put in is not looked at again.
    return re.sub(r"{{(\w+)}}", lambda name: parts[name[1]], template)


def _subtitle(trace: Trace, plan: Plan) -> str:
    count = f"{trace.kernels} kernels, {trace.tensors} tensors"
    said = f": {plan.reason}" if plan.reason else ""
    said += f"; {plan.lossy_text}" if plan.lossy else ""
    return f"{count}; policy {plan.policy}{said}"


def _cards(summary: Summary, measured: Timeline | None) -> str:
    ideal = format_seconds(summary.ideal_s)
    over = f"{summary.over_ideal:.2f} x the ideal {ideal}" if summary.over_ideal else ""
    cards = [("predicted step", format_seconds(summary.predicted_step_s), over)]
    if measured is not None:
        off = measured.step_s / summary.predicted_step_s - 1 if summary.predicted_step_s else 0.0
        against = f"{off * 100:+.1f} % against the prediction"
        cards.append(("measured step", format_seconds(measured.step_s), against))
    if summary.gap is not None:
        bound = f"bound {format_seconds(summary.lower_bound_s)}, proven"
        if summary.bound_is_ideal:
            bound = "the bound is the ideal"
        cards.append(("above the bound", percent(summary.gap), bound))
    written = summary.written_bytes
    tiers = [f"{tier} {format_bytes(written[tier])}" for tier in SPILL_TIERS if written[tier]]
    again = f"; {summary.recomputations} tensors recomputed" if summary.recomputations else ""
    of = f"budget {format_bytes(summary.budget_bytes)}, in memory {format_bytes(summary.in_memory_bytes)}"
    moved = (", ".join(tiers) or "nothing moves") + again
    cards += [
        ("predicted peak", format_bytes(summary.peak_bytes), of),
        ("leaves the device", format_bytes(sum(written.values())), moved),
        ("stalls", format_seconds(sum(summary.stall_s.values())), summary.stall_text()),
    ]
    texts = [[html_text(text) for text in card] for card in cards]
    return "".join(
        f'<div class="card"><span>{name}</span><b>{value}</b><span>{note}</span></div>'
        for name, value, note in texts
    )


def _shares(trace: Trace, summary: Summary) -> str:
    """Where the predicted time goes."""
    packing_s = summary.compute_s["compress"] + summary.compute_s["expand"]
    known_s = sum(summary.compute_s.values()) + sum(summary.stall_s.values())
    parts = [
        ("kernels", PHASE_COLOURS["backward"], max(summary.predicted_step_s - known_s, 0.0)),
        ("recomputing", EXTRA_COLOURS["recompute"], summary.compute_s["recompute"]),
        ("compressing and expanding", EXTRA_COLOURS["compress"], packing_s),
        *(
            (f"stalls for {CAUSE_TEXT[cause]}", STALL_COLOURS[cause], summary.stall_s[cause])
            for cause in CAUSES
        ),
    ]
    parts = [part for part in parts if part[2] > 0]
    total_s = sum(part[2] for part in parts) or 1.0
    bar = "".join(
        f'<i style="width:{seconds / total_s:.3%};background:{colour}"></i>' for _, colour, seconds in parts
    )
    words = {
        f"{name} {format_seconds(seconds)} ({percent(seconds / total_s)})": colour
        for name, colour, seconds in parts
    }
    legend = f'<div class="legend">{_legend(words)}</div>'
    return f'<h2>Where the time goes</h2><div class="shares">{bar}</div>{legend}'


def _policies(found: Sequence[PolicyResult], summary: Summary) -> str:
    done = [entry for entry in found if entry.summary is not None]
    longest_s = max([entry.summary.predicted_step_s for entry in done if entry.summary], default=1.0) or 1.0
    bound_s = max([entry.summary.lower_bound_s for entry in done if entry.summary], default=0.0)

    def at(seconds: float) -> str:
        return f"{min(seconds / longest_s, 1.0):.2%}"

    lines = []
    for entry in found:
        chosen = ' class="chosen"' if entry.policy == summary.policy else ""
        if (each := entry.summary) is None:
            lines.append(
                f"<tr{chosen}><td>{html_text(entry.policy)}</td>"
                f'<td class="words faint" colspan="7">cannot: {html_text(entry.reason)}</td></tr>'
            )
            continue
        bound = f'<s style="left:{at(bound_s)}"></s>' if bound_s > each.ideal_s * (1 + 1e-9) else ""
        track = (
            f'<div class="track"><i style="width:{at(each.predicted_step_s)}"></i>'
            f'<s class="ideal" style="left:{at(each.ideal_s)}"></s>{bound}</div>'
        )
        cells = [*each.timing(), str(each.recomputations or "")]
        row = "".join(f"<td>{html_text(cell)}</td>" for cell in cells)
        lines.append(f'<tr{chosen}><td>{html_text(entry.policy)}</td><td class="bar">{track}</td>{row}</tr>')
    titles = ("policy", "", "step", "of ideal", "above bound", "stalls", "evicted", "recomputed")
    ideal = f"Dotted: the ideal, {format_seconds(summary.ideal_s)}."
    line = f" Line: the proven bound, {format_seconds(bound_s)}: no plan is faster." if bound_s else ""
    caption = f'<p class="faint">{html_text(ideal + line)}</p>'
    return f"<section><h2>Policies</h2>{caption}{_table(titles, lines)}</section>"


def _measured(predicted: Timeline, measured: Timeline) -> str:
    def row(name: str, before: float, after: float, show: Any) -> str:
        off = f"{(after / before - 1) * 100:+.1f} %" if before else ("" if not after else "new")
        return html_row([name, show(before), show(after), off])

    lines = [
        row("step", predicted.step_s, measured.step_s, format_seconds),
        row("stalls", predicted.stall_s, measured.stall_s, format_seconds),
        row("kernels", predicted.busy_s("compute"), measured.busy_s("compute"), format_seconds),
        row("peak on the device", predicted.peak_bytes, measured.peak_bytes, format_bytes),
    ]
    for link in LINKS:
        if predicted.moved_bytes(link) or measured.moved_bytes(link):
            name = link.replace("_", " ")
            before, after = predicted.moved_bytes(link), measured.moved_bytes(link)
            lines.append(row(f"{name}, bytes", before, after, format_bytes))
            lines.append(row(f"{name}, busy", predicted.busy_s(link), measured.busy_s(link), format_seconds))
    titles = ("", "predicted", "measured", "difference")
    return f"<section><h2>Predicted against measured</h2>{_table(titles, lines)}</section>"


def _waits(trace: Trace, timeline: Timeline) -> str:
    stalls = list(zip(timeline.stalls, stall_texts(trace, timeline), strict=True))
    stalls.sort(key=lambda entry: entry[0].start_s - entry[0].end_s)
    if not stalls:
        return ""
    lines = []
    for stall, (_, before, *waited) in stalls[:LONGEST_WAITS]:
        times = [format_seconds(stall.end_s - stall.start_s), format_seconds(stall.start_s)]
        cause = CAUSE_TEXT.get(stall.cause, stall.cause)
        lines.append(html_row([*times, cause, before.removeprefix("before "), "".join(waited)]))
    titles = ("stall", "at", "for", "before", "")
    of = f"The longest {len(lines)} of {len(stalls)}" if len(stalls) > len(lines) else f"All {len(stalls)}"
    return (
        f'<section class="waits"><h2>Where the step waits</h2><p class="faint">{of}, as predicted.</p>'
        f"{_table(titles, lines)}</section>"
    )


def _chrome_trace(timelines: Sequence[Timeline]) -> str:
    """A link that saves what `Timeline.save_chrome_trace` writes. It is in the page: nothing is fetched."""
    packed = gzip.compress(msgspec.json.encode(chrome_trace(timelines)), mtime=0)
    data = base64.b64encode(packed).decode()
    below = ", with the measured one below" if len(timelines) > 1 else ""
    return (
        f'<a download="step.json.gz" href="data:application/gzip;base64,{data}">Save the predicted step</a>'
        f"{below}, and open it at ui.perfetto.dev or chrome://tracing."
    )


def _footer(trace: Trace, hardware: Hardware) -> str:
    name = f"{hardware.name}: " if hardware.name else ""
    times = "measured" if trace.measured else "estimated or given"
    return f"Machine: {name}{hardware.in_numbers}. Kernel times are {times}. Made by penstock."


def _table(titles: Sequence[str], lines: Sequence[str]) -> str:
    table = f"<table><thead>{html_row(titles, 'th')}</thead><tbody>{''.join(lines)}</tbody></table>"
    return f'<div class="scroll">{table}</div>'


def _legend(colours: Mapping[str, str]) -> str:
    return "".join(
        f'<span><i style="background:{colour}"></i>{html_text(name)}</span>'
        for name, colour in colours.items()
    )


def _script(value: Any) -> str:
    """JSON that is safe inside a script element, whatever kernels are called."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
