"""Which destinations each event is for: those of the job, of its user and of its team."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pipollux_sched.spec.notify import NotifySpec, parse_notify
from pipollux_sched.spec.teams import JobOwner, TeamsSpec
from pipollux_sched.store.notifications import NotifiedJob, NotifyRule


class Destination(NamedTuple):
    """One destination for the events of a job."""

    key: str
    """The same for all events that go there."""
    label: str
    spec: NotifySpec
    """The events that are sent, and, unless it was resolved, the destination."""
    target: Mapping[str, Any]
    """The destination, with its secrets."""
    since: float
    """Time from which events are sent."""


def owner_of(user: str | None) -> str:
    """Return the owner of the channels of a user; None: of jobs of no user."""
    return f"user:{user or ''}"


def kind_of(event: Mapping[str, Any]) -> str | None:
    """Return the kind of notification that an event of a job is for; None: for none."""
    match event["type"]:
        case "complete":
            return "completed"
        case "failed" | "cancelled" | "waiting" | "forecast_missed":
            return str(event["type"])
        case "allocated":
            return None if event["nodes"] else "preempted"
        case "stopping" | "restarting":
            return "preempted" if event.get("cluster") else None
        case _:
            return None


@dataclass(frozen=True)
class Rules:
    """The rules that some jobs are subject to."""

    teams: TeamsSpec | None
    by_owner: Mapping[str, Sequence[NotifyRule]]

    @classmethod
    def of(cls, teams: TeamsSpec | None, rules: Iterable[NotifyRule]) -> Rules:
        """Return rules in the order of their owners."""
        found: dict[str, list[NotifyRule]] = {}
        for rule in rules:
            found.setdefault(rule.owner, []).append(rule)
        return cls(teams, found)

    def destinations(self, name: str, job: NotifiedJob) -> Iterator[Destination]:
        """Yield the destinations for the events of a job; a trial has none, its sweep has."""
        if job.is_trial:
            return
        channels = {rule.name: rule for rule in self.by_owner.get(owner_of(job.user), ())}
        for rule in self.by_owner.get(f"job:{name}", ()):
            spec = parse_notify(rule.spec)
            if spec.channel is None:
                yield _destination(rule.key, spec, rule.spec, rule.created_at)
            elif spec.channel in channels:
                channel = channels[spec.channel]
                since = max(rule.created_at, channel.created_at)
                yield _of_channel(channel, spec, since)
        for channel in channels.values():
            yield _of_channel(channel, parse_notify(channel.spec), channel.created_at)
        if self.teams is None:
            return
        own = self.teams.team_of(JobOwner(name, job.team, job.user, None))
        for team in self.teams.teams:
            if team.name == own:
                for number, spec in enumerate(team.notify):
                    key = f"team:{own}/{number}"
                    yield _destination(key, spec, spec.revealed(), 0.0)

    def for_event(self, event: Mapping[str, Any], kind: str, job: NotifiedJob) -> list[Destination]:
        """Return the destinations of an event, each once."""
        found: dict[str, Destination] = {}
        for one in self.destinations(event["job"], job):
            if kind not in one.spec.events or event["time"] < one.since:
                continue
            if kind == "waiting" and event["threshold"] != one.spec.waiting_after:
                continue
            found.setdefault(one.key, one)
        return list(found.values())


def _destination(key: str, spec: NotifySpec, plain: Mapping[str, Any], since: float) -> Destination:
    target = {name: plain[name] for name in ("webhook", "secret", "apprise") if name in plain}
    return Destination(key, spec.label, spec, target, since)


def _of_channel(channel: NotifyRule, spec: NotifySpec, since: float) -> Destination:
    found = _destination(channel.key, parse_notify(channel.spec), channel.spec, since)
    return found._replace(spec=spec, label=f"channel {channel.name} ({found.label})")
