"""Each side of the protocol reads what the other one writes."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from pipollux_hybrid.job.env import JobEnvironment
from pipollux_hybrid.job.membership import Announcement, JobPlace, JoiningReplica, Membership
from pipollux_hybrid.resize.scheduler_rendezvous import SchedulerRendezvous
from pipollux_hybrid.telemetry.step_record import StepRecord
from pipollux_protocol import environment, messages
from pipollux_protocol.environment import (
    VARIABLES,
    Addresses,
    Names,
    PathKind,
    Seconds,
    Switch,
    Text,
    Whole,
)
from pipollux_protocol.files import AgentResult, ResultError
from pipollux_sched import lifecycle
from pipollux_sched.backend.base import Launch, ReplicaProgram, SlotAssignment
from pipollux_sched.backend.replica.variables import (
    cpu_variables,
    processes_of_replica,
    replica_variables,
)
from pipollux_sched.backend.result import ReplicaResult
from pipollux_sched.controller.resize_board import ReplicaAnswer, ResizeBoard, ScriptPlace
from pipollux_sched.controller.training_report import stored_points, stored_timeline
from pipollux_sched.lifecycle import (
    ChangeRefused,
    ChangeStage,
    ElasticReady,
    JobState,
    PendingResize,
    Phase,
    WaitingToJoin,
)
from pipollux_sched.server.schemas import heartbeat_answer

ROOT = Path(__file__).parents[2]
STANDS_ALONE = "as_user.py"
"""Runs as root, so it imports nothing but the standard library."""
SOURCES = [
    path
    for folder in ("hybrid", "sched")
    for path in ROOT.glob(f"{folder}/**/*.py")
    if path.name != STANDS_ALONE
]

# --- environment ---------------------------------------------------------------------------------

words = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1)
seconds = st.floats(1e-3, 1e6)


def values(variable: environment.Variable[Any]) -> st.SearchStrategy[Any]:
    """Return what a variable may say."""
    match variable.kind:
        case Text():
            return words
        case PathKind():
            return words.map(lambda name: Path("/srv") / name)
        case Whole(minimum):
            return st.integers(minimum, 2**62)
        case Seconds(zero):
            return seconds | st.just(0.0) if zero else seconds
        case Switch():
            return st.booleans()
        case Names():
            return st.lists(words, min_size=1).map(tuple)
        case Addresses():
            address = st.builds("{}:{}".format, words, st.integers(1, 65535))
            return st.lists(address, min_size=1).map(tuple)
    raise AssertionError(variable)


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable.name)
@given(data=st.data())
def test_a_variable_says_what_was_written(
    variable: environment.Variable[Any], data: st.DataObject
) -> None:
    value = data.draw(values(variable))
    assert variable.read(variable.write(value)) == value
    assert variable.read({}) is variable.read({variable.name: " "}) is None


WRONG = {"Addresses": "host", "Whole": "-1", "Seconds": "never", "Switch": "yes"}


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable.name)
def test_a_variable_refuses_other_values(variable: environment.Variable[Any]) -> None:
    text = WRONG.get(type(variable.kind).__name__)
    if text is None:
        return
    with pytest.raises(ValueError, match=rf"{variable.name}='{text}': .* (needed|allowed)$"):
        variable.read({variable.name: text})


@given(
    ids=st.lists(st.integers(0, 50), min_size=1, max_size=5, unique=True),
    num_stages=st.integers(1, 4),
    per_stage=st.booleans(),
    elastic=st.booleans(),
    num_first=st.integers(1, 50),
    attempt=st.integers(1, 1000),
    data=st.data(),
)
def test_a_job_reads_the_environment_that_the_scheduler_sets(
    ids: list[int],
    num_stages: int,
    per_stage: bool,
    elastic: bool,
    num_first: int,
    attempt: int,
    data: st.DataObject,
) -> None:
    nodes = st.sampled_from(["a", "b", "c"])
    assignments = {
        number: SlotAssignment(data.draw(nodes), tuple(range(num_stages))) for number in ids
    }
    launch = Launch(
        job="job",
        attempt=attempt,
        assignments=assignments,
        num_first=num_first,
        scheduler_url="http://127.0.0.1:1",
        checkpoints="/srv/job",
        elastic=elastic,
    )
    program = ReplicaProgram(
        job="job",
        script=Path("train.py"),
        num_stages=num_stages,
        process_per_stage=per_stage,
        environment={
            **environment.SCHEDULER_URL.write("http://127.0.0.1:1"),
            **environment.TOKEN.write("secret"),
            **environment.HEARTBEAT_INTERVAL.write(2.5),
        },
    )
    replica, rank = data.draw(st.sampled_from(ids)), data.draw(st.integers(0, len(ids) - 1))
    processes = processes_of_replica(program, launch)
    stage = data.draw(st.integers(0, processes - 1))
    torchrun = {
        "RANK": str(rank * processes + stage),
        "WORLD_SIZE": str(len(ids) * processes),
        "LOCAL_RANK": str(stage),
        "LOCAL_WORLD_SIZE": str(processes),
    }
    given_ = replica_variables(program, launch, replica) | cpu_variables(num_stages) | torchrun
    read = JobEnvironment.read(given_)
    assert (read.rank, read.stage, read.num_replicas) == (rank, stage, len(ids))
    assert (read.job_id, read.attempt, read.replica) == ("job", attempt, replica)
    assert (read.num_stages, read.processes_per_replica) == (num_stages, processes)
    assert (read.elastic, read.joins) == (elastic, launch.joins(replica))
    assert read.num_nodes == len({assignment.node for assignment in assignments.values()})
    assert read.devices == ("cpu",) * num_stages
    assert read.checkpoint_dir == Path("/srv/job")
    assert (read.scheduler_url, read.token) == ("http://127.0.0.1:1", "secret")
    assert (read.heartbeat_interval, read.num_threads) == (2.5, 1)


def test_names_of_variables_stand_in_the_protocol_alone() -> None:
    names = {variable.name for variable in VARIABLES}
    texts = {path: path.read_text(encoding="utf-8") for path in SOURCES}
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}"
        for path, text in texts.items()
        if any(name in text for name in names)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert found == []


# --- messages ------------------------------------------------------------------------------------

texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
counts = st.integers(0, 2**31)
finite = st.floats(0, 1e9)
REQUESTS: dict[type[BaseModel], st.SearchStrategy[Any]] = {
    messages.Heartbeat: st.builds(
        messages.Heartbeat,
        attempt=st.integers(1, 2**62),
        replica=counts,
        step=st.none() | counts,
        finished=st.booleans(),
        elastic=st.none()
        | st.builds(
            messages.ElasticStatus,
            membership=counts,
            replicas=st.lists(counts, max_size=4).map(tuple),
            waiting_to_join=st.booleans(),
            epoch=counts,
            loop=counts,
            balance=st.lists(counts, max_size=4).map(tuple),
            schedule=texts,
            cannot=st.none() | texts,
            step=st.none() | counts,
            seconds=st.none() | finite,
            refused=counts,
            why=texts,
            for_good=st.booleans(),
            store=st.none()
            | st.builds(
                messages.StoreAddress, number=counts, host=texts, port=st.integers(1, 65535)
            ),
        ),
    ),
    messages.Stop: st.builds(messages.Stop, attempt=st.integers(1, 9), step=counts),
    messages.ReplicaRegistration: st.builds(
        messages.ReplicaRegistration,
        attempt=st.integers(1, 9),
        replica=counts,
        address=st.integers(0, 65535).map(lambda port: f"10.0.0.7:{port}"),
    ),
}


@pytest.mark.parametrize("model", list(REQUESTS), ids=lambda model: model.__name__)
@given(data=st.data())
def test_a_request_arrives_as_it_was_sent(model: type[BaseModel], data: st.DataObject) -> None:
    sent = data.draw(REQUESTS[model])
    text = json.dumps(sent.to_json_object())
    assert model.model_validate_json(text) == sent  # the short way
    assert model.model_validate(json.loads(text)) == sent  # the usual one


records = st.builds(
    StepRecord,
    time=st.floats(0, 3e10),
    step=counts,
    epoch=counts,
    samples=counts,
    loss=st.none() | st.floats(),
    batch_size=st.integers(1, 2**31),
    atomic_bsz=st.integers(1, 2**31),
    accum_steps=counts,
    num_replicas=st.integers(1, 2**20),
    step_time=finite,
    predicted_step_time=st.none() | finite,
    goodput=st.none() | finite,
    efficiency=st.none() | finite | st.just(float("nan")),
    num_epochs=st.none() | st.integers(1, 1000),
)


@given(st.lists(records, min_size=1, max_size=3))
def test_a_report_says_what_was_recorded(sent: list[StepRecord]) -> None:
    report = messages.TrainingReport.model_construct(
        attempt=1,
        num_epochs=sent[-1].num_epochs,
        points=[record.point() for record in sent],
        timeline=messages.StageTimeline.model_construct(
            step=1,
            num_stages=2,
            num_microbatches=1,
            schedule="1f1b",
            events=[(0, 0, "forward", 0.0, 0.5)],
        ),
    )
    arrived = messages.TrainingReport.model_validate_json(json.dumps(report.to_json_object()))
    for record, point in zip(sent, stored_points(arrived), strict=True):
        for name in messages.Point.model_fields:
            value = getattr(record, name)
            odd = (isinstance(value, float) and abs(value) in (float("inf"),)) or value != value
            assert getattr(point, name) == (None if odd else value)
        assert point.num_epochs == sent[-1].num_epochs
    timeline = stored_timeline(arrived)
    assert timeline is not None
    assert (timeline.schedule, timeline.events) == ("1f1b", ((0, 0, "forward", 0.0, 0.5),))


# --- elastic resizes -----------------------------------------------------------------------------


def meeting(replica: int, *, joins: bool) -> SchedulerRendezvous:
    env = JobEnvironment(job_id="job", attempt=3, replica=replica, joins=joins, elastic=True)
    return SchedulerRendezvous(env)


def sent_by(place: SchedulerRendezvous) -> messages.ElasticStatus:
    """Return what a replica says, as the scheduler reads it."""
    heartbeat = messages.Heartbeat(attempt=3, replica=0, elastic=place.told())
    text = json.dumps(heartbeat.to_json_object())
    elastic = messages.Heartbeat.model_validate_json(text).elastic
    assert elastic is not None
    return elastic


def state(members: tuple[int, ...], joining_replica: int | None, stage: ChangeStage) -> JobState:
    change = None
    if joining_replica is not None:
        everyone = (*members, joining_replica)
        change = PendingResize(2, everyone, ("n",) * len(everyone), stage)
    membership = lifecycle.Membership(1, members, 100, 2, why_not=None, change=change)
    return JobState(
        Phase.RUNNING, attempt=3, running_on=("n",) * len(members), membership=membership
    )


@given(
    epoch=counts,
    loop=counts,
    balance=st.lists(st.integers(1, 50), min_size=1, max_size=4).map(tuple),
    schedule=st.sampled_from(["", "gpipe", "1f1b", "interleaved"]),
    members=st.lists(st.integers(0, 50), min_size=1, max_size=4, unique=True).map(tuple),
    port=st.integers(1, 65535),
)
def test_a_replica_that_joins_learns_what_the_others_said(
    epoch: int,
    loop: int,
    balance: tuple[int, ...],
    schedule: str,
    members: tuple[int, ...],
    port: int,
) -> None:
    board, first, last = ResizeBoard(), members[0], 51
    there = state(members, last, ChangeStage.FORMING)
    leader, joining_replica = meeting(first, joins=False), meeting(last, joins=True)
    now = Membership(1, tuple(map(str, members)), 1)
    leader.post(Announcement(now, JobPlace(epoch, loop), balance, schedule=schedule))
    assert board.note("job", there, first, sent_by(leader)) == []
    leader.announce_store(2, "10.0.0.1", port)
    board.note("job", there, first, sent_by(leader))
    joining_replica.apply(
        JoiningReplica(str(last), "host", waiting_to_join=True, place=JobPlace(epoch, loop))
    )
    assert board.note("job", there, last, sent_by(joining_replica)) == [WaitingToJoin(3, (last,))]

    answer = heartbeat_answer(there, board.answer("job", there, last))
    joining_replica.take(messages.HeartbeatAnswer.model_validate_json(answer.model_dump_json()))
    assert joining_replica.announcement() == Announcement(
        now, JobPlace(epoch, loop), balance, schedule=schedule
    )
    everyone = tuple(map(str, (*members, last)))
    assert joining_replica.proposal() == Membership(2, everyone, 1)
    assert joining_replica.find_store(2) == ("10.0.0.1", port)
    assert joining_replica.find_store(3) is None


@given(why=st.text(st.characters(codec="ascii"), max_size=600), for_good=st.booleans())
def test_the_scheduler_learns_why_a_change_failed(why: str, for_good: bool) -> None:
    board, there = ResizeBoard(), state((0, 1), 2, ChangeStage.FORMING)
    leader = meeting(0, joins=False)
    leader.refuse(2, why, for_good=for_good)
    assert board.note("job", there, 0, sent_by(leader)) == [
        ChangeRefused(3, 2, why[:500], for_good)
    ]


def test_the_scheduler_learns_why_nobody_can_join() -> None:
    board, there = ResizeBoard(), state((0,), None, ChangeStage.FORMING)
    leader = meeting(0, joins=False)
    told = Announcement(Membership(1, ("0",)), JobPlace(0, 0), (2, 2), cannot="it uses NCCL")
    leader.post(told)
    assert board.note("job", there, 0, sent_by(leader)) == [ElasticReady(3, "it uses NCCL")]


def test_nothing_is_told_without_a_change() -> None:
    there = state((0, 1), None, ChangeStage.FORMING)
    answer = heartbeat_answer(there, ReplicaAnswer(None, False, None, None))
    joining_replica = meeting(1, joins=False)
    assert joining_replica.take(answer) is None
    assert (
        joining_replica.announcement(),
        joining_replica.proposal(),
        joining_replica.find_store(1),
    ) == (None, None, None)
    there_now = ScriptPlace(3, 1, 2, (1, 3), "1f1b")
    answer = heartbeat_answer(there, ReplicaAnswer(0.5, False, there_now, None))
    assert joining_replica.take(answer) == 0.5
    announcement = joining_replica.announcement()
    assert announcement is not None
    assert (announcement.place, announcement.balance) == (JobPlace(1, 2), (1, 3))


# --- files ---------------------------------------------------------------------------------------


@given(
    result=st.builds(
        AgentResult,
        asked=st.booleans(),
        step=st.none() | counts,
        error=st.none()
        | st.builds(
            ResultError,
            message=texts.filter(str.splitlines),
            types=st.lists(words).map(tuple),
            loaded=st.booleans(),
        ),
        report=st.none() | st.dictionaries(words, counts),
    )
)
def test_a_result_says_how_the_script_ended(result: AgentResult) -> None:
    read = ReplicaResult.parse(result.model_dump_json())
    assert (read.left, read.asked, read.stopped_step) == (True, result.asked, result.step)
    assert read.report == result.report
    assert (read.error is None) == (result.error is None)


def test_variables_of_this_process_are_none_of_the_protocol() -> None:
    ours: Mapping[str, str] = os.environ
    assert [x.name for x in VARIABLES if x.name in ours] == []
