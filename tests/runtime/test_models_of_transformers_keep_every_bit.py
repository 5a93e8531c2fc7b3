"""Models of transformers, and adapters of peft: the bits of the in-memory run, at any budget."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.runs import Bits, Program, Step, bits, check_same, state_bits

transformers = pytest.importorskip("transformers")

STEPS = 6  # one that makes the optimizer's state, one traced, three recorded, one at full speed
WORDS, LENGTH, WIDTH = 96, 24, 64


def llama() -> torch.nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=WORDS,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    )


def gpt2() -> torch.nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=WORDS,
            n_positions=LENGTH,
            n_embd=WIDTH,
            n_layer=3,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def bert() -> torch.nn.Module:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=WORDS,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
        )
    )


def mixtral() -> torch.nn.Module:
    """Which experts see how many words differs from step to step."""
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=WORDS,
            hidden_size=WIDTH,
            intermediate_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            output_router_logits=True,
        )
    )


def lora() -> torch.nn.Module:
    """Frozen weights, and small ones that learn."""
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    return peft.get_peft_model(llama(), adapters)


def training(make: Callable[[], torch.nn.Module]) -> Program:
    def program(step: Step) -> Bits:
        model = make()
        model.train()
        learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(learned, lr=1e-3)
        found: Bits = []
        for number in range(STEPS):
            words = torch.randint(WORDS, (4, LENGTH), generator=torch.Generator().manual_seed(number))
            with step():
                loss = model(input_ids=words, labels=words).loss
                loss.backward()
                found += bits([loss, *(parameter.grad for parameter in learned)])
                torch.nn.utils.clip_grad_norm_(learned, 1.0)
                optimizer.step()
                optimizer.zero_grad()
        return found + bits(model.parameters()) + bits(model.buffers()) + state_bits(optimizer)

    return program


@pytest.mark.parametrize("make", [llama, gpt2, bert, mixtral, lora])
def test_same_bits(make: Callable[[], torch.nn.Module], tmp_path: Path) -> None:
    # The router of the experts may send all words to one of them in a step that was not recorded.
    least = 0.5 if make is mixtral else 0.0
    for _, report in check_same(training(make), tmp_path, least, 0.6):
        assert report.evicted_bytes + report.recomputed_bytes > 0
        if make is lora:  # frozen weights come back again and again, and are written once
            assert report.moved_bytes_by_kind["weight"] == 0
