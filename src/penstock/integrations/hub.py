"""A model of transformers, read from the files of a hub straight into an open run."""

from __future__ import annotations

import copy
import functools
import json
import os
from collections.abc import Callable
from pathlib import Path

import torch

from penstock.checkpoint import load as load_checkpoint
from penstock.checkpoint.header import Header
from penstock.checkpoint.source import CheckpointSource
from penstock.checkpoint.tensors import DTYPES
from penstock.errors import InvalidArgument, InvalidFile
from penstock.integrations.versions import missing, warn_if_unknown
from penstock.runtime.run import Offload

try:
    import transformers
    from transformers.initialization import no_init_weights

    from penstock.integrations.quantization import Quantizer, refuse_quantized
except ImportError as error:
    raise missing("transformers") from error

CONFIG = "config.json"
INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
PIECE_BYTES = 8 << 20  # of a file that is converted as it is read
SHOWN = 5  # names in an error

Put = Callable[[str, torch.Tensor], None]  # what is done with a tensor that has no place of its own


def load(
    path: str | os.PathLike[str],
    config: transformers.PretrainedConfig | None = None,
    run: Offload | None = None,
    *,
    dtype: torch.dtype | None = None,
    quantization_config: transformers.BitsAndBytesConfig | None = None,
) -> transformers.PreTrainedModel:
    """A model of a directory with config.json and safetensors files, in one file or sharded.

    It is built inside the run, without values, and each tensor is read into its place by `penstock.load`:
    there is no second copy, and weights that do not fit in the budget leave while the next ones are read.
    (`from_pretrained` maps the files: such weights cannot leave memory.) A file whose floating-point dtypes
    are not the model's is converted piece by piece as it is read.

    config   None: that of the directory
    run      an open one; None: that of the thread, whichever it is, or ordinary memory
    dtype    of the weights; None: the config's
    quantization_config   weights are quantized as they are read, one at a time, to the same bits as by
             `from_pretrained`. Needs bitsandbytes

    Returns the model in evaluation mode, as `from_pretrained` does. Raises InvalidFile where a file is
    missing or damaged, and InvalidArgument where names or shapes in the files are not the model's:
    transformers converts some models as it reads them, and these need `from_pretrained`.
    """
    warn_if_unknown("transformers")
    if run is not None and run.closed:
        raise InvalidArgument("this run is closed: load the model inside of an open one")
    folder = Path(path)
    if config is None:
        config = config_of(folder)
    refuse_quantized(config, folder)
    files = _files(folder)
    put = None
    if quantization_config is None:
        model = uninitialized(config, dtype)
    else:
        quantizer = Quantizer(quantization_config)
        model = quantizer.build(lambda: uninitialized(config, dtype))
        put = functools.partial(quantizer.put, model)
    wanted = {**dict(model.named_parameters()), **_saved_buffers(model)}
    tied = {
        name: tensor for name, tensor in model.named_parameters(remove_duplicate=False) if name not in wanted
    }
    _read_all(files, wanted, tied, put)
    return model.eval()


def config_of(folder: Path) -> transformers.PretrainedConfig:
    """What config.json says. Raises InvalidFile."""
    if not (folder / CONFIG).is_file():
        raise InvalidFile(
            f"{folder} is not a model directory: {CONFIG} is missing. Give one that save_pretrained has "
            "written, or that was downloaded from a hub"
        )
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise InvalidFile(f"{folder / CONFIG} cannot be used: {reason}") from error


def uninitialized(
    config: transformers.PretrainedConfig, dtype: torch.dtype | None = None
) -> transformers.PreTrainedModel:
    """A model of a config, with uninitialized weights, and with a copy of the config."""
    config = copy.deepcopy(config)
    names = config.architectures or []
    kind = getattr(transformers, names[0], None) if names else None
    if kind is None:
        raise InvalidArgument(
            "the config names no architecture of transformers: give one whose `architectures` has it, such "
            'as ["LlamaForCausalLM"]'
        )
    with no_init_weights():
        model = kind._from_config(config, **({} if dtype is None else {"dtype": dtype}))
    model.tie_weights()
    return model


def _files(folder: Path) -> list[Path]:
    names = [WHOLE]
    if (folder / INDEX).is_file():
        try:
            names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise InvalidFile(f"{folder / INDEX} is no index of safetensors files: {error!r}") from error
        if any(Path(name).name != name for name in names):
            raise InvalidFile(f"{folder / INDEX} names files outside of its folder")
    for name in names:
        if not (folder / name).is_file():
            raise InvalidFile(
                f"{folder / name} is missing: a model directory has {WHOLE}, or {INDEX} and its files"
            )
    return [folder / name for name in names]


def _saved_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Persistent buffers, which are in the state dict; the others are computed when the model is built."""
    names = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in names}


def _read_all(
    files: list[Path], wanted: dict[str, torch.Tensor], tied: dict[str, torch.Tensor], put: Put | None
) -> None:
    """Read every tensor into its place. Raises before it reads where names or shapes do not match.

    tied   further names of wanted tensors, which may also be in the files
    put    takes those that are on the meta device
    """
    headers = {file: _header(file) for file in files}
    found = {entry.name: list(entry.shape) for header in headers.values() for entry in header.entries}
    problems = [f"{name} is missing" for name in wanted if name not in found]
    problems += [f"{name} is not in the model" for name in sorted(found.keys() - wanted.keys() - tied.keys())]
    for name, tensor in wanted.items():
        if found.get(name, expected := list(tensor.shape)) != expected:
            problems.append(f"{name} has the shape {found[name]}, and the model {expected}")
    if problems:
        more = f", and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise InvalidArgument(
            f"the files in {files[0].parent} are not those of this model: {'; '.join(problems[:SHOWN])}"
            f"{more}. Where transformers converts them as it reads, save them once by from_pretrained and "
            "save_pretrained"
        )
    for file, header in headers.items():
        names = [entry.name for entry in header.entries]
        targets = ((wanted.get(entry.name), DTYPES[entry.dtype]) for entry in header.entries)
        if put or any(target is not None and _needs_conversion(dtype, target) for target, dtype in targets):
            _read_converted(file, header, wanted, put)
        else:
            into = {name: wanted[name] if name in wanted else torch.empty_like(tied[name]) for name in names}
            load_checkpoint(file, into=into)


def _header(file: Path) -> Header:
    with CheckpointSource(file) as source:
        try:
            return source.header
        except InvalidFile as error:
            raise InvalidFile(f"{file} is no safetensors file: {error}") from error


def _needs_conversion(dtype: torch.dtype, tensor: torch.Tensor) -> bool:
    return tensor.dtype != dtype and tensor.is_floating_point() and dtype.is_floating_point


def _read_converted(file: Path, header: Header, wanted: dict[str, torch.Tensor], put: Put | None) -> None:
    """Read each wanted tensor through a small buffer, and convert its dtype."""
    with open(file, "rb") as opened, torch.no_grad():
        for entry in header.entries:
            if entry.name not in wanted:
                continue
            place, dtype = wanted[entry.name].detach(), DTYPES[entry.dtype]
            if place.is_meta:
                place = torch.empty(place.shape, dtype=place.dtype)
            target = place.view(-1)
            if dtype != target.dtype and not _needs_conversion(dtype, target):
                raise InvalidArgument(f"{entry.name} in {file} is {dtype}, and the model's {target.dtype}")
            opened.seek(header.data_offset + entry.begin)
            for part in target.split(PIECE_BYTES // dtype.itemsize):
                data = bytearray(part.numel() * dtype.itemsize)
                if opened.readinto(data) != len(data):
                    raise InvalidFile(f"{file} became shorter while it was read: get it again")
                part.copy_(torch.frombuffer(data, dtype=dtype))
            if put is not None and wanted[entry.name].is_meta:
                put(entry.name, place)
