"""Operators of the emulated device: by whatever way they run, the CPU's bits, shapes, strides and aliases."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("emu")

Given = Callable[[torch.Tensor, torch.Tensor], Any]  # of [8, 16] float32, and indices [1, 3]


def written(write: Callable[[torch.Tensor], object]) -> Given:
    """What is left in a tensor after it was written to."""

    def run(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        target = x.clone()
        write(target)
        return target

    return run


def out(operator: Any, *shape: int) -> Given:
    """With a result of this shape given, which the operator may resize."""
    return lambda x, i: operator(x, x, out=torch.empty(shape, device=x.device))


def gradients(function: Callable[[torch.Tensor], torch.Tensor]) -> Given:
    def run(x: torch.Tensor, i: torch.Tensor) -> list[torch.Tensor]:
        x = x.clone().requires_grad_()
        result = function(x)
        result.backward(torch.ones_like(result))
        assert x.grad is not None
        return [result.detach(), x.grad]

    return run


OPERATORS: dict[str, Given] = {
    "sum": lambda x, i: x.sum(),
    "mean of a dimension": lambda x, i: x.mean(1, keepdim=True),
    "promoted": lambda x, i: [x + 1, x * 2.5, i + 0.5, x + i[0], x.double() + x, x.half() * x, i / 2],
    "scalar of the host": lambda x, i: x * torch.tensor(3.0) + torch.tensor(2, dtype=torch.int64),
    "cat": lambda x, i: [torch.cat([x, x]), torch.stack([x, x], 1), torch.cat([x, x.double()])],
    "index": lambda x, i: [x[i], x[:, i], x[i, i], x[torch.tensor([0, 2])]],
    "masks": lambda x, i: [x[x > 0], x.nonzero(), x.masked_select(x < 0), torch.where(x > 0)[1]],
    "index_put": lambda x, i: x.clone().index_put_((i,), x[:2], accumulate=True),
    "put by mask": written(lambda x: x.__setitem__(x > 0, 7)),
    "sorts": lambda x, i: [*x.topk(3), *x.sort(descending=True), x.argsort(), *x.max(0), x.median()],
    "softmax": lambda x, i: [x.softmax(-1), x.log_softmax(0)],
    "gather": lambda x, i: [x.gather(1, i[None].expand(8, 2)), x.index_select(1, i), x.take(i)],
    "scatter": lambda x, i: x.clone().scatter_add_(0, i[:, None].expand(2, 16), x),
    "products": lambda x, i: [x @ x.t(), torch.einsum("ab,cb->ac", x, x), torch.addmm(x, x[:, :8], x)],
    "complex products": lambda x, i: torch.view_as_real((c := torch.complex(x, x)) @ c.mH),
    "scans": lambda x, i: [x.cumsum(0), x.cumprod(1), x.logcumsumexp(1), x.diff()],
    "where": lambda x, i: torch.where(x > 0, x, 0.0),
    "add(out=) that grows": out(torch.add, 0),
    "add(out=) in place": out(torch.add, 8, 16),
    "sub(out=) of itself": lambda x, i: torch.sub(y := x.clone(), 1, out=y),
    "cat(out=)": lambda x, i: torch.cat([x, x], out=torch.empty(0, device=x.device)),
    "sort(out=)": lambda x, i: torch.sort(
        x, out=(torch.empty(0, device=x.device), torch.empty(0, dtype=torch.int64, device=x.device))
    ),
    "masked_select(out=)": lambda x, i: torch.masked_select(x, x > 0, out=torch.empty(3, device=x.device)),
    "norms": lambda x, i: [torch.linalg.norm(x), torch.linalg.vector_norm(x, 1, dim=1)],
    "svd": lambda x, i: torch.linalg.svdvals(x),
    "cholesky": lambda x, i: torch.linalg.cholesky(x @ x.T + torch.eye(8, device=x.device)),
    "fft": lambda x, i: torch.view_as_real(torch.fft.rfft(x)),
    "conjugates": lambda x, i: [torch.view_as_real((torch.complex(x, x).conj() * 2).resolve_conj())],
    "unique": lambda x, i: [i.unique(), *torch.unique(x.round(), return_inverse=True, return_counts=True)],
    "bincount": lambda x, i: [torch.bincount(i), i.repeat_interleave(i), x.histc(4)],
    "moves": lambda x, i: [x.roll(1, 0), x.tril(), x.flip(0), x.t().contiguous(), x.movedim(0, 1).clone()],
    "conv2d": lambda x, i: F.conv2d(x.view(1, 1, 8, 16), x[:3, :3].reshape(1, 1, 3, 3)),
    "batch_norm": lambda x, i: F.batch_norm(x, None, None, training=True),
    "group_norm": lambda x, i: F.group_norm(x.view(2, 4, 16), 2),
    "bf16 layer_norm": lambda x, i: F.layer_norm(x.bfloat16(), (16,)),
    "rms_norm": lambda x, i: F.rms_norm(x, (16,)),
    "pools": lambda x, i: [F.max_pool2d(y := x.view(1, 1, 8, 16), 2), F.avg_pool2d(y, 2)],
    "interpolate": lambda x, i: F.interpolate(x[None], scale_factor=2),
    "embedding": lambda x, i: [F.embedding(i, x), *F.embedding_bag(i, x, i[:1] * 0)[None]],
    "factories": lambda x, i: [
        torch.arange(5, device=x.device) + i[0],
        torch.linspace(0, 1, 7, device=x.device),
        torch.eye(3, device=x.device),
        torch.full((2,), 3, device=x.device),
        torch.ones_like(x, dtype=torch.float64),
    ],
    "foreach": lambda x, i: [
        *torch._foreach_add([x, x], 1),
        *torch._foreach_mul([x, x], [x, x]),
        *torch._foreach_norm([x, x]),
    ],
    "addcdiv_": written(lambda x: x.addcdiv_(x, x.abs() + 1, value=0.5).clamp_(-1, 1).neg_()),
    "written views": written(lambda x: (x[1:3].mul_(2), x.t()[2].zero_(), x.view(-1)[5:9].copy_(x[0, :4]))),
    "written diagonal": written(lambda x: x.diagonal().fill_(3)),
    "resized": written(lambda x: x.resize_(4, 8)),
    "casts": lambda x, i: [x.half(), x.bfloat16(), x.to(torch.int32), i.bool(), x.double().float()],
    "views of other types": lambda x, i: [x.view(torch.uint8), x.view(torch.int32) >> 3],
    "losses": lambda x, i: [
        F.cross_entropy(x[:2], i),
        F.binary_cross_entropy_with_logits(x, x.sigmoid()),
        F.mse_loss(x, x + 1),
        F.nll_loss(x[:2].log_softmax(1), i, reduction="sum"),
    ],
    "checks": lambda x, i: [x.isfinite().all(), torch.allclose(x, x), torch.equal(x, x), x.isnan().any()],
    "numbers": lambda x, i: [x[0, 0].item(), i.tolist(), bool(x.sum() > 0), x.view(torch.uint8)[0, 1].item()],
    "quantile": lambda x, i: x.quantile(0.5),
    "glu": lambda x, i: F.glu(x),
    "copies": lambda x, i: [copy.deepcopy(x), pickle.loads(pickle.dumps(x)), x.cpu().to(x.device)],
    "attention": lambda x, i: F.scaled_dot_product_attention(y := x.view(1, 2, 4, 16), y, y, is_causal=True),
    "gradients of products": gradients(lambda x: (x @ x.t()).tanh().sum()),
    "gradients of norms": gradients(
        lambda x: F.layer_norm(x, (16,)).square() + F.group_norm(x[:, :, None], 4)[..., 0]
    ),
    "gradients of conv2d": gradients(lambda x: F.conv2d(x.view(1, 1, 8, 16), x[:3, :3].reshape(1, 1, 3, 3))),
    "gradients of indices": gradients(lambda x: x[torch.tensor([0, 0, 1])].cumsum(0)[:, ::2].exp()),
    "gradients of attention": gradients(
        lambda x: F.scaled_dot_product_attention(y := x.view(1, 2, 4, 16), y, y)
    ),
    "unscaling": written(
        lambda x: torch._amp_foreach_non_finite_check_and_unscale_(
            [x], torch.zeros((), device=x.device), torch.full((), 0.5, device=x.device)
        )
    ),
}  # fmt: skip


def leaves(result: Any) -> list[Any]:
    return [leaf for one in result for leaf in leaves(one)] if isinstance(result, (list, tuple)) else [result]


@pytest.fixture(scope="module")
def given() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(1)), torch.tensor([1, 3])


@pytest.mark.parametrize("order", ["eager", "lazy", "stepped"])
@pytest.mark.parametrize("name", OPERATORS)
def test_operators(emu: Any, name: str, order: str, given: tuple[torch.Tensor, torch.Tensor]) -> None:
    emu.configure(order=order, seed=1)
    with sdpa_kernel(SDPBackend.MATH):
        expected = leaves(OPERATORS[name](*given))
        for _ in range(2):  # the second time, what results look like is known
            found = leaves(OPERATORS[name](*(tensor.to("emu") for tensor in given)))
            assert len(found) == len(expected)
            for one, other in zip(found, expected, strict=True):
                if isinstance(other, torch.Tensor):
                    assert one.device.type == "emu" and one.dtype == other.dtype
                    assert one.shape == other.shape and one.stride() == other.stride()
                    assert torch.equal(one.cpu(), other)
                else:
                    assert one == other


def test_integers_are_counted(emu: Any) -> None:
    """By GPUs. The CPU has no kernel for it."""
    given = torch.tensor([0, 3, 3, 1, 2, 3], dtype=torch.int32, device="emu")
    assert given.histc(4, min=0, max=3).tolist() == [1, 1, 1, 3]


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "view": lambda x: x.view(4, 32),
    "view of another type": lambda x: x.view(torch.int32),
    "transposed": lambda x: x.t(),
    "sliced": lambda x: x[2:, ::3],
    "selected": lambda x: x.select(1, 4),
    "expanded": lambda x: x[None].expand(3, 8, 16)[1],
    "diagonal": lambda x: x.diagonal(1),
    "unfolded": lambda x: x.unfold(1, 4, 2),
    "strided": lambda x: x.as_strided((3, 2), (5, 2), 7),
    "split": lambda x: x.split(3)[2],
    "unbound": lambda x: x.unbind()[1],
    "complex": lambda x: torch.view_as_complex(x.view(8, 8, 2)),
    "real": lambda x: torch.view_as_real(torch.view_as_complex(x.view(8, 8, 2))),
    "detached": lambda x: x.detach(),
    "reshaped": lambda x: x.reshape(-1),
    "squeezed": lambda x: x[:, None].squeeze(1).unsqueeze(0),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_share_their_storage(name: str, given: tuple[torch.Tensor, torch.Tensor]) -> None:
    host = given[0].clone()
    device = host.to("emu")
    views = [VIEWS[name](x) for x in (host, device)]
    assert (views[0]._base is None) == (views[1]._base is None)
    for x, view in zip((host, device), views, strict=True):
        assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
        view[..., :1] = 9
    assert host._version == device._version
    assert torch.equal(device.cpu(), host)
    assert VIEWS[name](device).stride() == VIEWS[name](host).stride()


def test_tensors_of_the_host_are_refused() -> None:
    with pytest.raises(RuntimeError, match="all tensors"):
        torch.ones(4, device="emu") + torch.ones(4)


def test_shapes_that_do_not_fit_are_refused_at_once(emu: Any) -> None:
    emu.configure(order="lazy")
    x = torch.ones(3, 4, device="emu")
    for wrong in (lambda: x @ x, lambda: x + x[:, :3], lambda: x.add_(x[0, :3]), lambda: x.view(5)):
        with pytest.raises(RuntimeError):
            wrong()


def test_copies_across_types_and_strides() -> None:
    host = torch.arange(24.0).view(4, 6)
    device = torch.zeros(6, 4, dtype=torch.float64, device="emu")
    device.t().copy_(host)
    assert torch.equal(device.cpu().t(), host.double())
    back = torch.zeros(4, 6, dtype=torch.int16)
    back.copy_(device.t())
    assert torch.equal(back, host.short())
    conjugate = torch.complex(host, host).conj()
    assert torch.equal(conjugate.to("emu").cpu(), conjugate.resolve_conj())


def test_autocast_takes_the_types_of_other_devices() -> None:
    layer = torch.nn.Linear(16, 16, device="emu")
    x = torch.randn(4, 16, device="emu")
    with torch.autocast("emu", dtype=torch.bfloat16):
        assert layer(x).dtype is torch.bfloat16
        assert x.bfloat16().softmax(-1).dtype is torch.float32
        assert torch.cat([x, x.bfloat16()]).dtype is torch.float32


def test_generators(emu: Any) -> None:
    x = torch.ones(1000, device="emu")
    torch.manual_seed(3)
    first, second = F.dropout(x, 0.5), F.dropout(x, 0.5)
    assert not torch.equal(first, second) and 0.4 < float((first == 2).float().mean()) < 0.6
    state = torch.emu.get_rng_state()  # type: ignore[attr-defined]
    third = torch.rand(5, device="emu")
    torch.emu.set_rng_state(state)  # type: ignore[attr-defined]
    assert torch.equal(third, torch.rand(5, device="emu"))
    torch.manual_seed(3)
    assert torch.equal(first, F.dropout(x, 0.5))
    own = torch.Generator(device="emu").manual_seed(7)
    before = torch.emu.get_rng_state()  # type: ignore[attr-defined]
    one = torch.randn(4, device="emu", generator=own)
    assert torch.equal(before, torch.emu.get_rng_state())  # type: ignore[attr-defined]
    assert torch.equal(one, torch.randn(4, device="emu", generator=own.manual_seed(7)))
    with torch.random.fork_rng(devices=[0], device_type="emu"):
        torch.rand(5, device="emu")
    assert torch.equal(before, torch.emu.get_rng_state())  # type: ignore[attr-defined]


def test_checkpoints_draw_the_same_numbers_again() -> None:
    def gradient(with_checkpoint: bool) -> torch.Tensor:
        torch.manual_seed(1)
        layer = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Dropout(0.5)).to("emu")
        x = torch.ones(4, 32, device="emu", requires_grad=True)
        y = checkpoint(layer, x, use_reentrant=False) if with_checkpoint else layer(x)
        y.square().sum().backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(True), gradient(False))


def test_files_hold_the_devices_bytes() -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(1))
    file = io.BytesIO()
    torch.save({"x": x.to("emu")}, file)
    file.seek(0)
    loaded = torch.load(file)["x"]
    assert loaded.device.type == "emu" and torch.equal(loaded.cpu(), x)
    file.seek(0)
    assert torch.equal(torch.load(file, map_location="cpu")["x"], x)
