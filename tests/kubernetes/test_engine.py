"""The Kubernetes engine: replicas are pods, whatever becomes of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from lightkube import Client
from lightkube.resources.core_v1 import Pod, Secret, Service

from pipollux_sched.backend.base import ClusterUnavailableError, Signal
from pipollux_sched.backend.kubernetes import replica_states

from .cluster import GPU, Cluster, until
from .engines import DEAF, RUNS, Rig
from .memory.cluster import MemoryCluster
from .objects import pod


@pytest.fixture
def rig(cluster: Cluster, namespace: str, tmp_path: Path) -> Iterator[Rig]:
    tmp_path.chmod(0o755)
    rig = Rig(cluster, namespace, tmp_path / "rig")
    yield rig
    rig.close()


def test_an_attempt_from_start_to_end(rig: Rig, client: Client) -> None:
    """Pods get their node, devices, variables and token; the exit status and the message remain."""
    script = (
        "echo ready; echo $PIPOLLUX_REPLICA of $PIPOLLUX_NUM_NODES on $PIPOLLUX_DEVICES;"
        'echo "$PIPOLLUX_TOKEN $ODD"; test -n "$PIPOLLUX_ADDRESS";'
        """echo '{"step": 7, "asked": true}' > $PIPOLLUX_RESULT_FILE; exit 3"""
    )
    odd = {"ODD": "$(HOME) $$x"}
    keys = rig.start(script, ["n1", "n2"], num_stages=2, environment=odd)
    rig.start(script, ["n1", "n2"], num_stages=2, environment=odd)  # nothing happens
    assert set(rig.engine.listing().replicas) == set(keys)
    ends = [rig.ended(key) for key in keys]
    assert [end.status for end in ends] == [3, 3]
    assert all(end.result.stopped_step == 7 and end.result.asked and not end.lost for end in ends)
    for replica, key in enumerate(keys):
        made = client.get(Pod, f"job-a1-r{replica}")
        assert made.spec.nodeName == ("n1", "n2")[replica]
        assert made.spec.containers[0].resources.limits == {GPU: "2"}
        assert made.metadata.labels["pipollux.dev/job"] == "job"
        assert "to-ken" not in str(made.to_dict())
        expected = f"ready\n{replica} of 2 on cuda:0,cuda:1\nto-ken $(HOME) $$x\n"
        assert rig.log(key) == expected
        assert rig.log(key) == expected  # nothing comes twice
    assert client.get(Service, "job-replicas").spec.clusterIP == "None"
    rig.forget()
    assert not list(client.list(Pod))
    # The secret goes with the job's resource, which there is none of here.
    (secret,) = [
        s for s in client.list(Secret) if s.metadata.name.startswith("pipollux-token-job-")
    ]
    assert secret.metadata.labels["pipollux.dev/job"] == "job"
    assert rig.state_dir.log(*keys[0]).exists()


def test_a_replica_that_has_left_is_removed_before_the_others(rig: Rig, client: Client) -> None:
    script = f'test "$PIPOLLUX_REPLICA" = 1 && echo left && exit 0; {RUNS}'
    stays, left = rig.start(script, ["n1", "n2"])
    rig.running(stays)
    assert rig.ended(left).status == 0
    assert rig.log(left) == "left\n"
    for _ in range(2):
        rig.engine.forget_replica(left)
        until(lambda: set(rig.engine.listing().replicas) == {stays}, "its pod is gone")
    assert [made.metadata.name for made in client.list(Pod)] == ["job-a1-r0"]
    assert rig.state_dir.log(*left).read_text() == "left\n"


def test_what_the_cluster_ends_is_lost(
    rig: Rig, cluster: Cluster, namespace: str, client: Client
) -> None:
    """Deleted by a person, evicted, on a node that is deleted: never the fault of the job."""
    keys = rig.start(DEAF, ["n1", "n1", "n2"])
    rig.running(*keys)
    client.delete(Pod, "job-a1-r0", grace_period=1)
    cluster.evict(namespace, "job-a1-r1")
    client.delete(Pod, "job-a1-r1", grace_period=1)  # an eviction leaves it its whole grace
    cluster.delete_node("n2")
    whys = [rig.ended(key).lost for key in keys]
    assert "deleted, and not by its scheduler" in whys[0]
    assert "deleted, and not by its scheduler" in whys[1]
    assert "n2" in whys[2] or "deleted" in whys[2]
    until(lambda: set(rig.engine.nodes()) == {"n1"}, "n2 is gone")
    rig.forget()


def test_a_kubelet_that_is_short_of_memory(memory: MemoryCluster, tmp_path: Path) -> None:
    """Its words are those of the reason."""
    rig = Rig(memory, "default", tmp_path / "rig")
    (key,) = rig.start(DEAF)
    rig.running(key)
    memory.fail_pod("default", "job-a1-r0", "Evicted", "The node was low on resource: memory.")
    assert "Evicted): The node was low on resource: memory." in rig.ended(key).lost
    rig.forget()
    rig.close()


def test_a_node_that_does_not_answer(rig: Rig, cluster: Cluster) -> None:
    """Its pods stay as they are until they are told to end; then nobody waits for them."""
    (key,) = rig.start(DEAF, ["n2"])
    rig.running(key)
    cluster.lose_node("n2")
    until(lambda: not rig.engine.nodes()["n2"].ready, "n2 is not ready")
    assert rig.engine.nodes()["n2"].reason
    assert rig.state(key).ended is None
    rig.engine.signal(key, Signal.KILL)
    assert "n2 does not answer" in rig.ended(key).lost
    rig.forget()


def test_what_cannot_start_says_why(rig: Rig) -> None:
    """A pod without room waits with the scheduler's words; one without its image as well."""
    (crowded,) = rig.start(RUNS, num_stages=5)
    (blind,) = rig.start(RUNS, job="blind", image="registry.example/none:1")
    until(lambda: f"Insufficient {GPU}" in rig.state(crowded).waiting, "no room")
    assert "is not bound to n1" in rig.state(crowded).waiting
    until(lambda: "ErrImagePull" in rig.state(blind).waiting, "no image")
    rig.engine.signal(crowded, Signal.STOP)
    rig.engine.signal(blind, Signal.KILL)
    assert rig.ended(crowded).lost
    assert rig.ended(blind).status is None
    rig.forget()
    rig.forget("blind")


def test_nodes_and_what_others_hold(
    rig: Rig, cluster: Cluster, namespace: str, client: Client
) -> None:
    """Slots are what others leave; our own do not count. Cordons and taints drain."""
    client.create(Pod.from_dict(pod("theirs", ["sleep", "600"], gpus=3, node="n1")))
    (key,) = rig.start(DEAF, ["n2"])
    rig.running(key)
    until(lambda: rig.engine.nodes()["n1"].slots == 1, "3 of 4 are taken")
    assert rig.engine.nodes()["n1"].spec.slots == 4
    assert rig.engine.nodes()["n2"].slots == 4
    cluster.cordon("n2")
    until(lambda: rig.engine.nodes()["n2"].draining, "n2 drains")
    assert rig.engine.nodes()["n2"].ready
    placeholder = pod("placeholder", ["sleep", "600"], gpus=1, node="n1",
                      labels={"pipollux.dev/scheduler": "pipollux"})  # fmt: skip
    client.create(Pod.from_dict(placeholder))
    until(lambda: cluster.pods(namespace)["placeholder"].spec.nodeName, "it is bound")
    client.delete(Pod, "theirs", grace_period=0)
    until(lambda: rig.engine.nodes()["n1"].slots == 4, "they are back")
    cluster.add_node("n3", gpus=0)
    cluster.add_node("n4", gpus=8)
    until(lambda: "n4" in rig.engine.nodes(), "n4 is there")
    assert "n3" not in rig.engine.nodes()  # it has no devices


def test_the_pods_of_a_namesake_hold_devices(memory: MemoryCluster, tmp_path: Path) -> None:
    """A scheduler in another namespace may have the same label."""
    rig = Rig(memory, "default", tmp_path / "rig")
    memory.create_namespace("other")
    theirs = pod("theirs", ["sleep", "600"], gpus=3, node="n1",
                 labels={"pipollux.dev/scheduler": "pipollux"})  # fmt: skip
    with memory.client("other") as client:
        client.create(Pod.from_dict(theirs))
        until(lambda: rig.engine.nodes()["n1"].slots == 1, "3 of 4 are taken")
        client.delete(Pod, "theirs", grace_period=0)
        until(lambda: rig.engine.nodes()["n1"].slots == 4, "they are back")
    rig.close()


def test_the_api_server_away(rig: Rig, cluster: Cluster) -> None:
    """While nothing answers, nobody knows; afterwards everything is as it is now."""
    (key,) = rig.start(RUNS)
    rig.running(key)
    cluster.stop_api_server()

    def away() -> bool:
        try:
            rig.engine.listing()
        except ClusterUnavailableError as error:
            return "does not answer" in str(error)
        return False

    until(away, "nothing answers")
    with pytest.raises(ClusterUnavailableError):
        rig.engine.signal(key, Signal.STOP)
    cluster.start_api_server()

    def back() -> bool:
        try:
            return rig.state(key) is not None
        except ClusterUnavailableError:
            return False

    until(back, "it answers again")
    assert rig.state(key).ended is None
    cluster.expire_watches()
    until(back, "the watches are renewed")
    rig.engine.signal(key, Signal.STOP)
    assert until(lambda: back() and rig.state(key).ended, "it has stopped").status == 143
    rig.forget()


def test_gone_without_a_trace(rig: Rig, client: Client) -> None:
    """A pod whose finalizer somebody has removed is no longer listed."""
    (key,) = rig.start(DEAF)
    rig.running(key)
    client.patch(Pod, "job-a1-r0", {"metadata": {"finalizers": None}})
    client.delete(Pod, "job-a1-r0", grace_period=0)
    until(lambda: rig.state(key) is None, "it is not listed")


@pytest.fixture(autouse=True)
def prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that is not there counts as gone at once."""
    monkeypatch.setattr(replica_states, "ABSENCE", 0.0)
