"""Readers of a scheduler's state: from its state directory on this machine, or over REST.

`--server` or `PIPOLLUX_SERVER` names a scheduler, possibly on another machine. Otherwise commands
read the store in the state directory, with or without a running scheduler.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import typer

from pipollux_sched.store import JobQuery, ListedPhase, StateDir, Store
from pipollux_sched.views.cluster import cluster_view, list_nodes, node_usage
from pipollux_sched.views.events import last_event_before
from pipollux_sched.views.explanation import ExplanationView
from pipollux_sched.views.forecasts import list_forecasts
from pipollux_sched.views.jobs import IN_ORDER, job_details, list_jobs
from pipollux_sched.views.logs import LogPart, list_logs, read_log
from pipollux_sched.views.models import (
    ClusterView,
    ForecastsView,
    JobDetails,
    ListedJob,
    LogTail,
    NodeDetails,
    PlanView,
    SweepDetails,
    SweepView,
    UsageView,
)
from pipollux_sched.views.sweeps import list_sweeps, sweep_details

from .server_choice import chosen_server

if TYPE_CHECKING:
    # Its own imports take longer than printing a list of jobs.
    from pipollux_sched.client.client import Client
    from pipollux_sched.views.teams import TeamsView

POLL_INTERVAL = 0.3

PAGE = 1000


class LocalReader:
    """Reads the store of a scheduler here like `client.Client`, whether or not it runs."""

    def __init__(self, store: Store, directory: StateDir) -> None:
        self._store = store
        self._directory = directory

    @property
    def where(self) -> str:
        """The state directory."""
        return str(self._directory.path)

    @property
    def served(self) -> bool:
        """Whether a scheduler serves the store now."""
        return self._directory.is_served()

    def jobs(self, phases: Collection[ListedPhase] = (), *, trials: bool = True) -> list[ListedJob]:
        """Return the jobs in these phases (empty: all), in the order of submission."""
        return list_jobs(self._store, replace(IN_ORDER, phases=phases, trials=trials))[0]

    def sweeps(self) -> list[SweepView]:
        """Return all sweeps, in the order of submission."""
        return list_sweeps(self._store)

    def sweep(self, name: str) -> SweepDetails:
        """Return a sweep with its trials."""
        return sweep_details(self._store, name)

    def job(self, name: str) -> JobDetails:
        """Return the details of a job, without its curves."""
        return job_details(self._store, self._store.job(name))

    def explanation(self, name: str) -> ExplanationView:
        """Return the explanation of a job's allocation."""
        from pipollux_sched.planning.explain import explanation  # numpy, for no other command

        return explanation(self._store, self._store.job(name))

    def nodes(self) -> list[NodeDetails]:
        """Return the nodes, each with its condition and the jobs that hold its slots."""
        return list_nodes(self._store)

    def teams(self) -> TeamsView:
        """Return the teams and their usage."""
        from pipollux_sched.views.teams import list_teams  # imports numpy

        return list_teams(self._store)

    def cluster(self, query: JobQuery, num_events: int = 0) -> ClusterView:
        """Return an overview: nodes, counts, a page of jobs, the last events."""
        return cluster_view(self._store, query, num_events)

    def usage(self, since: float, num_parts: int) -> UsageView:
        """Return the slot usage of the nodes since a time, in equal intervals."""
        return node_usage(self._store, since, num_parts)

    def plan(self, policy: str | None = None, seed: int = 0) -> PlanView:
        """Return what the scheduler would decide now, under its own policy or another."""
        from pipollux_sched.planning.dry_run import live_plan

        return live_plan(self._store, policy, seed)

    def forecasts(self) -> ForecastsView:
        """Return the forecasts of unfinished jobs, and how past ones turned out."""
        return list_forecasts(self._store)

    def report(self, jobs: Sequence[str] = (), seconds: float | None = None) -> str:
        """Return the report of these jobs (empty: all) as HTML."""
        from pipollux_sched.report.run_events import kept_report

        return kept_report(self._store, jobs, seconds)

    def events(
        self,
        after: int = 0,
        *,
        job: str | None = None,
        types: Collection[str] = (),
        limit: int = PAGE,
    ) -> list[dict[str, Any]]:
        """Return the events with ids above `after`, oldest first."""
        return self._store.events(after, job=job, types=types or None, limit=limit)

    def latest_events(
        self, limit: int, *, job: str | None = None, types: Collection[str] = ()
    ) -> list[dict[str, Any]]:
        """Return the newest events, at most `limit`, oldest first."""
        return self._store.latest_events(limit, job=job, types=types or None)

    def last_event(self) -> int:
        """Return the id of the newest event; 0 if there is none."""
        return self._store.last_event()

    def last_event_before(self, seconds: float) -> int:
        """Return the id of the last event that is more than `seconds` old."""
        return last_event_before(self._store, seconds)

    def follow(
        self, after: int, *, job: str | None = None, types: Collection[str] = ()
    ) -> Generator[dict[str, Any]]:
        """Yield the events with ids above `after`, then new ones as they happen."""
        while True:
            page = self.events(after, job=job, types=types)
            yield from page
            if page:
                after = page[-1]["id"]
            else:
                time.sleep(POLL_INTERVAL)

    def logs(self, name: str) -> list[LogTail]:
        """Return the list of a job's logs."""
        return list_logs(self._directory, name)

    def read_log(self, name: str, attempt: int, replica: int, offset: int) -> LogPart:
        """Read a replica's log from an offset."""
        return read_log(self._directory, name, attempt, replica, offset)


if TYPE_CHECKING:
    Reader: TypeAlias = LocalReader | Client


@contextmanager
def reading(state_dir: Path | None) -> Iterator[Reader]:
    """Open a scheduler by its URL, else the store in a state directory, for reading."""
    server = chosen_server()
    if server is not None:
        with server.client() as client:
            yield client
        return
    directory = StateDir.choose(state_dir)
    with Store(directory.store) as store:
        yield LocalReader(store, directory)


@contextmanager
def asking(state_dir: Path | None) -> Iterator[Client]:
    """Open a client of the scheduler with this URL, else of a state directory's scheduler."""
    from pipollux_sched.client.client import Client

    server = chosen_server()
    with Client.of(StateDir.choose(state_dir)) if server is None else server.client() as client:
        yield client


def tell_unserved(reader: Reader, then: str = "this is the last recorded state") -> None:
    """Print on standard error that the output is not live, if no scheduler runs."""
    if not reader.served:
        typer.echo(f"No scheduler serves {reader.where}: {then}.", err=True)


FOLLOWING = "new output follows when one is started"
"""What `tell_unserved` says in place of the last recorded state when output is followed."""
