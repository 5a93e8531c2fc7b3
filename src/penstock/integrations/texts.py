"""A text in tokens, and its sequences, for `penstock finetune`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from penstock.errors import InvalidArgument, InvalidFile
from penstock.options import FineTuneOptions

BYTES = "bytes"  # the tokenizer that needs no files: a token for each byte
TEXT_PIECE_BYTES = 1 << 20  # is handed to a tokenizer at once, up to the end of a line


class Text:
    """The sequences of a text, in an order that the seed and the number of a step decide."""

    def __init__(self, settings: FineTuneOptions, tokens: np.ndarray) -> None:
        assert settings.block_size is not None
        length, self._seed = settings.block_size, settings.seed
        self._per_step = settings.sequences_per_step
        self._count = len(tokens) // length
        if self._count < self._per_step:
            raise InvalidArgument(
                f"{settings.text} has {len(tokens)} tokens, and a step takes "
                f"{self._per_step * length}: {self._per_step} sequences of {length}. Give more text, or "
                "lower --block-size, --gradient-accumulation-steps or --per-device-train-batch-size"
            )
        self._sequences = tokens[: self._count * length].reshape(self._count, length)
        self.steps_per_epoch = self._count // self._per_step

    def of_step(self, step: int) -> torch.Tensor:
        """[sequences_per_step, block_size]"""
        epoch, place = divmod(step, self.steps_per_epoch)
        order = torch.randperm(self._count, generator=torch.Generator().manual_seed(self._seed + epoch))
        chosen = order[place * self._per_step : (place + 1) * self._per_step]
        return torch.from_numpy(self._sequences[chosen.numpy()].astype(np.int64))


def _tokenizer(settings: FineTuneOptions) -> Any:
    """None: a token for each byte."""
    if settings.tokenizer == BYTES:
        return None
    folder = Path(settings.tokenizer or settings.model)
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise InvalidFile(
            f"{folder} has no tokenizer that can be used: give a directory that has one with --tokenizer "
            "DIR, or take a token for each byte with --tokenizer bytes"
        ) from error


def tokens_of(settings: FineTuneOptions, vocabulary: int, path: Path) -> tuple[np.ndarray, Any]:
    """The tokens of the text, mapped from a file that is written here, and the tokenizer."""
    tokenizer = _tokenizer(settings)
    if not path.exists():
        partial = path.with_suffix(".partial")
        with open(partial, "wb") as file:
            for tokens in _tokenized(settings.text, tokenizer):
                if len(tokens) and int(tokens.max()) >= vocabulary:
                    raise InvalidArgument(
                        f"token {int(tokens.max())} of {settings.text} is not in the model's vocabulary of "
                        f"{vocabulary}: give the model's own tokenizer"
                    )
                file.write(tokens.astype(np.int32).tobytes())
        partial.replace(path)
    if not path.stat().st_size:
        raise InvalidArgument(f"{settings.text} is empty: give a file with text")
    return np.memmap(path, dtype=np.int32, mode="r"), tokenizer


def _tokenized(text: Path, tokenizer: Any) -> Iterator[np.ndarray]:
    with open(text, "rb") as file:
        while lines := file.readlines(TEXT_PIECE_BYTES):
            data = b"".join(lines)
            if tokenizer is None:
                yield np.frombuffer(data, dtype=np.uint8)
                continue
            try:
                words = data.decode()
            except UnicodeDecodeError as error:
                raise InvalidFile(
                    f"{text} is not UTF-8 text: {error}. Convert it, or take a token for each byte with "
                    "--tokenizer bytes"
                ) from error
            yield np.array(
                tokenizer(words, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int64
            )
