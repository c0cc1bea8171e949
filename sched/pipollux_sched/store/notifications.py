"""Notifications: the channels of users, the entries of jobs, and the outbox.

The outbox is filled from the event log: the rows of new events and the position in the log are
written in one transaction, so that each event becomes one notification, whenever the scheduler is
killed. A row is sent after it was committed, under an id that all attempts share.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from sqlalchemy import delete, func, or_, select, update
from sqlalchemy.orm import Session

from . import journal
from .database import Database
from .errors import ChannelExistsError, UnknownChannelError
from .tables import EventRow, JobRow, MetaRow, NotificationRow, NotifyRuleRow

_CURSOR = "notifications"
_NO_USER = "user:"
"""Owner of the channels for jobs of no user."""
QUIET = 3600.0
"""Seconds in which further preemptions of a job are collected into one notification."""
BURST = 20
"""Notifications to one destination within `BURST_SECONDS`; further ones are collected."""
BURST_SECONDS = 600.0
MOST_PENDING = 200
"""Undelivered notifications to one destination; further ones are collected."""
MOST_ITEMS = 50
"""Collected events that a notification lists one by one; all are counted."""
_KEPT = 1000
"""Number of finished notifications that are kept."""
_MOST_NAMES = 500
"""Names per query: databases limit the values of one."""
DIGEST = "digest"


class DeliveryState(StrEnum):
    """The state of a notification."""

    PENDING = "pending"
    DELIVERED = "delivered"
    FAILED = "failed"
    """It was given up."""


class NotifyRule(NamedTuple):
    """A channel of a user, or an entry of a job."""

    owner: str
    """`user:NAME`, `user:` for jobs of no user, or `job:NAME`."""
    name: str
    spec: Mapping[str, Any]
    created_at: float

    @property
    def key(self) -> str:
        """Identifies the destination."""
        return f"{self.owner}/{self.name}"


class NotifiedJob(NamedTuple):
    """What rules depend on, of a job."""

    user: str | None
    team: str | None
    is_trial: bool
    spec: Mapping[str, Any]


class NewNotification(NamedTuple):
    """A notification to put into the outbox."""

    channel: str
    label: str
    target: Mapping[str, Any]
    kind: str
    job: str
    item: Mapping[str, Any]
    """The event as JSON: kind, job, time, text, …"""


@dataclass(frozen=True)
class Notification:
    """A row of the outbox."""

    id: int
    message: str
    """The id that a receiver can drop repeated deliveries by."""
    channel: str
    label: str
    kind: str
    job: str | None
    items: Sequence[Mapping[str, Any]]
    count: int
    """Number of events; `items` has at most `MOST_ITEMS`."""
    target: Mapping[str, Any] | None
    created_at: float
    due_at: float
    attempts: int
    state: DeliveryState
    finished_at: float | None
    error: str | None


class NotificationRecords:
    """The notifications of a store."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock

    # Rules

    def add_channel(self, owner: str, name: str, spec: Mapping[str, Any]) -> NotifyRule:
        """Add a channel, or raise `ChannelExistsError`."""
        with self._database.write() as session:
            if _rule(session, owner, name) is not None:
                raise ChannelExistsError(
                    f"there is a channel {name!r}; remove it first, with: "
                    f"pipollux notify remove {name}"
                )
            now = self._clock()
            row = NotifyRuleRow(owner=owner, name=name, spec=dict(spec), created_at=now)
            session.add(row)
            return _to_rule(row)

    def remove_channel(self, owner: str, name: str) -> NotifyRule:
        """Remove a channel with its undelivered notifications, or raise `UnknownChannelError`."""
        with self._database.write() as session:
            row = _rule(session, owner, name)
            if row is None:
                raise _unknown_channel(session, owner, name)
            found = _to_rule(row)
            session.delete(row)
            pending = NotificationRow.state == DeliveryState.PENDING.value
            session.execute(
                delete(NotificationRow).where(NotificationRow.channel == found.key, pending)
            )
            return found

    def channel(self, owner: str, name: str) -> NotifyRule:
        """Return a channel, or raise `UnknownChannelError`."""
        with self._database.read() as session:
            row = _rule(session, owner, name)
            if row is None:
                raise _unknown_channel(session, owner, name)
            return _to_rule(row)

    def channels(self, owner: str | None = None) -> list[NotifyRule]:
        """Return the channels of an owner (None: of all users)."""
        query = select(NotifyRuleRow).order_by(NotifyRuleRow.owner, NotifyRuleRow.name)
        if owner is None:
            query = query.where(NotifyRuleRow.owner.startswith("user:"))
        else:
            query = query.where(NotifyRuleRow.owner == owner)
        with self._database.read() as session:
            return [_to_rule(row) for row in session.scalars(query)]

    def rules(self, owners: Collection[str] | None = None) -> list[NotifyRule]:
        """Return the rules of some owners (None: of all)."""
        query = select(NotifyRuleRow).order_by(NotifyRuleRow.id)
        with self._database.read() as session:
            if owners is None:
                return [_to_rule(row) for row in session.scalars(query)]
            names = sorted(owners)
            found: list[NotifyRuleRow] = []
            for first in range(0, len(names), _MOST_NAMES):
                some = names[first : first + _MOST_NAMES]
                found += session.scalars(query.where(NotifyRuleRow.owner.in_(some))).all()
            return [_to_rule(row) for row in found]

    # From events to the outbox

    def cursor(self) -> int:
        """Return the id of the last event that was collected; at first, keep the newest one's."""
        with self._database.write() as session:
            row = session.get(MetaRow, _CURSOR)
            if row is not None:
                return int(row.value)
            newest = session.scalar(select(func.max(EventRow.id))) or 0
            session.add(MetaRow(key=_CURSOR, value=str(newest)))
            return newest

    def jobs(self, names: Collection[str]) -> dict[str, NotifiedJob]:
        """Return what rules depend on, of these jobs; jobs that are gone are left out."""
        found: dict[str, NotifiedJob] = {}
        ordered = sorted(names)
        with self._database.read() as session:
            for first in range(0, len(ordered), _MOST_NAMES):
                some = ordered[first : first + _MOST_NAMES]
                query = select(JobRow.name, JobRow.spec, JobRow.trial).where(JobRow.name.in_(some))
                for name, spec, trial in session.execute(query):
                    user, team = spec.get("user"), spec.get("team")
                    found[name] = NotifiedJob(user, team, trial is not None, spec)
        return found

    def collect(self, cursor: int, found: Sequence[NewNotification]) -> None:
        """Put notifications into the outbox, and store the position in the event log."""
        with self._database.write(durable=bool(found)) as session:
            session.merge(MetaRow(key=_CURSOR, value=str(cursor)))
            now = self._clock()
            for one in found:
                _put(session, one, now)
                session.flush()

    def put(self, one: NewNotification) -> None:
        """Put one notification into the outbox."""
        with self._database.write() as session:
            _put(session, one, self._clock())

    def log_once(self, kind: str, job: str, data: Mapping[str, Any], same: Sequence[str]) -> bool:
        """Log an event of a job, unless one with the same values of `same` is in the log."""
        with self._database.write() as session:
            mine = (EventRow.job == job, EventRow.type == kind)
            for row in session.scalars(select(EventRow).where(*mine).order_by(EventRow.id.desc())):
                if all(row.data.get(name) == data[name] for name in same):
                    return False
            journal.log(session, self._clock(), kind, job, None, data)
            return True

    # Delivery

    def due(self, busy: Collection[str], limit: int) -> list[Notification]:
        """Return the oldest due notification of each channel that is not `busy`.

        A channel whose last attempt failed waits for the next one with all its notifications.
        """
        now, pending = self._clock(), NotificationRow.state == DeliveryState.PENDING.value
        held = select(NotificationRow.channel).where(
            pending, NotificationRow.attempts > 0, NotificationRow.due_at > now
        )
        oldest = (
            select(func.min(NotificationRow.id))
            .where(pending, NotificationRow.due_at <= now)
            .where(NotificationRow.channel.not_in(held))
            .where(NotificationRow.channel.not_in(sorted(busy)[:_MOST_NAMES]))
            .group_by(NotificationRow.channel)
            .order_by(func.min(NotificationRow.due_at))
            .limit(limit)
        )
        with self._database.read() as session:
            ids = session.scalars(oldest).all()
            query = select(NotificationRow).where(NotificationRow.id.in_(ids))
            return [_to_notification(row) for row in session.scalars(query)]

    def begin(self, number: int) -> Notification | None:
        """Note that an attempt begins; nothing is added to it from now on. None: it is gone."""
        with self._database.write(durable=False) as session:
            row = session.get(NotificationRow, number)
            if row is None or row.state != DeliveryState.PENDING.value:
                return None
            row.attempts += 1
            return _to_notification(row)

    def finish(self, number: int, error: str | None) -> None:
        """Store that a notification was delivered or, with an error, given up."""
        with self._database.write() as session:
            state = DeliveryState.DELIVERED if error is None else DeliveryState.FAILED
            values = {"state": state.value, "finished_at": self._clock(), "error": error}
            mine = NotificationRow.id == number
            # The destination, with its secrets, is not needed any more.
            session.execute(update(NotificationRow).where(mine).values(**values, target=None))
            _prune(session)

    def postpone(self, number: int, due_at: float, error: str) -> None:
        """Store that an attempt failed, and when the next one is due."""
        with self._database.write() as session:
            mine = NotificationRow.id == number
            session.execute(update(NotificationRow).where(mine).values(due_at=due_at, error=error))

    def recent(
        self, limit: int, *, job: str | None = None, user: str | None = None
    ) -> list[Notification]:
        """Return the newest notifications, at most `limit`, oldest first.

        Of all, of a job, or those of a user: to the user's channels, and about the user's jobs.
        """
        query = select(NotificationRow).order_by(NotificationRow.id.desc()).limit(limit)
        if job is not None:
            query = query.where(NotificationRow.job == job)
        if user is not None:
            own = select(JobRow.name).where(JobRow.spec["user"].as_string() == user)
            prefix = NotificationRow.channel.startswith(f"user:{user}/", autoescape=True)
            query = query.where(or_(prefix, NotificationRow.job.in_(own)))
        with self._database.read() as session:
            return [_to_notification(row) for row in reversed(session.scalars(query).all())]


def keep_entries(
    session: Session, job: str, entries: Sequence[Mapping[str, Any]], now: float
) -> None:
    """Replace the entries of a job."""
    owner = f"job:{job}"
    session.execute(delete(NotifyRuleRow).where(NotifyRuleRow.owner == owner))
    for number, spec in enumerate(entries):
        session.add(NotifyRuleRow(owner=owner, name=str(number), spec=dict(spec), created_at=now))


def _put(session: Session, new: NewNotification, now: float) -> None:
    mine = NotificationRow.channel == new.channel
    due_at, job, digest = now, new.job, False
    if new.kind == "preempted":
        last = session.scalar(
            select(func.max(NotificationRow.created_at)).where(
                mine, NotificationRow.job == new.job, NotificationRow.kind == new.kind
            )
        )
        if last is not None and last > now - QUIET:
            due_at, digest = last + QUIET, True
    if not digest and _crowded(session, new.channel, now):
        due_at, digest, job = now + BURST_SECONDS, True, ""
    if digest and _add_to_digest(session, new, job):
        return
    session.add(
        NotificationRow(
            message=f"msg_{uuid.uuid4().hex}",
            channel=new.channel,
            label=new.label,
            target=dict(new.target),
            kind=DIGEST if digest and not job else new.kind,
            job=job or None,
            items=[dict(new.item)],
            num_items=1,
            created_at=now if not digest or not job else due_at,
            due_at=due_at,
            attempts=0,
            state=DeliveryState.PENDING.value,
        )
    )


def _crowded(session: Session, channel: str, now: float) -> bool:
    mine = NotificationRow.channel == channel
    recent = (NotificationRow.created_at > now - BURST_SECONDS, NotificationRow.kind != DIGEST)
    number = select(func.count()).select_from(NotificationRow).where(mine)
    if (session.scalar(number.where(*recent)) or 0) >= BURST:
        return True
    pending = NotificationRow.state == DeliveryState.PENDING.value
    return (session.scalar(number.where(pending)) or 0) >= MOST_PENDING


def _add_to_digest(session: Session, new: NewNotification, job: str) -> bool:
    """Add an event to the notification that collects further ones; return whether there is one."""
    row = session.scalar(
        select(NotificationRow)
        .where(
            NotificationRow.channel == new.channel,
            NotificationRow.kind == (new.kind if job else DIGEST),
            NotificationRow.job == job if job else NotificationRow.job.is_(None),
            NotificationRow.state == DeliveryState.PENDING.value,
            NotificationRow.attempts == 0,
        )
        .order_by(NotificationRow.id.desc())
        .limit(1)
    )
    if row is None:
        return False
    row.num_items += 1
    row.items = [*row.items, dict(new.item)][-MOST_ITEMS:]
    return True


def _prune(session: Session) -> None:
    done = NotificationRow.state != DeliveryState.PENDING.value
    newest = select(NotificationRow.id).where(done).order_by(NotificationRow.id.desc())
    last = session.scalar(newest.offset(_KEPT).limit(1))
    if last is not None:
        session.execute(delete(NotificationRow).where(done, NotificationRow.id <= last))


def _rule(session: Session, owner: str, name: str) -> NotifyRuleRow | None:
    mine = (NotifyRuleRow.owner == owner, NotifyRuleRow.name == name)
    return session.scalar(select(NotifyRuleRow).where(*mine))


def _unknown_channel(session: Session, owner: str, name: str) -> UnknownChannelError:
    # Only admins ask for the channels of no user, so that they may learn whose the others are.
    query = select(NotifyRuleRow.owner).where(NotifyRuleRow.name == name)
    query = query.where(NotifyRuleRow.owner.startswith("user:")).order_by(NotifyRuleRow.owner)
    other = session.scalar(query.limit(1)) if owner == _NO_USER else None
    if other is None:
        return UnknownChannelError(f"no channel is named {name!r}; see: pipollux notify")
    user = other.removeprefix(_NO_USER)
    return UnknownChannelError(
        f"no channel of yours is named {name!r}, but one of {user} is; add --user {user}"
    )


def _to_rule(row: NotifyRuleRow) -> NotifyRule:
    return NotifyRule(row.owner, row.name, row.spec, row.created_at)


def _to_notification(row: NotificationRow) -> Notification:
    return Notification(
        id=row.id,
        message=row.message,
        channel=row.channel,
        label=row.label,
        kind=row.kind,
        job=row.job,
        items=row.items,
        count=row.num_items,
        target=row.target,
        created_at=row.created_at,
        due_at=row.due_at,
        attempts=row.attempts,
        state=DeliveryState(row.state),
        finished_at=row.finished_at,
        error=row.error,
    )
