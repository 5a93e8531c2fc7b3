from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.options import IoOptions
from penstock.storage.spill import SpillSpace


@pytest.fixture(scope="module")
def spill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpillSpace]:
    """In the page cache: no disk is waited for."""
    options = IoOptions(paths=["posix buffered"], page_cache_budget=64 << 20)
    with SpillSpace(tmp_path_factory.mktemp("spill"), options) as space:
        yield space
