"""Collectives among the replicas of one membership.

The first group of a job is torch's own. When replicas join or leave, the next one is formed in the
background while the current one is in use, and replaces it between two steps. Torch's functions for
that (``init_process_group``, ``new_group``) require the main thread and one world, so groups are
formed here from a store, and the one of the gradients becomes torch's default group: a script that
calls ``torch.distributed`` itself continues with the new ranks.
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

from . import device_groups, nccl
from .connections import new_connections
from .device_groups import BACKEND

_made: list[Any] = []
"""The groups registered with torch, the newest last; the first one is the default group."""
_next: list[Any] = []
"""The group that torch is to register next; empty: it is still to be formed, for a script."""
_released: list[Any] = []
"""The groups that a thread is about to close; global, so that no forked process closes them."""


# The destructor of a group waits for its threads. A forked process, such as a worker of a loader,
# has none of its parent's threads and would wait forever, so it must not collect this garbage.
# Python may collect in the child before any hook of ours, so the freeze comes before the fork.
os.register_at_fork(before=gc.freeze, after_in_parent=gc.unfreeze)


class ReplicaGroup:
    """Collectives on CPU tensors of equal shapes among some replicas.

    Timeouts are in seconds, None for the group's own. Methods raise a RuntimeError if a replica is
    gone or too slow. ``process_group`` is a ``ProcessGroup`` of torch, or one of its backends;
    ``connections`` are kernel names, where they are known. ``known`` is the same group for torch's
    functions, with tensors on a device.
    """

    def __init__(
        self,
        process_group: Any,
        size: int,
        connections: Set[str] = frozenset(),
        known: Any = None,
    ) -> None:
        self.process_group = process_group
        self.known = process_group if known is None else known
        self.size = size
        self.connections = connections

    def all_reduce(self, tensor: torch.Tensor, timeout: float | None = None) -> None:
        """Sum a tensor over the replicas, in place."""
        _wait(self.process_group.allreduce([tensor]), timeout)

    def all_gather(self, tensor: torch.Tensor, timeout: float | None = None) -> list[torch.Tensor]:
        """Return the tensor of every replica, in the order of ranks."""
        work, everyone = self.start_all_gather(tensor)
        _wait(work, timeout)
        return everyone

    def start_all_gather(self, tensor: torch.Tensor) -> tuple[Any, list[torch.Tensor]]:
        """Begin an :meth:`all_gather`; return torch's work and its output tensors."""
        everyone = [torch.empty_like(tensor) for _ in range(self.size)]
        return self.process_group.allgather([everyone], [tensor]), everyone

    def all_gather_bytes(self, content: bytes, timeout: float | None = None) -> list[bytes]:
        """Return bytes of any length of every replica, in the order of ranks."""
        sizes = [int(size) for size in self.all_gather(torch.tensor([len(content)]), timeout)]
        return self.all_gather_sized(content, sizes, timeout)

    def all_gather_sized(
        self, content: bytes, sizes: Sequence[int], timeout: float | None = None
    ) -> list[bytes]:
        """Return bytes of every replica, whose known lengths are ``sizes``, in order of ranks."""
        padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
        padded[: len(content)] = torch.frombuffer(bytearray(content + b"\0"), dtype=torch.uint8)[
            :-1
        ]
        everyone = self.all_gather(padded, timeout)
        return [part[:size].numpy().tobytes() for part, size in zip(everyone, sizes, strict=True)]

    def broadcast(self, tensor: torch.Tensor, root: int, timeout: float | None = None) -> None:
        """Overwrite a tensor with that of the replica of rank ``root``."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        _wait(self.process_group.broadcast([tensor], options), timeout)

    def start_send(self, tensor: torch.Tensor, rank: int) -> Any:
        """Begin to send a contiguous tensor to one replica, which receives it; see :meth:`wait`."""
        return self.process_group.send([tensor], rank, 0)

    def start_receive(self, tensor: torch.Tensor, rank: int) -> Any:
        """Begin to receive a contiguous tensor from one replica, in order; see :meth:`wait`."""
        return self.process_group.recv([tensor], rank, 0)

    def abort(self) -> None:
        """End its collectives and release it."""
        if self.known is not self.process_group:
            device_groups.abort([self.known])
        self.process_group.abort()

    def wait(self, work: Any, timeout: float | None = None) -> None:
        """Wait for the result of :meth:`start_send` or :meth:`start_receive`."""
        _wait(work, timeout)


def form_group(
    store: Store,
    name: str,
    rank: int,
    size: int,
    *,
    patience: float,
    timeout: float,
    with_device: bool = False,
) -> ReplicaGroup:
    """Form a gloo group; all of its replicas call it, in any thread.

    ``name`` must be unique in the store. Within ``patience`` seconds all must have called it, or a
    RuntimeError is raised; ``timeout`` is that of later collectives in seconds. ``with_device``: it
    also gets a part for tensors on the device, without a communicator, in jobs that use one.
    """
    prefixed = PrefixStore(name, store)
    with new_connections() as connections:
        group = dist.ProcessGroupGloo(prefixed, rank, size, timedelta(seconds=patience))
    set_timeout = getattr(group, "set_timeout", None) or group._set_default_timeout
    set_timeout(timedelta(seconds=timeout))
    known = device_groups.with_device(prefixed, rank, size, group) if with_device else group
    return ReplicaGroup(group, size, connections, known)


def held_groups() -> list[Any]:
    """Return torch's groups that :func:`leave_default` is about to release, for :func:`release`."""
    world = getattr(dist.distributed_c10d, "_world", None)
    return [*_made, *getattr(world, "pg_map", ())]


def release(groups: list[Any]) -> threading.Thread:
    """Empty a list of groups in the returned thread. The destructor of a group waits for its
    collectives: some hundredths of a second, or, where gloo misses that a connection has ended or a
    collective of the script is pending, until their timeout.
    """
    _released.extend(groups)
    groups.clear()
    thread = threading.Thread(target=_released.clear, name="pipollux-release", daemon=True)
    thread.start()
    return thread


def carrier_of(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Return the device of tensors sent to other processes: NCCL needs GPUs, gloo the CPU."""
    return device if carries_device(group) else torch.device("cpu")


def carries_device(group: dist.ProcessGroup | None = None) -> bool:
    """Return whether a group, by default torch's, sends tensors from a device, and only these."""
    return nccl.sends_cuda(group) or device_groups.in_use() is not None


def abort_device_groups(gone: Set[int], *, ended: bool = False) -> None:
    """Abort groups with lost ranks, whose kernels would wait on the device forever; in an elastic
    job a little later if the processes have ``ended``. Returns at once. The outputs of their
    collectives are invalid, so users must check for lost processes.
    """
    world = getattr(dist.distributed_c10d, "_world", None)
    if device_groups.in_use() is not None:
        known = [x for x in getattr(world, "pg_map", ()) if device_groups.is_ours(x)]
        theirs = [x for x in known if gone & {*dist.get_process_group_ranks(x)}]
        device_groups.abort(theirs, after=device_groups.ENDED_GRACE if ended else 0.0)
        return
    for group in list(getattr(world, "pg_map", ())):
        if nccl.sends_cuda(group) and gone & {*dist.get_process_group_ranks(group)}:
            # In parallel: each abort waits for all kernels of the GPU, including other groups'.
            threading.Thread(target=_abort, args=(group,), daemon=True).start()


def _abort(group: dist.ProcessGroup) -> None:
    with suppress(RuntimeError):  # it was aborted before
        group._get_backend(torch.device("cuda")).abort()


def leave_default() -> None:
    """Leave torch's default group and all others."""
    if dist.is_initialized():
        dist.destroy_process_group()
    _made.clear()
    device_groups.end_membership()


def become_default(group: ReplicaGroup | None, store: Store, name: str, rank: int) -> None:
    """Replace torch's default group by one of :func:`form_group`; None: leave none.

    ``store`` serves groups that the script makes later, ``name`` is that of the membership.
    """
    leave_default()
    if group is None:
        return
    register_backend()
    _made[:] = _next[:] = [group.known]
    prefixed = PrefixStore(f"{name}-script", store)
    dist.init_process_group(BACKEND, store=prefixed, rank=rank, world_size=group.size)


def register_backend() -> None:
    """Make torch know the groups that are formed here, once per process."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _create, devices=["cpu", "cuda"])


def _create(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Return the group to register, or form one for a script that calls ``dist.new_group``."""
    if _next:
        return _next.pop()
    group = dist.ProcessGroupGloo(store, rank, size, timeout)
    _made.append(device_groups.with_device(store, rank, size, group))
    return _made[-1]


def make_known(group: ReplicaGroup, ranks: Sequence[int]) -> dist.ProcessGroup:
    """Register a group with torch, for functions that take a ``ProcessGroup``. Only members of the
    group call it, with its ascending global ranks, between two steps and after
    :func:`become_default`.
    """
    _made.append(group.known)
    _next[:] = [group.known]
    known = dist.new_group(list(ranks), backend=BACKEND, use_local_synchronization=True)
    assert isinstance(known, dist.ProcessGroup)  # noqa: S101  # this process belongs to it
    return known


def _wait(work: Any, timeout: float | None) -> None:
    if timeout is None:
        work.wait()
    else:
        work.wait(timedelta(seconds=timeout))
