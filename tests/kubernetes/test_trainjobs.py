"""Attempts as TrainJobs, with a stand-in for the controllers of the Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from lightkube import Client
from lightkube.resources.core_v1 import Pod

from pipollux_sched.backend.base import BackendError, Signal
from pipollux_sched.backend.kubernetes.api import TrainJob
from pipollux_sched.backend.kubernetes.informer import Informer
from pipollux_sched.backend.kubernetes.trainjob_engine import TrainJobEngine

from .cluster import GPU, until
from .engines import RUNS, Rig
from .memory.cluster import MemoryCluster
from .requests import granted, record_requests
from .trainer import Trainer


@pytest.fixture
def client(memory: MemoryCluster) -> Iterator[Client]:
    with memory.client() as client:
        yield client


@pytest.fixture
def trainer(client: Client) -> Iterator[Trainer]:
    trainer = Trainer(client)
    trainer.start()
    yield trainer
    trainer.close()


@pytest.fixture
def rig(memory: MemoryCluster, trainer: Trainer, tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(memory, "default", tmp_path / "rig", engine=TrainJobEngine, volcano_queue="research")
    yield rig
    rig.close()


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


def test_a_runtime_that_is_not_there(
    memory: MemoryCluster, trainer: Trainer, tmp_path: Path
) -> None:
    """The Trainer's own words are the reason."""
    rig = Rig(memory, "default", tmp_path / "rig", engine=TrainJobEngine, runtime="none")
    (key,) = rig.start(RUNS)
    error = rig.ended(key).result.error
    assert error is not None
    assert "ClusterTrainingRuntime none not found" in error.text
    rig.forget()
    rig.close()


def test_its_role_is_what_it_uses(
    memory: MemoryCluster, trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each verb on TrainJobs that is granted is used, and no other."""
    used = record_requests(monkeypatch)
    rig = Rig(memory, "default", tmp_path / "rig", engine=TrainJobEngine)
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
