"""What can be typed: the commands and their options."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import penstock
from penstock.cli.choices import (
    CACHES,
    CHUNK_BYTES,
    DATA_SHEETS,
    DTYPES,
    FORMATS,
    LOSSY,
    POLICIES,
    SCHEDULES,
)
from penstock.errors import InvalidSize
from penstock.units import parse_bytes, parse_endurance

if TYPE_CHECKING:
    from penstock.cli.output import Answer

SCRIPT_HELP = """\
SCRIPT.py:build names a function that takes no arguments and returns four things:

  model, optimizer, batches, loss

batches is an iterable, and loss(model, batch) the scalar to minimise:

  def build():
      model = torch.nn.Linear(1024, 1024)
      optimizer = torch.optim.AdamW(model.parameters())
      batches = [torch.randn(64, 1024) for _ in range(100)]
      return model, optimizer, batches, lambda model, batch: model(batch).square().mean()
"""


REPORT_HELP = """\
SOURCE is the FOLDER that `penstock run` wrote, or a TRACE and a PLAN, with --hardware.
"""

WHATIF_HELP = """\
Every combination is planned for. "limited by" names the resource of which twice as much would help the
plan most. The disk counts as fast enough where one that never keeps the plan waiting would save less
than 5 % of the step.

  penstock whatif trace.json.gz --hardware hardware.json --device-budget 8GiB,16GiB --disks 1,2,4 \
    --disk-rate 3.2GB/s
"""


FINETUNE_HELP = """\
MODEL_DIR has config.json, weights as safetensors files, and a tokenizer, as save_pretrained writes them and a
hub has them; nothing is downloaded. The text is cut into sequences of --block-size tokens.

  penstock finetune llama/ book.txt --device-budget 2GiB
  penstock finetune llama/ book.txt --device-budget 1GiB --lora -o adapters

Interrupted or killed, the same command goes on from the latest checkpoint, with the same losses. At the end
the model is in FOLDER/model, for from_pretrained.
"""

UPLOAD_HELP = """\
URL names a namespace of an NVMe over Fabrics target that speaks TCP, such as Linux's or SPDK's. All of it
belongs to the store from then on. What is not this store's is replaced only with --force. Interrupted, the
same command goes on where it stopped.

  penstock samples discover storage1:4420
  penstock samples upload photos.store 'nvme+tcp://storage1:4420/nqn.2014-08.org.example:photos?ns=1'

Bytes cross the network as they are, and nobody is asked for a password: for networks that you trust.
"""

PACK_HELP = """\
SOURCE is a folder tree of files (where all lie in subfolders, these are their classes), tar shards of
WebDataset, TFRecord, Parquet or Arrow files, a dataset that Hugging Face datasets or MosaicML streaming
saved, .npy or .npz. Shards also as "train-{000..127}.tar", or as several SOURCEs; of folders one. It is not
changed.

Interrupted, the same command goes on where it stopped. With --world, several processes pack a partition each,
all with the same DEST, which is then mounted whole.
"""

UNPACK_HELP = """\
Names that would lead out of DEST are refused, before anything is written; see --flat. Samples of fields
become a folder each: a file for each field of bytes, FIELD.npy for each array, fields.json for the others.
"""


class _Parser(argparse.ArgumentParser):
    """Says what was typed wrong, and exits with 1: argparse's own 2 means "infeasible" here."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(1, f"{self.prog}: error: {message}\n")


def parser() -> argparse.ArgumentParser:
    root = _Parser(
        prog="penstock",
        description="Train PyTorch models that do not fit in memory. Every command reads and writes files.",
        epilog="exit codes: 0 done, 1 error, 2 infeasible, 130 interrupted",
    )
    root.add_argument("--version", action="version", version=f"penstock {penstock.__version__}")
    names = root.add_subparsers(title="commands", metavar="COMMAND", required=True)

    probe = _command(names, "probe", "machine.probe", "measure this machine")
    _spill_dir(probe, "measure", remote=True)
    probe.add_argument("--device", default="cpu", help="cpu, or cuda:0 and so on; default: %(default)s")
    probe.add_argument("--seconds", type=seconds, default=10.0, help="time it may take; default: %(default)g")
    _written(probe, "hardware.json")

    doctor = _command(
        names, "doctor", "doctor.doctor", "say what works on this machine, what costs something, and why"
    )
    _spill_dir(doctor, "look at")

    paths = _command(names, "io-paths", "machine.io_paths", "compare the I/O paths between memory and disk")
    _spill_dir(paths, "use")
    _page_cache_budget(paths)
    paths.add_argument("--seconds", type=seconds, default=5.0, help="time to take; default: %(default)g")
    paths.add_argument(
        "--device", default="cpu", help="whose runs use --io-costs: cpu, or cuda:0 and so on; default: cpu"
    )
    _io_costs(paths)

    trace = _command(names, "trace", "training.trace", "capture one training step", SCRIPT_HELP)
    _script(trace)
    trace.add_argument(
        "--real", action="store_true", help="run the step and time it, instead of estimating without memory"
    )
    trace.add_argument(
        "--device",
        choices=("cpu", *DATA_SHEETS),
        help="where an estimate's times are for: this processor, or a data sheet; default: cpu",
    )
    _written(trace, "trace.json.gz")

    plan = _command(names, "plan", "planning.plan", "decide what leaves the device, and predict the step")
    plan.add_argument(
        "trace",
        type=Path,
        metavar="TRACE",
        help="file that `penstock trace` wrote; with --micro-batch a SCRIPT.py:build",
    )
    _hardware(plan)
    _budget(plan)
    _policy(plan)
    _actions(plan)
    _micro_batch(plan, "; its steps are traced")
    _lossy(plan)
    _endurance(plan)
    plan.add_argument("--compare-policies", action="store_true", help="show the plan of every policy")
    plan.add_argument("--compare-budgets", action="store_true", help="show what other device budgets bring")
    _written(plan, "plan.json")

    simulate = _command(names, "simulate", "planning.simulate", "check a plan, and replay it event by event")
    simulate.add_argument("trace", type=Path, metavar="TRACE", help="file that `penstock trace` wrote")
    simulate.add_argument("plan", type=Path, metavar="PLAN", help="file that `penstock plan` wrote")
    _hardware(simulate)
    _chrome_trace(simulate)
    _written(simulate, "timeline.json.gz")

    run = _command(names, "run", "training.run", "train inside a budget", SCRIPT_HELP)
    _script(run)
    _budget(run)
    _spill_dir(run, "use", remote=True)
    run.add_argument(
        "--steps",
        type=count,
        metavar="N",
        help="over all batches again where there are fewer; default: one for each batch",
    )
    run.add_argument("--host-budget", type=size, metavar="SIZE", help="pinned memory, for a model on a GPU")
    run.add_argument("--disk-budget", type=size, metavar="SIZE", help="default: what is free")
    run.add_argument(
        "--hardware", type=Path, metavar="FILE", help="file that `penstock probe` wrote; default: measure now"
    )
    run.add_argument(
        "--io-path",
        action="append",
        metavar="NAME",
        help="between memory and disk, as `penstock io-paths` names it; may be repeated; default: fastest",
    )
    _page_cache_budget(run)
    _io_costs(run)
    _endurance(run)
    _lossy(run)
    run.add_argument(
        "--verify-spill",
        action="store_true",
        help="compare the checksum of everything that comes back from disk",
    )
    run.add_argument(
        "--plan",
        type=Path,
        metavar="FILE",
        help="file that `penstock plan` wrote, to follow from the first step on",
    )
    run.add_argument(
        "--device",
        default="cpu",
        metavar="NAME",
        help="device that the script trains on; default: %(default)s",
    )
    _policy(run)
    _micro_batch(run)
    run.add_argument(
        "--variants",
        action="store_true",
        help="allow other algorithms of PyTorch for kernels, which give other bits; they are measured first",
    )
    _written(run, "penstock-run", "FOLDER")

    _finetune(names)
    _report(names)
    _whatif(names)
    _checkpoint(names)
    _samples(names)
    return root


def _finetune(names: argparse._SubParsersAction[_Parser]) -> None:
    tune = _command(
        names,
        "finetune",
        "training.finetune",
        "fine-tune a language model on a text inside a budget",
        FINETUNE_HELP,
    )
    tune.add_argument("model", type=Path, metavar="MODEL_DIR", help="see below")
    tune.add_argument("text", type=Path, metavar="TEXT", help="file with the text, in UTF-8")
    _budget(tune)
    _spill_dir(tune, "use")
    _endurance(tune)
    _policy(tune)
    tune.add_argument(
        "--hardware", type=Path, metavar="FILE", help="file that `penstock probe` wrote; default: measure now"
    )
    tune.add_argument("--tokenizer", metavar="DIR", help="with a tokenizer, or bytes; default: MODEL_DIR")
    for name, kind, default, text in (
        ("--per-device-train-batch-size", count, 1, "sequences that go through the model at once"),
        ("--gradient-accumulation-steps", count, 8, "batches in a step"),
        ("--num-train-epochs", count, 1, "times that the text is read"),
        ("--warmup-steps", number, 0, "over which the learning rate grows"),
        ("--weight-decay", fraction, 0.0, "of matrices"),
        ("--max-grad-norm", fraction, 1.0, "gradients are clipped to; 0: not"),
        ("--seed", number, 42, "of the order of sequences, dropout and adapters"),
        ("--save-steps", count, 100, "between checkpoints"),
    ):
        tune.add_argument(name, type=kind, default=default, metavar="N", help=f"{text}; default: {default}")
    tune.add_argument(
        "--block-size",
        type=count,
        metavar="N",
        help="tokens in a sequence; default: 512, or the positions that the model has",
    )
    tune.add_argument("--max-steps", type=count, metavar="N", help="in the place of --num-train-epochs")
    tune.add_argument(
        "--learning-rate", type=fraction, metavar="RATE", help="default: 5e-5, and 2e-4 with --lora"
    )
    tune.add_argument("--lr-scheduler-type", choices=SCHEDULES, default="linear", help="default: linear")
    tune.add_argument("--dtype", choices=DTYPES, default="float32", help="of weights; default: float32")
    tune.add_argument("--lora", action="store_true", help="train adapters of PEFT, not all weights")
    tune.add_argument("--lora-r", type=count, default=16, metavar="N", help="default: 16")
    tune.add_argument("--lora-alpha", type=count, default=32, metavar="N", help="default: 32")
    tune.add_argument("--lora-dropout", type=fraction, default=0.0, metavar="P", help="default: 0")
    tune.add_argument(
        "--lora-target-modules", default="all-linear", metavar="NAME,...", help="default: all-linear"
    )
    tune.add_argument("--resume", action="store_true", help="fail where FOLDER holds nothing to go on with")
    _written(tune, "penstock-finetune", "FOLDER")


def _report(names: argparse._SubParsersAction[_Parser]) -> None:
    report = _command(
        names,
        "report",
        "planning.report",
        "show a plan, and compare a run with it, in one page",
        REPORT_HELP,
    )
    report.add_argument("source", type=Path, nargs="+", metavar="SOURCE", help="FOLDER, or TRACE PLAN")
    report.add_argument(
        "--hardware", type=Path, metavar="FILE", help="file that `penstock probe` wrote; with TRACE PLAN"
    )
    report.add_argument("--measured", type=Path, metavar="FILE", help="timeline of a run; with TRACE PLAN")
    _chrome_trace(report, ", with what was measured below")
    report.add_argument("--no-policies", action="store_true", help="leave out the table of policies")
    _actions(report, "for the table of policies: ", time_limit_s=5.0)
    report.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help=".html for the page, .png, .svg or .pdf for a picture; default: report.html, in FOLDER",
    )


def _whatif(names: argparse._SubParsersAction[_Parser]) -> None:
    whatif = _command(
        names, "whatif", "planning.whatif", "plan for other machines: is the disk fast enough?", WHATIF_HELP
    )
    whatif.add_argument("trace", type=Path, nargs="+", metavar="TRACE", help="one for each batch size")
    _hardware(whatif)
    whatif.add_argument(
        "--device-budget", type=sizes, metavar="SIZE,...", help="one or more; default: all of the device"
    )
    whatif.add_argument(
        "--host-budget", type=sizes, metavar="SIZE,...", help="host memory; default: as measured"
    )
    whatif.add_argument(
        "--disks", type=counts, default=[1], metavar="N,...", help="disks that work as one; default: 1"
    )
    whatif.add_argument(
        "--disk-rate", type=rate, metavar="RATE", help="of one disk, such as 3.2GB/s; default: as measured"
    )
    _policy(whatif)
    _actions(whatif, time_limit_s=None)
    whatif.add_argument(
        "--seconds", type=seconds, default=60.0, help="about how long it may take; default: %(default)g"
    )
    whatif.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write the table as JSON; default: do not"
    )


def _checkpoint(names: argparse._SubParsersAction[_Parser]) -> None:
    below = _group(names, "checkpoint", "look at checkpoints, verify and convert them")

    info = _command(below, "info", "checkpoint.info", "show what a checkpoint holds")
    verify = _command(
        below, "verify", "checkpoint.verify", "read a checkpoint whole, and compare its checksums"
    )
    for command in (info, verify):
        command.add_argument(
            "file", type=Path, metavar="FILE", help="of penstock.save, torch.save or safetensors"
        )

    convert = _command(
        below, "convert", "checkpoint.convert", "write a checkpoint in the format of another suffix"
    )
    convert.add_argument("source", type=Path, metavar="A", help="of penstock.save, torch.save or safetensors")
    convert.add_argument(
        "destination", type=Path, metavar="B", help="penstock's: .safetensors; torch's: .pt, .pth, .bin"
    )
    convert.add_argument("--overwrite", action="store_true", help="replace B if it is there")


def _samples(names: argparse._SubParsersAction[_Parser]) -> None:
    below = _group(names, "samples", "pack samples into a store, look at it, and get them back")
    _pack(below)
    ls = _command(below, "ls", "samples.ls", "list the names of samples")
    info = _command(below, "info", "samples.info", "show what a store holds, and how well it mixes")
    verify = _command(below, "verify", "samples.verify", "read a store whole, and compare its checksums")
    unpack = _command(below, "unpack", "samples.unpack", "write samples to files again", UNPACK_HELP)
    bench = _command(below, "bench", "samples.bench", "measure how fast a store is read here")
    _upload(below)
    for command in (ls, info, verify, unpack, bench):
        command.add_argument(
            "store",
            type=path_or_url,
            metavar="STORE",
            help="a store, its partitions' folder, or the URL of a namespace with either",
        )

    ls.add_argument("pattern", nargs="?", metavar="PATTERN", help="such as 'cat/*'; * stands for / too")
    ls.add_argument("--limit", type=samples_count, metavar="N", help="stop after so many")
    ls.add_argument("--long", action="store_true", help="with index, bytes and class")

    unpack.add_argument("destination", type=Path, metavar="DEST", help="folder to write them to")
    unpack.add_argument("names", nargs="*", metavar="NAME", help="default: all samples")
    unpack.add_argument("--flat", action="store_true", help="no folders below DEST: / becomes %%2F")
    unpack.add_argument("--overwrite", action="store_true", help="replace files that are there")

    for command in (info, bench):
        command.add_argument(
            "--batch", type=samples_count, default=64, metavar="N", help="samples in a batch; default: 64"
        )
    info.add_argument(
        "--cache",
        type=sizes,
        default=CACHES,
        metavar="SIZE,...",
        help=f"of the sample cache, to tell the mixing for; default: {','.join(CACHES)}",
    )
    bench.add_argument("--cache", type=size, default="256MiB", metavar="SIZE", help="default: %(default)s")
    bench.add_argument("--io", choices=("auto", "buffered", "direct"), default="auto", help="default: auto")
    bench.add_argument("--cold", action="store_true", help="drop the store from the page cache each time")
    bench.add_argument("--seconds", type=seconds, default=8.0, help="time to take; default: %(default)g")


def _upload(names: argparse._SubParsersAction[_Parser]) -> None:
    upload = _command(
        names, "upload", "samples.upload", "write a store onto a drive of another machine", UPLOAD_HELP
    )
    upload.add_argument("store", type=path_or_url, metavar="STORE", help="a store, or its partitions' folder")
    upload.add_argument("url", metavar="URL", help="nvme+tcp://HOST:PORT/NQN?ns=1")
    upload.add_argument("--force", action="store_true", help="replace whatever lies on the namespace")
    discover = _command(
        names, "discover", "samples.discover", "list the namespaces of a target, and what they hold"
    )
    discover.add_argument("portal", metavar="HOST:PORT", help="where the target listens; port: 4420")


def _pack(names: argparse._SubParsersAction[_Parser]) -> None:
    pack = _command(names, "pack", "samples.pack", "pack samples into a store", PACK_HELP)
    pack.add_argument("source", nargs="+", metavar="SOURCE", help="see below")
    pack.add_argument("destination", type=Path, metavar="DEST", help="folder of the store: new, or empty")
    pack.add_argument(
        "--format",
        choices=FORMATS,
        metavar="NAME",
        help=f"{', '.join(FORMATS)}; default: found out",
    )
    pack.add_argument("--chunk-bytes", type=size, default=CHUNK_BYTES, metavar="SIZE", help="default: 256KiB")
    pack.add_argument("--rank", type=int, default=0, metavar="R", help="of several processes, this one packs")
    pack.add_argument("--world", type=int, default=1, metavar="N", help="partition R of N; default: 0 of 1")
    pack.add_argument("--name-column", metavar="NAME", help="arrow: of samples; default: numbers")
    pack.add_argument("--label-column", metavar="NAME", help="arrow: the class of samples")
    pack.add_argument("--label-field", metavar="NAME", help="arrays: the one that holds the class of samples")
    pack.add_argument("--prefix", choices=("shard",), help="webdataset: put the shard before each name")
    pack.add_argument(
        "--follow-links", action="store_true", default=None, help="folder: links, where they stay inside"
    )
    pack.add_argument("--overwrite", action="store_true", help="replace the store at DEST")
    pack.add_argument(
        "--no-resume",
        action="store_true",
        help="start from the beginning, also where packing was interrupted",
    )


def _later(name: str) -> Callable[[argparse.Namespace], Answer]:
    """A function of a module of `penstock.cli`, imported when it is called: not to ask for help."""
    module, _, function = name.partition(".")

    def command(options: argparse.Namespace) -> Answer:
        answer: Answer = getattr(import_module(f"penstock.cli.{module}"), function)(options)
        return answer

    return command


def _group(
    names: argparse._SubParsersAction[_Parser], name: str, summary: str
) -> argparse._SubParsersAction[_Parser]:
    """Commands of two words."""
    group = names.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    return group.add_subparsers(title="commands", metavar="COMMAND", required=True)


def _command(
    names: argparse._SubParsersAction[_Parser],
    name: str,
    command: str,
    summary: str,
    more: str | None = None,
) -> argparse.ArgumentParser:
    parser = names.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=_later(command))
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    return parser


def _spill_dir(parser: argparse.ArgumentParser, purpose: str, *, remote: bool = False) -> None:
    text = f"on the disk to {purpose}; repeated: striped over all; default: for temporary files"
    if remote:
        text += "; or nvme+tcp://HOST:PORT/NQN?ns=1, a remote drive that is empty or of an earlier run"
    parser.add_argument(
        "--spill-dir",
        type=path_or_url if remote else _directory,
        action="append",
        metavar="DIR",
        help=text,
    )


def _directory(text: str) -> Path:
    if isinstance(path_or_url(text), str):
        raise argparse.ArgumentTypeError(f"{text} is a remote drive: only probe and run spill to one")
    return Path(text)


def _page_cache_budget(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--page-cache-budget",
        type=size,
        default=0,
        metavar="SIZE",
        help="most bytes to spill to the page cache only, which is memory; default: %(default)s",
    )


def _script(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", metavar="SCRIPT.py:build", help="see below")


def _hardware(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hardware", type=Path, metavar="FILE", required=True, help="that `penstock probe` wrote"
    )


def _budget(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device-budget", type=size, metavar="SIZE", required=True, help="such as 600MiB or 1.5GB"
    )


def _policy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--policy", choices=POLICIES, default="optimal", help="default: %(default)s")


def _actions(parser: argparse.ArgumentParser, purpose: str = "", time_limit_s: float | None = 10.0) -> None:
    """What a plan may do with a tensor besides moving it, and how long planning may take."""
    parser.add_argument(
        "--recompute", action="store_true", help=f"{purpose}allow tensors to be recomputed instead of moved"
    )
    parser.add_argument(
        "--compress", action="store_true", help=f"{purpose}allow tensors to be moved compressed, without loss"
    )
    if time_limit_s is not None:
        parser.add_argument(
            "--time-limit",
            type=seconds,
            default=time_limit_s,
            metavar="SECONDS",
            help=f"{purpose}for planning; the best plan so far is used then; default: %(default)g",
        )


def _chrome_trace(parser: argparse.ArgumentParser, more: str = "") -> None:
    parser.add_argument(
        "--chrome-trace",
        type=Path,
        metavar="FILE",
        help=f"write the timeline for Perfetto and chrome://tracing, too{more}: .json or .json.gz",
    )


def _micro_batch(parser: argparse.ArgumentParser, more: str = "") -> None:
    parser.add_argument(
        "--micro-batch",
        type=micro_batch,
        metavar="N",
        help=f"divide batches into parts of N samples, or of the fastest size: auto{more}; default: do not",
    )
    parser.add_argument(
        "--micro-batch-order",
        choices=("part", "layer", "auto"),
        help="run parts one after the other, or all of them through each block of the model before the next; "
        "auto: the faster one; default: part",
    )


def _lossy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lossy",
        choices=LOSSY,
        help="let activations saved for backward leave in this codec: backward reads them rounded",
    )


def _endurance(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--endurance",
        type=endurance,
        metavar="SIZE",
        help="of the disk, from its data sheet, such as 600TBW: shows how long it lasts",
    )


def _io_costs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--io-costs", type=Path, metavar="FILE", help="I/O cost tables of earlier runs: read, and added to"
    )


def _written(parser: argparse.ArgumentParser, default: str, metavar: str = "FILE") -> None:
    parser.add_argument(
        "-o", "--output", type=Path, default=Path(default), metavar=metavar, help="default: %(default)s"
    )


# -- what is typed for an option. What cannot be is said as argparse says it ---------------------------


def size(text: str) -> int:
    try:
        return parse_bytes(text)
    except InvalidSize as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def endurance(text: str) -> int:
    try:
        return parse_endurance(text)
    except InvalidSize as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def sizes(text: str) -> list[int]:
    return [size(part) for part in text.split(",")]


def counts(text: str) -> list[int]:
    return [count(part, "disks") for part in text.split(",")]


def rate(text: str) -> float:
    found = size(text.strip().removesuffix("/s"))
    if found <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate: give one above zero, such as 3.2GB/s")
    return float(found)


def seconds(text: str) -> float:
    return fraction(text, "number of seconds")


def count(text: str, what: str = "steps") -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of {what}: give 1 or more")
    return int(text)


def number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number: give 0 or more")
    return int(text)


def fraction(text: str, what: str = "number") -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a {what}: give 0 or more")
    return found


def micro_batch(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return samples_count(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or auto") from error


def path_or_url(text: str) -> Path | str:
    from penstock.storage.nvme import is_url

    return text if is_url(text) else Path(text)


def samples_count(text: str) -> int:
    return count(text, "samples")
