"""What a cluster does with pods, nodes and objects: Kubernetes itself, and the one in memory."""

from __future__ import annotations

import itertools
from typing import Any

import httpx2
import pytest
from lightkube import Client
from lightkube.resources.coordination_v1 import Lease
from lightkube.resources.core_v1 import Namespace, Node, Pod
from lightkube.types import CascadeType, PatchType

from .cluster import Cluster, until
from .objects import SAMPLES, Sample, pod, sample
from .steps import DEAF, LISTENS, create_pod, ended, gone, phase, printed, refused


def test_a_pod_runs_and_its_status_tells_how(client: Client) -> None:
    create_pod(client, "good", ["sh", "-c", "echo $GREETING from $(NAME)"], environment={
        "NAME": "here", "GREETING": "hello"})  # fmt: skip
    create_pod(client, "bad", ["sh", "-c", "echo one; echo two; exit 3"])
    create_pod(client, "none", ["no-such-program"])
    assert ended(client, "good").exitCode == 0
    assert phase(client, "good") == "Succeeded"
    assert list(client.log("good")) == ["hello from here\n"]
    assert (ended(client, "bad").exitCode, phase(client, "bad")) == (3, "Failed")
    assert list(client.log("bad", tail_lines=1)) == ["two\n"]
    assert ended(client, "none").reason == "StartError"


def test_the_log_is_followed_until_the_container_ends(client: Client) -> None:
    create_pod(client, "other", LISTENS)
    printed(client, "other", "ready")
    lines = client.log("other", follow=True)
    assert next(iter(lines)) == "ready\n"
    client.delete(Pod, "other")
    assert list(lines) == ["told\n"]


def test_a_deleted_pod_is_told_and_then_killed(client: Client) -> None:
    create_pod(client, "listens", LISTENS)
    create_pod(client, "deaf", DEAF, grace=1)
    for name in ("listens", "deaf"):
        printed(client, name, "ready")
    version = client.get(Pod, "deaf").metadata.resourceVersion
    for name in ("listens", "deaf"):
        client.delete(Pod, name)
    codes = {}
    watch = client.watch(Pod, resource_version=version, server_timeout=60)
    while len(codes) < 2:
        event, seen = next(watch)
        if event == "DELETED":
            codes[seen.metadata.name] = seen.status.containerStatuses[0].state.terminated.exitCode
    assert codes == {"listens": 7, "deaf": 137}


def test_gpus_are_counted_and_nodes_chosen(cluster: Cluster, client: Client) -> None:
    create_pod(client, "three", LISTENS, gpus=3, node="n1")
    until(lambda: client.get(Pod, "three").spec.nodeName == "n1", "pod three is placed")
    create_pod(client, "two", LISTENS, gpus=2, node="n1")

    def waits() -> Any:
        conditions = client.get(Pod, "two").status.conditions or []
        return [c for c in conditions if c.reason == "Unschedulable"]

    [condition] = until(waits, "pod two waits")
    assert "1 Insufficient nvidia.com/gpu" in condition.message
    printed(client, "three", "ready")
    client.delete(Pod, "three")
    until(lambda: phase(client, "two") == "Running", "pod two runs")
    cluster.cordon("n2")
    create_pod(client, "late", node="n2")
    until(lambda: client.get(Pod, "late").status.conditions, "pod late waits")
    cluster.cordon("n2", cordoned=False)
    assert ended(client, "late").exitCode == 0


def test_a_pod_without_an_image_says_so(client: Client) -> None:
    missing = pod("it")
    missing["spec"]["containers"][0]["image"] = "docker.io/pipollux/nothing:1"
    client.create(Pod.from_dict(missing))

    def waiting() -> Any:
        statuses = client.get(Pod, "it").status.containerStatuses
        return statuses and statuses[0].state.waiting

    until(lambda: (waits := waiting()) and waits.reason == "ErrImageNeverPull", "no image")
    client.delete(Pod, "it")
    until(lambda: gone(client, "it"), "the pod is gone")


def test_nodes_that_are_lost_or_deleted(cluster: Cluster, client: Client) -> None:
    soon = [{"key": f"node.kubernetes.io/{why}", "operator": "Exists", "effect": "NoExecute",
             "tolerationSeconds": 0} for why in ("unreachable", "not-ready")]  # fmt: skip
    create_pod(client, "lost", LISTENS, node="n1", tolerations=soon)
    create_pod(client, "deleted", LISTENS, node="n2")
    for name in ("lost", "deleted"):
        printed(client, name, "ready")
    cluster.lose_node("n1")
    until(lambda: client.get(Pod, "lost").metadata.deletionTimestamp, "the pod is to go")
    assert phase(client, "lost") == "Running", "nobody knows better"
    [ready] = [c for c in client.get(Node, "n1").status.conditions if c.type == "Ready"]
    assert ready.status == "Unknown"
    cluster.delete_node("n2")
    until(lambda: gone(client, "deleted"), "its pod is gone too")
    cluster.add_node("n3")
    create_pod(client, "new", node="n3")
    assert ended(client, "new").exitCode == 0


def test_an_evicted_pod_is_told(cluster: Cluster, client: Client, namespace: str) -> None:
    create_pod(client, "it", LISTENS)
    printed(client, "it", "ready")
    lines = client.log("it", follow=True)
    cluster.evict(namespace, "it")
    assert "told\n" in list(lines)
    until(lambda: gone(client, "it"), "the pod is gone")


def test_custom_resources_have_defaults_rules_and_a_status(
    cluster: Cluster, client: Client
) -> None:
    cluster.declare(SAMPLES)
    made = client.create(Sample(**sample("a", max=3)))
    assert made.spec == {"stages": 2, "min": 1, "max": 3, "suspend": False}
    with refused(422, "Invalid"):
        client.create(Sample(**sample("b", min=4, max=3)))
    with refused(422, "Invalid"):
        client.create(Sample(**sample("c", stages=0)))
    client.patch(Sample, "a", {"status": {"phase": "ignored"}}, patch_type=PatchType.MERGE)
    assert client.get(Sample, "a").status is None
    client.patch(Sample.Status, "a", {"status": {"phase": "Running"}}, patch_type=PatchType.MERGE)
    changed = client.patch(Sample, "a", {"spec": {"suspend": True}}, patch_type=PatchType.MERGE)
    assert (changed.status["phase"], changed.metadata.generation) == ("Running", 2)


@pytest.mark.parametrize("cascade", CascadeType)
def test_dependents_follow_their_owner(
    cluster: Cluster, client: Client, cascade: CascadeType
) -> None:
    cluster.declare(SAMPLES)
    owner = client.create(Sample(**sample("owner")))
    dependent = pod("dependent", LISTENS)
    dependent["metadata"]["ownerReferences"] = [
        {
            "apiVersion": owner.apiVersion,
            "kind": owner.kind,
            "name": "owner",
            "uid": owner.metadata.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }
    ]
    client.create(Pod.from_dict(dependent))
    printed(client, "dependent", "ready")
    client.delete(Sample, "owner", cascade=cascade)
    until(lambda: gone(client, "owner", Sample), "the owner is gone")
    if cascade is CascadeType.ORPHAN:
        assert client.get(Pod, "dependent").metadata.ownerReferences is None
    else:
        until(lambda: gone(client, "dependent"), "the pod is gone")


def test_a_namespace_takes_all_along(cluster: Cluster, client: Client) -> None:
    cluster.create_namespace("team")
    client.create(Pod.from_dict(pod("it", DEAF, grace=1)), namespace="team")
    client.delete(Namespace, "team")
    until(lambda: gone(client, "team", Namespace), "the namespace is gone")
    with refused(404, "NotFound"):
        client.create(Pod.from_dict(pod("it")), namespace="team")


def test_a_lease_is_changed_by_one_at_a_time(client: Client) -> None:
    lease = client.create(Lease.from_dict({"metadata": {"name": "it"}, "spec": {}}))
    mine, theirs = client.get(Lease, "it"), client.get(Lease, "it")
    mine.spec.holderIdentity = "me"
    client.replace(mine)
    theirs.spec.holderIdentity = "them"
    with refused(409, "Conflict"):
        client.replace(theirs)
    assert client.get(Lease, "it").spec.holderIdentity == "me"
    assert lease.metadata.uid == mine.metadata.uid


def test_what_is_applied_has_an_owner(cluster: Cluster, client: Client) -> None:
    cluster.declare(SAMPLES)

    def apply(manager: str, *, force: bool = False, **spec: Any) -> Any:
        thing = {**sample("it"), "spec": spec}
        return client.apply(Sample(**thing), field_manager=manager, force=force).spec

    apply("one", stages=2, max=4)
    assert apply("two", stages=2, suspend=True)["max"] == 4
    with refused(409, "Conflict"):
        apply("two", stages=2, suspend=True, max=5)
    assert apply("two", force=True, stages=2, max=5)["max"] == 5
    assert "max" in apply("one", stages=2), "the other has it now"
    assert "max" not in apply("two", stages=2), "nobody has it"


def test_a_watch_goes_on_where_another_ended(client: Client) -> None:
    version = create_pod(client, "a", LISTENS, labels={"job": "x"}).metadata.resourceVersion
    create_pod(client, "b", LISTENS, labels={"job": "y"})
    client.delete(Pod, "a", grace_period=0)
    until(lambda: gone(client, "a"), "the pod is gone")
    watch = client.watch(Pod, labels={"job": "x"}, resource_version=version, server_timeout=60)
    seen = itertools.takewhile(lambda x: x[0] != "DELETED", watch)
    assert {thing.metadata.name for _, thing in seen} == {"a"}


def test_a_watch_from_too_long_ago_is_told_so(cluster: Cluster, client: Client) -> None:
    version = create_pod(client, "a").metadata.resourceVersion
    cluster.expire_watches()
    with refused(410, "Expired"):
        next(iter(client.watch(Pod, resource_version=version)))


def test_pods_go_on_without_the_api_server(cluster: Cluster, client: Client) -> None:
    waits = f"echo ready; until test -e {cluster.shared}/go; do sleep 0.05; done; exit 5"
    create_pod(client, "it", ["sh", "-c", waits], folder=cluster.shared)
    printed(client, "it", "ready")
    cluster.stop_api_server()
    with pytest.raises(httpx2.ConnectError):
        client.get(Pod, "it")
    (cluster.shared / "go").touch()
    cluster.start_api_server()
    assert ended(client, "it").exitCode == 5
