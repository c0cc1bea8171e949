"""Requests to an API server, and what of its answers is the same each time."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.kubernetes.cluster import Cluster, until
from tests.kubernetes.objects import GROUP, VERSION, pod

from .normal import normal

MERGE, JSON = "application/merge-patch+json", "application/json-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
APPLY = "application/apply-patch+yaml"
ANOTHER = "0f0e0d0c-0b0a-0908-0706-050403020100"
"""The uid of no object."""


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


def loose(name: str, **more: Any) -> dict[str, Any]:
    """Return a pod that no scheduler puts anywhere."""
    return pod(name, schedulerName="nobody", **more)
