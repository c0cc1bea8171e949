"""Process groups of elastic jobs whose gradients stay on the device, as over NCCL.

A collective of gloo has ended when its ``wait()`` returns. One of NCCL is only queued then, behind
the kernels of the device, and if a peer dies it stays there until its group is aborted. After that
the queue goes on **with invalid sums, and nothing raises**. Hence two rules::

    collectives queued ... work.wait() ... reach(device) ... read the sums, optimizer.step()
                                           │
                                           ├ the host waits until the device is here
                                           └ and raises if a group was aborted meanwhile

* Nothing that came from other processes is used before :func:`reach`, so that a lost replica voids
  an iteration whose parameters are still those of the last step.
* A group makes its communicator of a device in the first collective there, where the host waits for
  all members, and gives up after seconds. So all come to it together: before the first step
  (:func:`connect_first`), and in a new membership before its replicas vote for it
  (:func:`connect`). Nothing else uses the devices then: two groups that launch in different orders
  on two devices would wait for each other forever.

A group has gloo for tensors on the CPU and the device's library for the others. Jobs that are not
elastic keep torch's own groups, and end when a process is lost.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, MutableSet, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

BACKEND = "pipollux"
"""Name of torch's backend for the groups that are formed here."""
POLL_SECONDS = 20e-6
ENDED_GRACE = 5.0
"""Seconds until the groups of a process that has ended are aborted. It may have ended well, after
the last step of the job, whose sums arrive here a little later. Where it has died, the exchange
over gloo that precedes the wait for sums fails at once, so nobody waits for this.
"""
ABORT_SECONDS = 60.0
"""Longest time to wait for the aborts of all groups."""
# Read by torch's watchdog: without these it ends a process some time after an error, also when the
# group was given up and the process trains with others. NCCL's NVLS cannot be aborted. All
# algorithms are connected at once: else the first sum of another size would wait for the others.
_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "10",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_RUNTIME_CONNECT": "0",
}


class DeviceBackend(Protocol):
    """A library of collectives on a device."""

    device_type: str
    """Type of the tensors that it sends, such as ``"cuda"``."""

    def current(self) -> torch.device:
        """Return the device that this thread uses by default."""

    def enter(self, device: torch.device) -> None:
        """Make a device the default of this thread."""

    def probe(self, device: torch.device) -> None:
        """Compute something on a device and wait for it; a RuntimeError if it cannot be used."""

    def make(self, store: Store, rank: int, size: int, cpu: Any, seconds: float) -> Any:
        """Return a ProcessGroup with ``cpu``, gloo's backend, for tensors on the CPU, and without a
        communicator for those on the device. Others may be missing: it waits for nobody.
        """

    def fence(self, device: torch.device) -> Callable[[], bool]:
        """Return a function that tells whether what is queued now is done."""

    def abort(self, group: Any) -> None:
        """End the collectives of a group that :meth:`make` returned; waits for the device."""


class Nccl:
    """NCCL, by the class that all versions of torch from 2.11 on have (``nccl`` is another one from
    2.15 on). Communicators are non-blocking: a blocking one hangs if a peer dies in its making.
    """

    device_type = "cuda"

    def __init__(self) -> None:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)

    def current(self) -> torch.device:
        """The current device is a thread's own."""
        return torch.device("cuda", torch.cuda.current_device())

    def enter(self, device: torch.device) -> None:
        """Set the current device, for functions without a device."""
        torch.cuda.set_device(device)

    def probe(self, device: torch.device) -> None:
        """An error of an earlier kernel, such as an access to memory of a peer that was killed, is
        raised by each later call: CUDA cannot be used any more by this process.
        """
        torch.ones(1, device=device).add_(1.0).item()

    def make(self, store: Store, rank: int, size: int, cpu: Any, seconds: float) -> Any:
        """One group for both, as two plugins of one group would share a slot."""
        options = dist.ProcessGroupNCCL.Options()
        options.config.blocking = 0
        options._timeout = timedelta(seconds=seconds)
        nccl = dist.ProcessGroupNCCL(PrefixStore("device", store), rank, size, options)
        group: Any = dist.ProcessGroup(store, rank, size)
        group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
        kinds = dist.ProcessGroup.BackendType
        group._register_backend(torch.device("cpu"), kinds.GLOO, cpu)
        group._register_backend(torch.device("cuda"), kinds.NCCL, nccl)
        return group

    def fence(self, device: torch.device) -> Callable[[], bool]:
        """An event in the device's current stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return event.query

    def abort(self, group: Any) -> None:
        """It tells the kernels to end, and frees the communicator."""
        group._get_backend(torch.device("cuda")).abort()


class _Current:
    """The library in use by this process."""

    def __init__(self) -> None:
        self.backend: DeviceBackend | None = None
        self.seconds = 0.0
        """Timeout of a collective."""
        self.devices: list[torch.device] = []
        """The devices of this process, in the order of its stages."""
        self.broken = False
        """Whether one of them can no longer be used."""
        self.aborted: MutableSet[Any] = WeakSet()
        """Groups that were aborted: of this membership, and of those that were not entered."""
        self.aborting: list[threading.Thread] = []
        self.lock = threading.Lock()
        """Held while aborts begin, so that no group is in ``aborted`` without its thread."""
        self.timers: list[threading.Timer] = []
        """Aborts of this membership that are to begin later."""


_current = _Current()
_GONE = "its group was aborted, as a process is gone"
BACKENDS: dict[str, Callable[[], DeviceBackend]] = {"nccl": Nccl}


def use(name: str, seconds: float) -> None:
    """Use a library for the gradients of an elastic job, before its first group; ``seconds`` is the
    timeout of a collective. Without a call the groups are those of gloo.
    """
    backend = BACKENDS[name]()
    _current.backend, _current.seconds = backend, seconds
    _current.devices, _current.broken = [backend.current()], False


def place(devices: Sequence[torch.device]) -> str | None:
    """Set the devices of this process's stages, by stage; the first one is the current device.

    Returns:
        Which stages share a device, such as ``"0, 0, 1"``. It must be equal on all replicas, as a
        group has a communicator for each device. None: no group has a part on devices.
    """
    backend = _current.backend
    if backend is None:
        return None
    kind, current = backend.device_type, backend.current()
    placed = [current if x == torch.device(kind) else x for x in devices]
    found = [*dict.fromkeys(placed)]
    _current.devices = [x for x in found if x.type == kind] or _current.devices
    return ", ".join(str(found.index(device)) for device in placed)


def find_broken_device() -> str:
    """Return why a device of this process can no longer be used, in a clause; empty: all can. Then
    groups have no part on the device, and only a new process can train. No collective may be
    pending.
    """
    backend = _current.backend
    for device in _current.devices if backend is not None else ():
        assert backend is not None  # noqa: S101  # there are no devices otherwise
        try:
            backend.probe(device)
        except RuntimeError as error:
            _current.broken = True
            why = str(error).partition("\n")[0].rstrip(".")
            return f"{device} of a surviving replica cannot be used without a new process ({why})"
    return ""


def in_use() -> DeviceBackend | None:
    """Return the library of an elastic job; None: gloo, or torch's own groups."""
    return _current.backend


def forget() -> None:
    """End the use at the end of the job."""
    end_membership()
    _current.backend = None


def end_membership() -> None:
    """Forget the groups of a membership, which are destroyed."""
    for timer in _current.timers:
        timer.cancel()
    _current.timers.clear()
    _current.aborted.clear()


def with_device(store: Store, rank: int, size: int, cpu: Any) -> Any:
    """Return a group for tensors on the CPU and on the device, given gloo's; in any thread."""
    backend = _current.backend
    if backend is None or _current.broken:
        return cpu
    backend.enter(_current.devices[0])
    return backend.make(store, rank, size, cpu, _current.seconds)


def reach(device: torch.device, group: Any = None) -> None:
    """Wait on the host until the device has done what is queued, up to results of ``group``, by
    default torch's.

    Raises:
        RuntimeError: The group was aborted, so that results may be invalid; or a collective took
            longer than its timeout.
    """
    backend = _current.backend
    if backend is None or device.type != backend.device_type or not dist.is_initialized():
        return
    group = dist.group.WORLD if group is None else group
    _wait(backend, device, _current.seconds, [group], lambda: group in _current.aborted)
    if group in _current.aborted:  # the device went on without the others
        raise RuntimeError(_GONE)


def connect_first(gone: Callable[[], bool]) -> None:
    """Make the communicators of all groups of the job's first processes, as :func:`connect` does,
    when all have met: in the first step one may be late, as it compiles its layers.
    """
    if _current.backend is not None:
        connect(_all_groups(), _current.seconds, gone)


def connect(
    groups: Iterable[Any], seconds: float, gone: Callable[[], bool] = lambda: False
) -> None:
    """Make the communicators of groups on each device of this process, in their first collectives;
    all processes of each group call this with their groups in the same order, and have as many
    devices. Raises a RuntimeError if one takes longer, or once a member is ``gone``.
    """
    backend = _current.backend
    if backend is None:
        return
    for group, device in itertools.product(groups, _current.devices):
        count = torch.ones(1, device=device)
        try:
            group.allreduce([count]).wait()
        except RuntimeError:  # the others have not come in time
            _abort(backend, [group])
            raise
        _wait(backend, device, seconds, [group], gone)
        if count.item() != group.size():
            raise RuntimeError(f"{count.item():g} of {group.size()} processes have connected")


def _wait(
    backend: DeviceBackend,
    device: torch.device,
    seconds: float,
    groups: list[Any],
    gone: Callable[[], bool],
) -> None:
    """Wait for the device; abort ``groups`` and raise a RuntimeError if that fails."""
    passed, end = backend.fence(device), time.monotonic() + seconds
    while not passed():
        if gone():
            _abort(backend, groups)
            raise RuntimeError(_GONE)
        if time.monotonic() > end:
            _abort(backend, groups)
            raise RuntimeError(f"a collective on {device} took longer than {seconds:g} s")
        time.sleep(POLL_SECONDS)


def abort(groups: Iterable[Any], *, after: float = 0.0) -> None:
    """Abort groups ``after`` some seconds, unless the membership ends earlier; returns at once."""
    if after > 0.0:
        timer = threading.Timer(after, abort, [list(groups)])
        timer.daemon = True
        timer.start()
        _current.timers.append(timer)
    elif _current.backend is not None:
        _abort(_current.backend, groups)


def abort_all() -> None:
    """Abort the groups that torch knows, and wait for it: destroying one waits for its absent peers
    unless its abort has ended. Raises a RuntimeError if that does not end.
    """
    if _current.backend is None:
        return
    abort(_all_groups())
    end = time.monotonic() + ABORT_SECONDS
    with _current.lock:  # a timer, or the watch over the others, may have begun some of them
        aborting, _current.aborting = _current.aborting, []
    for thread in aborting:
        thread.join(max(end - time.monotonic(), 0.0))
    if any(thread.is_alive() for thread in aborting):
        raise RuntimeError(f"the abort of the device's groups took longer than {ABORT_SECONDS:g} s")


def _all_groups() -> list[Any]:
    world = getattr(dist.distributed_c10d, "_world", None)
    return [x for x in getattr(world, "pg_map", ()) if is_ours(x)]


def is_ours(group: Any) -> bool:
    """Return whether a group has a part on the device."""
    return _current.backend is not None and dist.get_backend(group) == BACKEND


def _abort(backend: DeviceBackend, groups: Iterable[Any]) -> None:
    """In threads: each abort waits for the kernels of all groups, so all have to know first."""
    with _current.lock:
        _current.aborting[:] = [thread for thread in _current.aborting if thread.is_alive()]
        new = [group for group in groups if group not in _current.aborted]
        _current.aborted |= WeakSet(new)
        for group in new:
            thread = threading.Thread(
                target=_abort_one, args=(backend, group), name="pipollux-abort", daemon=True
            )
            thread.start()
            _current.aborting.append(thread)


def _abort_one(backend: DeviceBackend, group: Any) -> None:
    with suppress(RuntimeError):  # it was aborted before
        backend.abort(group)
