"""Fine-tune a causal language model of a model directory on a text, inside a budget: `penstock finetune`.

A plain loop, not transformers' Trainer: all that decides the next loss (weights, the optimizer's state, the
schedule, random state, place in the text) is one checkpoint, which is written straight from the budget and
replaces the one before at once. A process that is killed at any moment goes on from it with the same bits.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import penstock
from penstock.checkpoint import load as load_checkpoint
from penstock.checkpoint import save as save_checkpoint
from penstock.core import files
from penstock.core.hardware import Hardware
from penstock.errors import BudgetTooSmall, InvalidArgument, InvalidFile, SpillSpaceFull
from penstock.integrations.hub import config_of, load, uninitialized
from penstock.integrations.quantization import Quantizer, allocate, refuse_quantized
from penstock.integrations.texts import TEXT_PIECE_BYTES, Text, tokens_of
from penstock.integrations.versions import missing
from penstock.options import FineTuneOptions, PlanOptions
from penstock.report.summary import Summary, summarise
from penstock.runtime.run import Offload
from penstock.runtime.step_planner import planning_s
from penstock.units import format_bytes_up, parse_bytes

try:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
except ImportError as error:
    raise missing("transformers") from error

logger = logging.getLogger("penstock")

# AdamW needs four times the memory of what it updates. So weights above this, and above a quarter of the
# largest, whose gradient needs as much, are updated so many rows at a time.
ROWS_BYTES = 8 << 20

SETTINGS, TOKENS, LOSSES, MODEL = "finetune.json", "tokens.bin", "losses.json", "model"
CHECKPOINT = "checkpoint.safetensors"
BLOCK_SIZE = 512


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Where training is.

    losses   of all steps so far, those of earlier processes too
    begun    the step that this process began with
    total    steps of the whole training
    """

    losses: list[float]
    begun: int
    total: int

    @property
    def finished(self) -> bool:
        return len(self.losses) >= self.total


class Training:
    """A model with its optimizer and schedule, and one step of them."""

    def __init__(self, settings: FineTuneOptions, model: torch.nn.Module, total_steps: int) -> None:
        self.model = model.train()
        self.settings = settings
        self.parameters = [each for each in self.model.parameters() if each.requires_grad]
        large = max(ROWS_BYTES, *(each.nbytes // 4 for each in self.parameters))
        self._rows = {each: _rows(each) for each in self.parameters if each.nbytes > large}
        for parameter, rows in self._rows.items():
            parameter.register_post_accumulate_grad_hook(_divide_gradient(rows))
        # What the optimizer has: rows in the place of large parameters.
        self._updated = [part for each in self.parameters for part in self._rows.get(each, [each])]
        decayed = [each for each in self._updated if each.dim() > 1]
        kept = [each for each in self._updated if each.dim() <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed}, {"params": kept, "weight_decay": 0.0}],
            lr=settings.learning_rate or (2e-4 if settings.lora else 5e-5),
            weight_decay=settings.weight_decay,
            fused=True,
        )
        for parameter in self._updated:  # now: all steps are alike then
            self.optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        self.scheduler = transformers.get_scheduler(
            settings.lr_scheduler_type, self.optimizer, settings.warmup_steps, total_steps
        )

    def step(self, sequences: torch.Tensor) -> torch.Tensor:
        """Forward, backward, clipping and update. Returns the mean loss, without its graph.

        sequences   [sequences_per_step, block_size]
        """
        count = self.settings.gradient_accumulation_steps
        total = torch.zeros(())
        for batch in sequences.chunk(count):
            loss = self.model(input_ids=batch, labels=batch, use_cache=False).loss / count
            loss.backward()
            total += loss.detach()
        self._clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return total

    def state(self, losses: list[float]) -> dict[str, Any]:
        """All that decides how training goes on."""
        trained = {name: each for name, each in self.model.named_parameters() if each.requires_grad}
        return {
            "weights": trained,
            "optimizer": self.optimizer,
            "last_epoch": self.scheduler.last_epoch,
            "random": torch.get_rng_state(),
            "losses": losses,
        }

    def save(self, path: Path, losses: list[float]) -> None:
        state = self.state(losses)
        save_checkpoint({**state, "optimizer": self.optimizer.state_dict()}, path)

    def load(self, path: Path) -> list[float]:
        """Resume from a checkpoint. Returns the losses until then."""
        state = self.state([])
        load_checkpoint(path, into=state)
        torch.set_rng_state(state["random"])
        self.scheduler.last_epoch = state["last_epoch"]
        self.scheduler._last_lr = [group["lr"] for group in self.optimizer.param_groups]
        return list(state["losses"])

    @property
    def state_bytes(self) -> int:
        """Of what a checkpoint holds."""
        return 3 * sum(each.nbytes for each in self.parameters)

    def _clip(self) -> None:
        """As `torch.nn.utils.clip_grad_norm_`, whose bits it has, with one large gradient at a time."""
        if not self.settings.max_grad_norm:
            return
        norms = [torch.linalg.vector_norm(self._gradient(each)) for each in self.parameters]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        torch.nn.utils.clip_grads_with_norm_(self._updated, self.settings.max_grad_norm, norm)

    def _gradient(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        if parameter not in self._rows:
            assert parameter.grad is not None
            return parameter.grad
        whole, begin = torch.empty(parameter.shape, dtype=parameter.dtype), 0
        for rows in self._rows[parameter]:
            whole[begin : begin + len(rows)] = rows.grad
            begin += len(rows)
        return whole


def _rows(parameter: torch.nn.Parameter) -> list[torch.Tensor]:
    """Views of a large weight that lie one after the other in it, nearly alike."""
    count = -(-parameter.nbytes // ROWS_BYTES)
    return list(parameter.detach().split(-(-len(parameter) // count)))


def _divide_gradient(rows: list[torch.Tensor]) -> Callable[[torch.Tensor], None]:
    """Moves the gradient of a parameter to its rows, where that of earlier batches is."""

    def divide(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        gradient, parameter.grad = parameter.grad, None
        begin = 0
        for part in rows:
            new = gradient[begin : begin + len(part)]
            if part.grad is None:
                part.grad = new.clone()
            else:
                part.grad += new
            begin += len(part)

    return divide


def _with_adapters(model: transformers.PreTrainedModel, settings: FineTuneOptions) -> Any:
    if settings.lora is None:
        return model
    try:
        import peft
    except ImportError as error:
        raise missing("peft") from error
    names = settings.lora.target_modules
    model.name_or_path = str(settings.model.resolve())
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.lora.r,
        lora_alpha=settings.lora.alpha,
        lora_dropout=settings.lora.dropout,
        target_modules=names if names == "all-linear" else names.split(","),
    )
    try:
        return peft.get_peft_model(model, config)
    except ValueError as error:
        raise InvalidArgument(f"no adapters for this model: {error}") from error


def _quantization(settings: FineTuneOptions) -> transformers.BitsAndBytesConfig | None:
    """Raises InvalidArgument where these settings allow none."""
    if not (settings.load_in_4bit or settings.load_in_8bit):
        return None
    if settings.load_in_4bit and settings.load_in_8bit:
        raise InvalidArgument("--load-in-4bit and --load-in-8bit exclude each other: leave one out")
    if settings.lora is None:
        bits = "4bit" if settings.load_in_4bit else "8bit"
        raise InvalidArgument(
            f"--load-in-{bits}: weights in few bits cannot be trained, only adapters beside them: add --lora"
        )
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=settings.load_in_4bit,
        load_in_8bit=settings.load_in_8bit,
        bnb_4bit_compute_dtype=settings.dtype,
        bnb_4bit_quant_type=settings.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=settings.bnb_4bit_use_double_quant,
    )
    Quantizer(config)  # says what is missing
    return config


def _warn_of_slow_products(dtype: str) -> None:
    """torch multiplies by a matrix that is not transposed, as in backward, element by element then."""
    if dtype == "bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        logger.warning(
            "this processor has no instructions for bfloat16: backward takes up to a hundred times as long "
            "as in float32. Leave out --dtype, and lower --device-budget instead"
        )


# -- one training, in its folder ---------------------------------------------------------------


class FineTuning:
    """A training in its folder, new or to go on with.

    folder     has finetune.json, with the settings; checkpoint.safetensors, the latest one; and at the end
               model/, which `from_pretrained` (with LoRA: PEFT's) opens

    Raises InvalidArgument, InvalidFile and CheckpointError, before anything is trained.
    """

    def __init__(self, settings: FineTuneOptions, folder: Path, *, resume: bool = False) -> None:
        if not settings.text.is_file():
            raise InvalidFile(f"there is no text {settings.text}: give the path of a text file")
        self.config = config_of(settings.model)
        names = self.config.architectures or []
        if not set(names) & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
            raise InvalidArgument(
                f"{settings.model} holds {' and '.join(names) or 'no architecture'}, which is no causal "
                "language model of transformers"
            )
        refuse_quantized(self.config, settings.model)
        self._quantization = _quantization(settings)
        _warn_of_slow_products(settings.dtype)
        longest = getattr(self.config, "max_position_embeddings", None) or sys.maxsize
        if settings.block_size is None:
            settings = replace(settings, block_size=min(BLOCK_SIZE, longest))
        elif settings.block_size > longest:
            raise InvalidArgument(
                f"--block-size {settings.block_size} is more than this model's {longest} positions: lower it"
            )
        self.settings, self.folder = settings, folder
        self.checkpoint, self.model_folder = folder / CHECKPOINT, folder / MODEL
        self._claim(resume)
        with self._nothing_left():
            tokens, self._tokenizer = tokens_of(settings, self.config.vocab_size, folder / TOKENS)
            self._text = Text(settings, tokens)
        self.total_steps = settings.max_steps or settings.num_train_epochs * self._text.steps_per_epoch
        if self.is_finished:
            self._remove_needed_no_more()

    @property
    def is_finished(self) -> bool:
        return self.model_folder.is_dir()

    def losses(self) -> list[float]:
        """Of a training that is finished."""
        return list(json.loads((self.folder / LOSSES).read_text()))

    def predict(
        self,
        device_budget_bytes: int,
        hardware: Hardware,
        planning: PlanOptions,
        endurance_bytes: int | None = None,
    ) -> Summary:
        """What a step takes, traced on fake tensors and planned. Raises BudgetTooSmall and SpillSpaceFull."""
        dtype = getattr(torch, self.settings.dtype)
        quantizer = Quantizer(self._quantization) if self._quantization else None
        with torch.device("meta"):  # fake tensors cannot be cast in place, as PEFT does
            base = uninitialized(self.config, dtype)
            if quantizer is not None:
                base = quantizer.replace(base)
            model = _with_adapters(base, self.settings)
        mode = penstock.fake_mode()
        with mode:
            if quantizer is not None:
                quantizer.put_fake(base)
            allocate(model)
            base.tie_weights()
            training = Training(self.settings, model, self.total_steps)
        batch = self._text.of_step(0)
        trace = penstock.trace(lambda: training.step(batch), mode=mode)
        large = trace.tensor_bytes >= parse_bytes(PlanOptions().smallest_bytes)  # smaller ones stay
        trace = replace(trace, tensor_movable=trace.movable & large)
        with self._nothing_left():
            self._require_room(training.state_bytes, model)
            try:
                plan = penstock.plan(
                    trace,
                    hardware,
                    planning.policy,
                    recompute=planning.recompute,
                    compress=planning.compress,
                    time_limit_s=planning_s(trace),  # as the run will
                    device_budget=device_budget_bytes,
                )
            except BudgetTooSmall as error:
                raise BudgetTooSmall(
                    f"{str(error).partition('. No plan')[0]}. No plan can help: raise --device-budget to "
                    f"{format_bytes_up(error.minimum_bytes)}, or lower --block-size or "
                    "--per-device-train-batch-size",
                    error.minimum_bytes,
                ) from None
        return summarise(trace, plan, penstock.simulate(trace, plan, hardware), endurance_bytes)

    def train(
        self,
        run: Offload,
        *,
        save_steps: int,
        on_step: Callable[[int, float], bool] = lambda step, loss: False,
    ) -> Outcome:
        """Train to the end, and write the model; or until ``on_step`` says so, and write a checkpoint.

        save_steps   between checkpoints
        on_step      called after each step with how many there were, and its loss; True ends training

        Raises InvalidArgument for a training that is finished.
        """
        if self.is_finished:
            raise InvalidArgument(f"this training is finished: its model is in {self.model_folder}")
        model = load(
            self.settings.model,
            self.config,
            run,
            dtype=getattr(torch, self.settings.dtype),
            quantization_config=self._quantization,
        )
        if not (self.folder / SETTINGS).exists():
            files.write(json.dumps(self._described, indent=2).encode(), self.folder / SETTINGS)
        torch.manual_seed(self.settings.seed)
        training = Training(self.settings, _with_adapters(model, self.settings), self.total_steps)
        torch.manual_seed(self.settings.seed)
        losses = training.load(self.checkpoint) if self.checkpoint.exists() else []
        begun = len(losses)
        while len(losses) < self.total_steps:
            sequences = self._text.of_step(len(losses))
            with run.step():
                loss = training.step(sequences)
            losses.append(loss.item())
            leave = on_step(len(losses), losses[-1])
            if len(losses) == self.total_steps:
                break
            if leave or len(losses) % save_steps == 0:
                training.save(self.checkpoint, losses)
            if leave:
                return Outcome(losses=losses, begun=begun, total=self.total_steps)
        self._write_model(training, losses)
        return Outcome(losses=losses, begun=begun, total=self.total_steps)

    def _write_model(self, training: Training, losses: list[float]) -> None:
        """The model at last, whole or not at all; then what is no more needed goes."""
        partial = self.folder / "model.partial"
        shutil.rmtree(partial, ignore_errors=True)
        training.model.save_pretrained(partial)
        if self._tokenizer is not None:
            self._tokenizer.save_pretrained(partial)
        files.write(json.dumps(losses).encode(), self.folder / LOSSES)
        for path in [*partial.rglob("*"), partial]:
            if path.is_dir():
                files.sync_folder(path)
            else:
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        partial.replace(self.model_folder)
        files.sync_folder(self.folder)
        self._remove_needed_no_more()

    def _remove_needed_no_more(self) -> None:
        """Of a training that is finished; of a process that was killed just then, too."""
        for path in (self.checkpoint, self.folder / TOKENS, *files.drafts(self.folder / LOSSES)):
            path.unlink(missing_ok=True)

    def _claim(self, resume: bool) -> None:
        """The folder is this training's: new, or one that was begun with the same settings."""
        path = self.folder / SETTINGS
        if not path.exists():
            if resume:
                raise InvalidArgument(f"nothing to go on with: {path} is missing. Leave --resume out")
            if self.folder.is_dir() and set(self.folder.iterdir()) - self._not_begun():
                raise InvalidArgument(f"{self.folder} holds something else: give another folder with -o")
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_not_begun()
            return
        try:
            begun = json.loads(path.read_text())
            differ = [
                name
                for name, value in self._described.items()
                if begun.get(name, getattr(FineTuneOptions, name, None)) != value
            ]
        except (ValueError, AttributeError) as error:
            raise InvalidFile(f"{path} is damaged: give another folder with -o") from error
        if differ:
            raise InvalidArgument(
                f"{self.folder} holds a training with other settings ({', '.join(differ)}): give the same, "
                "or another folder with -o"
            )

    @contextlib.contextmanager
    def _nothing_left(self) -> Iterator[None]:
        """What fails before training has ever begun leaves no files."""
        try:
            yield
        except BaseException:
            if not (self.folder / SETTINGS).exists():
                self._remove_not_begun()
            raise

    def _not_begun(self) -> set[Path]:
        """Files of a training that has not begun."""
        tokens = self.folder / TOKENS
        return {tokens, tokens.with_suffix(".partial"), *files.drafts(self.folder / SETTINGS)}

    def _remove_not_begun(self) -> None:
        for path in self._not_begun():
            path.unlink(missing_ok=True)

    @functools.cached_property
    def _described(self) -> dict[str, Any]:
        """The settings, with what is in the text."""
        described = asdict(self.settings)
        digest = hashlib.sha256()
        with open(self.settings.text, "rb") as file:
            while piece := file.read(TEXT_PIECE_BYTES):
                digest.update(piece)
        described["text"] = digest.hexdigest()
        described["model"] = str(self.settings.model.resolve())
        return dict(json.loads(json.dumps(described)))  # as it will be read

    def _require_room(self, checkpoint_bytes: int, model: torch.nn.Module) -> None:
        """For two checkpoints, of which the second replaces the first, or one and the model."""
        weights = sum(each.nbytes for each in model.parameters())
        if self.settings.lora is not None:
            weights = checkpoint_bytes
        there = self.checkpoint.stat().st_size if self.checkpoint.exists() else 0
        needed = checkpoint_bytes + max(checkpoint_bytes, weights) - there
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise SpillSpaceFull(
                f"checkpoints and the model take {format_bytes_up(needed)} more in {self.folder}, where "
                f"{format_bytes_up(free)} are free: give a folder on another disk with -o"
            )
