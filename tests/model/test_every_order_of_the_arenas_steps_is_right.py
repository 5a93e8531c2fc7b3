"""The arena's own threads, in every order of their steps: pairs of actors whole, of three a part. The
whole of it is `make test-model`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model.arena import build, compiler, explore
from tests.model.arena_mutants import MUTANTS

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")

QUICK = ("an overtaken write becomes a copy", "a staging area is given to others with its block")


def test_no_order_gives_other_bytes_or_stands_still(tmp_path: Path) -> None:
    done = explore(build(tmp_path), "--seconds", "3")
    assert done.returncode == 0, done.stdout
    assert "programs" in done.stdout


@pytest.mark.parametrize(
    "mutant", [each for each in MUTANTS if each.name in QUICK], ids=lambda each: each.name
)
def test_a_mistake_shows(tmp_path: Path, mutant) -> None:
    done = explore(build(tmp_path, mutant=mutant), "--seconds", "60")
    assert done.returncode == 1, done.stdout


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda each: each.name)
def test_each_mistake_changes_what_is_there(mutant) -> None:
    from tests.model.arena import ROOT

    assert (ROOT / "csrc" / "arena" / mutant.file).read_text().count(mutant.before) == 1
