"""`into` fills modules, optimizers and tensors in place, all of them or none."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import penstock
from penstock import checkpoint
from tests.support.families import FAMILIES, iterate, small_gpt, weights
from tests.support.states import STATES, bits, numbers, same, trained_gpt

MODES = [True, False]


def emptied(value: Any) -> Any:
    """The same structure with zeros in its tensors."""
    value = copy.deepcopy(value)

    def clear(below: Any) -> None:
        if isinstance(below, torch.Tensor):
            below.detach().zero_()
        elif isinstance(below, dict | list | tuple):
            for item in below.values() if isinstance(below, dict) else below:
                clear(item)

    clear(value)
    return value


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict | list | tuple):
        items = value.values() if isinstance(value, dict) else value
        return [tensor for item in items for tensor in tensors_of(item)]
    return []


@pytest.mark.parametrize("mmap", MODES)
@pytest.mark.parametrize("name", [name for name in STATES if name not in ("one number",)])
def test_every_state_can_be_filled(name: str, mmap: bool, tmp_path: Path) -> None:
    state = STATES[name]()
    checkpoint.save(state, tmp_path / "state")
    target = emptied(state)
    there = [tensor.data_ptr() for tensor in tensors_of(target)]
    filled = checkpoint.load(tmp_path / "state", mmap=mmap, into=target)
    assert same(filled, state)
    assert filled is target
    assert [tensor.data_ptr() for tensor in tensors_of(filled)] == there


@pytest.mark.parametrize("mmap", MODES)
def test_a_module_is_filled(mmap: bool, tmp_path: Path) -> None:
    model, _ = small_gpt()
    checkpoint.save(model.state_dict(), tmp_path / "state")
    other = FAMILIES["gpt"].make()
    parameters = list(other.parameters())
    assert checkpoint.load(tmp_path / "state", mmap=mmap, into=other) is other
    assert weights(other) == weights(model)
    assert all(now is then for now, then in zip(other.parameters(), parameters, strict=True))
    iterate(other, torch.optim.SGD(other.parameters(), lr=0.1), 0)


def test_other_strides_and_types_of_memory_are_filled(tmp_path: Path) -> None:
    state = {"a": torch.randn(2, 3, 4, 5), "b": torch.randn(6, 4), "c": torch.randn(3).to(torch.complex64)}
    checkpoint.save(state, tmp_path / "state")
    target = {
        "a": torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "b": torch.zeros(4, 6).t(),
        "c": torch.zeros(3, dtype=torch.complex64).conj(),
    }
    checkpoint.load(tmp_path / "state", into=target)
    assert all(torch.equal(target[key], state[key]) for key in state)
    assert target["a"].is_contiguous(memory_format=torch.channels_last)


def test_channels_last_goes_into_channels_last(tmp_path: Path) -> None:
    model = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    checkpoint.save(model.state_dict(), tmp_path / "state")
    other = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    checkpoint.load(tmp_path / "state", into=other)
    assert torch.equal(other.weight, model.weight)


@pytest.mark.parametrize("stepped", [True, False])
def test_training_resumes_in_place(stepped: bool, tmp_path: Path) -> None:
    state = trained_gpt(torch.optim.AdamW)
    checkpoint.save({**state, "note": [1, 2]}, tmp_path / "state")
    expected, _ = small_gpt()
    expected.load_state_dict(state["model"])
    reference = torch.optim.AdamW(expected.parameters(), lr=0.5)
    reference.load_state_dict(state["optimizer"])

    model = FAMILIES["gpt"].make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    if stepped:
        iterate(model, optimizer, 7)
    training = {"model": model, "optimizer": optimizer, "step": 0, "loss": 5.0, "note": []}
    assert checkpoint.load(tmp_path / "state", into=training) is training
    assert training["model"] is model and training["optimizer"] is optimizer
    assert (training["step"], training["loss"], training["note"]) == (2, 0.1, [1, 2])
    assert optimizer.param_groups[0]["lr"] == 0.01
    for step in range(2, 4):
        iterate(model, optimizer, step)
        iterate(expected, reference, step)
    assert weights(model) == weights(expected)


class Counting(nn.Linear):
    count = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


@pytest.mark.parametrize("writer", [checkpoint.save, torch.save])
@pytest.mark.parametrize("wrapped", ["saved", "filled"])
def test_a_wrapped_model_and_a_bare_one_fill_each_other(wrapped: str, writer: Any, tmp_path: Path) -> None:
    model, other = Counting(2, 2), Counting(2, 2)
    model.count = 5
    saved = nn.DataParallel(model) if wrapped == "saved" else model
    filled = nn.DataParallel(other) if wrapped == "filled" else other
    writer({"model": saved.state_dict()}, tmp_path / "state")
    checkpoint.load(tmp_path / "state", into={"model": filled})
    assert other.count == 5 and torch.equal(other.weight, model.weight)
    # Names of a dict are compared as they are, and a wrapper hides no difference.
    with pytest.raises(penstock.InvalidArgument, match="missing in the file: model"):
        checkpoint.load(tmp_path / "state", into={"model": filled.state_dict()})
    larger = nn.Sequential(Counting(2, 2), Counting(2, 2))
    for into in (larger, nn.DataParallel(larger)):
        with pytest.raises(penstock.InvalidArgument, match="missing in the file: model"):
            checkpoint.load(tmp_path / "state", into={"model": into})


def test_a_file_with_one_name_of_tied_weights_fills_both(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        model = nn.ModuleDict({"words": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
        model["head"].weight = model["words"].weight
        return model

    model, other = tied(), tied()
    safetensors.torch.save_model(model, str(tmp_path / "weights.safetensors"))
    checkpoint.load(tmp_path / "weights.safetensors", into=other)
    assert torch.equal(other["words"].weight, model["words"].weight)
    other["head"].weight = nn.Parameter(torch.zeros(5, 3))
    with pytest.raises(penstock.InvalidArgument, match=r"missing in the file: \w+\.weight"):
        checkpoint.load(tmp_path / "weights.safetensors", into=other)


def test_the_extra_state_of_a_module_is_set(tmp_path: Path) -> None:
    model, other = Counting(2, 2), Counting(2, 2)
    model.count = 5
    checkpoint.save(model.state_dict(), tmp_path / "state")
    checkpoint.load(tmp_path / "state", into=other)
    assert other.count == 5 and torch.equal(other.weight, model.weight)


def test_tied_weights_are_filled_once(tmp_path: Path) -> None:
    model = FAMILIES["tied_embeddings"].make()
    checkpoint.save(model.state_dict(), tmp_path / "state")
    for family in ("tied_embeddings", "gpt"):  # tied, and in memory of their own
        other = FAMILIES[family].make()
        checkpoint.load(tmp_path / "state", into=other)
        assert same(other.state_dict(), model.state_dict())


def test_autograd_knows_that_tensors_were_changed(tmp_path: Path) -> None:
    checkpoint.save({"a": torch.ones(3)}, tmp_path / "state")
    weight = torch.full((3,), 2.0, requires_grad=True)
    loss = (weight * weight).sum()
    checkpoint.load(tmp_path / "state", into={"a": weight})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def peak_growth_bytes(work: Any) -> int:
    def status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        line = next(line for line in lines if line.startswith(name + ":"))
        return int(line.split()[1]) * 1024

    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    work()
    return status("VmHWM") - before


def test_there_is_no_second_copy_in_memory(tmp_path: Path) -> None:
    size = 192 << 20
    target = {"a": torch.ones(size // 2, dtype=torch.uint8), "b": torch.ones(size // 2, dtype=torch.uint8)}
    checkpoint.save(target, tmp_path / "state")
    path = tmp_path / "state"
    checkpoint.load(path, into=target, mmap=False)  # threads have their buffers now
    assert peak_growth_bytes(lambda: checkpoint.load(path, into=target, mmap=False)) < size / 2


# -- what does not fit ------------------------------------------------------------------------------


def state() -> dict[str, Any]:
    return {"a": numbers(100), "below": {"b": numbers(10), "c": [numbers(5), 3]}, "step": 9}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda into: into.pop("a"), "not expected: a"),
        (lambda into: into["below"].pop("b"), r"not expected: below\.b"),
        (lambda into: into.update(d=torch.zeros(1)), "missing in the file: d"),
        (
            lambda into: into.update(stpe=into.pop("step")),
            r"missing in the file: stpe \(did you mean step\?\)\. Nothing",
        ),
        (lambda into: into.update(notes=[]), r"missing in the file: notes\. Nothing"),
        (
            lambda into: into.update(blow={"b": into.pop("below")["b"]}),
            r"missing in the file: blow\.b \(did you mean below\.b\?\)",
        ),
        (lambda into: into["below"]["c"].append(7), r"missing in the file: below\.c\.2\. Nothing"),
        (lambda into: into["below"]["c"].append(torch.zeros(1)), r"missing in the file: below\.c\.2"),
        (
            lambda into: into.update(a=torch.zeros(99)),
            r"a \(float32 \[100\] in the file, .* \[99\] here\)",
        ),
        (lambda into: into.update(a=torch.zeros(100, dtype=torch.int32)), r"int32 \[100\] here"),
        (lambda into: into.update(a=3), "not expected: a"),
        (
            lambda into: into["below"].update(c=torch.zeros(2)),
            r"missing in the file: below\.c; .*\.c\.0",
        ),
        (lambda into: into.update(a=torch.zeros(100, device="meta")), "meta device"),
        (lambda into: into.update(a=torch.zeros(1).expand(100)), "share memory"),
        (lambda into: into.update(a=torch.zeros(100).to_sparse()), "cannot be filled in place"),
        (lambda into: into.update({f"{i}": torch.zeros(1) for i in range(9)}), "and 4 more"),
    ],
)
def test_what_does_not_fit_is_listed_and_nothing_is_touched(change: Any, said: str, tmp_path: Path) -> None:
    checkpoint.save(state(), tmp_path / "state")
    into = emptied(state())
    change(into)
    before = copy.deepcopy(into)
    with pytest.raises(penstock.InvalidArgument, match=said) as refusal:
        checkpoint.load(tmp_path / "state", into=into)
    assert "Nothing was changed" in str(refusal.value)
    for now, then in zip(tensors_of(into), tensors_of(before), strict=True):
        assert now.is_meta or now.layout != torch.strided or bits(now) == bits(then)


def test_what_is_no_tensor_can_be_added_and_settings_of_an_optimizer_be_new(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    saved = optimizer.state_dict()
    saved["param_groups"][0].pop("maximize")
    checkpoint.save({"optimizer": saved, "step": 3}, tmp_path / "state")
    into = {"optimizer": optimizer}
    assert checkpoint.load(tmp_path / "state", into=into) == {"optimizer": optimizer, "step": 3}


def test_the_outermost_kinds_have_to_agree(tmp_path: Path) -> None:
    checkpoint.save([numbers(1)], tmp_path / "state")
    with pytest.raises(penstock.InvalidArgument, match="the file holds a list, not a dict"):
        checkpoint.load(tmp_path / "state", into={})


def test_an_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    checkpoint.save(trained_gpt(torch.optim.AdamW)["optimizer"], tmp_path / "state")
    other = nn.Linear(2, 2)
    with pytest.raises(penstock.InvalidArgument, match="param_groups"):
        checkpoint.load(tmp_path / "state", into=torch.optim.AdamW(other.parameters()))


def test_devices_are_those_of_the_target(tmp_path: Path) -> None:
    checkpoint.save({}, tmp_path / "state")
    with pytest.raises(penstock.InvalidArgument, match="leave map_location out"):
        checkpoint.load(tmp_path / "state", "cpu", into={})


@pytest.mark.parametrize("mmap", MODES)
def test_damage_says_what_was_overwritten(mmap: bool, tmp_path: Path) -> None:
    path = tmp_path / "state"
    checkpoint.save(state(), path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(penstock.InvalidFile, match=r"checksum of below\.c\.0 .* Overwritten until then: a, "):
        checkpoint.load(path, mmap=mmap, into=emptied(state()))
