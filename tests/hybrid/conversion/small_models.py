"""Small models of Hugging Face in float64 without dropout, with batches for them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

ROWS, LENGTH, VOCABULARY, HIDDEN = 6, 8, 48, 16

SEVEN = ("gpt2", "llama", "mixtral", "t5", "bert", "vit", "whisper")
UNSHARED_T5 = "unshared-t5"
"""A T5 whose decoder and head share no weights, as a single-process pipeline needs."""
NAMES = (*SEVEN, UNSHARED_T5)


def make_model(name: str, seed: int = 3, **settings: Any) -> Any:
    """Build a model with three layers, whose head is not tied to its embedding but in T5."""
    import transformers

    torch.manual_seed(seed)
    sizes = {
        "num_hidden_layers": 3,
        "hidden_size": HIDDEN,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 16,
        "tie_word_embeddings": False,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    sizes |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    llama = {**sizes, "num_key_value_heads": 1, "head_dim": 8}
    gpt2 = {**sizes, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    t5 = {**sizes, "d_ff": 24, "d_kv": 8, "num_layers": 2, "dropout_rate": 0.0}
    whisper = {
        "d_model": HIDDEN,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "vocab_size": VOCABULARY,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24,
        "max_source_positions": LENGTH,
        "max_target_positions": 16,
        "num_mel_bins": 4,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "pad_token_id": 0,
        "decoder_start_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "tie_word_embeddings": False,
    }
    kinds: dict[str, tuple[str, str, dict[str, Any]]] = {
        "gpt2": ("GPT2Config", "GPT2LMHeadModel", gpt2),
        "llama": ("LlamaConfig", "LlamaForCausalLM", llama),
        "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**llama, "num_local_experts": 4}),
        "t5": ("T5Config", "T5ForConditionalGeneration", t5),
        "bert": ("BertConfig", "BertForMaskedLM", sizes),
        "vit": (
            "ViTConfig",
            "ViTForImageClassification",
            {**sizes, "image_size": 8, "patch_size": 4},
        ),
        "whisper": ("WhisperConfig", "WhisperForConditionalGeneration", whisper),
    }
    config, model, given = kinds[name.removeprefix("unshared-")]
    built = getattr(transformers, config)(**{**given, **settings})
    built._experts_implementation = "eager"  # torch's grouped products have no float64
    made = getattr(transformers, model)(built).double().train()
    if name == UNSHARED_T5:
        made.decoder.embed_tokens = copy.deepcopy(made.shared)
        made.lm_head = copy.deepcopy(made.lm_head)
    return made


def make_batches(name: str, number: int, rows: int = ROWS) -> list[tuple[Any, Tensor]]:
    """Return batches of keyword arguments with a number for each sample, the targets."""
    generator = torch.Generator().manual_seed(7)
    return [_batch(name, rows, generator) for _ in range(number)]


def _batch(name: str, rows: int, generator: torch.Generator) -> tuple[Any, Tensor]:
    targets = torch.randn(rows, generator=generator, dtype=torch.float64)
    if name == "vit":
        images = torch.randn(rows, 3, 8, 8, generator=generator, dtype=torch.float64)
        return {"pixel_values": images}, targets
    ids = torch.randint(1, VOCABULARY, (rows, LENGTH), generator=generator)
    if name == "whisper":
        sound = torch.randn(rows, 4, 2 * LENGTH, generator=generator, dtype=torch.float64)
        return {"input_features": sound, "decoder_input_ids": ids[:, :5]}, targets
    mask = torch.ones_like(ids)
    mask[1::2, LENGTH - 2 :] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    if name.endswith("t5"):
        batch["decoder_input_ids"] = ids[:, :5].flip(1)
    return batch, targets


def loss_of(output: Any, targets: Tensor) -> Tensor:
    """A mean over samples that depends on every logit."""
    return (output.logits.tanh().flatten(1).mean(1) - targets).pow(2).mean()


def train_plain(name: str, steps: int) -> dict[str, Tensor]:
    """Train the original in a plain loop; return its state."""
    model = make_model(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch, targets in make_batches(name, steps):
        optimizer.zero_grad()
        loss_of(model(**batch), targets).backward()
        optimizer.step()
    return {name: x.detach().clone() for name, x in model.state_dict().items()}


def assert_same_state(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare the states of two models in float64, up to rounding."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name].cpu(), value, rtol=1e-9, atol=1e-11)


def only_default(name: str, *defaults: str) -> Any:
    """Mark a parameter of a test as exhaustive unless it is one of some."""
    return name if name in defaults else pytest.param(name, marks=pytest.mark.exhaustive)
