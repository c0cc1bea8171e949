"""Optimizer state sharded over the replicas, each of which holds that of its own parameters.

Whole parameters are assigned, the largest first, each to the replica with the least state so far.
As this depends only on the wrapped model and the number of replicas, all compute the same
assignment, whenever they joined. The whole state is gathered in host memory, on replica 0 for a
checkpoint and on all replicas for an elastic resize.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipollux_hybrid.errors import ConfigurationError
from pipollux_hybrid.job.context import JobContext
from pipollux_hybrid.job.groups import ReplicaGroup
from pipollux_hybrid.job.peers import lost_peers

from .separate_steps import known, steps_separately

PARCEL = 16 * 2**20
"""Bytes of tensors that are sent in one message; a larger tensor is sent alone."""
LOST = (
    "each replica held the optimizer's state of its own parameters only (shard_optimizer=True), "
    "and that of the lost replica cannot be recovered"
)
Told = list[tuple[int, list[tuple[str, Any]]]]
"""State entries per parameter index; of a tensor, its :class:`_Kind`."""


class _Kind(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    moves: bool
    """Whether it belongs on the parameter's device; else it stays on the host."""


class OptimizerShards:
    """The division of optimizer state among replicas, and the whole state where needed.

    Unless ``wanted``, every replica holds everything. Raises a ConfigurationError if the optimizer
    is not known to step each parameter independently.
    """

    def __init__(
        self, ctx: JobContext, module: nn.Module, optimizer: torch.optim.Optimizer, *, wanted: bool
    ) -> None:
        if wanted:
            _check(optimizer)
        self._context, self._optimizer, self._wanted = ctx, optimizer, wanted
        # Trained parameters first: frozen ones may never have any state.
        order = sorted(module.parameters(), key=lambda p: (not p.requires_grad, -p.nbytes))
        self._parameters = order
        self._owners: tuple[int, dict[nn.Parameter, int]] = (0, {})
        self._whole: dict[nn.Parameter, dict[str, Any]] | None = None
        self._moving: set[tuple[nn.Parameter, str]] = set()
        self.drop()  # some optimizers create state in their constructor

    @property
    def divided(self) -> bool:
        """Whether other replicas hold shards of the state."""
        return self._wanted and self._context.env.num_replicas > 1

    @property
    def rank(self) -> int:
        """The rank of this replica."""
        return self._context.env.rank

    @property
    def group(self) -> ReplicaGroup | None:
        """Group of the processes that hold the same parameters; None for one."""
        mesh = self._context.mesh
        return self._context.control.group if mesh is None else mesh.column

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The same for tensors on the parameters' devices; None: torch's default group."""
        mesh = self._context.mesh
        return None if mesh is None else mesh.replicas

    @property
    def whole(self) -> Mapping[nn.Parameter, dict[str, Any]] | None:
        """The state of all parameters after :meth:`gather`, in host memory; None: not gathered."""
        return self._whole

    def owner(self, parameter: nn.Parameter) -> int:
        """Return the rank of the replica that holds the state of a parameter."""
        size = self._context.env.num_replicas
        if self._owners[0] != size:
            ranks = give_out([p.nbytes for p in self._parameters], size)
            self._owners = size, dict(zip(self._parameters, ranks, strict=True))
        return self._owners[1][parameter]

    def is_own(self, parameter: nn.Parameter) -> bool:
        """Return whether this replica holds the state of a parameter."""
        return not self.divided or self.owner(parameter) == self._context.env.rank

    def drop(self) -> None:
        """Drop the state that other replicas hold."""
        self._whole = None
        if self.divided:
            for parameter in self._parameters:
                if parameter in self._optimizer.state and not self.is_own(parameter):
                    del self._optimizer.state[parameter]

    def rejoin(self) -> None:
        """Keep this replica's new shard of the gathered state after an elastic resize."""
        for parameter, state in (self._whole or {}).items():
            if self.is_own(parameter) and parameter not in self._optimizer.state:
                self._optimizer.state[parameter] = {
                    name: value.to(parameter.device) if (parameter, name) in self._moving else value
                    for name, value in state.items()
                }
        self.drop()

    def gather(self, *, everywhere: bool) -> None:
        """Gather the whole state, valid until the next step, on all replicas or only on replica 0.
        All replicas call it at a step boundary. Raises a PeerLostError if a replica is gone.
        """
        group, rank = self.group, self.rank
        if not self.divided or group is None:
            return
        self.drop()
        description, ours = self._describe()
        content = io.BytesIO()
        torch.save(description, content)
        with _reaching_peers():
            found = group.all_gather_bytes(content.getvalue())
        everyone: list[Told] = [torch.load(io.BytesIO(x), weights_only=True) for x in found]
        receivers = range(group.size) if everywhere else range(1)
        kinds = [[_Kind(*x[1]) for _, s in part for _, x in s if x[0]] for part in everyone]
        tensors = [
            ours if r == rank else [_make(kind) for kind in part] if rank in receivers else []
            for r, part in enumerate(kinds)
        ]
        sizes = [[_size(kind) for kind in part] for part in kinds]
        with _reaching_peers():
            _send_parcels(group, rank, receivers, tensors, [_parcels(part) for part in sizes])
        if rank in receivers:
            self._put_together(everyone, tensors)

    def _describe(self) -> tuple[Told, list[Tensor]]:
        """Return a description of this replica's state, and its tensors in host memory."""
        description: Told = []
        tensors: list[Tensor] = []
        for number, parameter in enumerate(self._parameters):
            if parameter not in self._optimizer.state:
                continue
            values: list[tuple[str, Any]] = []
            for name, value in self._optimizer.state[parameter].items():
                if isinstance(value, Tensor):
                    tensors.append(_without_gaps(value.detach().cpu()))
                    kind = _kind(tensors[-1], moves=value.device.type != "cpu")
                    values.append((name, (True, tuple(kind))))
                else:
                    values.append((name, (False, value)))
            description.append((number, values))
        return description, tensors

    def _put_together(self, everyone: Sequence[Told], tensors: Sequence[Sequence[Tensor]]) -> None:
        found: dict[int, dict[str, Any]] = {}
        for description, given in zip(everyone, tensors, strict=True):
            remaining = iter(given)
            for number, values in description:
                found[number] = {
                    name: next(remaining) if is_tensor else value
                    for name, (is_tensor, value) in values
                }
                self._moving |= {
                    (self._parameters[number], name)
                    for name, (is_tensor, kind) in values
                    if is_tensor and _Kind(*kind).moves
                }
        self._whole = {self._parameters[number]: found[number] for number in sorted(found)}


def give_out(sizes: Sequence[int], num_replicas: int) -> list[int]:
    """Return the owner's rank for each size: the replica with the smallest total so far.

    Example:
        >>> give_out([4, 3, 2, 2, 1], 2)
        [0, 1, 1, 0, 1]
    """
    filled = [0] * num_replicas
    ranks = []
    for size in sizes:
        ranks.append(min(range(num_replicas), key=filled.__getitem__))
        filled[ranks[-1]] += size
    return ranks


def _check(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose step may combine several parameters."""
    if not steps_separately(optimizer):
        raise ConfigurationError(
            f"shard_optimizer=True with {type(optimizer).__name__}, which is not known to step "
            "each parameter by itself: use one of torch.optim's "
            f"{', '.join(kind.__name__ for kind in known())}, or leave shard_optimizer out"
        )


@contextmanager
def _reaching_peers() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise lost_peers("while gathering the optimizer's state", error) from error


def _without_gaps(tensor: Tensor) -> Tensor:
    channels_last = tensor.is_contiguous(memory_format=torch.channels_last)
    return tensor if channels_last else tensor.contiguous()


def _kind(tensor: Tensor, *, moves: bool) -> _Kind:
    return _Kind(tensor.dtype, tuple(tensor.shape), tensor.stride(), moves)


def _make(kind: _Kind) -> Tensor:
    return torch.empty_strided(kind.shape, kind.stride, dtype=kind.dtype)


def _size(kind: _Kind) -> int:
    return torch.Size(kind.shape).numel() * kind.dtype.itemsize


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor without gaps in memory order."""
    flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8)


def _parcels(sizes: Sequence[int]) -> list[list[int]]:
    parcels: list[list[int]] = []
    filled = PARCEL
    for number, size in enumerate(sizes):
        if size == 0:
            continue
        if filled + size > PARCEL:
            parcels.append([])
            filled = 0
        parcels[-1].append(number)
        filled += size
    return parcels


def _send_parcels(
    group: ReplicaGroup,
    rank: int,
    receivers: Sequence[int],
    tensors: Sequence[Sequence[Tensor]],
    parcels: Sequence[Sequence[Sequence[int]]],
) -> None:
    """Send this replica's tensors to the receivers; receivers receive those of the others.

    ``tensors`` has, for each replica, its own tensors or buffers for them, and ``parcels`` the
    indices of the tensors of each message.
    """
    for turn in range(max(map(len, parcels))):
        under_way: list[tuple[Any, Tensor, list[Tensor]]] = []
        for source in range(group.size) if rank in receivers else ():
            if source != rank and turn < len(parcels[source]):
                views = [_bytes(tensors[source][number]) for number in parcels[source][turn]]
                direct = len(views) == 1
                room = views[0] if direct else torch.empty(sum(map(len, views)), dtype=torch.uint8)
                work = group.start_receive(room, source)
                under_way.append((work, room, [] if direct else views))
        if turn < len(parcels[rank]):
            views = [_bytes(tensors[rank][number]) for number in parcels[rank][turn]]
            content = views[0] if len(views) == 1 else torch.cat(views)
            others = [receiver for receiver in receivers if receiver != rank]
            under_way += [(group.start_send(content, other), content, []) for other in others]
        for work, content, views in under_way:
            group.wait(work)
            parts = content.split([len(view) for view in views]) if views else ()
            for view, part in zip(views, parts, strict=True):
                view.copy_(part)
