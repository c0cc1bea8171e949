"""What the suite needs of an engine, and a scheduler that runs jobs on it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from pipollux_sched.backend import Engine, ReplicaGroupManager, ReplicaKey, ReplicaProgram
from pipollux_sched.backend.base import ClusterUnavailableError, Launch, Listing
from pipollux_sched.lifecycle import Exited, Started
from pipollux_sched.store import StateDir
from tests.sched.backends import LaunchFiles
from tests.sched.scripts import PUSH_PULL, TOY
from tests.sched.supervised import Service
from tests.waiting import until

NODES = ("n1", "n2")
SLOTS = 4
"""Of each node."""
MARK = "PIPOLLUX_TEST_ENGINE"
"""The variable by which the processes of a test's replicas are known, wherever they run."""


class EngineCase(ABC):
    """An engine on the nodes n1 and n2 of four slots each.

    Args:
        folder: of the test; replicas see it at the same path.
    """

    host = "127.0.0.1"
    """Address of this machine at which replicas reach a scheduler."""
    image: str | None = None
    """What replicas run in."""
    is_even = False
    """Whether an attempt has the same number of replicas on each of its nodes."""
    refused: Sequence[tuple[dict[str, Any], str]]
    """Jobs that can never run: fields of a spec, and words of the refusal."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state_dir = StateDir(folder / "state")
        self.state_dir.create()
        self._engines: list[Engine] = []

    @abstractmethod
    def make(self) -> Engine:
        """Return another engine for the same replicas."""

    def take_away(self, handle: str) -> None:
        """Let the cluster, or its admin, end a replica."""
        raise NotImplementedError

    sees_others = False
    """Whether the engine sees how many slots of a node somebody else has."""

    def occupy(
        self,
        node: str,  # noqa: ARG002  # for the engines of clusters
        slots: int = SLOTS,  # noqa: ARG002  # as above
    ) -> AbstractContextManager[None]:
        """Let somebody else have slots of a node; on this machine, nobody else can."""
        return nullcontext()

    @property
    def engine(self) -> Engine:
        """The engine of the present scheduler."""
        return self._engines[-1] if self._engines else self.start_anew()

    def start_anew(self) -> Engine:
        """Return the engine of another scheduler, which follows on one that was killed."""
        if self._engines:
            self._engines[-1].close()
        self._engines.append(self.make())
        return self._engines[-1]

    def processes(self) -> list[psutil.Process]:
        """Return what runs of the test's replicas."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                ours = process.environ().get(MARK) == str(self.folder)
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def close(self) -> None:
        """End what still runs, and the engine."""
        if self._engines:
            self.engine.recover((), 0.0)
            self.engine.close()
        until(lambda: not self.processes(), "nothing of the replicas runs")
        for engine in self._engines:
            with suppress(ClusterUnavailableError):
                engine.listing()  # no zombie is left of what it has started itself


class Scheduler:
    """Attempts on the engine of a case, and what is reported of them.

    Args:
        case: of the engine.
        service: where replicas of the same attempt find each other.
    """

    def __init__(self, case: EngineCase, service: Service) -> None:
        self.case, self._service = case, service
        self.launches = LaunchFiles(case.state_dir)
        self.engine = case.start_anew()
        self.attempts = ReplicaGroupManager(
            self.engine, self.launches, case.state_dir, grace=60.0, start_timeout=240.0
        )
        self.events: list[tuple[str, Started | Exited]] = []

    def again(self) -> Scheduler:
        """Return another scheduler, as after this one was killed."""
        return Scheduler(self.case, self._service)

    def program(self, job: str, nodes: list[str], *args: str, **options: Any) -> ReplicaProgram:
        """Return what the replicas of a job run: the toy job with some arguments."""
        environment = {MARK: str(self.case.folder)}
        if len(nodes) > 1:  # they find each other through a scheduler
            self._service.submit(job, nodes)
            environment["PIPOLLUX_SCHEDULER_URL"] = self._service.server.url
            environment["PIPOLLUX_TOKEN"] = self._service.store.job(job).token
        return ReplicaProgram(
            job=job,
            script=TOY,
            args=args,
            image=self.case.image,
            environment=environment,
            **options,
        )

    def apply(
        self, job: str, nodes: list[str], *args: str, attempt: int = 1, **options: Any
    ) -> ReplicaProgram:
        """Start an attempt of the toy job; return its program."""
        program = self.program(job, nodes, *args, **options)
        self.attempts.apply(program, attempt, nodes)
        return program

    def apply_push_pull(self, job: str, nodes: list[str], results: Path, epochs: int) -> None:
        """Start an attempt whose replicas push to servers, one beside each of them."""
        found = self.program(job, nodes)
        environment = {**found.environment, "RESULTS": str(results), "EPOCHS": str(epochs)}
        program = replace(
            found, script=PUSH_PULL, args=(), servers=len(nodes), environment=environment
        )
        self.attempts.apply(program, 1, nodes)

    def launch(self, job: str, attempt: int = 1) -> Launch:
        """Return an attempt as it was started."""
        launch = self.launches.launch(job, attempt)
        assert launch is not None
        return Launch.from_json_object(job, attempt, launch)

    def poll(self) -> None:
        self.events += [(report.job, report.event) for report in self.attempts.poll()]

    def started(self, job: str) -> Started:
        """Wait until an attempt of a job runs."""
        return self._reported(job, Started)

    def exited(self, job: str) -> Exited:
        """Wait until an attempt of a job has ended."""
        return self._reported(job, Exited)

    def _reported(self, job: str, kind: type[Any]) -> Any:
        def look() -> Started | Exited | None:
            self.poll()
            found = [e for e in self.events if e[0] == job and isinstance(e[1], kind)]
            if found:
                self.events.remove(found[0])
            return found[0][1] if found else None

        return until(look, f"job {job} has {kind.__name__.lower()}, not only {self.events}")

    def listing(self) -> Listing:
        """Return what the engine lists, once the cluster answers."""
        return until(self.engine.listing, "a listing", ignored=(ClusterUnavailableError,))

    def log(self, key: ReplicaKey) -> str:
        """Return the output of a replica as far as it can be had."""
        with suppress(ClusterUnavailableError):  # a kubelet does not serve it yet
            self.engine.fetch_log(key)
        path = self.case.state_dir.log(*key)
        return path.read_text() if path.exists() else ""

    def says(self, key: ReplicaKey, text: str) -> str:
        """Wait until a replica has printed something; return all that it has."""
        return until(lambda: (log := self.log(key)) and text in log and log, f"{key} says {text}")

    def holds(self, key: ReplicaKey, condition: Callable[[Any], Any], what: str) -> Any:
        """Wait until a condition holds for the state of a replica; return its value."""
        return until(lambda: condition(self.listing().replicas[key]), f"{key} {what}")
