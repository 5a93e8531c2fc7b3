"""Without the library, an integration says what to install."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.mark.parametrize("library", ["accelerate", "lightning", "transformers"])
def test_the_error_names_the_extra(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.delitem(sys.modules, f"penstock.integrations.{library}", raising=False)
    with pytest.raises(ImportError, match=r"pip install '\.\[integrations\]'") as raised:
        importlib.import_module(f"penstock.integrations.{library}")
    assert raised.value.name == library
