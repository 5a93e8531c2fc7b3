"""Every public name has its place in the reference, and every place there is a public name."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

import penstock
from penstock import checkpoint, distributed, samples

PAGES = sorted((Path(__file__).parents[2] / "docs" / "reference").glob("*.md"))
PLACES = re.findall(
    r"^::: (\S+)$", "\n".join(page.read_text(encoding="utf-8") for page in PAGES), re.MULTILINE
)


@pytest.mark.parametrize(
    "package", [penstock, samples, checkpoint, distributed], ids=lambda module: module.__name__
)
def test_every_public_name_is_in_the_reference(package: object) -> None:
    elsewhere = {name for name in penstock.__all__ if package is checkpoint}  # penstock.save is penstock's
    names = {f"{package.__name__}.{name}" for name in package.__all__ if name not in elsewhere}  # type: ignore[attr-defined]
    assert names - set(PLACES) == set()


def test_every_place_in_the_reference_has_a_name() -> None:
    for place in PLACES:
        package, _, name = place.rpartition(".")
        if not package.startswith("penstock.integrations"):  # whose libraries may be missing
            assert hasattr(import_module(package), name), place
    assert len(PLACES) == len(set(PLACES))
