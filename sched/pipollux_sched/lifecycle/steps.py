"""Building blocks of transitions: entering a phase, starting, stopping, ending."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from .events import Action, Record, Start, Stop
from .state import CANCELLED, PRUNED, Condition, Intent, JobState, Membership, Phase

SUSPENDED_BY_USER = "SuspendedByUser"
DEADLINE = "DeadlineExceeded"
RUN_TIME = "RunTimeExceeded"
WAITS_FOR_JOBS = "WaitsForJobs"
NOT_ADOPTED = "NotAdopted"

MOST_NAMED = 3
"""Largest number of jobs that a message names."""

_AT_REST: dict[str, Any] = {
    "assigned": (),
    "running_on": (),
    "running_stages": None,
    "training": False,
    "intent": None,
    "suspended": False,
    "waits_for": (),
}

Transition: TypeAlias = tuple[JobState, tuple[Action, ...]]


def with_condition(
    conditions: Sequence[Condition], phase: Phase, reason: str, message: str, now: float
) -> tuple[Condition, ...]:
    """Return the conditions of a job in `phase`: that one true, all others false."""
    others = tuple(
        replace(entry, status=False, time=now) if entry.status else entry
        for entry in conditions
        if entry.type is not phase
    )
    before = next((entry for entry in conditions if entry.type is phase), None)
    since = before.time if before is not None and before.status else now
    return (*others, Condition(phase, True, reason, message, since))


def stopped_record(attempt: int, step: int | None, checkpoint: int | None) -> Record:
    """Return the record of a stop: where it saved, or else where the job continues from."""
    data: dict[str, Any] = {"step": step}
    if step is None and checkpoint is not None:
        data["checkpoint"] = checkpoint
    return Record("stopped", attempt, data)


def enter(
    state: JobState, phase: Phase, reason: str, message: str, now: float, **changes: Any
) -> JobState:
    """Return the job in a phase, for a reason; an ended job has no fields of a running one."""
    conditions = with_condition(state.conditions, phase, reason, message, now)
    entered = replace(state, phase=phase, conditions=conditions, **changes)
    if phase.ended:
        entered = replace(entered, **_AT_REST)
    if not entered.running_on:
        return replace(entered, membership=Membership())
    if entered.intent is not None:  # it stops with all its replicas, including joining ones
        return replace(entered, membership=replace(entered.membership, change=None))
    return entered


def start(state: JobState, message: str, now: float) -> Transition:
    """Start the next attempt on `state.assigned`."""
    attempt, num_replicas = state.attempt + 1, len(state.assigned)
    started = enter(
        state,
        Phase.RUNNING,
        "Starting",
        message,
        now,
        attempt=attempt,
        running_on=state.assigned,
        running_stages=state.num_stages,
        training=False,
        intent=None,
        membership=Membership(1, tuple(range(num_replicas)), num_replicas, highest=1),
    )
    return started, (Start(attempt, state.assigned, state.num_stages),)


def stop(state: JobState, why: str) -> tuple[Action, ...]:
    """Ask the running attempt to save and end."""
    attempt = state.attempt
    return (Record("stopping", attempt, {"why": why}), Stop(attempt, why, graceful=state.training))


def ended_early(state: JobState, intent: Intent, now: float) -> Transition:
    """End a job that was cancelled, or whose deadline has passed, when nothing of it runs."""
    if intent is Intent.EXPIRE:
        known = state.reason in (DEADLINE, RUN_TIME)
        why = state.message if known else "The job's deadline has passed."
        reason = state.reason if known else DEADLINE
        record = Record("failed", state.attempt or None, {"why": why})
        return enter(state, Phase.FAILED, reason, why, now), (record,)
    pruned = state.reason == PRUNED
    reason, message = (PRUNED, state.message) if pruned else (CANCELLED, "The job was cancelled.")
    ended = enter(state, Phase.FAILED, reason, message, now)
    return ended, (Record("pruned" if pruned else "cancelled", state.attempt or None),)


def hold_back(state: JobState, now: float) -> JobState:
    """Queue a job that waits for other jobs."""
    waits = " and for ".join(str(entry) for entry in state.waits_for[:MOST_NAMED])
    more = len(state.waits_for) - MOST_NAMED
    message = f"The job waits for {waits}{f' and for {more} more' if more > 0 else ''}."
    return enter(state, Phase.QUEUED, WAITS_FOR_JOBS, message, now, assigned=())


def set_aside(state: JobState, now: float) -> JobState:
    """Suspend a job without processes, until the allocator or its user resumes it."""
    if state.suspended:
        message = "The job was suspended by its user, and waits to be resumed."
        return enter(state, Phase.SUSPENDED, SUSPENDED_BY_USER, message, now, assigned=())
    message = "The job waits until the allocator gives it room again."
    return enter(state, Phase.SUSPENDED, "Preempted", message, now, assigned=())
