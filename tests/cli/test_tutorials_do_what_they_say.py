"""Each tutorial, from top to bottom: its code runs, and prints what the page shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pages import Reader

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"
PAGES = sorted(path.stem for path in TUTORIALS.glob("*.md"))
LONG = {"budget-and-disk", "hugging-face", "reading-a-report", "several-processes"}


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] * (page in LONG)) for page in PAGES]
)
def test_a_reader_gets_what_the_page_shows(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page == "hugging-face":
        pytest.importorskip("transformers")
        pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    Reader(TUTORIALS / f"{page}.md").read()
