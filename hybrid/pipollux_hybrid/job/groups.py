"""Collectives among the replicas of one membership.

The first group of a job is torch's own. When replicas join or leave, another one is formed in the
background while the old one is in use, and takes its place between two steps; torch's functions for
that (``init_process_group``, ``new_group``) belong to the main thread and to one world. So groups
are formed here from a store, and the one that carries gradients becomes torch's default group: a
script that calls ``torch.distributed`` itself goes on as before, with the new ranks.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Sequence, Set
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from .connections import new_connections

__all__ = [
    "ReplicaGroup",
    "abort_nccl",
    "become_default",
    "carrier_of",
    "form_group",
    "held_groups",
    "make_known",
]

BACKEND = "pipollux"
"""Name by which torch knows the groups that are formed here."""
_made: list[Any] = []
"""The groups that torch knows by this, the newest last: the default one is the first."""


# A group that is garbage waits for threads when it is destroyed. A forked process, as a worker of a
# loader is, has none of its parent's and would wait for ever: it leaves its garbage alone. Python
# itself may collect in the child before any hook of ours, so the freeze comes before the fork.
os.register_at_fork(before=gc.freeze, after_in_parent=gc.unfreeze)


class ReplicaGroup:
    """Collectives on CPU tensors among some replicas.

    Args:
        process_group: What torch made: a ``ProcessGroup``, or one of its backends.
        size: Number of replicas.
        connections: The kernel's names of its connections, where they are known.
    """

    def __init__(self, process_group: Any, size: int, connections: Set[str] = frozenset()) -> None:
        self.process_group = process_group
        self.size = size
        self.connections = connections

    def all_reduce(self, tensor: torch.Tensor, timeout: float | None = None) -> None:
        """Sum a tensor over the replicas, in place.

        Args:
            tensor: Of the same shape on all.
            timeout: Seconds to wait; None: the group's.

        Raises:
            RuntimeError: A replica is gone, or too slow.
        """
        _wait(self.process_group.allreduce([tensor]), timeout)

    def all_gather(self, tensor: torch.Tensor, timeout: float | None = None) -> list[torch.Tensor]:
        """Return one tensor of equal shape of every replica, in the order of ranks.

        Args:
            tensor: Of the same shape on all.
            timeout: Seconds to wait; None: the group's.

        Raises:
            RuntimeError: A replica is gone, or too slow.
        """
        work, everyone = self.start_all_gather(tensor)
        _wait(work, timeout)
        return everyone

    def start_all_gather(self, tensor: torch.Tensor) -> tuple[Any, list[torch.Tensor]]:
        """Begin an :meth:`all_gather`; return torch's work, and what it fills."""
        everyone = [torch.empty_like(tensor) for _ in range(self.size)]
        return self.process_group.allgather([everyone], [tensor]), everyone

    def all_gather_bytes(self, content: bytes, timeout: float | None = None) -> list[bytes]:
        """Return bytes of any length of every replica, in the order of ranks.

        Args:
            content: This replica's.
            timeout: Seconds to wait; None: the group's.

        Raises:
            RuntimeError: A replica is gone, or too slow.
        """
        sizes = [int(size) for size in self.all_gather(torch.tensor([len(content)]), timeout)]
        padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
        padded[: len(content)] = torch.frombuffer(bytearray(content + b"\0"), dtype=torch.uint8)[
            :-1
        ]
        everyone = self.all_gather(padded, timeout)
        return [part[:size].numpy().tobytes() for part, size in zip(everyone, sizes, strict=True)]

    def broadcast(self, tensor: torch.Tensor, root: int, timeout: float | None = None) -> None:
        """Overwrite a tensor by that of one replica.

        Args:
            tensor: Of the same shape on all.
            root: That replica's rank.
            timeout: Seconds to wait; None: the group's.

        Raises:
            RuntimeError: A replica is gone, or too slow.
        """
        options = dist.BroadcastOptions()
        options.rootRank = root
        _wait(self.process_group.broadcast([tensor], options), timeout)

    def start_send(self, tensor: torch.Tensor, rank: int) -> Any:
        """Begin to send a contiguous tensor to one replica, which receives it; see :meth:`wait`."""
        return self.process_group.send([tensor], rank, 0)

    def start_receive(self, tensor: torch.Tensor, rank: int) -> Any:
        """Begin to overwrite a contiguous tensor by what one replica sends; see :meth:`wait`.

        What one replica sends another arrives in its order.
        """
        return self.process_group.recv([tensor], rank, 0)

    def wait(self, work: Any, timeout: float | None = None) -> None:
        """Return when something that was begun is done.

        Args:
            work: What :meth:`start_send` or :meth:`start_receive` returned.
            timeout: Seconds to wait; None: the group's.

        Raises:
            RuntimeError: The other replica is gone, or too slow.
        """
        _wait(work, timeout)


def form_group(
    store: Store, name: str, rank: int, size: int, *, patience: float, timeout: float
) -> ReplicaGroup:
    """Form a gloo group; all of its replicas call it, in any thread.

    Args:
        store: Where they find each other.
        name: Of the group; never used before in this store.
        rank: Of this replica in the group.
        size: Number of replicas.
        patience: Seconds to wait for the others to come here.
        timeout: Seconds that later collectives wait.

    Raises:
        RuntimeError: A replica did not come.
    """
    prefixed = PrefixStore(name, store)
    with new_connections() as connections:
        group = dist.ProcessGroupGloo(prefixed, rank, size, timedelta(seconds=patience))
    set_timeout = getattr(group, "set_timeout", None) or group._set_default_timeout
    set_timeout(timedelta(seconds=timeout))
    return ReplicaGroup(group, size, connections)


def held_groups() -> list[Any]:
    """Return torch's groups that :func:`become_default` is about to let go of.

    Closing a group's connections takes some hundredths of a second: whoever holds them may do it
    when nobody waits.
    """
    world = getattr(dist.distributed_c10d, "_world", None)
    return [*_made, *getattr(world, "pg_map", ())]


def carrier_of(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Return where tensors of a device have to be for one process to send them to another.

    NCCL carries nothing that is not on a GPU, and gloo's messages nothing that is on one.

    Args:
        group: Who carries them.
        device: Where they are computed.
    """
    return device if dist.get_backend(group) == "nccl" else torch.device("cpu")


def abort_nccl(gone: Set[int]) -> None:
    """End what waits on a GPU for processes that are gone: its kernels never would.

    Returns at once. What they were to give is not there, and whoever waited for it has to ask who
    is gone.

    Args:
        gone: Their ranks among all.
    """
    world = getattr(dist.distributed_c10d, "_world", None)
    for group in list(getattr(world, "pg_map", ())):
        if dist.get_backend(group) == "nccl" and gone & {*dist.get_process_group_ranks(group)}:
            # Side by side: the end of one waits for all kernels of the GPU, those of others too.
            threading.Thread(target=_abort, args=(group,), daemon=True).start()


def _abort(group: dist.ProcessGroup) -> None:
    with suppress(RuntimeError):  # it was aborted before
        group._get_backend(torch.device("cuda")).abort()


def become_default(group: ReplicaGroup | None, store: Store, name: str, rank: int) -> None:
    """Make a group torch's default one in place of that which is; None: there is none any more.

    Args:
        group: Formed by :func:`form_group`.
        store: Where groups that the script makes later find each other.
        name: Of the membership.
        rank: Of this replica.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    if group is None:
        return
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, lambda *_: _made[-1], devices=["cpu", "cuda"])
    _made[:] = [group.process_group]
    prefixed = PrefixStore(f"{name}-script", store)
    dist.init_process_group(BACKEND, store=prefixed, rank=rank, world_size=group.size)


def make_known(group: ReplicaGroup, ranks: Sequence[int]) -> dist.ProcessGroup:
    """Return a group as one of torch's, for those of its functions that take groups.

    Those alone call it that belong to the group, between two steps, and after `become_default`.

    Args:
        group: Formed by :func:`form_group`.
        ranks: Of its processes among all, growing.
    """
    _made.append(group.process_group)
    known = dist.new_group(list(ranks), backend=BACKEND, use_local_synchronization=True)
    assert isinstance(known, dist.ProcessGroup)  # noqa: S101  # this process belongs to it
    return known


def _wait(work: Any, timeout: float | None) -> None:
    if timeout is None:
        work.wait()
    else:
        work.wait(timedelta(seconds=timeout))
