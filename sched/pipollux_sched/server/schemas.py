"""Response models besides the views: refusals, health, addresses of replicas."""

from __future__ import annotations

from typing import Any, Literal

from pipollux_sched.views.models import View


class Refusal(View):
    """The reason why a request was refused, in one sentence."""

    detail: str


_REFUSALS = {
    401: "The token is missing or wrong.",
    404: "There is nothing of this name.",
    409: "It does not fit the job's present state: another generation, or a name that is taken.",
    413: "The body is larger than 1 MiB.",
    422: "The request makes no sense; the sentence names the field and what is allowed.",
    429: "Too many requests; Retry-After says when to ask again.",
    503: "The scheduler is being stopped, or as many wait already as can.",
}


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the documented refusals: those common to authorized requests, and the given ones."""
    return {
        status: {"model": Refusal, "description": _REFUSALS[status]}
        for status in sorted((401, 422, 429, 503, *statuses))
    }


def text_reply(media_type: str) -> dict[int | str, dict[str, Any]]:
    """Return the documentation of a plain-text response of a content type."""
    return {200: {"content": {media_type: {"schema": {"type": "string"}}}}}


class Health(View):
    """The scheduler is running; its version."""

    status: Literal["ok"]
    version: str


class Deciding(View):
    """The allocator is running."""

    status: Literal["deciding"]


class ReplicaPlace(View):
    """The address of one replica."""

    replica: int
    address: str


class DiscoveryReply(View):
    """The registered replicas of a generation, in order."""

    generation: int
    num_replicas: int
    complete: bool
    replicas: list[ReplicaPlace]
