"""What the soak says of its rows: bits that differ, growth beyond its bounds, and nothing else."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.soak.__main__ import GROWTH, Soak, grown

ROW = st.fixed_dictionaries({name: st.integers(0, 1 << 40) for name in GROWTH})


@given(st.lists(ROW, min_size=3, max_size=8))
def test_what_shrinks_or_stays_has_not_grown(rows: list[dict[str, int]]) -> None:
    assert grown([*rows, rows[1]]) == []
    assert grown([*rows, dict.fromkeys(GROWTH, 0)]) == []


@given(st.lists(ROW, min_size=2, max_size=8), st.sampled_from(sorted(GROWTH)))
def test_what_grows_beyond_its_bound_is_named_alone(rows: list[dict[str, int]], name: str) -> None:
    absolute, share = GROWTH[name]
    within = int(rows[1][name] + absolute + share * rows[1][name])
    assert grown([*rows, {**rows[1], name: within}]) == []
    (said,) = grown([*rows, {**rows[1], name: within + 1}])
    assert said.startswith(f"{name} grew from {rows[1][name]} to {within + 1}")


@pytest.mark.parametrize("rows", range(3))
def test_too_few_rows_tell_nothing(rows: int) -> None:
    assert "soak for longer" in grown([dict.fromkeys(GROWTH, 0)] * rows)[0]


class Trained:
    """A process that has trained, and cannot go back."""

    def __init__(self, step: int, digest: str) -> None:
        self.answer = {"step": step, "digest": digest, "figures": {}, "happened": {}}

    def ask(self, _: str) -> dict[str, Any]:
        return self.answer


@pytest.mark.parametrize(
    ("found", "wanted", "wrong"),
    [
        (Trained(7, "a"), Trained(7, "a"), []),
        (Trained(7, "a"), Trained(7, "b"), ["the bits after step 7 are others"]),
        (Trained(5, "a"), Trained(7, "b"), []),
    ],
)
def test_bits_are_compared_at_one_step(found: Trained, wanted: Trained, wrong: list[str]) -> None:
    soak = Soak.__new__(Soak)
    soak.trainer, soak.reference = found, wanted  # type: ignore[assignment]
    soak.events, soak.wrong = Counter(), []
    soak.compare("row", 0.0)
    assert soak.wrong == wrong
    assert soak.events == {"compared" if found.answer["step"] == wanted.answer["step"] else "behind": 1}
