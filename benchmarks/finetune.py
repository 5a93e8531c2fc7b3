"""Fine-tune a model of random weights in a budget far below it, and compare the losses with those in memory.

    python benchmarks/finetune.py -o out/finetune.json

Llama's architecture with 1 GiB of float32 weights, in 256 MiB; for all weights, and for adapters (LoRA).
Compared are a plain loop of transformers and torch in memory, `penstock finetune`, and, for all weights, the
same killed by SIGKILL after a checkpoint and begun again. Memory is that of the processes, by the operating
system. See `--quick` for a check that it all works; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from step_time import ROOT, add_common_arguments, heading, wide_console, write

from penstock.units import format_bytes, format_seconds

sys.path.insert(0, str(ROOT))

from tests.support.finetuning import SMALL

LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
PENSTOCK = (sys.executable, "-c", "import sys; from penstock.cli import main; sys.exit(main())")
LIMIT_S = 3600.0  # of each process


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device-budget", metavar="SIZE", help="default: 256MiB")
    parser.add_argument("--policy", default="optimal", help="default: %(default)s")
    add_common_arguments(parser, "finetune")
    options = parser.parse_args(arguments)
    config, budget = (SMALL, "40MiB") if options.quick else (LARGE, "256MiB")
    console = wide_console()
    table = Table("", "losses", "peak of tensors", "peak resident", "step", box=None, padding=(0, 1))
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.spill_dir) as name:
        folder = Path(name)
        support("make", folder / "model", json.dumps(config))
        (folder / "text").write_bytes(b"".join(path.read_bytes() for path in sorted(ROOT.glob("docs/*.md"))))
        for kind in ("all weights", "LoRA"):
            lora = kind == "LoRA"
            given = {"max_steps": 4, "block_size": 32 if options.quick else 128}
            given |= {"gradient_accumulation_steps": 2}
            rate = {"learning_rate": 2e-4 if lora else 5e-5, "lora": lora}
            reference = json.loads(
                support(
                    "train", folder / "model", folder / "text", json.dumps(given | rate), folder / "plain"
                )
            )
            command = [*PENSTOCK, "finetune", folder / "model", folder / "text"]
            command += ["--device-budget", options.device_budget or budget, "--spill-dir", options.spill_dir]
            command += ["--tokenizer", "bytes", "--policy", options.policy, "--json", "--save-steps", "2"]
            command += ["--lora"] if lora else []
            for name, value in given.items():
                command += [f"--{name.replace('_', '-')}", value]
            results = {"in memory": reference, "in the budget": run([*command, "-o", folder / kind])}
            if not lora:
                results["killed and begun again"] = killed(
                    [*command, "-o", folder / "killed"], folder / "killed"
                )
            for how, result in results.items():
                report = result.get("report", {})
                equal = result["losses"] == reference["losses"]
                table.add_row(
                    f"{kind}, {how}",
                    "the same bits" if equal else "DIFFERENT",
                    format_bytes(report["peak_bytes"]) if report else "",
                    format_bytes(report.get("peak_resident_bytes", result.get("peak_resident_bytes", 0))),
                    format_seconds(report["step_s"]) if report else "",
                )
            found[kind] = results
    console.print(table)
    console.print("peak resident: of the whole process in memory; in the budget, what it grew by")
    write({**heading("finetune"), "results": found}, options.output, console)
    return (
        0
        if all(
            each["losses"] == one["in memory"]["losses"] for one in found.values() for each in one.values()
        )
        else 1
    )


def support(*arguments: object) -> str:
    program = [sys.executable, "-m", "tests.support.finetuning", *map(str, arguments)]
    return subprocess.run(
        program, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S
    ).stdout


def run(command: Sequence[object]) -> dict[str, Any]:
    ended = subprocess.run(
        [str(part) for part in command], check=True, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S
    )
    answer: dict[str, Any] = json.loads(ended.stdout)
    return answer


def killed(command: Sequence[object], output: Path) -> dict[str, Any]:
    """As soon as there is a checkpoint."""
    process = subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL)
    deadline_s = time.monotonic() + LIMIT_S
    while not (output / "checkpoint.safetensors").exists():
        if process.poll() is not None or time.monotonic() > deadline_s:
            process.kill()
            raise SystemExit("it ended before there was a checkpoint")
        time.sleep(0.05)
    process.kill()
    process.wait()
    answer = run(command)
    assert answer["begun"] > 0
    return answer


if __name__ == "__main__":
    sys.exit(main())
