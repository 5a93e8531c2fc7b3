"""On an accelerator, what reads and writes storages by their methods, and by no operator, finds their bytes.

The accelerator is the checked one, whose memory is the CPU's: there torch.save writes from C++, in its
newer format, so the older one is tried here.
"""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from penstock.runtime.storage_methods import held_bytes
from penstock.runtime.storages import AWAY
from penstock.storage.spill import SpillSpace
from tests.support.checked import CheckedRun, checked_run

NUMBERS = 1024
STATE = 12  # tensors, of twice the budget together
BUDGET_BYTES = STATE * NUMBERS * 4 // 2


@pytest.fixture
def run(spill: SpillSpace) -> Iterator[CheckedRun]:
    with checked_run(spill, BUDGET_BYTES, refuses=True) as opened:
        yield opened


def let_leave(run: CheckedRun, tensor: torch.Tensor) -> None:
    managed = run.clock.storages.find(tensor.untyped_storage())
    assert managed is not None
    with run.engine.lock:
        run.engine.evict(managed, release=True)
    run.engine.drain()
    assert managed.state == AWAY and held_bytes(tensor.untyped_storage()) == 0


def made(run: CheckedRun, begin: int = 0) -> torch.Tensor:
    """It is away."""
    tensor = torch.arange(float(begin), begin + NUMBERS).mul_(1)
    let_leave(run, tensor)
    return tensor


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=False)
    file.seek(0)
    return torch.load(file)


def of(storage: Any) -> torch.Tensor:
    return torch.empty(0).set_(storage)


READS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "torch.save": saved,
    "pickle": lambda tensor: pickle.loads(pickle.dumps(tensor)),
    "deepcopy": copy.deepcopy,
    "deepcopy of a storage": lambda tensor: of(copy.deepcopy(tensor.untyped_storage())),
    "clone": lambda tensor: of(tensor.untyped_storage().clone()),
    "set_": lambda tensor: of(tensor.untyped_storage()),
    "copy_ from it": lambda tensor: of(torch.UntypedStorage(4 * NUMBERS).copy_(tensor.untyped_storage())),
    "elements": lambda tensor: of(torch.ByteTensor(tensor.untyped_storage().tolist()).untyped_storage()),
    "elements of its type": lambda tensor: of(torch.FloatTensor(list(tensor.storage())).untyped_storage()),
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("way", READS)
def test_reading(run: CheckedRun, way: str) -> None:
    tensor = made(run)
    assert tensor.untyped_storage().nbytes() == len(tensor.untyped_storage()) == 4 * NUMBERS
    assert torch.equal(READS[way](tensor), torch.arange(float(NUMBERS)))


def test_reading_more_than_the_budget(spill: SpillSpace) -> None:
    file = io.BytesIO()
    with checked_run(spill, BUDGET_BYTES, refuses=True) as run:
        state = [made(run, begin) for begin in range(STATE)]
        torch.save(state, file, _use_new_zipfile_serialization=False)
        assert run.device.meter.peak_bytes() <= BUDGET_BYTES
    file.seek(0)
    for begin, tensor in enumerate(torch.load(file)):
        assert torch.equal(tensor, torch.arange(float(begin), begin + NUMBERS))


def test_its_text(run: CheckedRun) -> None:
    assert str(made(run, 7)) == str(torch.arange(7.0, 7 + NUMBERS))


@pytest.mark.parametrize("elsewhere", [False, True], ids=["", "on another thread"])
def test_what_is_written_stays(run: CheckedRun, elsewhere: bool) -> None:
    tensor = made(run)
    tensor.add(0)  # it is there again, and has a copy

    def write() -> None:
        tensor.untyped_storage().copy_(torch.full((NUMBERS,), 3.0).untyped_storage())
        tensor.untyped_storage()[0] = 1

    if elsewhere:
        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
    else:
        write()
    let_leave(run, tensor)
    expected = torch.full((NUMBERS,), 3.0)
    expected.untyped_storage()[0] = 1
    assert torch.equal(tensor.add(0), expected)


def test_storages_are_told_apart_while_they_are_away(run: CheckedRun) -> None:
    tensors = [made(run, begin) for begin in range(2)]
    views = [tensor.view(-1) for tensor in tensors]
    for tensor in tensors:
        let_leave(run, tensor)
    first, second = (tensor.untyped_storage().data_ptr() for tensor in tensors)
    assert first != second and 0 not in (first, second)
    assert [view.untyped_storage().data_ptr() for view in views] == [first, second]


def test_torch_has_its_methods_again_when_the_run_is_over(spill: SpillSpace) -> None:
    def methods() -> dict[str, Any]:
        return {**vars(torch.UntypedStorage), "_str": torch._tensor_str._str}

    before = methods()
    with checked_run(spill, BUDGET_BYTES):
        assert methods() != before
    assert methods() == before
