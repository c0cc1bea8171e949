"""The life of a job as a pure function: ``advance(state, event, now) -> (state, actions)``.

The store commits the new state together with its records, and only then are the actions carried
out; so the store alone suffices to recover from an interruption. The phases and conditions follow
Kubeflow's TrainJob: there is one condition per type, an event of the same type updates it, and its
time is that of the last change of its status.

    Created ──► Queued ──► Running ──► Complete
                  ▲          │  ▲
                  │          ▼  │
              Suspended ◄─ Restarting ──► Failed      (a cancelled job is Failed, reason Cancelled)

A job that is being stopped stays Running (or is Restarting, if it continues elsewhere immediately)
until its processes have ended; `JobState.intent` is the reason for the stop.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipollux_utils.text import spell_nodes

from . import requests, resizes
from .events import (
    Adopt,
    Allocate,
    Cancel,
    ChangeOverdue,
    ChangeRefused,
    DependencyEnded,
    ElasticReady,
    Event,
    Exited,
    Expire,
    FirstStep,
    HeartbeatLost,
    JoiningReplicaLost,
    Kill,
    NodeLost,
    NotAdopted,
    Record,
    Recover,
    Rerun,
    Resume,
    Retry,
    RetryAfter,
    Shutdown,
    Stalled,
    Started,
    StartOverdue,
    Submit,
    Survived,
    Suspend,
    SweepEnded,
    SweepProgress,
    Switched,
    WaitingToJoin,
)
from .state import NO_ROOM, SCHEDULER_STOPPED, Intent, JobState, Outcome, Phase
from .steps import (
    NOT_ADOPTED,
    Transition,
    ended_early,
    enter,
    hold_back,
    set_aside,
    start,
    stop,
    stopped_record,
)

FORGIVEN_AFTER = 600.0
"""Seconds after which earlier failures do not count any more: one a month must not end a job."""
BACKOFF_LIMIT = 60.0
EXIT_CODE = "ExitCode"
"""The reason of a job whose `exit_codes` decided on a restart."""
START_TIMEOUT = "StartTimeout"
"""The reason of an attempt that was ended because it did not take its first step in time."""


def backoff(times: int) -> float:
    """Return the backoff in seconds before a restart: 1, 2, 4, … up to 60."""
    return float(min(2.0 ** min(max(times, 1) - 1, 10), BACKOFF_LIMIT))


def advance(state: JobState, event: Event, now: float) -> Transition:
    """Return a job's next state, and the actions to carry out, for an event at the time `now`.

    An event that does not matter in the present state (a late exit of an old attempt, a decision on
    a job that has ended) changes nothing and causes no action.

    Example:
        >>> state, actions = advance(JobState(), Allocate(["node-a"], "a slot is free"), now=0.0)
        >>> state.phase, actions[-1]
        (<Phase.RUNNING: 'Running'>, Start(attempt=1, nodes=('node-a',), num_stages=None))
    """
    match event:
        case Submit():
            return _submit(state, event, now)
        case Rerun():
            return requests.rerun(state, event, now)
        case DependencyEnded():
            return requests.dependency_ended(state, event, now)
        case Allocate():
            return _allocate(state, event, now)
        case Started():
            return _started(state, event, now)
        case FirstStep():
            return _first_step(state, event, now)
        case ElasticReady():
            return resizes.ready(state, event)
        case WaitingToJoin():
            return resizes.waiting_to_join(state, event)
        case Switched():
            return resizes.switched(state, event, now)
        case Survived():
            return resizes.survived(state, event, now)
        case ChangeRefused():
            return resizes.refused(state, event, now)
        case JoiningReplicaLost():
            return resizes.joining_replica_lost(state, event, now)
        case ChangeOverdue():
            return resizes.overdue(state, event, now)
        case Exited():
            return _exited(state, event, now)
        case Retry():
            return _retry(state, event, now)
        case HeartbeatLost():
            return _heartbeat_lost(state, event, now)
        case Stalled():
            return _stalled(state, event, now)
        case StartOverdue():
            return _start_overdue(state, event, now)
        case NodeLost():
            return _node_lost(state, event, now)
        case Cancel():
            return requests.cancel(state, event, now)
        case SweepProgress():
            return requests.sweep_progress(state, event, now)
        case SweepEnded():
            return requests.sweep_ended(state, event, now)
        case Suspend():
            return requests.suspend(state, now)
        case Resume():
            return requests.resume(state, now)
        case Expire():
            return requests.expire(state, event, now)
        case Shutdown():
            return requests.shutdown(state, now)
        case Adopt():
            return requests.adopt(state, event.attempt)
        case NotAdopted():
            return requests.not_adopted(state, event.attempt, event.why, now)
        case Recover():
            return requests.recover(state, event, now)


def _submit(state: JobState, event: Submit, now: float) -> Transition:
    if state.phase is Phase.CREATED:
        fresh = replace(state, max_restarts=event.max_restarts, waits_for=event.waits_for)
        if event.waits_for:
            return hold_back(fresh, now), ()
        return enter(fresh, Phase.CREATED, "Submitted", "The job was submitted.", now), ()
    if state.phase is Phase.FAILED:
        changes: dict[str, Any] = {"failures": 0, "waits_for": event.waits_for, "ready_at": None}
        fresh = replace(state, max_restarts=event.max_restarts, **changes)
        if event.waits_for:
            return hold_back(fresh, now), ()
        message = "The job was submitted again and continues from its last checkpoint."
        return enter(fresh, Phase.CREATED, "SubmittedAgain", message, now), ()
    return state, ()


def _allocate(state: JobState, event: Allocate, now: float) -> Transition:
    nodes = tuple(event.nodes)
    if state.phase.ended or state.suspended or state.waits_for or state.intent is not None:
        return state, ()
    if state.membership.change is not None:  # the next decision comes after the resize
        return state, ()
    if state.running_on:
        return _reallocate_running(state, event, nodes, now)
    if not nodes:
        if state.phase in (Phase.QUEUED, Phase.SUSPENDED):
            if event.restates and event.why != state.message:
                reason = NO_ROOM if state.phase is Phase.QUEUED else state.reason
                return enter(state, state.phase, reason, event.why, now), ()
            return state, ()
        return enter(state, Phase.QUEUED, NO_ROOM, event.why, now, assigned=()), ()
    record = _allocated(state, event, nodes)
    if state.phase is Phase.RESTARTING:  # it starts after its backoff
        changed = (nodes, event.num_stages) != (state.assigned, state.num_stages)
        return _given(state, event), (record,) if changed else ()
    started, actions = start(_given(state, event), event.why, now)
    return started, (record, *actions)


def _reallocate_running(
    state: JobState, event: Allocate, nodes: tuple[str, ...], now: float
) -> Transition:
    if sorted(nodes) == sorted(state.running_on) and event.num_stages == state.running_stages:
        return state, ()
    restarts = resizes.why_restart(state, nodes, event.num_stages) if nodes else None
    if nodes and restarts is None:
        allocated = _allocated(state, event, nodes, elastic=True)
        return resizes.begin(state, nodes, event.why, allocated, now)
    phase, reason, intent = (
        (Phase.RESTARTING, "Moving", Intent.MOVE)
        if nodes
        else (Phase.RUNNING, "Stopping", Intent.SUSPEND)
    )
    record = _allocated(state, event, nodes, why_restart=restarts)
    actions = (record, *stop(state, event.why))
    given = _given(state, event)
    return enter(given, phase, reason, event.why, now, intent=intent), actions


def _given(state: JobState, event: Allocate) -> JobState:
    """Return the job with its new allocation; without one, the number of stages stays."""
    num_stages = event.num_stages if event.nodes else state.num_stages
    return replace(state, assigned=tuple(event.nodes), num_stages=num_stages)


def _allocated(
    state: JobState,
    event: Allocate,
    nodes: tuple[str, ...],
    *,
    elastic: bool = False,
    why_restart: str | None = None,
) -> Record:
    data = {
        "num_stages": event.num_stages,
        "num_microbatches": None,
        "atomic_bsz": None,
        "accum_steps": None,
        "batch_size": None,
        "speedup": None,
        "previous_speedup": None,
        **event.details,
        "nodes": list(nodes),
        "num_replicas": len(nodes),
        "previous": list(state.running_on or state.assigned),
        "why": event.why,
        "elastic": elastic,
        "why_restart": why_restart,
    }
    return Record("allocated", state.attempt + (0 if elastic else 1), data)


def _started(state: JobState, event: Started, _now: float) -> Transition:
    if event.attempt != state.attempt or not state.running_on:
        return state, ()
    data = {"replicas": list(event.replicas)}
    return state, (Record("started", event.attempt, data),)


def _first_step(state: JobState, event: FirstStep, now: float) -> Transition:
    if event.attempt != state.attempt or state.training or not state.running_on:
        return state, ()
    data = {"step": event.step, "restart_seconds": event.restart_seconds}
    actions = (Record("first_step", event.attempt, data),)
    if state.intent is not None:
        return replace(state, training=True), actions
    message = f"Training since step {event.step} on {spell_nodes(state.running_on)}."
    return enter(state, Phase.RUNNING, "Training", message, now, training=True), actions


def _exited(state: JobState, event: Exited, now: float) -> Transition:
    if event.attempt != state.attempt or not state.running_on:
        return state, ()
    gone = replace(state, running_on=(), running_stages=None, training=False, intent=None)
    if event.outcome is Outcome.COMPLETE:
        message = "Every replica ended with exit status 0."
        data = {"step": event.step, "epoch": event.epoch}
        ended = enter(gone, Phase.COMPLETE, "Finished", message, now)
        return ended, (Record("complete", event.attempt, data),)
    if state.intent is not None:
        return _exited_as_asked(gone, state.intent, event, now)
    if event.outcome is Outcome.STOPPED:
        why = event.message or "The job was stopped from outside and is started again."
        stopped = stopped_record(event.attempt, event.step, event.checkpoint)
        told = {"why": why, "restarts": state.failures, "cluster": True}
        restarting = Record("restarting", event.attempt, told)
        # Back off if a cluster repeatedly ends each new attempt.
        interruptions = 1 if state.training else state.interruptions + 1
        waiting = enter(
            gone, Phase.RESTARTING, "StoppedFromOutside", why, now, interruptions=interruptions
        )
        seconds = backoff(interruptions)
        return waiting, (stopped, restarting, RetryAfter(event.attempt, seconds))
    return _failed(state, gone, event, now)


def _failed(state: JobState, gone: JobState, event: Exited, now: float) -> Transition:
    """Restart a job (`gone`: without its failed attempt) with a backoff, or give it up."""
    if event.rule == "ignore" and not event.cannot_start:
        return _ignored(state, gone, event, now)
    failures = 1 if _trained_for_long(state, now) else state.failures + 1
    counted = replace(gone, failures=failures)
    if event.cannot_start:
        why = f"The script cannot start, and is not tried again. {event.message}"
        ended = enter(counted, Phase.FAILED, "CannotStart", why, now, assigned=())
        return ended, (Record("failed", event.attempt, {"why": why}),)
    if event.rule == "fail":
        why = f"Not restarted after exit status {event.status} (exit_codes). {event.message}"
        ended = enter(counted, Phase.FAILED, EXIT_CODE, why, now)
        return ended, (Record("failed", event.attempt, {"why": why}),)
    if failures > state.max_restarts:
        times = "once" if failures == 1 else f"{failures} times"
        why = f"Failed {times}, max_restarts is {state.max_restarts}: {event.message}"
        ended = enter(counted, Phase.FAILED, "TooManyFailures", why, now)
        return ended, (Record("failed", event.attempt, {"why": why}),)
    seconds = backoff(failures)
    data = {"why": event.message, "restarts": failures}
    waiting = enter(counted, Phase.RESTARTING, "Failed", event.message, now)
    return waiting, (Record("restarting", event.attempt, data), RetryAfter(event.attempt, seconds))


def _ignored(state: JobState, gone: JobState, event: Exited, now: float) -> Transition:
    """Restart a job after an exit status that is no failure, with a backoff if it comes at once."""
    interruptions = 1 if state.training else state.interruptions + 1
    data = {"why": event.message, "restarts": state.failures}
    changes = {"interruptions": interruptions}
    waiting = enter(gone, Phase.RESTARTING, EXIT_CODE, event.message, now, **changes)
    restarting = Record("restarting", event.attempt, data)
    return waiting, (restarting, RetryAfter(event.attempt, backoff(interruptions)))


def _trained_for_long(state: JobState, now: float) -> bool:
    since = state.condition.time if state.condition else now
    return state.phase is Phase.RUNNING and state.training and now - since >= FORGIVEN_AFTER


def _retry(state: JobState, event: Retry, now: float) -> Transition:
    waits = state.phase is Phase.RESTARTING and not state.running_on
    if not waits or event.attempt != state.attempt:
        return state, ()
    return start(state, state.message, now)


def _heartbeat_lost(state: JobState, event: HeartbeatLost, now: float) -> Transition:
    if event.attempt != state.attempt or not state.running_on:
        return state, ()
    if event.replica is not None and resizes.can_survive(state, [event.replica]):
        return resizes.let_go(state, [event.replica], event.why)
    record = Record("heartbeat_lost", event.attempt, {"why": event.why})
    lost = enter(state, state.phase, "HeartbeatLost", event.why, now, **_unchanged(state))
    return lost, (record, Kill(event.attempt, event.why))


def _stalled(state: JobState, event: Stalled, now: float) -> Transition:
    """Kill a stalled attempt; its end is handled later.

    An attempt without any step is still starting, and one that was asked to stop is saving: both
    have separate limits.
    """
    trains = state.running_on and state.training and state.intent is None
    if event.attempt != state.attempt or not trains:
        return state, ()
    record = Record("stalled", event.attempt, {"why": event.why})
    stalled = enter(state, state.phase, "Stalled", event.why, now, **_unchanged(state))
    return stalled, (record, Kill(event.attempt, event.why))


def _start_overdue(state: JobState, event: StartOverdue, now: float) -> Transition:
    starts = state.running_on and not state.training and state.intent is None
    if event.attempt != state.attempt or not starts or state.reason == START_TIMEOUT:
        return state, ()
    record = Record("stalled", event.attempt, {"why": event.why})
    overdue = enter(state, state.phase, START_TIMEOUT, event.why, now)
    return overdue, (record, Kill(event.attempt, event.why))


def _unchanged(state: JobState) -> dict[str, Any]:
    """Return the changes that abandon a resize under way, because all replicas have to end."""
    if state.membership.change is None:
        return {}
    return {"membership": replace(state.membership, change=None), "assigned": state.running_on}


def _node_lost(state: JobState, event: NodeLost, now: float) -> Transition:
    """Kill the rest of an attempt whose node is dead; the job waits for room elsewhere."""
    if event.attempt != state.attempt or not state.running_on:
        return state, ()
    places = zip(state.membership.replicas, state.running_on, strict=True)
    lost = [replica for replica, node in places if node == event.node]
    if lost and resizes.can_survive(state, lost):
        return resizes.let_go(state, lost, event.why)
    # `cluster`: neither the scheduler nor a person took the slots.
    record = Record("stopping", event.attempt, {"why": event.why, "cluster": True})
    kill = Kill(event.attempt, event.why)
    if state.intent not in (None, Intent.MOVE):
        return state, (record, kill)
    stopping = enter(
        state, Phase.RUNNING, "NodeLost", event.why, now, assigned=(), intent=Intent.SUSPEND
    )
    return stopping, (record, kill)


def _exited_as_asked(state: JobState, intent: Intent, event: Exited, now: float) -> Transition:
    # An attempt that was killed after it had saved has failed, but loses nothing.
    stopped = stopped_record(event.attempt, event.step, event.checkpoint)
    match intent:
        case Intent.MOVE:
            started, actions = start(state, state.message, now)
            return started, (stopped, *actions)
        case Intent.SUSPEND:
            return set_aside(state, now), (stopped,)
        case Intent.SHUTDOWN | Intent.REPLACE if state.suspended:
            return set_aside(state, now), (stopped,)
        case Intent.SHUTDOWN:
            message = "The scheduler was stopped; the job continues when it is back."
            waiting = enter(state, Phase.SUSPENDED, SCHEDULER_STOPPED, message, now, assigned=())
            return waiting, (stopped,)
        case Intent.REPLACE:
            queued = enter(state, Phase.QUEUED, NOT_ADOPTED, state.message, now, assigned=())
            return queued, (stopped,)
        case Intent.CANCEL | Intent.EXPIRE:
            ended, actions = ended_early(state, intent, now)
            return ended, (stopped, *actions)
