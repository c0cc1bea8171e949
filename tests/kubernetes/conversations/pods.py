"""Conversations about pods: what may be created, changed and deleted, and what becomes of them."""

from __future__ import annotations

from typing import Any

from tests.kubernetes.objects import pod

from .conversation import ANOTHER, JSON, MERGE, STRATEGIC, Conversation, loose

NODE = "recorded-node"
"""The node of these conversations."""


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


def _with(thing: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    return {**thing, "metadata": {**thing["metadata"], **metadata}}


def _named(name: str) -> dict[str, Any]:
    return {"metadata": {"name": name}}
