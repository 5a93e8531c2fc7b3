"""Python's layer over the arena, in a part of the orders that `make test-model` tries. In processes of
their own: what is wrong may crash them."""

from __future__ import annotations

from functools import partial

import pytest

from tests.model.check import alone, explore, follow, seek
from tests.model.configurations import CONFIGURATIONS
from tests.model.layer import source_of
from tests.model.mutants import MUTANTS

STATES = 150

# Orders of which the checker found that they went wrong.
ONCE_WRONG = [
    ("touched", "release A; end write A; release B; prefetch A; look A; end read A; release A"),
    (
        "touched at once",
        "release A; end write A; release B; end write B; prefetch A; look A; prefetch B; look B; end read A; "
        "read A",
    ),
    ("taken", "take; give; release A; release B; prefetch A; end task A; take"),
    ("packed, taken", "take; pack A"),
    ("failing", "release A; end write A; prefetch A; scribble A; read A; fail read A"),
]


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_no_order_is_wrong(name):
    text, found = alone(partial(explore, name, most_states=STATES))
    assert found is False, text


@pytest.mark.parametrize(("name", "path"), ONCE_WRONG)
def test_what_went_wrong_once_goes_right(name, path):
    text, found = alone(partial(follow, name, path.split("; ")))
    assert found is False, text


@pytest.mark.parametrize("mutant", [mutant for mutant in MUTANTS if mutant.fast], ids=lambda one: one.name)
def test_a_mend_that_is_missing_is_found(mutant):
    text, found = alone(partial(seek, mutant))
    assert found is True, text


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: one.name)
def test_each_mutant_takes_out_what_is_there(mutant):
    source_of(mutant.file, ((mutant.old, mutant.new),))
