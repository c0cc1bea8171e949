"""Invariants of every job's state."""

from __future__ import annotations

from collections.abc import Iterator

from .state import SWEEPING, ChangeStage, Intent, JobState, Phase


def broken_rules(state: JobState) -> list[str]:
    """Return the rules that `state` breaks, as sentences; `advance` breaks none.

    Example:
        >>> broken_rules(JobState())
        []
        >>> broken_rules(JobState(phase=Phase.COMPLETE, suspended=True))[0]
        'a job that has ended is not suspended'
    """
    rules = (*_ended(state), *_running(state), *_waiting(state), *_conditions(state))
    return [sentence for sentence, holds in rules if not holds]


def _ended(state: JobState) -> Iterator[tuple[str, bool]]:
    unfinished = not state.phase.ended
    yield "a job that has ended is not suspended", unfinished or not state.suspended
    yield "a job that has ended is assigned nothing", unfinished or not state.assigned
    yield "a job that has ended runs nowhere", unfinished or not state.running_on
    given_up = state.phase is Phase.FAILED
    restarts_left = state.failures <= state.max_restarts
    yield "a job is given up after more than max_restarts failures", given_up or restarts_left


def _running(state: JobState) -> Iterator[tuple[str, bool]]:
    runs = bool(state.running_on)
    moves = state.intent is Intent.MOVE
    yield (
        "a job is Running exactly while it has an attempt that does not move",
        ((state.phase is Phase.RUNNING) == (runs and not moves)) or state.reason == SWEEPING,
    )
    yield "a job that moves is Restarting", not moves or state.phase is Phase.RESTARTING
    yield "only a running attempt has an intent", runs or state.intent is None
    yield "only a running attempt trains", runs or not state.training
    yield ("only a running attempt has a number of stages", (runs or state.running_stages is None))
    yield "what runs is an attempt of a number", not runs or state.attempt > 0
    first = state.first_attempt
    yield (
        "a run begins with an attempt that there was, or with the next one",
        1 <= first <= state.attempt + 1,
    )
    yield "what runs belongs to the present run", not runs or first <= state.attempt
    running = state.running_on, state.running_stages
    yield (
        "an attempt that may run on is what was assigned",
        (
            not runs
            or state.intent is not None
            or state.membership.change is not None
            or running == (state.assigned, state.num_stages)
        ),
    )
    yield from _membership(state)


def _membership(state: JobState) -> Iterator[tuple[str, bool]]:
    membership, change = state.membership, state.membership.change
    yield (
        "every running replica has an id of its own",
        len(set(membership.replicas)) == len(membership.replicas) == len(state.running_on),
    )
    yield (
        "ids are given out once",
        all(replica < membership.num_ids for replica in membership.replicas),
    )
    if change is None:
        return
    yield "only what trains is resized", state.training and state.intent is None
    yield (
        "an elastic resize leads to a new membership",
        membership.number < change.number == membership.highest,
    )
    yield (
        "some replica survives an elastic resize",
        bool(set(membership.replicas) & set(change.replicas)),
    )
    yield (
        "an elastic resize leads to what was assigned",
        (change.nodes, state.running_stages) == (state.assigned, state.num_stages),
    )
    forming = change.stage is ChangeStage.FORMING
    waiting = {replica for replica, _ in membership.joining} - set(change.waiting_to_join)
    yield "replicas form their groups when all joining replicas wait", forming != bool(waiting)


def _waiting(state: JobState) -> Iterator[tuple[str, bool]]:
    empty = not (state.running_on or state.assigned)
    idle = state.phase in (Phase.CREATED, Phase.QUEUED, Phase.SUSPENDED)
    yield "a job that waits for an allocation has none", not idle or empty
    restarts = state.phase is Phase.RESTARTING
    yield (
        "a job that waits for others has no allocation",
        not state.waits_for or (empty and state.phase in (Phase.QUEUED, Phase.SUSPENDED)),
    )
    yield "a job that restarts has an allocation", not restarts or bool(state.assigned)
    stops = state.running_on and state.intent not in (None, Intent.MOVE)
    yield (
        "a job that its user suspended is Suspended, or being stopped",
        (not state.suspended or state.phase is Phase.SUSPENDED or bool(stops)),
    )


def _conditions(state: JobState) -> Iterator[tuple[str, bool]]:
    types = [entry.type for entry in state.conditions]
    yield "there is one condition of a type at most", len(set(types)) == len(types)
    true = [entry.type for entry in state.conditions if entry.status]
    fresh = state == JobState(num_stages=state.num_stages)
    yield "the one condition that is true is the phase", true == [state.phase] or fresh
