"""Explanations of allocations: what one replica more or fewer would be, and what limits a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from pipollux_perfmodel import SchedHints
from pipollux_policies import NodeInfo
from pipollux_sched.allocator.decide import reallocate
from pipollux_sched.allocator.job_infos import job_info
from pipollux_sched.allocator.strategy import Nodes, SchedulableJob, free_of
from pipollux_sched.cli.describe import job_sections
from pipollux_sched.lifecycle import (
    Allocate,
    Exited,
    Intent,
    JobState,
    Membership,
    Outcome,
    Phase,
    Shutdown,
)
from pipollux_sched.planning.explain import (
    Limit,
    LimitKind,
    NextChange,
    ReplicaBounds,
    explanation,
    next_change,
    pinned_because,
    standing,
)
from pipollux_sched.spec.job import JobSpec
from pipollux_sched.store import Store
from pipollux_sched.views.jobs import job_details
from tests.sched.store.stores import point, serve_nodes

NODES = {name: NodeInfo({"slots": 2}) for name in "abc"}
PERF = {
    "alpha_c": 0.021,
    "beta_c": 0.0046,
    "alpha_n": 0.058,
    "beta_n": 0.009,
    "alpha_r": 0.019,
    "beta_r": 0.003,
    "gamma": 1.8,
}
HINTS = {
    "initBatchSize": 32,
    "maxBatchSize": 1024,
    "localBszBounds": [8, 128],
    "gradientAccumulation": True,
    "gradParams": {"norm": 0.0021, "var": 0.0385},
    "perfParams": PERF,
}
STARTING = Limit(LimitKind.STARTING, "It is starting.")


def job(
    nodes: Sequence[str],
    *,
    profiled: int = 4,
    most: int = 8,
    least: int = 1,
    stages: int = 1,
    preemptible: bool = True,
    hinted: bool = True,
) -> tuple[SchedulableJob, ReplicaBounds]:
    spec = JobSpec(
        name="job",
        script="job.py",
        num_stages=stages,
        min_replicas=least,
        max_replicas=most,
        preemptible=preemptible,
    )
    told = {**HINTS, "maxProfiledReplicas": profiled, "numStages": stages}
    hints = SchedHints.from_json_object(told) if hinted else None
    info = job_info(spec, hints, age=100.0)
    return SchedulableJob("job", info, tuple(nodes)), ReplicaBounds(most, profiled if hinted else 0)


def other(*nodes: str) -> SchedulableJob:
    candidate, _ = job(nodes)
    return replace(candidate, name="other")


def kinds(limits: Sequence[Limit]) -> list[str]:
    return [limit.kind.value for limit in limits]


@pytest.mark.parametrize(
    ("rescale", "price"),
    [
        (None, "a restart, which costs it 30 s"),
        (1.0, "an elastic resize, which costs it 1 s"),
        (0.4, "an elastic resize, which costs it 400 ms"),
    ],
)
def test_the_price_of_growing_is_that_of_the_change_it_takes(
    rescale: float | None, price: str
) -> None:
    candidate, bounds = job("a")
    told = replace(candidate, info=replace(candidate.info, rescale_seconds=rescale))
    (limit,) = standing(told, NODES, free_of(NODES, [told]), bounds, None).limits
    assert limit.text == (
        f"There is room for one replica more; the last decision held it not worth {price}."
    )


@pytest.mark.parametrize(
    ("made", "others", "draining", "pin", "more", "fewer", "limits"),
    [
        # what it has and asks; others; draining; left alone; one more, with room; one fewer; limits
        (job("a"), (), "", None, (("a", "a"), True), None, ["not_worth_it"]),
        (job("a"), "a", "", None, (("a", "c"), True), None, ["not_worth_it"]),
        (job("ab"), "abcc", "", None, (("a", "b", "b"), False), ("b",), ["no_room"]),
        (job("aab"), "cc", "", None, (("a", "a", "b", "b"), True), ("a", "a"), ["not_worth_it"]),
        (job("a", most=1), (), "", None, (("a", "a"), True), None, ["max_replicas"]),
        (
            job("aabb", profiled=1),
            *((), "", None, (("a", "a", "b", "b", "c"), True), ("a", "b", "b")),
            ["profiled"],
        ),
        (job("a", hinted=False), (), "", None, (("a", "a"), True), None, ["profiled"]),
        (job("a"), (), "", STARTING, (("a", "a"), True), None, ["starting"]),
        (job("a"), (), "a", None, (("a", "c"), True), None, ["draining", "not_worth_it"]),
        (
            job("a", preemptible=False),
            *((), "a", None, (("a", "c"), True), None),
            ["not_preemptible", "draining"],
        ),
        (
            job("ab", least=2),
            *((), "", None, (("a", "b", "b"), True), ("b",)),
            ["not_worth_it", "min_replicas"],
        ),
        (job("abc", stages=2), (), "", None, ((), False), ("b", "c"), ["no_room"]),
    ],
)
def test_what_it_has(
    made: tuple[SchedulableJob, ReplicaBounds],
    others: str,
    draining: str,
    pin: Limit | None,
    more: tuple[tuple[str, ...], bool],
    fewer: tuple[str, ...] | None,
    limits: list[str],
) -> None:
    candidate, bounds = made
    nodes = {name: replace(node, draining=name in draining) for name, node in NODES.items()}
    free = free_of(nodes, [candidate, other(*others)])
    found = standing(candidate, nodes, free, bounds, pin)
    assert found.more is not None
    assert (tuple(sorted(found.more.nodes)), found.more.fits) == more
    assert (None if found.fewer is None else tuple(sorted(found.fewer.nodes))) == fewer
    assert kinds(found.limits) == limits
    assert found.waits_for is None


def test_speedups_are_those_that_the_policy_is_told() -> None:
    candidate, bounds = job("ab")
    found = standing(candidate, NODES, free_of(NODES, [candidate]), bounds, None)
    foretold = candidate.info.speedup_fn(np.array([1, 2, 2]), np.array([1, 2, 3]))
    assert found.fewer is not None
    assert found.more is not None
    told = [found.fewer.speedup, found.speedup, found.more.speedup]
    assert told == pytest.approx(list(foretold))
    assert found.batch_size == candidate.held.configuration.batch_size  # type: ignore[union-attr]  # it is hinted
    assert found.more.batch_size is not None


class Widen:
    """A strategy that gives a job one replica more, beside its others."""

    def place(self, _candidate: SchedulableJob, _free: Nodes) -> Sequence[str]:
        return ()

    def optimize(
        self, candidates: Sequence[SchedulableJob], _nodes: Nodes
    ) -> dict[str, Sequence[str]]:
        return {job.name: [*job.allocation, "c"] for job in candidates}


def test_a_decision_tells_the_speedup_before_and_after() -> None:
    candidate, _ = job("ab")
    (decision,) = reallocate([candidate], NODES, Widen())
    before, after = candidate.info.speedup_fn(np.array([2, 3]), np.array([2, 3]))
    assert decision.details["previous_speedup"] == pytest.approx(before)
    assert decision.details["speedup"] == pytest.approx(after)
    unmeasured, _ = job("a", least=1, hinted=False)
    roomy = replace(unmeasured, info=replace(unmeasured.info, max_replicas=2))
    (guessed,) = reallocate([roomy], NODES, Widen())
    assert guessed.details["previous_speedup"] is None


def test_nothing_is_foretold_of_a_job_that_was_not_measured() -> None:
    candidate, bounds = job("a", hinted=False)
    found = standing(candidate, NODES, free_of(NODES, [candidate]), bounds, None)
    assert found.more is not None
    assert (found.speedup, found.batch_size, found.more.speedup) == (None, None, None)
    assert "was not measured yet" in found.limits[0].text


def test_more_that_would_do_harm() -> None:
    """With a network this slow two replicas on two nodes are no faster than one."""
    candidate, bounds = job("a")
    slow = {**HINTS, "maxProfiledReplicas": 4, "maxBatchSize": 32}
    slow["perfParams"] = {**PERF, "alpha_n": 500.0, "alpha_r": 500.0}
    spec = JobSpec(name="job", script="job.py", max_replicas=8)
    info = job_info(spec, SchedHints.from_json_object(slow), age=100.0)
    found = standing(
        replace(candidate, info=info), NODES, free_of(NODES, [candidate]), bounds, None
    )
    assert kinds(found.limits) == ["harmful"]


@pytest.mark.parametrize(
    ("made", "others", "says"),
    [
        (job("", stages=2), "abc", "needs 2 slots free on one node, and a, the freest, has 1 slot"),
        (job("", least=3), "abbcc", "needs 1 slot on one node 3 times, there is room for 1"),
        (job(""), "", "there is room for 1 replica"),
    ],
)
def test_what_it_waits_for(
    made: tuple[SchedulableJob, ReplicaBounds], others: str, says: str
) -> None:
    candidate, bounds = made
    free = free_of(NODES, [candidate, other(*others)])
    found = standing(candidate, NODES, free, bounds, None)
    assert (found.more, found.fewer, found.limits) == (None, None, ())
    assert found.waits_for is not None
    assert says in found.waits_for


def test_nodes_that_drain_are_named_to_who_waits() -> None:
    candidate, bounds = job("", stages=2)
    nodes = {name: replace(node, draining=name in "bc") for name, node in NODES.items()}
    free = free_of(nodes, [candidate, other("a")])
    found = standing(candidate, nodes, free, bounds, None)
    wanted = "needs 2 slots free on one node, and a, the freest, has 1 slot; b, c drain"
    assert found.waits_for == wanted


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        (JobState(phase=Phase.SUSPENDED, suspended=True), "suspended"),
        (JobState(phase=Phase.RUNNING, running_on=("a",), intent=Intent.CANCEL), "stopping"),
        (JobState(phase=Phase.RESTARTING, running_on=("a",), intent=Intent.MOVE), "stopping"),
        (JobState(phase=Phase.RUNNING, running_on=("a",)), "starting"),
        (JobState(phase=Phase.RESTARTING), "waits_to_retry"),
        (JobState(phase=Phase.RUNNING, running_on=("a",), training=True), None),
        (JobState(phase=Phase.QUEUED), None),
    ],
)
def test_why_it_is_left_alone(state: JobState, kind: str | None) -> None:
    found = pinned_because(state)
    assert (None if found is None else found.kind.value) == kind


RUNS = JobState(
    phase=Phase.RUNNING, running_on=("a",), training=True, membership=Membership(1, (0,), 1)
)


@pytest.mark.parametrize(
    ("state", "elastic", "why"),
    [
        (replace(RUNS, membership=replace(RUNS.membership, why_not=None)), True, None),
        (
            replace(RUNS, membership=replace(RUNS.membership, why_not="a state says so")),
            False,
            "a state says so",
        ),
        (RUNS, False, "its replicas have not reported that they can be resized"),
        (replace(RUNS, training=False), False, "it has not taken its first step"),
    ],
)
def test_whether_its_next_change_would_be_elastic(
    state: JobState, elastic: bool, why: str | None
) -> None:
    assert next_change(state) == NextChange(elastic, why)


@pytest.mark.parametrize("state", [JobState(), replace(RUNS, intent=Intent.SUSPEND)])
def test_no_change_is_told_of_where_nothing_runs_on(state: JobState) -> None:
    assert next_change(state) is None


@pytest.mark.parametrize(
    ("team", "says"),
    [
        ({"quota": 1, "borrow": 1}, "Team text holds 2: its quota is 1 slot, and it may borrow 1."),
        ({"quota": 2, "borrow": 0}, "Team text holds 2: its quota is 2 slots."),
        ({"quota": 4, "max_slots_per_job": 2}, "Team text allows 2 slots for each job."),
    ],
)
def test_why_its_team_lets_it_have_no_more(tmp_path: Path, team: dict[str, int], says: str) -> None:
    """There is room for one replica more, and a restart would be worth it."""
    with Store(tmp_path / "pipollux.db", create=True) as store:
        serve_nodes(store, a=4)
        spec = JobSpec(name="toy", script="x.py", team="text", max_replicas=4)
        store.submit("toy", spec.model_dump(mode="json"), "token", 3)
        store.transition("toy", Allocate(["a", "a"], "free"))
        store.add_report("toy", 1, [point(1)])
        store.put_hints("toy", 1, {**HINTS, "maxProfiledReplicas": 2})
        plain = explanation(store, store.job("toy")).limits
        assert LimitKind.NOT_WORTH_IT in [limit.kind for limit in plain]
        store.teams.set_spec({"teams": [{"name": "text", **team}]})
        limits = explanation(store, store.job("toy")).limits
        assert [limit.text for limit in limits if limit.kind is LimitKind.TEAM] == [says]
        assert LimitKind.NOT_WORTH_IT not in [limit.kind for limit in limits]


def test_a_job_of_a_stopped_scheduler_waits_for_the_next_one(tmp_path: Path) -> None:
    """Not for a decision, although there is room."""
    with Store(tmp_path / "pipollux.db", create=True) as store:
        serve_nodes(store, a=2)
        spec = JobSpec(name="toy", script="x.py")
        store.submit("toy", spec.model_dump(mode="json"), "token", 3)
        for event in (Allocate(["a"], "free"), Shutdown(), Exited(1, Outcome.STOPPED, step=7)):
            store.transition("toy", event)
        assert (
            explanation(store, store.job("toy")).waits_for == "the next scheduler: pipollux serve"
        )


def test_what_pushes_and_pulls_cost(tmp_path: Path) -> None:
    """Nothing is said of a job that averages gradients in every step."""
    with Store(tmp_path / "pipollux.db", create=True) as store:
        serve_nodes(store, a=2, b=2)
        spec = JobSpec(name="pp", script="x.py", servers=1, max_replicas=4)
        store.submit("pp", spec.model_dump(mode="json"), "token", 3)
        store.transition("pp", Allocate(["a", "b"], "free"))
        store.add_report("pp", 1, [point(1)])
        store.put_hints("pp", 1, HINTS)
        assert explanation(store, store.job("pp")).synchronization is None
        perf = {**PERF, "alpha_n": 8.0, "sync_every": 100}
        store.put_hints("pp", 1, {**HINTS, "perfParams": perf})
        said = explanation(store, store.job("pp")).synchronization
        details = job_details(store, store.job("pp"))
    share = 0.08 / (0.08 + 0.021 + 32 * 0.0046)
    assert said is not None
    assert said.startswith("Replicas push and pull every 100 steps: 8 s each time")
    assert f"waits for {share:.1%} of the time" in said
    assert details.synchronization == said
    console = Console(width=200)
    with console.capture() as captured:
        console.print(job_sections(details))
    assert said in captured.get()
