"""The life of a job as a pure function: ``advance(state, event, now) -> (state, actions)``.

Nothing here touches a process, a file or a clock. The store keeps the state and writes it down
together with what is to be recorded, and only then somebody carries the actions out; so whatever is
interrupted can be told from the store alone. The phases and conditions follow Kubeflow's TrainJob:
there is one condition per type, an event of the same type updates it, and its time is that of the
last change of its status.

    Created ──► Queued ──► Running ──► Complete
                  ▲          │  ▲
                  │          ▼  │
              Suspended ◄─ Restarting ──► Failed      (a cancelled job is Failed, reason Cancelled)

A job that is being stopped stays Running (or is Restarting, when it will go on elsewhere at once)
until its processes have ended; `JobState.intent` says what the stop is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from .events import (
    Action,
    Allocate,
    Cancel,
    Event,
    Exited,
    FirstStep,
    Launch,
    Record,
    Recover,
    Retry,
    RetryAfter,
    Shutdown,
    Started,
    Stop,
    Submit,
)
from .state import Condition, Intent, JobState, Outcome, Phase

BACKOFF_LIMIT = 60.0
"""Longest wait before a failed job is launched again, in seconds."""

Transition: TypeAlias = tuple[JobState, tuple[Action, ...]]


def backoff(failures: int) -> float:
    """Return the seconds to wait before a restart after so many failures: 1, 2, 4, … up to 60."""
    return float(min(2.0 ** (max(failures, 1) - 1), BACKOFF_LIMIT))


def advance(state: JobState, event: Event, now: float) -> Transition:
    """Say what becomes of a job, and what is to be done, when `event` happens at the time `now`.

    An event that does not matter in the present state (a late exit of an old generation, a decision
    on a job that has ended) changes nothing and asks for nothing.

    Example:
        >>> state, actions = advance(JobState(), Allocate(["node-a"], "a slot is free"), now=0.0)
        >>> state.phase, state.generation, actions[-1]
        (<Phase.RUNNING: 'Running'>, 1, Launch(generation=1, nodes=('node-a',)))
    """
    match event:
        case Submit():
            return _submit(state, event, now)
        case Allocate():
            return _allocate(state, event, now)
        case Started():
            return _started(state, event, now)
        case FirstStep():
            return _first_step(state, event, now)
        case Exited():
            return _exited(state, event, now)
        case Retry():
            return _retry(state, event, now)
        case Cancel():
            return _cancel(state, now)
        case Shutdown():
            return _shutdown(state, now)
        case Recover():
            return _recover(state, now)


def with_condition(
    conditions: Sequence[Condition], phase: Phase, reason: str, message: str, now: float
) -> tuple[Condition, ...]:
    """Return the conditions of a job now in `phase`: that one true, all others false."""
    others = tuple(
        replace(entry, status=False, time=now) if entry.status else entry
        for entry in conditions
        if entry.type is not phase
    )
    before = next((entry for entry in conditions if entry.type is phase), None)
    since = before.time if before is not None and before.status else now
    return (*others, Condition(phase, True, reason, message, since))


def _enter(
    state: JobState, phase: Phase, reason: str, message: str, now: float, **changes: Any
) -> JobState:
    conditions = with_condition(state.conditions, phase, reason, message, now)
    return replace(state, phase=phase, conditions=conditions, **changes)


def _submit(state: JobState, event: Submit, now: float) -> Transition:
    if state.phase is Phase.CREATED:
        fresh = replace(state, max_restarts=event.max_restarts)
        return _enter(fresh, Phase.CREATED, "Submitted", "The job was submitted.", now), ()
    if state.phase is Phase.FAILED:
        fresh = replace(state, max_restarts=event.max_restarts, failures=0)
        message = "The job was submitted again and goes on from its last checkpoint."
        return _enter(fresh, Phase.CREATED, "SubmittedAgain", message, now), ()
    return state, ()


def _allocate(state: JobState, event: Allocate, now: float) -> Transition:
    nodes = tuple(event.nodes)
    if state.phase.ended or state.intent is not None:
        return state, ()
    if state.launched:
        return _reallocate_running(state, event, nodes, now)
    if not nodes:
        if state.phase in (Phase.QUEUED, Phase.SUSPENDED):
            return state, ()
        return _enter(state, Phase.QUEUED, "NoRoom", event.why, now, allocation=()), ()
    record = _allocated(state, event, nodes)
    if state.phase is Phase.RESTARTING:  # it waits after a failure, and is launched when that ends
        changed = (nodes, event.num_stages) != (state.allocation, state.num_stages)
        return _given(state, event), (record,) if changed else ()
    launched, actions = _launch(_given(state, event), event.why, now)
    return launched, (record, *actions)


def _reallocate_running(
    state: JobState, event: Allocate, nodes: tuple[str, ...], now: float
) -> Transition:
    if sorted(nodes) == sorted(state.launched) and event.num_stages == state.launched_stages:
        return state, ()
    phase, reason, intent = (
        (Phase.RESTARTING, "Moving", Intent.MOVE)
        if nodes
        else (Phase.RUNNING, "Stopping", Intent.SUSPEND)
    )
    actions = (_allocated(state, event, nodes), *_stop(state, event.why))
    given = _given(state, event)
    return _enter(given, phase, reason, event.why, now, intent=intent), actions


def _given(state: JobState, event: Allocate) -> JobState:
    """Return the job with what it was given; one that holds nothing keeps its number of stages."""
    num_stages = event.num_stages if event.nodes else state.num_stages
    return replace(state, allocation=tuple(event.nodes), num_stages=num_stages)


def _allocated(state: JobState, event: Allocate, nodes: tuple[str, ...]) -> Record:
    data = {
        "num_stages": event.num_stages,
        "num_microbatches": None,
        "atomic_bsz": None,
        "accum_steps": None,
        "batch_size": None,
        "speedup": None,
        **event.details,
        "nodes": list(nodes),
        "num_replicas": len(nodes),
        "previous": list(state.launched or state.allocation),
        "why": event.why,
    }
    return Record("allocated", state.generation + 1, data)


def _launch(state: JobState, message: str, now: float) -> Transition:
    """Start the next generation where `state.allocation` says."""
    generation = state.generation + 1
    launched = _enter(
        state,
        Phase.RUNNING,
        "Starting",
        message,
        now,
        generation=generation,
        launched=state.allocation,
        launched_stages=state.num_stages,
        settled=False,
        intent=None,
    )
    return launched, (Launch(generation, state.allocation, state.num_stages),)


def _stop(state: JobState, why: str) -> tuple[Action, ...]:
    generation = state.generation
    return (
        Record("stopping", generation, {"why": why}),
        Stop(generation, why, graceful=state.settled),
    )


def _started(state: JobState, event: Started, _now: float) -> Transition:
    if event.generation != state.generation or not state.launched:
        return state, ()
    data = {"pids": list(event.pids), "port": event.port}
    return state, (Record("started", event.generation, data),)


def _first_step(state: JobState, event: FirstStep, now: float) -> Transition:
    if event.generation != state.generation or state.settled or not state.launched:
        return state, ()
    data = {"step": event.step, "restart_seconds": event.restart_seconds}
    actions = (Record("first_step", event.generation, data),)
    if state.intent is not None:
        return replace(state, settled=True), actions
    message = f"Training since step {event.step} on {', '.join(state.launched)}."
    return _enter(state, Phase.RUNNING, "Training", message, now, settled=True), actions


def _exited(state: JobState, event: Exited, now: float) -> Transition:
    if event.generation != state.generation or not state.launched:
        return state, ()
    gone = replace(state, launched=(), launched_stages=None, settled=False, intent=None)
    if event.outcome is Outcome.COMPLETE:
        message = "Every replica ended with exit status 0."
        data = {"step": event.step, "epoch": event.epoch}
        ended = _enter(gone, Phase.COMPLETE, "Finished", message, now, allocation=())
        return ended, (Record("complete", event.generation, data),)
    if state.intent is not None:
        return _exited_as_asked(gone, state.intent, event, now)
    if event.outcome is Outcome.STOPPED:
        why = "The job was stopped from outside and is launched again."
        stopped = Record("stopped", event.generation, {"step": event.step})
        restarting = Record(
            "restarting", event.generation, {"why": why, "restarts": state.failures}
        )
        waiting = _enter(gone, Phase.RESTARTING, "StoppedFromOutside", why, now)
        return waiting, (stopped, restarting, RetryAfter(event.generation, backoff(1)))
    return _failed(gone, event, now)


def _exited_as_asked(state: JobState, intent: Intent, event: Exited, now: float) -> Transition:
    step = event.step if event.outcome is Outcome.STOPPED else None
    stopped = Record("stopped", event.generation, {"step": step})
    match intent:
        case Intent.MOVE:
            launched, actions = _launch(state, state.message, now)
            return launched, (stopped, *actions)
        case Intent.SUSPEND:
            message = "The job waits until the allocator gives it room again."
            return _enter(state, Phase.SUSPENDED, "Preempted", message, now, allocation=()), (
                stopped,
            )
        case Intent.SHUTDOWN:
            message = "The scheduler was stopped; the job goes on when it is back."
            return _enter(
                state, Phase.SUSPENDED, "SchedulerStopped", message, now, allocation=()
            ), (stopped,)
        case Intent.CANCEL:
            cancelled, actions = _cancelled(state, now)
            return cancelled, (stopped, *actions)


def _failed(state: JobState, event: Exited, now: float) -> Transition:
    failures = state.failures + 1
    counted = replace(state, failures=failures)
    if failures > state.max_restarts:
        times = "once" if failures == 1 else f"{failures} times"
        why = f"Failed {times}, max_restarts is {state.max_restarts}: {event.message}"
        ended = _enter(counted, Phase.FAILED, "TooManyFailures", why, now, allocation=())
        return ended, (Record("failed", event.generation, {"why": why}),)
    seconds = backoff(failures)
    data = {"why": event.message, "restarts": failures}
    waiting = _enter(counted, Phase.RESTARTING, "Failed", event.message, now)
    return waiting, (
        Record("restarting", event.generation, data),
        RetryAfter(event.generation, seconds),
    )


def _retry(state: JobState, event: Retry, now: float) -> Transition:
    waits = state.phase is Phase.RESTARTING and not state.launched
    if not waits or event.generation != state.generation:
        return state, ()
    return _launch(state, state.message, now)


def _cancel(state: JobState, now: float) -> Transition:
    if state.phase.ended:
        return state, ()
    if not state.launched:
        return _cancelled(state, now)
    actions = _stop(state, "cancelled") if state.intent is None else ()
    message = "The job was cancelled and is being stopped."
    return _enter(state, Phase.RUNNING, "Stopping", message, now, intent=Intent.CANCEL), actions


def _cancelled(state: JobState, now: float) -> Transition:
    ended = _enter(
        state, Phase.FAILED, "Cancelled", "The job was cancelled.", now, allocation=(), intent=None
    )
    return ended, (Record("cancelled", state.generation or None),)


def _shutdown(state: JobState, now: float) -> Transition:
    if state.phase.ended or state.intent in (Intent.CANCEL, Intent.SHUTDOWN):
        return state, ()
    message = "The scheduler is being stopped."
    if state.launched:
        actions = _stop(state, "the scheduler is being stopped") if state.intent is None else ()
        changes: dict[str, Any] = {"allocation": (), "intent": Intent.SHUTDOWN}
        return _enter(state, Phase.RUNNING, "Stopping", message, now, **changes), actions
    if state.phase is Phase.RESTARTING:
        return _enter(state, Phase.SUSPENDED, "SchedulerStopped", message, now, allocation=()), ()
    return state, ()


def _recover(state: JobState, now: float) -> Transition:
    if state.phase.ended:
        return state, ()
    lost = (Record("stopped", state.generation, {"step": None}),) if state.launched else ()
    gone = replace(
        state, allocation=(), launched=(), launched_stages=None, settled=False, intent=None
    )
    if state.intent is Intent.CANCEL:
        cancelled, actions = _cancelled(gone, now)
        return cancelled, (*lost, *actions)
    message = "A new scheduler has taken the job over."
    return _enter(gone, Phase.QUEUED, "SchedulerRestarted", message, now), lost
