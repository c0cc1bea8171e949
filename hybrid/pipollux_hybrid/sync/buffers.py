"""Buffers (running statistics, counters, …) that are the same on all replicas after an iteration.

Each replica's layers see other samples, so buffers that layers change drift apart. As with
DistributedDataParallel rank 0's are taken. Layers that know a better way, such as a batch
normalisation that adds its sums up over the replicas, name the buffers they look after in a method
``combined_buffers()`` and call :func:`all_reduce_sum`.
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
from pipollux_hybrid.job.peers import lost_peers

__all__ = ["BufferSynchronizer", "CombinesBuffers", "all_reduce_sum", "broadcast_tensors"]

CHUNK_BYTES = 256 * 2**20
"""Tensors are broadcast together in chunks of so many bytes."""


@runtime_checkable
class CombinesBuffers(Protocol):
    """A layer that brings some of its buffers to the same values on all replicas by itself.

    Example::

        class CountingLayer(nn.Module):
            def combined_buffers(self) -> list[str]:
                return ["total"]  # self.total is not to be overwritten by rank 0's
    """

    def combined_buffers(self) -> Iterable[str]:
        """Return the names of these buffers in this layer."""


class BufferSynchronizer:
    """Makes changed buffers rank 0's at the end of each iteration.

    Whether any buffer changed on any replica is found out along with the gradients: every replica
    adds its :meth:`report` to what travels anyway, and gives the sum to :meth:`synchronize`.

    Args:
        module: The layers.
        num_replicas: Number R of replicas.
        group: Whose processes have the same layers; None: all.
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
        """Go on with another number of replicas, which have the same buffers.

        Args:
            num_replicas: Number R of them.
            group: Whose processes have the same layers now; None: all.
        """
        self._num_replicas, self._group = num_replicas, group
        self._seen = self._versions()

    def report(self) -> list[float]:
        """Return whether a buffer changed since the last synchronisation, and their sizes."""
        size = float(sum(t.numel() * t.element_size() for _, t in self._buffers()))
        return [float(self._changed()), size, size * size]

    def synchronize(self, total: Sequence[float]) -> None:
        """Bring the buffers together where the reports of all replicas call for it.

        Args:
            total: Sum of the reports of all replicas.

        Raises:
            SynchronizationError: The buffers are not of the same sizes on all replicas.
        """
        changed, size, square = total
        if not changed:
            return
        # The variance of the sizes; they are whole numbers, so it is exact up to 2**26 bytes.
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
            if not layer._buffers:  # at every step, and most layers have none
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
        """Return tensors with their versions: a change in place or a new tensor both show."""
        return [(tensor, tensor._version) for _, tensor in self._buffers()]


def broadcast_tensors(tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Overwrite tensors by rank 0's, those of a device together; every replica calls it.

    Args:
        tensors: Of any types and shapes, the same on all replicas.
        group: Whose processes have them, the first of which gives its own; None: all.
    """
    # NCCL carries nothing that is not on a GPU, and layers may not be placed yet.
    nccl = dist.get_backend() == "nccl"
    fallback = torch.device("cuda", torch.cuda.current_device()) if nccl else None
    for chunk in _chunks(tensors):
        device = chunk[0].device if chunk[0].is_cuda or fallback is None else fallback
        # As bytes all types go together, also those that cannot be added.
        pieces = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in chunk]
        flat = torch.cat(pieces).to(device)
        with _reaching_peers("while taking what replica 0 has"):
            dist.broadcast(flat, group=group, group_src=0)
        if dist.get_rank(group) == 0:
            continue
        parts = flat.split([piece.numel() for piece in pieces])
        with torch.no_grad():
            for tensor, part in zip(chunk, parts, strict=True):
                # A copy begins at an aligned address, which a view of other types needs.
                tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def all_reduce_sum(tensors: Sequence[Tensor]) -> None:
    """Sum tensors over all replicas, in place, those of a device and type together.

    Every replica calls it at the same point with tensors of the same shapes, also one whose last
    batch does not count (with zeros). With one replica it does nothing. For layers that keep sums
    over a batch, see :class:`CombinesBuffers`.

    Args:
        tensors: Floating-point or integer tensors of any shapes.
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
        for tensor, part in zip(group, flat.split([t.numel() for t in group]), strict=True):
            tensor.copy_(part.view(tensor.shape))


@contextmanager
def _reaching_peers(when: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise lost_peers(when, error) from error


def _chunks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield tensors of one device in order, up to a number of bytes, without empty ones."""
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
