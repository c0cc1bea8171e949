"""The cluster in memory does what tests rely on."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from lightkube import Client
from lightkube.core.exceptions import ApiError
from lightkube.resources.coordination_v1 import Lease
from lightkube.resources.core_v1 import Namespace, Node, Pod
from lightkube.types import CascadeType, PatchType

from .cluster import Definition, until
from .memory.cluster import MemoryCluster
from .memory.failures import CUT, DROP, LOSE, Failure
from .objects import SAMPLES, Sample, pod, sample

DEAF = ["python", "-c", "import time; time.sleep(600)"]
LISTENS = [
    "python",
    "-c",
    "import signal, sys, time\n"
    "signal.signal(signal.SIGTERM, lambda *_: (print('told', flush=True), sys.exit(7)))\n"
    "print('ready', flush=True)\n"
    "time.sleep(600)",
]


def create_pod(client: Client, name: str, *args: Any, **more: Any) -> Pod:
    return client.create(Pod.from_dict(pod(name, *args, **more)))


def phase(client: Client, name: str) -> str:
    return client.get(Pod, name).status.phase


def ended(client: Client, name: str) -> Any:
    """Return how a pod's container has ended, once it has."""

    def look() -> Any:
        statuses = client.get(Pod, name).status.containerStatuses
        return statuses and statuses[0].state.terminated

    return until(look, f"pod {name} has ended")


def printed(client: Client, name: str, line: str) -> None:
    until(lambda: line in "".join(client.log(name)), f"pod {name} prints {line!r}")


def gone(client: Client, name: str, resource: Any = Pod) -> bool:
    return all(thing.metadata.name != name for thing in client.list(resource))


def refused(code: int, reason: str) -> Any:
    """Expect that a request is refused."""

    def right(error: BaseException) -> bool:
        assert isinstance(error, ApiError)
        return (error.status.code, error.status.reason) == (code, reason)

    return pytest.raises(ApiError, check=right)


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
    printed(client, "listens", "ready")
    until(lambda: phase(client, "deaf") == "Running", "pod deaf runs")
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


def test_gpus_are_counted_and_nodes_chosen(memory: MemoryCluster, client: Client) -> None:
    create_pod(client, "three", LISTENS, gpus=3, node="node1")
    until(lambda: client.get(Pod, "three").spec.nodeName == "node1", "pod three is placed")
    create_pod(client, "two", LISTENS, gpus=2, node="node1")

    def waits() -> Any:
        conditions = client.get(Pod, "two").status.conditions or []
        return [c for c in conditions if c.reason == "Unschedulable"]

    [condition] = until(waits, "pod two waits")
    assert "1 Insufficient nvidia.com/gpu" in condition.message
    printed(client, "three", "ready")
    client.delete(Pod, "three")
    until(lambda: phase(client, "two") == "Running", "pod two runs")
    memory.cordon("node2")
    create_pod(client, "late", node="node2")
    until(lambda: client.get(Pod, "late").status.conditions, "pod late waits")
    memory.cordon("node2", cordoned=False)
    assert ended(client, "late").exitCode == 0


def test_a_pod_without_an_image_says_so(client: Client) -> None:
    missing = pod("it")
    missing["spec"]["containers"][0]["image"] = "docker.io/pipollux/nothing:1"
    client.create(Pod.from_dict(missing))

    def waiting() -> Any:
        statuses = client.get(Pod, "it").status.containerStatuses
        return statuses and statuses[0].state.waiting

    until(lambda: waiting().reason == "ErrImageNeverPull", "there is no image")
    client.delete(Pod, "it")
    until(lambda: gone(client, "it"), "the pod is gone")


def test_nodes_that_are_lost_or_deleted(memory: MemoryCluster, client: Client) -> None:
    soon = [{"key": f"node.kubernetes.io/{why}", "operator": "Exists", "effect": "NoExecute",
             "tolerationSeconds": 0} for why in ("unreachable", "not-ready")]  # fmt: skip
    create_pod(client, "lost", LISTENS, node="node1", tolerations=soon)
    create_pod(client, "deleted", LISTENS, node="node2")
    for name in ("lost", "deleted"):
        printed(client, name, "ready")
    memory.lose_node("node1")
    until(lambda: client.get(Pod, "lost").metadata.deletionTimestamp, "the pod is to go")
    assert phase(client, "lost") == "Running", "nobody knows better"
    [ready] = [c for c in client.get(Node, "node1").status.conditions if c.type == "Ready"]
    assert ready.status == "Unknown"
    memory.delete_node("node2")
    until(lambda: gone(client, "deleted"), "its pod is gone too")
    memory.add_node("node3")
    create_pod(client, "new", node="node3")
    assert ended(client, "new").exitCode == 0


def test_an_evicted_pod_is_told(memory: MemoryCluster, client: Client) -> None:
    create_pod(client, "it", LISTENS)
    printed(client, "it", "ready")
    lines = client.log("it", follow=True)
    memory.evict("default", "it")
    assert "told\n" in list(lines)
    until(lambda: gone(client, "it"), "the pod is gone")


def test_a_kubelet_under_pressure_fails_a_pod(memory: MemoryCluster, client: Client) -> None:
    create_pod(client, "it", LISTENS)
    printed(client, "it", "ready")
    memory.fail_pod("default", "it", "Evicted", "The node was low on resource: memory.")
    until(lambda: phase(client, "it") == "Failed", "it has failed")
    assert client.get(Pod, "it").status.reason == "Evicted"


def test_custom_resources_have_defaults_rules_and_a_status(client: Client) -> None:
    client.create(Definition(**SAMPLES))
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
    client.delete(Definition, f"samples.{SAMPLES['spec']['group']}")
    with refused(404, "NotFound"):
        client.get(Sample, "a")


@pytest.mark.parametrize("cascade", CascadeType)
def test_dependents_follow_their_owner(client: Client, cascade: CascadeType) -> None:
    client.create(Definition(**SAMPLES))
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


def test_a_namespace_takes_all_along(memory: MemoryCluster, client: Client) -> None:
    memory.create_namespace("team")
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


def test_what_is_applied_has_an_owner(client: Client) -> None:
    client.create(Definition(**SAMPLES))

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


def test_a_watch_from_too_long_ago_is_told_so(memory: MemoryCluster, client: Client) -> None:
    version = create_pod(client, "a").metadata.resourceVersion
    memory.expire_watches()
    with refused(410, "Expired"):
        next(iter(client.watch(Pod, resource_version=version)))


def test_pods_go_on_without_the_api_server(memory: MemoryCluster, client: Client) -> None:
    create_pod(client, "it", ["sh", "-c", "until test -e $DIR/go; do sleep 0.05; done; exit 5"],
               environment={"DIR": str(memory.folder)})  # fmt: skip
    until(lambda: phase(client, "it") == "Running", "the pod runs")
    memory.stop_api_server()
    with pytest.raises(httpx2.ConnectError):
        client.get(Pod, "it")
    (memory.folder / "go").touch()
    memory.start_api_server()
    assert ended(client, "it").exitCode == 5


def test_failures_on_purpose(memory: MemoryCluster, client: Client) -> None:
    memory.failures.add(Failure(429, methods="GET"))
    with refused(429, "TooManyRequests"):
        client.get(Node, "node1")
    memory.failures.add(Failure(DROP, methods="POST", path="/pods$"))
    with pytest.raises(httpx2.HTTPError):
        create_pod(client, "dropped")
    memory.failures.add(Failure(LOSE, methods="POST", path="/pods$"))
    with pytest.raises(httpx2.HTTPError):
        create_pod(client, "lost")
    assert [thing.metadata.name for thing in client.list(Pod)] == ["lost"]
    memory.failures.add(Failure(CUT, path="/nodes", after=1))
    watch = client.watch(Node)
    next(watch)
    with pytest.raises(httpx2.HTTPError):
        next(watch)
    memory.failures.add(Failure(503, delay=0.01))
    with refused(503, "InternalError"):
        client.get(Node, "node1")
    assert memory.failures.happened == 5
    assert client.get(Node, "node1").metadata.name == "node1"


def test_volumes_and_references(memory: MemoryCluster, client: Client, tmp_path: Path) -> None:
    memory.ask("POST", "/api/v1/namespaces/default/configmaps",
               {"metadata": {"name": "words"}, "data": {"word": "hello"}})  # fmt: skip
    shown = pod("it", ["sh", "-c", "cat /words/word; echo > /ckpt/saved; echo $NODE $WORD $DIR"])
    spec = shown["spec"]
    spec["volumes"] = [
        {"name": "words", "configMap": {"name": "words"}},
        {"name": "ckpt", "persistentVolumeClaim": {"claimName": "mine"}},
    ]
    spec["containers"][0]["volumeMounts"] = [
        {"name": name, "mountPath": f"/{name}"} for name in ("words", "ckpt")
    ]
    spec["containers"][0]["env"] = [
        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "WORD", "valueFrom": {"configMapKeyRef": {"name": "words", "key": "word"}}},
        {"name": "DIR", "value": "/ckpt/run"},
    ]
    client.create(Pod.from_dict(shown))
    assert ended(client, "it").exitCode == 0
    claim = memory.folder / "claims/default/mine"
    node = client.get(Pod, "it").spec.nodeName
    assert "".join(client.log("it")) == f"hello{node} hello {claim}/run\n"
    assert (claim / "saved").exists()


def test_lists_come_in_pages(memory: MemoryCluster, client: Client) -> None:
    for number in range(5):
        create_pod(client, f"pod-{number}", node="nowhere")
    names = [thing.metadata.name for thing in client.list(Pod, chunk_size=2)]
    assert names == [f"pod-{number}" for number in range(5)]
    assert memory.front.requests["get", "pods"] == 3
    _, listed = memory.ask("GET", "/api/v1/namespaces/default/pods?limit=2")
    create_pod(client, "pod-5", node="nowhere")
    memory.registry.store.forget_changes()
    path = f"/api/v1/namespaces/default/pods?limit=2&continue={listed['metadata']['continue']}"
    assert memory.ask("GET", path)[0] == 410, json.dumps(listed["metadata"])
