"""What the troubleshooting pages explain the sources can say, and every error is explained."""

from __future__ import annotations

import ast
import builtins
import inspect
import itertools
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from penstock import errors

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "troubleshooting").glob("*.md"))
OURS = {
    name
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and kind.__module__ == errors.__name__
}
# What PyTorch, safetensors, the system and libraries of processes say.
OF_OTHERS = {
    "one of the variables needed for gradient computation has been modified by an inplace operation: …",
    "this tensor's bytes are away, below the device: they come back when an operator of the thread that "
    "called penstock.offload uses it. Do not take its address from C++, nor use it from other threads.",
    ".numpy() is not supported for tensor subclasses.",
    "Gloo connectFullMesh failed with … Connection refused",
    "OSError: [Errno 14] Bad address",
    "OSError: … requested and 0 written",
    "SafetensorError: … Bad address (os error 14)",
    "<file>: No such file or directory",
    "No matching distribution found for torch",
    "Could not find a version that satisfies the requirement torch",
    "Running HiGHS 1.16.0 (git hash: …): Copyright (c) … under MIT licence terms",
}


def messages(page: Path) -> list[str]:
    """The texts in the page's headings."""
    headings = re.findall(r"^##+ (`+)(.+)\1$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [text for _, text in headings]


def constants(tree: ast.Module) -> dict[str, str]:
    """The texts that have a name in a module."""
    return {
        node.targets[0].id: str(node.value.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }


def templates(tree: ast.Module, names: dict[str, str]) -> Iterator[str]:
    """Every text of a Python file but docstrings, with an ellipsis for each value that is put in."""

    def text_of(part: ast.expr) -> str:
        if isinstance(part, ast.FormattedValue):
            return names.get(part.value.id, "…") if isinstance(part.value, ast.Name) else "…"
        return str(part.value) if isinstance(part, ast.Constant) else "…"

    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(map(text_of, node.values))


@cache
def sources() -> dict[str, set[str]]:
    """By file of the sources, Python and C++, the pairs of words in its texts."""
    files = [*(ROOT / "src").rglob("*.py")]
    trees = {str(file): ast.parse(file.read_text(encoding="utf-8")) for file in files}
    names = {name: text for tree in trees.values() for name, text in constants(tree).items()}
    texts = {file: list(templates(tree, names)) for file, tree in trees.items()}
    literal = r'"(?:[^"\\\n]|\\.)*"'
    for file in (ROOT / "csrc").rglob("*.?pp"):
        groups = re.findall(rf"{literal}(?:\s*{literal})*", file.read_text(encoding="utf-8"))
        texts[str(file)] = [re.sub(r'"\s*"', "", group) for group in groups]
    return {file: {pair for text in found for pair in pairs(text)} for file, found in texts.items()}


def pairs(text: str) -> list[str]:
    """Words that follow each other, and where no other word is beside it, a word."""
    found = []
    for part in text.split("…"):
        words = re.findall(r"\w[\w.'-]*\w|\w", part)
        found += [f"{first} {second}" for first, second in itertools.pairwise(words)] or words
    return found


def share_in_sources(text: str) -> float:
    """The share of its pairs of words that one file has: a message is made of several texts."""
    wanted = pairs(text)
    return max(sum(pair in found for pair in wanted) for found in sources().values()) / len(wanted)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_message_is_in_the_sources(page: Path) -> None:
    for message in messages(page):
        if message not in OF_OTHERS:
            assert share_in_sources(message) >= 0.5, f"no file of the sources says {message!r}"
            for part in message.split("…"):
                whole = len(pairs(part)) < 3 or share_in_sources(part) >= 0.4
                assert whole, f"no file of the sources says {part!r} of {message!r}"


def test_every_error_is_explained_and_every_explained_error_exists() -> None:
    named = {
        name
        for page in PAGES
        for name in re.findall(r"`(?:penstock\.)?([A-Z]\w+)`", page.read_text(encoding="utf-8"))
    }
    assert named >= OURS
    errors_named = {
        name for name in named if re.search(r"(Error|Full|Failed|Unavailable|Invalid\w+|TooSmall)$", name)
    }
    assert {name for name in errors_named - OURS if not hasattr(builtins, name)} == set()
