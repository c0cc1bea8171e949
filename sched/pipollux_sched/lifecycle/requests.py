"""Transitions that users, the clock or the scheduler itself request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .events import (
    Action,
    Cancel,
    DependencyEnded,
    Expire,
    Kill,
    Record,
    Recover,
    Rerun,
    Stop,
    SweepEnded,
    SweepProgress,
)
from .resizes import again
from .state import PRUNED, SCHEDULER_STOPPED, SWEEPING, Intent, JobState, Phase
from .steps import (
    DEADLINE,
    NOT_ADOPTED,
    RUN_TIME,
    WAITS_FOR_JOBS,
    Transition,
    ended_early,
    enter,
    hold_back,
    set_aside,
    stop,
    stopped_record,
)

_FINAL = (Intent.CANCEL, Intent.EXPIRE)
"""Intents of a stop with which the job ends."""


def cancel(state: JobState, event: Cancel, now: float) -> Transition:
    """End the job: at once if nothing of it runs, else when it has saved."""
    if state.phase.ended:
        return state, ()
    if event.pruned is not None:
        return _prune(state, event.pruned, now)
    if not state.running_on:
        return ended_early(state, Intent.CANCEL, now)
    message = "The job was cancelled and is being stopped."
    return _stopping(state, "Stopping", message, "cancelled", now, intent=Intent.CANCEL)


def _prune(state: JobState, why: str, now: float) -> Transition:
    """End the job without a checkpoint, unless it is ending already."""
    if state.intent in _FINAL:
        return state, ()
    pruned = enter(state, state.phase, PRUNED, why, now)
    if not state.running_on:
        return ended_early(pruned, Intent.CANCEL, now)
    stopping = enter(state, Phase.RUNNING, PRUNED, why, now, intent=Intent.CANCEL)
    record = Record("stopping", state.attempt, {"why": why})
    return stopping, (record, Kill(state.attempt, why))


def sweep_progress(state: JobState, event: SweepProgress, now: float) -> Transition:
    """Say how far a sweep has come; it runs as long as it has trials to run."""
    if state.phase.ended or state.suspended or state.waits_for:
        return state, ()
    return enter(state, Phase.RUNNING, SWEEPING, event.message, now), ()


def sweep_ended(state: JobState, event: SweepEnded, now: float) -> Transition:
    """End a sweep."""
    if state.phase.ended:
        return state, ()
    if event.complete:
        done = enter(state, Phase.COMPLETE, "Finished", event.message, now)
        return done, (Record("complete", None, {"step": None, "epoch": None}),)
    failed = enter(state, Phase.FAILED, "NoTrialComplete", event.message, now)
    return failed, (Record("failed", None, {"why": event.message}),)


def expire(state: JobState, event: Expire, now: float) -> Transition:
    """End the job because its time is over; a job that is being cancelled stays so."""
    why, reason = event.why, RUN_TIME if event.run_time else DEADLINE
    if state.phase.ended or state.intent in _FINAL:
        return state, ()
    if not state.running_on:
        return ended_early(enter(state, state.phase, reason, why, now), Intent.EXPIRE, now)
    return _stopping(state, reason, why, why, now, intent=Intent.EXPIRE)


def suspend(state: JobState, now: float) -> Transition:
    """Suspend the job: it checkpoints and releases its slots."""
    if state.phase.ended or state.suspended or state.intent in _FINAL:
        return state, ()
    suspended = replace(state, suspended=True)
    record = Record("suspended", state.attempt or None)
    if not state.running_on:
        return set_aside(suspended, now), (record,)
    message = "The job was suspended by its user and is being stopped."
    changes: dict[str, Any] = {"assigned": (), "intent": Intent.SUSPEND}
    stopping, actions = _stopping(
        suspended, "Stopping", message, "suspended by its user", now, **changes
    )
    return stopping, (record, *actions)


def resume(state: JobState, now: float) -> Transition:
    """Resume a job that its user suspended."""
    if state.phase.ended or not state.suspended:
        return state, ()
    free = replace(state, suspended=False)
    record = Record("resumed", state.attempt or None)
    if state.running_on:  # it still stops; then it waits like a job that the allocator suspended
        if state.intent is Intent.SUSPEND:
            message = "The job was resumed: it still stops, and then waits for the allocator."
            free = enter(free, state.phase, state.reason, message, now)
        return free, (record,)
    if state.waits_for:
        return hold_back(free, now), (record,)
    message = "The job was resumed, and waits for the allocator."
    return enter(free, Phase.QUEUED, "Resumed", message, now), (record,)


def rerun(state: JobState, event: Rerun, now: float) -> Transition:
    """Rerun an ended job from its last checkpoint or from scratch, as a complete job must be."""
    more = event.from_scratch or event.more_trials
    nothing_left = state.phase is Phase.COMPLETE and not more
    if not state.phase.ended or nothing_left:
        return state, ()
    first = state.attempt + 1 if event.from_scratch else state.first_attempt
    where = "the start" if event.from_scratch else "its last checkpoint"
    fresh = replace(
        state,
        failures=0,
        max_restarts=event.max_restarts,
        first_attempt=first,
        waits_for=event.waits_for,
        ready_at=None,
    )
    record = Record("rerun", None, {"from_scratch": event.from_scratch})
    if event.waits_for:
        return hold_back(fresh, now), (record,)
    message = f"The job is run again, from {where}."
    return enter(fresh, Phase.CREATED, "RunAgain", message, now), (record,)


def dependency_ended(state: JobState, event: DependencyEnded, now: float) -> Transition:
    """Let the job start if this was the last one that it waited for; fail it if it never can."""
    mine = next((entry for entry in state.waits_for if entry.job == event.job), None)
    if state.phase.ended or mine is None:
        return state, ()
    if not mine.met_by(event.phase):
        why = f"The job can never start: it waits for {mine}, which {event.how}."
        record = Record("failed", state.attempt or None, {"why": why})
        return enter(state, Phase.FAILED, "DependencyNotMet", why, now), (record,)
    left = tuple(entry for entry in state.waits_for if entry is not mine)
    held = state.reason == WAITS_FOR_JOBS
    if left:
        waiting = replace(state, waits_for=left)
        return (hold_back(waiting, now) if held else waiting), ()
    free = replace(state, waits_for=(), ready_at=now)
    record = Record("ready", state.attempt or None)
    if not held:  # its user suspended it meanwhile
        return free, (record,)
    message = "The jobs that it waited for have ended."
    return enter(free, Phase.CREATED, "Ready", message, now), (record,)


def shutdown(state: JobState, now: float) -> Transition:
    """Stop the job with the scheduler; it continues when that is back."""
    if state.phase.ended or state.intent in (*_FINAL, Intent.SHUTDOWN):
        return state, ()
    message = "The scheduler is being stopped."
    if state.running_on:
        why = "the scheduler is being stopped"
        changes: dict[str, Any] = {"assigned": (), "intent": Intent.SHUTDOWN}
        return _stopping(state, "Stopping", message, why, now, **changes)
    if state.phase is Phase.RESTARTING:
        return enter(state, Phase.SUSPENDED, SCHEDULER_STOPPED, message, now, assigned=()), ()
    return state, ()


def adopt(state: JobState, attempt: int) -> Transition:
    """Adopt an attempt that outlived its scheduler; a stop, if any, is requested again."""
    if state.phase.ended or not state.running_on or attempt != state.attempt:
        return state, ()
    actions: tuple[Action, ...] = (Record("adopted", attempt, {"nodes": list(state.running_on)}),)
    if state.intent is not None:
        actions += (Stop(attempt, state.message, graceful=state.training),)
    return state, (*actions, *again(state))


def not_adopted(state: JobState, attempt: int, why: str, now: float) -> Transition:
    """End an attempt that cannot be adopted, without counting a failure or changing its intent."""
    if state.phase.ended or not state.running_on or attempt != state.attempt:
        return state, ()
    actions = (Record("stopping", attempt, {"why": why}),)
    if state.intent is not None:
        return state, actions
    changes: dict[str, Any] = {"assigned": (), "intent": Intent.REPLACE}
    return enter(state, Phase.RUNNING, NOT_ADOPTED, why, now, **changes), actions


def recover(state: JobState, event: Recover, now: float) -> Transition:
    """Queue a job of which a new scheduler has found no process."""
    if state.phase.ended or state.waits_for or state.reason == SWEEPING:
        return state, ()
    stopped = stopped_record(state.attempt, event.step, event.checkpoint)
    lost = (stopped,) if state.running_on else ()
    gone = replace(
        state, assigned=(), running_on=(), running_stages=None, training=False, intent=None
    )
    if state.intent is not None and state.intent in _FINAL:
        ended, actions = ended_early(gone, state.intent, now)
        return ended, (*lost, *actions)
    if state.suspended:
        return set_aside(gone, now), lost
    message = "A new scheduler has taken the job over."
    return enter(gone, Phase.QUEUED, "SchedulerRestarted", message, now), lost


def _stopping(
    state: JobState, reason: str, message: str, why: str, now: float, **changes: Any
) -> Transition:
    """Stop the running attempt, unless it is being stopped already, and set the reason."""
    actions = stop(state, why) if state.intent is None else ()
    return enter(state, Phase.RUNNING, reason, message, now, **changes), actions
