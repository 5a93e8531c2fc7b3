"""The code on a page of documentation, and a reader who does what the page says.

A page's blocks, in order:

- ``python``: run in the page's one interpreter; with a title, ``python title="train.py"``, a file to write.
- ``text`` after a block that was run: what it prints.
- ``console``: after each ``$``, a command for the shell, and below it what it prints.
- ``sh``: for the reader's machine alone, and not run.

``...`` stands for any text. A comment before a block says more of it, without showing:

- ``<!-- figures vary -->``: numbers and their units may be others than those shown.
- ``<!-- checksums vary -->``: those of eight hexadecimal digits may be others: processors round differently.
- ``<!-- lines vary -->``: more than that; only what lines begin with, up to a figure, is compared, and others
  may come in between.
- ``<!-- output varies -->``: it is another on each machine, and is not compared.
- ``<!-- exit code 2 -->``: how the block's last command ends; else with 0.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from tests.support.apart import Program, Running

SHELL_S = 120  # for one command
FIGURES, CHECKSUMS, LINES, OUTPUT = "figures vary", "checksums vary", "lines vary", "output varies"
EXIT_CODE = "exit code "

_TITLE = re.compile(r'title="([^"]+)"')
_COMMENT = re.compile(r"<!-- (.*?) -->")
_NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?(?: ?(?:[KMGT]?i?B(?:/s)?|[mun]?s)\b)?")
_CHECKSUM = re.compile(r"\b[0-9a-f]{8}\b")
_RULE = re.compile("─+")
_ALONE = re.compile(r"(?P<command>(?:python \S+\.py|penstock)[^;&|<>$`*?~]*)(?P<asked>; echo \$\?)?")
_PENSTOCK = "import os, sys; os.dup2(1, 2); from penstock.cli import main; sys.exit(main())"


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    language   python, text, console or another
    title      the file that it is to be written to; empty: none
    line       of the page, at which the text begins, from 0
    said       what the comment before it says
    """

    language: str
    title: str
    text: str
    line: int
    said: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        found = [said for said in self.said if said.startswith(EXIT_CODE)]
        return int(found[0].removeprefix(EXIT_CODE)) if found else 0


def blocks(page: Path) -> Iterator[Block]:
    said: tuple[str, ...] = ()
    for token in MarkdownIt().parse(page.read_text(encoding="utf-8")):
        if token.type == "html_block":
            said = tuple(_COMMENT.findall(token.content))
        elif token.type == "fence":
            assert token.map is not None
            language, _, more = token.info.partition(" ")
            title = _TITLE.search(more)
            yield Block(language, title[1] if title else "", token.content, token.map[0] + 1, said)
            said = ()


class Reader:
    """Does what a page says, in the current folder. Raises AssertionError where something else is printed."""

    def __init__(self, page: Path, environment: dict[str, str] | None = None) -> None:
        self._page = page
        self._environment = environment or {}
        self._names: dict[str, Any] = {"__name__": "__main__"}
        self._printed: str | None = None  # by the last block, where nothing was compared yet

    def read(self) -> None:
        for block in blocks(self._page):
            self._follow(block)

    def _follow(self, block: Block) -> None:
        if block.title:
            path = Path(block.title)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            self._printed = self._run(block)
        elif block.language == "console":
            self._type(block)
        elif block.language == "text":
            assert self._printed is not None, f"{self._where(block)}: nothing was run before this output"
            self._compare(block, block.text, self._printed)
            self._printed = None
        elif block.language != "sh":
            raise AssertionError(f"{self._where(block)}: nobody knows how to run {block.language!r}")

    def _run(self, block: Block) -> str:
        printed = io.StringIO()
        source = "\n" * block.line + block.text  # a traceback names the page's own lines
        with contextlib.redirect_stdout(printed):
            exec(compile(source, str(self._page), "exec", dont_inherit=True), self._names)
        return printed.getvalue()

    def _type(self, block: Block) -> None:
        """Commands follow one by one; all but the last have to succeed."""
        commands = re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]
        assert commands, f"{self._where(block)}: a console without a command"
        for number, command in enumerate(commands, start=1):
            command, _, expected = command.replace("\\\n", "").partition("\n")
            code, printed = self._done(command)
            wanted = block.exit_code if number == len(commands) else 0
            assert code == wanted, (
                f"{self._where(block)}: {shlex.quote(command)} ended with {code}:\n{printed}"
            )
            self._compare(block, expected, printed)

    def _done(self, command: str) -> tuple[int, str]:
        """How it ends, and what it prints. Python and penstock alone need no shell, and have imported."""
        environment = {"COLUMNS": "100", **self._environment}
        if alone := _ALONE.fullmatch(command):
            name, *arguments = shlex.split(alone["command"])
            source = _PENSTOCK if name == "penstock" else Path(arguments.pop(0))
            done = Running(Program(source, tuple(arguments), environment)).end(SHELL_S)
            code, printed = done.returncode, done.stdout + done.stderr
            if code < 0:  # as a shell tells of it
                code, printed = 128 - code, f"{printed}{signal.strsignal(-code)}\n"
            return (0, f"{printed}{code}\n") if alone["asked"] else (code, printed)
        done = subprocess.run(
            ["timeout", str(SHELL_S), "bash", "-c", command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            env={
                **os.environ,
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                **environment,
            },
        )
        return done.returncode, done.stdout

    def _compare(self, block: Block, expected: str, printed: str) -> None:
        if OUTPUT in block.said:
            return
        if LINES in block.said:
            printed_lines = iter(_beginnings(printed))
            missing = [line for line in _beginnings(expected) if line not in printed_lines]
            assert not missing, f"{self._where(block)}: no line begins with {missing[0]!r} there:\n{printed}"
            return
        if CHECKSUMS in block.said:
            expected, printed = (_CHECKSUM.sub("checksum", text) for text in (expected, printed))
        clean = _without_figures if FIGURES in block.said else _lines
        shown, found = clean(expected), clean(printed)
        pattern = ".*?".join(re.escape(part) for part in shown.split("..."))
        assert re.fullmatch(pattern, found, flags=re.DOTALL), (
            f"{self._where(block)} shows\n\n{shown}\n\nand what was printed is\n\n{found}"
        )

    def _where(self, block: Block) -> str:
        return f"{self._page.name}, line {block.line}"


def _lines(text: str) -> str:
    """Without spaces at ends of lines, and without empty lines around."""
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")


def _without_figures(text: str) -> str:
    """With # for every number and its unit, and columns of no width."""
    return _lines(re.sub(" *\n *| +", _one_space, _RULE.sub("─", _NUMBER.sub("#", text))))


def _beginnings(text: str) -> list[str]:
    """Of lines, up to a figure, a colon or a parenthesis; none of those that begin with one."""
    lines = (re.split(r"[#:(]|[.]{3}", line)[0].strip() for line in _without_figures(text).splitlines())
    return [line for line in lines if line]


def _one_space(spaces: re.Match[str]) -> str:
    return "\n" if "\n" in spaces[0] else " "
