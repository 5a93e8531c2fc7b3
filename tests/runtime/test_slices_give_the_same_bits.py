"""An operator on lists, run in slices, gives the bits of the whole: operator by operator."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import penstock
from penstock.capture import slices as module
from penstock.capture.slices import join, slices

SHAPES = [(3, 4), (5,), (2, 3, 2), (7, 1), (), (6, 6), (1,)]  # of the elements of every list
LIMIT_BYTES = 100  # of a slice: the largest element alone is more


def on_lists() -> list[Any]:
    """Every overload of this torch that works on lists of tensors, by its schema."""
    found = []
    for schema in torch._C._jit_get_all_schemas():
        name, overload = schema.name.removeprefix("aten::"), schema.overload_name or "default"
        if not name.startswith(("_foreach_", "_fused_", "_amp_foreach_")) or "aten::" not in schema.name:
            continue
        if any(str(argument.type) == "List[Tensor]" for argument in schema.arguments):
            found.append(getattr(getattr(torch.ops.aten, name), overload))
    return sorted(set(found), key=str)


OPERATORS = on_lists()
# They return a list and a tensor for all of it; their in-place forms, which torch uses, are sliced.
WHOLE = {"aten._amp_foreach_non_finite_check_and_unscale.default"}


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLICE_BYTES", LIMIT_BYTES)


def values(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Positive, below one, and not all alike: within the domain of every operator."""
    return (torch.rand(shape) * 0.8 + 0.1).to(dtype)


def argument(operator: Any, entry: Any) -> Any:
    """Something that fits one argument of the schema."""
    name, kind = entry.name, str(entry.type)
    if kind == "List[Tensor]":
        if name == "state_steps":
            return [torch.tensor(3.0) for _ in SHAPES]
        if "mm" in str(operator):
            return [values((4, 4)) for _ in SHAPES]
        return [values(shape) for shape in SHAPES]
    if name == "scalars" or kind == "List[number]":
        scalars = torch.arange(1, len(SHAPES) + 1) / 8
        return scalars if kind == "Tensor" else scalars.tolist()
    return {
        "found_inf": torch.zeros(1),
        "inv_scale": torch.full((1,), 0.5),
        "grad_scale": torch.full((1,), 2.0),
        "lr": torch.tensor(0.1) if kind == "Tensor" else 0.1,
        "other": torch.tensor(0.3) if kind == "Tensor" else 0.3,
        "alpha": 2, "value": 0.7, "weight": 0.3, "scalar": 0.3, "exponent": 1.5, "self": 1.5, "ord": 2,
        "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "momentum": 0.9, "dampening": 0.1,
        "lr_decay": 0.01, "amsgrad": True, "nesterov": False, "maximize": False, "is_first_step": False,
        "non_blocking": False, "dtype": None, "memory_format": None,
    }[name]  # fmt: skip


def call(operator: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(1)
    args, kwargs = [], {}
    for entry in operator._schema.arguments:
        value = argument(operator, entry)
        if entry.kwarg_only:
            kwargs[entry.name] = value
        else:
            args.append(value)
    return tuple(args), kwargs


def bits(found: object) -> list[tuple[torch.Size, torch.dtype, bytes] | object]:
    return [
        (leaf.shape, leaf.dtype, leaf.detach().contiguous().numpy().tobytes())
        if isinstance(leaf, torch.Tensor)
        else leaf
        for leaf in tree_leaves(found)
    ]


def elements(part: tuple[tuple[Any, ...], dict[str, Any]]) -> int:
    return max(len(value) for value in (*part[0], *part[1].values()) if isinstance(value, list))


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_slices_give_the_same_bits(operator: Any) -> None:
    whole, sliced = call(operator), call(operator)
    calls = slices(operator, *sliced)
    if str(operator) in WHOLE:
        assert calls is None
        return
    assert calls is not None and len(calls) > 2
    assert sum(elements(part) for part in calls) == len(SHAPES)
    expected = operator(*whole[0], **whole[1])
    found = join(operator, [operator(*args, **kwargs) for args, kwargs in calls])
    assert bits(found) == bits(expected)
    assert bits(sliced) == bits(whole), "what was written in place"
    assert type(found) is type(expected)


def test_every_operator_of_the_optimizers_is_among_them() -> None:
    names = {str(operator).split(".")[1] for operator in OPERATORS}
    assert names >= {
        "_foreach_add_", "_foreach_mul_", "_foreach_lerp_", "_foreach_addcmul_", "_foreach_addcdiv_",
        "_foreach_sqrt", "_foreach_norm", "_foreach_div_", "_foreach_copy_", "_foreach_zero_", "_fused_adam_",
        "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_", "_amp_foreach_non_finite_check_and_unscale_",
    }  # fmt: skip


def test_an_infinity_in_one_slice_is_found_for_all() -> None:
    operator = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
    for place in range(len(SHAPES)):
        gradients, found_inf = [values(shape) for shape in SHAPES], torch.zeros(1)
        gradients[place].fill_(float("inf"))
        for args, kwargs in slices(operator, (gradients, found_inf, torch.ones(1)), {}) or ():
            operator(*args, **kwargs)
        assert found_inf.item() == 1


def test_a_slice_takes_what_fits_and_one_element_at_least() -> None:
    operator = torch.ops.aten._foreach_add_.List
    sizes = [10, 10, 5, 30, 1, 24]  # elements of 4 bytes, in two lists: 25 to a slice of 200 bytes
    left, right = ([torch.zeros(size // 2 or 1) for size in sizes] for _ in range(2))
    parts = slices(operator, (left, right), {})
    assert parts is not None
    runs = [[tensor.numel() for tensor in args[0]] for args, _ in parts]
    assert runs == [[5, 5, 2], [15], [1], [12]]
    for args, _ in parts:
        total = sum(tensor.nbytes for tensor in (*args[0], *args[1]))
        assert total <= LIMIT_BYTES or len(args[0]) == 1


def test_what_fits_in_one_slice_or_is_no_list_is_called_as_it_is() -> None:
    few = [torch.ones(2), torch.ones(2)]
    assert slices(torch.ops.aten._foreach_add_.Scalar, (few, 1), {}) is None
    assert slices(torch.ops.aten._foreach_add_.Scalar, ([torch.ones(1000)], 1), {}) is None
    assert slices(torch.ops.aten.cat.default, ([torch.ones(1000)] * 3,), {}) is None
    assert slices(torch.ops.aten.mm.default, (torch.ones(99, 99), torch.ones(99, 99)), {}) is None


def test_lists_given_by_name_are_sliced_too() -> None:
    tensors = [torch.ones(30) for _ in range(3)]
    parts = slices(torch.ops.aten._foreach_mul_.ScalarList, (), {"self": tensors, "scalars": [1.0, 2.0, 3.0]})
    assert parts is not None
    assert [(len(kwargs["self"]), kwargs["scalars"]) for _, kwargs in parts] == [
        (1, [1.0]),
        (1, [2.0]),
        (1, [3.0]),
    ]


class Sliced(TorchDispatchMode):
    """Runs every operator on lists in slices, as a run does."""

    def __init__(self) -> None:
        super().__init__()
        self.divided = 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        calls = slices(operator, args, kwargs or {})
        if calls is None:
            return operator(*args, **kwargs or {})
        self.divided += 1
        return join(operator, [operator(*part, **named) for part, named in calls])


def optimizers() -> Iterator[tuple[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]]]:
    optim = torch.optim
    for name, kind, options in (
        ("sgd", optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        ("adam", optim.Adam, {"amsgrad": True}),
        ("adamw", optim.AdamW, {}),
        ("adagrad", optim.Adagrad, {}),
        ("nadam", optim.NAdam, {}),
        ("radam", optim.RAdam, {}),
        ("adamax", optim.Adamax, {}),
        ("adadelta", optim.Adadelta, {}),
        ("rmsprop", optim.RMSprop, {"momentum": 0.9, "centered": True}),
        ("rprop", optim.Rprop, {}),
        ("asgd", optim.ASGD, {}),
        ("adafactor", optim.Adafactor, {}),
    ):
        for way in ("foreach", "fused"):
            if way == "foreach" or name in ("sgd", "adam", "adamw", "adagrad"):
                yield (
                    f"{name}-{way}",
                    lambda parameters, kind=kind, options=options, way=way: kind(
                        parameters, **options, **{way: True}
                    ),
                )


@pytest.mark.parametrize(("name", "make"), list(optimizers()), ids=[name for name, _ in optimizers()])
def test_optimizers_with_clipping_train_to_the_same_bits(
    name: str, make: Callable[[list[torch.Tensor]], torch.optim.Optimizer]
) -> None:
    results = []
    for in_slices in (False, True):
        torch.manual_seed(3)
        parameters = [values(shape).requires_grad_() for shape in SHAPES]
        optimizer = make(parameters)
        mode = Sliced()
        for turn in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter) * (turn + 1)
            if in_slices:
                with mode:
                    torch.nn.utils.clip_grad_norm_(parameters, 0.5, foreach=True)
                    optimizer.step()
            else:
                torch.nn.utils.clip_grad_norm_(parameters, 0.5, foreach=True)
                optimizer.step()
        results.append((bits(parameters), bits(copy.deepcopy(optimizer.state_dict()["state"]))))
        assert (mode.divided > 0) == in_slices
    assert results[0] == results[1]


def test_a_trace_has_a_kernel_for_each_slice() -> None:
    """Whether the step was run or not."""

    def step() -> None:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()

    traced = []
    for fake in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        batch = torch.ones(2, 4)
        traced.append(penstock.trace(step, fake=fake))
    for trace in traced:
        updates = [kernel for kernel, name in enumerate(trace.kernel_name) if name == "_fused_adamw_"]
        assert len(updates) == 6, "one for each weight and each bias"
        writes = [set(trace.outputs[kernel].tolist()) for kernel in updates]
        assert all(len(written) >= 3 for written in writes)
        assert sum(map(len, writes)) == len(set().union(*writes)), "no tensor is in two slices"
    assert traced[0].kernel_name == traced[1].kernel_name
    assert traced[0].outputs.values.tolist() == traced[1].outputs.values.tolist()
