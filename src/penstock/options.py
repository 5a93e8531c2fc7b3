"""The options of penstock, each in one place, and all in this file.

The command line and the reference read them here: an option of a command has the name, the kind and the
default of its field or argument. Its help is the first sentence of what is said of that, and "None: " begins
what the default means. Nothing heavy is imported: asking for help needs neither torch nor numpy.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

from penstock.errors import InvalidArgument, InvalidSize
from penstock.units import parse_budget, parse_bytes, parse_endurance, parse_share

if TYPE_CHECKING:
    import torch

    from penstock.core.hardware import Hardware
    from penstock.core.plan import Plan
    from penstock.runtime.run import Offload
    from penstock.storage.nvme.url import Url

# A policy is the function of this name in a module of penstock.planners.
POLICIES = {
    "keep": "rules",
    "evict_all": "rules",
    "vdnn_all": "rules",
    "vdnn_conv": "rules",
    "flashneuron": "flashneuron",
    "modnn": "modnn",
    "g10": "g10",
    "optimal": "optimal",
}

# A format of samples is opened by the function open_FORMAT in this module of penstock.samples.sources.
FORMATS = {
    "folder": "folder",
    "webdataset": "webdataset",
    "tfrecord": "tfrecord",
    "arrow": "arrow",
    "mds": "mds",
    "arrays": "arrays",
    "iterable": "iterables",
}

# Defaults of `penstock.samples`: bytes of a chunk, and cache sizes to compute the mixing for.
CHUNK_BYTES = "256KiB"
CACHES = ("16MiB", "64MiB", "256MiB", "1GiB")

# What can be given: keys of _READ, and Literals.
Policy: TypeAlias = str
Size: TypeAlias = int | str
Budget: TypeAlias = int | str
Share: TypeAlias = int | str
Endurance: TypeAlias = int | str
Count: TypeAlias = int
Number: TypeAlias = int
Fraction: TypeAlias = float
MicroBatch: TypeAlias = int | Literal["auto"]
Order = Literal["part", "layer", "auto"]
Lossy = Literal["fp16", "bf16"]
LOSSY = get_args(Lossy)
Explorers = Literal["divided", "one", "each"]
ChooseBy = Literal["both", "writes", "reads"]
Dtype = Literal["float32", "bfloat16"]
Scheduler = Literal["linear", "cosine", "constant", "constant_with_warmup"]
QuantType = Literal["nf4", "fp4"]
Place: TypeAlias = "str | os.PathLike[str] | Url"
Directories: TypeAlias = "Place | Sequence[Place]"


# -- what can be given -------------------------------------------------------------------------


def whole_number(value: Any, what: str = "whole number", least: int = 0) -> int:
    """An integer, or the text of one."""
    found = int(value) if isinstance(value, str) and value.isdecimal() else value
    if not isinstance(found, int) or isinstance(found, bool) or found < least:
        raise InvalidArgument(f"{value!r} is not a {what}: give {least} or more")
    return found


def fraction(value: Any, what: str = "number") -> float:
    """A number of zero or more, or the text of one."""
    try:
        found = -1.0 if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        found = -1.0
    if not 0 <= found < float("inf"):
        raise InvalidArgument(f"{value!r} is not a {what}: give a finite one, 0 or more")
    return found


def _micro_batch(value: Any) -> int | str:
    try:
        return "auto" if value == "auto" else whole_number(value, "number of samples", 1)
    except InvalidArgument as error:
        raise InvalidArgument(f'{error}, or "auto"') from None


def _paths(value: Any) -> list[str] | dict[int, str]:
    """Names of I/O paths; or by size one for so many bytes and more, also as texts "SIZE=NAME"."""
    if not isinstance(value, Mapping):
        names = [_READ["str"](each) for each in ([value] if isinstance(value, str) else value)]
        if not any("=" in name for name in names):
            return names
        pairs = [name.rpartition("=")[::2] for name in names]
        if len(value := dict(pairs)) < len(pairs) or "" in value:
            raise InvalidArgument(f"{names}: give each I/O path a size of its own, as in 1MiB=posix direct")
    found = {parse_bytes(size): _READ["str"](name) for size, name in value.items()}
    if not found or any(size < 1 or size & (size - 1) for size in found):
        raise InvalidArgument(f"{value!r}: give sizes that are powers of two, such as 1MiB")
    return dict(sorted(found.items()))


def _of_type(kind: type, remedy: str) -> Callable[[Any], Any]:
    def same(value: Any) -> Any:
        if not isinstance(value, kind):
            raise InvalidArgument(f"{value!r} is of type {type(value).__name__}: give {remedy}")
        return value

    return same


# What each kind reads a value as, or the text of one. They raise InvalidArgument or InvalidSize.
_READ: dict[str, Callable[[Any], Any]] = {
    "Count": lambda value: whole_number(value, least=1),
    "Number": whole_number,
    "Fraction": fraction,
    "MicroBatch": _micro_batch,
    "Size": parse_bytes,
    "Budget": parse_budget,
    "Share": parse_share,
    "Endurance": parse_endurance,
    "Path": Path,
    "str | os.PathLike[str]": Path,
    "str": _of_type(str, "text"),
    "str | Sequence[str] | Mapping[Size, str]": _paths,
    "bool": _of_type(bool, "True or False"),
}


def choices(kind: str) -> tuple[str, ...]:
    """What a kind allows, where these are names."""
    return tuple(POLICIES) if kind == "Policy" else () if kind in _READ else get_args(globals().get(kind))


def read(kind: str, value: Any) -> Any:
    """What a value, or the text of one, stands for. Raises InvalidArgument or InvalidSize."""
    allowed = () if kind == "Policy" else choices(kind)  # tests and programs may add policies
    if allowed and value not in allowed:
        named = (" or " if len(allowed) == 2 else ", ").join(allowed)
        raise InvalidArgument(f"there is no {value!r}: choose {named}")
    return _READ[kind](value) if kind in _READ else value


def _checked(source: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What was given, with texts of sizes and numbers as integers.

    Raises InvalidArgument or InvalidSize, with the name of the option, where a value cannot be used.
    """
    found = dict(given)
    for name, option in options_of(source).items():
        value = given[name]
        if value is None and option.optional:
            continue
        try:
            found[name] = read(option.kind, value)
        except (InvalidArgument, InvalidSize) as error:
            raise type(error)(f"{name}: {error}") from None
        except TypeError as error:
            raise InvalidArgument(f"{name}: {value!r} cannot be used: {error}") from None
    return found


# -- what the command line reads ---------------------------------------------------------------


class Option(NamedTuple):
    """A field or an argument as it stands above.

    kind       what can be given, as it is annotated, without None
    optional   None can be given
    flag       its name on the command line
    text       the first sentence of what is said of it
    meaning    what the default stands for; empty where the text says all
    """

    kind: str
    optional: bool
    default: Any
    flag: str
    text: str
    meaning: str


_COLUMN = re.compile(r"(?P<names>\w+(?:, \w+)*) {2,}(?P<text>\S.*)")


@cache
def options_of(source: Callable[..., Any]) -> dict[str, Option]:
    """The fields of a class of options, or the arguments of a function, by name."""
    texts: dict[str, str] = {}
    names: list[str] = []
    for line in inspect.cleandoc(source.__doc__ or "").splitlines():
        if column := _COLUMN.fullmatch(line):
            names = column["names"].split(", ")
            texts |= dict.fromkeys(names, column["text"])
        elif line.startswith(" "):
            texts |= {name: f"{texts[name]} {line.strip()}" for name in names}
        else:
            names = []
    metadata = {name: each.metadata for name, each in getattr(source, "__dataclass_fields__", {}).items()}
    found = {}
    for name, parameter in inspect.signature(source).parameters.items():
        kind, text, default = parameter.annotation, texts.get(name, ""), parameter.default
        stands_for = re.search(r"(?:^|\. )None: (.*?)(?:\. |$)", text)
        is_said = default is None or isinstance(default, bool) or default is parameter.empty
        found[name] = Option(
            kind=kind.removesuffix(" | None"),
            optional=kind.endswith(" | None"),
            default=None if default is parameter.empty else default,
            flag=metadata.get(name, {}).get("flag") or name.replace("_", "-"),
            text=text.partition(". ")[0],
            meaning=stands_for[1] if stands_for else "" if is_said else str(default),
        )
    return found


# -- the options themselves ----------------------------------------------------------------------


class _Options:
    """A value whose fields are checked when it is made. Texts of sizes and numbers are integers then."""

    def __post_init__(self) -> None:
        for name, value in _checked(type(self), vars(self)).items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True, kw_only=True)
class IoOptions(_Options):
    """How tensors move between memory and disk: ``penstock.offload(io=penstock.IoOptions(verify=True))``.

    page_cache_budget   most bytes to spill to the page cache only, which is memory beside the other budgets.
                It serves small tensors faster
    paths       an I/O path between memory and disk, such as "io_uring direct"; of several, the fastest is
                taken. `Offload.io_paths` names those of this machine. Or a fixed one for each size:
                ``{"64KiB": "posix direct", "8MiB": "io_uring direct"}``, each for that many bytes and more,
                the first also for less; on the command line SIZE=NAME. None: the one that proves fastest,
                size by size. That is found in the first steps, and from then on while they run
    choose_by   what has to be fastest where bytes can go to the disk and to the page cache: "both", writing
                and reading back together; "writes" or "reads" alone (Fastensor, section 4, its WRDic, WDic
                and RDic). In either place each direction goes by its own fastest path
    costs       file of I/O cost tables of earlier runs: read, for devices and disks of the same kind, and
                added to
    explorers   which rank of several explores the I/O paths, where their devices, file systems, disks and I/O
                paths are the same. "divided": each size is explored by one of them; "one": all sizes by the
                same one; "each": every rank explores for itself. Ranks where these differ share nothing
    reexplore   share of the transfer time to spend on trying slower I/O paths again, since machines change; 0
                for none after the first steps
    verify      compare the checksum of everything that comes back from disk. That takes about 0.05 CPU
                seconds a gigabyte each way. Without, this is done for what outlives a step
    endurance   of the disk, from its data sheet, such as 600TBW: the report says how long it lasts

    Raises InvalidArgument or InvalidSize where a value cannot be used.
    """

    page_cache_budget: Budget = 0
    paths: str | Sequence[str] | Mapping[Size, str] | None = field(default=None, metadata={"flag": "io-path"})
    choose_by: ChooseBy = field(default="both", metadata={"flag": "io-choose-by"})
    costs: str | os.PathLike[str] | None = field(default=None, metadata={"flag": "io-costs"})
    explorers: Explorers = field(default="divided", metadata={"flag": "io-explorers"})
    reexplore: Fraction = 0.005
    verify: bool = field(default=False, metadata={"flag": "verify-spill"})
    endurance: Endurance | None = None

    def wanted_paths(self) -> tuple[list[str] | None, dict[int, str]]:
        """The names in ``paths``, None for all there are; and by size, where they are given so."""
        by_size = self.paths if isinstance(self.paths, dict) else {}
        names = self.paths if isinstance(self.paths, list) else None
        return (list(dict.fromkeys(by_size.values())) if by_size else names), by_size


@dataclass(frozen=True, kw_only=True)
class PlanOptions(_Options):
    """What plans may do: ``penstock.offload(planning=penstock.PlanOptions(recompute=False))``.

    policy      decides what leaves and when. A key of penstock.planners.POLICIES
    compress    allow tensors to move compressed, without loss. Those with many zeros are stored as
                bitmask-CSR. How many zeros there are is sampled on a CPU; on a GPU a ``plan`` of a traced
                step knows
    recompute   allow tensors to be recomputed instead of moved. What a kernel made is dropped, and the kernel
                runs again before it is needed, where that is faster
    lossy       let activations saved for backward leave in this codec: backward reads them rounded. So the
                bits are others than without. Only float32 is rounded; forward, weights, gradients and the
                optimizer's state are not. None: nothing is rounded
    keep_weights   keep weights and their gradients on the device, as moDNN does. The budget needs room for
                all of them. Weights are those of ``model``, and of optimizers once they have stepped
    variants    allow other algorithms of PyTorch for convolutions, attention and products, which give other
                bits. The first steps measure them, plans may choose them, and the report names them
    smallest_bytes   smaller tensors stay on the device, and count

    Raises InvalidArgument or InvalidSize where a value cannot be used; `offload` does where there is no such
    policy.
    """

    policy: Policy = "optimal"
    compress: bool = True
    recompute: bool = True
    lossy: Lossy | None = None
    keep_weights: bool = False
    variants: bool = False
    smallest_bytes: Size = "64KiB"


@dataclass(frozen=True, kw_only=True)
class BatchOptions(_Options):
    """Batches in parts: ``penstock.offload(batches=penstock.BatchOptions(micro_batch="auto"))``.

    micro_batch   divide batches into parts of so many samples, or of the fastest size: auto. That one is
                  predicted for the first batch, and once more by what its step measured. Results then
                  differ in the last bits from those of whole batches. See `Offload.micro_batches` and
                  `Offload.accumulate`. None: do not, but where the plan is for a step that does
    micro_batch_order   run parts one after the other, or all of them through each block of the model before
                  the next, forward and backward; auto: the faster one. By layers, weights that move are read
                  once and not for each part. "auto" is predicted for the first batch, and
                  `Offload.accumulate` runs them so. None: the plan's, or part

    Raises InvalidArgument where a value cannot be used.
    """

    micro_batch: MicroBatch | None = None
    micro_batch_order: Order | None = None


GROUPS: dict[str, Any] = {
    "io": IoOptions,
    "planning": PlanOptions,
    "batches": BatchOptions,
}


def offload(
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    device_budget: Share,
    spill_dir: Directories | None = None,
    host_budget: Share | None = None,
    host_node: Number | None = None,
    disk_budget: Budget | None = None,
    device: str | torch.device | None = None,
    plan: Plan | None = None,
    hardware: Hardware | None = None,
    io: IoOptions = IoOptions(),
    planning: PlanOptions = PlanOptions(),
    batches: BatchOptions = BatchOptions(),
) -> Offload:
    """Run PyTorch with no more than ``device_budget`` of device memory. Results are bit-identical, unless
    ``planning`` allows others.

    From now on until `close`, weights, gradients, optimizer state and activations leave the device when
    the budget needs it, and come back before they are used. Wrap each iteration in ``with run.step():``:
    the first runs without a plan, and the next three by one; all of these are recorded, and slower than
    those that follow. The model, and how the loop is written, do not change. Models larger than the
    budget are built inside::

        with penstock.offload(device_budget="8GiB", spill_dir="/mnt/nvme") as run:
            model = build()

    model, optimizer   where they exist already; for their names in reports
    device_budget   most bytes of tensors and workspace on the device, such as 600MiB or 8G. An integer, or
                    such a text; 8G is 8GiB. On a CPU, bytes of RAM. "50%" is of the device's memory, on a
                    CPU of what is available; "auto" is nine tenths of what is free now
    spill_dir       a directory on the disk to use; one on NVMe is best. With several, on as many disks, every
                    tensor is striped over all of them. None: the system's directory for temporary files. What
                    is written there has no name, is readable by nobody else, and is gone with the process,
                    however that ends. Or a namespace of a remote drive, empty or of an earlier run:
                    "nvme+tcp://HOST:PORT/NQN?ns=1". What is spilled there crosses the network as it is, and
                    stays there
    host_budget     host memory to use as a tier, beside the device's budget. "50%" is of what is available,
                    "auto" nine tenths of it. On a GPU it is pinned, and used for staging, too. On a CPU it
                    is RAM that the device's budget does not count, such as that of another NUMA node, or far
                    memory. None: on a GPU an eighth of what is free, on a CPU no such tier
    host_node       NUMA node that the host budget comes from, on a CPU. None: any
    disk_budget     most bytes on disk. None: what is free there. Where several processes of a job are on this
                    machine, it and the host budget are theirs together, and are divided
    device          cpu, or a GPU such as cuda:0. None: the model's, or the CPU
    plan            made before, by `penstock plan` or `penstock.plan`: it is carried out as it stands
    hardware        rates of the machine's links, as `penstock probe` and `penstock.probe` measure them. None:
                    measure now, in about two seconds
    io              how tensors move between memory and disk
    planning        what plans may do
    batches         whether batches run in parts

    Raises InvalidArgument, InvalidSize, DeviceUnavailable, InvalidPlan, SpillError, and BudgetTooSmall where
    the model exists already and its largest tensor does not fit, or ``plan`` is for more memory.
    """
    given = _checked(offload, dict(locals()))
    for name, group in GROUPS.items():
        if not isinstance(given[name], group):
            raise InvalidArgument(
                f"{name} is of type {type(given[name]).__name__}: give penstock.{group.__name__}(...)"
            )
    opened: Offload = import_module("penstock.runtime.opening").open_run(**given)
    return opened


@dataclass(frozen=True, kw_only=True)
class LoraOptions(_Options):
    """Adapters of PEFT, in the place of all weights.

    r                rank of the adapters
    alpha            they are scaled by alpha / r
    dropout          of their inputs
    target_modules   whose modules get adapters, with commas between
    """

    r: Count = 16
    alpha: Count = 32
    dropout: Fraction = 0.0
    target_modules: str = "all-linear"


@dataclass(frozen=True, kw_only=True)
class FineTuneOptions(_Options):
    """All that decides the losses. The names are those of transformers' TrainingArguments and run_clm.py.

    tokenizer    a directory with the files of one, or "bytes". None: MODEL_DIR
    block_size   tokens in a sequence: the text is cut into sequences of this length. None: 512, or the
                 positions that the model has
    per_device_train_batch_size   sequences that go through the model at once
    gradient_accumulation_steps   batches in a step
    learning_rate       the highest. None: 5e-5, and 2e-4 with LoRA
    lr_scheduler_type   how the learning rate changes over the steps
    warmup_steps        over which the learning rate grows
    weight_decay        of matrices
    max_grad_norm       gradients are clipped to; 0: not
    num_train_epochs    times that the text is read
    max_steps    in the place of the number of epochs
    seed         of the order of sequences, dropout and adapters
    dtype        of weights, gradients and the optimizer's state
    load_in_4bit  quantize the linear layers to 4 bits as they are read, by bitsandbytes: needs --lora
    load_in_8bit  quantize the linear layers to 8 bits as they are read, by bitsandbytes: needs --lora
    bnb_4bit_quant_type  what 4 bits stand for
    bnb_4bit_use_double_quant  quantize the scales of 4-bit blocks, too
    lora         None: all weights are trained
    """

    model: Path
    text: Path
    tokenizer: str | None = None
    block_size: Count | None = None
    per_device_train_batch_size: Count = 1
    gradient_accumulation_steps: Count = 8
    learning_rate: Fraction | None = None
    lr_scheduler_type: Scheduler = "linear"
    warmup_steps: Number = 0
    weight_decay: Fraction = 0.0
    max_grad_norm: Fraction = 1.0
    num_train_epochs: Count = 1
    max_steps: Count | None = None
    seed: Number = 42
    dtype: Dtype = "float32"
    load_in_4bit: bool = False
    load_in_8bit: bool = False
    bnb_4bit_quant_type: QuantType = "nf4"
    bnb_4bit_use_double_quant: bool = False
    lora: LoraOptions | None = None

    @property
    def sequences_per_step(self) -> int:
        return self.per_device_train_batch_size * self.gradient_accumulation_steps


def run_options() -> dict[str, Option]:
    """All options of a run, by name: what can be typed for `offload`, and the fields of its groups."""
    others = ("model", "optimizer", *GROUPS)
    found = {name: option for name, option in options_of(offload).items() if name not in others}
    for group in GROUPS.values():
        found |= options_of(group)
    return found


def grouped(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `offload`, from options by name: fields of a group go into one value."""
    arguments: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
    of_field = {name: group for group, kind in GROUPS.items() for name in options_of(kind)}
    for name, value in given.items():
        (groups[of_field[name]] if name in of_field else arguments)[name] = value
    return arguments | {name: GROUPS[name](**values) for name, values in groups.items() if values}
