"""The recipes of docs/howto/layers.md give the original models: outputs and gradients."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipollux
from pipollux_hybrid import AdaptiveDataLoader, ConfigurationError, HybridParallel
from pipollux_hybrid.job import context as contexts
from tests.extent import turns
from tests.hybrid.models import freeze_statistics

EXACT = {"rtol": 1e-10, "atol": 1e-12}
VOCABULARY, LENGTH, ROWS = 64, 12, 6


@pytest.fixture(autouse=True)
def fresh_context() -> Iterator[None]:
    contexts.reset()
    yield
    contexts.reset()


@pytest.fixture(scope="module")
def page(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the page's Python defines, run from top to bottom as a user would."""
    contexts.reset()
    text = (repository / "docs" / "howto" / "layers.md").read_text()
    names: dict[str, Any] = {"__name__": "docs_models"}
    with contextlib.chdir(tmp_path_factory.mktemp("page")):
        for number, block in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL)):
            exec(compile(block, f"docs/howto/layers.md, block {number}", "exec"), names)  # noqa: S102  # our own page
    pipollux.destroy_process_group()
    return names


def make_gpt2(*, tied: bool) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    config = GPT2Config(
        n_layer=3,
        n_head=4,
        n_embd=32,
        n_positions=16,
        vocab_size=VOCABULARY,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=tied,
    )
    return GPT2LMHeadModel(config).double()


def make_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        num_hidden_layers=3,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=16,
    )
    return LlamaForCausalLM(config).double()


def make_batch(rows: int = ROWS) -> dict[str, Tensor]:
    """Token ids; some rows are padded, and the last ones not at all."""
    generator = torch.Generator().manual_seed(5)
    mask = torch.ones(rows, LENGTH, dtype=torch.int64)
    mask[0, 7:] = 0
    mask[2, 3:] = 0
    ids = torch.randint(VOCABULARY, (rows, LENGTH), generator=generator)
    return {"input_ids": ids, "attention_mask": mask}


def mean_loss(page: dict[str, Any], logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The mean that the page's weighted loss stands for."""
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    loss = page["loss_fn"](logits, labels)
    mean: Tensor = loss.sum / loss.weight
    return mean


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


RECIPES: dict[str, tuple[Callable[[], Any], str]] = {
    "gpt2": (lambda: make_gpt2(tied=False), "gpt2_layers"),
    "gpt2-tied": (lambda: make_gpt2(tied=True), "tied_gpt2_layers"),
    "llama": (make_llama, "llama_layers"),
}


def assert_same(
    page: dict[str, Any], recipe: str, num_stages: int, num_microbatches: int, checkpoint: str
) -> None:
    """The pipeline's logits and gradients are those of the original."""
    make, layers = RECIPES[recipe]
    batch, original, ours = make_batch(), make(), make()
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    expected = original(**batch, labels=labels)
    loss = mean_loss(page, expected.logits, batch)
    loss.backward()
    # The original computes its own loss in float32.
    torch.testing.assert_close(loss.float(), expected.loss)
    module = page[layers](ours)
    model = HybridParallel(
        module,
        torch.optim.SGD(module.parameters(), lr=0.1),
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        activation_checkpoint=checkpoint,
    )
    logits = model(batch)
    mean_loss(page, logits, batch).backward()
    torch.testing.assert_close(logits, expected.logits, **EXACT)
    wanted = gradients_of(original)
    assert gradients_of(ours).keys() == wanted.keys() == dict(original.named_parameters()).keys()
    for name, gradient in gradients_of(ours).items():
        assert gradient.any()
        torch.testing.assert_close(gradient, wanted[name], **EXACT)


PIPELINES = [
    (1, 1, "except_last"),
    (1, 4, "never"),
    (2, 2, "always"),
    (2, 3, "never"),
    (3, 1, "always"),
    (3, 4, "except_last"),
]
"""Stages, micro-batches and recomputation."""


@pytest.mark.parametrize(("recipe", "pipeline"), turns(list(RECIPES), PIPELINES), ids=str)
def test_transformers(page: dict[str, Any], recipe: str, pipeline: tuple[int, int, str]) -> None:
    assert_same(page, recipe, *pipeline)


def test_the_mask_counts(page: dict[str, Any]) -> None:
    # Else the comparisons above would not show whether it arrives.
    gpt2, batch = make_gpt2(tied=False), make_batch()
    module = page["gpt2_layers"](gpt2)
    unmasked = {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}
    assert (module(batch) - module(unmasked)).abs().max() > 1e-3


def test_a_tied_weight_in_a_loop_with_accumulation(page: dict[str, Any]) -> None:
    """The weight gets its gradients from two stages in each micro-batch of each part."""
    original, ours = make_gpt2(tied=True), make_gpt2(tied=True)
    ids = torch.randint(VOCABULARY, (12, LENGTH), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    mean_loss(page, original(**batch).logits, batch).backward()
    module = page["tied_gpt2_layers"](ours)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    data = [{name: tensor[n] for name, tensor in batch.items()} for n in range(12)]
    loader = AdaptiveDataLoader(data, batch_size=12)
    loader.autoscale_batch_size(12, local_bsz_bounds=(4, 4), gradient_accumulation=True)
    model = HybridParallel(
        module, optimizer, num_stages=3, num_microbatches=2, example_inputs=make_batch(4)
    )
    passes = 0
    for part in loader:
        optimizer.zero_grad()
        mean_loss(page, model(part), part).backward()
        optimizer.step()
        passes += 1
    assert passes == 3
    for name, gradient in gradients_of(ours).items():
        torch.testing.assert_close(gradient, gradients_of(original)[name], **EXACT)


def test_the_original_sees_what_is_trained(page: dict[str, Any]) -> None:
    gpt2, batch = make_gpt2(tied=False), make_batch()
    module = page["gpt2_layers"](gpt2)
    before = gpt2(**batch).logits
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = HybridParallel(module, optimizer, num_stages=2)
    mean_loss(page, model(batch), batch).backward()
    optimizer.step()
    after = gpt2(**batch).logits
    assert (after - before).abs().max() > 1e-4
    torch.testing.assert_close(model(batch), after, **EXACT)


def test_a_tie_over_stages_is_refused_as_the_page_says(
    page: dict[str, Any], repository: Path
) -> None:
    module = page["gpt2_layers"](make_gpt2(tied=True))
    with pytest.raises(ConfigurationError) as caught:
        HybridParallel(module, torch.optim.SGD(module.parameters(), lr=0.1), num_stages=2)
    assert str(caught.value) in (repository / "docs" / "howto" / "layers.md").read_text()


class Block(nn.Module):
    """A residual block as torchvision's BasicBlock."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = (
            nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))
            if stride > 1
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += identity
        return F.relu(out, inplace=True)


class ResNet(nn.Module):
    """A small one with the attributes and the forward of torchvision's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(Block(4, 4, 1), Block(4, 4, 1))
        self.layer2 = nn.Sequential(Block(4, 8, 2), Block(8, 8, 1))
        self.layer3 = nn.Sequential(Block(8, 12, 2), Block(12, 12, 1))
        self.layer4 = nn.Sequential(Block(12, 16, 2), Block(16, 16, 1))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return logits


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "frozen"), [(1, 1, False), (3, 1, False), (2, 4, True)]
)
def test_resnet(page: dict[str, Any], num_stages: int, num_microbatches: int, frozen: bool) -> None:
    """With the statistics of the batch for one micro-batch, with running ones for several."""
    torch.manual_seed(2)
    original, ours = ResNet().double(), ResNet().double()
    ours.load_state_dict(original.state_dict())
    images, classes = torch.randn(8, 3, 40, 40).double(), torch.randint(5, (8,))
    module = page["resnet_layers"](ours)
    assert len(module) == 10
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = HybridParallel(
        module, optimizer, num_stages=num_stages, num_microbatches=num_microbatches
    )
    if frozen:
        freeze_statistics(original)
        freeze_statistics(model)
    outputs, expected = model(images), original(images)
    F.cross_entropy(outputs, classes).backward()
    F.cross_entropy(expected, classes).backward()
    torch.testing.assert_close(outputs, expected, **EXACT)
    for name, gradient in gradients_of(ours).items():
        torch.testing.assert_close(gradient, gradients_of(original)[name], **EXACT)


def test_another_kind_of_module_needs_an_example() -> None:
    gpt2 = make_gpt2(tied=False)
    with pytest.raises(ConfigurationError, match=r"LMHeadModel is no plain .* pass example_inputs"):
        HybridParallel(gpt2, torch.optim.SGD(gpt2.parameters(), lr=0.1))


def test_a_pretrained_model_is_untied_and_saved_as_the_page_says(
    page: dict[str, Any], repository: Path, tmp_path: Path
) -> None:
    gpt2 = make_gpt2(tied=True)
    before = gpt2(**make_batch()).logits
    untying = "gpt2.lm_head.weight = nn.Parameter(gpt2.transformer.wte.weight.detach().clone())"
    assert untying in (repository / "docs" / "howto" / "layers.md").read_text()
    gpt2.config.tie_word_embeddings = False
    exec(untying, {"gpt2": gpt2, "nn": nn})  # noqa: S102  # our own page
    module = page["gpt2_layers"](gpt2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = HybridParallel(module, optimizer, num_stages=2)
    logits = model(make_batch())
    torch.testing.assert_close(logits, before, **EXACT)
    mean_loss(page, logits, make_batch()).backward()
    optimizer.step()
    gpt2.save_pretrained(tmp_path)
    loaded = type(gpt2).from_pretrained(tmp_path).double().eval()
    assert loaded.lm_head.weight is not loaded.transformer.wte.weight
    torch.testing.assert_close(loaded(**make_batch()).logits, model(make_batch()), **EXACT)
