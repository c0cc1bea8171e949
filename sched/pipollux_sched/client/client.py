"""The client behind the command line: one method per request to a scheduler."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

from pipollux_sched.spec.job import JobSpec
from pipollux_sched.spec.notify import NewChannel
from pipollux_sched.spec.teams import TeamsSpec
from pipollux_sched.spec.tokens import NewToken
from pipollux_sched.store import JobQuery, ListedPhase, NodeCondition, StateDir
from pipollux_sched.views.cluster import MOST_JOBS
from pipollux_sched.views.explanation import ExplanationView
from pipollux_sched.views.logs import OFFSET_HEADER, LogPart
from pipollux_sched.views.models import (
    ClusterView,
    DeletedJobView,
    ForecastsView,
    JobCurves,
    JobDetails,
    JobForecastView,
    JobView,
    ListedJob,
    LogTail,
    NodeDetails,
    PlanView,
    SweepDetails,
    SweepView,
    UsageView,
)
from pipollux_sched.views.notifications import ChannelView, MadeChannel, NotificationsView
from pipollux_sched.views.teams import TeamsView
from pipollux_sched.views.tokens import MadeToken, TokenView

from .connection import TIMEOUT, ClientError, Connection, UnreachableError

LONG_TIMEOUT = 600.0
"""Seconds for slow requests: deletion of large checkpoints, thousands of jobs, a report, a plan."""


class Client:
    """Client of a running scheduler.

    Example:
        >>> with Client.at("https://pipollux.example.com", token) as client:
        ...     client.cancel("char-lm")
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @classmethod
    def at(
        cls, url: str, token: str, *, timeout: float = TIMEOUT, ca_file: Path | None = None
    ) -> Self:
        """Return a client of a scheduler by its URL, or that of a tunnel or proxy.

        Raises:
            ClientError: the URL or the token is malformed, or `ca_file` holds no certificates.
        """
        return cls(Connection(url, token, timeout, ca_file=ca_file))

    @classmethod
    def of(cls, state_dir: StateDir, *, timeout: float = TIMEOUT) -> Self:
        """Return a client of the scheduler that serves a directory; `ClientError`: none does."""
        nobody = (
            f"no scheduler serves {state_dir.path}; start one with: "
            f"pipollux serve --state-dir {state_dir.path}"
        )
        info = state_dir.read_server()
        if info is None:
            raise UnreachableError(nobody)
        ca_file = None if info.ca_file is None else Path(info.ca_file)
        if state_dir.is_served():  # its process id may have been reused since it was killed
            nobody = (
                f"no scheduler answers at {info.local_url}, the address of {state_dir.path}: "
                f"process {info.pid}; see its output, and that the host name can be resolved"
            )
        # Without a proxy: the scheduler is on this machine, or shares files with it.
        return cls(Connection(info.local_url, info.token, timeout, nobody, ca_file, by_proxy=False))

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def where(self) -> str:
        """The URL of the scheduler."""
        return self._connection.url

    @property
    def served(self) -> bool:
        """Whether a running scheduler is connected: always True."""
        return True

    # Commands on jobs and nodes

    def submit(self, spec: JobSpec) -> JobView:
        """Submit a job; return its new state."""
        return self._connection.get(JobView, "POST", "/jobs", json=spec.revealed())

    def submit_all(self, specs: Sequence[JobSpec]) -> list[JobView]:
        """Submit all of the jobs or none of them; return their new states."""
        # Without defaults, a thousand jobs fit into one request.
        jobs = [spec.revealed(exclude_defaults=True) for spec in specs]
        # One request for any number of jobs, because all or none are accepted.
        return self._connection.get(
            list[JobView], "POST", "/jobs/batch", json={"jobs": jobs}, timeout=LONG_TIMEOUT
        )

    def forecast_new(self, specs: Sequence[JobSpec]) -> list[JobForecastView]:
        """Return when jobs would start and end if they were submitted now; store nothing."""
        jobs = [spec.model_dump(mode="json", exclude_defaults=True) for spec in specs]
        return self._connection.get(
            list[JobForecastView],
            "POST",
            "/jobs/forecast",
            json={"jobs": jobs},
            timeout=LONG_TIMEOUT,
        )

    def cancel(self, name: str) -> JobView:
        """Cancel a job; return its new state."""
        return self._connection.get(JobView, "DELETE", _job(name))

    def suspend(self, name: str) -> JobView:
        """Suspend a job: it checkpoints and releases its slots."""
        return self._connection.get(JobView, "POST", _job(name, "suspend"))

    def resume(self, name: str) -> JobView:
        """Resume a suspended job."""
        return self._connection.get(JobView, "POST", _job(name, "resume"))

    def rerun(self, name: str, *, from_scratch: bool = False) -> JobView:
        """Rerun a job that has ended, from scratch or from its last checkpoint."""
        query = {"from_scratch": from_scratch}
        return self._connection.get(JobView, "POST", _job(name, "rerun"), params=query)

    def move(self, name: str, team: str) -> JobView:
        """Move a job to another team."""
        return self._connection.get(JobView, "PUT", _job(name, "team"), json={"team": team})

    def delete(self, name: str) -> DeletedJobView:
        """Delete a job that has ended; return its last phase and the folders that remain."""
        return self._connection.get(
            DeletedJobView, "POST", _job(name, "delete"), timeout=LONG_TIMEOUT
        )

    def set_node(self, name: str, condition: NodeCondition, reason: str = "") -> NodeDetails:
        """Set a node ready, draining or dead; return its new state."""
        body = {"condition": condition.value, "reason": reason}
        return self._connection.get(NodeDetails, "PUT", _path("node", name), json=body)

    def set_teams(self, spec: TeamsSpec | None) -> TeamsView:
        """Replace the teams; None: remove them. Return them with their usage."""
        if spec is None:
            return self._connection.get(TeamsView, "DELETE", "/teams")
        body = spec.revealed()
        return self._connection.get(TeamsView, "PUT", "/teams", json=body)

    def teams(self) -> TeamsView:
        """Return the teams with their usage."""
        return self._connection.get(TeamsView, "GET", "/teams")

    def notifications(self) -> NotificationsView:
        """Return the channels and the last notifications that the sender may see."""
        return self._connection.get(NotificationsView, "GET", "/notifications")

    def add_channel(self, new: NewChannel) -> MadeChannel:
        """Add a channel; return it with a new key for its signatures, if one was made."""
        body = new.revealed() | {"name": new.name}
        body |= {} if new.user is None else {"user": new.user}
        return self._connection.get(MadeChannel, "POST", "/notifications/channels", json=body)

    def remove_channel(self, name: str, user: str | None = None) -> ChannelView:
        """Remove a channel; `user`: an admin's request about a user's channel."""
        query = {} if user is None else {"user": user}
        return self._connection.get(ChannelView, "DELETE", _channel(name), params=query)

    def test_channel(self, name: str, user: str | None = None) -> ChannelView:
        """Send a test notification to a channel."""
        query = {} if user is None else {"user": user}
        path = f"{_channel(name)}/test"
        return self._connection.get(ChannelView, "POST", path, params=query)

    def tokens(self) -> list[TokenView]:
        """Return the users that have a token."""
        return self._connection.get(list[TokenView], "GET", "/tokens")

    def create_token(self, new: NewToken) -> MadeToken:
        """Create a token for a user; return it, which is possible only here."""
        body = new.model_dump(mode="json")
        return self._connection.get(MadeToken, "POST", "/tokens", json=body)

    def revoke_token(self, name: str) -> TokenView:
        """Revoke a user's token."""
        return self._connection.get(TokenView, "DELETE", _path("token", name))

    def decide(self) -> None:
        """Run the allocator now instead of at the next interval."""
        self._connection.request("POST", "/decisions")

    # Queries

    def jobs(self, phases: Collection[ListedPhase] = (), *, trials: bool = True) -> list[ListedJob]:
        """Return the jobs in the given phases (empty: all), in the order of submission."""
        query = {"phase": [phase.value for phase in phases], "trials": trials}
        return self._connection.get(list[ListedJob], "GET", "/jobs", params=query)

    def job(self, name: str) -> JobDetails:
        """Return the details of a job, without its curves."""
        return self._connection.get(JobDetails, "GET", _job(name), params={"points": 0})

    def curves(self, name: str, points: int) -> JobCurves:
        """Return the details of a job, with at most `points` points of each curve."""
        return self._connection.get(JobCurves, "GET", _job(name), params={"points": points})

    def sweeps(self) -> list[SweepView]:
        """Return all sweeps, in the order of submission."""
        return self._connection.get(list[SweepView], "GET", "/sweeps")

    def sweep(self, name: str) -> SweepDetails:
        """Return a sweep with its trials."""
        return self._connection.get(SweepDetails, "GET", _path("sweep", name))

    def explanation(self, name: str) -> ExplanationView:
        """Return the explanation of a job's allocation."""
        return self._connection.get(ExplanationView, "GET", _job(name, "explanation"))

    def nodes(self) -> list[NodeDetails]:
        """Return the nodes, each with its condition and the jobs that hold its slots."""
        return self._connection.get(list[NodeDetails], "GET", "/nodes")

    def cluster(self, query: JobQuery, num_events: int = 0) -> ClusterView:
        """Return an overview: nodes, counts, a page of jobs, the last events."""
        most = sys.maxsize if query.limit is None else query.limit
        view = self._page(query, query.offset, min(most, MOST_JOBS), num_events)
        jobs, wanted = list(view.jobs), min(most, view.num_found - query.offset)
        for offset in range(MOST_JOBS, wanted, MOST_JOBS):
            size = min(MOST_JOBS, wanted - offset)
            jobs += self._page(query, query.offset + offset, size, 0).jobs
        return view.model_copy(update={"jobs": jobs})

    def _page(self, query: JobQuery, offset: int, limit: int, num_events: int) -> ClusterView:
        params = {
            "phase": [phase.value for phase in query.phases],
            "name": query.name,
            "order": query.order.value,
            "descending": query.descending,
            "offset": offset,
            "limit": limit,
            "trials": query.trials,
            "events": num_events,
        }
        return self._connection.get(ClusterView, "GET", "/overview", params=params)

    def usage(self, since: float, num_parts: int) -> UsageView:
        """Return the nodes' slot usage since a moment, in equal intervals."""
        return self._connection.get(
            UsageView, "GET", "/usage", params={"since": since, "parts": num_parts}
        )

    def plan(self, policy: str | None = None, seed: int = 0) -> PlanView:
        """Return what the scheduler would decide now, under its own policy or another."""
        query = {"seed": seed, **({} if policy is None else {"policy": policy})}
        return self._connection.get(PlanView, "GET", "/plan", params=query, timeout=LONG_TIMEOUT)

    def forecasts(self) -> ForecastsView:
        """Return the forecasts of unfinished jobs, and how past ones turned out."""
        return self._connection.get(ForecastsView, "GET", "/forecasts")

    def report(self, jobs: Sequence[str] = (), seconds: float | None = None) -> str:
        """Return the report of the given jobs (none: all), of the last `seconds`, as HTML."""
        query = {"job": list(jobs), **({} if seconds is None else {"seconds": seconds})}
        return self._connection.request("GET", "/report", params=query, timeout=LONG_TIMEOUT).text

    def metrics(self) -> str:
        """Return the metrics in Prometheus text format."""
        return self._connection.request("GET", "/metrics").text

    # Events and logs

    def events(
        self,
        after: int = 0,
        *,
        job: str | None = None,
        types: Collection[str] = (),
        limit: int = 1000,
    ) -> list[dict[str, Any]]:
        """Return the events with ids above `after`, oldest first."""
        query = {"after": after, "limit": limit, **_chosen(job, types)}
        return self._connection.get(list[dict[str, Any]], "GET", "/events", params=query)

    def latest_events(
        self, limit: int, *, job: str | None = None, types: Collection[str] = ()
    ) -> list[dict[str, Any]]:
        """Return the newest events, at most `limit`, oldest first."""
        query = {"last": limit, **_chosen(job, types)}
        return self._connection.get(list[dict[str, Any]], "GET", "/events", params=query)

    def last_event_before(self, seconds: float) -> int:
        """Return the id of the last event that is more than `seconds` old."""
        first = self._connection.get(
            list[dict[str, Any]], "GET", "/events", params={"seconds": seconds, "limit": 1}
        )
        return int(first[0]["id"]) - 1 if first else self.last_event()

    def last_event(self) -> int:
        """Return the id of the newest event, 0 if there is none."""
        return max((int(event["id"]) for event in self.latest_events(1)), default=0)

    def follow(
        self, after: int | None = None, *, job: str | None = None, types: Collection[str] = ()
    ) -> Generator[dict[str, Any]]:
        """Yield events above `after` (None: new ones) until the scheduler stops."""
        query = {key: value for key, value in (("after", after), ("job", job)) if value is not None}
        for line in self._connection.lines("/events/stream", query):
            if line.startswith("data: "):
                event = dict(json.loads(line.removeprefix("data: ")))
                if not types or event["type"] in types:
                    yield event

    def logs(self, name: str, tail: int = 0) -> list[LogTail]:
        """Return the last lines of all replica logs of a job; 0: only list the logs."""
        return self._connection.get(list[LogTail], "GET", _job(name, "logs"), params={"tail": tail})

    def read_log(self, name: str, attempt: int, replica: int, offset: int) -> LogPart:
        """Return the log of a replica from an offset on."""
        path = _job(name, f"logs/{attempt}/{replica}")
        response = self._connection.request("GET", path, params={"offset": offset})
        try:
            return LogPart(response.content, int(response.headers[OFFSET_HEADER]))
        except (KeyError, ValueError):
            raise self._connection.not_understood() from None


def _job(name: str, what: str = "") -> str:
    return _path("job", name) + (f"/{what}" if what else "")


def _channel(name: str) -> str:
    return f"/notifications{_path('channel', name)}"


def _path(kind: str, name: str) -> str:
    """Return the path of one job, node or token, whose name must be a segment of it."""
    if name in ("", ".", "..") or "/" in name:
        raise ClientError(f"no {kind} is named {name!r}; give the name of one")
    return f"/{kind}s/{quote(name, safe='')}"


def _chosen(job: str | None, types: Collection[str]) -> Mapping[str, Any]:
    return {"type": list(types), **({} if job is None else {"job": job})}
