"""Jobs as processes of this machine, on virtual nodes.

A virtual node is a name and a number of slots. A slot of a CPU node is a CPU device of one thread;
a slot of a GPU node is one GPU, and the GPU nodes share out the machine's GPUs in the order in
which they are listed. Each pipeline replica is one torchrun agent, which sees only its own GPUs.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import psutil

from pipollux_sched.lifecycle import Exited, Outcome, Started
from pipollux_sched.store import StateDir

from . import processes
from .base import Backend, BackendError, Node, Report, Running, Workload
from .replica_group import ReplicaGroup
from .slots import SlotLedger

STOP_GRACE = 30.0
"""Seconds that a job has to save when it is asked to stop."""

_INHERITED_NOT = ("PIPOLLUX_", "TORCHELASTIC_", "PET_")
_INHERITED_NEITHER = frozenset(
    (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
)


class _Pending(NamedTuple):
    """A generation that waits for the one before it to end, or for its slots."""

    workload: Workload
    generation: int
    nodes: tuple[str, ...]


class LocalBackend(Backend):
    """Runs every pipeline replica as a torchrun agent on this machine.

    Args:
        nodes: the virtual nodes.
        state_dir: where the jobs' logs and checkpoints go.
        grace: seconds that a generation has to save when a newer one takes its place.
        instance: tells the processes of this backend from those of earlier ones.
    """

    name = "local"

    def __init__(
        self,
        nodes: Mapping[str, Node],
        state_dir: StateDir,
        *,
        grace: float = STOP_GRACE,
        instance: str | None = None,
    ) -> None:
        self._nodes = dict(nodes)
        self._state_dir = state_dir
        self._grace = grace
        self._instance = instance or uuid.uuid4().hex
        self._ledger = SlotLedger({name: node.slots for name, node in nodes.items()})
        self._first_gpu = _first_gpus(nodes)
        self._groups: dict[str, ReplicaGroup] = {}
        self._pending: dict[str, _Pending] = {}
        self._reports: list[Report] = []
        self._lock = threading.RLock()

    def nodes(self) -> Mapping[str, Node]:
        """Return the virtual nodes."""
        return dict(self._nodes)

    def free(self) -> dict[str, int]:
        """Return the number of slots by node that no process holds."""
        with self._lock:
            return self._ledger.free()

    def apply(self, workload: Workload, generation: int, nodes: Sequence[str]) -> None:
        """Make a job run as `generation`, one replica for each entry of `nodes`: see `Backend`."""
        if not nodes or not self._ledger.fits(nodes, workload.num_stages):
            raise BackendError(
                f"job {workload.job!r} cannot run on {', '.join(nodes) or 'no node'}: each replica "
                f"needs {workload.num_stages} slots of its node, and the nodes have "
                + ", ".join(f"{name}: {node.slots}" for name, node in self._nodes.items())
            )
        with self._lock:
            self._pending[workload.job] = _Pending(workload, generation, tuple(nodes))
            if workload.job in self._groups:
                self._groups[workload.job].stop(self._grace)
            else:
                self._start_pending(workload.job)

    def stop(self, job: str, grace: float) -> bool:
        """Ask a job's processes to save and end: see `Backend`."""
        with self._lock:
            pending = self._pending.pop(job, None)
            if job in self._groups:
                self._groups[job].stop(grace)
                return True
            if pending is not None:
                message = "It was stopped before it had started."
                exited = Exited(pending.generation, Outcome.FAILED, message=message)
                self._reports.append(Report(job, exited))
            return pending is not None

    def kill(self, job: str, why: str) -> bool:
        """End a job's processes at once: see `Backend`."""
        with self._lock:
            if job in self._groups:
                self._groups[job].kill(why)
                return True
        return self.stop(job, 0.0)

    def poll(self) -> list[Report]:
        """Carry on with what is under way; return what has happened since the last call."""
        with self._lock:
            for job, group in list(self._groups.items()):
                exited = group.poll()
                if exited is not None:
                    del self._groups[job]
                    self._ledger.release(job)
                    self._reports.append(Report(job, exited))
                    if exited.outcome is Outcome.COMPLETE:
                        self._pending.pop(job, None)
            for job in list(self._pending):
                self._start_pending(job)
            reports, self._reports = self._reports, []
            return reports

    def running(self) -> Mapping[str, Running]:
        """Return what runs or is about to, by job."""
        with self._lock:
            waiting = {
                job: Running(entry.generation, entry.nodes) for job, entry in self._pending.items()
            }
            there = {
                job: Running(group.generation, group.nodes) for job, group in self._groups.items()
            }
            return waiting | there

    def recover(self, grace: float) -> list[str]:
        """End what an earlier scheduler of the same state directory left running."""
        own, place = self._instance, str(self._state_dir.path)

        def of_another(environment: Mapping[str, str]) -> bool:
            instance = environment.get("PIPOLLUX_INSTANCE")
            here = environment.get("PIPOLLUX_STATE_DIR") == place
            return here and instance is not None and instance != own

        found = [_describe(process) for process in processes.marked(of_another)]
        if found and not processes.end(lambda: processes.marked(of_another), grace):
            raise BackendError(
                f"processes that an earlier scheduler of {place} left behind cannot be ended: "
                + "; ".join(_describe(process) for process in processes.marked(of_another))
            )
        return found

    def shutdown(self, grace: float = 0.0) -> None:
        """End everything; return when nothing runs, or 10 s after `grace` at the latest."""
        with self._lock:
            for job in list(self.running()):
                self.stop(job, grace)
        deadline = time.monotonic() + grace + 10.0
        while self._groups and time.monotonic() < deadline:
            reports = self.poll()
            with self._lock:
                self._reports = reports + self._reports
            time.sleep(processes.POLL_INTERVAL)

    def _start_pending(self, job: str) -> None:
        """Start what waits of a job, if its slots are free."""
        if job in self._groups:
            return
        pending = self._pending[job]
        slots = self._ledger.take(job, pending.nodes, pending.workload.num_stages)
        if slots is None:
            return
        del self._pending[job]
        try:
            group = self._launch(pending, slots)
        except OSError as error:
            self._ledger.release(job)
            message = f"The processes could not be started: {error}"
            exited = Exited(pending.generation, Outcome.FAILED, message=message)
            self._reports.append(Report(job, exited))
            return
        self._groups[job] = group
        started = Started(pending.generation, group.pids, group.port)
        self._reports.append(Report(job, started))

    def _launch(self, pending: _Pending, slots: Sequence[tuple[int, ...]]) -> ReplicaGroup:
        workload, generation, nodes = pending
        logs = [self._state_dir.log(workload.job, generation, r) for r in range(len(nodes))]
        checkpoints = self._state_dir.checkpoints(workload.job)
        checkpoints.mkdir(mode=0o700, parents=True, exist_ok=True)
        logs[0].parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        marks = self._marks(workload.job, generation)

        def find_marked() -> set[psutil.Process]:
            return processes.marked(lambda environment: marks.items() <= environment.items())

        return ReplicaGroup(
            workload,
            generation,
            nodes,
            environments=[
                self._environment(pending, node, held)
                for node, held in zip(nodes, slots, strict=True)
            ],
            logs=logs,
            checkpoints=checkpoints,
            find_marked=find_marked,
        )

    def _marks(self, job: str, generation: int) -> dict[str, str]:
        """What tells the processes of one generation from all others."""
        return {
            "PIPOLLUX_INSTANCE": self._instance,
            "PIPOLLUX_JOB_ID": job,
            "PIPOLLUX_GENERATION": str(generation),
        }

    def _environment(self, pending: _Pending, node: str, slots: tuple[int, ...]) -> dict[str, str]:
        """Return the whole environment of one replica."""
        workload, generation, nodes = pending
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(_INHERITED_NOT) and name not in _INHERITED_NEITHER
        }
        return {
            **inherited,
            "PYTHONUNBUFFERED": "1",
            # How long a replica may take to save is decided here, not by torchrun.
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "86400",
            **self._devices(node, slots),
            **workload.environment,
            **self._marks(workload.job, generation),
            "PIPOLLUX_STATE_DIR": str(self._state_dir.path),
            "PIPOLLUX_CHECKPOINT_DIR": str(self._state_dir.checkpoints(workload.job)),
            "PIPOLLUX_NUM_NODES": str(len(set(nodes))),
            "PIPOLLUX_NUM_STAGES": str(workload.num_stages),
        }

    def _devices(self, node: str, slots: tuple[int, ...]) -> dict[str, str]:
        """Name the devices of a replica, and hide all others from it."""
        if self._nodes[node].kind == "cpu":
            return {
                "PIPOLLUX_DEVICES": ",".join(["cpu"] * len(slots)),
                "CUDA_VISIBLE_DEVICES": "",
                "OMP_NUM_THREADS": "1",
                "MKL_NUM_THREADS": "1",
            }
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        indices = [self._first_gpu[node] + slot for slot in slots]
        return {
            "PIPOLLUX_DEVICES": ",".join(f"cuda:{stage}" for stage in range(len(slots))),
            "CUDA_VISIBLE_DEVICES": ",".join(
                visible[index] if index < len(visible) else str(index) for index in indices
            ),
        }


def _first_gpus(nodes: Mapping[str, Node]) -> dict[str, int]:
    """Share out the machine's GPUs: the index of each GPU node's first one."""
    first, shared = 0, {}
    for name, node in nodes.items():
        if node.kind == "gpu":
            shared[name] = first
            first += node.slots
    return shared


def _describe(process: psutil.Process) -> str:
    try:
        job = process.environ().get("PIPOLLUX_JOB_ID", "?")
        return f"process {process.pid} of job {job} ({' '.join(process.cmdline())[:80]})"
    except psutil.Error:
        return f"process {process.pid}"
