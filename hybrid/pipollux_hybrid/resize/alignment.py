"""How the replicas of a membership find each other at the boundary where they change."""

from __future__ import annotations

import enum
import json
import zlib
from collections.abc import Mapping, Sequence

import torch

from pipollux_hybrid.checkpoint.state import States
from pipollux_hybrid.job.context import JobContext
from pipollux_hybrid.job.membership import JobPlace

__all__ = ["Alignment", "compare", "in_common", "position"]


class Alignment(enum.Enum):
    """What the replicas of a membership find when they compare where they are."""

    TOGETHER = "all are at one place"
    BEHIND = "some have yet to come"
    ELSEWHERE = "some cannot come"


def compare(found: Sequence[torch.Tensor], here: torch.Tensor) -> Alignment:
    """Compare (epoch, loop, checksum) of all replicas with those of one who trains."""
    if all(torch.equal(theirs, here) for theirs in found):
        return Alignment.TOGETHER
    *place, _ = here.tolist()
    behind = [theirs.tolist()[:2] < place for theirs in found]
    same = [torch.equal(theirs, here) for theirs in found]
    if all(one or other for one, other in zip(behind, same, strict=True)):
        return Alignment.BEHIND
    return Alignment.ELSEWHERE


def in_common(ctx: JobContext, description: str) -> dict[str, str | None]:
    """Return what a replica must have in common with the others, by name.

    Args:
        ctx: The job's context.
        description: Of the loop that it is in.
    """
    states = ctx.component(States)
    described = {name: state.common for name, state in states.items() if state.common}
    common = {"the loop": description, "the list of states": ", ".join(sorted(states))}
    return common | described | ctx.control.settings


def position(place: JobPlace, common: Mapping[str, str | None]) -> torch.Tensor:
    """Return where a replica is, and a checksum of what all must have in common, shape [3].

    Args:
        place: Where in its script the replica is.
        common: Of :func:`in_common`.
    """
    content = json.dumps(common, sort_keys=True).encode()
    return torch.tensor([*place, zlib.crc32(content)])
