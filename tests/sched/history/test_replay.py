"""A scheduler's history, read from its store and simulated again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipollux_perfmodel import GoodputFunction, SchedHints
from pipollux_policies import POLICIES, make_policy
from pipollux_sched.history.application import HistoryApplication
from pipollux_sched.history.reality import agreement, cut_short, what_happened
from pipollux_sched.history.records import SchedulerHistory, read_history
from pipollux_sched.history.workload import replay
from pipollux_sched.lifecycle import Allocate, Cancel, Exited, FirstStep, Outcome, Started
from pipollux_sched.spec.job import JobSpec
from pipollux_sched.store import Store
from pipollux_sched.store.families import key_of
from pipollux_simulator import Experiment, KnownLength, Options, SimulationOutcome
from tests.extent import examples, first
from tests.sched.history.histories import (
    HINTS,
    INTERVAL,
    RESTART,
    START,
    node_infos,
    simulated,
    spec_of,
    write_history,
    write_settings,
)
from tests.sched.store.stores import Clock, point

Jobs = list[tuple[JobSpec, float, float]]


def as_scheduler(history: SchedulerHistory) -> Options:
    return Options(
        history.interval,
        history.restart_seconds,
        known_length=KnownLength.parse("declared"),
        inherit_models=True,
        decides_at="changes",
        teams=history.teams,
    )


def lived(folder: Path, jobs: Jobs, policy: str) -> tuple[SimulationOutcome, SchedulerHistory]:
    """Return the life of a scheduler, and its history as its store has it."""
    lineages = {spec.name: key_of(spec.name, spec.model_dump(mode="json")) for spec, *_ in jobs}
    life = simulated(jobs, policy, lineages)
    clock = Clock()
    with Store(folder / "pipollux.db", create=True, clock=clock) as store:
        write_settings(store, type(make_policy(policy)).__name__)
        write_history(store, clock, jobs, life)
        return life, read_history(store)


JOBS: Jobs = [
    (spec_of("job-0"), 0.0, 30_000.0),
    (spec_of("job-1", min_replicas=2), 20.0, 60_000.0),
    (spec_of("job-2", preemptible=False, requested_replicas=3), 30.0, 20_000.0),
    (spec_of("job-3", max_replicas=2), 200.0, 50_000.0),
]


@pytest.mark.parametrize(
    "policy", first(2, ["exact", *sorted(set(POLICIES) - {"exact", "pollux"})])
)
def test_a_life_is_replayed_as_it_was(tmp_path: Path, policy: str) -> None:
    """Reality is what was written, and the replay of its policy comes to the same."""
    life, history = lived(tmp_path, JOBS, policy)
    assert history.left_out == ()
    assert (history.policy, history.interval) == (policy, INTERVAL)
    made = replay(history, history.nodes, name="past")
    actual = what_happened(history, made)
    again = Experiment(history.nodes, as_scheduler(history)).run(made.workload, policy)
    for told in (actual, again):
        for mine, theirs in zip(told.jobs, life.jobs, strict=True):
            assert mine.name == theirs.name
            assert mine.jct == pytest.approx(theirs.jct, abs=1e-4)
            assert mine.slot_seconds == pytest.approx(theirs.slot_seconds, abs=1e-3)
            assert mine.num_restarts == theirs.num_restarts
            assert [hold.nodes for hold in mine.history] == [hold.nodes for hold in theirs.history]
    found = agreement(actual, again)
    assert found.avg_jct_ratio == pytest.approx(1, abs=1e-6)
    assert found.jct_error_p90 == pytest.approx(0, abs=1e-6)


@given(
    jobs=st.lists(
        # Moments that a clock tells apart: equal jobs start in the order of their arrival.
        st.tuples(
            st.floats(0, 600).map(lambda moment: round(moment, 3)),
            st.floats(1_000, 200_000),
            st.integers(1, 4),
        ),
        min_size=1,
        max_size=6,
    )
)
@example(jobs=[(1.1, 1000.0, 1), (5.403799477157102, 11226.0, 1)])  # one starts, one comes
@examples(5)
def test_any_life_is_replayed_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, jobs: list[tuple[float, float, int]]
) -> None:
    """But for prices: where nobody was restarted, nobody knows what a restart costs."""
    rows = [
        (spec_of(f"job-{number}", min_replicas=least), arrival, samples)
        for number, (arrival, samples, least) in enumerate(jobs)
    ]
    life, history = lived(tmp_path_factory.mktemp("life"), rows, "exact")
    made = replay(history, history.nodes, name="past")
    actual = {job.name: job.jct for job in what_happened(history, made).jobs}
    assert actual == pytest.approx({job.name: job.jct for job in life.jobs}, abs=1e-4)
    again = Experiment(history.nodes, as_scheduler(history)).run(made.workload, "exact")
    if any(job.num_restarts for job in life.jobs):
        assert {job.name: job.jct for job in again.jobs} == pytest.approx(actual, abs=1e-3)
    (restart,) = {row.terms.restart_seconds for row in made.workload.jobs}
    assert restart in (pytest.approx(START), pytest.approx(RESTART))


def test_a_job_trains_as_its_own_model_says() -> None:
    """Against the goodput that the performance model itself has, over all it may choose."""
    hints = SchedHints.from_json_object(HINTS)
    app = HistoryApplication(spec_of("job"), hints, 1000.0)
    assert hints.perf_params is not None
    assert hints.grad_params is not None
    goodput = GoodputFunction(hints.perf_params, hints.grad_params, 32)
    for nodes, replicas in ((1, 1), (1, 2), (2, 2), (2, 5), (3, 8)):
        placement = (replicas - nodes + 1, *(1,) * (nodes - 1))
        running = app.configure(1, placement)
        sizes = np.arange(8, 129)
        # One replica measures noise between batches, so without accumulation its batch stays.
        most = 512 if replicas > 1 else 32
        allowed = sizes[(sizes * replicas >= 32) & (sizes * replicas <= most)]
        best = np.max(goodput.evaluate(nodes, replicas, allowed, 0))
        times = app.step_times(running)
        sqr, var = app.gradients(running.batch_size, 0)
        gain = (var + sqr) / (var * 32 / running.batch_size + sqr)
        assert running.accum_steps == 0
        rate = 32 * gain / times.optim_step
        assert app.new_model().goodput(running) == pytest.approx(rate)
        assert rate == pytest.approx(best, rel=0.003)  # AdaptDL's choice, if it is as good
    assert app.progress(1) * 32 == 1000.0


def test_a_job_knows_itself_once_it_has_trained() -> None:
    app = HistoryApplication(spec_of("job"), SchedHints.from_json_object(HINTS), 1000.0)
    model = app.new_model()
    (shape,) = model.shapes()
    assert (float(shape.speedup_fn(1, 4)), model.base_goodput()) == (4.0, 0.0)
    running = app.configure(1, (2,))
    model.observe(running, app.step_times(running), app.gradients(32, 0))
    (shape,) = model.shapes()
    assert float(shape.speedup_fn(1, 4)) < 4.0
    assert (model.max_profiled_replicas, model.base_goodput() > 0) == (2, True)
    warm_start = app.new_model()
    warm_start.inherit([model])
    assert warm_start.shapes()[0].speedup_fn is shape.speedup_fn
    assert warm_start.max_profiled_replicas == 2


@pytest.fixture
def past(tmp_path: Path, clock: Clock) -> Any:
    with Store(tmp_path / "pipollux.db", create=True, clock=clock) as store:
        write_settings(store, "ExactPolicy")
        yield store


def begin(store: Store, clock: Clock, name: str, **fields: Any) -> None:
    """Submit a job and let it train from 10 s after that on."""
    document = spec_of(name, **fields).model_dump(mode="json")
    store.submit(name, document, "token", 3)
    store.transition(name, Allocate(["node-a"], "it is free"))
    store.transition(name, Started(1, ("1",)))
    clock.now += 10
    store.transition(name, FirstStep(1, 1))


def test_jobs_that_cannot_be_replayed_are_named(past: Store, clock: Clock) -> None:
    past.submit("queued", spec_of("queued").model_dump(mode="json"), "token", 3)
    wrong = {**HINTS["perfParams"], "alpha_c": 0.0, "beta_c": 1e-18, "alpha_r": 0.0, "beta_r": 0.0}
    for name, hints in {
        "silent": None,
        "unfitted": {"initBatchSize": 32},
        "wordless": HINTS,
        "absurd": {**HINTS, "perfParams": {**wrong, "alpha_n": 0.0, "beta_n": 0.0}},
        "wide": {**HINTS, "trainedSamples": 100.0, "numStages": 8},
        "many": {**HINTS, "trainedSamples": 100.0},
        "good": {**HINTS, "trainedSamples": 100.0},
    }.items():
        sizes = {"wide": {"num_stages": 8}, "many": {"min_replicas": 9, "max_replicas": 9}}
        begin(past, clock, name, **sizes.get(name, {}))
        if hints is not None:
            past.put_hints(name, 1, hints)
        past.transition(name, Exited(1, Outcome.COMPLETE))
    history = read_history(past)
    made = replay(history, node_infos(), name="past")
    reasons = {one.job: one.reason for one in made.left_out}
    assert list(made.jobs) == ["good"]
    assert reasons.pop("absurd").startswith("sent hints that ")
    assert reasons == {
        "queued": "never started",
        "silent": "sent no hints, so how fast it trains is not known",
        "unfitted": "sent no model of its step times yet",
        "wordless": "did not report how much it trained",
        "wide": "fits on no node: a replica takes 8 slots of one node",
        "many": "runs on 9 replicas at least, and the nodes hold 8",
    }


def test_jobs_that_did_not_complete_count_as_far_as_they_came(past: Store, clock: Clock) -> None:
    for name in ("running", "cancelled"):
        begin(past, clock, name)
        clock.now += 20
        past.put_hints(name, 1, {**HINTS, "trainedSamples": 4000.0})
        clock.now += 100  # of which nothing is known
    past.transition("cancelled", Cancel())
    past.transition("cancelled", Exited(1, Outcome.STOPPED, step=9))
    history = read_history(past)
    made = replay(history, history.nodes, name="past")
    assert cut_short(made) == {"running": "not done", "cancelled": "failed or cancelled"}
    for job in what_happened(history, made).jobs:
        assert (job.jct, job.slot_seconds, job.num_restarts) == (30.0, 30.0, 0)
    assert [job.samples for job in history.jobs] == [4000.0, 4000.0]
    assert {row.terms.start_seconds for row in made.workload.jobs} == {10.0}
    # It trained 4000 samples in 20 s, and does so again.
    assert list(made.paces.values()) == pytest.approx([4000 / 20 / 216.216] * 2, rel=1e-4)
    again = Experiment(history.nodes, as_scheduler(history)).run(made.workload, "fifo")
    assert [job.jct for job in again.jobs] == pytest.approx([30.0, 30.0])


def test_progress_tells_what_hints_do_not(past: Store, clock: Clock) -> None:
    """Samples at the efficiency that was reported with them."""
    begin(past, clock, "older")
    past.put_hints("older", 1, HINTS)
    past.add_report("older", 1, [point(1000)])
    past.transition("older", Exited(1, Outcome.COMPLETE))
    (job,) = read_history(past).jobs
    assert job.samples == pytest.approx(8 * 1000 * 0.9)


def test_a_job_that_began_again_counts_from_then_on(past: Store, clock: Clock) -> None:
    begin(past, clock, "again")
    past.put_hints("again", 1, {**HINTS, "trainedSamples": 500.0})
    past.transition("again", Exited(1, Outcome.COMPLETE))
    clock.now += 1000
    past.rerun("again", from_scratch=True)
    clock.now += 2
    past.transition("again", Allocate(["node-a"], "it is free"))
    past.transition("again", Started(2, ("1",)))
    clock.now += 5
    past.put_hints("again", 2, {**HINTS, "trainedSamples": 300.0})
    past.transition("again", Exited(2, Outcome.COMPLETE))
    (job,) = read_history(past).jobs
    assert (job.until - job.submitted, job.samples, len(job.attempts)) == (7.0, 300.0, 1)
