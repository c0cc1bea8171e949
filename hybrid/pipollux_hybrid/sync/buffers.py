"""Keeps buffers (running statistics, counters, …) the same on all replicas after an iteration.

Each replica's layers see other samples, so buffers that layers change drift apart. As in
DistributedDataParallel, rank 0's values win. A layer with a better way, such as a batch
normalisation that sums over the replicas, lists the buffers that it combines in a method
``combined_buffers()`` and calls :func:`all_reduce_sum`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipollux_hybrid.errors import SynchronizationError
from pipollux_hybrid.job import context
from pipollux_hybrid.job.context import JobContext
from pipollux_hybrid.job.device_groups import reach
from pipollux_hybrid.job.groups import carries_device
from pipollux_hybrid.job.peers import lost_peers

CHUNK_BYTES = 256 * 2**20
"""Size of the chunks in which tensors are broadcast."""


@runtime_checkable
class CombinesBuffers(Protocol):
    """A layer that itself makes some of its buffers equal on all replicas.

    Example::

        class CountingLayer(nn.Module):
            def combined_buffers(self) -> list[str]:
                return ["total"]  # self.total is not to be overwritten by rank 0's
    """

    def combined_buffers(self) -> Iterable[str]:
        """Return the names of these buffers in this layer."""


class BufferSynchronizer:
    """Sets changed buffers to rank 0's at the end of each iteration.

    Every replica adds its :meth:`report` to the iteration totals and gives the sum to
    :meth:`synchronize`, so detecting a change costs no collective.
    """

    def __init__(
        self, module: nn.Module, num_replicas: int, group: dist.ProcessGroup | None = None
    ) -> None:
        self._group = group
        self._layers = [
            (prefix, layer, set(layer.combined_buffers()))
            if isinstance(layer, CombinesBuffers)
            else (prefix, layer, set())
            for prefix, layer in module.named_modules()
        ]
        self._num_replicas = num_replicas
        self._seen = self._versions()

    @classmethod
    def of(cls, ctx: JobContext, module: nn.Module) -> BufferSynchronizer:
        """Return one for the layers of this process."""
        group = None if ctx.mesh is None else ctx.mesh.replicas
        return cls(module, ctx.env.num_replicas, group)

    def rejoin(self, num_replicas: int, group: dist.ProcessGroup | None) -> None:
        """Go on with another number of replicas, which have the same buffers."""
        self._num_replicas, self._group = num_replicas, group
        self._seen = self._versions()

    def report(self) -> list[float]:
        """Return whether a buffer changed since the last synchronization, and the buffers' size."""
        size = float(sum(t.numel() * t.element_size() for _, t in self._buffers()))
        return [float(self._changed()), size, size * size]

    def synchronize(self, total: Sequence[float]) -> None:
        """Broadcast the buffers if ``total``, the sum of all replicas' reports, calls for it.
        Raises a SynchronizationError if their sizes differ between replicas.
        """
        changed, size, square = total
        if not changed:
            return
        # The variance of the sizes, exact up to 2**26 bytes, as they are whole numbers.
        if self._num_replicas * square - size * size > 1e-9 * square:
            largest = max(self._buffers(), key=lambda item: item[1].numel())[0]
            raise SynchronizationError(
                "the buffers take different numbers of bytes on different replicas, so rank 0's "
                f"cannot be taken (the largest here is {largest!r}): register no buffer whose "
                "shape follows the input, or pass broadcast_buffers=False"
            )
        broadcast_tensors([tensor for _, tensor in self._buffers()], self._group)
        self._seen = self._versions()

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        for prefix, layer, own in self._layers:
            if not layer._buffers:  # fast path of every step: most layers have none
                continue
            for name, tensor in layer.named_buffers(recurse=False):
                if name not in own:
                    yield (f"{prefix}.{name}" if prefix else name), tensor

    def _changed(self) -> bool:
        now = self._versions()
        return len(now) != len(self._seen) or any(
            a is not b or version != before
            for (a, version), (b, before) in zip(now, self._seen, strict=True)
        )

    def _versions(self) -> list[tuple[Tensor, int]]:
        """Return tensors with versions: both a change in place and a new tensor show."""
        return [(tensor, tensor._version) for _, tensor in self._buffers()]


def broadcast_tensors(tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Overwrite tensors, of any types, by those of the first process in ``group``; collective."""
    # NCCL sends GPU tensors only, and layers may not be placed yet.
    nccl = carries_device() and torch.cuda.is_available()
    fallback = torch.device("cuda", torch.cuda.current_device()) if nccl else None
    for chunk in _chunks(tensors):
        device = chunk[0].device if chunk[0].is_cuda or fallback is None else fallback
        # As bytes, tensors of all types go together.
        pieces = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in chunk]
        flat = torch.cat(pieces).to(device)
        with _reaching_peers("while taking what replica 0 has"):
            dist.broadcast(flat, group=group, group_src=0)
            reach(flat.device, group)
        if dist.get_rank(group) == 0:
            continue
        parts = flat.split([piece.numel() for piece in pieces])
        with torch.no_grad():
            for tensor, part in zip(chunk, parts, strict=True):
                # A copy starts at an aligned address, as a view of another type needs.
                tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def all_reduce_sum(tensors: Sequence[Tensor]) -> None:
    """Sum tensors over all replicas, in place; collective, with tensors of the same shapes.

    Tensors are floating-point or integer. A replica whose last batch does not count takes part with
    zeros. For layers that keep sums over a batch, see :class:`CombinesBuffers`.
    """
    ctx = context.current()
    among = ctx.mesh.replicas if ctx is not None and ctx.mesh is not None else None
    if not dist.is_initialized() or dist.get_world_size(among) == 1:
        return
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor.detach())
    for group in groups.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in group])
        with _reaching_peers("while summing over replicas"):
            dist.all_reduce(flat, group=among)
            reach(flat.device, among)
        for tensor, part in zip(group, flat.split([t.numel() for t in group]), strict=True):
            tensor.copy_(part.view(tensor.shape))


@contextmanager
def _reaching_peers(when: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise lost_peers(when, error) from error


def _chunks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield non-empty tensors of one device in order, in chunks of about CHUNK_BYTES."""
    devices: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            devices.setdefault(tensor.device, []).append(tensor)
    for group in devices.values():
        chunk: list[Tensor] = []
        size = 0
        for tensor in group:
            chunk.append(tensor)
            size += tensor.numel() * tensor.element_size()
            if size >= CHUNK_BYTES:
                yield chunk
                chunk, size = [], 0
        if chunk:
            yield chunk
