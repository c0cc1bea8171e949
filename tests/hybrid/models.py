"""Small models and data, and the plain training that pipelines are compared with."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipollux_hybrid import Namespace, pop, skippable, stash


class Residual(nn.Module):
    """Attention over a short sequence, [batch, length, width] to the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mix(self.norm(x)).chunk(3, dim=-1)
        mixed: Tensor = x + self.out(F.scaled_dot_product_attention(query, key, value))
        return mixed


def mlp() -> nn.Sequential:
    """Five linear layers: inputs [batch, 6], outputs [batch, 3]."""
    sizes = [6, 10, 10, 8, 8]
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 3))


def transformer() -> nn.Sequential:
    """Integer inputs [batch, 6], outputs [batch, 3]."""
    return nn.Sequential(
        nn.Embedding(16, 8), Residual(8), Residual(8), nn.Flatten(), nn.Linear(48, 3)
    )


def convolutional() -> nn.Sequential:
    """Inputs [batch, 6] seen as an image of 2 x 3, outputs [batch, 3]."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 4, 1),
        nn.Flatten(),
        nn.Linear(24, 3),
    )


@skippable(stash=["skip"])
class Widen(nn.Module):
    """A convolution that keeps its input for later, [batch, 4, 2, 3] to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Iterator[object]:
        yield stash("skip", x)
        return self.conv(x)


@skippable(pop=["skip"])
class Narrow(nn.Module):
    """Takes that input in again, beside what came of it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Iterator[object]:
        skipped = yield pop("skip")
        return self.conv(torch.cat([x, skipped], dim=1))


def unet() -> nn.Sequential:
    """Inputs [batch, 6], outputs [batch, 3]; two skip connections, one within the other."""
    outer, inner = Namespace(), Namespace()
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        Widen().isolate(outer),
        nn.BatchNorm2d(4),
        Widen().isolate(inner),
        nn.Tanh(),
        Narrow().isolate(inner),
        nn.BatchNorm2d(4),
        Narrow().isolate(outer),
        nn.Flatten(),
        nn.Linear(24, 3),
    )


MODELS = {"mlp": mlp, "transformer": transformer, "convolutional": convolutional, "unet": unet}


def make_model(name: str, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """A model with the same parameters at every call."""
    torch.manual_seed(7)
    return MODELS[name]().to(dtype)


def make_data(name: str, size: int, dtype: torch.dtype = torch.float64) -> TensorDataset:
    """Inputs [size, 6] and classes [size]."""
    generator = torch.Generator().manual_seed(11)
    if name == "transformer":
        inputs = torch.randint(16, (size, 6), generator=generator)
    else:
        inputs = torch.randn(size, 6, generator=generator, dtype=torch.float64).to(dtype)
    return TensorDataset(inputs, torch.randint(3, (size,), generator=generator))


def freeze_statistics(module: nn.Module) -> None:
    """Have batch normalisation use its running statistics, which do not depend on the batch."""
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.eval()


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all gradients by name, on the CPU."""
    named = module.named_parameters()
    return {n: p.grad.to("cpu", copy=True) for n, p in named if p.grad is not None}


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, on the CPU."""
    return {name: tensor.cpu() for name, tensor in module.state_dict().items()}


def plain_training(
    module: nn.Sequential,
    optimizer: torch.optim.Optimizer,
    data: TensorDataset,
    batches: Sequence[Sequence[int]],
) -> list[dict[str, Tensor]]:
    """Train on whole batches without any parallelism; the gradients of each step."""
    history = []
    for indices in batches:
        inputs, targets = data[list(indices)]
        optimizer.zero_grad()
        F.cross_entropy(module(inputs), targets).backward()
        history.append(gradients(module))
        optimizer.step()
    return history


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    """Fail unless both hold the same tensors up to a relative tolerance."""
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(
            ours[name], tensor, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
