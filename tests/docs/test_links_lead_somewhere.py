"""Every link in a page of documentation leads to a file of the repository, and to a heading in it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def prose(page: Path) -> str:
    """A page without its code."""
    text = re.sub(
        r"^( *)(```+).*?^\1\2$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    return re.sub(r"(?<!`)(`+)(?!`).+?(?<!`)\1(?!`)", "", text)


@cache
def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings, and the site; and names that the reference has of the sources."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+?)\s*$", text, flags=re.MULTILINE)
    titles = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    slugs = [re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles]
    unique = {slug for slug in slugs if slugs.count(slug) == 1}  # the others are numbered differently
    return unique | set(re.findall(r"^::: (\S+)$", text, flags=re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)|\]: (\S+)", prose(page))
    for link in (inline or reference for inline, reference in links):
        if re.match(r"[a-z+]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_relative_to(ROOT) and target.exists(), f"{link}: there is no such file"
        if anchor:
            assert anchor in anchors(target), f"{link}: no heading of {target.name} has this anchor"


def test_the_navigation_has_every_page() -> None:
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = re.findall(r"^ +- (?:.+: )?(\S+\.md)$", site, flags=re.MULTILINE)
    assert sorted(named) == sorted(
        str(page.relative_to(ROOT / "docs")) for page in PAGES if "docs" in page.parts
    )
