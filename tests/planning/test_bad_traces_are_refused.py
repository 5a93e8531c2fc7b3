"""A trace that cannot have happened is refused where it is made or read, with a sentence that says why."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.columns import KINDS, Lists
from penstock.core.trace import Trace, Variant
from penstock.errors import InvalidArgument, InvalidFile
from tests.support.traces import Step, five_kernels, gpt, recompute_links, traces, whole_traces

Change = Callable[[Trace], dict[str, Any]]


def entry(name: str, index: int, value: Any) -> Change:
    """The trace with one entry of a column changed."""

    def change(trace: Trace) -> dict[str, Any]:
        column = getattr(trace, name).copy()
        column[index] = value
        return {name: column}

    return change


def lists(name: str, index: int, values: list[int]) -> Change:
    """The trace with what one kernel reads or writes changed."""

    def change(trace: Trace) -> dict[str, Any]:
        rows = [getattr(trace, name)[kernel].tolist() for kernel in range(trace.kernels)]
        rows[index] = values
        return {name: Lists.of(rows)}

    return change


# Five kernels a, b, c, y, z make and use tensors 0, 1, 2.
WRONG: dict[str, tuple[Change, str]] = {
    "a column is short": (lambda _: {"kernel_time_s": np.ones(4)}, "kernel_time_s has 4 entries, not 5"),
    "a time is negative": (entry("kernel_time_s", 1, -0.5), r"kernel_time_s of kernel 1 `b` is -0\.5 s"),
    "a time is not a number": (entry("kernel_time_s", 1, np.nan), "kernel_time_s of kernel 1 `b` is nan s"),
    "a time is infinite": (entry("kernel_time_s", 1, np.inf), "kernel_time_s of kernel 1 `b` is inf s"),
    "a time is absurd": (entry("kernel_time_s", 1, 1e300), "kernel_time_s of kernel 1"),
    "a size is negative": (entry("tensor_bytes", 2, -1), "tensor_bytes of tensor 2 is -1 bytes"),
    "a size is absurd": (entry("tensor_bytes", 2, 2**62), "tensor_bytes of tensor 2"),
    "sizes are absurd together": (
        lambda trace: {"tensor_bytes": np.full(trace.tensors, 2**52)},
        "the tensors take .* bytes together",
    ),
    "sizes are fractions": (lambda trace: {"tensor_bytes": trace.tensor_bytes / 3}, "have to be whole"),
    "a workspace is negative": (entry("kernel_workspace_bytes", 4, -9), "kernel_workspace_bytes of kernel 4"),
    "a phase is unknown": (entry("kernel_phase", 0, 3), "kernel_phase of kernel 0"),
    "a kind is unknown": (entry("tensor_kind", 0, 99), "tensor_kind of tensor 0"),
    "a tensor is unknown": (lists("inputs", 3, [7]), "3 tensors names one that is not among them"),
    "born after its first use": (entry("tensor_birth", 1, 2), "kernel 1 `b` uses tensor 1 before its birth"),
    "dead before its last use": (
        entry("tensor_death", 1, 3),
        "kernel 3 `y` uses tensor 1 after its death at kernel 3",
    ),
    "dead before it is born": (entry("tensor_death", 0, -1), r"during kernels \[0, -1\)"),
    "alive after the end": (entry("tensor_death", 0, 6), r"during kernels \[0, 6\) of a trace of 5 kernels"),
    "persistent for a while": (entry("tensor_persistent", 1, True), "tensor 1 is persistent, but alive"),
    "read before it is made": (lists("inputs", 1, [2]), "kernel 1 `b` uses tensor 2 before its birth"),
    "read and never made": (lists("outputs", 1, []), "kernel 3 `y` reads tensor 1, which no kernel makes"),
    "only some may leave": (lambda _: {"tensor_movable": np.array([True])}, "tensor_movable has 1 entries"),
    "a density is above one": (lambda _: {"tensor_density": np.array([1.0, 1.1, 0])}, "density of tensor 1"),
    "a density is no number": (lambda _: {"tensor_density": np.full(3, np.nan)}, "density of tensor 0"),
    "elements have no size": (lambda _: {"tensor_itemsize": np.array([4, 0, 4])}, "itemsize of tensor 1"),
    "a variant takes no time": (
        lambda _: {"kernel_variants": ((), (Variant("odd", -1.0, 0),), (), (), ())},
        "the variant 'odd' of kernel 1 `b` takes -1.0 s",
    ),
    "variants of other kernels": (lambda _: {"kernel_variants": ((),)}, "kernel_variants has 1 entries"),
    "recomputed by nobody": (
        lambda _: {"tensor_recompute": np.array([0, 9, -1])},
        "by kernel 9, which is not",
    ),
    "recomputed by another": (
        lambda _: {"tensor_recompute": np.array([0, 2, -1])},
        "tensor 1 cannot be recomputed by kernel 2 `c`: it is not the one kernel that writes it",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_one_thing_is_wrong(name: str) -> None:
    change, words = WRONG[name]
    trace = five_kernels()
    with pytest.raises(InvalidArgument, match=words):
        replace(trace, **change(trace))


def test_kernels_in_a_circle() -> None:
    step = Step()
    first, second = step.tensor(1), step.tensor(1)
    step.kernel("chicken", 1.0, [second], [first])
    step.kernel("egg", 1.0, [first], [second])
    with pytest.raises(
        InvalidArgument, match=r"kernel 0 `chicken` reads tensor 1, which is made only later, by "
    ):
        step.trace()


def test_an_edit_of_what_was_never_made() -> None:
    step = Step()
    tensor = step.tensor(1)
    step.kernel("edit", 1.0, [tensor], [tensor])
    step.kernel("use", 1.0, [tensor])
    with pytest.raises(InvalidArgument, match="kernel 0 `edit` reads tensor 0, which no kernel makes"):
        step.trace()


def test_what_may_be_there_from_the_start() -> None:
    step = Step()
    given_tensors = [
        step.tensor(1, "weight", persistent=True),
        step.tensor(1, "input"),
        step.tensor(1, "gradient"),
    ]
    step.kernel("read", 1.0, given_tensors)
    assert step.trace().kernels == 1


@pytest.mark.parametrize(
    ("reads", "writes"),
    [
        ("x weight", "made weight"),  # it writes something that lasts
        ("x weight", "made x"),  # it edits what it reads
        ("x weight", "made other"),  # another output is written again later
    ],
)
def test_running_a_kernel_again_must_do_no_harm(reads: str, writes: str) -> None:
    step = Step()
    names = {
        "weight": step.tensor(1, "weight", persistent=True),
        "x": step.tensor(1, "input"),
        "made": step.tensor(1),
        "other": step.tensor(1),
    }
    step.kernel(
        "make", 1.0, [names[name] for name in reads.split()], [names[name] for name in writes.split()]
    )
    step.kernel("rest", 1.0, [], [names["other"]])
    step.kernel("use", 1.0, [names["made"], names["other"]])
    trace = step.trace()
    assert recompute_links(trace).tolist()[names["made"]] == -1
    links = np.full(trace.tensors, -1)
    links[names["made"]] = 0
    with pytest.raises(InvalidArgument, match="tensor 2 cannot be recomputed by kernel 0 `make`"):
        replace(trace, tensor_recompute=links)


@given(trace=st.one_of(traces(), whole_traces()))
@settings(max_examples=60)
def test_every_random_trace_stands(trace: Trace) -> None:
    assert replace(trace).kernels == trace.kernels
    assert trace.scaled(2.0).ideal_s == pytest.approx(2 * trace.ideal_s)


def text(change: Callable[[dict[str, Any]], None], folder: Path) -> Path:
    path = folder / "trace.json"
    gpt(1).save(path)
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda document: document.update(schema="penstock.trace/3"), "holds 'penstock.trace/3'"),
        (lambda document: document["value"].pop("tensor_kind"), "tensor_kind"),
        (lambda document: document["value"]["kernel_time_s"].__setitem__(0, None), "float"),
        (lambda document: document["value"]["kernel_time_s"].__setitem__(0, "1"), "float"),
        (lambda document: document["value"]["kernel_time_s"].__setitem__(0, -1), "kernel_time_s of kernel 0"),
        (lambda document: document["value"]["tensor_bytes"].__setitem__(0, 1.5), "int"),
        (lambda document: document["value"]["tensor_bytes"].__setitem__(0, 10**30), "."),
        (lambda document: document["value"]["tensor_persistent"].__setitem__(0, 1), "bool"),
        (lambda document: document["value"]["tensor_birth"].__setitem__(3, 10), "before its birth"),
        (lambda document: document["value"]["inputs"]["starts"].__setitem__(3, 10**6), "does not divide"),
        (lambda document: document["value"]["inputs"]["values"].__setitem__(3, 10**6), "not among them"),
    ],
)
def test_a_file_with_something_wrong(
    change: Callable[[dict[str, Any]], None], words: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidFile, match=r"trace\.json") as caught:
        Trace.load(text(change, tmp_path))
    assert caught.match(words)


def test_a_cut_file(tmp_path: Path) -> None:
    for name in ("trace.json", "trace.json.gz"):
        path = tmp_path / name
        five_kernels().save(path)
        whole = path.read_bytes()
        for length in range(0, len(whole), 11):
            path.write_bytes(whole[:length])
            with pytest.raises(InvalidFile, match=name):
                Trace.load(path)


def test_old_files_lack_what_came_later(tmp_path: Path) -> None:
    def forget(document: dict[str, Any]) -> None:
        for name in (
            "tensor_movable",
            "kernel_variants",
            "tensor_recompute",
            "tensor_density",
            "tensor_itemsize",
        ):
            del document["value"][name]

    trace = Trace.load(text(forget, tmp_path))
    assert (trace.movable.all(), len(trace.tensor_recompute)) == (True, 0)
    assert KINDS[int(trace.tensor_kind[0])] == "weight"
