"""A GPU packs tensors to the same bytes as a CPU, and expands them to the same bits."""

from __future__ import annotations

import pytest
import torch

from penstock import codecs
from tests.support.accelerator import wanted

DEVICE = wanted("cuda")


@pytest.mark.parametrize("name", codecs.CODECS)
@pytest.mark.parametrize("elements", [1, 127, 128, 1000, 1 << 20])
def test_the_same_bytes_as_on_a_cpu(name: str, elements: int) -> None:
    values = torch.relu(torch.randn(elements, generator=torch.Generator().manual_seed(elements)))
    packed = codecs.encode(name, values.to(DEVICE))
    assert torch.equal(packed.cpu(), codecs.encode(name, values))
    back = codecs.decode(name, packed, like=values)
    assert back.device.type == DEVICE
    assert torch.equal(back.cpu(), codecs.decode(name, packed.cpu(), like=values))
