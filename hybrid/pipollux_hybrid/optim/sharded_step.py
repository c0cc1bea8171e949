"""The optimizer's step where each replica steps its own parameters, and has the others' sent.

Gradients are averaged on all replicas as ever, so whatever reads them (clipping, the noise, a
GradScaler) sees them whole. Within the step alone those of other replicas' parameters are out of
sight, so that the optimizer neither steps these nor makes state for them; then each replica sends
the parameters it has stepped. The same operations on the same numbers as without: bits are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipollux_hybrid.checkpoint.optimizer_shards import LOST, OptimizerShards
from pipollux_hybrid.errors import PeerLostError
from pipollux_hybrid.job.peers import lost_peers

__all__ = ["ShardedStep"]

SMALL = 1 << 18
"""Bytes below which tensors are sent together, which costs two copies, and else one by one."""


class ShardedStep:
    """Steps an optimizer whose state is divided among the replicas.

    Args:
        optimizer: The optimizer.
        shards: Which parameters are this replica's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, shards: OptimizerShards) -> None:
        self._optimizer = optimizer
        self._shards = shards
        self._hidden: list[tuple[nn.Parameter, Tensor]] = []

    @property
    def active(self) -> bool:
        """Whether other replicas step a part of the parameters."""
        return self._shards.divided

    def step(self, step: Callable[[], Any]) -> Any:
        """Call the optimizer's own ``step``; all replicas do.

        The script's hooks see what they see without: all gradients before and after, and all
        parameters stepped after.

        Raises:
            PeerLostError: A replica is gone.
        """
        if not self.active:
            return step()
        self._shards.drop()
        optimizer = self._optimizer
        hide = optimizer.register_step_pre_hook(lambda *_: self._hide())
        show = optimizer.register_step_post_hook(lambda *_: self._finish())
        hooks = optimizer._optimizer_step_post_hooks
        for number in [x for x in hooks if x != show.id]:
            hooks[number] = hooks.pop(number)  # the script's come after
        try:
            return step()
        finally:
            hide.remove()
            show.remove()
            self._show()

    def exchange(
        self, make: Callable[[nn.Parameter], Tensor | None], known: Mapping[nn.Parameter, Tensor]
    ) -> dict[nn.Parameter, Tensor]:
        """Return one tensor for each parameter, made by the owner; all replicas call it.

        Args:
            make: Makes it, of as many real numbers as the parameter has; None: there is none.
            known: Of which parameters it is not asked for; the same ones on all replicas.

        Raises:
            PeerLostError: A replica is gone.
        """
        asked = [p for p in self._parameters() if p not in known]
        made = {p: x for p in asked if self._shards.is_own(p) and (x := make(p)) is not None}
        told = torch.tensor([p in made for p in asked], dtype=torch.float32)
        anywhere = self._any(told)
        there = [p for p, found in zip(asked, anywhere, strict=True) if found]
        tensors = {p: made[p] if p in made else torch.empty_like(_real(p)) for p in there}
        self._send([(tensors[p], self._shards.owner(p)) for p in there])
        return tensors

    def _any(self, told: Tensor) -> list[float]:
        """Return for each number whether it is above 0 on any replica."""
        group = self._shards.group
        if group is not None and len(told):
            try:
                group.all_reduce(told)
            except RuntimeError as error:
                raise _lost("while telling of the weights of squares", error) from error
        found: list[float] = told.tolist()
        return found

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _hide(self) -> None:
        self._hidden = [
            (p, p.grad)
            for p in self._parameters()
            if p.grad is not None and not self._shards.is_own(p)
        ]
        for parameter, _ in self._hidden:
            parameter.grad = None

    def _show(self) -> None:
        hidden, self._hidden = self._hidden, []
        for parameter, gradient in hidden:
            parameter.grad = gradient

    def _finish(self) -> None:
        self._show()
        # Who is trained, or has a gradient, all replicas know alike.
        stepped = [p for p in self._parameters() if p.requires_grad or p.grad is not None]
        self._send([(_real(p), self._shards.owner(p)) for p in stepped])

    def _send(self, tensors: Sequence[tuple[Tensor, int]]) -> None:
        """Have each tensor be the owner's on all replicas.

        Args:
            tensors: Real ones, of the same shapes on all replicas, and the ranks of their owners.
        """
        rank, group = self._shards.rank, self._shards.process_group
        groups: dict[tuple[int, torch.device, torch.dtype], list[Tensor]] = {}
        under_way = []
        try:
            for tensor, owner in tensors:
                if tensor.nbytes >= SMALL and tensor.is_contiguous():
                    under_way.append(_broadcast(tensor, owner, group))
                elif tensor.numel():
                    groups.setdefault((owner, tensor.device, tensor.dtype), []).append(tensor)
            flats = []
            for (owner, device, dtype), some in groups.items():
                size = sum(tensor.numel() for tensor in some)
                flat = torch.empty(size, dtype=dtype, device=device)
                if owner == rank:
                    torch.cat([tensor.reshape(-1) for tensor in some], out=flat)
                under_way.append(_broadcast(flat, owner, group))
                flats.append((owner, flat, some))
            for work in under_way:
                work.wait()
        except RuntimeError as error:
            raise _lost("while exchanging the parameters that each has stepped", error) from error
        for owner, flat, some in flats:
            if owner != rank:
                parts = flat.split([tensor.numel() for tensor in some])
                pairs = zip(some, parts, strict=True)
                torch._foreach_copy_(some, [part.view(tensor.shape) for tensor, part in pairs])
        for tensor, owner in tensors:
            if owner != rank:
                torch.autograd.graph.increment_version(tensor)


def _broadcast(tensor: Tensor, owner: int, group: dist.ProcessGroup | None) -> dist.Work:
    source = owner if group is None else dist.get_global_rank(group, owner)
    work: dist.Work | None = dist.broadcast(tensor, src=source, group=group, async_op=True)
    assert work is not None  # noqa: S101  # it was asked for
    return work


def _lost(when: str, error: RuntimeError) -> PeerLostError:
    why = f"The replicas that are left cannot go on without a restart: {LOST}"
    return PeerLostError(f"{lost_peers(when, error)} {why}")


def _real(tensor: Tensor) -> Tensor:
    """Return a view of the same numbers that autograd does not follow, complex ones as pairs."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
