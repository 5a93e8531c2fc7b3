"""Values are small tables in a notebook, whatever their names are, and a report is numbers for any logger."""

from __future__ import annotations

import pickle
import re
from dataclasses import fields, replace
from html.parser import HTMLParser
from pathlib import Path

import penstock
from penstock import samples
from penstock.samples.store import SHOWN
from penstock.units import format_bytes, format_rate, format_seconds
from tests.support.traces import gpt

NASTY = "</td><script>alert('&amp;')</script>\udcff"
SHOWN_NASTY = "</td><script>alert('&amp;')</script>\\udcff"  # as text


class Page(HTMLParser):
    """The rows of the tables of a page, and its other text. Only the tags that are expected may be there."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text.encode().decode())  # a page that a browser can be sent
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert tag in ("p", "table", "tr", "td", "th", "ul", "li") and not attributes
        self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1] in ("td", "th"):
            self.rows[-1][-1] += data
        else:
            self.text += data


def test_a_trace_a_plan_a_timeline_and_a_machine(hardware: penstock.Hardware) -> None:
    trace = replace(gpt(), notes={NASTY: NASTY})
    page = Page(trace._repr_html_())
    assert format_seconds(trace.ideal_s) in page.text
    rows = {name: rest for name, *rest in page.rows}
    assert rows[SHOWN_NASTY] == ["", SHOWN_NASTY]
    assert rows["peak with everything in memory"] == ["", format_bytes(trace.peak_bytes)]
    assert sum(int(row[0]) for name, row in rows.items() if name.startswith("kernels")) == trace.kernels
    assert sum(int(row[0]) for name, row in rows.items() if name.startswith("tensors")) == trace.tensors

    plan = penstock.plan(trace, hardware, "g10", device_budget=trace.peak_bytes * 2 // 3)
    page = Page(replace(plan, reason=NASTY)._repr_html_())
    assert page.text == f"penstock plan, policy g10: {SHOWN_NASTY}"
    rows = {name: rest for name, *rest in page.rows}
    assert rows["predicted step"] == [format_seconds(plan.predicted_step_s)]
    assert rows["evictions"] == [f"{len(plan.evictions)} to disk"] and plan.evictions
    assert rows["device budget"] == [format_bytes(plan.device_budget_bytes)]

    timeline = penstock.simulate(trace, plan, hardware)
    page = Page(timeline._repr_html_())
    assert page.text == "penstock timeline, simulated"
    rows = {name: rest for name, *rest in page.rows}
    assert rows["step"] == [format_seconds(timeline.step_s), ""]
    moved = format_seconds(timeline.busy_s("disk_write")), format_bytes(timeline.moved_bytes("disk_write"))
    assert rows["disk write"] == [*moved]
    assert rows["peak, device"] == ["", format_bytes(timeline.peak_bytes)]

    page = Page(replace(hardware, name=NASTY)._repr_html_())
    assert page.text == f"penstock hardware: {SHOWN_NASTY}"
    rows = {name: rest for name, *rest in page.rows}
    assert rows["device"] == [format_bytes(hardware.device_bytes)]
    assert rows["disk read"] == [format_rate(hardware.disk_read_bytes_per_s)]


def test_a_batch(tmp_path: Path) -> None:
    names = [NASTY, *(f"sample {index}" for index in range(SHOWN + 5))]
    samples.pack([(name, bytes(index)) for index, name in enumerate(names)], tmp_path / "store")
    with samples.mount(tmp_path / "store") as store:
        batch = store.read_many(range(len(names)))
        page = Page(batch._repr_html_())
        few = Page(store.read_many([3])._repr_html_())
        none = Page(store.read_many([])._repr_html_())
    assert f"{len(names)} samples" in page.text and f"the first {SHOWN} of them" in page.text
    assert page.rows[:2] == [["index", "size", "name"], ["0", "0 B", SHOWN_NASTY]]
    assert page.rows[2] == ["1", "1 B", "sample 0"] and len(page.rows) == SHOWN + 1
    assert few.rows[1:] == [["3", "3 B", "sample 2"]] and "first" not in few.text
    assert none.rows == [["index", "size", "name"]]
    assert pickle.loads(pickle.dumps(batch))._repr_html_() == batch._repr_html_(), "in another process, too"


def given_report() -> penstock.Report:
    types = {"int": 3, "float": 0.5, "str": NASTY, "bool": True}
    values = {
        field.name: types[str(field.type)] for field in fields(penstock.Report) if str(field.type) in types
    }
    return penstock.Report(
        **values,  # type: ignore[arg-type]
        moved_bytes_by_kind={"weight": 5, "optimizer_state": 6},
        moved_bytes_by_io_path={"io_uring direct": 7},
        variants={NASTY: 8},
        unavailable_transports={"kvikio": NASTY},
    )


def test_a_report_is_a_table_and_numbers() -> None:
    report = given_report()
    assert Page(report._repr_html_()).rows[0] == ["", "predicted", "measured"]
    numbers = report.as_dict()
    assert all(type(value) in (int, float) for value in numbers.values())
    assert all(re.fullmatch(r"[A-Za-z0-9_./-]+", name) for name in numbers)
    assert numbers["direct_io"] == 1 and numbers["step_s"] == 0.5 and numbers["peak_bytes"] == 3
    assert numbers["moved_bytes_by_kind/optimizer_state"] == 6
    assert numbers["moved_bytes_by_io_path/io_uring_direct"] == 7
    assert 8 in numbers.values()
    assert not {"device", "reason", "endurance_bytes", "unavailable_transports/kvikio"} & set(numbers)
    assert replace(report, endurance_bytes=9).as_dict()["endurance_bytes"] == 9
    numeric = {field.name for field in fields(report) if str(field.type) in ("int", "float", "bool")}
    assert numeric <= set(numbers), "nothing is left out"


def test_the_reference_or_the_page_says_what_each_figure_is() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reports.md").read_text(encoding="utf-8")
    said = set(re.findall(r"\w+", f"{penstock.Report.__doc__} {page}"))
    assert {name.partition("/")[0] for name in given_report().as_dict()} <= said
