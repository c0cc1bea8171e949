"""The traps of GPipe on today's PyTorch, one test for each: made to work, or refused in a sentence.

Each was measured on torchgpipe 0.0.7 itself; the first lines of a test say what happened there.
"""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipollux_hybrid import (
    AdaptiveDataLoader,
    ConfigurationError,
    HybridParallel,
    Namespace,
    SynchronizationError,
    init_process_group,
    pop,
    skippable,
    stash,
)
from pipollux_hybrid import context as contexts
from pipollux_hybrid.engine import PipelineEngine, microbatch_sizes
from pipollux_perfmodel import partition
from tests.hybrid.models import assert_close, gradients, make_data, make_model
from tests.hybrid.replicas import run_replicas

MODES = ["always", "except_last", "never"]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh_context() -> Iterator[None]:
    contexts.reset()
    yield
    contexts.reset()


def engine(module: nn.Sequential, balance: list[int], checkpoint: str) -> PipelineEngine:
    return PipelineEngine(module, balance, [CPU] * len(balance), checkpoint)


def forward(pipeline: PipelineEngine, inputs: object, size: int, num_microbatches: int) -> Tensor:
    return pipeline.run(inputs, microbatch_sizes(size, num_microbatches), training=True)


def wrap(module: nn.Sequential, **options: object) -> HybridParallel:
    return HybridParallel(module, torch.optim.SGD(module.parameters(), lr=0.1), **options)


def check_like_plain(
    module: nn.Sequential,
    inputs: object,
    size: int,
    balance: list[int],
    checkpoint: str,
    num_microbatches: int = 3,
) -> None:
    """The pipeline's outputs and gradients are those of the plain layers."""
    plain = copy.deepcopy(module)
    expected = plain(copy.deepcopy(inputs))
    expected.square().sum().backward()
    output = forward(engine(module, balance, checkpoint), inputs, size, num_microbatches)
    torch.testing.assert_close(output, expected)
    output.square().sum().backward()
    assert_close(gradients(module), gradients(plain), 1e-5)


# --- micro-batches -------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpoint", MODES)
def test_chunks_raised_after_the_first_forward(checkpoint: str) -> None:
    # IndexError: copy streams are cached at the first forward, as many as there were chunks.
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    pipeline = engine(module, [1, 1], checkpoint)
    inputs = torch.randn(8, 3)
    for num_microbatches in (1, 2, 8, 4):
        output = forward(pipeline, inputs, 8, num_microbatches)
        torch.testing.assert_close(output, module(inputs))


class CountsForwards(nn.Module):
    """Linear; counts its forwards, those with gradients apart."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.with_gradients = self.all = 0

    def forward(self, x: Tensor) -> Tensor:
        self.all += 1
        self.with_gradients += torch.is_grad_enabled()
        y: Tensor = self.linear(x)
        return y


def test_except_last_on_a_batch_shorter_than_the_micro_batches() -> None:
    # The last micro-batch was taken to be number `chunks`, so a short batch was recomputed whole.
    layer = CountsForwards()
    forward(engine(nn.Sequential(layer), [1], "except_last"), torch.randn(3, 3), 3, 4).sum()
    assert (layer.all, layer.with_gradients) == (3, 1)


def micro_batches_from_4_to_2(checkpoint: str) -> dict[str, Tensor]:
    init_process_group("gloo")
    module = make_model("mlp")
    model = wrap(module, num_stages=2, checkpoint=checkpoint)
    rank = contexts.context().env.rank
    inputs, targets = make_data("mlp", 8)[list(range(rank * 4, rank * 4 + 4))]
    for num_microbatches in (4, 2):
        model.num_microbatches = num_microbatches
        module.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
    return gradients(module)


@pytest.mark.parametrize("checkpoint", MODES)
def test_data_parallel_gradients_when_micro_batches_fall_from_4_to_2(checkpoint: str) -> None:
    # DistributedDataParallel with static_graph=True over GPipe: wrong gradients without a word.
    module = make_model("mlp")
    inputs, targets = make_data("mlp", 8)[list(range(8))]
    F.cross_entropy(module(inputs), targets).backward()
    for ours in run_replicas(micro_batches_from_4_to_2, 2, checkpoint):
        assert_close(ours, gradients(module), 1e-12)


# --- what surrounds the forward ------------------------------------------------------------------


class NotesDtype(nn.Module):
    """Linear; notes the dtype it computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.seen.append(y.dtype)
        return y


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("backward_inside", [True, False])
def test_outer_autocast_reaches_stages_and_their_recomputation(
    checkpoint: str, backward_inside: bool
) -> None:
    # Forward in float32 as autocast did not reach the workers, recomputation in bfloat16.
    module = nn.Sequential(NotesDtype(), NotesDtype())
    plain = copy.deepcopy(module)
    inputs = torch.randn(6, 4)
    with torch.autocast("cpu", torch.bfloat16):
        plain(inputs).float().square().mean().backward()
        loss = forward(engine(module, [1, 1], checkpoint), inputs, 6, 3).float().square().mean()
        if backward_inside:
            loss.backward()
    if not backward_inside:
        loss.backward()
    recomputed = {"always": 3, "except_last": 2, "never": 0}[checkpoint]
    for layer in module:
        assert isinstance(layer, NotesDtype)
        assert layer.seen == [torch.bfloat16] * (3 + recomputed)
    # Rounding to bfloat16 differs with the size of a batch; 8 bits of mantissa are left.
    assert_close(gradients(module), gradients(plain), 2e-2)


def test_backward_under_an_autocast_that_the_forward_was_not_under() -> None:
    module = nn.Sequential(NotesDtype(), NotesDtype())
    loss = forward(engine(module, [1, 1], "always"), torch.randn(4, 4), 4, 2).sum()
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()
    for layer in module:
        assert isinstance(layer, NotesDtype)
        assert layer.seen == [torch.float32] * 4


@pytest.mark.parametrize("checkpoint", MODES)
def test_outer_saved_tensor_hooks_reach_the_stages(checkpoint: str) -> None:
    # They are per thread, so what layers saved in worker threads was not packed.
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    packed: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward(engine(module, [2, 1], checkpoint), torch.randn(6, 4), 6, 3)
        output.sum().backward()
    # Tanh saves its output: each micro-batch's was packed, recomputed or not.
    assert packed.count((2, 4)) >= 3


class MakesTensor(nn.Module):
    """Notes where a factory function makes tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(torch.empty(1).device.type)
        y: Tensor = self.linear(x)
        return y


def test_outer_default_device_reaches_the_stages() -> None:
    module = nn.Sequential(MakesTensor(), MakesTensor())
    with torch.device("meta"):
        output = forward(engine(module, [1, 1], "always"), torch.randn(2, 4, device="cpu"), 2, 2)
    output.sum().backward()
    for layer in module:
        assert isinstance(layer, MakesTensor)
        assert layer.seen == ["meta"] * 4


def test_inference_mode_reaches_the_stages_and_leaves_nothing_behind() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipeline = engine(module, [1, 1], "always")
    with torch.inference_mode():
        assert forward(pipeline, torch.randn(4, 4), 4, 2).is_inference()
    forward(pipeline, torch.randn(4, 4), 4, 2).sum().backward()
    assert module[0].weight.grad is not None


# --- what goes from stage to stage ---------------------------------------------------------------


class TakesMask(nn.Module):
    """(hidden, mask, ids) to the same; uses all three."""

    def __init__(self, mask_first: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.mask_first = mask_first

    def forward(self, value: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        mask, x, ids = value if self.mask_first else (value[1], value[0], value[2])
        y = self.linear(x).masked_fill(mask, 0.0) + ids.unsqueeze(1)
        return (mask, y, ids + 1) if self.mask_first else (y, mask, ids + 1)


class Picks(nn.Module):
    """One of a tuple's tensors."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place

    def forward(self, value: tuple[Tensor, ...]) -> Tensor:
        return value[self.place]


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("mask_first", [False, True])
def test_integer_and_boolean_tensors_between_stages(checkpoint: str, mask_first: bool) -> None:
    # RuntimeError or IndexError from inside autograd, where activations are recomputed.
    module = nn.Sequential(
        TakesMask(mask_first), TakesMask(mask_first), TakesMask(mask_first), Picks(int(mask_first))
    )
    x, mask, ids = torch.randn(7, 4), torch.rand(7, 4) < 0.3, torch.arange(7)
    inputs = (mask, x, ids) if mask_first else (x, mask, ids)
    check_like_plain(module, inputs, 7, [1, 1, 2], checkpoint)


class PassesOn(nn.Module):
    """Nothing at all; its output may be all integers."""

    def forward(self, value: object) -> object:
        return value


@pytest.mark.parametrize("checkpoint", MODES)
def test_a_boundary_of_integers_only(checkpoint: str) -> None:
    module = nn.Sequential(PassesOn(), nn.Embedding(9, 4), nn.Linear(4, 2))
    check_like_plain(module, torch.arange(7), 7, [1, 1, 1], checkpoint)


class FloatMask(nn.Module):
    """Gives a mask that nothing differentiates, ahead of what is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x > 0).float(), self.linear(x)


class AppliesMask(nn.Module):
    """The other end of it."""

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        mask, x = value
        return x * mask.detach()


@pytest.mark.parametrize("checkpoint", MODES)
def test_floating_tensors_between_stages_that_need_no_gradient(checkpoint: str) -> None:
    module = nn.Sequential(FloatMask(), PassesOn(), AppliesMask(), nn.Linear(4, 2))
    check_like_plain(module, torch.randn(7, 4), 7, [1, 1, 2], checkpoint)


class FromDict(nn.Module):
    """Takes and gives dicts with lists, numbers and None in them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, value: dict[str, object]) -> dict[str, object]:
        hidden, rest, scale = value["hidden"], value["rest"], value["scale"]
        assert isinstance(hidden, Tensor)
        assert isinstance(rest, list)
        assert isinstance(scale, int)
        return {
            "hidden": self.linear(hidden) * scale + rest[0],
            "rest": [rest[0] + 1, None],
            "scale": scale,
        }


class ToTensor(nn.Module):
    def forward(self, value: dict[str, Tensor]) -> Tensor:
        return value["hidden"]


@pytest.mark.parametrize("checkpoint", MODES)
def test_nests_of_tensors_between_stages(checkpoint: str) -> None:
    module = nn.Sequential(FromDict(), FromDict(), ToTensor())
    inputs = {"hidden": torch.randn(5, 4), "rest": [torch.ones(5, 1), None], "scale": 3}
    check_like_plain(module, inputs, 5, [1, 1, 1], checkpoint)


def test_what_is_no_tensor_is_refused_by_layer() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[0].register_forward_hook(lambda *_: object())
    with pytest.raises(
        ConfigurationError, match=r"output of stage 0, layer '0', is or holds a object"
    ):
        forward(engine(module, [1, 1], "always"), torch.randn(4, 4), 4, 2)


def test_tuples_whose_first_dimensions_differ() -> None:
    # Rows were dropped without a word.
    model = wrap(nn.Sequential(Picks(0), nn.Linear(4, 4)))
    with pytest.raises(ConfigurationError, match=r"different size \(\(6, 4\), \(5, 4\)\)"):
        model(torch.randn(6, 4), torch.randn(5, 4))


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


def test_scalars_cannot_be_gathered() -> None:
    # RuntimeError: zero-dimensional tensor cannot be concatenated.
    pipeline = engine(nn.Sequential(nn.Linear(4, 4), Mean()), [1, 1], "never")
    with pytest.raises(ConfigurationError, match=r"returned a scalar.* one value per sample"):
        forward(pipeline, torch.randn(4, 4), 4, 2)


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.t()


def test_outputs_without_the_batch_in_front() -> None:
    # Rows of different samples were put below each other.
    pipeline = engine(nn.Sequential(nn.Linear(4, 4), Transposed()), [1, 1], "never")
    with pytest.raises(ConfigurationError, match=r"dimension 0 must be the batch"):
        forward(pipeline, torch.randn(5, 4), 5, 2)


# --- layers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpoint", MODES)
def test_an_in_place_first_layer_of_a_stage(checkpoint: str) -> None:
    # It changed the caller's tensor, and what its own recomputation started from.
    module = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ReLU(inplace=True))
    module.append(nn.Linear(4, 2))
    inputs = torch.randn(6, 4)
    before = inputs.clone()
    check_like_plain(module, inputs, 6, [2, 2], checkpoint)
    torch.testing.assert_close(inputs, before, rtol=0, atol=0)


class InPlaceNowAndThen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.in_place = False

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2) if self.in_place else x * 2


def test_a_first_layer_that_begins_to_work_in_place() -> None:
    layer = InPlaceNowAndThen()
    pipeline = engine(nn.Sequential(layer), [1], "always")
    forward(pipeline, torch.randn(4, 4), 4, 2)
    layer.in_place = True
    with pytest.raises(ConfigurationError, match=r"stage 0, layer '0': it changed its input"):
        forward(pipeline, torch.randn(4, 4), 4, 2)


class Leaves(nn.Module):
    def __init__(self, reason: BaseException) -> None:
        super().__init__()
        self.reason = reason

    def forward(self, _: Tensor) -> Tensor:
        raise self.reason


@pytest.mark.parametrize("reason", [SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.timeout(20)
def test_system_exit_in_a_layer(reason: BaseException, checkpoint: str) -> None:
    # The worker ended, and the script waited for it for ever.
    pipeline = engine(nn.Sequential(nn.Linear(4, 4), Leaves(reason)), [1, 1], checkpoint)
    with pytest.raises(type(reason)) as raised:
        forward(pipeline, torch.randn(4, 4), 4, 2)
    assert raised.value is reason


class Fails(nn.Module):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, _: Tensor) -> Tensor:
        raise self.error


@pytest.mark.parametrize("checkpoint", MODES)
def test_an_exception_names_stage_and_layer(checkpoint: str) -> None:
    # Which of many layers failed was left to guess.
    layers = nn.Sequential()
    layers.add_module("encoder", nn.Linear(4, 4))
    layers.add_module("decoder", nn.Linear(5, 4))
    with pytest.raises(
        RuntimeError, match=r"^stage 1 \(cpu\), layer 'decoder' \(Linear\): mat1 and mat2"
    ):
        forward(engine(layers, [1, 1], checkpoint), torch.randn(4, 4), 4, 2)
    failing = nn.Sequential(nn.Linear(4, 4), Fails(KeyError("missing")))
    with pytest.raises(KeyError, match=r"'missing'") as raised:
        forward(engine(failing, [1, 1], checkpoint), torch.randn(4, 4), 4, 2)
    assert raised.value.__notes__ == ["in stage 1 (cpu), layer '1' (Fails)"]


class FailsWhenRecomputed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise ValueError("not again")
        return x


def test_an_exception_of_a_recomputation_names_stage_and_layer() -> None:
    module = nn.Sequential(nn.Linear(4, 4), FailsWhenRecomputed())
    loss = forward(engine(module, [1, 1], "always"), torch.randn(4, 4), 4, 2).sum()
    with pytest.raises(ValueError, match=r"^stage 1 \(cpu\), layer '1' .*: not again"):
        loss.backward()


@pytest.mark.parametrize("checkpoint", MODES)
def test_dropout_is_the_same_when_recomputed(checkpoint: str) -> None:
    class KeepsMask(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.masks: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            y = F.dropout(x, 0.5)
            self.masks.append((y != 0).detach())
            return y

    layer = KeepsMask()
    module = nn.Sequential(nn.Linear(4, 8), layer, nn.Linear(8, 4), nn.Dropout(0.5))
    forward(engine(module, [1, 3], checkpoint), torch.randn(6, 4), 6, 3).sum().backward()
    first, again = layer.masks[:3], layer.masks[3:]
    assert len(again) == {"always": 3, "except_last": 2, "never": 0}[checkpoint]
    for mask, recomputed in zip(reversed(first[: len(again)]), again, strict=True):
        assert torch.equal(mask, recomputed)


# --- names, skip connections, batch normalisation ------------------------------------------------


def test_state_dict_keys_do_not_change_with_the_balance() -> None:
    # partitions.{stage}.{name}: another balance, other keys.
    module = make_model("mlp")
    keys = list(module.state_dict())
    for balance in ([4, 5], [1, 8], [3, 3, 3]):
        contexts.reset()
        model = wrap(module, balance=balance)
        assert list(model.state_dict()) == keys
        plain = make_model("mlp")
        plain.load_state_dict(model.state_dict())
        model.load_state_dict(plain.state_dict())


@skippable(stash=["long"])
class Stashes(nn.Module):
    """Linear, and its input for later."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Iterator[object]:
        yield stash("long", x)
        return self.linear(x)


@skippable(pop=["long"])
class Pops(nn.Module):
    def forward(self, x: Tensor) -> Iterator[object]:
        skipped = yield pop("long")
        return x * 2 + skipped


class Doubles(nn.Module):
    """Stashes what it doubles."""

    def forward(self, x: Tensor) -> Iterator[object]:
        yield stash("long", x)
        return 2 * x


DoublesAndStashes = skippable(stash=["long"])(Doubles)


def with_skips() -> nn.Sequential:
    inner, outer = Namespace(), Namespace()
    return nn.Sequential(
        Stashes().isolate(outer),
        nn.Tanh(),
        DoublesAndStashes().isolate(inner),
        nn.Linear(4, 4),
        Pops().isolate(inner),
        nn.Tanh(),
        Pops().isolate(outer),
    )


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("balance", [[7], [1, 6], [2, 2, 3], [1, 1, 1, 1, 1, 1, 1]])
def test_skip_connections_across_stages(balance: list[int], checkpoint: str) -> None:
    check_like_plain(with_skips(), torch.randn(7, 4), 7, balance, checkpoint)


def test_skippable_layers_pickle() -> None:
    # The decorator hid the class from pickle.
    module = with_skips()
    again = pickle.loads(pickle.dumps(module))  # noqa: S301  # what the line itself has pickled
    buffer = io.BytesIO()
    torch.save(module, buffer)
    inputs = torch.randn(3, 4)
    for twin in (again, copy.deepcopy(module)):
        assert isinstance(twin, nn.Sequential)
        torch.testing.assert_close(twin(inputs), module(inputs))


@skippable(stash=["mask"])
class StashesMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Iterator[object]:
        yield stash("mask", x > 0)
        return self.linear(x)


@skippable(pop=["mask"])
class PopsMask(nn.Module):
    def forward(self, x: Tensor) -> Iterator[object]:
        mask = yield pop("mask")
        return x.masked_fill(mask, 0.0)


@skippable(stash=["mask"])
class StashesThreshold(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Iterator[object]:
        y = self.linear(x)
        yield stash("mask", y)
        return y


@skippable(pop=["mask"])
class ComparesOnly(nn.Module):
    def forward(self, x: Tensor) -> Iterator[object]:
        threshold = yield pop("mask")
        return x * (x > threshold)


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("pair", [(StashesMask, PopsMask), (StashesThreshold, ComparesOnly)])
def test_stashed_tensors_that_nothing_differentiates(
    pair: tuple[type[nn.Module], type[nn.Module]], checkpoint: str
) -> None:
    # AssertionError in the backward: no gradient came back through the portal.
    module = nn.Sequential(pair[0](), nn.Linear(4, 4), nn.Tanh(), pair[1]())
    check_like_plain(module, torch.randn(7, 4), 7, [1, 1, 1, 1], checkpoint)


class TiedHead(nn.Module):
    """Scores by the embedding's own weights."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


@pytest.mark.parametrize("checkpoint", MODES)
def test_layers_that_share_a_parameter(checkpoint: str) -> None:
    # Gradients of one copy were lost where stages had devices of their own.
    embedding = nn.Embedding(9, 4)
    module = nn.Sequential(nn.Identity(), embedding, nn.Tanh(), TiedHead(embedding), nn.Tanh())
    check_like_plain(module, torch.randint(9, (7,)), 7, [1, 3, 1], checkpoint)
    with pytest.raises(ConfigurationError, match=r"'1.weight'.*'3.weight'|'3.*'.*'1.*'"):
        wrap(module, balance=[3, 2])
    assert wrap(module, num_stages=2).balance in ([1, 4], [4, 1])


def test_a_stash_without_a_pop_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"no module declared 'long' as poppable"):
        wrap(nn.Sequential(Stashes(), nn.Tanh()))


def batch_normalised() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.BatchNorm1d(4, dtype=torch.float64), nn.Linear(4, 2, dtype=torch.float64)
    )


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_deferred_batch_norm_on_an_uneven_batch(checkpoint: str, momentum: float | None) -> None:
    # It counted micro-batches asked for, not those there were: a short batch leaked into the next.
    module, plain = batch_normalised(), batch_normalised()
    for layer in (module[0], plain[0]):
        assert isinstance(layer, nn.BatchNorm1d)
        layer.momentum = momentum
    model = wrap(module, num_stages=2, num_microbatches=4, checkpoint=checkpoint)
    for size in (8, 5, 3, 8):
        inputs = torch.randn(size, 4, dtype=torch.float64) * 3 + 1
        plain(inputs)
        model.num_microbatches = min(4, size // 2)
        model(inputs).sum().backward()
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(module.state_dict()[name], buffer, rtol=1e-12, atol=1e-12)
    model.eval()
    plain.eval()
    inputs = torch.randn(6, 4, dtype=torch.float64)
    torch.testing.assert_close(model(inputs), plain(inputs))


def test_batch_norm_is_refreshed_without_gradients() -> None:
    # As torch.optim.swa_utils.update_bn does it.
    module, plain = batch_normalised(), batch_normalised()
    model = wrap(module, num_stages=2, num_microbatches=2)
    inputs = torch.randn(6, 4, dtype=torch.float64)
    with torch.no_grad():
        model(inputs)
        plain(inputs)
    torch.testing.assert_close(module.state_dict(), plain.state_dict())


def test_sync_batch_norm_is_refused() -> None:
    # Deferred batch normalisation turned it into a local one.
    module = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Sequential(nn.SyncBatchNorm(2)))
    with pytest.raises(
        ConfigurationError, match=r"layer '1.0' is a SyncBatchNorm: .* use nn.BatchNorm"
    ):
        wrap(module)


# --- the rest ------------------------------------------------------------------------------------


def test_the_cut_is_the_best_contiguous_one() -> None:
    # Its balancer's slowest stage is up to 1.57 times as slow as the best cut's.
    costs = [1.0, 9.0, 1.0, 1.0, 9.0, 1.0, 1.0, 1.0]
    balance = partition(costs, 3)
    ends = [sum(balance[: k + 1]) for k in range(3)]
    slowest = max(sum(costs[end - n : end]) for end, n in zip(ends, balance, strict=True))
    assert slowest == 11.0


def test_typed_storage_warning_is_not_the_scripts() -> None:
    # tensor.storage() in a copy gives a UserWarning, which fails scripts that treat it as an error.
    script = (
        "import torch, warnings\n"
        "from pipollux_hybrid.engine import PipelineEngine\n"
        "warnings.simplefilter('error')\n"
        "module = torch.nn.Sequential(torch.nn.Linear(2, 2))\n"
        "PipelineEngine(module, [1], [torch.device('cpu')], 'never')\n"
        "torch.empty(0).storage()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_modules_that_would_not_be_run_as_they_are() -> None:
    class OwnForward(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(ConfigurationError, match=r"OwnForward with a forward of its own"):
        wrap(OwnForward(nn.Linear(2, 2)))
    hooked = nn.Sequential(nn.Linear(2, 2))
    hooked.register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigurationError, match=r"module has hooks"):
        wrap(hooked)


def test_a_wrapped_model_is_not_moved() -> None:
    # Layers would leave their stages' devices one and all.
    model = wrap(make_model("mlp"), num_stages=2)
    to = model.to
    for move in (model.cpu, model.cuda, lambda: to("cpu"), lambda: to(device="cpu"), lambda: to(0)):
        with pytest.raises(ConfigurationError, match=r"each stage has a device of its own"):
            move()
    assert next(model.to(torch.float32).parameters()).dtype == torch.float32


# torch.compile itself looks at the gradients of inputs, in a plain nn.Sequential as well.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("checkpoint", MODES)
def test_compiled_layers_keep_their_names_and_gradients(checkpoint: str) -> None:
    # torch.compile puts _orig_mod into the keys of what it wraps.
    module = make_model("mlp", torch.float32)
    plain = copy.deepcopy(module)
    for i in (0, 4, 6):
        module[i] = torch.compile(module[i], backend="aot_eager")
    module[2].compile(backend="aot_eager")
    model = wrap(module, balance=[4, 5], num_microbatches=3, checkpoint=checkpoint)
    assert list(model.state_dict()) == list(plain.state_dict())
    inputs, targets = make_data("mlp", 7, torch.float32)[list(range(7))]
    F.cross_entropy(model(inputs), targets).backward()
    F.cross_entropy(plain(inputs), targets).backward()
    ours = {n.replace("_orig_mod.", ""): g for n, g in gradients(module).items()}
    assert_close(ours, gradients(plain), 1e-6)
    model.load_state_dict(plain.state_dict())
    plain.load_state_dict(model.state_dict())


@pytest.mark.parametrize("checkpoint", MODES)
def test_evaluation_is_the_plain_models(checkpoint: str) -> None:
    # Training mode under no_grad recomputed what nobody would ask for.
    layer = CountsForwards()
    module = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), layer, nn.BatchNorm1d(3))
    plain = copy.deepcopy(module)
    model = wrap(module, num_stages=2, num_microbatches=3, checkpoint=checkpoint)
    inputs = torch.randn(9, 4)
    model.eval()
    plain.eval()
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            torch.testing.assert_close(model(inputs), plain(inputs))
    assert layer.all == 9
    model.train()
    with torch.no_grad():
        assert not model(inputs).requires_grad
    assert layer.all == 12
    assert layer.with_gradients == 3


class Masked(nn.Module):
    """(x, float mask) to (linear x, the very same mask)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, mask = value
        return self.linear(x * mask), mask


class OwnBuffer(nn.Module):
    """Gives a buffer of its own along with its output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("ones", torch.ones(1, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), self.ones


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("balance", [[4], [1, 3], [1, 1, 2]])
def test_a_float_input_handed_on_unchanged(balance: list[int], checkpoint: str) -> None:
    # The caller's tensor became part of the graph, and the recomputation ran into itself.
    module = nn.Sequential(Masked(), Masked(), Masked(), Picks(0))
    mask = torch.rand(8, 4)
    check_like_plain(module, (torch.randn(8, 4), mask), 8, balance, checkpoint, 4)
    assert mask.is_leaf
    assert not mask.requires_grad


@pytest.mark.parametrize("checkpoint", MODES)
def test_a_buffer_handed_out_stays_a_buffer(checkpoint: str) -> None:
    layer = OwnBuffer()
    module = nn.Sequential(layer, Masked(), Picks(0))
    for _ in range(2):
        check_like_plain(module, torch.randn(4, 4), 4, [1, 2], checkpoint, 2)
        module.zero_grad()
        assert layer.ones.is_leaf
        assert not layer.ones.requires_grad


@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
def test_gradients_of_inputs_alone_are_refused_under_recomputation(checkpoint: str) -> None:
    # Parameters' gradients changed as a side effect, without a word.
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    inputs = torch.randn(4, 4, requires_grad=True)
    output = forward(engine(module, [1, 1], checkpoint), inputs, 4, 2)
    with pytest.raises(SynchronizationError, match=r"use checkpoint='never'"):
        torch.autograd.grad(output.sum(), inputs)
    assert not gradients(module)


def test_gradients_of_inputs_alone_without_recomputation() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    inputs = torch.randn(4, 4, requires_grad=True)
    output = forward(engine(module, [1, 1], "never"), inputs, 4, 2)
    (gradient,) = torch.autograd.grad(output.sum(), inputs)
    (expected,) = torch.autograd.grad(module(inputs).sum(), inputs)
    torch.testing.assert_close(gradient, expected)
    assert not gradients(module)


@pytest.mark.parametrize("checkpoint", MODES)
def test_a_second_backward_over_a_retained_graph(checkpoint: str) -> None:
    # IndexError: pop from an empty deque.
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    plain = copy.deepcopy(module)
    inputs = torch.randn(4, 4)
    for model in (plain, engine(module, [2, 1], checkpoint)):
        output = model(inputs) if model is plain else forward(model, inputs, 4, 2)
        output.sum().backward(retain_graph=True)
        output.square().sum().backward()
    assert_close(gradients(module), gradients(plain), 1e-5)


def test_a_second_model_in_a_process_is_refused() -> None:
    # "a state named 'model.pt' exists already".
    wrap(make_model("mlp"))
    with pytest.raises(ConfigurationError, match=r"a job has one pipeline"):
        wrap(make_model("mlp"))


def test_zero_grad_of_the_model_keeps_what_was_gathered() -> None:
    # It threw away the gradients of accumulation steps.
    module, plain = make_model("mlp"), make_model("mlp")
    data = make_data("mlp", 16)
    loader = AdaptiveDataLoader(data, batch_size=8)
    loader.autoscale_batch_size(8, (1, 2), gradient_accumulation=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = HybridParallel(module, optimizer, num_microbatches=2)
    for inputs, targets in loader:
        model.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for start in (0, 8):
        inputs, targets = data[list(range(start, start + 8))]
        plain_optimizer.zero_grad()
        F.cross_entropy(plain(inputs), targets).backward()
        plain_optimizer.step()
    assert_close(dict(module.state_dict()), dict(plain.state_dict()), 1e-12)
