"""A conversation about watches."""

from __future__ import annotations

from .conversation import MERGE, Conversation, loose


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
