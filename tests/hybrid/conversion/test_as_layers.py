"""What users do with a converted model: names, modes, settings, compilation, adapters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from pipollux_hybrid import ConfigurationError, HybridParallel, as_layers
from pipollux_hybrid.conversion import watch
from pipollux_hybrid.job import context as contexts
from tests.hybrid.conversion.small_models import loss_of, make_batches, make_model


@pytest.fixture(autouse=True)
def fresh_context() -> Iterator[None]:
    contexts.reset()
    yield
    contexts.reset()


class Net(nn.Module):
    """A model with settings, and with code between its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.temperature = 2.0
        self.offset = nn.Parameter(torch.ones(4))
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = F.dropout(block(x) / self.temperature, 0.5, self.training) + self.offset
        return x


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


@pytest.fixture
def batch() -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def gpt2(**settings: Any) -> tuple[Any, dict[str, Tensor]]:
    return make_model("gpt2", tie_word_embeddings=True, **settings), make_batches("gpt2", 1)[0][0]


def test_the_output_has_the_models_class_and_values() -> None:
    model, batch = gpt2()
    layers = as_layers(model, batch)
    found, expected = layers(batch), model(**batch)
    assert type(found) is type(expected)
    # Its caches of keys and values, which are named "cache" by transformers 5.24 and newer.
    assert found.keys() == expected.keys() - {"past_key_values", "cache"}
    assert torch.equal(found.logits, expected.logits)


def test_names_and_objects_are_the_models() -> None:
    model, batch = gpt2()
    layers = as_layers(model, batch)
    assert list(layers.state_dict()) == list(model.state_dict())
    assert dict(layers.named_parameters()) == dict(model.named_parameters())
    assert {id(x) for x in layers.parameters()} == {id(x) for x in model.parameters()}


def test_states_go_both_ways_also_within_other_modules() -> None:
    model, batch = gpt2()
    layers, other = as_layers(model, batch), gpt2(seed=5)[0]
    layers.load_state_dict(other.state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    average = AveragedModel(layers)
    assert "module.transformer.h.0.ln_1.weight" in average.state_dict()
    average.load_state_dict(average.state_dict())
    gpt2(seed=6)[0].load_state_dict(layers.state_dict())
    incomplete = {name: x for name, x in model.state_dict().items() if "ln_f" not in name}
    with pytest.raises(RuntimeError, match=r"Missing key.*ln_f"):
        layers.load_state_dict(incomplete)


def test_unused_parameters_stay_without_gradients(net: Net, batch: Tensor) -> None:
    layers = as_layers(net, batch)
    layers(batch).sum().backward()
    assert net.unused.weight.grad is None
    assert net.offset.grad is not None
    assert "unused.weight" in layers.state_dict()


def test_the_wrapped_model_takes_keywords_and_converts_by_itself() -> None:
    model, batch = make_model("gpt2"), make_batches("gpt2", 1)[0][0]
    expected = copy.deepcopy(model)(**batch).logits
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = HybridParallel(model, optimizer, num_stages=3, example_inputs=batch)
    assert len(wrapped.balance) == 3
    assert torch.equal(wrapped(**batch).logits, expected)
    assert torch.equal(wrapped(dict(reversed(batch.items()))).logits, expected)
    assert list(wrapped.state_dict()) == list(model.state_dict())


def test_cuts_are_where_the_user_says(net: Net, batch: Tensor) -> None:
    layers = as_layers(net, batch, cut_at=["blocks.2"])
    assert [name for name, _ in layers.named_children()] == ["0:first", "1:blocks/2", "2:last"]
    assert len(as_layers(net, batch, cut_at=["blocks"])) == 5
    rows = layers.describe().splitlines()
    assert rows[0].split() == ["layer", "modules", "operations", "carries", "bytes", "parameters"]
    assert rows[1].startswith("0:first     blocks.0, blocks.1")
    with pytest.raises(ConfigurationError, match=r"no module 'block'; it has 'blocks'"):
        as_layers(net, batch, cut_at=["block"])
    with pytest.raises(ConfigurationError, match="does not call module 'unused'"):
        as_layers(net, batch, cut_at=["unused"])
    with pytest.raises(ConfigurationError, match=r"'blocks\.1\.0' is in 'blocks\.1'"):
        as_layers(net, batch, cut_at=["blocks.1", "blocks.1.0"])
    with pytest.raises(ConfigurationError, match="sliced"):
        layers[1:]


@pytest.mark.parametrize("training", [False, True])
def test_dropout_between_blocks_follows_the_mode(net: Net, batch: Tensor, training: bool) -> None:
    layers = as_layers(net, batch)
    layers.train(training)
    assert net.training == training
    torch.manual_seed(3)
    expected = net(batch)
    torch.manual_seed(3)
    assert torch.equal(layers(batch), expected)


def test_a_changed_setting_is_refused(net: Net, batch: Tensor) -> None:
    layers = as_layers(net, batch)
    net.temperature = 3.0
    with pytest.raises(ConfigurationError, match=r"temperature of the Net is 3\.0 and was 2\.0"):
        layers(batch)
    net.temperature = 2.0
    net.eval()
    with pytest.raises(ConfigurationError, match=r"another mode .* call train\(\) of the wrapped"):
        layers(batch)


def replace_module(net: Net) -> None:
    net.blocks[1] = nn.Linear(4, 4)


def delete_module(net: Net) -> None:
    del net.unused


def replace_parameter(net: Net) -> None:
    net.load_state_dict(Net().double().state_dict(), assign=True)


def add_module(net: Net) -> None:
    net.adapter = nn.Linear(4, 4)


def add_hook(net: Net) -> None:
    net.register_forward_hook(lambda _module, _given, output: output * 2)


def add_backward_hook(net: Net) -> None:
    net.register_full_backward_pre_hook(lambda _module, _gradients: None)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (replace_module, r"'1' was replaced in module 'blocks' after the model was converted"),
        (delete_module, r"'unused' was deleted from the Net after the model was converted"),
        (replace_parameter, r"'offset' was replaced in the Net after the model was converted"),
        (add_module, r"'adapter' was added to the Net after the model was converted"),
        (add_hook, r"a hook was registered on the Net, which is never called"),
        (add_backward_hook, r"a hook was registered on the Net, which is never called"),
    ],
)
def test_changes_that_layers_would_not_follow_are_refused(
    net: Net, batch: Tensor, change: Callable[[Any], None], sentence: str
) -> None:
    layers = as_layers(net, batch)
    change(net)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=sentence):
            layers(batch)


def scale_forward(net: Any) -> None:
    forward = net.forward
    net.forward = lambda x: 2 * forward(x)


def set_attribute(name: str, value: Any) -> Callable[[Any], None]:
    return lambda net: setattr(net, name, value)


def set_value(net: Any) -> None:
    net.schedule.value = 0.5


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (scale_forward, r"'forward' was added to the Net"),
        (set_attribute("factor", torch.zeros(())), r"'factor' was replaced in the Net"),
        (set_attribute("counted", torch.zeros(())), r"'counted' was replaced in the Net"),
        (set_attribute("function", torch.relu), r"'function' was replaced in the Net"),
        (set_attribute("_scale", 3.0), r"_scale of the Net is 3\.0 and was 1\.0"),
        (set_attribute("limit", np.float32(2)), r"limit of the Net is .*2\.0.* and was .*1\.0"),
        (set_value, r"schedule\.value of the Net is 0\.5 and was 1\.0"),
        (
            set_attribute("schedule", SimpleNamespace(value=2.0)),
            r"schedule\.value of the Net is 2\.0 and was 1\.0",
        ),
    ],
)
def test_attributes_that_code_between_blocks_may_read_are_watched(
    net: Any, batch: Tensor, change: Callable[[Any], None], sentence: str
) -> None:
    net.factor, net.function, net._scale = torch.ones(()), torch.tanh, 1.0
    net.limit, net.schedule = np.float32(1), SimpleNamespace(value=1.0)
    net.register_buffer("counted", torch.ones(()))
    layers = as_layers(net, batch)
    net.schedule = SimpleNamespace(value=1.0)  # another object with equal values
    layers(batch)
    change(net)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=sentence):
            layers(batch)


@pytest.mark.parametrize(
    ("wrap", "sentence"),
    [
        (
            lambda x: torch.compile(x, backend="eager"),
            "the model is compiled, so its operations cannot be recorded",
        ),
        (nn.DataParallel, r"model is a DataParallel.*: pass the model in it, model\.module"),
    ],
)
def test_wrapped_models_are_refused(
    net: Net, batch: Tensor, wrap: Callable[[nn.Module], nn.Module], sentence: str
) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        as_layers(wrap(net), batch)


def test_a_model_that_is_compiled_in_place_is_refused(net: Net, batch: Tensor) -> None:
    net.compile(backend="eager")
    with pytest.raises(ConfigurationError, match="the model is compiled"):
        as_layers(net, batch)


def test_attributes_of_the_model_are_found_on_it() -> None:
    model, batch = gpt2()
    wrapped = HybridParallel(
        model, torch.optim.SGD(model.parameters(), lr=0.1), example_inputs=batch
    )
    sentence = "is an attribute of the GPT2LMHeadModel that was converted: use it there"
    for name in ("generate", "save_pretrained", "config"):
        for owner in (wrapped, wrapped.module):
            with pytest.raises(AttributeError, match=f"'{name}' {sentence}"):
                getattr(owner, name)
    assert not hasattr(wrapped, "unknown")
    with pytest.raises(AttributeError, match="'HybridParallel' object has no attribute 'unknown'"):
        wrapped.unknown  # noqa: B018  # raises
    del model
    with pytest.raises(AttributeError, match=f"'generate' {sentence}"):
        wrapped.generate  # noqa: B018  # raises


class Settings:
    """A configuration with lists and other configurations, as those of Hugging Face."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def set_list(net: Any) -> None:
    net.scales[1] = 3.0


def set_list_of_configuration(net: Any) -> None:
    net.config.kinds["first"][0] = "other"


def set_nested(net: Any) -> None:
    net.config.text.width = 5


def set_other_configuration(net: Any) -> None:
    net.config = Settings(kinds={"first": ["full"]}, text=Settings(width=6))


def add_setting(net: Any) -> None:
    net.config.text.more = 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (set_list, r"scales of the Net is \[1\.0, 3\.0\] and was \[1\.0, 2\.0\]"),
        (set_list_of_configuration, r"config\.kinds of the Net is \{'first': \['other'\]\} and"),
        (set_nested, r"config\.text\.width of the Net is 5 and was 4"),
        (set_other_configuration, r"config\.text\.width of the Net is 6 and was 4"),
        (add_setting, r"config\.text\.more of the Net is 1 and was missing"),
    ],
)
def test_lists_and_nested_configurations_are_compared_by_value(
    net: Any, batch: Tensor, change: Callable[[Any], None], sentence: str
) -> None:
    net.scales = [1.0, 2.0]
    net.config = Settings(kinds={"first": ["full"]}, text=Settings(width=4))
    layers = as_layers(net, batch)
    net.scales, net.config.text = list(net.scales), copy.copy(net.config.text)
    layers(batch)  # other objects with equal values
    change(net)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=sentence):
            layers(batch)


def test_settings_are_read_again_only_to_name_the_change(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    read = watch.settings_of
    monkeypatch.setattr(watch, "settings_of", lambda x: reads.append(x) or read(x))
    model, batch = gpt2()
    layers = as_layers(model, batch)
    reads.clear()
    for _ in range(2):
        layers(batch)
    assert not reads
    model.config.attn_pdrop = float("0")  # an equal number, and another object
    layers(batch)
    assert not reads
    model.note = 1.0  # no setting of the conversion, and removed again
    del model.note
    layers(batch)
    assert not reads
    model.config.attn_pdrop = 0.3
    with pytest.raises(ConfigurationError, match=r"config\.attn_pdrop of .* is 0\.3 and was 0\.0"):
        layers(batch)


def test_a_copy_is_independent(net: Net, batch: Tensor) -> None:
    layers = as_layers(net, batch).eval()
    copied = copy.deepcopy(layers)
    copied.train()
    net.temperature = 3.0
    assert copied(batch).shape == batch.shape
    assert not net.training


def test_the_dtype_is_that_of_the_conversion(net: Net, batch: Tensor) -> None:
    with pytest.raises(ConfigurationError, match="change the model's dtype, then convert"):
        as_layers(net, batch).float()


def test_batches_of_another_form_are_refused() -> None:
    model, batch = gpt2()
    layers = as_layers(model, batch)
    for length in (1, 5, 13, 16):
        other = {name: x.repeat(1, 2)[:, :length] for name, x in batch.items()}
        assert torch.equal(layers(other).logits, model(**other).logits)
    with pytest.raises(ConfigurationError, match=r"entries \['input_ids'\], and example_inputs"):
        layers({"input_ids": batch["input_ids"]})
    with pytest.raises(ConfigurationError, match=r"dtype torch\.int32"):
        layers({name: x.int() for name, x in batch.items()})
    ragged = {**batch, "attention_mask": batch["attention_mask"][:, 1:]}
    with pytest.raises(
        ConfigurationError, match=r"shape \(6, 7\).* recorded for \[batch, length\]"
    ):
        layers(ragged)
    with pytest.raises(ConfigurationError, match=r"the batch has 'labels'.*: take them out"):
        layers({**batch, "labels": batch["input_ids"]})
    with pytest.raises(ConfigurationError, match="pass the labels as targets"):
        as_layers(model, {**batch, "labels": batch["input_ids"]})


def test_lengths_of_encoder_and_decoder_are_two() -> None:
    model, (batch, _) = make_model("t5").eval(), make_batches("t5", 1)[0]
    layers = as_layers(model, {**batch, "decoder_input_ids": batch["input_ids"].flip(1)})
    assert torch.equal(layers(batch).logits, model(**batch).logits)


def test_errors_of_the_model_are_its_own(net: Net) -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        as_layers(net, torch.ones(2, 3, dtype=torch.float64))


def test_hooks_on_modules_around_blocks_are_refused(net: Net, batch: Tensor) -> None:
    net.register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigurationError, match="has hooks, which would never be called"):
        as_layers(net, batch)


def test_nothing_changes_but_the_result(net: Net, batch: Tensor) -> None:
    """Random numbers, modes, buffers and gradients are as before."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    net.blocks.append(model)  # type: ignore[arg-type]  # a block like the others
    state, buffers = torch.get_rng_state(), [x.clone() for x in net.buffers()]
    as_layers(net, batch)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one, other) for one, other in zip(net.buffers(), buffers, strict=True))
    assert net.training
    assert all(parameter.grad is None for parameter in net.parameters())
    assert nn.Module.__call__ is type(net).__call__


# torch.compile reads the gradients of a layer's inputs, in the plain model as well.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_layers_can_be_compiled(backend: str) -> None:
    model, batch = gpt2()
    layers = as_layers(model, batch)
    for number, layer in enumerate(layers):
        layer.compile(backend=backend, fullgraph=number > 0)
    found = layers(batch).logits
    torch.testing.assert_close(found, model(**batch).logits, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_many_layers_can_be_compiled() -> None:
    """torch limits how often it compiles one function, and layers share theirs."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(12))).double()
    batch = torch.ones(2, 4, dtype=torch.float64)
    layers = as_layers(model, batch)
    for layer in [*layers][1:]:
        layer.compile(backend="eager", fullgraph=True)
    assert torch.equal(layers(batch), model(batch))


def test_autocast_is_followed() -> None:
    model, batch = make_model("llama").float(), make_batches("llama", 1)[0][0]
    layers = as_layers(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layers(batch).logits, model(**batch).logits)
    assert torch.equal(layers(batch).logits, model(**batch).logits)


def test_resized_embeddings_frozen_bases_and_own_checkpointing() -> None:
    model, batch = make_model("llama"), make_batches("llama", 1)[0][0]
    model.resize_token_embeddings(64)
    model.activation_checkpointing_enable()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "q_proj" in name
    expected = copy.deepcopy(model)
    layers = as_layers(model, batch)
    targets = make_batches("llama", 1)[0][1]
    loss_of(layers(batch), targets).backward()
    loss_of(expected(**batch), targets).backward()
    for (name, mine), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None) == ("q_proj" not in name)
        if mine.grad is not None and theirs.grad is not None:
            assert torch.equal(mine.grad, theirs.grad)


def test_a_trained_model_is_saved_and_generates(tmp_path: Any) -> None:
    model, batch = make_model("gpt2"), make_batches("gpt2", 1)[0][0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = HybridParallel(model, optimizer, num_stages=2, example_inputs=batch)
    wrapped.train_step(batch, make_batches("gpt2", 1)[0][1], loss_of)
    optimizer.step()
    wrapped.eval()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float64)
    assert torch.equal(loaded.eval()(**batch).logits, wrapped(**batch).logits)
    prompt = batch["input_ids"][:1, :3]
    words = model.generate(prompt, max_new_tokens=3, do_sample=False)
    assert torch.equal(words, loaded.generate(prompt, max_new_tokens=3, do_sample=False))
    wrapped.train()
    wrapped.train_step(batch, make_batches("gpt2", 1)[0][1], loss_of)  # training goes on
