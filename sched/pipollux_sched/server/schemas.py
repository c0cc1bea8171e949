"""Response models besides the views: refusals, health, discovery of replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, Literal

from pydantic import ValidationError

from pipollux_perfmodel.hints.step_rows import InheritedRows, StepRows
from pipollux_protocol.messages import (
    HeartbeatAnswer,
    InheritanceAnswer,
    JobAnnouncement,
    MembershipProposal,
)
from pipollux_sched.controller.resize_board import ReplicaAnswer
from pipollux_sched.lifecycle import JobState
from pipollux_sched.store import Predecessor
from pipollux_sched.views.models import View


class Refusal(View):
    """The reason why a request was refused, in one sentence."""

    detail: str


REFUSALS = {
    401: "The token is missing or wrong.",
    403: "The role of the token does not allow the request, or the job has another owner.",
    404: "No job, node or path has this name.",
    409: "The state of the job does not allow the request: another attempt is the current one, "
    "the job has ended or has not ended, the name is taken, or its team has reached "
    "`max_submit_jobs`.",
    413: "The body is larger than 1 MiB.",
    422: "A field, parameter or header is invalid; the sentence names it and what is allowed.",
    429: "Too many requests; retry after the seconds in `Retry-After`.",
    503: "The scheduler is stopping, overloaded or out of disk space; retry after the seconds in "
    "`Retry-After`.",
}


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the documented refusals: those common to authorized requests, and the given ones."""
    return {
        status: {"model": Refusal, "description": REFUSALS[status]}
        for status in sorted((401, 403, 422, 429, 503, *statuses))
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


def inheritance_answer(relatives: Sequence[Predecessor]) -> InheritanceAnswer:
    """Return the measurements of relatives; rows of another version are left out."""
    found = {}
    for one in relatives:
        with suppress(ValidationError):
            found[one.job] = StepRows.model_validate(one.hints.get("stepProfile"))
    before = relatives[0].job if relatives else None
    rows = InheritedRows.of([*found.values()])
    told = tuple(job for job, theirs in found.items() if rows and theirs.traits == rows.traits)
    profile = None if rows is None else rows.model_dump(mode="json", by_alias=True)
    return InheritanceAnswer(predecessor=before, relatives=told, step_profile=profile)


def heartbeat_answer(
    state: JobState,
    answer: ReplicaAnswer,
    level_of: Callable[[tuple[str, ...]], int | None] = lambda _nodes: None,
) -> HeartbeatAnswer:
    """Return the answer to a replica of a job; `level_of` has the network level of nodes."""
    membership, change, place = state.membership, state.membership.change, answer.place
    proposal = announcement = None
    if change is not None and answer.forming:
        level = level_of(change.nodes)
        proposal = MembershipProposal(
            **_membership(change.number, change.replicas, change.nodes, level)
        )
    level = level_of(state.running_on)
    if place is not None:
        now = _membership(membership.number, membership.replicas, state.running_on, level)
        where = (place.epoch, place.loop)
        balance, schedule = place.balance, place.schedule
        announcement = JobAnnouncement(**now, place=where, balance=balance, schedule=schedule)
    store = answer.store
    return HeartbeatAnswer(
        again=answer.again,
        proposal=proposal,
        announcement=announcement,
        store=store,
        network_level=level,
    )


# All joining replicas of a job get the same answer, and there may be thousands.
@lru_cache(maxsize=128)
def _membership(
    number: int, replicas: tuple[int, ...], nodes: tuple[str, ...], level: int | None
) -> dict[str, Any]:
    ids = tuple(str(replica) for replica in replicas)
    found = {"number": number, "replicas": ids, "num_nodes": len(set(nodes))}
    return found if level is None else {**found, "network_level": level}
