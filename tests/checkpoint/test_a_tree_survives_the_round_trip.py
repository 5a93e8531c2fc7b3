"""A state comes back with its types, its bits, its strides, and what shared memory; no tree is trusted."""

from __future__ import annotations

import json
import re
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings

from penstock.checkpoint.tree import MAX_DEPTH, flatten, unflatten
from penstock.errors import InvalidArgument
from tests.support.drawn_states import (
    FILE,
    TYPES,
    Pool,
    assert_same,
    assert_same_memory,
    file_of,
    loaded,
    pools,
    states,
    tensors_of,
    through_a_file,
)


def tree_of(state: Any) -> Any:
    return json.loads(flatten(state)[1])


def stored_bytes(state: Any) -> int:
    return sum(item.tensor.nbytes for item in flatten(state)[0])


# What comes back.


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@settings(max_examples=200)
@given(states())
def test_any_state_comes_back(state: Any) -> None:
    found = through_a_file(state)
    assert_same(state, found)
    assert_same_memory(list(tensors_of(state)), list(tensors_of(found)))


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@settings(max_examples=200)
@given(pools())
def test_any_views_of_any_storages_come_back(tensors: Pool) -> None:
    found = through_a_file(list(tensors))
    assert_same(list(tensors), found)
    assert_same_memory(tensors, found)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", TYPES)
def test_every_type_comes_back_to_the_bit(dtype: torch.dtype) -> None:
    bits = torch.arange(256).remainder(2 if dtype == torch.bool else 256).to(torch.uint8)
    whole = bits.view(dtype)
    state = {"whole": whole, "none": whole[:0], "scalar": whole[1].clone() if dtype.is_complex else whole[1]}
    found = through_a_file(state)
    assert_same(state, found)
    assert_same_memory(list(tensors_of(state)), list(tensors_of(found)))


def test_what_a_module_and_an_optimizer_give_comes_back() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 3, 5, 5)).sum().backward()
    optimizer.step()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
    found = through_a_file(saved)
    assert_same(saved, found)
    assert_same_memory(list(tensors_of(saved)), list(tensors_of(found)))
    assert found["model"]._metadata == saved["model"]._metadata
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])


def test_views_of_one_storage_are_views_of_one_storage_again() -> None:
    base = torch.arange(24.0).view(4, 6)
    state = {
        "row": base[1],
        "base": base,
        "transposed": base.t(),
        "steps": base[::2, 1::3],
        "bits": base.view(torch.int32),
    }
    found = through_a_file(state)
    found["base"].fill_(7.0)
    for name in state:
        assert found[name].stride() == state[name].stride()
        expected = torch.tensor(7.0).view(torch.int32) if name == "bits" else 7.0
        assert (found[name] == expected).all()
    assert stored_bytes(state) == 4 * 24


def test_overlapping_parts_are_written_once_and_only_as_far_as_they_reach() -> None:
    base = torch.arange(1000)
    state = {"a": base[100:120], "b": base[110:130], "c": base[500:510]}
    assert {item.name: item.shape for item in flatten(state)[0]} == {"a": (30,), "c": (10,)}
    found = through_a_file(state)
    found["a"][10:] = -1
    assert (found["b"][:10] == -1).all() and (found["c"] == base[500:510]).all()


def test_what_looks_into_a_whole_shares_with_all_that_do() -> None:
    base = torch.arange(10)
    state = [base[1:2], base, base[5:6]]
    assert [item.name for item in flatten(state)[0]] == ["1"]
    assert_same_memory(state, through_a_file(state))


def test_a_tensor_that_overlaps_itself_stays_so() -> None:
    windows = torch.arange(10).unfold(0, 4, 1)
    assert stored_bytes(windows) == 80
    assert_same_memory([windows], [through_a_file(windows)])


def test_tensors_with_dimensions_in_another_order_share_again() -> None:
    weight = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    saved = {"weight": weight, "tied": weight.detach()}
    found = through_a_file(saved)
    assert_same_memory(list(saved.values()), list(found.values()))
    found["weight"].zero_()
    assert not found["tied"].any()


def test_containers_at_two_places_are_no_cycle() -> None:
    options = {"lr": 0.1, "betas": (0.9, 0.99)}
    assert_same([options, options, [options]], through_a_file([options, options, [options]]))


def test_interleaved_parts_share_one_entry() -> None:
    q, k, v = torch.arange(30).view(2, 15).chunk(3, dim=-1)
    assert stored_bytes([q, k, v]) == 8 * 30
    found = through_a_file([q, k, v])
    assert_same_memory([q, k, v], found)


def test_parts_side_by_side_are_tensors_by_name_for_others_too() -> None:
    flat = torch.arange(10.0)
    state = {"weight": flat[:8].view(2, 4), "bias": flat[8:]}
    found = safetensors.torch.load(file_of(*flatten(state)))
    assert_same(state, {name: found[name] for name in state})


def test_a_small_part_of_a_large_storage_is_written_alone() -> None:
    large = torch.zeros(1 << 16)
    assert stored_bytes({"head": large[:5]}) == 20
    assert stored_bytes({"columns": large.view(256, 256)[:, :2]}) == 4 * 512
    assert stored_bytes({"many": large[:1].expand(1 << 40)}) == 4
    assert stored_bytes({"column of many": large.view(256, 256)[:, :1].expand(256, 1 << 30)}) == 4 * 256


def test_an_expanded_tensor_comes_back_expanded() -> None:
    found = through_a_file({"many": torch.ones(3, 1).expand(3, 1 << 40)})["many"]
    assert (found.shape, found.stride(), found.untyped_storage().nbytes()) == ((3, 1 << 40), (1, 0), 12)


def test_one_object_at_two_places_is_one_object() -> None:
    weight, array = torch.nn.Parameter(torch.ones(2)), np.ones(2)
    found = through_a_file({"a": weight, "b": [weight, weight.detach()], "c": array, "d": array})
    assert found["a"] is found["b"][0] and found["a"] is not found["b"][1]
    assert found["b"][1].data_ptr() == found["a"].data_ptr()
    assert type(found["a"]) is torch.nn.Parameter and not found["b"][1].requires_grad
    assert found["c"] is found["d"]


def test_lazy_conjugates_and_negatives_are_computed() -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    for lazy in (numbers.conj(), numbers.conj().imag, numbers.conj().t()):
        found = through_a_file(lazy)
        assert torch.equal(found, lazy.resolve_conj().resolve_neg())


@pytest.mark.parametrize("begin", [0, 5])
def test_bytes_beside_larger_elements_need_not_be_whole_elements(begin: int) -> None:
    base = torch.arange(23, dtype=torch.uint8)
    state = [base[16:23], base[8:16].view(torch.float64), base[begin:22]]
    found = through_a_file(state)
    assert_same(state, found)
    assert_same_memory(state, found)


def test_nothing_is_copied_where_there_are_no_gaps() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 4))
    (stored,), _ = flatten({"weight": weight})
    assert stored.tensor.data_ptr() == weight.data_ptr() and not stored.tensor.requires_grad
    tensors = {"weight": torch.zeros(4, 4)}
    assert unflatten('{"$tensors":["weight"]}', tensors, FILE)["weight"] is tensors["weight"]


def test_arrays_are_not_changed_through_what_comes_back() -> None:
    saved = np.arange(6.0).reshape(2, 3)
    found = through_a_file({"array": saved})["array"]
    found[0, 0] = 9.0  # it can be written to, as torch.load's
    assert saved[0, 0] == 0.0


def test_without_memory_a_state_says_where_its_tensors_are_in_their_entries() -> None:
    base = torch.randn(2, 3, 4, 5)
    state = {
        "last": base.to(memory_format=torch.channels_last),
        "base": base,
        "row": base[1],
        "big": torch.ones(2, dtype=torch.complex128),
    }
    tensors, tree = loaded(file_of(*flatten(state)))
    assert tree is not None
    described = unflatten(tree, {name: t.to("meta") for name, t in tensors.items()}, FILE, restride=False)
    assert {name: (t.dtype, tuple(t.shape)) for name, t in described.items()} == {
        name: (t.dtype, tuple(t.shape)) for name, t in state.items()
    }
    assert described["last"].stride() == base.stride()  # in its entry
    assert described["row"].storage_offset() == 60


# How it reads for others.


def test_a_state_dict_is_a_list_of_names() -> None:
    state = {f"layer.{number}.weight": torch.zeros(3) for number in range(5)}
    assert tree_of(state) == {"$tensors": list(state)}
    ordered = torch.nn.Linear(2, 2).state_dict()
    assert tree_of({"model": ordered}) == {
        "model": {
            "$OrderedDict": {"$tensors": ["weight", "bias"], "prefix": "model."},
            "_metadata": {"$OrderedDict": {"": {"version": 1}}},
        }
    }


def test_plain_values_stand_for_themselves() -> None:
    plain = {
        "epoch": 3,
        "loss": [0.1, 1e300, -0.0],
        "name": "é",
        "best": None,
        "done": False,
        "nested": {"a": {}},
    }
    assert tree_of(plain) == plain


@pytest.mark.parametrize(
    "model",
    [
        torch.nn.LSTM(3, 4, 2),
        torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)).to(
            memory_format=torch.channels_last
        ),
        torch.nn.MultiheadAttention(8, 2).to(torch.bfloat16),
    ],
    ids=lambda model: type(model).__name__,
)
def test_the_library_reads_the_same_tensors_of_a_state_dict(model: torch.nn.Module) -> None:
    state = dict(model.state_dict())
    found = safetensors.torch.load(file_of(*flatten(state)))
    assert_same(state, {name: found[name] for name in state})


@pytest.mark.parametrize(
    ("state", "names"),
    [
        (torch.ones(1), ["tensor"]),
        ([torch.ones(1), {"a": torch.ones(1)}], ["0", "1.a"]),
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, ["a.b", "a.b#2"]),
        (
            {"a": {"b": torch.ones(1)}, "a.b": torch.ones(1), "a.b#2": torch.ones(1)},
            ["a.b", "a.b#2", "a.b#2#2"],
        ),
        ({"__metadata__": torch.ones(1)}, ["__metadata__#2"]),
        ({0: torch.ones(1), "0": torch.ones(1), (1, "a"): torch.ones(1)}, ["0", "0#2", "(1, 'a')"]),
        ({"\ud800": torch.ones(1), "\\ud800": torch.ones(1)}, ["\\ud800", "\\ud800#2"]),
        ({"row": (base := torch.ones(2, 2))[0], "all": base}, ["all"]),
    ],
)
def test_entries_are_named_after_their_first_place(state: Any, names: list[str]) -> None:
    assert [item.name for item in flatten(state)[0]] == names
    assert_same(state, through_a_file(state))


# What cannot be saved.

Point = namedtuple("Point", "x y")
cycle: list[Any] = []
cycle.append({"again": cycle})
freed = torch.ones(8)
freed.untyped_storage().resize_(0)
attributed = OrderedDict(a=1)
attributed.note = "lost"  # type: ignore[attr-defined]


class Subclass(torch.Tensor):
    pass


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = OrderedDict(a=value)
    return value


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a function": (lambda: print, "builtin_function_or_method"),
    "an object": (object, "builtins.object"),
    "a module": (lambda: torch.nn.Linear(1, 1), r"Save its state_dict\(\)"),
    "a set": (lambda: {1}, "set"),
    "a named tuple": (lambda: Point(1, 2), r"Point.*Save tuple\(it\)"),
    "a defaultdict": (lambda: defaultdict(int), r"Save dict\(it\)"),
    "a text of a class": (lambda: torch.__version__, r"Save str\(it\)"),
    "a cycle": (lambda: cycle, "contains itself"),
    "deep": (lambda: deep(MAX_DEPTH + 1), "flatter"),
    "too deep for Python": (lambda: deep(5000), "flatter"),
    "attributes": (lambda: attributed, "note"),
    "sparse": (lambda: torch.eye(2).to_sparse(), r"to_dense\(\)"),
    "compressed": (lambda: torch.eye(2).to_sparse_csr(), r"to_dense\(\)"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), r"dequantize\(\)"),
    "without data": (lambda: torch.empty(2, device="meta"), "no data"),
    "a subclass": (lambda: torch.ones(2).as_subclass(Subclass), "Subclass"),
    "not initialized": (torch.nn.UninitializedParameter, "Run the model once"),
    "freed": (lambda: freed, "needs 32 bytes of its storage, which was resized to 0"),
    "65 dimensions": (lambda: torch.ones(1).view((1,) * 65), "65 dimensions"),
    "64 dimensions of complex numbers": (lambda: torch.ones((1,) * 64, dtype=torch.complex128), "takes 65"),
    "an array of objects": (lambda: np.array([None]), "object"),
    "an array of texts": (lambda: np.array(["a"]), "<U1"),
    "a long double": (lambda: np.longdouble(1), "longdouble"),
    "a date": (lambda: np.datetime64("2020-01-01"), "datetime64"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:.*quantize_per_tensor")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_saved_is_refused_by_its_place(name: str) -> None:
    make, expected = REFUSED[name]
    value = make()
    with pytest.raises(InvalidArgument, match=expected) as caught:
        flatten({"epoch": 3, "model": [0, value]})
    assert re.match(r"'model\.1[^']*' cannot be saved", str(caught.value))
    with pytest.raises(InvalidArgument, match="cannot be saved"):
        flatten(value)


@pytest.mark.parametrize(
    "key", [b"a", 1j, torch.float32, (1, (2, b"a")), frozenset(), np.int64(1), torch.Size([1])]
)
def test_keys_that_cannot_be_saved_are_refused(key: Any) -> None:
    with pytest.raises(InvalidArgument, match="'model' cannot be saved: one of its keys"):
        flatten({"model": {key: 1}})


def test_fake_tensors_are_refused() -> None:
    with torch._subclasses.FakeTensorMode():
        fake = torch.ones(2)
    with pytest.raises(InvalidArgument, match="'x' cannot be saved: it has no data"):
        flatten({"x": fake})


def test_tensors_inside_a_transform_are_refused() -> None:
    def save(x: torch.Tensor) -> torch.Tensor:
        flatten({"x": x})
        return x

    with pytest.raises(InvalidArgument, match="'x' cannot be saved"):
        torch.vmap(save)(torch.ones(2, 2))


def deep_key(levels: int) -> Any:
    key: Any = 1
    for _ in range(levels):
        key = (key,)
    return key


def test_as_deep_as_it_may_be() -> None:
    state = deep(MAX_DEPTH)
    innermost = state
    while innermost["a"] != 1:
        innermost = innermost["a"]
    innermost[deep_key(MAX_DEPTH)] = 2
    assert_same(state, through_a_file(state))


@pytest.mark.parametrize("levels", [MAX_DEPTH + 1, 5000])
def test_keys_that_are_too_deep_are_refused(levels: int) -> None:
    with pytest.raises(InvalidArgument, match="cannot be saved"):
        flatten({deep_key(levels): 1})
