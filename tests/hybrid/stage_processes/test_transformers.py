"""Hugging Face's models with padding in some rows, where each stage has a process."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipollux_hybrid import HybridParallel, WeightedLoss, init_process_group
from pipollux_hybrid.job import context as contexts
from tests.hybrid.models import assert_close, gradients
from tests.hybrid.stage_processes.training import run_stages
from tests.hybrid.test_layers_page import LENGTH, RECIPES, VOCABULARY, make_batch

ROWS = 7  # the last micro-batch is shorter, and no row of it is padded


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(3)
    config = T5Config(
        num_layers=2,
        d_model=16,
        d_kv=4,
        d_ff=24,
        num_heads=4,
        vocab_size=VOCABULARY,
        dropout_rate=0.0,
        tie_word_embeddings=False,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config).double()


class Encoder(nn.Module):
    """The whole encoder; what it takes goes on beside its output."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.encoder = model.encoder

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        mask = batch["attention_mask"]
        memory = self.encoder(batch["input_ids"], attention_mask=mask).last_hidden_state
        return {**batch, "memory": memory}


class Decoder(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.decoder = model.decoder

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        hidden = self.decoder(
            input_ids=batch["decoder_input_ids"],
            encoder_hidden_states=batch["memory"],
            encoder_attention_mask=batch["attention_mask"],
        ).last_hidden_state
        return {"hidden": hidden}


class Logits(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.head = model.lm_head

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        logits: Tensor = self.head(batch["hidden"])
        return logits


def layers_of(name: str, model: Any, page: str) -> nn.Sequential:
    if name == "t5":
        return nn.Sequential(Encoder(model), Decoder(model), Logits(model))
    names: dict[str, Any] = {"__name__": "docs_models", "F": F}
    defines = ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        if "_layers(" in block or "class " in block:
            # Its scripts train something else.
            found = [x for x in ast.parse(block).body if isinstance(x, defines)]
            code = compile(ast.Module(found, []), "docs/howto/layers.md", "exec")
            exec(code, names)  # noqa: S102  # our own page
    module = names[RECIPES[name][1]](model)
    assert isinstance(module, nn.Sequential)
    return module


def batch_of(name: str) -> dict[str, Tensor]:
    batch = make_batch(ROWS)
    if name == "t5":
        batch["decoder_input_ids"] = batch["input_ids"].flip(1)
    return batch


def loss_of(logits: Tensor, batch: dict[str, Tensor]) -> WeightedLoss:
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    loss = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    return WeightedLoss(loss, (labels != -100).sum())


def make(name: str) -> Any:
    model = t5() if name == "t5" else RECIPES[name][0]()
    return model.train()


def trained(name: str, page: str, schedule: str, checkpoint: str) -> dict[str, Tensor]:
    contexts.reset()
    init_process_group("gloo")
    module = layers_of(name, make(name), page)
    model = HybridParallel(
        module,
        torch.optim.SGD(module.parameters(), lr=0.1),
        num_stages=2,
        num_microbatches=3,
        schedule=schedule,
        activation_checkpoint=checkpoint,
    )
    batch = batch_of(name)
    model.train_step(batch, batch, loss_of)
    with torch.no_grad():
        assert model(batch).shape == (ROWS, LENGTH, VOCABULARY)
    return gradients(module)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "schedule", "checkpoint"),
    [
        *(("gpt2", "1f1b", "except_last"), ("llama", "gpipe", "always"), ("t5", "1f1b", "never")),
        *(("gpt2-tied", "1f1b", "always"), ("t5", "gpipe", "always")),
    ],
)
def test_gradients_are_the_originals(
    repository: Path, name: str, schedule: str, checkpoint: str
) -> None:
    page = (repository / "docs" / "howto" / "layers.md").read_text()
    (stages,) = run_stages(trained, 1, 2, name, page, schedule, checkpoint)
    contexts.reset()
    model = make(name)
    module, batch = layers_of(name, model, page), batch_of(name)
    logits = model(**batch).logits
    loss = loss_of(logits, batch)
    (loss.sum / loss.weight).backward()
    expected = gradients(module)
    found: dict[str, Tensor] = stages[0] | stages[1]
    # Each stage has a tied weight, under a name of its own.
    assert found.keys() == expected.keys() or name in ("gpt2-tied", "t5")
    # Llama and T5 normalise in float32, whatever the type of their parameters.
    assert_close({n: found[n] for n in expected}, expected, 1e-9 if "gpt2" in name else 1e-7)
