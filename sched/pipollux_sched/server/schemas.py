"""What is answered besides the views: refusals, signs of life, where replicas are."""

from __future__ import annotations

from typing import Any, Literal

from pipollux_sched.views.models import View


class Refusal(View):
    """Why a request was refused, in one sentence."""

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
    """Describe when requests are refused: those that bear a token always may be, and as named."""
    return {
        status: {"model": Refusal, "description": _REFUSALS[status]}
        for status in sorted((401, 422, 429, 503, *statuses))
    }


def text_reply(media_type: str) -> dict[int | str, dict[str, Any]]:
    """Describe an answer that is text of a type, and no JSON."""
    return {200: {"content": {media_type: {"schema": {"type": "string"}}}}}


class Health(View):
    """The scheduler is there, and of this version."""

    status: Literal["ok"]
    version: str


class Deciding(View):
    """A decision is being made."""

    status: Literal["deciding"]


class ReplicaPlace(View):
    """One replica that has said where it is."""

    replica: int
    address: str


class DiscoveryReply(View):
    """The replicas of a generation that have said where they are, in order."""

    generation: int
    num_replicas: int
    complete: bool
    replicas: list[ReplicaPlace]
