"""The page opens without a network, survives any name, and says what it was given."""

from __future__ import annotations

import base64
import gzip
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.planners import Problem
from penstock.report.html import page
from penstock.report.sweep import PolicyResult, compare_policies
from tests.support.traces import gpt

NASTY = "</script><script>alert(\"{{title}}\")</script> & '{{js}}'"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def machine() -> penstock.Hardware:
    return penstock.Hardware(
        device_bytes=1 << 40,
        disk_bytes=8 << 30,
        disk_read_bytes_per_s=1e8,
        disk_write_bytes_per_s=1e8,
        disk_shares_bus=False,
        name="a slow one",
    )


@pytest.fixture(scope="module")
def trace() -> penstock.Trace:
    plain = gpt()
    return replace(plain, kernel_name=(NASTY, *plain.kernel_name[1:]), notes={"model": NASTY, "batch": "7"})


@pytest.fixture(scope="module")
def plan(trace: penstock.Trace, machine: penstock.Hardware) -> penstock.Plan:
    return penstock.plan(trace, machine, "g10", device_budget=trace.peak_bytes * 2 // 3)


@pytest.fixture(scope="module")
def written(trace: penstock.Trace, plan: penstock.Plan, machine: penstock.Hardware) -> str:
    predicted = penstock.simulate(trace, plan, machine)
    measured = penstock.simulate(trace.scaled(1.1), plan, machine)
    cannot = PolicyResult(policy="keep", reason=NASTY)
    problem = Problem(trace=trace, hardware=machine, budget_bytes=plan.device_budget_bytes)
    found = compare_policies(problem, ["evict_all"], known=plan)
    return page(trace, plan, machine, predicted, measured, [*found, cannot])


def embedded(text: str, name: str) -> Any:
    found = re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def own_markup(text: str) -> str:
    """The page without the plotting library."""
    head, _, rest = text.partition("<script>")
    return head + rest[rest.index("</script>") :]


def test_nothing_is_fetched(written: str) -> None:
    assert "default-src 'none'" in written
    markup = own_markup(written)
    asks = r"""(src|href)\s*=(?!"data:application/gzip;base64,)|@import|url\(|fetch\(|XMLHttpRequest"""
    assert not re.search(asks, markup)


def test_names_stay_names(written: str) -> None:
    markup = own_markup(written)
    assert "<script>alert" not in markup and NASTY not in markup
    assert markup.count("<script") == markup.count("</script>") - 1  # the library's own end is left
    assert "&lt;/script&gt;" in markup
    assert NASTY in embedded(written, "data")["kernels"][0][0]


def test_every_kernel_and_copy_can_be_pointed_at(
    written: str, trace: penstock.Trace, plan: penstock.Plan
) -> None:
    data = embedded(written, "data")
    compute = [row for row in data["rows"] if row["stream"] == "compute"]
    assert [row["source"] for row in compute] == ["predicted", "measured"]
    for row in compute:
        assert [bar[4] for bar in row["bars"] if bar[3] == "k"] == list(range(trace.kernels))
    assert len(data["kernels"]) == trace.kernels
    moved = {str(bar[4]) for row in data["rows"] for bar in row["bars"] if bar[3] == "t"}
    assert moved and moved <= set(data["tensors"])
    assert {str(evict.tensor) for evict in plan.evictions} <= set(data["tensors"])
    some = data["tensors"][str(plan.evictions[0].tensor)]
    assert any(line.startswith("to disk: ") for line in some)
    assert len(data["stalls"]) == sum(bar[3] == "s" for row in data["rows"] for bar in row["bars"])


def test_every_bar_group_has_its_trace(written: str) -> None:
    names = {trace.get("name") for trace in embedded(written, "figure")["data"]}
    rows = embedded(written, "data")["rows"]
    expected = {f"{place}.{group}" for place, row in enumerate(rows) for group in range(len(row["colours"]))}
    assert expected <= names and {"weight", "activation", "measured", "everything in memory"} <= names


def test_the_page_has_the_trace_for_perfetto(
    written: str, trace: penstock.Trace, plan: penstock.Plan, machine: penstock.Hardware, tmp_path: Path
) -> None:
    found = re.search(r'<a download="step.json.gz" href="data:application/gzip;base64,([^"]+)">', written)
    assert found is not None
    predicted = penstock.simulate(trace, plan, machine)
    measured = penstock.simulate(trace.scaled(1.1), plan, machine)
    predicted.save_chrome_trace(tmp_path / "step.json", measured)
    assert gzip.decompress(base64.b64decode(found[1])) == (tmp_path / "step.json").read_bytes()


def test_policies_and_measured_are_shown(written: str) -> None:
    markup = own_markup(written)
    assert "<h2>Policies</h2>" in markup and "<td>evict_all</td>" in markup and "cannot: " in markup
    assert "<h2>Predicted against measured</h2>" in markup
    assert "<h2>Where the step waits</h2>" in markup


def test_a_plan_alone_has_no_such_parts(trace: penstock.Trace, machine: penstock.Hardware) -> None:
    plan = penstock.plan(trace, machine, "keep")
    predicted = penstock.simulate(trace, plan, machine)
    text = page(trace, plan, machine, predicted)
    assert text == page(trace, plan, machine, predicted)
    for part in ("Policies", "Predicted against measured", "Where the step waits"):
        assert f"<h2>{part}</h2>" not in text


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here to open the page in")
def test_a_browser_draws_it(written: str, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(written, encoding="utf-8")
    assert BROWSER is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=8000", "--dump-dom"]
    address = (tmp_path / "page.html").as_uri()
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    shown = subprocess.run(
        [BROWSER, *options, profile, address], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    assert 'data-ready="yes"' in shown
    assert "compute" in shown and "disk write" in shown
