"""Every policy's plans run, with the bits of training in memory. One that cannot reach a budget says so."""

from __future__ import annotations

import logging
import re
from functools import cache
from pathlib import Path

import pytest

import penstock
from penstock.planners import POLICIES
from penstock.runtime.report import NO_POLICY
from penstock.units import parse_bytes
from tests.support.runs import Bits, Program, budgets, differences, family_training, in_memory, offloaded

FAMILIES = ("gpt", "cnn")
STEPS = 6  # one that makes the optimizer's state, one traced, three recorded, one at full speed


def training(family: str) -> Program:
    return family_training(family, STEPS)


@cache
def expected(family: str) -> Bits:
    return in_memory(training(family))


@pytest.fixture(scope="module")
def budget_of(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """By family: four tenths of the way from the smallest budget to one that holds everything."""
    return {
        family: budgets(training(family), tmp_path_factory.mktemp("spill"), 0.4)[0] for family in FAMILIES
    }


def named_bytes(message: str) -> int | None:
    """The budget that a policy says it needs."""
    named = re.search(r"needs (?:a device budget of )?([\d.]+ \w+)", message)
    return parse_bytes(named[1]) if named is not None else None


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "keep"])
def test_a_policy_keeps_the_bits_at_a_budget_that_it_reaches(
    policy: str, family: str, budget_of: dict[str, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    budget_bytes = budget_of[family]
    with caplog.at_level(logging.WARNING, logger="penstock"):
        found, report = offloaded(training(family), budget_bytes, tmp_path, policy=policy)
    while report.policy == NO_POLICY:  # FlashNeuron moves activations alone: it is given what it asks for
        assert f"the least recently used tensors leave first: {report.reason}" in caplog.text
        assert differences(expected(family), found) == []
        least_bytes = named_bytes(report.reason)
        assert policy == "flashneuron" and least_bytes is not None
        budget_bytes = least_bytes
        found, report = offloaded(training(family), budget_bytes, tmp_path, policy=policy)
    assert report.policy == policy
    assert differences(expected(family), found) == []
    assert report.recomputed_bytes > 0 or (report.evicted_bytes > 0 and report.loaded_bytes > 0)
    assert report.peak_bytes <= budget_bytes
    assert report.trace_mismatches == 0, "the second step is foreseen"


def test_keep_moves_nothing_where_everything_fits(tmp_path: Path) -> None:
    found, report = offloaded(training("gpt"), "1GiB", tmp_path, policy="keep")
    assert differences(expected("gpt"), found) == []
    assert report.policy == "keep" and report.evicted_bytes == 0


def test_a_policy_that_cannot_reach_the_budget_is_named_with_what_it_needs(
    budget_of: dict[str, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="penstock"):
        found, report = offloaded(training("gpt"), budget_of["gpt"], tmp_path, policy="keep")
    assert differences(expected("gpt"), found) == []
    assert report.policy == NO_POLICY
    assert "'keep' needs" in report.reason and "'keep' needs" in caplog.text
    assert (named_bytes(report.reason) or 0) > budget_of["gpt"]
    assert report.peak_bytes <= budget_of["gpt"]


def test_a_policy_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(penstock.InvalidArgument, match="there is no policy 'belady': choose keep"):
        penstock.offload(
            device_budget="1GiB", spill_dir=tmp_path, planning=penstock.PlanOptions(policy="belady")
        )
