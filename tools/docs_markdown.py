"""What is penstock's own in the site's Markdown. The pages stay plain Markdown, which GitHub shows, too.

- A link to a file outside of docs/ leads to the repository.
- `<!-- commands -->` becomes the command line's help, out of its parsers.
- `<!-- errors -->` becomes the list of all texts that the pages beside it explain, and `<!-- error box -->`
  what looks for one (docs/javascripts/errors.js).
- `<!-- bars: COLUMN | CAPTION -->` becomes a picture of a column of the table below it.
- A list of the page's own sections is left out: it stands at the side.
- Short cells of tables are not broken.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from html import escape
from itertools import dropwhile, takewhile
from math import log
from pathlib import Path
from statistics import fmean
from typing import Any
from xml.etree.ElementTree import Element

from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor
from markdown.treeprocessors import Treeprocessor
from zensical.extensions.context import ContextPreprocessor

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


class Penstock(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.register(Generated(md), "penstock_generated", 100)
        md.treeprocessors.register(SourceLinks(md), "penstock_links", 0)
        md.treeprocessors.register(Layout(md), "penstock_layout", 0)


def makeExtension(**options: Any) -> Penstock:
    return Penstock(**options)


def page_of(md: Markdown) -> Path:
    """The file that is rendered."""
    context = ContextPreprocessor.from_markdown(md)
    assert context is not None, "the page is not known: the site is built by zensical"
    return DOCS / context.page.path


class SourceLinks(Treeprocessor):
    """Links that leave docs/ lead to the repository; a link to nothing fails the build."""

    def run(self, root: Element) -> None:
        for link in root.iter("a"):
            href = link.get("href", "")
            if re.match(r"[a-z+]+:|//|#|$", href):
                continue
            path, mark, anchor = href.partition("#")
            target = (page_of(self.md).parent / path).resolve()
            if target.is_relative_to(DOCS):
                continue
            if not target.exists():
                raise FileNotFoundError(f"{page_of(self.md)} links to {href}, which is not there")
            repository = ContextPreprocessor.from_markdown(self.md).config["extra"]["repository"]  # type: ignore[union-attr]
            kind = "tree" if target.is_dir() else "blob"
            place = f"{repository}/{kind}/main/{target.relative_to(ROOT)}" if repository else target.as_uri()
            link.set("href", f"{place}{mark}{anchor}")


class Layout(Treeprocessor):
    """What a wide page does not need, and what a table does."""

    def run(self, root: Element) -> None:
        for part in list(root):
            links = [link.get("href", "") for link in part.iter("a")]
            if (
                part.tag == "ul"
                and len(links) == len(part) > 2
                and all(href.startswith("#") for href in links)
            ):
                root.remove(part)
        for cell in root.iter("td"):
            if len("".join(cell.itertext())) <= 18:
                cell.set("class", "short")


class Generated(Preprocessor):
    """Puts in what is generated, as Markdown, in the place of a comment that names it."""

    def run(self, lines: list[str]) -> list[str]:
        made = {
            "<!-- commands -->": commands,
            "<!-- errors -->": lambda: errors(page_of(self.md)),
            "<!-- error box -->": lambda: [BOX],
        }
        out = []
        for number, line in enumerate(lines):
            if bars_of := re.fullmatch(r"<!-- bars: (.+?) \| (.+) -->", line):
                out += bars(lines[number + 1 :], *bars_of.groups())
            else:
                out += made[line]() if line in made else [line]
        return out


BOX = '<textarea id="error-text" rows="3" placeholder="Paste the error here"></textarea>'


def bars(lines: list[str], column: str, caption: str) -> Iterator[str]:
    """A column of the next table as bars, each row with a number; logarithmic where they differ much.

    Where a cell has several numbers, such as "1.00, 1.03", the bar is their mean; brackets are left out.
    """
    table = list(dropwhile(lambda line: not line.startswith("|"), lines))
    table = list(takewhile(lambda line: line.startswith("|"), table))
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table)
    cells = [(row[0], row[head.index(column)].partition("(")[0].strip(" *")) for row in rows]
    found = [
        (label, cell, numbers) for label, cell in cells if (numbers := re.findall(r"\d+(?:\.\d+)?", cell))
    ]
    means = [fmean(map(float, numbers)) for _, _, numbers in found]
    most, least = max(means), min(means)
    logarithmic = most > 40 * least
    says = escape(caption) + (", logarithmic" if logarithmic else "")
    yield f'<figure class="bars"><figcaption>{says}</figcaption>'
    for (label, cell, _), mean in zip(found, means, strict=True):
        share = 0.05 + 0.95 * log(mean / least) / log(most / least) if logarithmic else mean / most
        ours = ' class="ours"' if "**penstock**" in label else ""
        text = escape(re.sub(r"[*`]", "", label))
        bar = f'<b style="--share: {share:.3f}"></b>'
        yield f"<div{ours}><span>{text}</span>{bar}<span>{escape(cell)}</span></div>"
    yield from ("</figure>", "")


def errors(index: Path) -> Iterator[str]:
    """The texts in the headings of the pages that `index` names, as links."""
    for name in re.findall(r"^\| \[.+?\]\((.+?)\)", index.read_text(encoding="utf-8"), flags=re.MULTILINE):
        page = (index.parent / name).read_text(encoding="utf-8")
        if found := re.findall(r"^##+ (`.*)$", page, flags=re.MULTILINE):
            yield from ("", f"### {page.splitlines()[0].removeprefix('# ')}", "")
            yield from (f"- [{heading}]({name}#{slug(heading)})" for heading in found)


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading, and so the site."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def commands() -> Iterator[str]:
    """Every command: its help, how it is called, and its options."""
    from penstock.cli.arguments import parser

    def described(command: argparse.ArgumentParser, says: str, level: int) -> Iterator[str]:
        subcommands = [a for a in command._actions if isinstance(a, argparse._SubParsersAction)]
        if not subcommands:
            # argparse breaks lines at the width of the terminal, which a page does not have.
            command.formatter_class = lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=88)
            yield from ("", f"{'#' * level} {command.prog}", "", f"{says[:1].upper()}{says[1:]}.")
            yield from ("", "```text", *command.format_usage().strip().splitlines(), "```", "")
            formatter = command._get_formatter()
            yield "<div class='options' markdown='1'>\n"
            for action in command._actions:
                if not isinstance(action, argparse._HelpAction):
                    yield from (f"`{formatter._format_action_invocation(action)}`", "")
                    yield from (f":   {escaped(formatter._expand_help(action))}", "")
            yield "</div>\n"
            if command.epilog:
                yield from ("", "```text", *command.epilog.strip().splitlines(), "```")
        for action in subcommands:
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            if level > 2 or command.prog.count(" "):
                yield from ("", f"{'#' * level} {command.prog}", "", f"{says[:1].upper()}{says[1:]}.")
            for name, sub in action.choices.items():
                yield from described(sub, helps.get(name, ""), level + bool(command.prog.count(" ")))

    yield from described(parser(), "", 2)


def escaped(text: str) -> str:
    return re.sub(r"([*_<>\[\]])", r"\\\1", " ".join(text.split()))
