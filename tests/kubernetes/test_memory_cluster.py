"""What the cluster in memory does besides being a cluster: failures on purpose, volumes."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx2
import pytest
from lightkube import Client
from lightkube.resources.core_v1 import Node, Pod

from .cluster import Definition, until
from .memory.cluster import MemoryCluster
from .memory.failures import CUT, DROP, LOSE, Failure
from .objects import SAMPLES, Sample, pod, sample
from .steps import LISTENS, create_pod, ended, gone, phase, printed, refused


@pytest.fixture
def client(memory: MemoryCluster) -> Iterator[Client]:
    with memory.client() as client:
        yield client


def test_a_kubelet_under_pressure_fails_a_pod(memory: MemoryCluster, client: Client) -> None:
    create_pod(client, "it", LISTENS)
    printed(client, "it", "ready")
    memory.fail_pod("default", "it", "Evicted", "The node was low on resource: memory.")
    until(lambda: phase(client, "it") == "Failed", "it has failed")
    assert client.get(Pod, "it").status.reason == "Evicted"


def test_failures_on_purpose(memory: MemoryCluster, client: Client) -> None:
    memory.failures.add(Failure(429, methods="GET"))
    with refused(429, "TooManyRequests"):
        client.get(Node, "n1")
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
        client.get(Node, "n1")
    assert memory.failures.happened == 5
    assert client.get(Node, "n1").metadata.name == "n1"


def test_volumes_and_references(memory: MemoryCluster, client: Client) -> None:
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


def test_custom_resources_go_with_their_declaration(memory: MemoryCluster, client: Client) -> None:
    memory.declare(SAMPLES)
    client.create(Sample(**sample("a")))
    client.delete(Definition, SAMPLES["metadata"]["name"])
    with pytest.raises(httpx2.HTTPStatusError, match="404"):
        client.get(Sample, "a")
    memory.declare(SAMPLES)
    until(lambda: gone(client, "a", Sample), "it is not there any more")
