"""Generations, for all engines: replicas that start and end together.

An engine starts all replicas of a generation or none (`Generations.start`), and returns them as a
`ReplicaGroup`. This module waits for a generation's slots and for the end of the previous one,
stops it within a grace period or kills it, and reports once how it ended.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from pipollux_sched.lifecycle import Exited, Outcome, Started

from .base import POLL_INTERVAL, Backend, BackendError, Node, ReplicaProgram, Report, Running
from .slots import SlotLedger

__all__ = ["Generations", "ReplicaGroup"]


class ReplicaGroup(Protocol):
    """The running replicas of one generation."""

    @property
    def generation(self) -> int:
        """Its number."""

    @property
    def started(self) -> Started:
        """The report of their start."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """Node of each replica."""

    def stop(self, grace: float) -> None:
        """Ask all replicas to save and end; `poll` kills what still runs after `grace` seconds."""

    def kill(self, why: str = "") -> None:
        """Kill all replicas; the report gives `why` as the reason."""

    def poll(self) -> Exited | None:
        """Continue; return how the generation ended, None while a process of it is left."""


class _Pending(NamedTuple):
    """A generation that waits for the previous one to end, or for its slots."""

    program: ReplicaProgram
    generation: int
    nodes: tuple[str, ...]


class Generations(Backend):
    """A backend whose engine starts the replicas of a generation together.

    Args:
        nodes: the nodes that replicas can be started on, by name.
        grace: seconds that a generation has to save when a newer one takes its place.
    """

    def __init__(self, nodes: Mapping[str, Node], grace: float) -> None:
        self._nodes = dict(nodes)
        self._grace = grace
        self._ledger = SlotLedger({name: node.slots for name, node in nodes.items()})
        self._groups: dict[str, ReplicaGroup] = {}
        self._pending: dict[str, _Pending] = {}
        self._reports: list[Report] = []
        self._lock = threading.RLock()

    @abstractmethod
    def check_program(self, program: ReplicaProgram) -> None:
        """Refuse what this engine cannot run.

        Raises:
            BackendError: one sentence.
        """

    @abstractmethod
    def start(
        self,
        program: ReplicaProgram,
        generation: int,
        nodes: tuple[str, ...],
        slots: Sequence[tuple[int, ...]],
    ) -> ReplicaGroup:
        """Start all replicas of a generation, or none.

        Args:
            program: what they run.
            generation: its number.
            nodes: node of each replica.
            slots: the slots of its node that each replica holds.

        Raises:
            OSError: they cannot be started; none is left.
            ValueError: likewise.
        """

    def nodes(self) -> Mapping[str, Node]:
        """Return the nodes."""
        return dict(self._nodes)

    def free(self) -> dict[str, int]:
        """Return the number of free slots of each node."""
        with self._lock:
            return self._ledger.free()

    def apply(self, program: ReplicaProgram, generation: int, nodes: Sequence[str]) -> None:
        """Run a job as `generation`, one replica for each entry of `nodes`: see `Backend`."""
        self.check_program(program)
        if not nodes or not self._ledger.fits(nodes, program.num_stages):
            raise BackendError(
                f"job {program.job!r} cannot run on {', '.join(nodes) or 'no node'}: each replica "
                f"needs {program.num_stages} slots of its node, and the nodes have "
                + ", ".join(f"{name}: {node.slots}" for name, node in self._nodes.items())
            )
        with self._lock:
            self._pending[program.job] = _Pending(program, generation, tuple(nodes))
            if program.job in self._groups:
                self._groups[program.job].stop(self._grace)
            else:
                self._start_pending(program.job)

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
        """Kill a job's processes: see `Backend`."""
        with self._lock:
            if job in self._groups:
                self._groups[job].kill(why)
                return True
        return self.stop(job, 0.0)

    def poll(self) -> list[Report]:
        """Continue what is under way; return what has happened since the last call."""
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
        """Return the generations that run or are about to start, by job."""
        with self._lock:
            waiting = {
                job: Running(entry.generation, entry.nodes) for job, entry in self._pending.items()
            }
            there = {
                job: Running(group.generation, group.nodes) for job, group in self._groups.items()
            }
            return waiting | there

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
            time.sleep(POLL_INTERVAL)

    def _start_pending(self, job: str) -> None:
        """Start a job's pending generation, if its slots are free."""
        if job in self._groups:
            return
        pending = self._pending[job]
        slots = self._ledger.take(job, pending.nodes, pending.program.num_stages)
        if slots is None:
            return
        del self._pending[job]
        try:
            group = self.start(pending.program, pending.generation, pending.nodes, slots)
        except (OSError, ValueError) as error:  # ValueError: NUL in an argument
            self._ledger.release(job)
            message = f"The processes could not be started: {error}"
            exited = Exited(pending.generation, Outcome.FAILED, message=message)
            self._reports.append(Report(job, exited))
            return
        self._groups[job] = group
        self._reports.append(Report(job, group.started))
