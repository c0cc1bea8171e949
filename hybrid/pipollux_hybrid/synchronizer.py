"""Averaging gradients over the replicas, stage by stage, while earlier stages still compute.

DistributedDataParallel cannot do this: it expects each gradient once per backward, where GPipe with
recomputation delivers one per micro-batch, and it loses gradients without a word when the number of
micro-batches falls. So gradients are counted here. A stage's gradients are final when each of its
parameters has been reached once for every recomputed micro-batch, plus once if the rest (all
micro-batches that are not recomputed) share one pass; then its all-reduce starts, in the order K-1
… 0 in which stages finish their backward. Whatever is still out at the end of the backward, because
a layer was not used, is sent then.

Every gradient counts by its samples. With n_ra samples and mean gradient g_ra on replica r in
accumulation step a, parameters end up with

    Σ_ra n_ra g_ra / Σ_ra n_ra

which is the gradient of the mean loss over the whole batch, also when shares differ by a sample or
a replica has none in the last batch of an epoch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from .errors import SynchronizationError
from .noise import NormSum

__all__ = ["GradientSynchronizer", "SyncResult"]

TAIL = 3
"""Numbers that travel behind a stage's gradients: samples, Σ n²/b |c|², estimates."""


@dataclass(frozen=True)
class SyncResult:
    """What one synchronisation found out on the way."""

    batch_size: int
    """B: samples behind the averaged gradients, over all replicas and accumulation steps."""
    num_estimates: int
    """J: independent gradient estimates among them."""
    estimate_sqr: float
    """S of :mod:`pipollux_hybrid.noise`."""
    sync_time: float
    """Seconds waited for other replicas after the last gradient was final."""


@dataclass
class _Stage:
    """Gradient bookkeeping of one stage."""

    index: int
    named: list[tuple[str, nn.Parameter]]
    hooked: set[nn.Parameter] = field(default_factory=set)
    trainable: list[nn.Parameter] = field(default_factory=list)
    missing: int = 0
    arrivals: dict[nn.Parameter, int] = field(default_factory=dict)
    sqr: NormSum = field(default_factory=NormSum)
    buffer: Tensor | None = None
    work: dist.Work | None = None
    launched: bool = False


class GradientSynchronizer:
    """Averages the gradients of a pipeline over all replicas.

    Args:
        stages: Named parameters of each stage.
        num_replicas: Number R of replicas; with one nothing travels.
        preconditioner: Weights of a parameter's squares in norms (Adam's geometry), or None.
        on_gradient: Called as (stage index) whenever a parameter of the stage received a gradient.
        on_finished: Called at the end of each backward, with the result if it synchronised.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[tuple[str, nn.Parameter]]],
        *,
        num_replicas: int,
        preconditioner: Callable[[nn.Parameter], Tensor | None],
        on_gradient: Callable[[int], None],
        on_finished: Callable[[SyncResult | None], None],
    ) -> None:
        self._stages = [_Stage(index, list(named)) for index, named in enumerate(stages)]
        self._num_replicas = num_replicas
        self._preconditioner = preconditioner
        self._on_gradient = on_gradient
        self._on_finished = on_finished
        self._lock = threading.Lock()
        self._sizes: list[int] = []
        self._synchronize = True
        self._weighted = True
        self._callback_queued = True
        self._fresh = True
        self._samples = 0
        self._estimates = 0
        self._unit = 0
        self._counted = True
        self._measured = True

    def begin(
        self,
        sizes: Sequence[int],
        num_recomputed: int,
        *,
        counted: bool,
        synchronize: bool,
        weighted: bool,
        measured: bool,
    ) -> None:
        """Prepare for the backward of a batch that is about to go forward.

        Args:
            sizes: Samples of each micro-batch.
            num_recomputed: How many of them are recomputed in the backward.
            counted: Whether the samples count; a batch that does not adds nothing.
            synchronize: Whether this backward ends an iteration.
            weighted: Whether accumulation steps are averaged by their samples (else summed, as
                plain PyTorch does).
            measured: Whether norms are taken for the noise; the same throughout an iteration.
        """
        passes = num_recomputed + (num_recomputed < len(sizes))
        # Micro-batches run backward last one first; those not recomputed arrive as one.
        rest = sum(sizes[num_recomputed:])
        self._sizes = ([rest] if rest else []) + list(reversed(sizes[:num_recomputed]))
        if self._fresh:
            self._fresh = False
            self._samples = self._estimates = self._unit = 0
            for stage in self._stages:
                stage.sqr.clear()
        self._synchronize, self._weighted, self._counted = synchronize, weighted, counted
        self._measured = measured and counted
        self._callback_queued = False
        for stage in self._stages:
            self._prepare(stage, passes)
        if counted:
            self._reweigh(sum(sizes))
            self._estimates += passes

    def start_backward(self, gradient: Tensor) -> Tensor | None:
        """Hook for the output of the pipeline: the backward begins with its gradient."""
        if not self._callback_queued:
            self._callback_queued = True
            Variable._execution_engine.queue_callback(self._finish)
        # A batch that does not count leaves zeros everywhere, and its hooks all the same.
        return None if self._counted else torch.zeros_like(gradient)

    def _prepare(self, stage: _Stage, passes: int) -> None:
        stage.trainable = [p for _, p in stage.named if p.requires_grad]
        for parameter in stage.trainable:
            if parameter not in stage.hooked:
                stage.hooked.add(parameter)
                parameter.register_hook(self._norm_hook(stage, parameter))
                parameter.register_post_accumulate_grad_hook(self._arrival_hook(stage))
        stage.missing = passes * len(stage.trainable)
        stage.arrivals = {}
        stage.launched = False

    def _reweigh(self, num_samples: int) -> None:
        """Bring gradients kept so far to the unit of this accumulation step.

        Kept gradients stand for Σ n g / unit. With the unit set to the coming step's n, that step's
        mean gradient adds with the right weight by itself.
        """
        if self._weighted and self._unit not in (0, num_samples):
            for stage in self._stages:
                for parameter in stage.trainable:
                    if parameter.grad is not None:
                        parameter.grad.mul_(self._unit / num_samples)
        self._unit = num_samples
        self._samples = self._samples + num_samples if self._weighted else num_samples

    def _norm_hook(self, stage: _Stage, parameter: nn.Parameter) -> Callable[[Tensor], None]:
        """Adds n²/b |c|² for the contribution c of one pass over b of n samples."""

        def hook(gradient: Tensor) -> None:
            if not self._measured or gradient.is_sparse:
                return
            arrival = stage.arrivals.get(parameter, 0)
            stage.arrivals[parameter] = arrival + 1
            if arrival >= len(self._sizes):
                return
            factor = self._unit**2 / self._sizes[arrival]
            stage.sqr.add(gradient, self._preconditioner(parameter), factor)

        return hook

    def _arrival_hook(self, stage: _Stage) -> Callable[[Tensor], None]:
        def hook(_parameter: Tensor) -> None:
            self._on_gradient(stage.index)
            with self._lock:
                if stage.launched:
                    raise SynchronizationError(
                        f"stage {stage.index} received a gradient after its gradients were sent to "
                        "the other replicas: there was more than one forward before this backward. "
                        "Run all but the last forward and backward under `with model.no_sync():`"
                    )
                stage.missing -= 1
                if stage.missing == 0 and self._synchronize and self._num_replicas > 1:
                    self._launch_ready()

        return hook

    def _launch_ready(self) -> None:
        """Send the stages that are complete; the order is the same on all replicas."""
        for stage in reversed(self._stages):
            if stage.launched:
                continue
            if stage.missing > 0:
                return
            self._launch(stage)

    def _launch(self, stage: _Stage) -> None:
        stage.launched = True
        gradients = [self._dense_gradient(stage, parameter) for parameter in stage.trainable]
        if not gradients:
            return
        dtype = torch.float64 if any(g.dtype == torch.float64 for g in gradients) else torch.float32
        device = gradients[0].device
        weight = float(self._unit) if self._samples > 0 else 0.0
        present = [float(p.grad is not None) for p in stage.trainable]
        total = stage.sqr.total()
        sqr = total if total is not None else torch.zeros((), device=device)
        tail = torch.tensor([self._samples, 0.0, self._estimates, *present], dtype=dtype)
        tail = tail.to(device)
        tail[1] = sqr.to(device)
        flat = torch.cat([g.reshape(-1).to(dtype) for g in gradients])
        stage.buffer = torch.cat([flat.mul_(weight), tail])
        stage.work = dist.all_reduce(stage.buffer, async_op=True)

    def _dense_gradient(self, stage: _Stage, parameter: nn.Parameter) -> Tensor:
        if parameter.grad is None:
            return torch.zeros_like(parameter)
        if parameter.grad.is_sparse:
            name = next(name for name, p in stage.named if p is parameter)
            raise SynchronizationError(
                f"parameter {name!r} of stage {stage.index} has a sparse gradient, which is not "
                "averaged: create its embedding with sparse=False"
            )
        return parameter.grad

    def _finish(self) -> None:
        """End of the backward: send what is left, wait, write the averages back."""
        if not self._synchronize:
            self._on_finished(None)
            return
        self._fresh = True
        if self._num_replicas == 1:
            result = self._finish_alone()
        else:
            with self._lock:
                for stage in reversed(self._stages):
                    if not stage.launched:
                        self._launch(stage)
            result = self._finish_together()
        self._on_finished(result)

    def _finish_alone(self) -> SyncResult:
        if self._weighted and self._unit != self._samples:
            for stage in self._stages:
                for parameter in stage.trainable:
                    if parameter.grad is not None:
                        parameter.grad.mul_(self._unit / self._samples)
        totals = (stage.sqr.total() for stage in self._stages)
        sqr = sum(float(total) for total in totals if total is not None)
        return SyncResult(self._samples, self._estimates, sqr / max(self._samples, 1), 0.0)

    def _finish_together(self) -> SyncResult:
        started = time.perf_counter()
        samples = estimates = sqr = 0.0
        for stage in reversed(self._stages):
            if stage.buffer is None or stage.work is None:
                continue
            _wait(stage)
            count = sum(p.numel() for p in stage.trainable)
            samples, stage_sqr, estimates, *present = stage.buffer[count:].tolist()
            sqr += stage_sqr
            averages = stage.buffer[:count].div_(samples)
            _write_back(stage.trainable, averages, present)
            stage.buffer = stage.work = None
        return SyncResult(
            round(samples),
            round(estimates),
            sqr / max(samples, 1.0),
            time.perf_counter() - started,
        )


def _wait(stage: _Stage) -> None:
    assert stage.work is not None  # noqa: S101  # the caller looked
    try:
        stage.work.wait()
    except RuntimeError as error:
        raise SynchronizationError(
            f"replica {dist.get_rank()} lost its peers while averaging the gradients of stage "
            f"{stage.index}: another replica has ended or hangs; its log says why. ({error})"
        ) from error


def _write_back(parameters: list[nn.Parameter], averages: Tensor, present: list[Any]) -> None:
    offset = 0
    for parameter, replicas in zip(parameters, present, strict=True):
        average = averages[offset : offset + parameter.numel()].view_as(parameter)
        offset += parameter.numel()
        if not replicas:
            continue  # no replica used it: it has no gradient, as in the plain model
        if parameter.grad is None:
            parameter.grad = average.to(parameter.dtype)
        else:
            parameter.grad.copy_(average)
