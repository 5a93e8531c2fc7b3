"""What the soak says of its rows: growth beyond its bounds, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.soak.__main__ import GROWTH, grown

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
