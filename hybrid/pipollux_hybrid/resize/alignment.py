"""Compares the positions of the replicas of a pending membership at a step boundary."""

from __future__ import annotations

import enum
import json
import zlib
from collections.abc import Mapping, Sequence

import torch

from pipollux_hybrid.checkpoint.state import States
from pipollux_hybrid.job.context import JobContext
from pipollux_hybrid.job.membership import JobPlace


class Alignment(enum.Enum):
    """Result of the comparison."""

    TOGETHER = "all are at one place"
    BEHIND = "some have yet to come"
    ELSEWHERE = "some cannot come"


def compare(found: Sequence[torch.Tensor], here: torch.Tensor) -> Alignment:
    """Compare (epoch, loop, checksum) of all replicas with those of a surviving replica."""
    if all(torch.equal(theirs, here) for theirs in found):
        return Alignment.TOGETHER
    *place, _ = here.tolist()
    behind = [theirs.tolist()[:2] < place for theirs in found]
    same = [torch.equal(theirs, here) for theirs in found]
    if all(one or other for one, other in zip(behind, same, strict=True)):
        return Alignment.BEHIND
    return Alignment.ELSEWHERE


def in_common(ctx: JobContext, description: str) -> dict[str, str | None]:
    """Return the settings and states that all replicas must have in common, by name."""
    states = ctx.component(States)
    described = {name: state.common for name, state in states.items() if state.common}
    common = {"the loop": description, "the list of states": ", ".join(sorted(states))}
    return common | described | ctx.control.settings


def position(place: JobPlace, common: Mapping[str, str | None]) -> torch.Tensor:
    """Return a replica's position and a checksum of :func:`in_common`, shape [3]."""
    content = json.dumps(common, sort_keys=True).encode()
    return torch.tensor([*place, zlib.crc32(content)])
