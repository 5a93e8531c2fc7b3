"""What a kernel takes is known before it runs: held against what it took."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed  # and operators for collectives
from torch.utils._python_dispatch import TorchDispatchMode

import penstock.distributed  # noqa: F401
from penstock.runtime.output_bytes import KernelNeeds

aten = torch.ops.aten
X = torch.randn(8, 8)
CPU = torch.device("cpu")

CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any], int]] = [
    (aten.add.Tensor, (X, X), {}, 256),
    (aten.add_.Tensor, (X, X), {}, 0),
    (aten.t.default, (X,), {}, 0),
    (aten.sort.default, (X,), {}, 256 + 512),
    (aten.sort.default, (X,), {"dim": 0}, 256 + 512),
    (aten.full.default, ([4, 4], 1.0), {"device": torch.device("cpu")}, 64),
    (aten._foreach_add.Scalar, ([X, X[:2]], 1.0), {}, 256 + 64),
    (aten._foreach_add_.Scalar, ([X, X[:2]], 1.0), {}, 0),
    (aten.native_layer_norm.default, (X, [8], None, None, 1e-5), {}, 256 + 32 + 32),
    (aten._to_copy.default, (X,), {"dtype": torch.float64}, 512),
    (
        aten.convolution.default,
        (X.view(1, 1, 8, 8), torch.ones(2, 1, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
        {},
        512,
    ),
    (aten.set_.source_Tensor, (X.clone(), X.clone()), {}, 0),
]


@pytest.mark.parametrize(("operator", "args", "kwargs", "size"), CALLS)
def test_results_are_foreseen(operator: Any, args: Any, kwargs: Any, size: int) -> None:
    needs = KernelNeeds(CPU)
    for _ in range(3):
        assert needs.bytes(operator, args, kwargs) == size
    assert needs.inferred == 1


def test_other_shapes_and_values_are_other_questions() -> None:
    needs = KernelNeeds(CPU)
    assert [needs.bytes(aten.mm.default, (torch.ones(n, 4), torch.ones(4, n)), {}) for n in (2, 3)] == [
        16,
        36,
    ]
    assert [needs.bytes(aten.sum.dim_IntList, (X[:4], [d]), {}) for d in (0, 1)] == [32, 16]
    assert needs.bytes(aten.repeat.default, (X, [2, 1]), {}) == 512
    assert needs.bytes(aten.repeat.default, (X, [4, 1]), {}) == 1024
    assert needs.inferred == 6


def test_what_depends_on_values_is_what_it_took_last() -> None:
    needs = KernelNeeds(CPU)
    assert needs.bytes(aten.nonzero.default, (X,), {}) == 256  # as much as its arguments
    needs.add(aten.nonzero.default, 1024, 0)
    assert needs.bytes(aten.nonzero.default, (X,), {}) == 1024


@pytest.mark.parametrize(
    ("operator", "args"),
    [
        (torch.ops.penstock.host_average_.default, (X, -1)),
        (torch.ops.c10d.allreduce_.default, ([X], None, None, None, True, -1)),
    ],
)
def test_collectives_are_not_tried(operator: Any, args: Any, caplog: pytest.LogCaptureFixture) -> None:
    needs = KernelNeeds(CPU)
    with caplog.at_level(logging.WARNING):
        assert needs.bytes(operator, args, {}) == 0
    needs.add(operator, 0, 4096)
    assert needs.bytes(operator, args, {}) == 4096
    assert needs.inferred == 0 and not caplog.records


def test_workspace_is_learnt_by_operator() -> None:
    needs = KernelNeeds(CPU)
    needs.add(aten.mm.default, 256, 4096)
    needs.add(aten.mm.default, 256, 64)
    assert needs.bytes(aten.mm.default, (X, X), {}) == 256 + 4096


def test_nothing_of_the_program_notices() -> None:
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(operator)
            return operator(*args, **(kwargs or {}))

    before = torch.get_rng_state()
    version = X._version
    with Mode():
        assert KernelNeeds(CPU).bytes(aten.normal_.default, (X,), {}) == 0
        assert KernelNeeds(CPU).bytes(aten.native_dropout.default, (X, 0.5, True), {}) == 256 + 64
        assert KernelNeeds(CPU).bytes(aten.randn.default, ([8],), {}) == 32
    assert not seen and X._version == version
    assert torch.equal(torch.get_rng_state(), before)


def test_only_what_is_on_the_device_counts() -> None:
    needs = KernelNeeds(torch.device("meta"))
    there = torch.empty(8, 8, device="meta")
    for operator in (aten.add.Tensor, aten.nonzero.default):
        needs.add(operator, 1024, 4096)
    assert needs.bytes(aten.add.Tensor, (X, X), {}) == 0
    assert needs.bytes(aten.nonzero.default, (X,), {}) == 0
    assert needs.bytes(aten.nonzero.default, (there,), {}) == 1024 + 4096
    assert needs.bytes(aten._to_copy.default, (X,), {"device": "meta"}) == 256
    assert needs.bytes(aten._to_copy.default, (there,), {"device": "cpu"}) == 0
    assert needs.bytes(aten.zeros.default, ([8],), {"device": "cpu"}) == 0
    assert needs.bytes(aten.copy_.default, (there, X), {}) == 0
