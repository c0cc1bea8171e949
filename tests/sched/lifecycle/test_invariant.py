"""What holds for a job's state holds after every event of every history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipollux_sched.lifecycle import (
    Action,
    Adopt,
    Allocate,
    Cancel,
    ChangeOverdue,
    ChangeRefused,
    ChangeStage,
    Dependency,
    DependencyEnded,
    ElasticReady,
    EndReplicas,
    Event,
    Exited,
    Expire,
    FirstStep,
    HeartbeatLost,
    Intent,
    JobState,
    JoiningReplicaLost,
    Membership,
    NodeLost,
    NotAdopted,
    Outcome,
    Phase,
    Record,
    Recover,
    Rerun,
    Resume,
    Retry,
    Shutdown,
    Stalled,
    Start,
    Started,
    StartOverdue,
    StartReplicas,
    Stop,
    Submit,
    Survived,
    Suspend,
    Switched,
    WaitingToJoin,
    When,
    advance,
    broken_rules,
    resizes,
)

WAITS = (Dependency("x"), Dependency("y", When.ENDED))
ENDED = (Phase.COMPLETE, Phase.FAILED)
SILENT = (HeartbeatLost, Stalled, StartOverdue, NodeLost, NotAdopted)
History: TypeAlias = tuple[Event, ...]


DECISIONS = (
    Allocate((), "full"),
    Allocate(["a"], "one"),
    Allocate(["a", "b"], "two"),
    Allocate(["b"], "other", {}, 2),
)


def events(attempt: int) -> list[Event]:
    """Every kind of event, those of an attempt for the one given."""
    return [
        *(Exited(attempt, outcome) for outcome in Outcome),
        Exited(attempt, Outcome.FAILED, cannot_start=True),
        *(kind(attempt, "why") for kind in SILENT),
        *(HeartbeatLost(attempt, "why", 0), NodeLost(attempt, "why", "a")),
        *(kind(attempt) for kind in (Retry, Adopt)),
        Started(attempt, ()),
        FirstStep(attempt, 1),
        *(ElasticReady(attempt, why_not) for why_not in (None, "it cannot")),
        *(WaitingToJoin(attempt, replicas) for replicas in ((0,), (1,), (1, 0, 1, 2))),
        *(lost(attempt, replica) for replica in range(2)),
        *(Switched(attempt, number, 7, 0.1) for number in (1, 2)),
        *(Survived(attempt, 3, (replica,), 7, 0.1) for replica in range(2)),
        *(ChangeRefused(attempt, number, "no") for number in (1, 2)),
        ChangeRefused(attempt, 2, "never", for_good=True),
        ChangeOverdue(attempt, 2, "late"),
    ]


def lost(attempt: int, replica: int) -> JoiningReplicaLost:
    return JoiningReplicaLost(attempt, replica, "gone")


REQUESTS = (
    *(Submit(1), Rerun(1), Rerun(1, from_scratch=True)),
    *(Submit(1, WAITS), Rerun(1, waits_for=WAITS)),
    *(DependencyEnded(job, phase, "ended") for job in "xy" for phase in ENDED),
    *(Cancel(), Suspend(), Resume(), Expire("late"), Shutdown(), Recover()),
)


def check(before: JobState, event: Event, after: JobState, actions: Sequence[Action]) -> None:
    """Fail unless `after` makes sense, and what is to be done with it."""
    assert broken_rules(after) == []
    starts = [action for action in actions if isinstance(action, Start)]
    if starts:
        assert not before.running_on or isinstance(event, Exited)
        assert [start.attempt for start in starts] == [before.attempt + 1]
        assert after.running_on == after.assigned == starts[0].nodes != ()
        assert after.running_stages == after.num_stages == starts[0].num_stages
        assert not after.suspended
    if isinstance(event, Rerun) and event.from_scratch and before.phase.ended:
        assert after.first_attempt == before.attempt + 1
    else:
        assert after.first_attempt == before.first_attempt
    if before.phase.ended and not isinstance(event, Submit | Rerun):
        assert (after, actions) == (before, ())
    check_membership(before, after, actions)
    for action in actions:
        if isinstance(action, Stop):
            assert action.attempt == after.attempt
            asked_before = before.intent is not None
            assert not asked_before or isinstance(event, Adopt), "a stop is asked for once"


def check_membership(before: JobState, after: JobState, actions: Sequence[Action]) -> None:
    """Fail unless replicas are started and ended one by one as the memberships say."""
    same = before.attempt == after.attempt and bool(before.running_on and after.running_on)
    for action in actions:
        if isinstance(action, StartReplicas):
            assert same
            assert action.replicas == after.membership.joining != ()
            assert all(replica >= before.membership.num_ids for replica, _ in action.replicas)
        if isinstance(action, EndReplicas):
            assert same
            joining, lost = set(dict(before.membership.joining)), set(before.membership.replicas)
            before_now = before.membership.replicas, before.membership.change
            if before_now == (after.membership.replicas, after.membership.change):
                was = lost, "lost, which the others are to say"
                assert lost - set(after.membership.lost), "somebody goes on"
            elif action.at_once:
                was = joining | (lost - set(after.membership.replicas)), "not to take part"
            else:
                was = set(before.membership.leavers), "leaving"
            assert set(action.replicas) <= was[0], was[1]
    if same and set(after.membership.replicas) < set(before.membership.replicas):
        assert after.running_on == after.assigned
    elif same and before.membership.replicas != after.membership.replicas:
        change = before.membership.change
        assert change is not None
        assert change.stage is ChangeStage.FORMING
        assert (after.membership.replicas, after.running_on) == (change.replicas, change.nodes)


def alike(state: JobState) -> JobState:
    """Leave out what decides nothing: when, how often started, what people are told, and how often
    it was interrupted, which makes a wait longer."""
    deadline = state.reason if state.reason == "DeadlineExceeded" else ""
    conditions = tuple(
        replace(entry, time=0.0, message="", reason=deadline)
        for entry in state.conditions
        if entry.status
    )
    attempt = min(state.attempt, 1)
    first = attempt + 1 if state.first_attempt > state.attempt else 1
    changes = {"attempt": attempt, "first_attempt": first, "interruptions": 0, "ready_at": None}
    return replace(state, conditions=conditions, membership=renumbered(state.membership), **changes)


def renumbered(membership: Membership) -> Membership:
    """Leave out how often replicas were given ids, and memberships numbers."""
    change = membership.change
    all_ids = dict.fromkeys((*membership.replicas, *(change.replicas if change else ())))
    ids = {replica: index for index, replica in enumerate(all_ids)}
    why_not = None if membership.why_not is None else Membership().why_not
    number = min(membership.number, 1)
    if change is not None:
        change = replace(
            change,
            number=number + 1,
            replicas=tuple(ids[replica] for replica in change.replicas),
            waiting_to_join=tuple(sorted(ids[replica] for replica in change.waiting_to_join)),
        )
    replicas = tuple(ids[replica] for replica in membership.replicas)
    highest = number + 1 if change else number
    return Membership(
        number, replicas, len(ids), highest, why_not, membership.failures, change=change
    )


@pytest.mark.exhaustive
def test_every_state_that_a_job_can_come_to_makes_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    """All histories of every length, as those that come to like states are gone on with once."""
    monkeypatch.setattr(resizes, "MOST_FAILURES", 1)
    fresh = JobState()
    seen: dict[JobState, History] = {fresh: ()}
    todo = [fresh]
    while todo:
        before = todo.pop()
        happened = seen[before]
        present = before.attempt
        choice = [*DECISIONS, *REQUESTS, *events(present), *events(present - 1)]
        for event in choice:
            # Soon after the last event, or so late that failures lapse.
            for now in (1.0, 1000.0) if isinstance(event, Exited) else (1.0,):
                after, actions = advance(before, event, now)
                try:
                    check(before, event, after, actions)
                except AssertionError as error:
                    pytest.fail(f"after {[*happened, event]}: {error}")
                key = alike(after)
                if key not in seen:
                    seen[key] = (*happened, event)
                    todo.append(key)
    reached = {(state.phase, state.intent, state.suspended) for state in seen}
    assert {phase for phase, _, _ in reached} == set(Phase)
    assert {intent for _, intent, _ in reached} == {None, *Intent}
    assert (Phase.RUNNING, Intent.SUSPEND, True) in reached, "a job that stops to be suspended"
    changes = [state.membership.change for state in seen if state.membership.change is not None]
    assert {change.stage for change in changes} == set(ChangeStage)
    assert any(change.waiting_to_join for change in changes if change.stage is ChangeStage.FORMING)


EVENTS = st.one_of(
    st.builds(
        Allocate,
        st.lists(st.sampled_from("abc"), max_size=3),
        st.just("why"),
        st.just({}),
        st.sampled_from([None, 1, 2]),
    ),
    st.sampled_from(REQUESTS),
    st.sampled_from([event for attempt in range(5) for event in events(attempt)]),
)


@given(st.lists(EVENTS, max_size=30))
def test_whatever_happens_the_state_makes_sense(history: list[Event]) -> None:
    state = JobState()
    for time, event in enumerate(history):
        before = state
        state, actions = advance(state, event, now=float(time))
        check(before, event, state, actions)


def test_a_job_that_ends_while_it_is_suspended_stays_ended() -> None:
    state = JobState()
    for event in (Submit(), Allocate(["a"], "free"), Suspend(), Exited(1, Outcome.COMPLETE)):
        state, _ = advance(state, event, now=0.0)
    assert (state.phase, state.suspended) == (Phase.COMPLETE, False)
    assert advance(state, Resume(), now=1.0) == (state, ())


def test_only_what_has_ended_is_run_again() -> None:
    ended = {Outcome.COMPLETE: Phase.COMPLETE, Outcome.FAILED: Phase.FAILED}
    for outcome, phase in ended.items():
        state = JobState()
        for event in (Submit(0), Allocate(["a"], "free")):
            state, _ = advance(state, event, now=0.0)
        assert advance(state, Rerun(from_scratch=True), now=0.0) == (state, ())
        state, _ = advance(state, Exited(1, outcome), now=1.0)
        assert state.phase is phase
        again, actions = advance(state, Rerun(2, from_scratch=True), now=2.0)
        assert (again.phase, again.failures, again.max_restarts) == (Phase.CREATED, 0, 2)
        assert (again.first_attempt, again.attempt) == (2, 1)
        assert actions == (Record("rerun", None, {"from_scratch": True}),)
        again, _ = advance(again, Allocate(["b"], "free"), now=3.0)
        assert (again.running_on, again.attempt, again.first_attempt) == (("b",), 2, 2)
        goes_on, _ = advance(state, Rerun(2), now=2.0)
        assert (goes_on.phase, goes_on.first_attempt) == (
            (Phase.COMPLETE, 1) if phase is Phase.COMPLETE else (Phase.CREATED, 1)
        )


def test_a_run_from_scratch_begins_with_a_attempt_that_there_is() -> None:
    begun, _ = advance(JobState(), Submit(), now=0.0)
    rule = "a run begins with an attempt that there was, or with the next one"
    for first, broken in ((0, [rule]), (1, []), (2, [rule])):
        assert broken_rules(replace(begun, first_attempt=first)) == broken
