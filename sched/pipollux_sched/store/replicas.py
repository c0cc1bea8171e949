"""Registered addresses of the replicas of a job's current attempt."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sqlalchemy import delete, select

from . import journal
from .database import Database
from .errors import StaleAttemptError, StoreError
from .tables import JobRow, ReplicaRow


class UnknownReplicaError(StoreError):
    """An attempt has no replica of this index."""


class Discovery(NamedTuple):
    """The registered replicas of an attempt."""

    num_replicas: int
    addresses: dict[int, str]

    @property
    def complete(self) -> bool:
        """Whether all replicas are registered."""
        return len(self.addresses) == self.num_replicas


class ReplicaAddresses:
    """Stores the addresses, so that they survive the scheduler that received them."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock

    def register(self, job: str, attempt: int, replica: int, address: str) -> None:
        """Store the address of a replica of the present attempt; an earlier one is replaced."""
        with self._database.write() as session:
            row = journal.find_job(session, job)
            check_replica(job, row.attempt, num_ids(row), attempt, replica)
            older = ReplicaRow.attempt != attempt
            session.execute(delete(ReplicaRow).where(ReplicaRow.job == job, older))
            session.merge(
                ReplicaRow(
                    job=job, attempt=attempt, replica=replica, address=address, time=self._clock()
                )
            )

    def find(self, job: str, attempt: int) -> Discovery:
        """Return the registered replicas, or raise `UnknownJobError` or `StaleAttemptError`."""
        with self._database.read() as session:
            row: JobRow = journal.find_job(session, job)
            check_replica(job, row.attempt, num_ids(row), attempt)
            query = (
                select(ReplicaRow)
                .where(ReplicaRow.job == job, ReplicaRow.attempt == attempt)
                .order_by(ReplicaRow.replica)
            )
            addresses = {entry.replica: entry.address for entry in session.scalars(query)}
            return Discovery(len(row.running_on), addresses)


def num_ids(row: JobRow) -> int:
    """Return the number of replicas that the running attempt has had; 0: the job does not run."""
    if not row.running_on:
        return 0
    return len(row.running_on) if row.membership is None else int(row.membership["num_ids"])


def check_replica(
    job: str, present: int, num_replicas: int, attempt: int, replica: int = 0
) -> None:
    """Raise unless `attempt` is the current one, runs, and has this replica."""
    if attempt != present or num_replicas == 0:
        why = "has ended" if attempt == present else f"is not the current one ({present})"
        raise StaleAttemptError(f"attempt {attempt} of job {job!r} {why}")
    if replica >= num_replicas:
        raise UnknownReplicaError(
            f"replica is {replica}, but attempt {attempt} of job {job!r} has "
            f"{num_replicas}, numbered from 0 to {num_replicas - 1}"
        )
