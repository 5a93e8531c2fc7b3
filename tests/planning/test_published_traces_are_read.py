"""The published traces are read as what they are."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.artifact import published
from penstock.core.columns import KINDS, PHASES
from penstock.core.trace import Trace
from penstock.errors import InvalidFile
from tests.support.traces import G10_DATA, needs_g10_data, published_times

NAMES = sorted(path.name for path in G10_DATA.glob("*-*.json.gz") if not path.name.startswith("plan-"))


def small() -> dict[str, Any]:
    """x, w -> conv (with a workspace) -> relu, in place -> dropout -> loss -> backward -> update of w."""
    return {
        "schema": "trace/1",
        "source": "a test",
        "model": "tiny",
        "batch": 4,
        "loss_kernel": 4,
        "kernel_names": [
            "Load",
            "Conv",
            "Add",
            "Dropout",
            "makeLoss",
            "Conv_Backward",
            "Conv_Apply_Grad",
            "BN",
        ],
        "tensor_kinds": ["weight", "input", "act", "agrad", "wgrad", "workspace"],
        "kernels": {
            "name": [0, 1, 2, 3, 4, 5, 6],
            "ns": [1000, 2000, 3000, 4000, 5000, 6000, 7000],
            "ns_output_uvm_fault": [1500, 1000, 3000, 4000, 5000, 6000, 7000],
            "ns_all_uvm_fault": [2500, 5000, 2000, 4000, 5000, 6000, 7000],
            "in": [[], [1, 0], [2], [4], [5], [6, 2, 4], [0, 7]],
            "out": [[1], [2, 3], [4], [5], [6], [7], [0]],
        },
        "tensors": {
            "bytes": [8192, 4096, 4096, 12288, 4096, 4096, 4096, 8192],
            "kind": [0, 1, 2, 5, 2, 2, 3, 4],
        },
    }


def written(folder: Path, document: Any, name: str = "tiny-4.json") -> Path:
    path = folder / name
    data = json.dumps(document).encode()
    path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    return path


@pytest.mark.parametrize("name", ["tiny-4.json", "tiny-4.json.gz"])
def test_a_small_one(tmp_path: Path, name: str) -> None:
    trace = published.trace(written(tmp_path, small(), name))
    assert trace.kernel_name == (
        "Load",
        "Conv",
        "Add",
        "Dropout",
        "makeLoss",
        "Conv_Backward",
        "Conv_Apply_Grad",
    )
    assert trace.ideal_s == pytest.approx(28e-6)
    assert [PHASES[phase][0] for phase in trace.kernel_phase] == list("fffffbo")
    kinds = ["weight", "input", "activation", "workspace", "activation", "activation", "gradient", "gradient"]
    assert [KINDS[kind] for kind in trace.tensor_kind] == kinds
    assert trace.tensor_persistent.tolist() == [True] + [False] * 7
    assert trace.tensor_birth.tolist() == [0, 0, 1, 1, 2, 3, 4, 5]
    assert trace.tensor_death.tolist() == [7, 2, 6, 2, 6, 5, 6, 7]
    assert trace.tensor_recompute.tolist() == [-1, -1, 1, -1, 2, -1, -1, -1]
    assert trace.movable.all()
    assert (trace.notes["model"], trace.notes["batch"]) == ("tiny", "4")
    assert not len(trace.tensor_density)
    assert {(p.tensor, p.begin, p.end, p.ready) for p in trace.inactive_periods} == {
        (0, 2, 6, -1),
        (0, 7, 8, 6),
        (2, 3, 5, 1),
        (4, 4, 5, 2),
    }
    output_s, all_s = published.fault_times_s(tmp_path / name)
    assert output_s.tolist() == pytest.approx([1.5e-6, 2e-6, 3e-6, 4e-6, 5e-6, 6e-6, 7e-6])
    assert all_s.tolist() == pytest.approx([2.5e-6, 5e-6, 3e-6, 4e-6, 5e-6, 6e-6, 7e-6])


def changed(**changes: Any) -> dict[str, Any]:
    document = small()
    for key, value in changes.items():
        part = "tensors" if key in document["tensors"] else "kernels" if key in document["kernels"] else None
        if part:
            document[part][key] = value
        else:
            document[key] = value
    return document


def with_entry(part: str, key: str, index: int, value: Any) -> dict[str, Any]:
    document = small()
    document[part][key][index] = value
    return document


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (changed(schema="trace/2"), "holds 'trace/2'"),
        (changed(batch="four"), "batch"),
        (changed(ns=[1, 2]), "kernels.ns has 2 entries, not 7"),
        (changed(kind=[0]), "tensors.kind has 1 entries, not 8"),
        (changed(loss_kernel=7), "the loss is kernel 7 of 7"),
        (with_entry("kernels", "name", 2, 99), "kernel name is not among"),
        (with_entry("kernels", "name", 2, -1), "kernel name is not among"),
        (with_entry("tensors", "kind", 2, 6), "tensor kind is not among"),
        (changed(tensor_kinds=["weight", "input", "act", "agrad", "wgrad", "scratch"]), "scratch"),
        (with_entry("kernels", "in", 2, [99]), "uses a tensor that is not among the 8"),
        (with_entry("kernels", "ns", 2, -1), r"kernel_time_s of kernel 2 `Add` is -1e-09 s"),
        (with_entry("kernels", "ns", 2, None), "float"),
        (with_entry("kernels", "ns", 2, 1e300), "kernel_time_s of kernel 2"),
        (with_entry("tensors", "bytes", 2, -4096), "tensor_bytes of tensor 2 is -4096"),
        (with_entry("tensors", "bytes", 2, 10**40), "."),
        (with_entry("tensors", "bytes", 2, 2**60), "tensor_bytes of tensor 2"),
        (with_entry("tensors", "bytes", 2, 0.5), "int"),
        (
            with_entry("kernels", "in", 1, [1, 0, 4]),
            "kernel 1 `Conv` reads tensor 4, which is made only later",
        ),
        (with_entry("kernels", "in", 2, [2, 7]), "kernel 2 `Add` reads tensor 7, which is made only later"),
        (with_entry("kernels", "out", 2, []), "kernel 3 `Dropout` reads tensor 4, which no kernel makes"),
        (
            with_entry("kernels", "out", 5, []),
            "kernel 6 `Conv_Apply_Grad` reads tensor 7, which no kernel makes",
        ),
        ({"schema": "trace/1"}, "model"),
    ],
)
def test_an_impossible_one_is_refused(tmp_path: Path, document: Any, words: str) -> None:
    path = written(tmp_path, document)
    with pytest.raises(InvalidFile, match=r"tiny-4\.json") as caught:
        published.trace(path)
    assert caught.match(words)


def test_loading_one_as_a_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidFile, match=r"holds 'trace/1', not 'penstock\.trace/"):
        Trace.load(written(tmp_path, small()))


def test_a_cut_one_is_refused(tmp_path: Path) -> None:
    for name in ("tiny-4.json", "tiny-4.json.gz"):
        whole = written(tmp_path, small(), name).read_bytes()
        for length in range(0, len(whole), 7):
            (tmp_path / name).write_bytes(whole[:length])
            with pytest.raises(InvalidFile, match=name):
                published.trace(tmp_path / name)


def test_a_kernel_that_writes_something_lasting_is_not_run_again(tmp_path: Path) -> None:
    document = with_entry("kernels", "out", 2, [4, 0])
    document["kernels"]["in"][2] = [2, 0]
    trace = published.trace(written(tmp_path, document))
    assert trace.tensor_recompute.tolist() == [-1, -1, 1, -1, -1, -1, -1, -1]


def test_an_activation_that_is_edited_is_not_made_anew(tmp_path: Path) -> None:
    document = with_entry("kernels", "out", 3, [5, 4])
    trace = published.trace(written(tmp_path, document))
    assert trace.tensor_recompute.tolist() == [-1, -1, 1, -1, -1, -1, -1, -1]


@needs_g10_data
@pytest.mark.parametrize("name", NAMES)
def test_every_published_trace(name: str) -> None:
    trace = published.trace(G10_DATA / name)
    model = name.removesuffix(".json.gz")
    ideal_s = (
        published_times("fig15_batch").get(model, {}).get("ideal", published_times("ideal_s").get(model))
    )
    if ideal_s is not None:
        assert trace.ideal_s == pytest.approx(ideal_s, rel=1e-4)
    assert f"{trace.notes['model']}-{trace.notes['batch']}" == model
    weight = trace.tensor_kind == KINDS.index("weight")
    assert (trace.tensor_persistent == weight).all()
    assert (np.diff(trace.uses.starts) > 0).all()
    assert (trace.tensor_bytes > 0).all()
    made = trace.tensor_recompute >= 0
    assert (trace.tensor_kind[made] == KINDS.index("activation")).all()
    # Half of what a CNN keeps and all of what a transformer keeps can be recomputed.
    share = (
        trace.tensor_bytes[made].sum()
        / trace.tensor_bytes[trace.tensor_kind == KINDS.index("activation")].sum()
    )
    assert share == 1 if name.startswith(("BERT", "VIT")) else 0.3 < share < 0.5
    for times_s in published.fault_times_s(G10_DATA / name):
        assert (times_s >= trace.kernel_time_s).all()
