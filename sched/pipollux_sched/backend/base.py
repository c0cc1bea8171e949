"""What an engine must be able to do so that Pollux can run jobs on it.

A backend has five tasks: check that a job can run here at all (`check`), list the nodes (`nodes`),
run a job on some of them (`apply`), list what runs (`running`, `poll`), and stop (`stop`,
`shutdown`). `apply` and `stop` return without waiting for a process. `poll`, called repeatedly by
one thread, continues what is under way and reports the outcome as events of
`pipollux_sched.lifecycle`.

A generation lives and dies as a whole: when one replica fails, the backend ends the others and
reports one `Exited`. It is reported once, after the last process has ended and its slots are free.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pipollux_sched.errors import SchedulerError
from pipollux_sched.lifecycle import Exited, Started
from pipollux_sched.spec.job import JobSpec

POLL_INTERVAL = 0.05
"""Seconds between two calls of `poll`."""


class BackendError(SchedulerError):
    """A backend cannot do what was asked; the text is one sentence for the user."""


@dataclass(frozen=True)
class Node:
    """A node that a backend can start replicas on."""

    slots: int
    """Number of devices."""
    kind: str
    """What a slot is: "cpu" (a CPU device of one thread) or "gpu"."""


@dataclass(frozen=True, kw_only=True)
class ReplicaProgram:
    """What every pipeline replica of a job runs, independent of the allocation."""

    job: str
    """Name of the job."""
    script: Path | None
    """None: the image's entry point."""
    image: str | None = None
    """The container image that it runs in; None: it runs as a process of the node."""
    args: tuple[str, ...] = ()
    num_stages: int = 1
    """K, the devices that one replica needs on its node."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of the processes."""
    directory: Path | None = None
    """Working directory; None: that of the scheduler."""
    checkpoints: Path | None = None
    """Where it saves checkpoints; None: in the state directory."""
    first_generation: int = 1
    """The generation that the present run began with: in the state directory, each run has a folder
    of its own to save in, so that what is run from the start finds nothing to go on from."""


class Report(NamedTuple):
    """The outcome of an earlier `apply` or `stop`, or something that happened by itself."""

    job: str
    event: Started | Exited


class Running(NamedTuple):
    """A generation whose processes run, or are about to start."""

    generation: int
    nodes: tuple[str, ...]


class Backend(ABC):
    """An engine that runs generations of jobs, one torchrun agent per pipeline replica."""

    name: str = "backend"

    @abstractmethod
    def check(self, spec: JobSpec) -> None:
        """Refuse a job that this engine can never run, judging by its spec alone.

        Raises:
            SpecError: one sentence: the field, its value, what is allowed and the fix.
        """

    @abstractmethod
    def nodes(self) -> Mapping[str, Node]:
        """Return the nodes that replicas can be started on, by name."""

    @abstractmethod
    def free(self) -> Mapping[str, int]:
        """Return the number of free slots of each node."""

    @abstractmethod
    def apply(self, program: ReplicaProgram, generation: int, nodes: Sequence[str]) -> None:
        """Run a job as `generation`, with one replica for each entry of `nodes`.

        An earlier generation of the job that still runs is stopped gracefully first, and the new
        one waits until its slots are free. Returns at once; `poll` does the work and reports
        `Started`, or `Exited` where nothing could be started.

        Raises:
            BackendError: `nodes` names a node that is not there or too small, or the engine cannot
                run such a program.
        """

    @abstractmethod
    def stop(self, job: str, grace: float) -> bool:
        """Ask a job's processes to save and end; kill them after `grace` seconds.

        Returns at once; `poll` does the work and reports `Exited`. Asked again, only a shorter
        grace counts.

        Returns:
            False where nothing of the job runs, so that nothing will be reported.
        """

    @abstractmethod
    def kill(self, job: str, why: str) -> bool:
        """Kill a job's processes immediately, as they no longer respond.

        Returns at once; `poll` does the work and reports `Exited`, with `why` as its message.

        Returns:
            False where nothing of the job runs, so that nothing will be reported.
        """

    @abstractmethod
    def poll(self) -> list[Report]:
        """Continue what is under way; return what has happened since the last call."""

    @abstractmethod
    def running(self) -> Mapping[str, Running]:
        """Return the running generations by job."""

    @abstractmethod
    def unsent_report(self, job: str, generation: int) -> Mapping[str, Any] | None:
        """Return the training report that a generation which has ended could not send.

        It is the body of ``POST /jobs/{name}/reports``, unchecked; None where nothing is left.
        """

    @abstractmethod
    def adopt(self, job: str, generation: int, supervisor_url: str) -> str | None:
        """Adopt a generation that an earlier scheduler of the same state directory started.

        Whether it still runs or has already ended, `poll` reports its `Exited` like any other.

        Args:
            job: its name.
            generation: which one.
            supervisor_url: URL that jobs report to.

        Returns:
            None if it was adopted; else the reason why not, in one sentence.
        """

    @abstractmethod
    def recover(self, grace: float) -> list[str]:
        """End what an earlier scheduler of this state directory left running, if not adopted.

        Returns:
            One line for each process found.
        """

    @abstractmethod
    def shutdown(self, grace: float = 0.0) -> None:
        """End everything; return when nothing runs, or shortly after `grace` at the latest."""
