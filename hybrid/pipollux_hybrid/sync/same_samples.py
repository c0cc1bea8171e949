"""Warns of loops that give every replica the same samples.

A plain ``DataLoader`` reads its whole data set on every replica; with one seed all replicas train
on the same batches, and more replicas gain nothing. The first batches can be compared. A loop may
shard by itself (a ``DistributedSampler``, an iterable data set), and equal batches may be intended
(synthetic data, overfitting on one batch), so this only warns.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch

from pipollux_hybrid.job.context import JobContext
from pipollux_hybrid.pipeline.microbatch import PyTree, tensors_of
from pipollux_hybrid.pipeline.unloaded import is_loaded
from pipollux_hybrid.warning import warn


class SameSamples:
    """Compares the batches of the first optimizer step outside of adaptive loops; rank 0 warns."""

    def __init__(self, ctx: JobContext) -> None:
        self._context = ctx
        self._digest = 0
        self._pending = ctx.env.num_replicas > 1
        ctx.rejoined.append(self._forget)

    def _forget(self) -> None:
        """Stop comparing: joining replicas did not take part in the first step."""
        self._pending = False

    def note(self, batch: PyTree) -> None:
        """Record a batch that the model trains on."""
        if not self._pending or self._context.batch.micro_step is not None or not is_loaded(batch):
            return
        for tensor in tensors_of(batch):
            data: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            self._digest = zlib.crc32(data, self._digest)

    def compare(self) -> None:
        """Warn once if all replicas train on the same samples; all call it after the same step."""
        if not self._pending or self._context.batch.micro_step is not None:
            return
        self._pending = False
        self._context.control.check()  # no replica may have skipped the step
        everyones = self._context.control.gather(torch.tensor([self._digest]))
        digests = [int(x) for x in everyones[:: self._context.env.processes_per_replica]]
        if self._context.env.leads and self._digest and len(set(digests)) == 1:
            warn(
                f"all {len(digests)} replicas train on the same samples: the batches of their "
                "first step are equal, as a plain DataLoader gives each replica the whole data "
                "set; use pipollux.AdaptiveDataLoader, which divides the samples, or "
                "DataLoader(…, sampler=DistributedSampler(dataset, pipollux.num_replicas(), "
                "pipollux.replica_rank()))",
            )
