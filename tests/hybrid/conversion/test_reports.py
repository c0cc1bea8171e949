"""Reports about other tools that split models, replayed with conversion.

Each test names the report: `pytorch` of torch.distributed.pipelining and torch.export, `accelerate`
of prepare_pippy, `DeepSpeed` of PipelineModule.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipollux_hybrid import HybridParallel, as_layers
from pipollux_hybrid.job import context as contexts
from tests.extent import first
from tests.hybrid.conversion.small_models import (
    HIDDEN,
    VOCABULARY,
    loss_of,
    make_batches,
    make_model,
)


@pytest.fixture(autouse=True)
def fresh_context() -> Iterator[None]:
    contexts.reset()
    yield
    contexts.reset()


def wrapped(model: Any, batch: Any, num_microbatches: int = 2) -> HybridParallel:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: Any = {"num_stages": 2, "num_microbatches": num_microbatches}
    return HybridParallel(model, optimizer, example_inputs=batch, **options)


def assert_trains_alike(model: Any, batch: Any, targets: Tensor) -> None:
    original = copy.deepcopy(model)
    wrapped(model, batch).train_step(batch, targets, loss_of)
    loss_of(original(**batch), targets).backward()
    for (name, mine), theirs in zip(model.named_parameters(), original.parameters(), strict=True):
        if theirs.grad is None:
            assert mine.grad is None, name
        else:
            # Gemma normalises in float32, whatever the type of its parameters.
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-8, msg=name)


def gemma(kind: str) -> Any:
    import transformers

    torch.manual_seed(2)
    config = getattr(transformers, f"{kind}Config" if kind == "Gemma2" else f"{kind}TextConfig")(
        num_hidden_layers=2,
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=VOCABULARY,
        tie_word_embeddings=False,
        pad_token_id=0,
    )
    return getattr(transformers, f"{kind}ForCausalLM")(config).double().train()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["Gemma3", "Gemma2", "llama"])
def test_models_with_rotary_positions_are_split(name: str) -> None:
    """Reports pytorch/pytorch 184361, 145263 and 182644."""
    model = make_model("llama") if name == "llama" else gemma(name)
    assert_trains_alike(model, *make_batches("llama", 1)[0])


def test_batches_may_have_other_shapes() -> None:
    """Report pytorch/pytorch 159942."""
    model = make_model("gpt2").eval()
    (batch, _), (other, _) = make_batches("gpt2", 1)[0], make_batches("gpt2", 1, rows=5)[0]
    pipeline = wrapped(model, batch).eval()
    for length in (8, 3, 1):
        given = {name: x[:, :length] for name, x in other.items()}
        torch.testing.assert_close(pipeline(given).logits, model(**given).logits)


def test_a_loss_gets_the_models_output() -> None:
    """Report pytorch/pytorch 129732: the output is no tensor, and the target is of integers."""
    model, (batch, _) = make_model("bert"), make_batches("bert", 1)[0]

    def loss_fn(output: Any, labels: Tensor) -> Tensor:
        return F.cross_entropy(output.logits.flatten(0, 1), labels.flatten())

    loss = wrapped(model, batch).train_step(batch, batch["input_ids"], loss_fn)
    expected = loss_fn(model(**batch), batch["input_ids"])
    torch.testing.assert_close(loss, expected.detach())


class Dropping(nn.Module):
    """Dropout as a module, as a function, and as a function that is always on."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.dropout(x))
        x = F.dropout(self.blocks[1](x), training=self.training)
        return F.dropout(x, 0.1, training=True)


def test_training_and_evaluation_differ_after_conversion() -> None:
    """Reports pytorch/pytorch 151726, 103681 and 68190."""
    torch.manual_seed(0)
    model, x = Dropping(), torch.randn(3, 4)
    layers = as_layers(model, x, cut_at=["blocks"])
    for training in (True, False, True):
        layers.train(training)
        torch.manual_seed(1)
        expected = model(x)
        torch.manual_seed(1)
        assert torch.equal(layers(x), expected)


def test_evaluation_before_training() -> None:
    """Report pytorch/pytorch 162822."""
    model, (batch, targets) = make_model("llama"), make_batches("llama", 1)[0]
    original = copy.deepcopy(model)
    pipeline = wrapped(model, batch).eval()
    with torch.no_grad():
        pipeline(batch)
    pipeline.train().train_step(batch, targets, loss_of)
    loss_of(original(**batch), targets).backward()
    torch.testing.assert_close(model.lm_head.weight.grad, original.lm_head.weight.grad)


def test_a_tokenizers_mapping_is_an_example() -> None:
    """Report huggingface/accelerate 2575."""
    model, (batch, _) = make_model("llama").eval(), make_batches("llama", 1)[0]
    encoding: Any = UserDict(batch)
    layers = as_layers(model, encoding)
    assert torch.equal(layers(encoding).logits, model(**batch).logits)


@pytest.mark.parametrize("rows", first(1, [1, 3, 5]))
def test_the_last_batch_is_smaller(rows: int) -> None:
    """Report huggingface/accelerate 2352."""
    model, (batch, _) = make_model("gpt2").eval(), make_batches("gpt2", 1)[0]
    pipeline = wrapped(model, batch, num_microbatches=4).eval()
    last = {name: x[:rows] for name, x in batch.items()}
    torch.testing.assert_close(pipeline(last).logits, model(**last).logits)


class Masked(nn.Module):
    """Passes a boolean mask through all of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        layer = nn.TransformerEncoderLayer(HIDDEN, 2, 24, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(HIDDEN, 1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        padding = attention_mask == 0
        x = self.encoder(self.embedding(input_ids), src_key_padding_mask=padding)
        x = x.masked_fill(padding.unsqueeze(-1), 0.0)
        return {"scores": self.head(x).squeeze(-1)}


def test_boolean_masks_pass_between_stages() -> None:
    """Reports deepspeedai/DeepSpeed 1347 and 1466."""
    torch.manual_seed(4)
    model, (batch, targets) = Masked().double(), make_batches("bert", 1)[0]
    original = copy.deepcopy(model)

    def loss_fn(output: dict[str, Tensor], targets: Tensor) -> Tensor:
        return (output["scores"].mean(1) - targets).pow(2).mean()

    pipeline = wrapped(model, batch)
    assert len(pipeline) == 5
    pipeline.train_step(batch, targets, loss_fn)
    loss_fn(original(**batch), targets).backward()
    for mine, theirs in zip(model.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
