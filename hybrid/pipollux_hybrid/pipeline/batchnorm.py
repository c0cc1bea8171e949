"""Batch normalization whose running statistics are those of the whole batch.

In a pipeline, batch normalization normalizes each micro-batch by its own mean and variance, as in
GPipe: waiting for the others would serialize the pipeline. The RUNNING statistics, which evaluation
uses, do not have this restriction. Over all samples of an iteration, of all micro-batches,
accumulation steps and replicas,

    n = Σ nᵢ      mean = Σ nᵢ·mᵢ / n      var = Σ nᵢ·(vᵢ + mᵢ²) / n − mean²

with mᵢ and vᵢ the mean and (biased) variance over the nᵢ values of a channel in micro-batch i. They
update the running statistics once per iteration, the variance times n / (n − 1), as PyTorch does
for a plain batch. Deferring them was torchgpipe's idea, but torchgpipe counts requested
micro-batches, so that a short batch leaks into the next one, and lacks accumulation steps and
replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torchgpipe.checkpoint import is_recomputing

from pipollux_hybrid.errors import ConfigurationError

from .stage import in_pipeline

__all__ = [
    "DeferredBatchNorm1d",
    "DeferredBatchNorm2d",
    "DeferredBatchNorm3d",
    "commit_statistics",
    "defer_statistics",
    "deferred_layers",
    "drop_statistics",
    "uncounted",
]


class _Deferred(nn.modules.batchnorm._BatchNorm):
    _sums: Tensor | None = None
    """n, n·mean and n·(var + mean²) so far, float64, shape [1 + 2·channels]."""
    _counts = True

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # the base class's name for it
        """Normalize a micro-batch, shape [micro-batch, channels, …]; like the plain layer in
        evaluation and outside of a pipeline.
        """
        if not (self.training and in_pipeline()):
            return super().forward(input)
        check: Any = self._check_input_dim  # torch does not annotate it
        check(input)
        if self._counts and not is_recomputing():
            self._track(input.detach())
        return nn.functional.batch_norm(
            input, None, None, self.weight, self.bias, training=True, momentum=0.0, eps=self.eps
        )

    def _track(self, values: Tensor) -> None:
        over = [0, *range(2, values.dim())]
        count = values.numel() // max(values.size(1), 1)
        if not values.is_complex() and values.dtype != torch.float64:
            values = values.float()
        var, mean = torch.var_mean(values, over, correction=0)
        mean, var = mean.double(), var.double()
        sums = torch.cat([mean.new_full((1,), count), count * mean, count * (var + mean.square())])
        self._sums = sums if self._sums is None else self._sums + sums

    def combined_buffers(self) -> list[str]:
        """Return the buffers that this class combines over replicas."""
        return ["running_mean", "running_var", "num_batches_tracked"]

    def take_sums(self, device: torch.device | None = None) -> Tensor:
        """Return the sums so far, shape [1 + 2·channels], and reset them."""
        sums, self._sums = self._sums, None
        if sums is None:
            return torch.zeros(1 + 2 * self.num_features, dtype=torch.float64, device=device)
        return sums

    @torch.no_grad()
    def commit(self, sums: Tensor) -> None:
        """Add the sums of all replicas in an iteration to the running statistics."""
        assert self.running_mean is not None  # noqa: S101  # required for deferring
        assert self.running_var is not None  # noqa: S101  # as above
        assert self.num_batches_tracked is not None  # noqa: S101  # as above
        count = float(sums[0])
        if count == 0:
            return
        mean, square = (sums[1:] / count).to(self.running_mean.device).chunk(2)
        var = (square - mean.square()).clamp_(min=0.0) * (count / max(count - 1.0, 1.0))
        self.num_batches_tracked += 1
        weight = self.momentum
        if weight is None:
            weight = 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
        self.running_var.lerp_(var.to(self.running_var.dtype), weight)


class DeferredBatchNorm1d(_Deferred, nn.BatchNorm1d):
    """:class:`torch.nn.BatchNorm1d` within a pipeline."""


class DeferredBatchNorm2d(_Deferred, nn.BatchNorm2d):
    """:class:`torch.nn.BatchNorm2d` within a pipeline."""


class DeferredBatchNorm3d(_Deferred, nn.BatchNorm3d):
    """:class:`torch.nn.BatchNorm3d` within a pipeline."""


DEFERRED: dict[type[nn.Module], type[_Deferred]] = {
    nn.BatchNorm1d: DeferredBatchNorm1d,
    nn.BatchNorm2d: DeferredBatchNorm2d,
    nn.BatchNorm3d: DeferredBatchNorm3d,
}


def defer_statistics(module: nn.Module) -> list[_Deferred]:
    """Make batch normalization layers defer their running statistics; return them.

    The layers stay the same objects, with their names, parameters and buffers; only their class
    changes to a subclass. A script's own subclasses stay unchanged. Raises a ConfigurationError for
    a SyncBatchNorm, which does not work between stages.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, nn.SyncBatchNorm):
            raise ConfigurationError(
                f"layer {name!r} is a SyncBatchNorm: its collectives within the forward would meet "
                "in another order on each replica; use nn.BatchNorm, whose running statistics are "
                "combined over micro-batches and replicas here"
            )
        deferred = DEFERRED.get(type(layer))
        if deferred is not None and layer.running_mean is not None:
            layer.__class__ = deferred
    return deferred_layers(module)


def deferred_layers(module: nn.Module) -> list[_Deferred]:
    """Return the layers of a module that defer their running statistics."""
    return [layer for layer in module.modules() if isinstance(layer, _Deferred)]


def sum_statistics(
    layers: Sequence[_Deferred], all_reduce_sum: Callable[[list[Tensor]], None]
) -> None:
    """Sum the statistics of an iteration over the replicas, all of which call it together."""
    if not layers:
        return
    devices = [layer.running_mean.device for layer in layers if layer.running_mean is not None]
    sums = [layer.take_sums(device) for layer, device in zip(layers, devices, strict=True)]
    all_reduce_sum(sums)
    for layer, total in zip(layers, sums, strict=True):
        layer._sums = total


def commit_statistics(layers: Sequence[_Deferred]) -> None:
    """Update the running statistics with the sums of an iteration."""
    for layer in layers:
        layer.commit(layer.take_sums())


def drop_statistics(layers: Sequence[_Deferred]) -> None:
    """Discard the forwards since the last commit: their iteration does not count."""
    for layer in layers:
        layer._sums = None


@contextmanager
def uncounted(layers: Sequence[_Deferred]) -> Iterator[None]:
    """Exclude forwards in the body from the statistics: their samples are another replica's."""
    for layer in layers:
        layer._counts = False
    try:
        yield
    finally:
        for layer in layers:
            layer._counts = True
