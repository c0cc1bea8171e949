"""Lengths that were not recorded: verified at their first use, or refused."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pipollux_hybrid.conversion import lengths
from pipollux_hybrid.conversion.as_layers import as_layers
from pipollux_hybrid.errors import ConfigurationError
from tests.extent import first
from tests.hybrid.conversion.small_models import make_batches, make_model

WIDTH, LENGTH, TOKENS = 6, 11, 20
OTHERWISE = "the batch has length {}, .*the model does something else: .* as long as the longest"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


class Tokens(nn.Module):
    """Embeds tokens, and does something with their number between blocks."""

    def __init__(self, between: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.between = between
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.between(self.embedding(ids))
        for block in self.blocks:
            x = block(x)
        return x[:, : ids.shape[1]]


def tokens(length: int, rows: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(TOKENS, (rows, length), generator=generator)


def padded(x: Tensor) -> Tensor:
    return functional.pad(x, (0, 0, 0, -x.shape[1] % 4))


def near(x: Tensor) -> Tensor:
    return x + x[:, : min(x.shape[1], 4)].sum(1, keepdim=True)


def positions(x: Tensor) -> Tensor:
    return x + torch.arange(x.shape[1])[:, None] + x.new_zeros(x.shape[0], 2 * x.shape[1] - 1).sum()


def windows(x: Tensor) -> Tensor:
    return x.roll(1, 1) if x.shape[1] > 30 else x


def hole(x: Tensor) -> Tensor:
    return x * 2 if x.shape[1] == 7 else x


ALLOWED = [
    (padded, range(9, 13)),
    (near, range(4, 40)),
    (positions, range(1, 40)),
    (windows, range(1, 31)),
    (hole, [*range(1, 7), *range(8, 40)]),
]


@pytest.mark.parametrize(("between", "allowed"), ALLOWED)
def test_lengths_are_those_at_which_the_model_does_the_same(
    between: Callable[[Tensor], Tensor], allowed: Any
) -> None:
    model = Tokens(between).eval()
    layers = as_layers(model, tokens(LENGTH, 4))
    for length in range(1, 40):
        batch = tokens(length)
        if length in allowed:
            assert torch.equal(layers(batch), model(batch)), length
            continue
        for _ in range(2):
            with pytest.raises(ConfigurationError, match=OTHERWISE.format(length)):
                layers(batch)


@pytest.mark.parametrize("name", first(1, ["gpt2", "t5", "llama"]))
def test_batches_may_be_much_longer_than_the_example(name: str) -> None:
    model, (batch, _) = make_model(name, max_position_embeddings=2048), make_batches(name, 1)[0]
    layers = as_layers(model, batch)
    longer = {key: x.repeat(1, 200)[:2, :1300] for key, x in batch.items()}
    if name == "t5":
        longer["decoder_input_ids"] = longer["decoder_input_ids"][:, :321]
    found, expected = layers(longer).logits, model(**longer).logits
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


class OnlyInTraining(Tokens):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        if self.training and ids.shape[1] > 30:
            x = x * 2
        for block in self.blocks:
            x = block(x)
        return x


def test_each_mode_is_verified() -> None:
    model = OnlyInTraining()
    layers = as_layers(model, tokens(LENGTH))
    assert torch.equal(layers.eval()(tokens(31)), model(tokens(31)))
    layers.train()
    with pytest.raises(ConfigurationError, match=OTHERWISE.format(31)):
        layers(tokens(31))
    assert torch.equal(layers(tokens(30)), model(tokens(30)))


class TwoLengths(Tokens):
    def forward(self, ids: Tensor, decoder_ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        if ids.shape[1] > 12 and decoder_ids.shape[1] > 9:
            x = x * 2
        for block in self.blocks:
            x = block(x)
        return self.embedding(decoder_ids) + x.mean(1, keepdim=True)


def test_lengths_are_verified_together() -> None:
    model = TwoLengths().eval()
    layers = as_layers(model, {"ids": tokens(12), "decoder_ids": tokens(9)})
    for one, other in ((12, 40), (40, 9), (3, 30)):
        batch = {"ids": tokens(one), "decoder_ids": tokens(other)}
        assert torch.equal(layers(batch), model(**batch))
    with pytest.raises(
        ConfigurationError, match=r"decoder length 10, length 13, .*test_lengths\.py:\d+: "
    ):
        layers({"ids": tokens(13), "decoder_ids": tokens(10)})


class Cutting(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, :40])


def test_sizes_that_a_block_returns_are_checked() -> None:
    """The verification takes them for granted, as it does not run blocks."""
    model = Tokens().eval()
    model.blocks[1] = Cutting().double()
    layers = as_layers(model, tokens(LENGTH))
    assert torch.equal(layers(tokens(40)), model(tokens(40)))
    with pytest.raises(ConfigurationError, match=r"'blocks\.1' returns a tensor of shape \(3, 40"):
        layers(tokens(41))


class Summary(Block):
    """Returns a token for each 16 tokens: one at all recorded lengths."""

    def forward(self, x: Tensor) -> Tensor:
        parts = [part.mean(1, keepdim=True) for part in super().forward(x).split(16, 1)]
        return torch.cat(parts, 1)


def test_sizes_that_did_not_depend_on_lengths_are_checked() -> None:
    model = Tokens().eval()
    model.blocks[1] = Summary().double()
    layers = as_layers(model, tokens(LENGTH))
    assert torch.equal(layers(tokens(16)), model(tokens(16)))
    with pytest.raises(ConfigurationError, match=r"'blocks\.1' .* \(3, 2, 6\) .*\(3, 1, 6\)"):
        layers(tokens(17))


class Unpadded(nn.Module):
    """Returns the tokens that are not padding, so that data decide how many."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x[mask.bool()]


class Unpads(Tokens):
    """Carries the mask through all layers or not, and with it the sizes of the batch."""

    def __init__(self, carries_mask: bool) -> None:
        super().__init__()
        self.unpad = Unpadded()
        self.carries_mask = carries_mask

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        x = self.unpad(self.embedding(input_ids), attention_mask)
        for block in self.blocks:
            x = block(x)
        return x, attention_mask + 1 if self.carries_mask else x


@pytest.mark.parametrize("carries_mask", [True, False])
def test_sizes_that_data_decide_limit_the_lengths(carries_mask: bool) -> None:
    model = Unpads(carries_mask).eval()
    mask = torch.ones(4, LENGTH, dtype=torch.long)
    layers = as_layers(model, {"input_ids": tokens(LENGTH, 4), "attention_mask": mask})
    mask[1, 3:] = 0
    batch = {"input_ids": tokens(LENGTH, 4), "attention_mask": mask}
    for found, expected in zip(layers(batch), model(**batch), strict=True):
        assert torch.equal(found, expected)
    longer = {name: x.repeat(1, 4) for name, x in batch.items()}
    with pytest.raises(ConfigurationError, match="recorded for lengths from 1 to 41: "):
        layers(longer)


def test_a_model_that_cannot_be_copied_has_the_lengths_that_were_recorded() -> None:
    model = Tokens(positions).eval()
    model.lock = threading.Lock()
    layers = as_layers(model, tokens(LENGTH))
    assert torch.equal(layers(tokens(41)), model(tokens(41)))
    with pytest.raises(ConfigurationError, match="recorded for lengths from 1 to 41: "):
        layers(tokens(42))


def test_lengths_that_need_much_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "MOST_BYTES", 20_000)
    layers = as_layers(Tokens(positions).eval(), tokens(LENGTH))
    layers.eval()(tokens(40))
    with pytest.raises(ConfigurationError, match=r"to verify that length takes .* GiB"):
        layers(tokens(4000))


class Random(Tokens):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, ids: Tensor) -> Tensor:
        x = functional.dropout(self.embedding(ids), 0.2, self.training)
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        x = x - self.mean
        for block in self.blocks:
            x = functional.dropout(block(x), 0.2, self.training)
        return x


def test_verification_has_no_effect_on_random_numbers_and_buffers() -> None:
    model = Random()
    original, layers = copy.deepcopy(model), as_layers(model, tokens(LENGTH))
    for length in (LENGTH, 50, 33):
        torch.manual_seed(3)
        expected = original(tokens(length))
        torch.manual_seed(3)
        assert torch.equal(layers(tokens(length)), expected)
        assert torch.equal(model.mean, original.mean)


def test_no_parameter_is_kept() -> None:
    """The copy that verifies has no memory for them, and a stage needs its own only."""
    model = Tokens()
    parameters = [weakref.ref(x) for x in model.parameters()]
    first = as_layers(model, tokens(LENGTH))[0]
    del model
    gc.collect()
    kept = {id(x) for x in first.parameters()}
    assert {id(x()) for x in parameters if x() is not None} == kept
    first(tokens(60))
    probe: Any = first._inputs._probe
    assert sum(x.untyped_storage().nbytes() for x in probe._model.parameters()) < 1000


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_the_callers_contexts_do_not_matter(context: Callable[[], Any]) -> None:
    model, batch = make_model("llama").eval(), make_batches("llama", 1)[0][0]
    layers = as_layers(model, batch).eval()
    longer = {name: x.repeat(1, 2)[:, :13] for name, x in batch.items()}
    with context():
        assert torch.equal(layers(longer).logits, model(**longer).logits)
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        assert torch.equal(layers(batch).logits, model(**batch).logits)


def test_a_checkpoint_around_a_layer_does_not_see_the_verification() -> None:
    model, ids = Tokens(lambda x: x * x.cos()), tokens(30)
    expected = torch.autograd.grad(model(ids).sum(), list(model.parameters()))
    layers = as_layers(model, tokens(LENGTH))
    output = checkpoint(layers[0], ids, use_reentrant=False)
    for layer in list(layers)[1:]:
        output = layer(output)
    found = torch.autograd.grad(output.sum(), list(model.parameters()))
    torch.testing.assert_close(found, expected)


# torch.compile reads the gradients of a layer's inputs, in the plain model as well.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_first_layer_verifies_too(backend: str) -> None:
    model = Tokens(windows)
    layers = as_layers(model, tokens(LENGTH))
    for number, layer in enumerate(layers):
        layer.compile(backend=backend, fullgraph=number > 0, dynamic=True)
    for length in (LENGTH, 30, 5):
        torch.testing.assert_close(layers(tokens(length)), model(tokens(length)))
    with pytest.raises(ConfigurationError, match=OTHERWISE.format(31)):
        layers(tokens(31))
