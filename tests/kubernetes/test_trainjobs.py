"""Attempts as TrainJobs, with a stand-in for the controllers of the Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from lightkube import Client
from lightkube.resources.core_v1 import Pod

from pipollux_sched.backend.base import BackendError, Signal
from pipollux_sched.backend.kubernetes.api import Job, TrainJob
from pipollux_sched.backend.kubernetes.informer import Informer
from pipollux_sched.backend.kubernetes.trainjob_engine import TrainJobEngine
from pipollux_sched.lifecycle import Phase

from .cluster import GPU, Cluster, until
from .engines import RUNS, Rig
from .requests import granted, record_requests
from .test_resources import Site, trials
from .trainer import Trainer


@pytest.fixture(autouse=True)
def trainer(cluster: Cluster, client: Client, tmp_path: Path) -> Iterator[Trainer]:
    tmp_path.chmod(0o755)
    trainer = Trainer(cluster, client)
    trainer.start()
    yield trainer
    trainer.close()


@pytest.fixture
def rig(cluster: Cluster, namespace: str, trainer: Trainer, tmp_path: Path) -> Iterator[Rig]:
    options = {"engine": TrainJobEngine, "volcano_queue": "research"}
    rig = Rig(cluster, namespace, tmp_path / "rig", **options)
    yield rig
    rig.close()


@pytest.fixture
def site(
    cluster: Cluster,
    namespace: str,
    trainer: Trainer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Site]:
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    site = Site(cluster, namespace, tmp_path / "site", via="trainjob")
    yield site
    site.close()


def test_an_attempt_from_start_to_stop(rig: Rig, client: Client) -> None:
    """One TrainJob for both replicas, each on a node of its own; a stop suspends it."""
    keys = rig.start(f"echo ready $PIPOLLUX_REPLICA; {RUNS}", ["n1", "n2"], num_stages=2)
    rig.running(*keys)
    made = client.get(TrainJob, "job-a1")
    assert made["spec"]["trainer"]["numNodes"] == 2
    assert made["spec"]["trainer"]["resourcesPerNode"]["limits"] == {GPU: "2"}
    assert made.metadata.annotations["scheduling.volcano.sh/queue-name"] == "research"
    pods = list(client.list(Pod))
    assert {pod.spec.nodeName for pod in pods} == {"n1", "n2"}
    until(
        lambda: {rig.log(key).split("\n")[0] for key in keys} == {"ready 0", "ready 1"},
        "what both have printed is in their logs",
    )
    assert rig.engine.nodes()["n1"].slots == 4  # our own are not taken
    rig.engine.signal(keys[0], Signal.STOP)
    rig.engine.signal(keys[1], Signal.STOP)
    assert [rig.ended(key).status for key in keys] == [143, 143]
    until(lambda: not list(client.list(Pod)), "the pods are gone")
    assert [rig.ended(key).status for key in keys] == [143, 143]  # known all the same
    until(
        lambda: all(rig.log(key).endswith("told\n") for key in keys),
        "what both have printed last is in their logs",
    )
    rig.forget()
    assert not list(client.list(TrainJob))


def test_uneven_placement_is_refused(rig: Rig) -> None:
    with pytest.raises(BackendError, match="2 on n1, 1 on n2; a TrainJob places the same"):
        rig.start(RUNS, ["n1", "n1", "n2"])
    assert rig.engine.listing().replicas == {}


def test_a_runtime_that_is_not_there(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    """The Trainer's own words are the reason."""
    rig = Rig(cluster, namespace, tmp_path / "rig", engine=TrainJobEngine, runtime="none")
    (key,) = rig.start(RUNS)
    error = rig.ended(key).result.error
    assert error is not None
    assert "ClusterTrainingRuntime none not found" in error.text
    rig.forget()
    rig.close()


@pytest.mark.exhaustive
def test_a_sweep_runs_trial_by_trial(site: Site) -> None:
    """Each attempt of a trial is a TrainJob of the sweep's resource, which has their progress."""
    goal = site.folder / "goal"
    sweep = {"grid": {"lr": [0.1, 0.01, 0.001]}, "metric": "error", "maxParallel": 2}
    run = (
        f'python3 {site.folder}/trial.py "$@" || exit 1\nwhile [ ! -e {goal} ]; do sleep 0.5; done'
    )
    site.apply("rates", sweep=sweep, **trials(site, run))
    until(lambda: site.status("rates").get("replicas") == 2, "2 trials are being started")

    def made() -> dict[str, TrainJob]:
        return {trainjob.metadata.name: trainjob for trainjob in site.client.list(TrainJob)}

    until(lambda: set(made()) == {"rates-0-a1", "rates-1-a1"}, "both have a TrainJob")
    owners = [
        (owner.kind, owner.name)
        for trainjob in made().values()
        for owner in trainjob.metadata.ownerReferences
    ]
    assert owners == [("PipolluxJob", "rates")] * 2
    assert site.status("rates")["sweep"]["progress"] == "0/3"
    goal.touch()
    site.await_phase("rates", Phase.COMPLETE)
    until(lambda: site.status("rates")["sweep"]["progress"] == "3/3", "all have ended")
    best = {"trial": 1, "job": "rates-1", "value": 0.5, "parameters": {"lr": 0.01}}
    assert site.status("rates")["sweep"]["best"] == best
    site.client.delete(Job, "rates")
    until(lambda: not site.scheduler.jobs(), "the sweep and its trials are deleted")
    until(lambda: not site.objects(), "the cluster has nothing of them")
    assert not list(site.client.list(TrainJob))


def test_a_job_with_servers_is_refused(site: Site) -> None:
    """By one sentence in its status, before anything of it is created."""
    site.apply("pp", RUNS, servers=1)
    status = site.await_phase("pp", Phase.FAILED)
    assert status["reason"] == "Refused"
    assert status["message"] == (
        "job 'pp': servers: 1 cannot run with TrainJobs, whose pods are all alike; serve with "
        "--via pod, or leave it out"
    )
    assert site.objects() == ["Job pp"]
    assert not list(site.client.list(TrainJob))


def test_its_role_is_what_it_uses(
    cluster: Cluster, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each verb on TrainJobs that is granted is used, and no other."""
    used = record_requests(monkeypatch)
    rig = Rig(cluster, namespace, tmp_path / "rig", engine=TrainJobEngine)
    (key,) = rig.start(RUNS)
    rig.running(key)
    rig.engine.close()
    monkeypatch.setattr(Informer, "find", lambda *_: None)  # its watch is late
    rig.again()
    rig.start(RUNS)
    monkeypatch.undo()
    rig.engine.signal(key, Signal.KILL)
    rig.ended(key)
    rig.forget()
    rig.close()
    ours = {(verb, kind) for verb, kind in used if kind == "trainjobs.trainer.kubeflow.org"}
    assert ours == granted("../kubernetes-trainjob/rbac.yaml")
    assert used - ours <= granted("rbac.yaml")
