"""Train on packed token sequences of two stores, of Python's own code, by one of three trainers.

pip install '.[integrations]', then: python examples/samples_in_trainers.py [transformers | trl | lightning]

Each goes on in the middle of an epoch: the same call with more steps resumes from its folder's checkpoint.
"""

from __future__ import annotations

import asyncio
import email
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from penstock import samples

BLOCK = 64
CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    use_cache=False,
)


def loader(folder: Path, batch_size: int = 4) -> samples.Loader:
    """Batches of which 70 % is asyncio and 30 % email. A token is a byte here, and a paragraph a sequence."""
    parts = {}
    for name, package, weight in (("asyncio", asyncio, 0.7), ("email", email, 0.3)):
        store = folder / f"{name}.store"
        text = "".join(path.read_text() for path in sorted(Path(package.__path__[0]).glob("*.py")))
        pieces = [piece.encode() for piece in text.split("\n\n") if piece]
        samples.pack(((str(i), piece) for i, piece in enumerate(pieces)), store, overwrite=True)
        parts[samples.packed(samples.mount(store), BLOCK, tokens="uint8")] = weight
    return samples.Loader(samples.Mixture(parts), batch_size, drop_last=True)


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG)


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({chr(i): i for i in range(256)}, unk_token=chr(0)))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token=chr(0), eos_token=chr(0))


def only(batches: list[Any]) -> Any:
    """The Loader makes whole batches: of one such "sample" nothing is left to be collated."""
    (batch,) = batches
    return batch


def train_with_transformers(folder: Path, steps: int) -> list[float]:
    """transformers.Trainer. The losses of the steps."""
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    arguments = TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=1,
        lr_scheduler_type="constant",
        save_steps=1,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
    )
    trainer = Trainer(model(), arguments, train_dataset=loader(folder), data_collator=only)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train_with_trl(folder: Path, steps: int) -> list[float]:
    """TRL's SFTTrainer. The losses of the steps."""
    from datasets import Dataset
    from transformers.trainer_utils import get_last_checkpoint
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=1,
        lr_scheduler_type="constant",
        save_steps=1,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        report_to=[],
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,  # position_ids, of which it knows nothing
    )
    # It takes only data sets of the library datasets, and looks at the first sample: the Loader comes after.
    first = Dataset.from_list([{"input_ids": [0], "labels": [0]}])
    trainer = SFTTrainer(
        model(), args=arguments, train_dataset=first, data_collator=only, processing_class=tokenizer()
    )
    trainer.train_dataset = loader(folder)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train_with_lightning(folder: Path, steps: int) -> list[float]:
    """Lightning, which keeps the Loader's position in its checkpoints. The losses of the steps."""
    import lightning.pytorch as lightning

    losses: list[float] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model()

        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch).loss
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    last = folder / "last.ckpt"
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Module(), loader(folder), ckpt_path=last if last.exists() else None)
    trainer.save_checkpoint(last)
    return losses


TRAINERS = {
    "transformers": train_with_transformers,
    "trl": train_with_trl,
    "lightning": train_with_lightning,
}

if __name__ == "__main__":
    (name,) = sys.argv[1:] or ["transformers"]
    print(TRAINERS[name](Path("samples_in_trainers"), 20))
