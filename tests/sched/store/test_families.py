"""Which job hands down what it measured, and to which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from pipollux_perfmodel.hints.step_rows import MAX_RELATIVES, RENEWED
from pipollux_sched.lifecycle import Allocate, Cancel, Exited, Outcome, Resume, Suspend
from pipollux_sched.spec.job import JobSpec, SpecError, parse_job
from pipollux_sched.store import Store
from pipollux_sched.store.families import MOST_ALIKE
from pipollux_sched.store.reports import ReceivedHints
from tests.sched.store.stores import Clock


def spec(name: str, **fields: Any) -> dict[str, Any]:
    return JobSpec(**{"name": name, "script": "train.py", **fields}).model_dump(mode="json")


def submit(store: Store, name: str, **fields: Any) -> None:
    store.submit(name, spec(name, **fields), f"token of {name}", 3)


def train(store: Store, name: str, hints: Mapping[str, Any], **fields: Any) -> None:
    submit(store, name, **fields)
    store.transition(name, Allocate(["a"], "it is free"))
    store.put_hints(name, 1, hints)


def complete(store: Store, name: str, hints: Mapping[str, Any] | None, **fields: Any) -> None:
    submit(store, name, **fields)
    store.transition(name, Allocate(["a"], "it is free"))
    if hints is not None:
        store.put_hints(name, 1, hints)
    store.transition(name, Exited(1, Outcome.COMPLETE))


def before(store: Store, name: str, **fields: Any) -> str | None:
    found = store.families.predecessors({name: spec(name, **fields)})
    return found[name].job if name in found else None


def test_the_last_that_completed_and_measured_something(store: Store, clock: Clock) -> None:
    assert before(store, "toy-9") is None
    complete(store, "toy-1", {"maxProfiledReplicas": 1})
    clock.now += 1
    complete(store, "toy-2", {"maxProfiledReplicas": 2})
    clock.now += 1
    complete(store, "toy-3", None)
    train(store, "toy-4", {"maxProfiledReplicas": 4})
    found = store.families.predecessors({"toy-9": spec("toy-9"), "else": spec("else")})
    assert {name: (one.job, one.hints["maxProfiledReplicas"]) for name, one in found.items()} == {
        "toy-9": ("toy-2", 2)
    }
    again = store.families.predecessors({"toy-8": spec("toy-8")})["toy-8"]
    assert again.hints is found["toy-9"].hints  # not read twice
    store.transition("toy-4", Cancel())
    store.transition("toy-4", Exited(1, Outcome.STOPPED, step=1))
    assert before(store, "toy-9") == "toy-2"
    assert before(store, "toy-2") is None  # nobody inherits from itself
    store.deletions.begin("toy-2")
    store.deletions.finish(store.deletions.pending()[0])
    assert before(store, "toy-9") == "toy-1"


def related(store: Store, name: str) -> list[str]:
    return [one.job for one in store.families.relatives(name, spec(name))]


def test_those_at_work_hand_down_what_they_have_measured_so_far(store: Store, clock: Clock) -> None:
    """While none has completed, the latest to report is the predecessor."""
    train(store, "toy-1", {"maxProfiledReplicas": 1})
    clock.now += 1
    train(store, "toy-2", {"maxProfiledReplicas": 2})
    assert before(store, "toy-9") == "toy-2"
    assert related(store, "toy-9") == ["toy-2", "toy-1"]
    assert related(store, "toy-2") == ["toy-1"]
    clock.now += 1
    store.put_hints("toy-1", 1, {"maxProfiledReplicas": 4})
    assert before(store, "toy-9") == "toy-1"
    assert related(store, "toy-9") == ["toy-1", "toy-2"]
    complete(store, "toy-3", {"maxProfiledReplicas": 8})
    clock.now += 1
    store.put_hints("toy-2", 1, {"maxProfiledReplicas": 16})
    assert before(store, "toy-9") == "toy-3"
    assert related(store, "toy-9") == ["toy-3", "toy-2", "toy-1"]
    store.transition("toy-2", Cancel())
    store.transition("toy-2", Exited(1, Outcome.STOPPED, step=1))
    assert related(store, "toy-9") == ["toy-3", "toy-1"]
    assert related(store, "boy-9") == []
    assert store.families.relatives("toy-9", spec("toy-9", family="")) == []


def test_the_gradients_with_which_a_predecessor_began_are_kept(store: Store) -> None:
    """Also over restarts, from its first hints that have any."""
    first, later, last = ({"norm": 1.0, "var": float(var)} for var in (1, 2, 3))
    train(store, "toy-1", {"maxProfiledReplicas": 1})
    together = [ReceivedHints("toy-1", 1, {"gradParams": entry}) for entry in (first, later)]
    assert store.put_all_hints(together) == [None, None]
    stopped = Exited(1, Outcome.STOPPED, step=1)
    for event in (Suspend(), stopped, Resume(), Allocate(["a"], "it is free")):
        store.transition("toy-1", event)
    store.put_hints("toy-1", 2, {"gradParams": last})
    store.put_hints("toy-1", 2, {"maxProfiledReplicas": 1})
    store.put_hints("toy-1", 2, {"gradParams": last})
    store.transition("toy-1", Exited(2, Outcome.COMPLETE))
    found = store.families.predecessors({"toy-9": spec("toy-9")})["toy-9"]
    assert (found.first_gradients, found.hints["gradParams"]) == (first, last)


def test_what_a_predecessor_at_work_reports_is_not_read_each_time(
    store: Store, clock: Clock
) -> None:
    clock.now = 10 * RENEWED
    train(store, "toy-1", {"maxProfiledReplicas": 1})
    warm_starts = {"toy-9": spec("toy-9")}
    first = store.families.predecessors(warm_starts)["toy-9"].hints
    clock.now += RENEWED - 1
    store.put_hints("toy-1", 1, {"maxProfiledReplicas": 2})
    assert store.families.predecessors(warm_starts)["toy-9"].hints is first
    clock.now += 1
    store.put_hints("toy-1", 1, {"maxProfiledReplicas": 4})
    assert store.families.predecessors(warm_starts)["toy-9"].hints["maxProfiledReplicas"] == 4


def test_of_many_relatives_the_predecessor_and_the_latest(store: Store, clock: Clock) -> None:
    complete(store, "toy-0", {"maxProfiledReplicas": 1})
    for number in range(1, MAX_RELATIVES + 4):
        clock.now += 1
        train(store, f"toy-{number}", {"maxProfiledReplicas": 1})
    numbers = [0, *range(MAX_RELATIVES + 3, 4, -1)]
    assert related(store, "toy") == [f"toy-{number}" for number in numbers]


def test_who_is_alike(store: Store) -> None:
    hints = {"maxProfiledReplicas": 1}
    complete(store, "toy-1", hints)
    assert before(store, "toy") == before(store, "toy17") == before(store, "toy-02") == "toy-1"
    other: list[dict[str, Any]] = [
        {"script": "other.py"},
        {"gpu_type": "a100"},
        {"num_stages": 2},
        {"stage_choices": (1, 2)},
        {"process_per_stage": True},
        {"team": "red"},
        {"user": "ann"},
        {"family": ""},
        {"family": "toy"},
    ]
    assert [before(store, "toy-2", **fields) for fields in other] == [None] * len(other)
    assert before(store, "boy-2") is None
    # Who names a family shares it with any script, and with no job that names none.
    complete(store, "big", hints, family="resnet")
    assert before(store, "small", family="resnet", script="other.py") == "big"
    assert before(store, "big-2") is None
    complete(store, "alone-1", hints, family="")
    assert before(store, "alone-2") is None


def test_a_job_that_is_run_again_is_of_the_family_that_it_is_of_now(store: Store) -> None:
    submit(store, "toy-1")
    store.transition("toy-1", Cancel())
    assert before(store, "toy-2") is None
    complete(store, "toy-1", None, script="other.py")
    assert before(store, "toy-2") is None


def test_jobs_that_have_moved_to_another_team_are_alike_there(store: Store) -> None:
    hints = {"maxProfiledReplicas": 1}
    complete(store, "toy-1", hints, team="red")
    complete(store, "toy-2", hints, team="blue")
    assert before(store, "toy-3", team="red") == "toy-1"
    assert before(store, "toy-3", team="blue") == "toy-2"
    store.teams.move("toy-2", "red")
    assert before(store, "toy-3", team="red") == "toy-2"
    assert before(store, "toy-3", team="blue") is None


def test_of_a_large_family_the_latest_count(store: Store) -> None:
    """And of those that completed, however many wait."""
    complete(store, "toy-1", {"maxProfiledReplicas": 1})
    for number in range(2, MOST_ALIKE + 1):
        submit(store, f"toy-{number}")
    assert before(store, "toy") == "toy-1"


@pytest.mark.parametrize(
    ("family", "says"),
    [
        ("Res Net", "family: 'Res Net' is not a name; a name begins with a lower-case letter"),
        ("x" * 64, "has 64 characters; a name has at most 63"),
        (7, "family: 7 is not allowed; it must be a text"),
    ],
)
def test_families_that_are_no_names(family: object, says: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_job({"name": "toy", "script": "x.py", "family": family})
    assert says in str(caught.value)
