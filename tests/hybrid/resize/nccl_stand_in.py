"""Collectives that behave like NCCL's, over gloo, on tensors of the CPU.

No test could see on a CPU that a program relies on something that holds for gloo alone. So the
tests of resizes, deaths and faults run over this as well (`over` in conftest.py):

* ``wait()`` of a collective returns at once: only the queue of the "device" waits for it. Until the
  host has waited for that queue, by the fence of :class:`StandIn`, the results are garbage: a
  program that uses them earlier fails. The queue goes on beside collectives nobody has waited for.
* The first collective of a group makes its communicator, and the first message from one process to
  another connects both. The host waits there for the others, in a lock that an abort needs, and
  raises after ``$TORCH_NCCL_NONBLOCKING_TIMEOUT`` seconds.
* A collective with a process that is gone never ends: gloo's error is swallowed.
* ``abort()`` ends everything queued with garbage, and nothing raises. A collective launched on an
  aborted group raises.
* ``shutdown()`` waits for processes that do not call it, unless an abort has ended before.

Messages between two processes are an exception: ``wait()`` delivers them, as programs compute with
them right away, in the order of the device's queue. After an abort they are garbage, too. Tensors
of integers go by gloo alone: they stand for tensors on the CPU, for which a group has gloo.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipollux_hybrid.job import device_groups
from pipollux_hybrid.sync import reducer

HANGS = 600.0
"""Seconds for which something hangs that would hang forever, so that no test does."""
STAND_IN = {"BACKEND": "stand-in", "PIPOLLUX_ELASTIC_NCCL": "1"}
"""The environment of scripts that call :func:`backend` and are to use it."""
PATIENCE = timedelta(seconds=600)
Run = Callable[[Any, list[Tensor]], Any]
"""Begins a collective on a group of gloo's."""
_queued: list[Queued] = []
"""What the queue of the device waits for, and has not delivered yet, of all groups."""


class Queued(dist._Work):
    """A collective of the device: its results appear when the host waits for the queue after it."""

    def __init__(self, group: Group, run: Run, tensors: Sequence[Tensor]):
        super().__init__()
        self.group, self.run, self.tensors = group, run, list(tensors)
        self.contents = [tensor.detach().clone() for tensor in tensors]
        self.finished = threading.Event()
        self.delivered = False
        self.future: torch.futures.Future[Any] = torch.futures.Future()

    def end(self) -> None:
        """It has run, or was aborted: in the queue the next one's turn comes."""
        self.finished.set()
        self.future.set_result(self.tensors)

    def deliver(self) -> None:
        self.delivered = True
        for tensor, content in zip(self.tensors, self.contents, strict=True):
            with torch.no_grad():
                tensor.detach().copy_(content)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # noqa: ARG002  # torch's name
        if self not in _queued and not self.delivered:
            _queued.append(self)
        return True

    def is_completed(self) -> bool:
        return self.finished.is_set()

    def get_future(self) -> torch.futures.Future[Any]:
        return self.future


class Delivered(Queued):
    """One whose results are there when ``wait`` returns."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # noqa: ARG002  # torch's name
        assert self.finished.wait(HANGS), "it hangs: nobody has aborted its group"
        self.deliver()
        return True


def _keep_for_ever(found: object) -> None:
    """Leave a collective that never ends alone: the destructor of its group waits for it."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(found))


def spoil(tensors: Sequence[Tensor]) -> None:
    """Fill tensors with garbage."""
    for tensor in tensors:
        with torch.no_grad():
            tensor.detach().fill_(torch.nan if tensor.is_floating_point() else 77)


class Group(dist.ProcessGroup):
    """A group whose collectives on floating-point tensors are those of a device."""

    def __init__(self, store: Any, rank: int, size: int, gloo: Any) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._store, self.gloo = rank, size, store, gloo
        self.aborted = threading.Event()
        self._own: Any = None
        """Gloo's group for the collectives of the "device", made by the first of them."""
        self._connected: set[str] = set()
        """What has been waited for: the communicator, and each direction between two processes."""
        self._connecting = threading.Lock()
        self._todo: queue.SimpleQueue[Queued | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def getBackendName(self) -> str:  # noqa: N802  # as torch calls it
        return device_groups.BACKEND

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    # --- collectives -----------------------------------------------------------------------------

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        args = () if options is None else (options,)
        if not isinstance(tensors, list):
            tensors = [tensors]
        if not tensors[0].is_floating_point():
            return self.gloo.allreduce(tensors, *args)
        return self._launch(lambda group, x: group.allreduce(x, *args), tensors)

    def broadcast(self, tensors: Any, options: Any) -> Any:
        if not isinstance(tensors, list):
            tensors = [tensors]
        if not tensors[0].is_floating_point():
            return self.gloo.broadcast(tensors, options)
        return self._launch(lambda group, x: group.broadcast(x, options), tensors)

    def allgather(self, outputs: Any, inputs: Any, _options: Any = None) -> Any:
        if not inputs[0].is_floating_point():
            return self.gloo.allgather(outputs, inputs)
        mine = inputs[0].detach().clone()
        return self._launch(lambda group, x: group.allgather([x], [mine]), outputs[0])

    def barrier(self, _options: Any = None) -> Any:
        return self.gloo.barrier()

    def send(self, tensors: Any, rank: int, tag: int = 0) -> Any:
        self._check()
        self._connect(f"{self._rank}-to-{rank}", [self._rank, rank])
        return self.gloo.send(tensors, rank, tag)

    def recv(self, tensors: Any, rank: int, tag: int = 0) -> Any:
        # Not behind the collectives in the queue: NCCL has a communicator for each pair.
        self._check()
        self._connect(f"{rank}-to-{self._rank}", [self._rank, rank])
        under_way = self.gloo.recv(tensors, rank, tag)  # messages arrive in this order
        work = Delivered(self, lambda _group, _tensors: under_way, tensors)
        work.contents = [tensor.detach() for tensor in tensors]
        threading.Thread(target=self._receive, args=(work, under_way), daemon=True).start()
        return work

    def _receive(self, work: Queued, under_way: Any) -> None:
        try:
            under_way.wait()
        except RuntimeError:
            self.aborted.wait(HANGS)
            spoil(work.contents)
        work.end()

    def _check(self) -> None:
        if self.aborted.is_set():
            raise RuntimeError("NCCL communicator was aborted")

    def _launch(self, run: Run, tensors: Sequence[Tensor]) -> Queued:
        self._check()
        self._connect("all", range(self._size))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="stand-in", daemon=True)
            self._thread.start()
        work = Queued(self, run, tensors)
        spoil(tensors)
        self._todo.put(work)
        return work

    def _work(self) -> None:
        while (work := self._todo.get()) is not None:
            if self._own is None and not self.aborted.is_set():
                store = dist.PrefixStore("stand-in", self._store)
                with suppress(RuntimeError):  # one of them is gone: the device never says so
                    self._own = dist.ProcessGroupGloo(store, self._rank, self._size, PATIENCE)
            self._run(work, self._own)

    def _connect(self, what: str, ranks: Sequence[int]) -> None:
        """Wait for processes of the group to come here, unless they have before."""
        with self._connecting:
            if what in self._connected:
                return
            end = time.monotonic() + float(os.environ.get("TORCH_NCCL_NONBLOCKING_TIMEOUT", "10"))
            self._store.set(f"stand-in-{what}-{self._rank}", "1")
            while not self._store.check([f"stand-in-{what}-{rank}" for rank in ranks]):
                if time.monotonic() > end:
                    self._store.delete_key(f"stand-in-{what}-{self._rank}")
                    raise RuntimeError("NCCL timeout")
                time.sleep(0.0005)
            self._connected.add(what)

    def _run(self, work: Queued, group: Any) -> None:
        try:
            if self.aborted.is_set() or group is None:
                raise RuntimeError("aborted")
            under_way = work.run(group, work.contents)
            while not under_way.is_completed():
                if self.aborted.wait(0.0005):
                    _keep_for_ever((group, under_way))
                    raise RuntimeError("aborted")
            under_way.wait()
        except RuntimeError:
            self.aborted.wait(HANGS)  # the device never says that a process is gone
            spoil(work.contents)
        work.end()

    # --- ends ------------------------------------------------------------------------------------

    def abort(self) -> None:
        with self._connecting:
            self.aborted.set()
        self._end()

    def shutdown(self) -> None:
        if not self.aborted.is_set() and self._own is not None:
            self._own.barrier().wait()
        self._end()

    def _end(self) -> None:
        self._todo.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(HANGS)
            self._thread = None


class StandIn:
    """What stands for NCCL's part in :mod:`pipollux_hybrid.job.device_groups`."""

    device_type = "cpu"

    def current(self) -> torch.device:
        return torch.device("cpu")

    def enter(self, device: torch.device) -> None:
        assert device.type == "cpu"

    def probe(self, device: torch.device) -> None:
        torch.ones(1, device=device).add_(1.0).item()

    def make(self, store: Any, rank: int, size: int, cpu: Any, _seconds: float) -> Any:
        return Group(dist.PrefixStore("device", store), rank, size, cpu)

    def fence(self, _device: torch.device) -> Callable[[], bool]:
        waits = list(_queued)

        def passed() -> bool:
            if not all(work.finished.is_set() for work in waits):
                return False
            for work in waits:
                if work in _queued:
                    work.deliver()
                    _queued.remove(work)
            return True

        return passed

    def abort(self, group: Any) -> None:
        group.abort()


def backend() -> str:
    """Return the backend of a test's script, by ``$BACKEND``: gloo, NCCL, or this one in its place.
    A job that is not elastic is over gloo.
    """
    name = os.environ.get("BACKEND", "gloo")
    scheduled = os.environ.get("PIPOLLUX_ELASTIC") == "1" and "PIPOLLUX_SCHEDULER_URL" in os.environ
    elastic = bool(os.environ.get("PIPOLLUX_RENDEZVOUS")) or scheduled
    if name != "stand-in" or not elastic:
        return "gloo" if name == "stand-in" else name
    device_groups.BACKENDS["nccl"] = StandIn
    if os.environ.get("MUTANT") == "no host wait":
        reducer.reach = lambda *_: None  # type: ignore[assignment]  # a broken product
    return "nccl"


__all__ = ["STAND_IN", "Group", "StandIn", "backend"]
