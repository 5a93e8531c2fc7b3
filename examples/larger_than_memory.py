"""Build, train, save and load a model that is larger than its memory budget.

    python examples/larger_than_memory.py
    python examples/larger_than_memory.py --layers 14 --width 1024 --device-budget 512MiB

The model is built inside the budget: weights that do not fit leave for the disk while the next ones are made.
Saving and loading stream through the same budget.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from pathlib import Path

import gpt
import torch

import penstock
from penstock.units import format_bytes, parse_bytes


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--width", type=int, default=256, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--device-budget", default="24MiB", metavar="SIZE", help="default: %(default)s")
    parser.add_argument("--spill-dir", metavar="DIR", help="default: for temporary files")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="the checkpoint; default: a temporary one"
    )
    options = parser.parse_args()
    config = gpt.Config(layers=options.layers, width=options.width, context=128, batch=2)

    with tempfile.TemporaryDirectory(dir=options.spill_dir) as scratch:
        checkpoint = options.output or Path(scratch) / "gpt.safetensors"
        with penstock.offload(device_budget=options.device_budget, spill_dir=options.spill_dir) as run:
            model, optimizer, batches, loss_of = gpt.build(config)
            for text in itertools.islice(batches, options.steps):
                with run.step():
                    loss = loss_of(model, text)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                print(f"loss {loss.item():.4f}")

            state = [*model.parameters(), *states_of(optimizer)]
            state_bytes = sum(tensor.nbytes for tensor in state)
            penstock.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint)
            held_out = next(batches)
            with torch.no_grad():
                trained = loss_of(model, held_out).item()

            torch.manual_seed(1)  # other weights, in the same memory
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter)
            penstock.load(checkpoint, into={"model": model, "optimizer": optimizer})
            with torch.no_grad():
                loaded = loss_of(model, held_out).item()
            print(run.report())

    budget_bytes = parse_bytes(options.device_budget)
    print(
        f"\nweights and optimizer state {format_bytes(state_bytes)}, {state_bytes / budget_bytes:.1f} times "
        f"the budget of {format_bytes(budget_bytes)}; peak {format_bytes(run.report().peak_bytes)}"
    )
    print(f"loss of the trained model {trained:.6f}, of what was saved and loaded {loaded:.6f}")
    return 0 if trained == loaded else 1


def states_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    values = itertools.chain.from_iterable(state.values() for state in optimizer.state.values())
    return [value for value in values if isinstance(value, torch.Tensor)]


if __name__ == "__main__":
    sys.exit(main())
