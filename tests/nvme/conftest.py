from __future__ import annotations

import pytest

from tests.support.nvme_target.process import NoCompiler, compiled


@pytest.fixture(scope="session", autouse=True)
def target_program() -> None:
    try:
        compiled()
    except NoCompiler as error:
        pytest.skip(f"the test target of NVMe/TCP cannot be compiled: {error}")
