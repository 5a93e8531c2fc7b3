"""An access to a tensor that is away raises and ends no process: torch does it, on CPU storages here."""

from __future__ import annotations

import logging

import pytest
import torch

from penstock.runtime.devices.accelerator import AWAY_TEXT
from penstock.runtime.devices.cuda import access_errors
from tests.support.access_errors import CLEAR, SET, AccessErrors

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> AccessErrors:
    return AccessErrors(tmp_path_factory.mktemp("access_errors"))


def test_until_the_bytes_are_back(built: AccessErrors, monkeypatch: pytest.MonkeyPatch) -> None:
    built.install(monkeypatch)
    set_access_error = access_errors(CPU)
    assert set_access_error is not None
    tensor = torch.arange(8.0)
    storage = tensor.untyped_storage()
    storage.resize_(0)
    set_access_error(storage, AWAY_TEXT)
    for access in (tensor.data_ptr, storage.data_ptr, tensor.numpy, tensor.sum, tensor.tolist):
        with pytest.raises(RuntimeError) as raised:
            access()
        assert AWAY_TEXT in str(raised.value)
    set_access_error(storage, None)
    storage.resize_(32)
    tensor.copy_(torch.arange(8.0))
    assert tensor.tolist() == list(range(8))


@pytest.mark.parametrize("lacking", [SET, CLEAR])
def test_where_torch_cannot_the_log_says_so(
    built: AccessErrors, lacking: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    built.install(monkeypatch)
    monkeypatch.delattr(torch._C, lacking)
    with caplog.at_level(logging.WARNING, "penstock"):
        assert access_errors(CPU) is None
    (record,) = caplog.records
    assert "cannot be made errors" in record.getMessage() and torch.__version__ in record.getMessage()
