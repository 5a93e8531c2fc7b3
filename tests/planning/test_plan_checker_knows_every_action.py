"""Wrapping periods, parts of periods, recomputation, compression and variants: what is legal
passes, and each way to get it wrong is named."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from penstock.core.check import check
from penstock.core.columns import Lists
from penstock.core.memory_profile import resident_bytes
from penstock.core.plan import Evict, Plan, Recompute
from penstock.core.trace import Trace, Variant
from tests.support.traces import Step, machine, recompute_links

HARDWARE = machine(host_bytes=2**40)
ROOMY = 10**6


def chain() -> Trace:
    """weight, x -> a -> b -> c; then the same backwards; then the weight is updated. Ten kernels.

    Tensors, bytes and the kernels that use them: 0 weight 100 (0, 9), 1 frozen weight 10 (2, 3),
    2 x 50 (0, 8), 3 a 1000 (0, 1, 7), 4 b 1000 (1, 2, 6), 5 c 1000 (2, 5), 6 gradient 20 (5, 6, 7, 9).
    """
    step = Step()
    weight = step.tensor(100, "weight", persistent=True)
    frozen = step.tensor(10, "weight", persistent=True)
    x, a, b, c = step.tensor(50, "input"), *(step.tensor(1000) for _ in range(3))
    gradient = step.tensor(20, "gradient")
    step.kernel("make_a", 1.0, [x, weight], [a], workspace_bytes=7)
    step.kernel("make_b", 1.0, [a], [b])
    step.kernel("make_c", 1.0, [b, frozen], [c])
    step.kernel("rest3", 1.0, [frozen])
    step.kernel("rest4", 1.0)
    step.kernel("use_c", 1.0, [c], [gradient], phase="backward")
    step.kernel("use_b", 1.0, [b, gradient], [gradient], phase="backward")
    step.kernel("use_a", 1.0, [a, gradient], [gradient], phase="backward")
    step.kernel("use_x", 1.0, [x], phase="backward")
    step.kernel("update", 1.0, [weight, gradient], [weight], phase="optimizer")
    made = step.trace()
    return replace(
        made,
        tensor_recompute=recompute_links(made),
        tensor_density=np.where(np.arange(made.tensors) == 3, 0.1, 1.0),
        kernel_variants=((Variant("small", 2.0, 0),), *((),) * 9),
    )


def violations(
    *rows: Evict | Recompute,
    trace: Trace | None = None,
    budget: int = ROOMY,
    variants: tuple[int, ...] = (),
) -> list[str]:
    plan = Plan(
        policy="test",
        device_budget_bytes=budget,
        evictions=tuple(row for row in rows if isinstance(row, Evict)),
        recomputations=tuple(row for row in rows if isinstance(row, Recompute)),
        variants=variants,
    )
    return check(trace or chain(), plan, HARDWARE)


def named(sentences: list[str], words: str) -> None:
    assert len(sentences) == 1, sentences
    assert re.search(words, sentences[0]), sentences[0]


A, B, C, WEIGHT, FROZEN = 3, 4, 5, 0, 1
AGAIN = Recompute(A, 2, 7)


def test_the_periods_are_as_described() -> None:
    periods = {(period.tensor, period.begin, period.end, period.ready) for period in chain().inactive_periods}
    assert periods == {
        (0, 1, 9, -1),
        (1, 4, 12, -1),
        (2, 1, 8, -1),
        (3, 2, 7, 0),
        (4, 3, 6, 1),
        (5, 3, 5, 2),
        (6, 8, 9, 7),
    }


class TestPartsOfPeriods:
    def test_a_part_is_legal_where_every_tensor_may_leave(self) -> None:
        assert violations(Evict(A, 0, 3, 5, 5)) == []

    def test_two_parts_of_one_period(self) -> None:
        assert violations(Evict(A, 0, 2, 4, 4), Evict(A, 0, 5, 7, 7)) == []
        named(violations(Evict(A, 0, 2, 4, 4), Evict(A, 0, 3, 7, 7)), "begins before the one during")


class TestWrapping:
    def test_a_frozen_weight_is_away_over_the_end(self) -> None:
        assert violations(Evict(FROZEN, 3, 4, 12, 11)) == []
        assert violations(Evict(FROZEN, -1, 10, 12, 12)) == []
        named(violations(Evict(FROZEN, -1, 11, 12, 12)), "outside the tensor's inactive periods")
        named(violations(Evict(FROZEN, 3, 4, 13, 12)), "outside the tensor's inactive periods")

    def test_memory_counts_on_both_sides_of_the_end(self) -> None:
        trace = chain()
        freed = resident_bytes(trace, ()) - resident_bytes(trace, [Evict(FROZEN, 3, 4, 12, 11)])
        assert freed.tolist() == [10, 0, 0, 0, 10, 10, 10, 10, 10, 10]

    def test_a_copy_that_is_true_for_ever_fills_its_tier_for_ever(self) -> None:
        plan = Plan(policy="t", device_budget_bytes=ROOMY, evictions=(Evict(FROZEN, 3, 4, 12, 11),))
        assert check(chain(), plan, machine(disk_bytes=10)) == []
        named(check(chain(), plan, machine(disk_bytes=9)), "worst of 10 such kernels")

    def test_a_copy_made_while_it_is_still_away_from_the_iteration_before(self) -> None:
        trace = chain()
        wrap = Evict(FROZEN, 3, 4, 12, 11, "host")
        other = Evict(FROZEN, -1, 4, 6, 6)
        named(violations(wrap, other, trace=trace), "begins before")


class TestRecomputation:
    def test_a_chain_is_made_anew_parents_first(self) -> None:
        assert violations(AGAIN) == []
        assert violations(Recompute(A, 2, 6), Recompute(B, 3, 6)) == []
        named(
            violations(Recompute(B, 3, 6), Recompute(A, 2, 6)),
            r"recomputation of tensor 4 .* runs kernel 1 `make_b` again before kernel 6: its input, "
            r"tensor 3, is recomputed for the same kernel, but later",
        )

    def test_a_parent_returns_for_the_same_kernel(self) -> None:
        assert violations(Recompute(B, 3, 6), Evict(A, 0, 2, 6, 5)) == []
        assert violations(Recompute(B, 3, 6), Evict(A, 0, 2, 6, 6)) == []

    def test_a_parent_that_is_away(self) -> None:
        named(violations(Recompute(B, 3, 6), Evict(A, 0, 2, 7, 7)), "its input, tensor 3, is away then")
        named(violations(Recompute(B, 3, 6), Recompute(A, 2, 7)), "its input, tensor 3, is away then")

    def test_a_parent_that_is_dead(self) -> None:
        trace = chain()
        death = trace.tensor_death.copy()
        starts, values = trace.inputs.starts.copy(), trace.inputs.values
        # `use_a` reads nothing but the gradient, so that a dies early.
        cut = int(starts[7]) + int(np.flatnonzero(trace.inputs[7] == A)[0])
        values = np.delete(values, cut)
        starts[8:] -= 1
        death[A] = 2
        early = replace(
            trace,
            inputs=replace(trace.inputs, starts=starts, values=values),
            tensor_death=death,
        )
        named(violations(Recompute(B, 3, 6), trace=early), "its input, tensor 3, is not alive then")

    def test_a_parent_that_was_written(self) -> None:
        trace = chain()
        starts, values = trace.outputs.starts.copy(), trace.outputs.values
        values = np.insert(values, starts[4], WEIGHT)  # rest4 writes the weight
        starts[5:] += 1
        edited = replace(trace, outputs=replace(trace.outputs, starts=starts, values=values))
        named(violations(AGAIN, trace=edited), "its input, tensor 0, has been written since")

    def test_what_cannot_be_made_anew(self) -> None:
        named(violations(Recompute(2, 1, 8)), "tensor 2 .*: no kernel can recompute the tensor")
        named(violations(Recompute(99, 1, 8)), "tensor 99 is recomputed, but the trace has 7 tensors")
        named(violations(Recompute(A, 1, 7)), "outside the tensor's inactive periods")
        named(
            violations(AGAIN, trace=replace(chain(), tensor_recompute=np.zeros(0, dtype=np.int64))),
            "can recompute",
        )

    def test_an_eviction_of_the_same_tensor(self) -> None:
        assert violations(Recompute(A, 2, 4), Evict(A, 4, 5, 7, 7)) == []
        named(
            violations(Recompute(A, 2, 4), Evict(A, 2, 5, 7, 7)),
            "copied after kernel 2, when the tensor may be away until kernel 4",
        )
        named(violations(Recompute(A, 2, 5), Evict(A, 3, 4, 7, 7)), "begins before")

    def test_its_workspace_counts_before_the_kernel(self) -> None:
        # At kernel 7: weights 110, x 50, a 1000, gradient 20; preparing adds the workspace of make_a.
        rows = AGAIN, Evict(B, 1, 3, 6, 6), Evict(C, 2, 3, 5, 5)
        assert violations(*rows, budget=2187) == []
        trace = chain()
        big = trace.kernel_workspace_bytes.copy()
        big[0] = 1100
        trace = replace(trace, kernel_workspace_bytes=big)
        assert violations(*rows, trace=trace, budget=2280) == []
        named(violations(*rows, trace=trace, budget=2279), "kernel 7 `use_a` needs")


class TestRecomputationOverTheEnd:
    """master -> half, which all others read; the update writes the master, and then half is recomputed."""

    def trace(self) -> Trace:
        step = Step()
        master = step.tensor(100, "weight", persistent=True)
        half = step.tensor(50, "weight", persistent=True)
        gradient = step.tensor(20, "gradient")
        step.kernel("rest0", 1.0)
        step.kernel("forward", 1.0, [half])
        step.kernel("backward", 1.0, [half], [gradient], phase="backward")
        step.kernel("update", 1.0, [master, gradient], [master], phase="optimizer")
        step.kernel("cast", 1.0, [master], [half], phase="optimizer")
        step.kernel("rest5", 1.0)
        return replace(step.trace(), tensor_recompute=np.array([-1, 4, -1]))

    def test_it_is_made_anew_in_the_next_iteration(self) -> None:
        trace = self.trace()
        again = Recompute(1, 5, 7)
        assert violations(again, trace=trace) == []
        assert resident_bytes(trace, (), [again]).tolist() == [100, 150, 170, 170, 150, 100]

    def test_not_before_it_was_made_nor_after_its_input_changed(self) -> None:
        trace = self.trace()
        named(
            violations(Recompute(1, 3, 4), trace=trace), "begins before kernel 4 `cast` has made the tensor"
        )
        away = Evict(0, 4, 5, 9, 9)
        named(violations(Recompute(1, 5, 7), away, trace=trace), "its input, tensor 0, is away then")
        assert violations(Recompute(1, 5, 7), replace(away, end=7, prefetch_at=6), trace=trace) == []

    def test_what_dies_with_the_iteration_is_no_help_in_the_next(self) -> None:
        trace = self.trace()
        rows = [trace.inputs[kernel].tolist() for kernel in range(6)]
        rows[4] = [0, 2]  # it casts the gradient, too
        death = np.array([6, 6, 5])
        longer = replace(trace, inputs=Lists.of(rows), tensor_death=death)
        named(violations(Recompute(1, 5, 7), trace=longer), "its input, tensor 2, is not alive then")


class TestCompression:
    def test_what_gets_smaller(self) -> None:
        assert violations(Evict(A, 1, 2, 7, 6, codec="csr")) == []
        named(violations(Evict(B, 2, 3, 6, 6, codec="csr")), "'csr', which does not make the tensor smaller")

    def test_its_copy_starts_when_it_is_compressed(self) -> None:
        named(violations(Evict(A, 0, 2, 7, 6, codec="csr")), "its copy starts after kernel 1")

    def test_both_forms_count(self) -> None:
        trace = chain()
        small = trace.compressed_bytes(A)
        assert small == 32 + 25 * 4 + 3 * 4
        away = Evict(A, 1, 2, 7, 4, codec="csr"), Evict(B, 1, 3, 6, 6), Evict(C, 2, 3, 5, 5)
        # Compressed before kernel 2: weights, x, a, b and the copy. At kernel 2: b and c instead.
        assert violations(*away, budget=110 + 50 + 2000 + small) == []
        named(violations(*away, budget=110 + 50 + 2000 + small - 1), "kernel 2 `make_c` needs")
        tight = Plan(policy="t", device_budget_bytes=ROOMY, evictions=away[:1])
        assert check(trace, tight, machine(disk_bytes=small)) == []
        named(
            check(trace, tight, machine(disk_bytes=small - 1)), f"disk has to hold {small} B during kernel 2"
        )


class TestVariants:
    def test_a_variant_of_every_kernel_or_of_none(self) -> None:
        assert violations(variants=(0, *(-1,) * 9)) == []
        named(violations(variants=(0,)), "variants of 1 kernels: the trace has 10")
        named(violations(variants=(1, *(-1,) * 9)), "kernel 0 `make_a` runs as variant 1: it has 1 of them")
        named(
            violations(variants=(0, 0, *(-1,) * 8)), "kernel 1 `make_b` runs as variant 0: it has 0 of them"
        )

    def test_the_workspace_of_the_variant_counts(self) -> None:
        rows = AGAIN, Evict(B, 1, 3, 6, 6), Evict(C, 2, 3, 5, 5)
        trace = chain()
        big = trace.kernel_workspace_bytes.copy()
        big[0] = 5000
        trace = replace(trace, kernel_workspace_bytes=big)
        small = (0, *(-1,) * 9)
        assert violations(*rows, trace=trace, budget=2187, variants=small) == []
        assert len(violations(*rows, trace=trace, budget=2187)) == 1
