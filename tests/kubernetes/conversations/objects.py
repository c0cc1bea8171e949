"""Conversations about what else the scheduler reads and keeps in a cluster."""

from __future__ import annotations

from .conversation import ANOTHER, APPLY, MERGE, STRATEGIC, Conversation


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
