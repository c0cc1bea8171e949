"""The optimizer's step with sharded state: each replica steps its own parameters and sends them.

Gradients are averaged on all replicas as without sharding, so that clipping, the noise and a
GradScaler see them whole. Within the step the gradients of other replicas' parameters are hidden,
so that the optimizer neither steps these nor creates state for them. The operations and numbers are
those without sharding, so results are bitwise equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipollux_hybrid.checkpoint.optimizer_shards import LOST, OptimizerShards
from pipollux_hybrid.errors import PeerLostError
from pipollux_hybrid.job.device_groups import reach
from pipollux_hybrid.job.peers import lost_peers

SMALL = 1 << 18
"""Bytes below which tensors are sent together, which costs two copies, instead of one by one."""


class ShardedStep:
    """Steps an optimizer whose state is sharded over the replicas."""

    def __init__(self, optimizer: torch.optim.Optimizer, shards: OptimizerShards) -> None:
        self._optimizer = optimizer
        self._shards = shards
        self._hidden: list[tuple[nn.Parameter, Tensor]] = []

    @property
    def active(self) -> bool:
        """Whether other replicas step some of the parameters."""
        return self._shards.divided

    def step(self, step: Callable[[], Any]) -> Any:
        """Call the optimizer's own ``step``; all replicas call it.

        The script's hooks see the same as without sharding: all gradients before and after the
        step, and all stepped parameters after it. Raises a PeerLostError if a replica is gone.
        """
        if not self.active:
            return step()
        self._shards.drop()
        optimizer = self._optimizer
        hide = optimizer.register_step_pre_hook(lambda *_: self._hide())
        show = optimizer.register_step_post_hook(lambda *_: self._finish())
        hooks = optimizer._optimizer_step_post_hooks
        for number in [x for x in hooks if x != show.id]:
            hooks[number] = hooks.pop(number)  # the script's hooks run after it
        try:
            return step()
        finally:
            hide.remove()
            show.remove()
            self._show()

    def exchange(
        self, make: Callable[[nn.Parameter], Tensor | None], known: Mapping[nn.Parameter, Tensor]
    ) -> dict[nn.Parameter, Tensor]:
        """Return one tensor per parameter, created by its owner, except ``known`` ones; all
        replicas call it. ``make`` returns as many real numbers as the parameter has, or None.
        Raises a PeerLostError if a replica is gone.
        """
        asked = [p for p in self._parameters() if p not in known]
        made = {p: x for p in asked if self._shards.is_own(p) and (x := make(p)) is not None}
        flags = torch.tensor([p in made for p in asked], dtype=torch.float32)
        anywhere = self._any(flags)
        there = [p for p, found in zip(asked, anywhere, strict=True) if found]
        tensors = {p: made[p] if p in made else torch.empty_like(_real(p)) for p in there}
        self._send([(tensors[p], self._shards.owner(p)) for p in there])
        return tensors

    def _any(self, flags: Tensor) -> list[float]:
        group = self._shards.group
        if group is not None and len(flags):
            try:
                group.all_reduce(flags)
            except RuntimeError as error:
                raise _lost("while exchanging the weights of squares", error) from error
        found: list[float] = flags.tolist()
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
        # This condition is equal on all replicas.
        stepped = [p for p in self._parameters() if p.requires_grad or p.grad is not None]
        self._send([(_real(p), self._shards.owner(p)) for p in stepped])

    def _send(self, tensors: Sequence[tuple[Tensor, int]]) -> None:
        """Overwrite each real tensor, of equal shape on all replicas, with its owner's."""
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
            for device in {flat.device for _, flat, _ in flats}:
                reach(device, group)
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
    assert work is not None  # noqa: S101  # async_op=True
    return work


def _lost(when: str, error: RuntimeError) -> PeerLostError:
    why = f"The surviving replicas cannot continue without a restart: {LOST}"
    return PeerLostError(f"{lost_peers(when, error)} {why}")


def _real(tensor: Tensor) -> Tensor:
    """Return a view without autograd, with complex numbers as pairs of real ones."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
