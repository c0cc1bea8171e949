"""The state of a replica from its pod: waiting, running, or ended.

When the kubelet has confirmed that all containers of a deleted pod have ended, its grace period
becomes 0 and it would disappear, with its exit status. Our finalizer keeps it readable until then.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from lightkube.utils.quantity import parse_quantity

from pipollux_protocol.exit_statuses import KILLED
from pipollux_sched.backend.base import Ended, ReplicaKey, ReplicaState
from pipollux_sched.backend.result import ReplicaResult, ScriptError

from .api import Object
from .names import FINALIZER, HOST_NAME_LABEL, key_of
from .node_state import ClusterNode

__all__ = ["PodView", "replica_state", "view_pod"]

KILL_GRACE = 1
"""Grace period of a killed pod: with 0, its end would not be confirmed."""
MAIN_CONTAINER = "replica"
"""Name of the replica's container in a template; without it, the first container."""
_CANNOT_START = frozenset(("ContainerCannotRun", "StartError", "RunContainerError"))
_TEXT_LIMIT = 500


class PodView(NamedTuple):
    """The relevant fields of one of our pods."""

    key: ReplicaKey
    name: str
    node: str
    """Empty: not bound yet."""
    wanted_node: str
    phase: str
    reason: str
    message: str
    main: str
    container: Mapping[str, Any]
    conditions: Mapping[str, Mapping[str, Any]]
    deletion_grace: int | None
    """Seconds that it has to end, 0 once it has; None: it was not deleted."""
    finalizers: tuple[str, ...]
    requests: Mapping[str, Any]

    def slots(self, device: str) -> int:
        """Return its amount of a resource."""
        return _whole(str(self.requests.get(device, "0")))

    @property
    def is_running(self) -> bool:
        """Whether its main container runs."""
        return "running" in self.container

    @property
    def terminated(self) -> Mapping[str, Any] | None:
        """The terminated state of the main container; None before its end."""
        found: Mapping[str, Any] | None = self.container.get("terminated")
        return found


@lru_cache
def _whole(quantity: str) -> int:
    return int(parse_quantity(quantity) or 0)


def view_pod(pod: Object) -> PodView | None:
    """Return the relevant fields of a pod; None if its labels identify no replica."""
    metadata, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    key = key_of(metadata.get("labels") or {})
    if key is None:
        return None
    main = main_container(spec.get("containers") or [{}])
    deleted = metadata.get("deletionTimestamp") is not None
    return PodView(
        key,
        metadata["name"],
        spec.get("nodeName") or "",
        (spec.get("nodeSelector") or {}).get(HOST_NAME_LABEL, ""),
        status.get("phase") or "Pending",
        status.get("reason") or "",
        status.get("message") or "",
        main.get("name") or "",
        next(
            (
                entry.get("state") or {}
                for entry in status.get("containerStatuses") or ()
                if entry.get("name") == main.get("name")
            ),
            {},
        ),
        {entry["type"]: entry for entry in status.get("conditions") or ()},
        int(metadata.get("deletionGracePeriodSeconds") or 0) if deleted else None,
        tuple(metadata.get("finalizers") or ()),
        (main.get("resources") or {}).get("requests") or {},
    )


def main_container(containers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the container of the replica."""
    named = [entry for entry in containers if entry.get("name") == MAIN_CONTAINER]
    return (named or containers)[0]


def replica_state(
    pod: PodView, node: ClusterNode | None, *, gone: bool, ordered: bool
) -> ReplicaState:
    """Return a replica's state, from its pod and the node that this is bound to, if known.

    `gone`: the node has left the cluster; `ordered`: this scheduler has signalled the replica.
    """
    ended = _ended(pod, node, gone=gone, ordered=ordered)
    waiting = "" if ended or pod.is_running else _waiting(pod)
    return ReplicaState(f"pod/{pod.name}", waiting, ended)


def _waiting(pod: PodView) -> str:
    bound = pod.conditions.get("PodScheduled", {})
    state = pod.container.get("waiting") or {}
    if not pod.node:
        said = bound.get("message") or "the cluster's scheduler has not placed it yet"
        return f"Pod {pod.name} is not bound to {pod.wanted_node}: {said}"
    said = ": ".join(text for text in (state.get("reason"), state.get("message")) if text)
    return f"Pod {pod.name} is being created on {pod.node}" + (f": {said}" if said else "")


def _ended(pod: PodView, node: ClusterNode | None, *, gone: bool, ordered: bool) -> Ended | None:
    terminated = pod.terminated
    if terminated is not None:
        return _exit(pod, terminated, ordered)
    if pod.phase in ("Failed", "Succeeded"):  # before its container ran, or the kubelet forgot it
        return Ended(None, lost=_said(pod) or f"Pod {pod.name} has ended without an exit status.")
    if pod.deletion_grace == 0:
        return Ended(None, lost=_deleted(pod, ordered))
    if gone:
        return Ended(None, lost=f"Node {pod.node} is no longer part of the cluster.")
    if node is not None and not node.ready and pod.deletion_grace is not None:
        return Ended(None, lost=f"Node {pod.node} does not answer: {node.reason}")
    return None


def _exit(pod: PodView, terminated: Mapping[str, Any], ordered: bool) -> Ended:
    """Return the end of a container that has an exit status."""
    code = int(terminated.get("exitCode", 0))
    message, reason = str(terminated.get("message") or ""), str(terminated.get("reason") or "")
    result = ReplicaResult.parse(message)
    status = -9 if code == KILLED else code
    if result.error is None and (why := _runtime_error(reason, message)):
        result = result._replace(error=why)
    lost = ""
    if code != 0:
        lost = _said(pod)
        if not lost and pod.deletion_grace is not None and not ordered:
            lost = _deleted(pod, ordered)
    return Ended(status, result, lost)


def _runtime_error(reason: str, message: str) -> ScriptError | None:
    """Return an error of the container runtime, for scripts that could not report one."""
    if reason == "OOMKilled":
        return ScriptError("The container used more memory than its limit (OOMKilled).", False)
    if reason in _CANNOT_START:
        return ScriptError(f"The container cannot be started: {_one_line(message)}", True)
    return None


def _said(pod: PodView) -> str:
    """Return why the cluster ended a pod: evicted, preempted, rejected by its kubelet."""
    disruption = pod.conditions.get("DisruptionTarget", {})
    if disruption.get("status") == "True":
        text = disruption.get("message") or disruption.get("reason") or "disrupted"
        return f"Pod {pod.name} was ended by the cluster: {_one_line(str(text))}"
    if pod.reason:
        said = f": {_one_line(pod.message)}" if pod.message else "."
        return f"Pod {pod.name} was ended by the cluster ({pod.reason}){said}"
    return ""


def _deleted(pod: PodView, ordered: bool) -> str:
    if ordered:
        return f"Pod {pod.name} was ended before it had an exit status."
    return f"Pod {pod.name} was deleted, and not by its scheduler."


def _one_line(text: str) -> str:
    return " ".join(text.split())[:_TEXT_LIMIT]


def without_finalizer(pod: PodView) -> list[str]:
    """Return a pod's finalizers except ours."""
    return [name for name in pod.finalizers if name != FINALIZER]
