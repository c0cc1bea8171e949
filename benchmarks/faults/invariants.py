"""Invariants of the store and of the processes after every fault."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path

from world import World, backs_off  # same folder

from pipollux_sched.lifecycle import Phase
from pipollux_sched.store import JobRecord, NodeCondition

NOTICE = 30.0
"""Seconds within which the scheduler must notice the loss of a replica."""


class Invariants:
    """Checks a world repeatedly."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._attempts: dict[str, int] = {}

    def settled(self) -> bool:
        """Whether no decision is still being carried out.

        Each job trains, or waits for room that is not free, or for the end of its back-off.
        """
        jobs = self.world.under_way()
        if any(job.state.intent is not None for job in jobs):
            return False
        if any(job.state.running_on and job.state.reason != "Training" for job in jobs):
            return False
        free = self._free(jobs)
        waiting = [job for job in jobs if not (job.state.running_on or backs_off(job))]
        return not any(_fits(job, free) for job in waiting if not job.state.suspended)

    def violations(self) -> list[str]:
        """Return all violations of what must hold at any moment."""
        jobs = self.world.jobs()
        return [
            *(f"{name} is gone" for name in self.world.acknowledged.keys() - jobs.keys()),
            *(f"{path}: {path.read_text()}" for path in self._started_twice()),
            *self._conditions(jobs.values()),
            *self._slots(jobs.values()),
            *self._order(jobs.values()),
            *self._left_running(jobs),
            *self._missing(jobs.values()),
            *self._damage(),
            *self._log(),
        ]

    def _conditions(self, jobs: Iterable[JobRecord]) -> Iterator[str]:
        """Of the conditions of a job, one per type, only that of its phase is true."""
        for job in jobs:
            true = [entry.type for entry in job.state.conditions if entry.status]
            kinds = {entry.type for entry in job.state.conditions}
            if true != [job.phase] or len(kinds) < len(job.state.conditions):
                yield f"{job.name}: conditions {job.state.conditions}"

    def _slots(self, jobs: Iterable[JobRecord]) -> Iterator[str]:
        held = dict.fromkeys(self.world.nodes, 0)
        for job in jobs:
            for node in job.state.nodes_in_use:
                held[node] += job.state.running_stages or job.spec["num_stages"]
        for node, slots in self.world.nodes.items():
            if held[node] > slots:
                yield f"{node} holds {held[node]} of {slots}"

    def _order(self, jobs: Iterable[JobRecord]) -> Iterator[str]:
        """Attempt numbers only grow, and at most the last attempt of each job is open."""
        attempts = {job.name: self.world.store.attempts(job.name) for job in jobs}
        for job in jobs:
            attempt, before = job.state.attempt, self._attempts.get(job.name, 0)
            self._attempts[job.name] = attempt
            if attempt < before:
                yield f"{job.name}: attempt {attempt} after {before}"
            numbers = [(entry.attempt, entry.membership) for entry in attempts[job.name]]
            if numbers != sorted(set(numbers)):
                yield f"{job.name}: started were attempts and memberships {numbers}"
            open_ones = [entry.attempt for entry in attempts[job.name] if entry.ended_at is None]
            if len(open_ones) > 1 or (job.phase.ended and open_ones):
                yield f"{job.name} is {job.phase}, and attempts {open_ones} have no end"

    def _left_running(self, jobs: Mapping[str, JobRecord]) -> Iterator[str]:
        for pid, environment in self.world.processes().items():
            job = jobs.get(environment.get("PIPOLLUX_JOB_ID", ""))
            if job is not None and job.phase.ended:
                yield f"{job.name} is {job.phase}, and process {pid} of it runs"

    def _missing(self, jobs: Iterable[JobRecord]) -> Iterator[str]:
        """Each replica of a training job has a process, or the scheduler notices its loss soon."""
        for job in jobs:
            if job.phase is Phase.RUNNING and job.state.reason == "Training":
                try:
                    self.world.until("its replicas live", lambda job=job: self._lives(job), NOTICE)
                except AssertionError:
                    yield f"{job.name}: {job.state.running_on} was started, not all of it runs"

    def _lives(self, job: JobRecord) -> bool:
        state, attempt = job.state, str(job.state.attempt)
        there = {
            environment.get("PIPOLLUX_REPLICA")
            for environment in self.world.processes(job.name).values()
            if environment.get("PIPOLLUX_ATTEMPT") == attempt and "RANK" in environment
        }
        if set(map(str, state.membership.replicas)) <= there:
            return True
        now = self.world.jobs()[job.name].state
        before = state.attempt, state.membership.number, "Training", None
        return (now.attempt, now.membership.number, now.reason, now.intent) != before

    def _damage(self) -> Iterator[str]:
        """The store's file is intact, and no row refers to a missing one."""
        where = f"{self.world.directory.database.as_uri()}?mode=ro"
        with closing(sqlite3.connect(where, uri=True, timeout=30.0)) as database:
            rows = database.execute("PRAGMA integrity_check").fetchall()
            broken = database.execute("PRAGMA foreign_key_check").fetchall()
        if rows != [("ok",)] or broken:
            yield f"the store: {rows}, {broken}"

    def _log(self) -> Iterator[str]:
        """The scheduler had no unexpected errors."""
        log = self.world.folder / "serve.log"
        if "Traceback" in log.read_text(errors="replace"):
            yield f"{log} tells of an exception"

    def _started_twice(self) -> list[Path]:
        kept = (self.world.directory.path / "jobs").glob("*/checkpoints/violations")
        return [*kept, *(self.world.folder / "small").glob("*/violations")]

    def _free(self, jobs: Iterable[JobRecord]) -> dict[str, int]:
        """Free slots of each node that takes jobs."""
        nodes = self.world.store.nodes().values()
        free = {node.name: node.slots for node in nodes if node.condition is NodeCondition.READY}
        for job in jobs:
            running_on = job.state.running_on
            stages = job.state.running_stages if running_on else job.state.num_stages
            for node in running_on or job.state.assigned:
                free[node] = free.get(node, 0) - (stages or job.spec["num_stages"])
        return free


def _fits(job: JobRecord, free: Mapping[str, int]) -> bool:
    stages = min(job.spec.get("stage_choices") or [job.spec["num_stages"]])
    return sum(max(slots, 0) // stages for slots in free.values()) >= job.spec["min_replicas"]
