"""The command line: all commands and their options."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import penstock
from penstock.capture.datasheets import DATA_SHEETS
from penstock.cli.values import metavar, parse
from penstock.options import (
    CACHES,
    CHUNK_BYTES,
    FORMATS,
    BatchOptions,
    FineTuneOptions,
    IoOptions,
    LoraOptions,
    Option,
    PlanOptions,
    choices,
    options_of,
    run_options,
)

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

The script is imported, so put its own training under `if __name__ == "__main__":`.
"""

RUN = run_options()
REPORT_HELP = """\
SOURCE is the FOLDER that `penstock run` wrote, or a TRACE and a PLAN, with --hardware.
"""

BATCH_HELP = """
Nothing is run without --run. Batches of other sizes have the samples of the first one, again and again.
FOLDER gets the plans, for `penstock run --plan`.
"""

WHATIF_HELP = """\
Every combination is planned for. "limited by" names the resource of which twice as much would help the
plan most. The disk counts as fast enough where one that never keeps the plan waiting would save less
than 5 % of the step.
"""

FINETUNE_HELP = """\
MODEL_DIR has config.json, weights as safetensors files, and a tokenizer, as save_pretrained writes them and a
hub has them; nothing is downloaded. The text is cut into sequences of --block-size tokens. Training is
on the CPU.

Interrupted or killed, the same command goes on from the latest checkpoint, with the same losses. At the end
the model is in FOLDER/model, for from_pretrained.
"""

UPLOAD_HELP = """\
URL is s3://BUCKET/PREFIX, gs:// or az://, with credentials and endpoints from the environment or an AWS
profile; or it names a namespace of an NVMe over Fabrics target that speaks TCP, such as Linux's or SPDK's.
All of a namespace belongs to the store from then on; its bytes cross the network as they are, and nobody is
asked for a password: for networks that you trust.

Another store is replaced only with --overwrite. Interrupted, the same command goes on where it stopped.
"""

SERVE_HELP = """\
Others mount the URL that is shown, as if the store had been uploaded. They can read, and change nothing.
Ctrl-C or SIGTERM ends it; so does a change of the store.

Every host that reaches ADDRESS can read, without a password. For networks that you trust.
"""

PACK_HELP = """\
SOURCE is a folder tree of files (where all lie in subfolders, these are their classes), tar shards of
WebDataset, TFRecord, Parquet or Arrow files, a dataset that Hugging Face datasets or MosaicML streaming
saved, .npy or .npz. Shards also as "train-{000..127}.tar", or as several SOURCEs; of folders one. It is not
changed.

Interrupted, the same command goes on where it stopped. With --world-size, several processes pack a partition
each, all with the same DEST, which is then mounted whole.
"""

UNPACK_HELP = """\
Names that would lead out of DEST are refused, before anything is written; see --flat. Samples of fields
become a folder each: a file for each field of bytes, FIELD.npy for each array, fields.json for the others.
"""

# At the end of the help of each command, by what carries it out. "penstock" precedes it.
EXAMPLES = {
    "machine.probe": "probe --spill-dir /mnt/nvme -o hardware.json",
    "doctor.doctor": "doctor --spill-dir /mnt/nvme",
    "machine.io_paths": "io-paths --spill-dir /mnt/nvme --time-limit 20",
    "training.trace": "trace train.py:build --device h100 -o trace.json.gz",
    "planning.plan": "plan trace.json.gz --hardware hardware.json --device-budget 8GiB --compare-budgets",
    "planning.simulate": "simulate trace.json.gz plan.json --hardware hardware.json --chrome-trace step.json",
    "batch.batch": "batch train.py:build --hardware hardware.json --device-budget 8GiB",
    "training.run": "run train.py:build --device-budget 50% --spill-dir /mnt/nvme --steps 20",
    "training.finetune": "finetune llama/ book.txt --device-budget 1GiB --lora -o adapters",
    "planning.report": "report penstock-run -o report.html",
    "planning.whatif": """\
whatif trace.json.gz --hardware hardware.json --device-budget 8GiB,16GiB --disks 1,2,4 \\
      --disk-rate 3.2GB/s""",
    "checkpoint.ls": "checkpoint ls run/",
    "checkpoint.pack": "checkpoint pack run/step-0000000900.safetensors model.safetensors",
    "checkpoint.cp": "checkpoint cp s3://bucket/run/model.safetensors model.safetensors",
    "checkpoint.info": "checkpoint info run.safetensors",
    "checkpoint.verify": "checkpoint verify run.safetensors",
    "checkpoint.convert": "checkpoint convert model.pt model.safetensors",
    "samples.pack": "samples pack photos/ photos.store",
    "samples.ls": "samples ls photos.store 'cat/*' --long --limit 20",
    "samples.info": "samples info photos.store --cache 64MiB,1GiB",
    "samples.verify": "samples verify photos.store",
    "samples.unpack": "samples unpack photos.store photos/ cat/1.png",
    "samples.bench": "samples bench photos.store --cold --cache 1GiB",
    "samples.upload": "samples upload photos.store 'nvme+tcp://storage1:4420/nqn.2014-08.org.example:photos?ns=1'",
    "samples.serve": "samples serve photos.store --listen 10.0.0.7:4420",
    "samples.discover": "samples discover storage1:4420",
}

MEMORY, PLANNING, OUTPUT = "memory and disk", "planning", "output"

Parser: TypeAlias = argparse._ActionsContainer
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(
        prog="penstock",
        description="Train PyTorch models that do not fit in memory. Every command reads and writes files.",
        epilog="exit codes: 0 done, 1 error, 2 wrong usage, 3 infeasible, 130 interrupted",
    )
    root.add_argument("--version", action="version", version=f"penstock {penstock.__version__}")
    names = _commands(root)

    probe = _command(names, "probe", "machine.probe", "measure this machine")
    _spill_dir(probe, "measure", remote=True)
    _options(probe, RUN, "device", default="cpu")
    _options(probe, RUN, "host_budget", "host_node")
    _time_limit(probe, 10.0)
    _output_option(probe, "hardware.json")

    doctor = _command(
        names, "doctor", "doctor.doctor", "say what works on this machine, what costs something, and why"
    )
    _spill_dir(doctor, "look at")

    paths = _command(names, "io-paths", "machine.io_paths", "compare the I/O paths between memory and disk")
    _spill_dir(paths, "use")
    _options(paths, RUN, "page_cache_budget")
    _options(paths, RUN, "costs")
    _options(paths, RUN, "device", prefix="whose runs use --io-costs: ", default="cpu")
    _time_limit(paths, 5.0)

    trace = _command(names, "trace", "training.trace", "capture one training step", SCRIPT_HELP)
    _add(trace, "script", "see below", metavar="SCRIPT.py:build")
    _add(trace, "--real", "run the step and time it, instead of estimating without memory", "bool")
    _estimated_device(trace)
    _output_option(trace, "trace.json.gz")

    plan = _command(names, "plan", "planning.plan", "decide what leaves the device, and predict the step")
    step = "file that `penstock trace` wrote; with --micro-batch a SCRIPT.py:build"
    _add(plan, "trace", step, "Path", metavar="TRACE")
    machine = plan.add_argument_group(MEMORY)
    _options(machine, RUN, "hardware", required=True)
    _options(machine, RUN, "device_budget", required=True, kind="Budget")
    _options(machine, RUN, "endurance")
    planning = _planning(plan)
    _options(planning, RUN, "lossy", "keep_weights", "micro_batch", "micro_batch_order")
    _time_limit(planning, 10.0)
    shown = plan.add_argument_group(OUTPUT)
    _add(shown, "--compare-policies", "show the plan of every policy", "bool")
    _add(shown, "--compare-budgets", "show what other device budgets bring", "bool")
    _output_option(shown, "plan.json")

    simulate = _command(names, "simulate", "planning.simulate", "check a plan, and replay it event by event")
    _add(simulate, "trace", "file that `penstock trace` wrote", "Path", metavar="TRACE")
    _add(simulate, "plan", "file that `penstock plan` wrote", "Path", metavar="PLAN")
    _options(simulate, RUN, "hardware", required=True)
    _chrome_trace(simulate)
    _output_option(simulate, "timeline.json.gz")

    _batch(names)

    run = _command(names, "run", "training.run", "train inside a budget", SCRIPT_HELP)
    _add(run, "script", "see below", metavar="SCRIPT.py:build")
    steps = "over all batches again where there are fewer; default: one for each batch"
    _add(run, "--steps", steps, "Steps")
    machine = run.add_argument_group(MEMORY)
    _options(machine, RUN, "device_budget", required=True)
    _spill_dir(machine, "use", remote=True)
    _options(machine, RUN, "host_budget", "host_node", "disk_budget")
    _options(machine, RUN, "device", default="cpu")
    _options(machine, RUN, "hardware")
    _options(run.add_argument_group(PLANNING), RUN, "plan", *options_of(PlanOptions))
    _options(run.add_argument_group("batches"), RUN, *options_of(BatchOptions))
    _options(run.add_argument_group("I/O between memory and disk"), RUN, *options_of(IoOptions))
    _output_option(run.add_argument_group(OUTPUT), "penstock-run", "FOLDER")

    _finetune(names)
    _report(names)
    _whatif(names)
    _checkpoint(names)
    _samples(names)
    return root


def _batch(names: Commands) -> None:
    summary = "find the largest batch that fits, and the fastest"
    batch = _command(names, "batch", "batch.batch", summary, SCRIPT_HELP + BATCH_HELP)
    _add(batch, "script", "see below", metavar="SCRIPT.py:build")
    machine = batch.add_argument_group(MEMORY)
    _options(machine, RUN, "hardware", required=True)
    _options(machine, RUN, "device_budget", required=True, kind="Budget")
    _estimated_device(machine)
    sizes = batch.add_argument_group("sizes")
    _add(sizes, "--least", "samples in a batch", "Samples", 1)
    _add(sizes, "--most", "samples in a batch", "Samples", 1 << 20)
    slower = "fraction of the step in memory that does not count as slower"
    _add(sizes, "--slowdown", slower, "Fraction", 0.05)
    planning = batch.add_argument_group(PLANNING)
    _options(planning, RUN, "policy", "recompute")
    _add(planning, "--time-limit", "for planning one size; about ten are planned", "Seconds", 2.0)
    confirm = batch.add_argument_group("confirming")
    _add(confirm, "--run", "run some steps of the sizes that are named", "bool")
    _spill_dir(confirm, "use")
    _output_option(batch.add_argument_group(OUTPUT), "penstock-batch", "FOLDER")


def _finetune(names: Commands) -> None:
    summary = "fine-tune a language model on a text inside a budget"
    tune = _command(names, "finetune", "training.finetune", summary, FINETUNE_HELP)
    _add(tune, "model", "see below", "Path", metavar="MODEL_DIR")
    _add(tune, "text", "file with the text, in UTF-8", "Path", metavar="TEXT")
    machine = tune.add_argument_group(MEMORY)
    _options(machine, RUN, "device_budget", required=True)
    _spill_dir(machine, "use")
    _options(machine, RUN, "host_budget", "host_node", "disk_budget", "hardware", "endurance")
    _planning(tune)
    tuning = options_of(FineTuneOptions)
    training = tune.add_argument_group("training, as in transformers' TrainingArguments")
    few_bits = [name for name in tuning if name.startswith(("load_in", "bnb"))]
    apart = {"model", "text", "lora", *few_bits}
    _options(training, tuning, *(name for name in tuning if name not in apart))
    _options(tune.add_argument_group("weights in few bits, as in BitsAndBytesConfig"), tuning, *few_bits)
    adapters = tune.add_argument_group("adapters")
    _add(adapters, "--lora", "train adapters of PEFT, not all weights", "bool")
    lora = {
        f"lora_{name}": option._replace(flag=f"lora-{option.flag}")
        for name, option in options_of(LoraOptions).items()
    }
    _options(adapters, lora, *lora)
    written = tune.add_argument_group(OUTPUT)
    _add(written, "--save-steps", "between checkpoints", "Steps", 100)
    _add(written, "--resume", "fail where FOLDER holds nothing to go on with", "bool")
    _output_option(written, "penstock-finetune", "FOLDER", name="--output-dir", dest="output")


def _report(names: Commands) -> None:
    summary = "show a plan, and compare a run with it, in one page"
    report = _command(names, "report", "planning.report", summary, REPORT_HELP)
    _add(report, "source", "FOLDER, or TRACE PLAN", "Path", nargs="+", metavar="SOURCE")
    _add(report, "--hardware", "file that `penstock probe` wrote; with TRACE PLAN", "Path")
    _add(report, "--measured", "timeline of a run; with TRACE PLAN", "Path")
    table = report.add_argument_group("the table of policies")
    _add(table, "--no-policies", "leave it out", "bool")
    _options(table, RUN, "recompute", "compress")
    _time_limit(table, 5.0)
    written = report.add_argument_group(OUTPUT)
    _chrome_trace(written, ", with what was measured below")
    page = ".html for the page, .png, .svg or .pdf for a picture; default: report.html, in FOLDER"
    _add(written, "--output", page, "Path")


def _whatif(names: Commands) -> None:
    summary = "plan for other machines: is the disk fast enough?"
    whatif = _command(names, "whatif", "planning.whatif", summary, WHATIF_HELP)
    _add(whatif, "trace", "one for each batch size", "Path", nargs="+", metavar="TRACE")
    machines = whatif.add_argument_group("machines")
    _options(machines, RUN, "hardware", required=True)
    _add(machines, "--device-budget", "one or more; default: all of the device", "Budget,...")
    _add(machines, "--host-budget", "host memory; default: as measured", "Budget,...")
    _add(machines, "--disks", "disks that work as one", "Disks,...", "1")
    _add(machines, "--disk-rate", "of one disk, such as 3.2GB/s; default: as measured", "Rate")
    _time_limit(_planning(whatif), 60.0)
    _add(whatif.add_argument_group(OUTPUT), "--output", "write the table as JSON; default: do not", "Path")


def _checkpoint(names: Commands) -> None:
    below = _group(names, "checkpoint", "look at checkpoints, verify and convert them")

    ls = _command(below, "ls", "checkpoint.ls", "list the checkpoints of a run")
    _add(ls, "directory", "of penstock.checkpoint.Manager, or its URL", "Place", metavar="DIR")
    info = _command(below, "info", "checkpoint.info", "show what a checkpoint holds")
    summary = "read a checkpoint whole, and compare its checksums"
    verify = _command(below, "verify", "checkpoint.verify", summary)
    for command in (info, verify):
        _add(command, "file", "of penstock.save, torch.save or safetensors", "Place", metavar="FILE")

    summary = "write a checkpoint in the format of another suffix"
    convert = _command(below, "convert", "checkpoint.convert", summary)
    pack = _command(below, "pack", "checkpoint.pack", "write an increment with all its tensors into one file")
    cp = _command(below, "cp", "checkpoint.cp", "copy a checkpoint to or from a URL, verified on the way")
    for command in (convert, pack, cp):
        _add(command, "source", "of penstock.save, torch.save or safetensors", "Place", metavar="A")
        written = "penstock's: .safetensors, or a URL; torch's: .pt, .pth, .bin, .ckpt"
        _add(command, "destination", written, "Place", metavar="B")
        _add(command, "--overwrite", "replace B if it is there", "bool")


def _samples(names: Commands) -> None:
    below = _group(names, "samples", "pack samples into a store, look at it, and get them back")
    _pack(below)
    ls = _command(below, "ls", "samples.ls", "list the names of samples")
    info = _command(below, "info", "samples.info", "show what a store holds, and how well it mixes")
    verify = _command(below, "verify", "samples.verify", "read a store whole, and compare its checksums")
    unpack = _command(below, "unpack", "samples.unpack", "write samples to files again", UNPACK_HELP)
    bench = _command(below, "bench", "samples.bench", "measure how fast a store is read here")
    _upload(below)
    for command in (ls, info, verify, unpack, bench):
        store = "a store, its partitions' folder, or the URL of either"
        _add(command, "store", store, "Place", metavar="STORE")

    _add(ls, "pattern", "such as 'cat/*'; * stands for / too", nargs="?", metavar="PATTERN")
    _add(ls, "--limit", "stop after so many", "Samples")
    _add(ls, "--long", "with index, bytes and class", "bool")

    _add(unpack, "destination", "folder to write them to", "Path", metavar="DEST")
    _add(unpack, "names", "default: all samples", nargs="*", metavar="NAME")
    _add(unpack, "--flat", "no folders below DEST: / becomes %%2F", "bool")
    _add(unpack, "--overwrite", "replace files that are there", "bool")

    for command in (info, bench):
        _add(command, "--batch", "samples in a batch", "Samples", 64)
    _add(info, "--cache", "of the sample cache, to compute the mixing for", "Size,...", ",".join(CACHES))
    _add(bench, "--cache", "of the sample cache", "Size", "256MiB")
    _add(bench, "--io", "how the store is read", default="auto", choices=("auto", "buffered", "direct"))
    _add(bench, "--cold", "drop the store from the page cache each time", "bool")
    _time_limit(bench, 8.0)


def _upload(names: Commands) -> None:
    summary = "write a store to an object store, or onto a drive of another machine"
    upload = _command(names, "upload", "samples.upload", summary, UPLOAD_HELP)
    _add(upload, "store", "a store, or its partitions' folder", "Place", metavar="STORE")
    _add(upload, "url", "s3://BUCKET/PREFIX, or nvme+tcp://HOST:PORT/NQN?ns=1", metavar="URL")
    _add(upload, "--overwrite", "replace another store, or whatever lies on the namespace", "bool")
    summary = "let other machines read a store of this one"
    serve = _command(names, "serve", "samples.serve", summary, SERVE_HELP)
    _add(serve, "store", "a store, or its partitions' folder", "Place", metavar="STORE")
    address = "of a network of this machine; port 0: any that is free"
    _add(serve, "--listen", address, default="127.0.0.1:4420", metavar="ADDRESS:PORT")
    summary = "list the namespaces of a target, and what they hold"
    discover = _command(names, "discover", "samples.discover", summary)
    _add(discover, "portal", "where the target listens; port: 4420", metavar="HOST:PORT")


def _pack(names: Commands) -> None:
    pack = _command(names, "pack", "samples.pack", "pack samples into a store", PACK_HELP)
    _add(pack, "source", "see below", nargs="+", metavar="SOURCE")
    _add(pack, "destination", "a new or empty folder, or s3://BUCKET/PREFIX", "Place", metavar="DEST")
    _add(pack, "--chunk-bytes", "read at once, with all samples in them", "Size", CHUNK_BYTES)
    _add(pack, "--overwrite", "replace the store at DEST", "bool")
    _add(pack, "--no-resume", "start from the beginning, also where packing was interrupted", "bool")
    _add(pack, "--staging", "for a URL: where files wait; default: in TMPDIR", "Path", metavar="FOLDER")
    parts = pack.add_argument_group("several processes")
    _add(parts, "--rank", "of several processes, this one packs", "Number", 0, metavar="R")
    _add(parts, "--world-size", "partition R of N", "Number", 1, metavar="N")
    source = pack.add_argument_group("what SOURCE is")
    formats = [name for name in FORMATS if name != "iterable"]  # which only a program has
    _add(source, "--format", f"{', '.join(formats)}; default: found out", choices=formats, metavar="NAME")
    _add(source, "--name-column", "arrow: of samples; default: numbers", metavar="NAME")
    _add(source, "--label-column", "arrow: the class of samples", metavar="NAME")
    _add(source, "--label-field", "arrays: the one that holds the class of samples", metavar="NAME")
    _add(source, "--prefix", "webdataset: put the shard before each name", choices=("shard",))
    _add(source, "--follow-links", "folder: links, where they stay inside", "bool")


def _carry_out(name: str, options: argparse.Namespace) -> Answer:
    """Run the command ``MODULE.FUNCTION`` of `penstock.cli`, imported only now: --help needs no imports."""
    module, _, function = name.partition(".")
    answer: Answer = getattr(import_module(f"penstock.cli.{module}"), function)(options)
    return answer


def _commands(parser: argparse.ArgumentParser) -> Commands:
    """The (sub)commands of a parser, which shows its help where none is given."""
    parser.set_defaults(command=None, print_help=parser.print_help)
    return parser.add_subparsers(title="commands", metavar="COMMAND")


def _group(names: Commands, name: str, summary: str) -> Commands:
    return _commands(names.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}."))


def _command(
    names: Commands, name: str, command: str, summary: str, more: str = ""
) -> argparse.ArgumentParser:
    parser = names.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}{'' if summary.endswith('?') else '.'}",
        epilog=f"{more}\nexample:\n  penstock {EXAMPLES[command]}".strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=partial(_carry_out, command))
    _add(parser, "--json", "print one JSON object on standard output", "bool")
    return parser


def _add(parser: Parser, name: str, text: str, kind: str = "str", default: Any = None, **more: Any) -> None:
    """Add an argument, or an option with its default in the help. A bool is off by default."""
    help_text = text if default is None else f"{text}; default: %(default)s"
    _argument(parser, name, kind, help=help_text, default=default, **more)


def _options(
    parser: Parser, known: Mapping[str, Option], *names: str, prefix: str = "", kind: str = "", **changes: Any
) -> None:
    """Add options of `penstock.options`, with ``changes``. ``prefix`` precedes their help."""
    for name in names:
        option = known[name]
        default = changes.get("default", option.default)
        typed_default = default not in (None, False) and (option.kind == "bool" or "default" in changes)
        meaning = "%(default)s" if typed_default else "" if "required" in changes else option.meaning
        help_text = prefix + option.text.replace("%", "%%") + (f"; default: {meaning}" if meaning else "")
        given = {"dest": name, "default": default, "help": help_text} | changes
        _argument(parser, f"--{option.flag}", kind or option.kind, **given)


def _argument(parser: Parser, name: str, kind: str, **given: Any) -> None:
    if kind == "bool":
        given["action"] = argparse.BooleanOptionalAction if given["default"] else "store_true"
        given["default"] = given["default"] or False
    elif "Sequence" in kind:
        given |= {"action": "append", "metavar": "NAME"}
    elif allowed := choices(kind):
        given["choices"] = allowed
        if len(allowed) > 4:  # too many for every usage
            given["metavar"] = kind.upper()
            given["help"] = f"{given['help']}; {', '.join(allowed)}"
    else:
        given["type"] = partial(parse, kind)
        if name.startswith("--") and "choices" not in given:
            given.setdefault("metavar", metavar(kind))
    parser.add_argument(*(["-o"] if name.startswith("--output") else []), name, **given)


def _spill_dir(parser: Parser, purpose: str, *, remote: bool = False) -> None:
    text = f"on the disk to {purpose}; repeated: striped over all; default: for temporary files"
    if remote:
        text += "; or nvme+tcp://HOST:PORT/NQN?ns=1, a remote drive that is empty or of an earlier run"
    kind = "Place" if remote else "Directory"
    _add(parser, "--spill-dir", text, kind, action="append", metavar="DIR")


def _estimated_device(parser: Parser) -> None:
    text = "where an estimate's times are for: this processor, or a data sheet; default: cpu"
    _add(parser, "--device", text, choices=("cpu", *DATA_SHEETS))


def _planning(parser: argparse.ArgumentParser) -> Parser:
    """The options of what a plan may do."""
    group = parser.add_argument_group(PLANNING)
    _options(group, RUN, "policy", "recompute", "compress")
    return group


def _time_limit(parser: Parser, default_s: float) -> None:
    text = "time to take, about; a plan is the best that was found by then"
    _add(parser, "--time-limit", text, "Seconds", default_s)


def _chrome_trace(parser: Parser, more: str = "") -> None:
    text = f"write the timeline for Perfetto and chrome://tracing, too{more}: .json or .json.gz"
    _add(parser, "--chrome-trace", text, "Path")


def _output_option(
    parser: Parser, default: str, metavar: str = "FILE", name: str = "--output", **more: Any
) -> None:
    _add(parser, name, "what is written", "Path", Path(default), metavar=metavar, **more)
