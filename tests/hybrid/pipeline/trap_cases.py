"""What the tests of GPipe's traps share: a pipeline on the CPU, compared with its plain layers."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from pipollux_hybrid import HybridParallel
from pipollux_hybrid.job import context as contexts
from pipollux_hybrid.pipeline.engine import PipelineEngine
from pipollux_hybrid.pipeline.microbatch import microbatch_sizes
from tests.hybrid.models import assert_close, gradients

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
