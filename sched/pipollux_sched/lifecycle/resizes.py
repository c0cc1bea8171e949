"""Transitions of elastic resizes: replicas join and leave while the others train.

    STARTING ──► FORMING ──► Switched        (a change without joining replicas begins with FORMING)
        └───────────┴──────► abandoned: the training replicas continue as before

From FORMING on, the change belongs to the job: it happens, or one of its replicas refuses it. The
scheduler abandons a change by itself only before that, when no replica knows of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from pipollux_utils.text import spell_nodes

from .events import (
    Action,
    ChangeOverdue,
    ChangeRefused,
    ElasticReady,
    EndReplicas,
    GiveUpAfter,
    JoiningReplicaLost,
    Record,
    StartReplicas,
    Survived,
    Switched,
    WaitingToJoin,
)
from .state import ChangeStage, Intent, JobState, Membership, PendingResize, Phase
from .steps import Transition, enter, stop

START_LIMIT = 600.0
"""Seconds in which all joining replicas must be ready."""
MOST_FAILURES = 3
"""Failed resizes, or losses, before a restart: replicas that die repeatedly must count."""
FORGOTTEN_AFTER = 600.0


def why_restart(state: JobState, nodes: Sequence[str], num_stages: int | None) -> str | None:
    """Return why a change of a job's allocation is a restart; None: a resize is possible."""
    if num_stages != state.running_stages:
        return "its number of stages changes"
    if not Counter(nodes) & Counter(state.running_on):
        return "none of its replicas stays where it is"
    if not state.training:
        return "it has not taken its first step"
    if any(replica < state.membership.fixed for replica in _leaving(state, nodes)):
        return "a server runs beside a replica that would leave"
    return state.membership.why_not


def _staying(state: JobState, left: Counter[str]) -> list[tuple[int, str]]:
    """Return the replicas that stay where they are, with their nodes, and take these from `left`,
    which has the number of replicas of each node.
    """
    staying = []
    for replica, node in zip(state.membership.replicas, state.running_on, strict=True):
        if left[node] > 0:
            left[node] -= 1
            staying.append((replica, node))
    return staying


def _leaving(state: JobState, nodes: Sequence[str]) -> set[int]:
    staying = {replica for replica, _ in _staying(state, Counter(nodes))}
    return set(state.membership.replicas) - staying


def begin(
    state: JobState, nodes: Sequence[str], why: str, allocated: Record, now: float
) -> Transition:
    """Begin an elastic resize of a job that trains."""
    membership = state.membership
    left = Counter(nodes)
    staying = _staying(state, left)
    coming = list(enumerate(left.elements(), membership.num_ids))
    replicas, places = zip(*staying, *coming, strict=True)
    stage = ChangeStage.STARTING if coming else ChangeStage.FORMING
    change = PendingResize(membership.highest + 1, replicas, places, stage)
    membership = replace(
        membership, num_ids=membership.num_ids + len(coming), highest=change.number, change=change
    )
    changing = enter(
        state, state.phase, "Changing", why, now, membership=membership, assigned=places
    )
    data = {
        "membership": change.number,
        "joining": [{"replica": replica, "node": node} for replica, node in coming],
        "leaving": list(membership.leavers),
        "why": why,
    }
    attempt = state.attempt
    actions: tuple[Action, ...] = (allocated, Record("changing", attempt, data))
    if coming:
        actions += (
            StartReplicas(attempt, tuple(coming)),
            GiveUpAfter(attempt, change.number, START_LIMIT),
        )
    return changing, actions


def can_survive(state: JobState, lost: Collection[int]) -> bool:
    """Return whether the replicas of a job can continue without some of them."""
    membership = state.membership
    trains = state.training and state.intent is None and membership.why_not is None
    trains = trains and all(replica >= membership.fixed for replica in lost)
    return trains and bool(set(membership.replicas) - {*lost, *membership.lost})


def let_go(state: JobState, lost: Sequence[int], why: str) -> Transition:
    """End lost replicas, while the others continue: see `can_survive`."""
    data = {"why": why, "replicas": list(lost)}
    record = Record("replicas_lost", state.attempt, data)
    all_lost = tuple(sorted({*state.membership.lost, *lost}))
    noted = replace(state, membership=replace(state.membership, lost=all_lost))
    return noted, (record, EndReplicas(state.attempt, tuple(lost), at_once=True))


def survived(state: JobState, event: Survived, now: float) -> Transition:
    """Record that a job continues without its lost replicas."""
    membership = state.membership
    lost = tuple(replica for replica in membership.replicas if replica not in event.replicas)
    mine = not set(event.replicas) - set(membership.replicas) and bool(event.replicas)
    if not _runs(state, event.attempt) or not (mine and lost) or event.number <= membership.number:
        return state, ()
    places = dict(zip(membership.replicas, state.running_on, strict=True))
    nodes = tuple(places[replica] for replica in event.replicas)
    coming = tuple(replica for replica, _ in membership.joining)
    data = {
        "membership": event.number,
        "step": event.step,
        "pause_seconds": event.seconds,
        "lost": list(lost),
        "nodes": list(nodes),
        "replicas": list(event.replicas),
        "num_replicas": len(nodes),
        "num_stages": state.running_stages,
    }
    membership = replace(
        membership,
        number=event.number,
        replicas=event.replicas,
        highest=max(membership.highest, event.number),
        change=None,
        lost=tuple(replica for replica in membership.lost if replica in event.replicas),
    )
    membership = _counted(membership, "the last one was a loss of replicas", now)
    message = f"Training on {spell_nodes(nodes)}, without replicas that were lost."
    going_on = replace(state, running_on=nodes, assigned=nodes)
    return _training(going_on, membership, message, now), (
        Record("survived", state.attempt, data),
        EndReplicas(state.attempt, (*lost, *coming), at_once=True),
    )


def ready(state: JobState, event: ElasticReady) -> Transition:
    """Record whether the replicas can be resized."""
    membership = state.membership
    if not _runs(state, event.attempt) or membership.failures >= MOST_FAILURES:
        return state, ()
    if membership.change is not None or event.why_not == membership.why_not:
        return state, ()
    membership = replace(membership, why_not=event.why_not, fixed=event.fixed)
    return replace(state, membership=membership), ()


def waiting_to_join(state: JobState, event: WaitingToJoin) -> Transition:
    """Record waiting replicas; when all wait, all replicas are asked to form their groups."""
    change = state.membership.change
    if not _runs(state, event.attempt) or change is None:
        return state, ()
    missing = {replica for replica, _ in state.membership.joining} - set(change.waiting_to_join)
    new = [replica for replica in dict.fromkeys(event.replicas) if replica in missing]
    if not new:
        return state, ()
    stage = ChangeStage.FORMING if len(new) == len(missing) else change.stage
    changed = replace(change, waiting_to_join=(*change.waiting_to_join, *new), stage=stage)
    records = tuple(
        Record("waiting_to_join", state.attempt, {"replica": replica}) for replica in new
    )
    return replace(state, membership=replace(state.membership, change=changed)), records


def switched(state: JobState, event: Switched, now: float) -> Transition:
    """Record the new membership; the replicas that left end by themselves."""
    change, membership = state.membership.change, state.membership
    if not _runs(state, event.attempt) or not _forms(change, event.number):
        return state, ()
    assert change is not None  # noqa: S101  # it is forming
    data = {
        "membership": change.number,
        "step": event.step,
        "pause_seconds": event.seconds,
        "nodes": list(change.nodes),
        "replicas": list(change.replicas),
        "num_replicas": len(change.nodes),
        "num_stages": state.running_stages,
    }
    actions: tuple[Action, ...] = (Record("changed", state.attempt, data),)
    if membership.leavers:
        actions += (EndReplicas(state.attempt, membership.leavers, at_once=False),)
    membership = replace(membership, number=change.number, replicas=change.replicas, change=None)
    since = "" if event.step is None else f" since step {event.step}"
    message = f"Training{since} on {spell_nodes(change.nodes)}."
    changed = replace(state, running_on=change.nodes)
    return _training(changed, membership, message, now), actions


def refused(state: JobState, event: ChangeRefused, now: float) -> Transition:
    """Abandon a refused resize; restart the job if every resize would be refused."""
    change = state.membership.change
    if not _runs(state, event.attempt) or not _forms(change, event.number):
        return state, ()
    assert change is not None  # noqa: S101  # it is forming
    if not event.for_good:
        return _abandon(state, event.why, now)
    why = f"It cannot be resized ({event.why}), so it is restarted."
    record = Record("change_abandoned", state.attempt, _told(change, event.why))
    moving = enter(state, Phase.RESTARTING, "Moving", why, now, intent=Intent.MOVE)
    return moving, (record, *stop(state, why))


def joining_replica_lost(state: JobState, event: JoiningReplicaLost, now: float) -> Transition:
    """Abandon a resize whose joining replica is gone; replicas that form it notice it."""
    coming = [replica for replica, _ in state.membership.joining]
    if not _runs(state, event.attempt) or event.replica not in coming:
        return state, ()
    return _abandon(state, event.why, now)


def overdue(state: JobState, event: ChangeOverdue, now: float) -> Transition:
    """Abandon a resize whose joining replicas are not ready in time."""
    change = state.membership.change
    if not _runs(state, event.attempt) or change is None or change.number != event.number:
        return state, ()
    if change.stage is not ChangeStage.STARTING:
        return state, ()
    return _abandon(state, event.why, now)


def again(state: JobState) -> tuple[Action, ...]:
    """Return the actions of a new scheduler for a resize that it has found."""
    change = state.membership.change
    if change is None or change.stage is not ChangeStage.STARTING:
        return ()
    return (GiveUpAfter(state.attempt, change.number, START_LIMIT),)


def _abandon(state: JobState, why: str, now: float) -> Transition:
    membership, change = state.membership, state.membership.change
    assert change is not None  # noqa: S101  # checked by the callers
    coming = tuple(replica for replica, _ in membership.joining)
    actions: tuple[Action, ...] = (Record("change_abandoned", state.attempt, _told(change, why)),)
    if coming:
        actions += (EndReplicas(state.attempt, coming, at_once=True),)
    membership = replace(
        _counted(membership, f"the last resize was abandoned: {why}", now), change=None
    )
    message = f"Training on {spell_nodes(state.running_on)}; an elastic resize was abandoned: {why}"
    kept = replace(state, assigned=state.running_on)
    return _training(kept, membership, message, now), actions


def _training(state: JobState, membership: Membership, message: str, now: float) -> JobState:
    return enter(state, state.phase, "Training", message, now, membership=membership)


def _counted(membership: Membership, why: str, now: float) -> Membership:
    failures = membership.failures + 1 if now - membership.failed_at < FORGOTTEN_AFTER else 1
    why_not = membership.why_not
    if failures >= MOST_FAILURES:
        why_not = f"{failures} failures; {why}"
    return replace(membership, failures=failures, failed_at=now, why_not=why_not)


def _told(change: PendingResize, why: str) -> dict[str, object]:
    return {"membership": change.number, "why": why}


def _runs(state: JobState, attempt: int) -> bool:
    return attempt == state.attempt and bool(state.running_on) and state.intent is None


def _forms(change: PendingResize | None, number: int) -> bool:
    return change is not None and (change.number, change.stage) == (number, ChangeStage.FORMING)
