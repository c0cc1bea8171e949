"""Conversations with an API server: requests, and what of the answers is the same each time.

The answers of a real one are in `recorded/`, and the one in memory must give the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from .cluster import Cluster, until
from .objects import GROUP, SAMPLES, VERSION, pod, sample

MERGE, JSON = "application/merge-patch+json", "application/json-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
APPLY = "application/apply-patch+yaml"
ANOTHER = "0f0e0d0c-0b0a-0908-0706-050403020100"
NODE = "recorded-node"
# What differs from run to run, and what stands for it.
_PATTERNS = (
    (r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "<uid>"),
    (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", "<time>"),
    (r"too old resource version: \d+ \(\d+\)", "too old resource version: <n> (<n>)"),
    (r"^made-[a-z0-9]{5}$", "made-<suffix>"),
    # What of a pod's spec was to change is shown as Go shows it.
    (r"\n\s*core\.PodSpec\{[\s\S]*", ""),
    (r"^(10|127)(\.\d+){3}$", "<address>"),
    (r"^n[0-9]$", "<node>"),
    # The runtime's words for a program that is not there.
    (r"^.*no-such-program.*$", "<no such program>"),
)
_REPLACED = {
    "resourceVersion": "<version>",
    "continue": "<token>",
    "containerID": "<container>",
    "imageID": "<image>",
}
# The last one comes from a controller, at some time.
_LEFT_OUT = ("managedFields", "selfLink", "node.alpha.kubernetes.io/ttl")


class Conversation:
    """Requests to one cluster, and their answers under the names of the steps.

    Args:
        cluster: whom to ask.
        namespace: in which the conversation is held.
    """

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace
        self.answers: dict[str, Any] = {}
        self.core = f"/api/v1/namespaces/{namespace}"
        self.samples = f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/samples"
        self.leases = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"

    def ask(
        self,
        step: str | None,
        method: str,
        path: str,
        body: Any = None,
        content_type: str = "application/json",
    ) -> Any:
        """Ask, keep the answer under the name of the step, and return its body."""
        code, answer = self.cluster.ask(method, path, body, content_type)
        if step is not None:
            assert step not in self.answers, f"two steps are called {step!r}"
            self.answers[step] = {"status": code, "body": normal(answer)}
        return answer

    def wait(self, path: str, condition: Callable[[Any], object]) -> Any:
        """Return what is at a path once a condition holds for it."""
        return until(
            lambda: (lambda found: condition(found) and found)(self.cluster.ask("GET", path)[1]),
            f"{path} is as wanted",
        )

    def watch(self, step: str, path: str, version: str, count: int) -> None:
        """Watch from a version on, and keep the first events under the name of the step."""
        events = []
        with self.cluster.client() as client:
            sign = "&" if "?" in path else "?"
            url = f"{path}{sign}watch=true&timeoutSeconds=60&resourceVersion={version}"
            with client._client._client.stream("GET", url) as stream:
                for line in stream.iter_lines():
                    events.append(json.loads(line))
                    if len(events) == count:
                        break
        self.answers[step] = {"status": stream.status_code, "events": normal(events)}


def normal(value: Any) -> Any:
    """Return what of an answer is the same each time."""
    if isinstance(value, dict):
        found = {
            key: (inner and _REPLACED.get(key)) or normal(inner)
            for key, inner in value.items()
            if key not in _LEFT_OUT
        }
        causes = found.get("details", {}).get("causes", []) if "details" in found else []
        if len(causes) > 1:  # their order is anyone's
            causes.sort(key=lambda cause: str(cause["field"]))
            found["message"] = found["message"].split(": [")[0]
        if isinstance(conditions := found.get("conditions"), list):  # in any order, too
            conditions.sort(key=lambda condition: str(condition.get("type")))
        return {k: v for k, v in found.items() if k != "annotations" or v}
    if isinstance(value, list):
        return [normal(inner) for inner in value]
    if isinstance(value, str):
        for pattern, placeholder in _PATTERNS:
            value = re.sub(pattern, placeholder, value)
    return value


def loose(name: str, **more: Any) -> dict[str, Any]:
    """Return a pod that no scheduler puts anywhere."""
    return pod(name, schedulerName="nobody", **more)


def about_pods(talk: Conversation) -> None:
    """Pods: what may be created, changed and deleted."""
    pods, ask = f"{talk.core}/pods", talk.ask
    made = ask("create", "POST", pods, loose("a", gpus=1, labels={"job": "x", "rank": "0"}))
    ask("create again", "POST", pods, loose("a"))
    ask("create elsewhere", "POST", "/api/v1/namespaces/nowhere/pods", loose("a"))
    ask("another namespace in the body", "POST", pods, _with(loose("b"), namespace="default"))
    ask("a name that is none", "POST", pods, loose("Not_A_Name"))
    ask("a label that is none", "POST", pods, loose("b", labels={"job": "not a label"}))
    ask("no containers", "POST", pods, loose("b", containers=[]))
    ask("no such restart policy", "POST", pods, loose("b", restartPolicy="Sometimes"))
    ask("another kind", "POST", pods, {**loose("b"), "kind": "Node"})
    ask("another version", "POST", pods, {**loose("b"), "apiVersion": "v2"})
    ask("a dry run", "POST", f"{pods}?dryRun=All", loose("dry"))
    generated = loose("made")
    generated["metadata"] = {"generateName": "made-"}
    ask("a generated name", "POST", pods, generated)
    ask("get", "GET", f"{pods}/a")
    ask("get what is not there", "GET", f"{pods}/none")
    ask("delete what is not there", "DELETE", f"{pods}/none")
    ask("a kind that is not there", "GET", f"{talk.core}/pads")
    ask("a group that is not there", "GET", "/apis/nothing.example/v1/things")
    ask("post to a name", "POST", f"{pods}/a", loose("a"))
    ask("create b", "POST", pods, loose("b", labels={"job": "y"}))
    for selector in ("job=x", "job!=x", "job in (x,y)", "job", "!job", "rank notin (0)"):
        found = talk.cluster.ask("GET", f"{pods}?labelSelector={selector}")[1]
        names = [x["metadata"]["name"] for x in found["items"] if "labels" in x["metadata"]]
        talk.answers[f"which have {selector}"] = names
    ask("list", "GET", f"{pods}?labelSelector=job=x")
    ask("a field selector", "GET", f"{pods}?fieldSelector=metadata.name=none")
    ask("a field selector that is none", "GET", f"{pods}?fieldSelector=spec.nothing=a")
    listed = ask("a page", "GET", f"{pods}?limit=1&labelSelector=job")
    token = listed["metadata"]["continue"]
    ask("the next page", "GET", f"{pods}?limit=1&labelSelector=job&continue={token}")
    _change_pod(talk, made)
    _delete_pods(talk)


def _change_pod(talk: Conversation, made: Any) -> None:
    path, ask = f"{talk.core}/pods/a", talk.ask
    ask("merge", "PATCH", path, {"metadata": {"labels": {"rank": "1", "job": None}}}, MERGE)
    ask("strategic", "PATCH", path, {"metadata": {"annotations": {"a": "b"}}}, STRATEGIC)
    add = {"op": "add", "path": "/metadata/annotations/c~1d", "value": "e"}
    ask("json", "PATCH", path, [add], JSON)
    ask("json that finds nothing", "PATCH", path, [{"op": "remove", "path": "/spec/none"}], JSON)
    ask("no such patch", "PATCH", path, {}, "application/json")
    node = {"spec": {"nodeSelector": {"kubernetes.io/hostname": "b"}}}
    ask("what may not change", "PATCH", path, node, MERGE)
    ask("the name", "PATCH", path, {"metadata": {"name": "b"}}, MERGE)
    ask("an old version", "PUT", path, made)
    ask("put under another name", "PUT", f"{path}b", made)
    status = {"status": {"phase": "Running", "message": "hello"}}
    ask("the status by the object", "PATCH", path, status, MERGE)
    ask("the status", "PATCH", f"{path}/status", status, MERGE)


def _delete_pods(talk: Conversation) -> None:
    pods, ask = f"{talk.core}/pods", talk.ask
    wrong = {"preconditions": {"uid": ANOTHER}}
    ask("delete another", "DELETE", f"{pods}/b", wrong)
    ask("delete", "DELETE", f"{pods}/b")
    ask("deleted", "GET", f"{pods}/b")
    for name in ("bound", "evicted", "ended"):
        ask(f"create {name}", "POST", pods, loose(name))
        target = {"target": {"kind": "Node", "name": NODE}, "metadata": {"name": name}}
        ask(f"bind {name}", "POST", f"{pods}/{name}/binding", target)
    ask("bind again", "POST", f"{pods}/bound/binding", target | {"metadata": {"name": "bound"}})
    ask("the bound pod", "GET", f"{pods}/bound")
    ask("delete with grace", "DELETE", f"{pods}/bound?gracePeriodSeconds=20")
    ask("delete with more", "DELETE", f"{pods}/bound?gracePeriodSeconds=25")
    ask("delete with less", "DELETE", f"{pods}/bound?gracePeriodSeconds=10")
    ask("delete at once", "DELETE", f"{pods}/bound?gracePeriodSeconds=0")
    eviction = {"apiVersion": "policy/v1beta1", "kind": "Eviction"}
    ask("evict", "POST", f"{pods}/evicted/eviction", eviction | _named("evicted"))
    ask("the evicted pod", "GET", f"{pods}/evicted")
    ask("evict what is not there", "POST", f"{pods}/none/eviction", eviction | _named("none"))
    ask(None, "PATCH", f"{pods}/ended/status", {"status": {"phase": "Succeeded"}}, MERGE)
    ask("delete what has ended", "DELETE", f"{pods}/ended")
    ask("the log of nobody", "GET", f"{pods}/none/log")
    ask(None, "DELETE", f"{pods}/evicted?gracePeriodSeconds=0")
    ask("delete many", "DELETE", f"{pods}?labelSelector=job=nothing")


def about_placement(talk: Conversation) -> None:
    """The scheduler: who gets onto a node, and what the others are told."""
    pods = f"{talk.core}/pods"

    def place(name: str, condition: str = "True", **more: Any) -> None:
        talk.ask(None, "POST", pods, pod(name, **more))
        talk.wait(
            f"{pods}/{name}",
            lambda found: [
                c for c in found["status"].get("conditions", []) if c["status"] == condition
            ],
        )
        talk.ask(name, "GET", f"{pods}/{name}")

    place("fits", gpus=3, node=NODE)
    place("too-many", "False", gpus=2, node=NODE)
    place("no-such-node", "False", node="nowhere")
    talk.ask(None, "PATCH", f"/api/v1/nodes/{NODE}", {"spec": {"unschedulable": True}}, MERGE)
    place("cordoned", "False", node=NODE)
    talk.ask(None, "PATCH", f"/api/v1/nodes/{NODE}", {"spec": {"unschedulable": None}}, MERGE)
    for name in ("fits", "too-many", "no-such-node", "cordoned"):
        talk.ask(None, "DELETE", f"{pods}/{name}?gracePeriodSeconds=0")


def about_nodes(talk: Conversation) -> None:
    """Nodes: their status apart from the rest."""
    nodes, ask = "/api/v1/nodes", talk.ask
    ask("create", "POST", nodes, {"metadata": {"name": "spare", "labels": {"a": "b"}}})
    capacity = {"status": {"capacity": {"nvidia.com/gpu": "2", "cpu": "4"}}}
    ask("status", "PATCH", f"{nodes}/spare/status", capacity, MERGE)
    ask("cordon", "PATCH", f"{nodes}/spare", {"spec": {"unschedulable": True}}, STRATEGIC)
    taint = {"spec": {"taints": [{"key": "a", "effect": "NoSchedule"}]}}
    ask("taint", "PATCH", f"{nodes}/spare", taint, STRATEGIC)
    ask("delete", "DELETE", f"{nodes}/spare")


def about_leases(talk: Conversation) -> None:
    """Leases, services, events, ConfigMaps: what the scheduler keeps in a cluster."""
    ask = talk.ask
    lease = {"metadata": {"name": "it"}, "spec": {"holderIdentity": "me"}}
    made = ask("create", "POST", talk.leases, lease)
    ask("without a version", "PUT", f"{talk.leases}/it", lease)
    made["spec"]["holderIdentity"] = "them"
    ask("put", "PUT", f"{talk.leases}/it", made)
    ask("put again", "PUT", f"{talk.leases}/it", made)
    wrong = {"preconditions": {"uid": ANOTHER}}
    ask("delete another", "DELETE", f"{talk.leases}/it", wrong)
    ask("delete", "DELETE", f"{talk.leases}/it")
    service = {"metadata": {"name": "it"}, "spec": {"clusterIP": "None", "selector": {"a": "b"},
               "ports": [{"name": "rendezvous", "port": 29500}]}}  # fmt: skip
    ask("headless service", "POST", f"{talk.core}/services", service)
    ask("delete service", "DELETE", f"{talk.core}/services/it")
    event = {
        "metadata": {"name": "it"},
        "involvedObject": {"kind": "Pod", "name": "a", "namespace": talk.namespace},
        "reason": "Started",
        "message": "hello",
        "type": "Normal",
    }
    ask("event", "POST", f"{talk.core}/events", event)
    ask("event again", "PATCH", f"{talk.core}/events/it", {"count": 2}, MERGE)
    ask("events", "GET", f"{talk.core}/events?fieldSelector=involvedObject.name=a")
    settings = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "it"}}
    path = f"{talk.core}/configmaps"
    ask("ConfigMap", "POST", path, settings | {"data": {"a": "1", "b": "2"}})
    ask("ConfigMap by apply", "PATCH", f"{path}/new?fieldManager=me", settings
        | {"metadata": {"name": "new"}, "data": {"a": "1", "b": "2"}}, APPLY)  # fmt: skip
    ask("apply less", "PATCH", f"{path}/new?fieldManager=me", settings
        | {"metadata": {"name": "new"}, "data": {"a": "1"}}, APPLY)  # fmt: skip
    ask("apply without a manager", "PATCH", f"{path}/new", settings, APPLY)


def about_custom_resources(talk: Conversation) -> None:
    """Custom resources: defaults, rules, status, apply."""
    ask, samples = talk.ask, talk.samples
    talk.cluster.declare(SAMPLES)
    made = ask("create", "POST", samples, sample("a", max=3))
    ask("create again", "POST", samples, sample("a"))
    ask("min above max", "POST", samples, sample("b", min=4, max=3))
    ask("too few", "POST", samples, sample("b", stages=0))
    ask("too many", "POST", samples, sample("b", stages=65))
    ask("no number", "POST", samples, sample("b", stages="two"))
    ask("no such policy", "POST", samples, sample("b", policy="hide"))
    ask("no such script", "POST", samples, sample("b", script="UPPER"))
    ask("a long script", "POST", samples, sample("b", script="a" * 50))
    ask("a number among words", "POST", samples, sample("b", args=["a", 1]))
    ask("several at once", "POST", samples, sample("b", stages=0, policy="hide"))
    ask("nothing", "POST", samples, {**sample("b"), "spec": {}})
    ask("no spec", "POST", samples, {k: v for k, v in sample("b").items() if k != "spec"})
    ask("no kind", "POST", samples, {k: v for k, v in sample("b").items() if k != "kind"})
    ask("another kind", "POST", samples, {**sample("b"), "kind": "Simple"})
    ask("unknown fields", "POST", samples, sample("b", nothing=1))
    ask("unknown fields, strictly", "POST", f"{samples}?fieldValidation=Strict",
        sample("c", nothing=1))  # fmt: skip
    ask("a name that is none", "POST", samples, sample("Not_A_Name"))
    ask("get", "GET", f"{samples}/a")
    ask("get what is not there", "GET", f"{samples}/none")
    ask("list", "GET", samples)
    ask("suspend", "PATCH", f"{samples}/a", {"spec": {"suspend": True}}, MERGE)
    ask("break a rule", "PATCH", f"{samples}/a", {"spec": {"min": 9}}, MERGE)
    ask("strategic", "PATCH", f"{samples}/a", {"spec": {"suspend": True}}, STRATEGIC)
    ask("the status by the object", "PATCH", f"{samples}/a", {"status": {"phase": "x"}}, MERGE)
    conditions = [{"type": "Running", "status": "True"}]
    status = {"status": {"phase": "Running", "conditions": conditions}}
    ask("the status", "PATCH", f"{samples}/a/status", status, MERGE)
    ask("the spec by the status", "PATCH", f"{samples}/a/status", {"spec": {"max": 9}}, MERGE)
    ask("an old version", "PUT", f"{samples}/a", made)
    ask("without a version", "PUT", f"{samples}/a", sample("a", max=5))
    ask("a script", "PATCH", f"{samples}/a", {"spec": {"script": "a.b"}}, MERGE)
    ask("another script", "PATCH", f"{samples}/a", {"spec": {"script": "c.d"}}, MERGE)
    ask("label", "PATCH", f"{samples}/a", {"metadata": {"labels": {"a": "b"}}}, MERGE)
    ask("delete another", "DELETE", f"{samples}/a", {"preconditions": {"uid": ANOTHER}})
    ask("a finalizer", "PATCH", f"{samples}/a", {"metadata": {"finalizers": [f"{GROUP}/it"]}},
        MERGE)  # fmt: skip
    ask("delete with a finalizer", "DELETE", f"{samples}/a")
    ask("delete again", "DELETE", f"{samples}/a")
    ask("the last finalizer", "PATCH", f"{samples}/a", {"metadata": {"finalizers": None}}, MERGE)
    ask("gone", "GET", f"{samples}/a")
    ask("delete", "DELETE", f"{samples}/b")
    _apply(talk)


def _apply(talk: Conversation) -> None:
    def apply(step: str, manager: str, more: str = "", **spec: Any) -> None:
        path = f"{talk.samples}/applied?fieldManager={manager}{more}"
        talk.ask(step, "PATCH", path, sample("applied", **spec), APPLY)

    apply("apply", "one", max=4)
    apply("apply the same", "one", max=4)
    apply("another's conflict", "two", max=5)
    apply("by force", "two", "&force=true", max=5)
    apply("the first leaves it", "one")
    apply("nobody wants it", "two")
    talk.ask("delete many", "DELETE", talk.samples)


def about_watches(talk: Conversation) -> None:
    """Watches: what they show, and when it is too late."""
    pods = f"{talk.core}/pods"
    path = f"{pods}?labelSelector=job=x"
    first = talk.ask(None, "GET", pods)["metadata"]["resourceVersion"]
    talk.ask(None, "POST", pods, loose("a", labels={"job": "x"}))
    talk.ask(None, "POST", pods, loose("b", labels={"job": "y"}))
    talk.ask(None, "PATCH", f"{pods}/a", {"metadata": {"labels": {"job": "y"}}}, MERGE)
    talk.ask(None, "PATCH", f"{pods}/a", {"metadata": {"labels": {"job": "x"}}}, MERGE)
    talk.ask(None, "DELETE", f"{pods}/a")
    talk.watch("by label", path, first, 5)
    talk.watch("all", pods, first, 6)
    talk.watch("what is there", path.replace("=x", "=y"), "0", 1)
    talk.ask("a version that is none", "GET", f"{pods}?watch=true&resourceVersion=x")
    talk.cluster.expire_watches()
    talk.watch("too late", pods, first, 1)
    talk.ask(None, "DELETE", f"{pods}/b")


def about_owners(talk: Conversation) -> None:
    """Owners: what goes with them."""
    talk.cluster.declare(SAMPLES)
    pods = f"{talk.core}/pods"
    for policy in ("Background", "Foreground", "Orphan"):
        name = policy.lower()
        owner = talk.ask(None, "POST", talk.samples, sample(name))
        owned = loose(name)
        owned["metadata"]["ownerReferences"] = [
            {
                "apiVersion": owner["apiVersion"],
                "kind": owner["kind"],
                "name": name,
                "uid": owner["metadata"]["uid"],
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ]
        talk.ask(f"{name}: create", "POST", pods, owned)
        # Who is deleted before the collector knows the dependents has none.
        talk.ask(f"{name}: delete", "DELETE", f"{talk.samples}/{name}?propagationPolicy={policy}")
        talk.wait(f"{talk.samples}/{name}", lambda found: found["kind"] == "Status")
        if policy != "Orphan":
            talk.wait(f"{pods}/{name}", lambda found: found["kind"] == "Status")
        talk.ask(f"{name}: the pod", "GET", f"{pods}/{name}")
    talk.ask(None, "DELETE", f"{pods}/orphan")


def about_containers(talk: Conversation) -> None:
    """Containers: what a pod's status tells of them, as the kubelet writes it."""
    pods = f"{talk.core}/pods"

    def run(name: str, command: list[str], **more: Any) -> None:
        talk.ask(None, "POST", pods, pod(name, command, **more))

    run("good", ["sh", "-c", "echo hello"])
    run("bad", ["sh", "-c", "exit 3"])
    run("nothing", ["no-such-program"])
    for name in ("good", "bad", "nothing"):
        talk.wait(f"{pods}/{name}", lambda x: x["status"]["phase"] in ("Succeeded", "Failed"))
        talk.ask(name, "GET", f"{pods}/{name}")
    talk.ask("the log", "GET", f"{pods}/good/log")
    talk.ask("the log of no container", "GET", f"{pods}/good/log?container=other")
    run("running", ["sleep", "600"], grace=1, gpus=1)
    talk.wait(f"{pods}/running", lambda x: x["status"]["phase"] == "Running")
    talk.ask("running", "GET", f"{pods}/running")


CONVERSATIONS: Mapping[str, Callable[[Conversation], None]] = {
    "pods": about_pods,
    "placement": about_placement,
    "nodes": about_nodes,
    "leases": about_leases,
    "custom-resources": about_custom_resources,
    "watches": about_watches,
    "owners": about_owners,
}
WITH_KUBELETS: Mapping[str, Callable[[Conversation], None]] = {"containers": about_containers}
"""These take a cluster with kubelets."""


def hold(cluster: Cluster, name: str) -> Mapping[str, Any]:
    """Hold a conversation with a cluster, and return the answers."""
    namespace = f"recorded-{name}"
    cluster.create_namespace(namespace)
    talk = Conversation(cluster, namespace)
    if name in WITH_KUBELETS:
        WITH_KUBELETS[name](talk)
    else:
        cluster.add_node(NODE)
        CONVERSATIONS[name](talk)
        cluster.delete_node(NODE)
    cluster.delete_namespace(namespace)
    return talk.answers


def _with(thing: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    return {**thing, "metadata": {**thing["metadata"], **metadata}}


def _named(name: str) -> dict[str, Any]:
    return {"metadata": {"name": name}}
