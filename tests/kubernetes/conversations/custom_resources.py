"""Conversations about custom resources, and about what they own."""

from __future__ import annotations

from typing import Any

from tests.kubernetes.objects import GROUP, SAMPLES, sample

from .conversation import ANOTHER, APPLY, MERGE, STRATEGIC, Conversation, loose


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
