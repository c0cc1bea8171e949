"""How the replicas of a membership find each other at the boundary where they change."""

from __future__ import annotations

import enum
import zlib
from collections.abc import Sequence

import torch

from pipollux_hybrid.checkpoint.state import States
from pipollux_hybrid.job.context import JobContext
from pipollux_hybrid.job.membership import JobPlace

__all__ = ["Meeting", "compare", "position"]


class Meeting(enum.Enum):
    """What the replicas of a membership find when they compare where they are."""

    TOGETHER = "all are at one place"
    BEHIND = "some have yet to come"
    ELSEWHERE = "some cannot come"


def compare(found: Sequence[torch.Tensor], here: torch.Tensor) -> Meeting:
    """Compare (epoch, loop, checksum) of all replicas with those of one who trains."""
    if all(torch.equal(theirs, here) for theirs in found):
        return Meeting.TOGETHER
    *place, _ = here.tolist()
    behind = [theirs.tolist()[:2] < place for theirs in found]
    same = [torch.equal(theirs, here) for theirs in found]
    if all(one or other for one, other in zip(behind, same, strict=True)):
        return Meeting.BEHIND
    return Meeting.ELSEWHERE


def position(ctx: JobContext, place: JobPlace, description: str) -> torch.Tensor:
    """Return where a replica is, and a checksum of what all must have in common, shape [3].

    Args:
        ctx: The job's context.
        place: Where in its script the replica is.
        description: Of the loop there.
    """
    common = [description, *sorted(ctx.component(States)), *ctx.control.settings]
    return torch.tensor([*place, zlib.crc32("\n".join(common).encode())])
