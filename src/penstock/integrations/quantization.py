"""Weights in eight or four bits of bitsandbytes, made by transformers' own quantizer as a model is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from transformers.quantizers.auto import AutoHfQuantizer

from penstock.errors import InvalidArgument

NEEDED = "weights in few bits need bitsandbytes and accelerate: pip install bitsandbytes accelerate"


def refuse_quantized(config: transformers.PretrainedConfig, what: object) -> None:
    """Raises InvalidArgument where the files of a model are in few bits already."""
    given = getattr(config, "quantization_config", None)
    if given is not None:
        by = given.get("quant_method") if isinstance(given, dict) else given.quant_method
        raise InvalidArgument(
            f"{what} is quantized already ({getattr(by, 'value', by)}): give the model in whole precision, "
            "which is quantized as it is read"
        )


class Quantizer:
    """Quantizes the linear layers of one model, but for its head, as `from_pretrained` does.

    Raises InvalidArgument where bitsandbytes or accelerate is missing.
    """

    def __init__(self, config: transformers.BitsAndBytesConfig) -> None:
        self._quantizer = AutoHfQuantizer.from_config(config, pre_quantized=False)
        try:
            self._quantizer.validate_environment(device_map={"": "cpu"})
        except ImportError as error:
            raise InvalidArgument(NEEDED) from error
        self._operation = self._quantizer.get_quantize_ops()

    def build(self, build: Callable[[], transformers.PreTrainedModel]) -> transformers.PreTrainedModel:
        """A model that waits for `put`: the weights to be quantized take no memory, they are on the meta
        device. The others are uninitialized."""
        import accelerate

        with accelerate.init_empty_weights(include_buffers=False):
            model = self.replace(build())
        allocate(model, lambda name: self.quantizes(model, name))
        model.tie_weights()
        return model

    def replace(self, model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
        """Put quantized layers, whose weights have no values yet, in the place of linear ones."""
        with _default_dtype(model.dtype):
            self._quantizer.preprocess_model(model, dtype=model.dtype, device_map={"": "cpu"})
        return self._quantizer.postprocess_model(model)

    def quantizes(self, model: transformers.PreTrainedModel, name: str) -> bool:
        found: bool = self._quantizer.param_needs_quantization(model, name)
        return found

    def put(self, model: transformers.PreTrainedModel, name: str, values: torch.Tensor) -> None:
        """Quantize a weight of a layer, and put it in its place."""
        for full, weight in self._operation.convert(
            {name: values}, model=model, full_layer_name=name
        ).items():
            module, _, own = full.rpartition(".")
            setattr(model.get_submodule(module), own, weight)

    def put_fake(self, model: transformers.PreTrainedModel) -> None:
        """Give all these weights fake tensors, by which a step can be traced: bitsandbytes' own classes of
        tensors cannot hold them."""
        for name, weight in list(model.named_parameters()):
            if weight.is_meta and self.quantizes(model, name):
                module, _, own = name.rpartition(".")
                setattr(model.get_submodule(module), own, _fake(weight, model.dtype))


def _fake(weight: Any, dtype: torch.dtype) -> torch.nn.Parameter:
    from bitsandbytes import nn
    from bitsandbytes.functional import QuantState

    made: Any
    if isinstance(weight, nn.Int8Params):
        made = torch.nn.Parameter(torch.empty(weight.shape, dtype=torch.int8), requires_grad=False)
        made.CB, made.SCB = made.data, torch.empty(len(weight))
        return made
    # Two values in a byte, a scale for each block, and the table of what 4 bits stand for.
    values = torch.empty(-(-weight.numel() // 2), dtype=torch.uint8).view(weight.quant_storage)
    made = torch.nn.Parameter(values[:, None], requires_grad=False)
    blocks = -(-weight.numel() // weight.blocksize)
    state = QuantState(
        absmax=torch.empty(blocks),
        shape=weight.shape,
        code=torch.empty(16),
        blocksize=weight.blocksize,
        quant_type=weight.quant_type,
        dtype=dtype,
    )
    if weight.compress_statistics:  # the scales in a byte, in blocks of 256
        state.absmax, state.offset, state.nested = (
            torch.empty(blocks, dtype=torch.uint8),
            torch.empty(()),
            True,
        )
        state.state2 = QuantState(
            absmax=torch.empty(-(-blocks // 256)),
            code=torch.empty(256),
            blocksize=256,
            dtype=torch.float32,
        )
    made.quant_state = state
    return made


def allocate(model: torch.nn.Module, but: Callable[[str], bool] = lambda name: False) -> None:
    """Give what is on the meta device uninitialized memory of the CPU; tied weights have to be tied again."""
    for prefix, module in model.named_modules():
        tensors: Any
        for tensors in (module._parameters, module._buffers):
            for own, tensor in tensors.items():
                if tensor is None or not tensor.is_meta or but(f"{prefix}.{own}"):
                    continue
                new = torch.empty_like(tensor, device="cpu")
                is_weight = tensors is module._parameters
                tensors[own] = torch.nn.Parameter(new, tensor.requires_grad) if is_weight else new


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
