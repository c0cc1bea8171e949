"""The life of a job as a table: in this state, when this happens, that becomes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipollux_sched.lifecycle import (
    Action,
    Adopt,
    Allocate,
    Cancel,
    Condition,
    ElasticReady,
    Event,
    Exited,
    Expire,
    FirstStep,
    HeartbeatLost,
    Intent,
    JobState,
    Kill,
    Membership,
    NodeLost,
    Outcome,
    Phase,
    Record,
    Recover,
    Resume,
    Retry,
    RetryAfter,
    Shutdown,
    Stalled,
    Start,
    Started,
    StartOverdue,
    Stop,
    Submit,
    Suspend,
    advance,
    backoff,
    can_survive,
)

AB, B = ("a", "b"), ("b",)


def state_in(phase: Phase, reason: str = "Test", **fields: object) -> JobState:
    """A job in some phase; what it holds follows from the fields given."""
    condition = Condition(phase, True, reason, "as the test has it", 1.0)
    state = replace(JobState(phase=phase, conditions=(condition,), attempt=1), **fields)
    ids = tuple(range(len(state.running_on)))
    membership = Membership(1, ids, len(ids), highest=1) if ids else Membership()
    return replace(state, membership=membership)


CREATED = JobState()
QUEUED = state_in(Phase.QUEUED)
STARTING = state_in(Phase.RUNNING, assigned=AB, running_on=AB)
TRAINING = replace(STARTING, training=True)
TRAINING_IN_TWO = replace(TRAINING, num_stages=2, running_stages=2)
MOVING = replace(
    state_in(Phase.RESTARTING, assigned=B, running_on=AB), training=True, intent=Intent.MOVE
)
SUSPENDING = replace(TRAINING, assigned=(), intent=Intent.SUSPEND)
CANCELLING = replace(TRAINING, intent=Intent.CANCEL)
ENDING = replace(TRAINING, assigned=(), intent=Intent.SHUTDOWN)
WAITING = state_in(Phase.RESTARTING, assigned=AB, failures=1)
SUSPENDED = state_in(Phase.SUSPENDED)
HELD = replace(SUSPENDED, suspended=True)
PAUSING = replace(SUSPENDING, suspended=True)
EXPIRING = replace(TRAINING, intent=Intent.EXPIRE)
COMPLETE = state_in(Phase.COMPLETE)
FAILED = state_in(Phase.FAILED, failures=4)
HOPELESS = replace(TRAINING, failures=3)

DONE = Exited(1, Outcome.COMPLETE, step=9, epoch=2)
SAVED = Exited(1, Outcome.STOPPED, step=7)
BROKEN = Exited(1, Outcome.FAILED, message="boom")

# state, what happens, phase, reason, intent, allocation, actions (records by type)
TABLE = [
    (CREATED, Submit(5), Phase.CREATED, "Submitted", None, (), []),
    (CREATED, Allocate(B, "free"), Phase.RUNNING, "Starting", None, B, ["allocated", Start(1, B)]),
    (CREATED, Allocate((), "full"), Phase.QUEUED, "NoRoom", None, (), []),
    (CREATED, Cancel(), Phase.FAILED, "Cancelled", None, (), ["cancelled"]),
    (QUEUED, Allocate(B, "free"), Phase.RUNNING, "Starting", None, B, ["allocated", Start(2, B)]),
    (QUEUED, Allocate((), "full"), Phase.QUEUED, "Test", None, (), []),
    (QUEUED, Shutdown(), Phase.QUEUED, "Test", None, (), []),
    (QUEUED, BROKEN, Phase.QUEUED, "Test", None, (), []),
    (SUSPENDED, Allocate((), "full"), Phase.SUSPENDED, "Test", None, (), []),
    (
        *(SUSPENDED, Allocate(AB, "free"), Phase.RUNNING, "Starting", None, AB),
        ["allocated", Start(2, AB)],
    ),
    (STARTING, Started(1, ("5", "6")), Phase.RUNNING, "Test", None, AB, ["started"]),
    (STARTING, FirstStep(1, 1), Phase.RUNNING, "Training", None, AB, ["first_step"]),
    (STARTING, FirstStep(2, 1), Phase.RUNNING, "Test", None, AB, []),
    (STARTING, Allocate(("b", "a"), "same"), Phase.RUNNING, "Test", None, AB, []),
    (
        *(STARTING, Cancel(), Phase.RUNNING, "Stopping", Intent.CANCEL, AB),
        ["stopping", Stop(1, "cancelled", graceful=False)],
    ),
    (TRAINING, FirstStep(1, 2), Phase.RUNNING, "Test", None, AB, []),
    (
        *(TRAINING, Allocate(B, "shrink"), Phase.RESTARTING, "Moving", Intent.MOVE, B),
        ["allocated", "stopping", Stop(1, "shrink")],
    ),
    (TRAINING_IN_TWO, Allocate(AB, "same", {}, 2), Phase.RUNNING, "Test", None, AB, []),
    (
        *(TRAINING_IN_TWO, Allocate(AB, "cut", {}, 4), Phase.RESTARTING, "Moving", Intent.MOVE, AB),
        ["allocated", "stopping", Stop(1, "cut")],
    ),
    (
        *(replace(MOVING, num_stages=4), SAVED, Phase.RUNNING, "Starting", None, B),
        ["stopped", Start(2, B, 4)],
    ),
    (
        *(TRAINING, Allocate((), "out"), Phase.RUNNING, "Stopping", Intent.SUSPEND, ()),
        ["allocated", "stopping", Stop(1, "out")],
    ),
    (
        *(TRAINING, Shutdown(), Phase.RUNNING, "Stopping", Intent.SHUTDOWN, ()),
        ["stopping", Stop(1, "the scheduler is being stopped")],
    ),
    (TRAINING, DONE, Phase.COMPLETE, "Finished", None, (), ["complete"]),
    (TRAINING, BROKEN, Phase.RESTARTING, "Failed", None, AB, ["restarting", RetryAfter(1, 1.0)]),
    (
        *(TRAINING, SAVED, Phase.RESTARTING, "StoppedFromOutside", None, AB),
        ["stopped", "restarting", RetryAfter(1, 1.0)],
    ),
    (TRAINING, Recover(), Phase.QUEUED, "SchedulerRestarted", None, (), ["stopped"]),
    (WAITING, Recover(), Phase.QUEUED, "SchedulerRestarted", None, (), []),
    (HOPELESS, BROKEN, Phase.FAILED, "TooManyFailures", None, (), ["failed"]),
    (MOVING, SAVED, Phase.RUNNING, "Starting", None, B, ["stopped", Start(2, B)]),
    (MOVING, BROKEN, Phase.RUNNING, "Starting", None, B, ["stopped", Start(2, B)]),
    (MOVING, DONE, Phase.COMPLETE, "Finished", None, (), ["complete"]),
    (MOVING, Allocate(AB, "back"), Phase.RESTARTING, "Test", Intent.MOVE, B, []),
    (MOVING, Cancel(), Phase.RUNNING, "Stopping", Intent.CANCEL, B, []),
    (MOVING, Shutdown(), Phase.RUNNING, "Stopping", Intent.SHUTDOWN, (), []),
    (SUSPENDING, SAVED, Phase.SUSPENDED, "Preempted", None, (), ["stopped"]),
    (CANCELLING, SAVED, Phase.FAILED, "Cancelled", None, (), ["stopped", "cancelled"]),
    (CANCELLING, DONE, Phase.COMPLETE, "Finished", None, (), ["complete"]),
    (CANCELLING, Recover(), Phase.FAILED, "Cancelled", None, (), ["stopped", "cancelled"]),
    (CANCELLING, Shutdown(), Phase.RUNNING, "Test", Intent.CANCEL, AB, []),
    (ENDING, SAVED, Phase.SUSPENDED, "SchedulerStopped", None, (), ["stopped"]),
    (WAITING, Retry(1), Phase.RUNNING, "Starting", None, AB, [Start(2, AB)]),
    (WAITING, Retry(0), Phase.RESTARTING, "Test", None, AB, []),
    (WAITING, Allocate(B, "meanwhile"), Phase.RESTARTING, "Test", None, B, ["allocated"]),
    (WAITING, Allocate((), "out"), Phase.QUEUED, "NoRoom", None, (), []),
    (WAITING, Cancel(), Phase.FAILED, "Cancelled", None, (), ["cancelled"]),
    (WAITING, Shutdown(), Phase.SUSPENDED, "SchedulerStopped", None, (), []),
    (QUEUED, Suspend(), Phase.SUSPENDED, "SuspendedByUser", None, (), ["suspended"]),
    (WAITING, Suspend(), Phase.SUSPENDED, "SuspendedByUser", None, (), ["suspended"]),
    (
        *(TRAINING, Suspend(), Phase.RUNNING, "Stopping", Intent.SUSPEND, ()),
        ["suspended", "stopping", Stop(1, "suspended by its user")],
    ),
    (MOVING, Suspend(), Phase.RUNNING, "Stopping", Intent.SUSPEND, (), ["suspended"]),
    (CANCELLING, Suspend(), Phase.RUNNING, "Test", Intent.CANCEL, AB, []),
    (COMPLETE, Suspend(), Phase.COMPLETE, "Test", None, (), []),
    (PAUSING, SAVED, Phase.SUSPENDED, "SuspendedByUser", None, (), ["stopped"]),
    (PAUSING, Resume(), Phase.RUNNING, "Test", Intent.SUSPEND, (), ["resumed"]),
    (PAUSING, Shutdown(), Phase.RUNNING, "Stopping", Intent.SHUTDOWN, (), []),
    (
        replace(ENDING, suspended=True),
        SAVED,
        Phase.SUSPENDED,
        "SuspendedByUser",
        None,
        (),
        ["stopped"],
    ),
    (HELD, Allocate(B, "free"), Phase.SUSPENDED, "Test", None, (), []),
    (HELD, Suspend(), Phase.SUSPENDED, "Test", None, (), []),
    (HELD, Resume(), Phase.QUEUED, "Resumed", None, (), ["resumed"]),
    (HELD, Cancel(), Phase.FAILED, "Cancelled", None, (), ["cancelled"]),
    (HELD, Recover(), Phase.SUSPENDED, "SuspendedByUser", None, (), []),
    (SUSPENDED, Resume(), Phase.SUSPENDED, "Test", None, (), []),
    (QUEUED, Expire("late"), Phase.FAILED, "DeadlineExceeded", None, (), ["failed"]),
    (
        *(TRAINING, Expire("late"), Phase.RUNNING, "DeadlineExceeded", Intent.EXPIRE, AB),
        ["stopping", Stop(1, "late")],
    ),
    (EXPIRING, Expire("late"), Phase.RUNNING, "Test", Intent.EXPIRE, AB, []),
    (EXPIRING, SAVED, Phase.FAILED, "DeadlineExceeded", None, (), ["stopped", "failed"]),
    (EXPIRING, DONE, Phase.COMPLETE, "Finished", None, (), ["complete"]),
    (EXPIRING, Recover(), Phase.FAILED, "DeadlineExceeded", None, (), ["stopped", "failed"]),
    (COMPLETE, Expire("late"), Phase.COMPLETE, "Test", None, (), []),
    (
        TRAINING,
        HeartbeatLost(1, "quiet"),
        Phase.RUNNING,
        "HeartbeatLost",
        None,
        AB,
        ["heartbeat_lost", Kill(1, "quiet")],
    ),
    (TRAINING, HeartbeatLost(0, "quiet"), Phase.RUNNING, "Test", None, AB, []),
    (
        TRAINING,
        Stalled(1, "still"),
        Phase.RUNNING,
        "Stalled",
        None,
        AB,
        ["stalled", Kill(1, "still")],
    ),
    (TRAINING, Stalled(0, "still"), Phase.RUNNING, "Test", None, AB, []),
    (STARTING, Stalled(1, "still"), Phase.RUNNING, "Test", None, AB, []),
    (MOVING, Stalled(1, "still"), Phase.RESTARTING, "Test", Intent.MOVE, B, []),
    (CANCELLING, Stalled(1, "still"), Phase.RUNNING, "Test", Intent.CANCEL, AB, []),
    (WAITING, Stalled(1, "still"), Phase.RESTARTING, "Test", None, AB, []),
    (
        *(STARTING, StartOverdue(1, "slow"), Phase.RUNNING, "StartTimeout", None, AB),
        ["stalled", Kill(1, "slow")],
    ),
    (TRAINING, StartOverdue(1, "slow"), Phase.RUNNING, "Test", None, AB, []),
    (STARTING, StartOverdue(0, "slow"), Phase.RUNNING, "Test", None, AB, []),
    (CANCELLING, StartOverdue(1, "slow"), Phase.RUNNING, "Test", Intent.CANCEL, AB, []),
    (
        *(TRAINING, NodeLost(1, "gone"), Phase.RUNNING, "NodeLost", Intent.SUSPEND, ()),
        ["stopping", Kill(1, "gone")],
    ),
    (
        *(CANCELLING, NodeLost(1, "gone"), Phase.RUNNING, "Test", Intent.CANCEL, AB),
        ["stopping", Kill(1, "gone")],
    ),
    (SUSPENDING, BROKEN, Phase.SUSPENDED, "Preempted", None, (), ["stopped"]),
    (TRAINING, Adopt(1), Phase.RUNNING, "Test", None, AB, ["adopted"]),
    (TRAINING, Adopt(0), Phase.RUNNING, "Test", None, AB, []),
    (
        *(CANCELLING, Adopt(1), Phase.RUNNING, "Test", Intent.CANCEL, AB),
        ["adopted", Stop(1, "as the test has it")],
    ),
    (COMPLETE, Allocate(B, "free"), Phase.COMPLETE, "Test", None, (), []),
    (COMPLETE, Cancel(), Phase.COMPLETE, "Test", None, (), []),
    (COMPLETE, Recover(), Phase.COMPLETE, "Test", None, (), []),
    (FAILED, Submit(3), Phase.CREATED, "SubmittedAgain", None, (), []),
    (COMPLETE, Resume(), Phase.COMPLETE, "Test", None, (), []),
    (PAUSING, DONE, Phase.COMPLETE, "Finished", None, (), ["complete"]),
    (FAILED, Shutdown(), Phase.FAILED, "Test", None, (), []),
]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row[0].phase}-{type(row[1]).__name__}")
def test_table(
    row: tuple[JobState, Event, Phase, str, Intent | None, tuple[str, ...], list[str | Action]],
) -> None:
    before, event, phase, reason, intent, allocation, expected = row
    after, actions = advance(before, event, now=5.0)
    assert (after.phase, after.reason) == (phase, reason)
    assert (after.intent, after.assigned) == (intent, allocation)
    shown = [action.type if isinstance(action, Record) else action for action in actions]
    assert shown == expected


def test_conditions_are_updated_and_never_pile_up() -> None:
    state = CREATED
    for time, event in enumerate(
        [
            Submit(),
            Allocate(B, "free"),
            FirstStep(1, 1),
            Allocate(AB, "grow"),
            SAVED,
            FirstStep(2, 8),
            Exited(2, Outcome.COMPLETE),
        ]
    ):
        state, _ = advance(state, event, now=float(time))
    assert [(entry.type.value, entry.status, entry.time) for entry in state.conditions] == [
        ("Created", False, 1.0),
        ("Restarting", False, 4.0),
        ("Running", False, 6.0),
        ("Complete", True, 6.0),
    ]


def test_a_condition_keeps_its_time_while_it_stays_true() -> None:
    state, _ = advance(CREATED, Allocate(B, "free"), now=1.0)
    state, _ = advance(state, FirstStep(1, 1), now=2.0)
    assert state.condition == Condition(
        Phase.RUNNING, True, "Training", "Training since step 1 on b.", 1.0
    )
    twice, _ = advance(CREATED, Allocate(("b", "b", "a"), "free"), now=1.0)
    twice, _ = advance(twice, FirstStep(1, 1), now=2.0)
    assert twice.message == "Training since step 1 on b ×2, a."


def test_a_job_that_is_resumed_while_it_stops_says_so() -> None:
    """One that is cancelled meanwhile goes on saying that."""
    resumed, _ = advance(PAUSING, Resume(), now=1.0)
    assert (
        resumed.message == "The job was resumed: it still stops, and then waits for the allocator."
    )
    cancelled, _ = advance(PAUSING, Cancel(), now=1.0)
    assert advance(cancelled, Resume(), now=2.0)[0].message == cancelled.message


def test_backoff_doubles_up_to_a_minute() -> None:
    assert [backoff(n) for n in (1, 2, 3, 4, 7, 100)] == [1, 2, 4, 8, 60, 60]


def test_every_failure_waits_longer_until_there_were_too_many() -> None:
    state, waits = replace(TRAINING, max_restarts=2), []
    while not state.phase.ended:
        state, actions = advance(state, replace(BROKEN, attempt=state.attempt), now=0.0)
        for action in actions:
            if isinstance(action, RetryAfter):
                waits.append(action.seconds)
                state, _ = advance(state, Retry(action.attempt), now=0.0)
    assert waits == [1.0, 2.0]
    assert state.message == "Failed 3 times, max_restarts is 2: boom"


def test_a_job_that_is_taken_away_again_and_again_waits_longer() -> None:
    """Until it has trained; it is no failure of its own."""
    state, waits = TRAINING, []
    taken = Exited(1, Outcome.STOPPED, message="Pod was evicted.")
    for trains in (True, False, False, False, True, False):
        state = replace(state, training=trains)
        state, actions = advance(state, replace(taken, attempt=state.attempt), now=0.0)
        retry = actions[-1]
        assert isinstance(retry, RetryAfter)
        waits.append(retry.seconds)
        state, _ = advance(state, Retry(retry.attempt), now=0.0)
    assert waits == [1.0, 2.0, 4.0, 8.0, 1.0, 2.0]
    assert state.failures == 0


def test_failures_are_forgiven_once_a_attempt_has_trained_for_long() -> None:
    state = replace(TRAINING, failures=3)
    last, _ = advance(state, BROKEN, now=1.0 + 599.0)
    assert last.phase is Phase.FAILED
    forgiven, actions = advance(state, BROKEN, now=1.0 + 600.0)
    assert (forgiven.phase, forgiven.failures) == (Phase.RESTARTING, 1)
    assert actions[-1] == RetryAfter(1, 1.0)
    idle, _ = advance(replace(state, training=False), BROKEN, now=1.0 + 600.0)
    assert idle.phase is Phase.FAILED, "it has trained nothing"


SERVING, _ = advance(TRAINING, ElasticReady(1, None, fixed=1), 2.0)
"""A server runs beside replica 0, which is on node a."""


@pytest.mark.parametrize(
    ("nodes", "elastic"), [(("a",), True), (("a", "b", "b"), True), (("b",), False)]
)
def test_a_replica_with_a_server_beside_it_stays_or_all_restart(
    nodes: tuple[str, ...], elastic: bool
) -> None:
    _, actions = advance(SERVING, Allocate(nodes, "why"), 3.0)
    record = next(one for one in actions if isinstance(one, Record))
    assert record.data["elastic"] is elastic
    why = "a server runs beside a replica that would leave"
    assert record.data["why_restart"] == (None if elastic else why)


def test_others_go_on_without_a_lost_replica_unless_a_server_ran_beside_it() -> None:
    assert can_survive(SERVING, [1])
    assert not can_survive(SERVING, [0])
    assert not can_survive(SERVING, [0, 1])
