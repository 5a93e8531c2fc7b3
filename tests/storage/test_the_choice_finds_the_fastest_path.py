"""Every tensor goes the fastest path, as far as anyone can know it: on simulated machines, with noise."""

from __future__ import annotations

import copy
import random
from collections import Counter
from itertools import chain, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidArgument, SpillSpaceFull
from penstock.options import ChooseBy
from penstock.storage.choice import Choice
from penstock.storage.costs import Kind
from tests.support.io_paths import PATHS, Costs, Machine, Moved, optimum_s, time_s, train

MIB = 1 << 20
SEEDS = st.integers(0, 2**32)
CALM: Costs = {
    "write": {
        "io_uring direct": 1.0,
        "io_uring staged": 1.2,
        "posix direct": 1.3,
        "posix buffered": 1.5,
        "posix mapped": 2.0,
    },
    "read": {
        "io_uring direct": 1.0,
        "io_uring staged": 1.1,
        "posix direct": 1.2,
        "posix buffered": 1.6,
        "posix mapped": 1.9,
    },
}


def drawn(seed: int) -> Costs:
    """Each path a different cost, at least a tenth apart from the next, in an order of their own."""
    order = random.Random(seed)
    steps = [1.0, 1.1, 1.4, 2.0, 6.0]
    return {
        kind: dict(zip(PATHS, order.sample(steps, len(steps)), strict=True)) for kind in ("write", "read")
    }


def uses(steps: list[list[Moved]], kind: Kind) -> Counter[str]:
    return Counter(moved.path for step in steps for moved in step if moved.kind == kind)


def changed(**costs: dict[str, float]) -> Costs:
    """The calm machine, with other costs for some writes or reads."""
    after = {kind: dict(by_path) for kind, by_path in copy.deepcopy(CALM).items()}
    for kind, by_path in costs.items():
        after[kind].update(by_path)  # type: ignore[index]
    return after


@settings(derandomize=True, max_examples=15)
@given(SEEDS, st.sampled_from([1, 3, 16]))
def test_in_steady_state_it_is_within_3_percent_of_the_best_single_path(seed: int, in_flight: int) -> None:
    machine = Machine(drawn(seed), seed=seed)
    choice = Choice(PATHS)
    for size in (64 << 10, 3 * MIB, 50_000_000):
        steady = train(choice, machine, [size] * 20, 120, in_flight=in_flight)[60:]
        best = min(time_s(steady, machine.cost, path) for path in PATHS)
        assert time_s(steady, machine.cost) <= 1.03 * best


@settings(derandomize=True, max_examples=10)
@given(SEEDS)
def test_over_a_mix_of_sizes_it_beats_every_single_path(seed: int) -> None:
    """Small tensors are fastest through the page cache, middle ones staged, large ones direct."""
    ms = {
        64 << 10: dict(zip(PATHS, (2.0, 1.5, 2.2, 1.0, 1.3), strict=True)),
        MIB: dict(zip(PATHS, (1.5, 1.0, 1.6, 1.4, 1.8), strict=True)),
        32 * MIB: dict(zip(PATHS, (1.0, 1.3, 1.1, 2.5, 3.0), strict=True)),
    }
    machine = Machine(lambda kind, path, size: ms[size][path] * 1e-3, seed=seed)
    moved = train(Choice(PATHS), machine, [*ms] * 8, 60)
    assert time_s(moved, machine.cost) < 0.9 * min(time_s(moved, machine.cost, path) for path in PATHS)
    assert time_s(moved[20:], machine.cost) <= 1.03 * optimum_s(moved[20:], machine.cost)


@settings(derandomize=True, max_examples=8)
@given(SEEDS)
def test_trying_other_paths_costs_less_than_1_percent_when_nothing_changes(seed: int) -> None:
    machine = Machine(drawn(seed), seed=seed)
    choice = Choice(PATHS)
    moved = train(choice, machine, [MIB] * 20, 200)
    tried = uses(moved[20:], "write"), uses(moved[20:], "read")
    assert time_s(moved[20:], machine.cost) <= 1.01 * optimum_s(moved[20:], machine.cost)
    assert all(sum(count > 0 for count in by_path.values()) > 1 for by_path in tried), "but it does try"


@pytest.mark.parametrize("share", [0.002, 0.01, 0.05])
def test_the_share_of_time_spent_on_trying_is_the_one_given(share: float) -> None:
    machine = Machine(CALM, sigma=0, outliers=0)
    moved = train(Choice(PATHS, reexplore=share), machine, [MIB] * 20, 400)[10:]
    overhead = time_s(moved, machine.cost) / optimum_s(moved, machine.cost) - 1
    assert 0.4 * share < overhead <= share * 1.02


def test_without_a_share_nothing_is_tried_after_the_first_transfers() -> None:
    machine = Machine(CALM, sigma=0, outliers=0)
    moved = train(Choice(PATHS, reexplore=0), machine, [MIB] * 20, 50)
    assert set(uses(moved[2:], "write")) == set(uses(moved[2:], "read")) == {"io_uring direct"}


def test_bad_paths_are_tried_rarely_and_near_equal_ones_often() -> None:
    costs = changed(
        write={"io_uring staged": 1.02, "posix direct": 3.0},
        read={"io_uring staged": 1.02, "posix direct": 3.0},
    )
    moved = train(Choice(PATHS), Machine(costs, sigma=0, outliers=0), [MIB] * 20, 400)
    for kind in ("write", "read"):
        tried = uses(moved[10:], kind)
        assert tried["io_uring staged"] > 20 * tried["posix direct"] > 0


def test_equal_paths_neither_alternate_nor_starve() -> None:
    costs: Costs = {kind: dict.fromkeys(PATHS, 1.0) for kind in ("write", "read")}
    noisy = Machine(costs, sigma=0.1, outliers=0.03)
    moved = train(Choice(PATHS, reexplore=0), noisy, [MIB] * 20, 100, in_flight=1)
    paths = [moved.path for step in moved[5:] for moved in step if moved.kind == "write"]
    assert sum(a != b for a, b in pairwise(paths)) < len(paths) / 50
    tried = uses(train(Choice(PATHS), noisy, [MIB] * 20, 100), "write")
    assert min(tried[path] for path in PATHS) > 20


def settle(after: Costs, within: int, seed: int = 0) -> list[list[Moved]]:
    """Train on the calm machine, change it, train for ``within`` transfers, and give the steps after."""
    machine = Machine(CALM, seed=seed)
    choice = Choice(PATHS)
    train(choice, machine, [MIB] * 20, 100)
    machine.cost = Machine(after).cost
    train(choice, machine, [MIB] * 20, within // 40)
    steps = train(choice, machine, [MIB] * 20, 40)
    assert time_s(steps, machine.cost) <= 1.05 * optimum_s(steps, machine.cost)
    return steps


@pytest.mark.parametrize("seed", range(3))
def test_a_best_path_that_becomes_slower_is_left_at_once(seed: int) -> None:
    steps = settle(changed(write={"io_uring direct": 5.0}), within=80, seed=seed)
    assert uses(steps, "write").most_common(1)[0][0] == "io_uring staged"


@pytest.mark.parametrize("seed", range(3))
def test_another_path_that_becomes_faster_is_found(seed: int) -> None:
    steps = settle(changed(write={"posix direct": 0.4}), within=12_000, seed=seed)
    assert uses(steps, "write").most_common(1)[0][0] == "posix direct"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "after", [{"write": {"posix buffered": 0.2}}, {"read": {"posix mapped": 0.1}}], ids=["write", "read"]
)
def test_so_is_one_in_another_medium(after: dict[str, dict[str, float]], seed: int) -> None:
    steps = settle(changed(**after), within=6000, seed=seed)
    (kind, by_path), *_ = after.items()
    assert uses(steps, kind).most_common(1)[0][0] in by_path  # type: ignore[arg-type]


def test_an_outlier_changes_nothing() -> None:
    choice = Choice(PATHS, reexplore=0)
    train(choice, Machine(CALM, sigma=0, outliers=0), [MIB] * 20, 10)
    for _ in range(5):
        assert choice.path_to_write(MIB) == "io_uring direct"
        choice.observe("write", MIB, "io_uring direct", 1.0)
    assert choice.path_to_write(MIB) == "io_uring direct"


@pytest.mark.parametrize(("by", "fastest"), [("both", "both"), ("writes", "wbest"), ("reads", "rbest")])
def test_writes_or_reads_or_both_together_count(by: ChooseBy, fastest: str) -> None:
    """Fastensor's WRDic, WDic and RDic."""
    paths = {"wbest": "a", "rbest": "b", "both": "c"}
    costs: Costs = {
        "write": {"wbest": 1.0, "rbest": 4.0, "both": 1.5},
        "read": {"wbest": 4.0, "rbest": 1.0, "both": 1.5},
    }
    steps = train(Choice(paths, by=by), Machine(costs), [MIB] * 10, 40)[10:]
    assert uses(steps, "write").most_common(1)[0][0] == fastest
    assert uses(steps, "read").most_common(1)[0][0] == fastest


KIB64 = 64 << 10


@given(
    sizes=st.lists(st.integers(1, 1 << 26), min_size=1, max_size=30), reexplore=st.sampled_from([0.0, 0.3])
)
@settings(max_examples=40, deadline=None)
def test_a_fixed_table_is_kept_to(sizes: list[int], reexplore: float) -> None:
    """Whatever the paths cost, and whatever an earlier run has learned."""
    table = {MIB: "io_uring direct", KIB64: "posix mapped", 16 * MIB: "posix direct"}
    known = Choice(PATHS)
    train(known, Machine(CALM), [KIB64, MIB, 32 * MIB], 20)
    choice = Choice(PATHS, by_size=table, reexplore=reexplore, tables=known.tables())
    for moved in chain.from_iterable(train(choice, Machine(CALM), sizes, 3)):
        below = [size for size in table if size <= 1 << moved.size_bytes.bit_length() - 1]
        assert moved.path == table[max(below) if below else KIB64]


def test_a_medium_is_written_by_its_best_path_and_read_by_its_best_path() -> None:
    costs = changed(write={"posix direct": 0.5}, read={"io_uring staged": 0.5, "posix mapped": 0.6})
    steps = train(Choice(PATHS), Machine(costs), [MIB] * 20, 40)[10:]
    assert uses(steps, "write").most_common(1)[0][0] == "posix direct"
    assert uses(steps, "read").most_common(1)[0][0] == "io_uring staged"


def test_transfers_asked_for_before_the_first_cost_are_spread() -> None:
    choice = Choice(PATHS)
    asked = Counter(choice.path_to_write(MIB) for _ in range(100))
    assert set(asked) == set(PATHS) and max(asked.values()) <= 100 / len(PATHS) + 1
    first = [Choice(PATHS).path_to_write(MIB), *(choice.path_to_read(MIB, "disk") for _ in range(6))]
    assert len(set(first[1:4])) == 3 and first[1:4] == first[4:7], "in turn, not one after the other"


def test_after_the_first_explorations_the_best_known_path_is_used_while_others_are_in_flight() -> None:
    choice = Choice(PATHS)
    for _ in range(3 * len(PATHS)):
        choice.path_to_write(MIB)
    choice.observe("write", MIB, "posix direct", 1e-3)
    assert {choice.path_to_write(MIB) for _ in range(100)} == {"posix direct"}


def test_a_class_of_which_nothing_is_known_follows_its_neighbour() -> None:
    choice = Choice(PATHS)
    train(choice, Machine(CALM), [4 * MIB] * 20, 10)
    train(choice, Machine(changed(write={"posix direct": 0.1})), [1 << 30] * 20, 10)
    explorations = [choice.path_to_write(16 * MIB) for _ in range(3 * len(PATHS))]
    assert set(explorations) == set(PATHS)
    assert {choice.path_to_write(16 * MIB) for _ in range(20)} == {"io_uring direct"}


def test_a_path_far_worse_is_spared_the_third_exploration() -> None:
    machine = Machine(changed(write={"posix direct": 4.0}), sigma=0, outliers=0)
    tried = uses(train(Choice(PATHS, reexplore=0), machine, [MIB] * 20, 10, in_flight=1), "write")
    assert tried["posix direct"] == 2 and tried["posix buffered"] == 3


def test_a_withdrawn_exploration_is_made_again() -> None:
    choice = Choice({"a": "disk", "b": "disk"}, reexplore=0)
    assert Counter(choice.path_to_write(MIB) for _ in range(6)) == {"a": 3, "b": 3}
    for _ in range(3):
        choice.observe("write", MIB, "a", 2e-3)
        choice.withdraw("write", MIB, "b")
    assert [choice.path_to_write(MIB) for _ in range(4)] == ["b", "b", "b", "a"]
    choice.observe("write", MIB, "b", 1e-3)
    assert choice.path_to_write(MIB) == "b"


def test_sizes_of_one_power_of_two_share_what_is_known() -> None:
    choice = Choice({"a": "disk", "b": "disk"}, reexplore=0)
    for path, cost_s in (("a", 2e-3), ("b", 1e-3)) * 9:
        choice.observe("write", MIB, path, cost_s)
    assert choice.path_to_write(2 * MIB - 1) == "b"
    assert choice.path_to_write(2 * MIB) == "a", "another class: its explorations begin"
    for path in ("a", "a", "a"):
        choice.observe("write", 2 * MIB - 1, path, 1.9e-3)  # seconds per byte count: now it is the faster one
    assert choice.path_to_write(MIB) == "a"


@pytest.mark.parametrize(("copying_cost_s", "chosen"), [(0.85e-3, "direct"), (0.7e-3, "staged")])
def test_a_path_that_copies_must_be_clearly_faster(copying_cost_s: float, chosen: str) -> None:
    choice = Choice({"direct": "disk", "staged": "disk"}, reexplore=0, copying=["staged"])
    for path, cost_s in (("direct", 1e-3), ("staged", copying_cost_s)) * 9:
        choice.observe("write", MIB, path, cost_s)
    assert choice.path_to_write(MIB) == chosen


def test_a_path_that_copies_is_tried_rarely_where_it_is_no_faster() -> None:
    paths = {"direct": "disk", "staged": "disk"}
    machine = Machine({kind: dict.fromkeys(paths, 1.0) for kind in ("write", "read")}, sigma=0, outliers=0)
    tried = []
    for copying in ((), ("staged",)):
        moved = train(Choice(paths, copying=copying), machine, [MIB] * 20, 200)
        tried.append([uses(steps, "write")["staged"] for steps in (moved[:3], moved[3:])])
    (first, later), (first_copying, later_copying) = tried
    assert first >= 9 and first_copying == 3
    assert later > 5 * later_copying > 0


@settings(max_examples=30)
@given(
    SEEDS,
    st.lists(st.sampled_from([(), ("disk",), ("page cache",), ("disk", "page cache"), None]), max_size=120),
)
def test_media_are_respected_always(seed: int, rooms: list[tuple[str, ...] | None]) -> None:
    """A write goes where there is room, a read where the bytes are; every transfer may be late."""
    machine, choice, order = Machine(drawn(seed)), Choice(PATHS), random.Random(seed)
    pending: list[Moved] = []
    for room in rooms:
        size = order.choice([4096, 70_000, MIB])
        if room == ():
            with pytest.raises(SpillSpaceFull, match="room in none"):
                choice.path_to_write(size, room)
            continue
        path = choice.path_to_write(size, room)
        assert room is None or PATHS[path] in room
        back = choice.path_to_read(size, PATHS[path])
        assert PATHS[back] == PATHS[path]
        pending += [machine.move("write", size, path), machine.move("read", size, back)]
        while pending and order.random() < 0.6:
            done = pending.pop(order.randrange(len(pending)))
            choice.observe(done.kind, done.size_bytes, done.path, done.cost_s)


def test_while_the_best_medium_is_full_the_best_of_the_others_is_used() -> None:
    choice = Choice(PATHS, reexplore=0)
    train(choice, Machine(CALM, sigma=0, outliers=0), [MIB] * 20, 10)
    assert choice.path_to_write(MIB, {"page cache"}) == "posix buffered"
    assert choice.path_to_write(MIB, {"page cache", "disk", "elsewhere"}) == "io_uring direct"
    with pytest.raises(SpillSpaceFull, match="disk or page cache only, but there is room in elsewhere"):
        choice.path_to_write(MIB, {"elsewhere"})


def test_the_same_calls_give_the_same_paths() -> None:
    runs = [train(Choice(PATHS), Machine(CALM, seed=7), [MIB, 3 * MIB] * 5, 60) for _ in range(2)]
    assert runs[0] == runs[1]


def test_a_transfer_has_a_size() -> None:
    with pytest.raises(InvalidArgument, match="size above zero"):
        Choice(PATHS).path_to_write(0)


@pytest.mark.parametrize("reexplore", [-0.1, 1.0])
def test_a_share_that_cannot_be_is_refused(reexplore: float) -> None:
    with pytest.raises(InvalidArgument, match="from 0 to below 1"):
        Choice(PATHS, reexplore=reexplore)
