"""Traps of single layers: in place, failing, dropout, batch normalisation.

Each was measured on torchgpipe 0.0.7 itself; the first lines of a test say what happened there.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipollux_hybrid import ConfigurationError
from tests.hybrid.pipeline.trap_cases import (
    MODES,
    check_like_plain,
    engine,
    forward,
    fresh_context,  # noqa: F401  # a fixture, which pytest finds by its name
    wrap,
)

pytestmark = pytest.mark.usefixtures("threads")


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
@pytest.mark.timeout(240)
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
    said = r"^stage 1 \(cpu\), layer 'decoder' \(Linear\): (addmm: )?mat1 and mat2"
    with pytest.raises(RuntimeError, match=said):
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
    model = wrap(module, num_stages=2, num_microbatches=4, activation_checkpoint=checkpoint)
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
