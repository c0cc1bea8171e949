"""Sweeps in the store: thousands of trials at once, their results, and their names."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest

from pipollux_sched.allocator.snapshot import SnapshotReader
from pipollux_sched.controller.sweeps import SweepLoop
from pipollux_sched.lifecycle import (
    Allocate,
    Cancel,
    Exited,
    Outcome,
    Phase,
    Suspend,
    SweepEnded,
    SweepProgress,
)
from pipollux_sched.planning.explain import explanation
from pipollux_sched.spec.job import JobSpec
from pipollux_sched.store import (
    JobEndedError,
    JobExistsError,
    MetricValue,
    Store,
    Submission,
    TrialState,
    UnknownJobError,
    reports,
)
from pipollux_sched.views.cluster import cluster_view
from pipollux_sched.views.jobs import IN_ORDER, job_details, list_jobs
from pipollux_sched.views.sweeps import list_sweeps, sweep_details
from tests.cli.kept import HINTS
from tests.sched.store.stores import point, serve_nodes

GRID = {"grid": {"lr": [0.1, 0.01, 0.001]}, "metric": "error"}


def spec(name: str, sweep: Mapping[str, Any] | None = GRID, **fields: Any) -> JobSpec:
    return JobSpec.model_validate({"name": name, "script": "a.py", "sweep": sweep, **fields})


def submission(job: JobSpec, **of_trial: Any) -> Submission:
    return Submission(job.name, job.model_dump(mode="json"), "token", 0, **of_trial)


def submit(store: Store, job: JobSpec) -> None:
    store.submit_all([submission(job)])


def start(store: Store, sweep: JobSpec, *numbers: int) -> None:
    """Let trials have jobs, and run."""
    trials = {trial.number: trial for trial in store.sweeps.trials(sweep.name)}
    store.submit_all(
        [submission(sweep.of_trial(n, trials[n].parameters), trial=trials[n]) for n in numbers]
    )
    for number in numbers:
        store.transition(f"{sweep.name}-{number}", Allocate(["a"], "free"))


def measure(store: Store, job: str, *values: tuple[int, float | None], name: str = "error") -> None:
    attempt = store.job(job).state.attempt
    store.add_report(job, attempt, [], metrics=[MetricValue(name, *value) for value in values])


def end(store: Store, job: str, outcome: Outcome = Outcome.COMPLETE) -> None:
    store.transition(job, Exited(store.job(job).state.attempt, outcome, message="it ended"))


def states(store: Store, sweep: str) -> list[TrialState]:
    return [trial.state for trial in store.sweeps.trials(sweep)]


def test_two_thousand_trials_are_submitted_at_once(store: Store) -> None:
    grid = {"grid": {"lr": list(range(50)), "width": list(range(40))}}
    job = spec("many", grid)
    began, version = time.process_time(), store.version
    submit(store, job)
    details = sweep_details(store, "many")
    assert time.process_time() - began < 3.0
    assert store.version == version + 1
    assert len(details.trials) == details.trial_states[TrialState.WAITING] == 2000
    assert details.trials[1999].parameters == {"lr": 49, "width": 39}
    assert [job.name for job in store.jobs()] == ["many"]


def test_the_results_of_trials(store: Store) -> None:
    serve_nodes(store, a=4)
    rates = spec("rates")
    submit(store, rates)
    assert SnapshotReader(store, restart_seconds=1.0).read().candidates == ()
    start(store, rates, 0, 1, 2)
    candidates = SnapshotReader(store, restart_seconds=1.0).read().candidates
    assert [job.name for job in candidates] == ["rates-0", "rates-1", "rates-2"]
    with pytest.raises(UnknownJobError, match=r"there is rates$"):
        store.job("rate")
    measure(store, "rates-0", (1, 5.0), (2, 3.0))
    measure(store, "rates-0", (2, 4.0))  # again, after a restart
    measure(store, "rates-1", (1, 2.0), (2, None))
    measure(store, "rates-2", (1, 1.0), name="other")
    assert store.sweeps.curves("rates", "error") == {0: {1: 5.0, 2: 4.0}, 1: {1: 2.0, 2: None}}
    assert sweep_details(store, "rates").trials[0].value == 4.0
    for number in range(3):
        end(store, f"rates-{number}")
    (view,) = list_sweeps(store)
    assert view.best is not None
    assert (view.best.number, view.best.value, view.best.parameters) == (0, 4.0, {"lr": 0.1})
    assert [trial.value for trial in store.sweeps.trials("rates")] == [4.0, None, None]


def test_the_message_of_a_sweep_fits_its_trials(store: Store) -> None:
    """Also before the controller has stored how far it has come."""
    rates = spec("rates")
    submit(store, rates)
    start(store, rates, 0, 1, 2)
    store.transition("rates", SweepProgress("0 of 3 trials ended, 3 in progress."))
    for number, value in enumerate((5.0, 4.0)):
        measure(store, f"rates-{number}", (1, value))
        end(store, f"rates-{number}")
    details, (listed,) = sweep_details(store, "rates"), list_sweeps(store)
    assert details.message.startswith("2 of 3 trials ended, 1 in progress; the best is trial 1 ")
    assert details.best is not None
    assert (listed.message, listed.best) == (details.message, details.best)
    job = store.job("rates")
    (summary, *_), _ = list_jobs(store, IN_ORDER)
    described, seen = job_details(store, job), cluster_view(store, IN_ORDER, 0).jobs[0]
    running = next(entry for entry in described.conditions if entry.type == "Running")
    explained = explanation(store, job).message
    told = {described.message, summary.message, seen.message, running.message, explained}
    assert told == {details.message}
    assert listed.trial_states == details.trial_states
    store.transition("rates", Suspend())
    assert sweep_details(store, "rates").message == store.job("rates").state.message


@pytest.mark.parametrize(
    ("message", "cause"), [("it broke\nat line 2", "it broke"), ("x" * 300, "x" * 165 + "...")]
)
def test_a_failed_sweep_has_the_cause(store: Store, message: str, cause: str) -> None:
    rates = spec("rates")
    submit(store, rates)
    start(store, rates, 0, 1, 2)
    store.transition("rates-0", Cancel())
    end(store, "rates-0", Outcome.STOPPED)
    for number in (1, 2):
        store.transition(f"rates-{number}", Exited(1, Outcome.FAILED, message=message))
    SweepLoop(store, lambda *_: None, store.transition).step()
    assert store.job("rates").state.message == (
        "All 3 trials have ended (2 failed, 1 cancelled); "
        f"rates-1: Failed once, max_restarts is 0: {cause}"
    )


def test_a_sweep_of_one_trial_has_the_singular(store: Store) -> None:
    one = spec("one", {"grid": {"lr": [0.1]}, "metric": "error"})
    submit(store, one)
    start(store, one, 0)
    end(store, "one-0")
    SweepLoop(store, lambda *_: None, store.transition).step()
    told = "The trial has ended (1 complete); no trial has reported error."
    assert store.job("one").state.message == told


def test_a_sweep_without_its_metric_says_so(store: Store) -> None:
    submit(store, spec("rates"))
    start(store, spec("rates"), 0, 1, 2)
    for number in range(3):
        measure(store, f"rates-{number}", (1, 1.0), name="other")
        end(store, f"rates-{number}")
    SweepLoop(store, lambda *_: None, store.transition).step()
    told = "All 3 trials have ended (3 complete); no trial has reported error."
    assert store.job("rates").state.message == told


def test_the_loss_of_an_epoch_is_its_mean(store: Store) -> None:
    losses = spec("losses", {"grid": {"lr": [1, 2]}})
    submit(store, losses)
    start(store, losses, 0, 1)
    points = [point(step) for step in range(1, 5)]
    later = [
        type(each)(**{**each.__dict__, "epoch": index // 2, "loss": float(index)})
        for index, each in enumerate(points)
    ]
    store.add_report("losses-0", 1, later)
    assert store.sweeps.curves("losses", "loss") == {0: {1: 0.5}}, "the second one goes on"
    end(store, "losses-0")
    assert store.sweeps.trials("losses")[0].value == 2.5
    assert store.sweeps.curves("losses", "loss") == {0: {1: 0.5, 2: 2.5}}
    store.add_report("losses-1", 1, later)
    measure(store, "losses-1", (7, 0.25), name="loss")  # the script's own word counts
    end(store, "losses-1")
    assert store.sweeps.trials("losses")[1].value == 0.25


def test_very_many_values_are_thinned_to_the_same_steps(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "MOST_VALUES", 100)
    rates = spec("rates")
    submit(store, rates)
    start(store, rates, 0, 1)
    for number, first in ((0, 0), (1, 3)):
        for begin in range(first, 250, 25):
            values = [(step, float(step)) for step in range(begin, begin + 25)]
            measure(store, f"rates-{number}", *values)
    curves = store.sweeps.curves("rates", "error")
    assert all(25 <= len(curve) <= 101 for curve in curves.values())
    assert (max(curves[0]), max(curves[1])) == (249, 252)
    both = curves[0].keys() & curves[1].keys()
    assert len(both) >= 25
    assert all(curves[0][step] == step for step in both)


def test_how_trials_end(store: Store) -> None:
    rates = spec("rates")
    submit(store, rates)
    start(store, rates, 0, 1, 2)
    pruned = store.transition("rates-0", Cancel(pruned="It is worse."))
    assert [type(action).__name__ for action in pruned.actions] == ["Kill"]
    assert pruned.job.phase is Phase.RUNNING
    end(store, "rates-0", Outcome.FAILED)
    end(store, "rates-1", Outcome.FAILED)
    store.transition("rates-2", Cancel())
    end(store, "rates-2", Outcome.STOPPED)
    assert states(store, "rates") == [
        *(TrialState.PRUNED, TrialState.FAILED, TrialState.CANCELLED),
    ]
    job = store.job("rates-0")
    assert (job.phase, job.state.reason, job.state.message) == (
        *(Phase.FAILED, "Pruned"),
        "It is worse.",
    )
    assert job.state.cancelled
    assert store.events(job="rates-0")[-1]["type"] == "pruned"

    with pytest.raises(JobEndedError, match="is a trial of sweep 'rates'"):
        store.rerun("rates-1", from_scratch=False)
    store.transition("rates", SweepEnded(complete=False, message="No trial is complete."))
    with pytest.raises(JobEndedError, match="is a sweep, which is not run from scratch"):
        store.rerun("rates", from_scratch=True)
    assert store.rerun("rates", from_scratch=False).job.phase is Phase.CREATED
    assert states(store, "rates") == [
        *(TrialState.PRUNED, TrialState.WAITING, TrialState.WAITING),
    ]
    start(store, rates, 1, 2)
    assert store.job("rates-1").state.attempt == 2
    end(store, "rates-2", Outcome.FAILED)
    store.transition("rates", SweepEnded(complete=True, message="It is over."))
    assert store.rerun("rates", from_scratch=False).job.phase is Phase.CREATED
    assert states(store, "rates")[2] is TrialState.WAITING
    start(store, rates, 2)
    end(store, "rates-2")
    store.transition("rates", SweepEnded(complete=True, message="It is over."))
    with pytest.raises(JobEndedError, match="is complete, and no trial has failed"):
        store.rerun("rates", from_scratch=False)
    assert states(store, "rates")[1] is TrialState.UNFINISHED


def test_a_sweep_waits_for_a_job_once(store: Store) -> None:
    submit(store, spec("prepare", None))
    rates = spec("rates", after=["prepare"])
    submit(store, rates)
    assert store.job("rates").state.reason == "WaitsForJobs"
    store.transition("rates", Cancel())
    assert store.rerun("rates", from_scratch=False).job.state.reason == "WaitsForJobs"
    store.transition("prepare", Allocate(["a"], "free"))
    end(store, "prepare")
    assert store.job("rates").phase is Phase.CREATED
    start(store, rates, 0)
    end(store, "rates-0", Outcome.FAILED)
    store.transition("rates", Cancel())
    store.deletions.begin("prepare")
    assert store.rerun("rates", from_scratch=False).job.phase is Phase.CREATED


def test_names_of_trials_are_kept_for_them(store: Store) -> None:
    submit(store, spec("rates"))
    with pytest.raises(JobExistsError, match="'rates-2' is that of a trial of sweep 'rates'"):
        submit(store, spec("rates-2", None))
    submit(store, spec("rates-3", None))
    submit(store, spec("rates-01", None))
    submit(store, spec("other-1", None))
    with pytest.raises(JobExistsError, match="'other-1' already exists, which would be the name"):
        submit(store, spec("other"))
    store.transition("rates", Cancel())
    with pytest.raises(JobExistsError, match="a sweep named 'rates' already exists"):
        submit(store, spec("rates"))
    with pytest.raises(JobExistsError, match="a sweep named 'rates' already exists"):
        submit(store, spec("rates", None))


def test_a_sweep_is_deleted_with_its_trials(store: Store) -> None:
    rates = spec("rates")
    submit(store, rates)
    start(store, rates, 0)
    measure(store, "rates-0", (1, 5.0))
    end(store, "rates-0")
    store.transition("rates", Cancel())
    for name in ("rates-0", "rates"):
        store.deletions.begin(name)
        for pending in store.deletions.pending():
            store.deletions.finish(pending)
    assert (store.jobs(), store.sweeps.counts()) == ([], {})
    submit(store, rates)
    assert states(store, "rates") == [TrialState.WAITING] * 3


def test_trials_share_what_they_measured(store: Store) -> None:
    """From the first measurement on, also if the trial that made it was pruned."""
    serve_nodes(store, a=4)
    rates = spec("rates", max_replicas=4)
    submit(store, rates)
    start(store, rates, 0)
    store.put_hints("rates-0", 1, HINTS)
    store.transition("rates-0", Cancel(pruned="It is worse."))
    end(store, "rates-0", Outcome.FAILED)
    start(store, rates, 1)
    found = SnapshotReader(store, restart_seconds=1.0).read().candidate("rates-1")
    assert found is not None
    assert found.warm_start is not None
    assert found.warm_start.predecessor == "rates-0"
    assert found.info.max_replicas == 4


def test_the_replicas_of_all_trials_are_bounded(store: Store) -> None:
    serve_nodes(store, a=8)
    rates = spec("rates", {**GRID, "max_replicas": 5}, max_replicas=8, requested_replicas=4)
    submit(store, rates)
    start(store, rates, 0)
    reader = SnapshotReader(store, restart_seconds=1.0)
    assert reader.read().candidates[0].info.allowed_replicas == 5
    start(store, rates, 1)
    assert [job.info.allowed_replicas for job in reader.read().candidates] == [2, 2]
