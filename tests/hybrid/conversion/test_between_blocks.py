"""What models do between their blocks: layers repeat it exactly, or the model is refused."""

from __future__ import annotations

import copy
import random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipollux_hybrid.conversion.as_layers import as_layers
from pipollux_hybrid.errors import ConfigurationError

WIDTH, THRESHOLD = 6, -1.0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return x + self.linear(x).tanh() * (1.0 if scale is None else scale)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList(Block() for _ in range(3))


def batch(rows: int = 4, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, WIDTH, dtype=torch.float64, generator=generator)


def run(layers: list[nn.Module], value: Any) -> Any:
    """Run layers as stages do, each on memory of its own."""
    for layer in layers:
        value = layer(value)
        if isinstance(value, tuple):
            value = tuple(x.clone() if isinstance(x, Tensor) else x for x in value)
    return value


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    return [x for item in items for x in tensors(item)]


def assert_exact(model: nn.Module) -> list[nn.Module]:
    """Compare separate copies of the layers with a copy of the model, in both modes."""
    original = copy.deepcopy(model)
    layers = [copy.deepcopy(x) for x in as_layers(model, batch())]
    for training in (True, False):
        for rows in (1, 3, 4):
            for module in (original, model, *layers):
                module.train(training)
                module.zero_grad()
            torch.manual_seed(rows)
            expected = original(batch(rows, seed=rows))
            torch.manual_seed(rows)
            found = run(layers, batch(rows, seed=rows))
            assert type(found) is type(expected)
            for one, other in zip(tensors(expected), tensors(found), strict=True):
                assert torch.equal(one, other)
            sum(x.sin().sum() for x in tensors(expected)).backward()
            sum(x.sin().sum() for x in tensors(found)).backward()
            assert_same_gradients(original, layers)
    return layers


def assert_same_gradients(original: nn.Module, layers: list[nn.Module]) -> None:
    first: dict[Tensor, str] = {}
    names = {
        name: first.setdefault(x, name)
        for name, x in original.named_parameters(remove_duplicate=False)
    }
    sums: dict[str, Tensor] = {}
    for layer in layers:
        for name, x in layer.named_parameters():
            if x.grad is not None:
                sums[names[name]] = sums.get(names[name], torch.zeros(())) + x.grad
    for name, x in original.named_parameters():
        assert (x.grad is None) == (name not in sums), name
        if x.grad is not None:
            assert torch.allclose(x.grad, sums[name], rtol=1e-12, atol=1e-15), name
    buffers = dict(original.named_buffers())
    for layer in layers:
        for name, x in layer.named_buffers():
            assert torch.equal(x, buffers[name]), name


# --- exact -------------------------------------------------------------------------------------


class FunctionalDropout(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = functional.dropout(block(x), 0.3, training=self.training)
        return x


class InPlace(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        x += 1
        part = x[:, :2]
        x = self.blocks[1](x * 2)
        x[:, 0] = part.sum(1)
        x.mul_(0.5)
        x = functional.relu(x, inplace=True)
        return self.blocks[2](x) + x


class ResidualAroundDropout(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            dropped = self.dropout(x)  # in evaluation, x itself
            x = block(dropped) + x * 0.5
        return x


class ChangedBuffer(Blocks):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            self.mean += 0.01
        x = x - self.mean
        return self.blocks[2](self.blocks[1](x))


class ParameterBetween(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
        self.gates = nn.ParameterList(torch.full((1,), 1.0 + i).double() for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.position
        for gate, block in zip(self.gates, self.blocks, strict=True):
            x = block(x) * gate
        return x


class DeviceConstants(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.offset = torch.arange(WIDTH, dtype=torch.float64)  # no buffer

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[0], device=x.device, dtype=x.dtype)
        x = x + places[:, None] + torch.tensor([1.0, 2.0], device=x.device, dtype=x.dtype).sum()
        for block in self.blocks:
            x = block(x + self.offset)
        return x


class Tied(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH).double()
        self.last = nn.Linear(WIDTH, WIDTH).double()
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class UsedTwice(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return self.norm(x)


class NestedBlock(Block):
    def forward(self, x: Tensor) -> Any:
        return (super().forward(x),), x.shape[1], np.float64(0.5)


class NestedInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NestedBlock() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            outputs, width, half = block(x)
            x = outputs[0].reshape(-1, width) * half
        return x


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH).double()
        self.last = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(x))


class CallsAlsoAPart(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.head = Head()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.head.norm(x)) * self.head.last.bias


class Observer(nn.Module):
    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.largest = torch.maximum(self.largest, x.detach().max())
        return x * self.largest


class ReplacesBufferInModule(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.observer = Observer()

    def forward(self, x: Tensor) -> Tensor:
        x = self.observer(self.blocks[0](x))
        return self.blocks[2](self.blocks[1](x))


class Reversed(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return x


class Pair(NamedTuple):
    first: Tensor
    rest: list[Tensor]


class Nested(Blocks):
    def forward(self, x: Tensor) -> dict[str, Any]:
        states = []
        for block in self.blocks:
            x = block(x)
            states.append(x)
        return {"last": x, "pair": Pair(x.mean(1), states), "mask": (x.abs() + 1,)}


class Gradient(torch.autograd.Function):
    """Turns the gradient around."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]  # one gradient
        return -gradient


class CustomFunction(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        return self.blocks[2](self.blocks[1](Gradient.apply(x)))  # type: ignore[no-untyped-call]  # torch's


class WithoutGradients(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        with torch.no_grad():
            scale = x.abs().mean(1, keepdim=True)
        x = self.blocks[1](x / scale)
        return self.blocks[2](x.detach() + x.type(torch.float32).type(torch.float64))


class Checkpointed(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return x


@pytest.mark.parametrize(
    "model",
    [
        FunctionalDropout,
        InPlace,
        ResidualAroundDropout,
        ChangedBuffer,
        ParameterBetween,
        DeviceConstants,
        Tied,
        UsedTwice,
        Reversed,
        Nested,
        CustomFunction,
        WithoutGradients,
        Checkpointed,
        CallsAlsoAPart,
        NestedInside,
        ReplacesBufferInModule,
    ],
)
def test_layers_repeat_it(model: type[nn.Module]) -> None:
    layers = assert_exact(model())
    assert len(layers) >= 5  # three blocks, and what is around them


def test_names_of_tied_weights_are_the_models() -> None:
    model = Tied()
    layers = as_layers(model, batch())
    assert dict(layers.named_parameters()).keys() == dict(model.named_parameters()).keys()


def test_autocast_between_blocks_is_followed() -> None:
    model = Reversed().float()
    layers = as_layers(model, batch().float())
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = model(batch().float()), layers(batch().float())
    assert torch.equal(expected, found)


def test_received_tensors_are_not_changed_in_place() -> None:
    value: Any = batch().requires_grad_()
    for layer in as_layers(InPlace(), batch()):
        value = layer(value)
        if isinstance(value, tuple):
            value = tuple(
                x.detach().requires_grad_()
                if isinstance(x, Tensor) and x.is_floating_point()
                else x
                for x in value
            )
    assert torch.equal(value, InPlace()(batch()))


class DependsOnBothModeAndSize(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        count = x.shape[0] if self.training else 2
        return self.blocks[2](self.blocks[1](x / count))


def test_numbers_of_one_mode_may_depend_on_sizes() -> None:
    assert_exact(DependsOnBothModeAndSize())


class KeepsState(Block):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        self.last = super().forward(x, scale)
        return self.last


def test_blocks_keep_no_graph() -> None:
    model = Reversed()
    model.blocks = nn.ModuleList(KeepsState() for _ in range(3))
    copy.deepcopy(as_layers(model, batch()))  # torch copies no tensor with a graph
    assert not any(hasattr(x, "last") for x in model.blocks)


class KeepsInDict(Block):
    """Keeps in evaluation what it computed from its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Tensor] = {}

    def train(self, mode: bool = True) -> KeepsInDict:
        if mode:
            self.kept = {}
        super().train(mode)
        return self

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        assert scale is None
        if self.training:
            return super().forward(x, self.linear.weight.sum())
        if "scale" not in self.kept:
            self.kept["scale"] = self.linear.weight.sum()
        return super().forward(x, self.kept["scale"])


def test_nothing_that_blocks_compute_stays_in_them() -> None:
    """Parameters that are loaded after the conversion would not fit it."""
    model = Reversed()
    model.blocks = nn.ModuleList(KeepsInDict() for _ in range(3))
    model.eval()
    layers = as_layers(model, batch())
    assert not any(x.kept for x in model.blocks)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
    layers.load_state_dict(other.state_dict())
    assert torch.equal(layers(batch()), other(batch()))


def test_modes_of_modules_stay() -> None:
    model = ResidualAroundDropout()
    model.blocks[1].eval()
    before = [x.training for x in model.modules()]
    layers = as_layers(model, batch())
    assert [x.training for x in model.modules()] == before
    assert all(layer.training for layer in layers)


class KeepsDropoutOff(ResidualAroundDropout):
    def train(self, mode: bool = True) -> KeepsDropoutOff:
        super().train(mode)
        self.dropout.eval()
        return self


def test_overridden_modes_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"train\(\) leaves module 'dropout'"):
        as_layers(KeepsDropoutOff(), batch())


# --- refused -----------------------------------------------------------------------------------


class Numpy(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        scale = torch.from_numpy(np.abs(x.detach().numpy()))
        return self.blocks[2](self.blocks[1](x * scale))


class Layerdrop(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if not self.training or torch.rand(()) > 0.1:
                x = block(x)
        return x


class SetsAttribute(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        self._state = x
        return x


class AppendsToAttribute(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        self.losses.append(x.mean())
        return x


class LoopOverBatch(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x))
        return self.blocks[2](torch.stack([row / row.norm() for row in x]))


class DecidesByData(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        if x[0, 0] > THRESHOLD:
            x = x * 2
        return self.blocks[2](self.blocks[1](x))


class DividesByTheNumberOfPositive(Blocks):
    """Reads the size of a selection, which no two batches need have in common."""

    def forward(self, x: Tensor) -> Tensor:
        selected = x[x > 0] * 2
        for block in self.blocks:
            x = block(x) / selected.shape[0]
        return x


class PythonRandom(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x) * random.random()  # noqa: S311  # as models do
        return self.blocks[2](self.blocks[1](x))


class Cache:
    def __init__(self) -> None:
        self.states: list[Tensor] = []


class CachingBlock(Block):
    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        cache.states.append(x)
        return super().forward(x)


class PassesObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(CachingBlock() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        cache = Cache()
        for block in self.blocks:
            x = block(x, cache)
        return x


class ChangesConstant(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.queue = torch.zeros(WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        self.queue.add_(x.detach().mean(0))
        return self.blocks[2](self.blocks[1](x))


class BufferOfTwoLayers(Blocks):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        self.mean.add_(x.detach().mean(0))
        return self.blocks[2](self.blocks[1](x)) - self.mean


class BatchNormUsedTwice(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.norm(block(x))
        return x


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor, module: nn.Module) -> Any:
        return module(x) * 2

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Any:  # type: ignore[override]  # one gradient
        return gradient, None


class ObserverUsedTwice(ReplacesBufferInModule):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.observer(block(x))
        return x


class GivesModuleToFunction(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        x = Doubled.apply(x, self.blocks[1])  # type: ignore[no-untyped-call]  # torch's
        return self.blocks[2](x)


class ReadsGradientMode(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x))
        if torch.is_grad_enabled():
            x = x * 2
        return self.blocks[2](x)


class ReadsRequiresGrad(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x))
        scale = 2.0 if x.requires_grad and self.training else 1.0
        return self.blocks[2](x * scale)


class DependsOnBatch(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        return self.blocks[2](self.blocks[1](x)) * x.shape[0] ** 0.5


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (Numpy, r"numpy turns a tensor into a ndarray.*compute with tensors"),
        (Layerdrop, r"decides by a random number.*set that probability to 0"),
        (SetsAttribute, r"sets its attribute '_state'.*return the value as an output"),
        (AppendsToAttribute, r"sets its attribute 'losses\[\d+\]'"),
        (LoopOverBatch, r"other arguments or results with batches of other sizes"),
        (DecidesByData, r"decides by its data which operations run"),
        (PythonRandom, r"draws random numbers with Python's random or NumPy.*with torch"),
        (PassesObject, r"passes a .*Cache between its modules"),
        (ChangesConstant, r"changes a tensor that is none of its buffers"),
        (BufferOfTwoLayers, r"buffer 'mean' is changed in one layer and used in others"),
        (BatchNormUsedTwice, r"buffer 'norm\.\w+' is changed in one layer and used in others"),
        (
            GivesModuleToFunction,
            r"passes a module, or a function with a module or tensor in it, to a function",
        ),
        (ObserverUsedTwice, r"buffer 'observer\.largest' is changed in one layer and used in"),
        (ReadsGradientMode, r"does something else under torch\.no_grad\(\).* self\.training"),
        (ReadsRequiresGrad, r"does something else under torch\.no_grad\(\).* self\.training"),
        (DependsOnBatch, r"differs between batches of other sizes, and is no integer"),
    ],
)
def test_the_sentence_says_what_and_where(model: type[nn.Module], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=f"(?s){sentence}"):
        as_layers(model(), batch())


@pytest.mark.parametrize(
    "model",
    [
        *(Numpy, Layerdrop, LoopOverBatch, DecidesByData, PassesObject),
        *(ReadsGradientMode, ReadsRequiresGrad),
    ],
)
def test_the_sentence_has_file_and_line(model: type[nn.Module]) -> None:
    with pytest.raises(ConfigurationError, match=r"test_between_blocks\.py:\d+: "):
        as_layers(model(), batch())


def test_labels_are_refused() -> None:
    example = {"x": batch(), "labels": torch.zeros(4)}
    with pytest.raises(ConfigurationError, match=r"compute the loss in\s+loss_fn"):
        as_layers(Reversed(), example)


def test_a_size_that_the_data_decide_is_checked_again() -> None:
    model, positive = DividesByTheNumberOfPositive(), batch().abs() + 1
    layers = as_layers(model, positive)
    assert torch.equal(layers(positive[:3]), model(positive[:3]))
    with pytest.raises(ConfigurationError, match="decides by its data"):
        layers(batch() - 1)


def test_the_callers_contexts_do_not_matter() -> None:
    model = FunctionalDropout()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        layers = as_layers(model, batch())
    torch.manual_seed(1)
    expected = model(batch())
    torch.manual_seed(1)
    assert torch.equal(layers(batch()), expected)


def test_a_decision_by_data_is_checked_again() -> None:
    model = DecidesByData().eval()
    layers = as_layers(model, batch(), verify=False).eval()
    assert torch.equal(layers(batch()), model(batch()))
    other = batch(seed=3)
    assert (model.blocks[0](other)[0, 0] > THRESHOLD) != (
        model.blocks[0](batch())[0, 0] > THRESHOLD
    )
    with pytest.raises(ConfigurationError, match="decides by its data"):
        layers(other)
