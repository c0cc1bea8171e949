"""What Slurm says at one moment: allocations, steps and nodes, asked for all at once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from pipollux_sched.backend.base import BackendError, ClusterUnavailableError

from .commands import run
from .output import (
    JOB_FORMAT,
    STEP_FORMAT,
    NodeLine,
    Share,
    SlurmJob,
    StepLine,
    read_jobs,
    read_nodes,
    read_shares,
    read_steps,
    split_jobs,
)

__all__ = ["SlurmAllocation", "SlurmReader", "SlurmSnapshot", "SlurmWatch"]

_LOG = logging.getLogger(__name__)
REFRESH_INTERVAL = 2.0
"""Seconds between two snapshots, each of which takes three commands."""
HURRIED_INTERVAL = 1.0
"""The same, where something has changed."""
ASKED_FOR_ALONE = 8
"""Allocations that are asked for one by one; if more are new, Slurm is asked for all jobs."""
NODES_AT_ONCE = 500
"""Nodes whose state one command asks for; a command line has a limited length."""


@dataclass(frozen=True)
class SlurmAllocation:
    """A running allocation of ours."""

    job: SlurmJob
    shares: Mapping[str, Share]
    """What it holds of each of its nodes, by name."""


@dataclass(frozen=True)
class SlurmSnapshot:
    """What Slurm said at one moment."""

    number: int = 0
    """Grows from one snapshot to the next; 0: none yet."""
    begun: float = 0.0
    """When it was begun, by the monotonic clock: whatever happened before is in it."""
    jobs: Mapping[int, SlurmJob] = field(default_factory=dict)
    """All jobs of this user, including those that have ended a short time ago."""
    steps: Mapping[tuple[int, str], StepLine] = field(default_factory=dict)
    """The steps of this user by allocation and name."""
    nodes: Mapping[str, NodeLine] = field(default_factory=dict)
    allocations: Mapping[int, SlurmAllocation] = field(default_factory=dict)
    """The running allocations that were chosen."""


class SlurmReader:
    """Asks Slurm for snapshots.

    Args:
        chosen: picks the allocations whose nodes are of interest.
    """

    def __init__(self, chosen: Callable[[Mapping[int, SlurmJob]], Iterable[int]]) -> None:
        self._chosen = chosen
        self._number = 0
        self._shares: dict[tuple[int, str], dict[str, Share]] = {}
        """By allocation and its list of nodes, which shrinks when a node of it fails."""

    def read(self) -> SlurmSnapshot:
        """Ask Slurm.

        Raises:
            ClusterUnavailableError: its controller does not answer.
            BackendError: it refuses.
        """
        begun = time.monotonic()
        jobs = read_jobs(run(["squeue", "-h", "--me", "-t", "all", "-o", JOB_FORMAT]))
        steps = read_steps(run(["squeue", "-h", "--me", "-s", "-o", STEP_FORMAT]))
        chosen = [jobs[number] for number in self._chosen(jobs) if number in jobs]
        running = [job for job in chosen if job.state == "RUNNING"]
        self._shares = self._shares_of(running)
        allocations = {
            job.job: SlurmAllocation(job, self._shares[job.job, job.nodes]) for job in running
        }
        names = sorted({name for held in allocations.values() for name in held.shares})
        self._number += 1
        return SlurmSnapshot(
            number=self._number,
            begun=begun,
            jobs=jobs,
            steps={(step.job, step.name): step for step in steps},
            nodes=_nodes(names),
            allocations=allocations,
        )

    def _shares_of(self, jobs: list[SlurmJob]) -> dict[tuple[int, str], dict[str, Share]]:
        """Return what allocations hold of each of their nodes, asking for those that are new."""
        keys = [(job.job, job.nodes) for job in jobs]
        new = [key for key in keys if key not in self._shares]
        command = ["scontrol", "show", "job", "-d", "-o"]
        texts: dict[int, str] = {}
        if len(new) > ASKED_FOR_ALONE:
            texts = split_jobs(run(command))
        for key in new:
            number, _ = key
            # One that has ended in the meantime is not among all, and Slurm says so.
            text = texts.get(number) or run([*command, str(number)])
            self._shares[key] = {
                name: share for share in read_shares(text) for name in host_names(share.nodes)
            }
        return {key: self._shares[key] for key in keys}


def host_names(hosts: str) -> list[str]:
    """Return the names in one of Slurm's lists of hosts.

    Raises:
        BackendError: Slurm cannot read it.
    """
    if not any(sign in hosts for sign in "[,"):
        return [hosts] if hosts else []
    return run(["scontrol", "show", "hostnames", hosts]).split()


def _nodes(names: list[str]) -> dict[str, NodeLine]:
    found: dict[str, NodeLine] = {}
    for first in range(0, len(names), NODES_AT_ONCE):
        part = ",".join(names[first : first + NODES_AT_ONCE])
        found.update(read_nodes(run(["scontrol", "show", "node", "-o", part])))
    return found


class SlurmWatch:
    """Keeps the latest snapshot, in a thread of its own: Slurm may take long to answer.

    Args:
        reader: asks Slurm.
        interval: seconds between two snapshots.
        on_snapshot: called with each, in the thread.
    """

    def __init__(
        self,
        reader: SlurmReader,
        interval: float = REFRESH_INTERVAL,
        on_snapshot: Callable[[SlurmSnapshot], object] = lambda _: None,
    ) -> None:
        self._reader = reader
        self._interval = interval
        self._on_snapshot = on_snapshot
        self._reading = threading.Lock()
        self._ending = threading.Event()
        self._hurry = threading.Event()
        self._thread: threading.Thread | None = None
        self._latest = SlurmSnapshot()
        self._error: BackendError | None = None

    def start(self) -> None:
        """Take the first snapshot, and begin to take others.

        Raises:
            BackendError: Slurm does not answer, or refuses.
        """
        self.refresh()
        self._thread = threading.Thread(target=self._run, name="pipollux-slurm", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; a command that is under way has a while to end."""
        self._ending.set()
        self._hurry.set()
        if self._thread is not None:
            self._thread.join(5.0)

    @property
    def latest(self) -> SlurmSnapshot:
        """The latest snapshot; what it says may be old while the controller is away."""
        return self._latest

    def hurry(self) -> None:
        """Take the next snapshot soon: something has changed."""
        self._hurry.set()

    def check(self) -> None:
        """Do nothing, if Slurm has answered the last time that it was asked.

        Raises:
            ClusterUnavailableError: it has not.
        """
        if self._error is not None:
            raise ClusterUnavailableError(str(self._error)) from self._error

    def refresh(self) -> SlurmSnapshot:
        """Take a snapshot now, and return it.

        Raises:
            BackendError: Slurm does not answer, or refuses.
        """
        with self._reading:
            try:
                self._latest = self._reader.read()
            except BackendError as error:
                self._error = error
                raise
            self._error = None
            self._on_snapshot(self._latest)
            return self._latest

    def _run(self) -> None:
        while not self._ending.wait(min(HURRIED_INTERVAL, self._interval)):
            self._hurry.wait(max(self._interval - HURRIED_INTERVAL, 0.0))
            self._hurry.clear()
            if self._ending.is_set():
                return
            try:
                self.refresh()
            except BackendError as error:
                _LOG.debug("%s", error)
            except Exception:  # what Slurm printed could not be read; the next time it may be
                _LOG.exception("what Slurm said could not be read")
