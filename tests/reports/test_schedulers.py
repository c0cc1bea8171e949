"""Reports about other schedulers, replayed here, or proven by a test elsewhere (`ELSEWHERE`).

Each test names its report by tracker and number.
"""

from __future__ import annotations

import ast
import json
import time
from collections.abc import Callable, Iterator
from email import message_from_string
from pathlib import Path
from typing import Any

import pytest

from pipollux_sched.forecasting.make import Forecaster
from pipollux_sched.lifecycle import Cancel, Outcome, Phase
from pipollux_sched.planning.plan import plan
from pipollux_sched.spec.cluster import load_cluster
from pipollux_sched.spec.job import JobSpec, parse_job
from pipollux_sched.store import StateDir, Store, TrialState
from pipollux_sched.views.cluster import list_nodes
from pipollux_sched.views.forecasts import list_forecasts
from pipollux_sched.views.jobs import job_details
from pipollux_sched.views.sweeps import sweep_details
from tests.cli.conftest import cli
from tests.cli.runner import LIGHT, Cli, one_sentence
from tests.programs import run_pipollux
from tests.sched.conftest import clock, light_agent, place, postgresql, store
from tests.sched.forecasting import test_forecasting as forecasting
from tests.sched.notifications.conftest import (
    Outbox,
    couriers,
    hook,
    make_outbox,
    outbox,
    receiver,
)
from tests.sched.notifications.receivers import MailServer, Receiver
from tests.sched.processes import processes_of
from tests.sched.scripts import TOY
from tests.sched.test_scheduler import directory, toy
from tests.sched.test_sweeps import job as sweep
from tests.sched.test_sweeps import scheduler_on, states, wait_for

__all__ = [
    "cli",
    "clock",
    "couriers",
    "directory",
    "light_agent",
    "make_outbox",
    "outbox",
    "place",
    "postgresql",
    "receiver",
    "store",
]
ROOT = Path(__file__).parents[2]
ELSEWHERE = {
    # Placement by the levels of the network, also of jobs that grow.
    "kubernetes-sigs/kueue 2724": (
        "tests/policies/exact/test_topology.py",
        "test_a_job_that_suffers_is_packed_and_an_indifferent_one_is_spread",
    ),
    "kubernetes-sigs/kueue 8160": (
        "tests/policies/exact/test_topology.py",
        "test_an_elastic_resize_is_priced_at_the_level_of_the_new_nodes",
    ),
    "kubernetes-sigs/kueue 13640": (
        "tests/policies/exact/test_topology.py",
        "test_a_job_that_suffers_stays_smaller_rather_than_span_racks",
    ),
    # GPUs: MIG slices by UUID, those of other programs, broken ones, and their use.
    "vllm-project/vllm 41848": (
        "tests/sched/backend/local/test_gpus.py",
        "test_slices_are_slots_of_single_stages",
    ),
    "ray-project/ray 5528": (
        "tests/sched/backend/local/test_gpu_health.py",
        "test_a_gpu_with_a_foreign_process_is_left_out_unless_a_job_holds_it",
    ),
    "NVIDIA/k8s-device-plugin 267": (
        "tests/sched/backend/local/test_gpu_health.py",
        "test_a_broken_gpu_is_left_out_until_it_is_healthy",
    ),
    "ray-project/ray 7697": (
        "tests/sched/test_gpu_nodes.py",
        "test_users_see_the_gpus_and_what_is_wrong_with_them",
    ),
    # A job on Ray starts again when a node of its placement group is lost.
    "ray-project/ray 27076": (
        "tests/ray/test_engine.py",
        "test_a_node_is_lost_and_another_one_comes",
    ),
    # Optuna prunes trials that are jobs of Slurm.
    "hydra-ecosystem/hydra 1710": (
        "tests/cli/test_cli_serve_slurm_sweeps.py",
        "test_a_search_is_pruned_and_goes_on_after_a_scheduler_is_killed",
    ),
    # A limit of the running time does not count the queue.
    "kubernetes/kubernetes 111948": (
        "tests/sched/store/test_run_time.py",
        "test_the_running_time_of_all_attempts_counts",
    ),
    # A job file on standard input.
    "avast/wanna-ml 128": (
        "tests/cli/test_cli_run.py",
        "test_waiting_across_a_restart_of_the_scheduler",
    ),
}


@pytest.mark.parametrize("report", ELSEWHERE)
def test_the_test_elsewhere_is_there(report: str) -> None:
    file, name = ELSEWHERE[report]
    tree = ast.parse((ROOT / file).read_text())
    assert name in {part.name for part in tree.body if isinstance(part, ast.FunctionDef)}


@pytest.fixture
def told(tmp_path: Path) -> Iterator[tuple[Store, Callable[..., str]]]:
    """One slot: `first` trains for a known time and `second` waits; and commands on that."""
    folder = StateDir(tmp_path / "state")
    folder.create()

    def said(*words: str) -> str:
        done = run_pipollux(*words, "--state-dir", str(folder.path))
        assert done.returncode == 0, done.stderr
        return " ".join(done.stdout.split())

    with Store(folder.database, create=True) as store:
        forecasting.serve(store)
        forecasting.train(store, "first", remaining=700_000.0)
        hints = {**forecasting.HINTS, "remainingSamples": 1400.0, "trainedSamples": 0}
        forecasting.submit(store, "second", hints=hints)
        yield store, said


def test_a_pending_job_shows_when_it_starts(told: tuple[Store, Callable[..., str]]) -> None:
    """kubernetes-sigs/kueue 13159 (how long will it wait?), flux-framework/flux-sched 1423."""
    store, said = told
    store.forecasts.keep(Forecaster(store).make())
    [first, second] = json.loads(said("jobs", "--output", "json"))
    start, end = second["forecast"]["start"], first["forecast"]["end"]
    assert start == pytest.approx(end, abs=1), "it starts when the other one ends"
    took = forecasting.seconds_of(700_000.0)
    assert start["median"] - time.time() == pytest.approx(took, rel=0.1)
    assert start["low"] < start["median"] < start["high"]
    assert "Starts between" in said("describe", "second")
    assert "Waits for" in said("explain", "second")


def test_every_view_says_when_jobs_end(told: tuple[Store, Callable[..., str]]) -> None:
    """kubernetes-sigs/kueue 13854: when will it start, when will it end? Asked of all jobs."""
    store, said = told
    store.forecasts.keep(Forecaster(store).make())
    by_job = {one.job: one for one in list_forecasts(store).jobs}
    listed = {one["name"]: one["forecast"] for one in json.loads(said("jobs", "-o", "json"))}
    planned = {one["job"]: one["forecast"] for one in json.loads(said("plan", "-o", "json"))}
    for job in ("first", "second"):
        end = by_job[job].end
        assert None not in (end.low, end.median, end.high)
        assert end.low < end.median < end.high
        assert listed[job]["end"] == planned[job]["end"] == dict(end)
        assert "Ends between" in said("describe", job)
        assert "Ends: between" in said("explain", job)
    assert by_job["first"].end.median < by_job["second"].end.median
    assert (listed["first"]["start"], listed["second"]["start"] is None) == (None, False)


def test_progress_and_the_remaining_time_are_in_the_status(
    told: tuple[Store, Callable[..., str]],
) -> None:
    """kubeflow/trainer 2779: both without the logs, by an API."""
    store, _ = told
    store.forecasts.keep(Forecaster(store).make())
    found = job_details(store, store.job("first"))
    assert found.progress is not None
    assert found.progress.step == 1
    assert found.forecast is not None
    assert found.forecast.end.median is not None
    assert found.forecast.end.median > time.time()


@pytest.mark.exhaustive
def test_asking_before_submitting(cli: Cli) -> None:
    """kubernetes-sigs/kueue 4580: will it start or wait? And 15614: will it be refused, and why?"""
    cli.program = LIGHT
    cli.serve("--policy", "fifo")
    text = "jobs:\n- {name: NAME, script: SCRIPT, min_replicas: 4, max_replicas: 4}\n"
    first, second = (text.replace("SCRIPT", str(TOY)).replace("NAME", name) for name in "ab")
    told = cli("submit", "-", "--dry-run", stdin=first)
    assert told.stdout.startswith("a: would start now, and end "), told.stderr
    assert cli("submit", "-", stdin=first).returncode == 0
    told = cli("submit", "-", "--dry-run", stdin=second)
    assert told.stdout.startswith("b: would start at a time that is not known"), told.stderr
    refused = cli("submit", "-", "--dry-run", stdin=second.replace("4", "9"))
    assert "9" in one_sentence(refused, 1)
    assert [job["name"] for job in json.loads(cli("jobs", "-o", "json").stdout)] == ["a"]


def held(values: int, tmp_path: Path, **fields: Any) -> JobSpec:
    """A sweep whose first trials end soon, and whose others never do."""
    lrs = [{"lr": 0.01}] * 4 + [{"lr": 0.9}] * (values - 4)
    return sweep(
        "rates", {"list": lrs, "metric": "error", **fields}, "--lr={lr}", f"--hold={tmp_path}/go"
    )


@pytest.mark.exhaustive
@pytest.mark.usefixtures("light_agent")
def test_a_sweep_of_a_hundred_runs_is_one_object(directory: Path, tmp_path: Path) -> None:
    """skypilot-org/skypilot 9461: one line, progress of the whole, cancelled together."""
    with scheduler_on(directory) as scheduler:
        scheduler.submit(held(100, tmp_path))
        assert scheduler.wait(
            lambda jobs: jobs["rates"].state.message.startswith("4 of 100 trials ended, 4 in"), 240
        )
        run = run_pipollux("jobs", "--state-dir", str(directory), "-o", "json")
        (line,) = json.loads(run.stdout)
        assert (line["name"], line["phase"]) == ("rates", "Running")
        done = run_pipollux("cancel", "rates", "--state-dir", str(directory))
        assert done.returncode == 0, done.stderr
        (tmp_path / "go").touch()
        assert scheduler.wait(lambda jobs: all(job.phase.ended for job in jobs.values()), 240)
        assert processes_of(directory) == []
        found = sweep_details(scheduler.store, "rates")
        assert len(scheduler.jobs()) == 9
    assert found.phase == "Cancelled"
    assert found.trial_states[TrialState.WAITING] == 92


@pytest.mark.exhaustive
@pytest.mark.usefixtures("light_agent")
def test_thousands_of_runs_do_not_load_the_scheduler(directory: Path, tmp_path: Path) -> None:
    """facebookresearch/dora 12: they are submitted at once, and become jobs as slots are free."""
    with scheduler_on(directory) as scheduler:
        began = time.monotonic()
        scheduler.submit(held(10_000, tmp_path))
        assert time.monotonic() - began < 15  # 3 s for each 2000
        assert scheduler.wait(lambda _: len(states(scheduler, "rates")) == 10_000, 240)
        assert scheduler.wait(lambda jobs: sum(not j.phase.ended for j in jobs.values()) > 1, 240)
        unfinished = [job for job in scheduler.jobs().values() if not job.phase.ended]
        assert len(unfinished) <= 1 + 4
        scheduler.control.cancel("rates")
        (tmp_path / "go").touch()
        assert scheduler.wait(lambda jobs: all(job.phase.ended for job in jobs.values()), 240)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("light_agent")
def test_paused_trials_leave_their_slots_to_others(directory: Path, tmp_path: Path) -> None:
    """ray-project/ray 17720: a scheduler counted the GPUs of paused trials as used."""
    with scheduler_on(directory) as scheduler:
        sweep_of_four = held(8, tmp_path)
        scheduler.submit(sweep_of_four)
        assert scheduler.wait(
            lambda jobs: sum(job.state.training for job in jobs.values()) == 4, 240
        )
        wide = toy("wide", "--steps", "2", min_replicas=4, max_replicas=4)
        scheduler.submit(wide)
        scheduler.control.suspend("rates")
        wait_for(scheduler, "wide")
        assert scheduler.jobs()["wide"].phase is Phase.COMPLETE
        assert sum(node.free for node in list_nodes(scheduler.store)) == 4
        (tmp_path / "go").touch()
        scheduler.control.resume("rates")
        wait_for(scheduler, "rates")
        assert states(scheduler, "rates") == [TrialState.COMPLETE] * 8


@pytest.mark.exhaustive
@pytest.mark.usefixtures("light_agent")
def test_jobs_that_depend_on_others_are_submitted_at_once(directory: Path) -> None:
    """kubernetes-sigs/kueue 11024, facebookincubator/submitit 1723, CoBrALab/qbatch 120.

    A chain of jobs, without a client that waits for each; a clean-up that runs however it ends.
    """
    with scheduler_on(directory) as scheduler:
        jobs = [
            toy("prepare", "--steps", "2"),
            toy("train", "--steps", "2", after=["prepare"]),
            toy("broken", "--fail-at", "1", max_restarts=0, after=["train"]),
            toy("publish", after=["broken"]),
            toy("clean", "--steps", "1", after=[{"job": "broken", "when": "ended"}]),
        ]
        scheduler.control.submit_all(jobs)
        assert scheduler.wait(lambda jobs: all(job.phase.ended for job in jobs.values()), 240)
        found = {name: (job.phase, job.state.reason) for name, job in scheduler.jobs().items()}
        begun = {
            name: scheduler.store.attempts(name)[0].created_at
            for name in ("prepare", "train", "broken", "clean")
        }
    assert found["publish"] == (Phase.FAILED, "DependencyNotMet")
    assert [found[name][0] for name in ("prepare", "train", "broken", "clean")] == [
        *(Phase.COMPLETE, Phase.COMPLETE, Phase.FAILED, Phase.COMPLETE)
    ]
    assert list(begun) == sorted(begun, key=lambda name: begun[name])


def test_changes_of_a_job_reach_a_system_of_one_s_own(outbox: Outbox, receiver: Receiver) -> None:
    """skypilot-org/skypilot 2000 and 3775: callbacks when a job is killed, fails or completes."""
    events = ("completed", "failed", "cancelled", "preempted")
    for name in ("good", "bad", "taken", "unwanted"):
        outbox.submit(name, hook(receiver, *events), max_restarts=0)
    outbox.end("good")
    outbox.end("bad", Outcome.FAILED, "exit status 3")
    outbox.preempt("taken")
    outbox.store.transition("unwanted", Cancel())
    outbox.deliver()
    assert all(one.is_signed() for one in receiver.requests)
    found = {(one.data["data"]["job"], one.data["type"]) for one in receiver.requests}
    assert found == {
        ("good", "job.completed"),
        ("bad", "job.failed"),
        ("taken", "job.preempted"),
        ("unwanted", "job.cancelled"),
    }


def test_a_mail_with_the_cause_of_a_failure(outbox: Outbox) -> None:
    """kubeflow/pipelines 11412: an alert with what the log says of the cause."""
    with MailServer() as mail:
        url = f"mailto://bot:word@127.0.0.1:{mail.port}?from=bot@a.test&to=ana@a.test"
        outbox.submit("toy", {"apprise": url, "events": ["failed"]})
        outbox.end("toy", Outcome.FAILED, "exit status 1: CUDA out of memory")
        outbox.deliver()
        (found,) = mail.mails
    text = message_from_string(found).get_payload()[-1].get_payload(decode=True).decode()
    assert "CUDA out of memory" in text


def test_some_trials_on_gpus_and_some_on_cpus(tmp_path: Path) -> None:
    """ray-project/ray 10235: while trials have the GPUs, others run on the CPUs beside them."""
    (tmp_path / "cluster.yaml").write_text(
        "nodes:\n- {name: box, slots: 1, cpus: 32, cpu_slots: 3, memory: 64GiB}\n"
    )
    grid = {"grid": {"lr": [1, 2, 3, 4]}}
    specs = [
        parse_job({"name": name, "script": "a.py", "max_replicas": 1, "sweep": grid, **device})
        for name, device in (("on-gpu", {"device": "gpu"}), ("on-cpu", {"device": "cpu"}))
    ]
    found = plan(load_cluster(tmp_path / "cluster.yaml"), specs)
    nodes = {one.job: one.nodes for one in found.assignments if one.nodes}
    assert [nodes[name] for name in sorted(nodes)] == [*[("box-cpu",)] * 3, ("box",)]
    assert {name.rpartition("-")[0] for name in nodes} == {"on-cpu", "on-gpu"}


@pytest.mark.exhaustive
@pytest.mark.usefixtures("light_agent")
def test_an_exit_status_that_is_no_use_to_retry_fails_the_job(
    directory: Path, tmp_path: Path
) -> None:
    """kubeflow/trainer 2044: it was left in the phase Restarting for ever."""
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(1)\n")
    with scheduler_on(directory) as scheduler:
        rules = {"max_restarts": 5, "exit_codes": {"fail": [1]}}
        scheduler.submit(JobSpec.model_validate({"name": "a", "script": str(script), **rules}))
        wait_for(scheduler, "a")
        found = scheduler.jobs()["a"].state
    assert (found.phase, found.reason, found.attempt) == (Phase.FAILED, "ExitCode", 1)
