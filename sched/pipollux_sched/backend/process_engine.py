"""What engines share whose replicas are processes of nodes that see the state directory."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from typing import Generic, Protocol, TypeVar

from pipollux_sched.spec.job import JobSpec, SpecError
from pipollux_sched.store import StateDir

from .base import Ended, Engine, Launch, Listing, ReplicaKey, ReplicaProgram, ReplicaState
from .replica.command import Step
from .run_as import check_account


class KnownReplica(Protocol):
    """A replica that was started here or by an earlier scheduler, and is not forgotten."""

    @property
    def ended(self) -> Ended | None:
        """How it has ended; None: it has not."""


R = TypeVar("R", bound=KnownReplica)


class ProcessEngine(Engine, Generic[R]):
    """Runs replicas as processes; each has files in the folder of its attempt.

    Args:
        pass_environment: variables of this process passed to jobs, besides those of `inherited`.
    """

    grows = True
    where = "the nodes"
    """Where the processes are, in messages."""

    def __init__(self, state_dir: StateDir, pass_environment: Collection[str] = ()) -> None:
        self._state_dir = state_dir
        self._pass_on = frozenset(pass_environment)
        self._replicas: dict[ReplicaKey, R] = {}
        self._version = 0

    def check(self, spec: JobSpec) -> None:
        """Reject a job in a container, or of a user as which it cannot run: see `Engine`."""
        refuse_image(spec, self.name, self.where)
        check_account(spec)

    def checkpoints(self, program: ReplicaProgram) -> str:
        """Return the job's own folder, or one in the state directory: see `Engine`."""
        return program.checkpoints_in(self._state_dir)

    def forget(self, job: str, attempt: int) -> None:
        """Remove the folder of an attempt: see `Engine`."""
        forgotten = [key for key in self._replicas if key[:2] == (job, attempt)]
        if any(self._replicas[key].ended is None for key in forgotten):
            return
        for key in forgotten:
            del self._replicas[key]
        shutil.rmtree(self._state_dir.attempt(job, attempt), ignore_errors=True)

    def _step(
        self, program: ReplicaProgram, launch: Launch, replica: int, *, on_gpus: bool
    ) -> Step:
        return Step.of(
            program,
            launch,
            replica,
            self._state_dir,
            on_gpus=on_gpus,
            pass_on=self._pass_on,
        )

    def _listing_of(self, states: Mapping[ReplicaKey, ReplicaState]) -> Listing:
        self._version += 1
        return Listing(self._version, states)


def refuse_image(spec: JobSpec, backend: str, where: str) -> None:
    """Reject a job in a container with `SpecError`, for a backend with processes only."""
    if spec.image is not None:
        raise SpecError(
            f"job '{spec.name}': image: '{spec.image}' cannot be run by the {backend} backend, "
            f"which starts processes of {where} and no containers; remove it, and give as script "
            "the path of a Python script"
        )
