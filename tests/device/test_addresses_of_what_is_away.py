"""Addresses of tensors, in a run on an accelerator: that of the bytes, which they keep for a while, or for as
long as another library has the memory."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.dlpack

import penstock
from penstock.runtime.storage_methods import held_bytes
from tests.support.accelerator import wanted
from tests.support.runs import ACCELERATED

DEVICE = wanted("emu")
MIB = 1 << 20
BUDGET_BYTES = 8 * MIB


def offload(spill_dir: Path) -> penstock.Offload:
    return penstock.offload(
        device=DEVICE,
        device_budget=BUDGET_BYTES,
        spill_dir=spill_dir,
        hardware=ACCELERATED,
        host_budget="80MiB",
    )


@pytest.fixture
def run(configure: Callable[..., None], tmp_path: Path) -> Iterator[penstock.Offload]:
    configure(order="stepped", seed=1)
    with offload(tmp_path) as opened:
        yield opened


def full(number: float) -> torch.Tensor:
    return torch.full((MIB // 4,), float(number), device=DEVICE)


def is_away(tensor: torch.Tensor) -> bool:
    return not held_bytes(tensor.untyped_storage())


def away(count: int) -> list[torch.Tensor]:
    made = [full(number) for number in range(count)]
    others = [full(0) for _ in range(8)]  # noqa: F841
    assert all(map(is_away, made))
    return made


@pytest.mark.parametrize("elsewhere", [False, True], ids=["", "on another thread"])
def test_it_is_that_of_the_bytes(run: penstock.Offload, elsewhere: bool) -> None:
    (tensor,) = away(1)
    view = torch.as_strided(tensor, (4,), (1,), 16)
    others = [full(0) for _ in range(8)]
    assert is_away(view)
    found: list[int] = []
    if elsewhere:
        thread = threading.Thread(target=lambda: found.append(view.data_ptr()))
        thread.start()
        thread.join()
    else:
        found.append(view.data_ptr())
    assert not is_away(tensor) and len(others) == 8
    assert found == [tensor.untyped_storage().data_ptr() + 64] == [tensor.data_ptr() + 64]


def test_several_stay_together_until_a_step_begins(run: penstock.Offload) -> None:
    made = away(5)
    addresses = [tensor.data_ptr() for tensor in made]
    others = [full(0) for _ in range(8)]
    assert len(set(addresses)) == 5
    assert [tensor.untyped_storage().data_ptr() for tensor in made] == addresses
    with run.step():
        others += [full(0) for _ in range(8)]
    assert all(map(is_away, made)) and len(others) == 16
    assert [float(tensor.mean()) for tensor in made] == list(range(5))


def test_more_than_the_budget_are_refused_and_never_share_one(run: penstock.Offload) -> None:
    made = away(12)
    with pytest.raises(penstock.BudgetTooSmall):
        [tensor.data_ptr() for tensor in made]
    with run.step():
        pass
    assert [float(tensor.mean()) for tensor in made] == list(range(12))


def test_what_is_written_there_stays(run: penstock.Offload, emu: Any) -> None:
    tensor = away(6)[5]
    tensor.add(0)  # it is there, and has a copy
    address = tensor.data_ptr()
    torch.accelerator.synchronize()
    ctypes.memset(emu.alias_of(address), 0, 4)
    with run.step():
        others = [full(0) for _ in range(8)]
    assert is_away(tensor) and len(others) == 8
    assert tensor[:3].tolist() == [0, 5, 5]


@pytest.mark.parametrize("brought", [False, True], ids=["away", "on its way"])
def test_who_uses_it_need_not_wait(
    run: penstock.Offload, emu: Any, configure: Callable[..., None], brought: bool
) -> None:
    tensor = away(4)[3]
    configure(order="lazy")
    if brought:  # for a kernel, which waits on the device
        tensor.add(0)
    assert ctypes.c_float.from_address(emu.alias_of(tensor.data_ptr())).value == 3


def test_tensors_without_bytes_on_the_device(run: penstock.Offload) -> None:
    assert torch.empty(0, device=DEVICE).data_ptr() == 0
    tensor = torch.ones(3)
    assert tensor.data_ptr() == tensor.untyped_storage().data_ptr()


def test_a_tensor_of_before_the_run_keeps_it_too(configure: Callable[..., None], tmp_path: Path) -> None:
    tensor = full(3)
    with offload(tmp_path):
        address = tensor.data_ptr()
        others = [tensor * 0, *(full(0) for _ in range(10))]
        assert any(map(is_away, others)) and tensor.untyped_storage().data_ptr() == address


def test_other_libraries_of_cuda_ask_for_it(run: penstock.Offload, monkeypatch: pytest.MonkeyPatch) -> None:
    (tensor,) = away(1)
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "is_cuda", True)
        found = tensor.view(512, 512)[8:].__cuda_array_interface__
    others = [full(0) for _ in range(8)]
    assert not is_away(tensor) and len(others) == 8
    assert found["data"][0] == tensor.untyped_storage().data_ptr() + 8 * 512 * 4 and found["shape"] == (
        504,
        512,
    )


def exports() -> dict[str, Callable[[torch.Tensor], Any]]:
    """As they are now: a run has others in their places."""
    return {
        "torch.to_dlpack": torch.to_dlpack,
        "torch.utils.dlpack.to_dlpack": torch.utils.dlpack.to_dlpack,
        "__dlpack__": lambda tensor: tensor.__dlpack__(),
        "__dlpack__ of DLPack 1": lambda tensor: tensor.__dlpack__(max_version=(1, 0)),
        "the tensor": lambda tensor: tensor,
    }


@pytest.mark.parametrize("how", exports())
def test_another_library_has_the_memory_for_as_long_as_it_likes(
    run: penstock.Offload, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE == "emu":  # of which torch knows the number only by its first name
        number = torch.utils.dlpack.DLDeviceType.kDLExtDev, 0
        monkeypatch.setattr(torch.Tensor, "__dlpack_device__", lambda tensor: number)
    tensor = away(6)[5]
    taken = torch.from_dlpack(exports()[how](tensor.view(512, 512)))
    for _ in range(2):
        with run.step():
            others = [full(0) for _ in range(10)]
            assert any(map(is_away, others)) and not is_away(tensor)
    assert taken.data_ptr() == tensor.untyped_storage().data_ptr()
    assert taken.shape == (512, 512) and taken.cpu().eq(5).all()
    taken[0, 0] = 7
    del taken, others
    others = [full(0) for _ in range(8)]
    assert is_away(tensor) and len(others) == 8
    assert tensor[:3].tolist() == [7, 5, 5] and tensor[3:].cpu().eq(5).all()


def test_more_than_the_budget_are_lent_one_by_one_but_not_at_once(run: penstock.Offload) -> None:
    made = away(12)
    for number, tensor in enumerate(made):
        assert float(torch.from_dlpack(tensor.__dlpack__()).mean()) == number
    with pytest.raises(penstock.BudgetTooSmall):
        [tensor.__dlpack__() for tensor in made]
    assert [float(tensor.mean()) for tensor in made] == list(range(12))


@pytest.mark.parametrize("first", ["lent", "asked"])
def test_an_address_holds_though_a_loan_ends(run: penstock.Offload, first: str) -> None:
    (tensor,) = away(1)
    if first == "lent":
        lent = tensor.__dlpack__()
    address = tensor.data_ptr()
    if first == "asked":
        lent = tensor.__dlpack__()
    del lent
    others = [full(0) for _ in range(8)]
    assert tensor.untyped_storage().data_ptr() == address and len(others) == 8
    with run.step():
        others += [full(0) for _ in range(8)]
    assert is_away(tensor)


def test_a_loan_outlives_the_run(configure: Callable[..., None], tmp_path: Path) -> None:
    with offload(tmp_path):
        made = away(3)
        taken = torch.from_dlpack(made[1].__dlpack__())
    taken.add_(1)
    del taken
    assert [float(tensor.mean()) for tensor in made] == [0, 2, 2]


@pytest.mark.parametrize("after", [False, True], ids=["in a run", "after it"])
def test_save_pretrained_of_tied_weights(configure: Callable[..., None], tmp_path: Path, after: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=2048, n_embd=128, n_head=2, n_layer=12, n_positions=64)
    torch.manual_seed(1)
    model = transformers.GPT2LMHeadModel(config)
    assert model.lm_head.weight is model.transformer.wte.weight
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    configure(memory="20MiB")

    def save() -> None:
        model.save_pretrained(tmp_path / "saved")

    (tmp_path / "spilled").mkdir()
    with penstock.offload(
        device=DEVICE,
        device_budget=8 * MIB,
        spill_dir=tmp_path / "spilled",
        hardware=ACCELERATED,
        host_budget="128MiB",
    ):
        model.to(DEVICE).tie_weights()  # an emulated device's are others then
        assert model.lm_head.weight is model.transformer.wte.weight
        others = [full(0) for _ in range(20)]
        assert is_away(model.lm_head.weight) and len(others) == 20
        if not after:
            save()
    if after:
        assert any(map(is_away, model.parameters()))
        save()
    found = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "saved")
    assert found.lm_head.weight is found.transformer.wte.weight
    torch.testing.assert_close(dict(found.state_dict()), expected, rtol=0, atol=0)
    assert (tmp_path / "saved" / "model.safetensors").stat().st_size < 1.1 * sum(
        parameter.nbytes for parameter in found.parameters()
    )
