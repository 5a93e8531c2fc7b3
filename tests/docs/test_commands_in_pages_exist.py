"""Commands that pages name can be typed: the parsers take them, make knows the target, the file is there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from penstock.cli.arguments import parser

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = {
    name for names in re.findall(r"^([\w -]+):(?!=)", MAKEFILE, re.MULTILINE) for name in names.split()
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_pages_exist(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = page.read_text(encoding="utf-8").replace("\\\n", "")
    for typed in re.findall(r"^\$ penstock (.+)$", text, flags=re.MULTILINE):
        arguments = shlex.split(typed, comments=True)
        try:
            parser().parse_args(arguments)
        except SystemExit as left:
            assert left.code in (0, None), f"penstock {typed}: {capsys.readouterr().err}"
    code = [one or other for one, other in re.findall(r"`([^`\n]+)`|^\$ (.+)$", text, flags=re.MULTILINE)]
    for command in code:
        for target in re.findall(r"^(?:\w+=\S+ )*make ([a-z][\w-]*)", command):
            assert target in TARGETS, f"{command}: make has no such target"
        for path in re.findall(r"(?:benchmarks|examples|tests|tools|csrc)/[\w/]+\.\w+", command):
            assert (ROOT / path).exists(), f"{command}: there is no such file"
