"""Start of new jobs on free slots, between two decisions of a policy about all jobs.

The allocator and the simulator both follow this rule:

    waiting jobs, in order of arrival       free slots
    ┌─────┐ ┌─────┐ ┌──────┐ ┌─────┐
    │ one │ │ two │ │ wide │ │last │        `one` and `two` start. `wide` does not fit, so `last`
    └──┬──┘ └──┬──┘ └──┬───┘ └─────┘        waits behind it: if later jobs took every slot that
       ▼       ▼       ✗                    becomes free, a wide job would never start.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from pipollux_policies.allocations.allocation import Allocation
from pipollux_policies.jobs.job_info import NodeInfo

Place: TypeAlias = Callable[[str, Mapping[Any, NodeInfo]], Allocation]


def place_in_order(
    waiting: Iterable[str],
    free: Mapping[Any, NodeInfo],
    place: Place,
    weighed: Collection[str] = (),
    *,
    queue: bool = True,
) -> dict[str, Allocation]:
    """Return the allocations of the jobs that start at once, of `waiting` in order of arrival.

    `place` returns an allocation on free resources, possibly empty. Only the policy may start
    `weighed` jobs: suspended ones, and new ones with inherited hints, which may get more than their
    minimum. With `queue`, a job that has to wait also holds back the jobs after it.
    """
    left, placed = dict(free), dict[str, Allocation]()
    for name in waiting:
        given = Allocation() if name in weighed else place(name, left)
        if given:
            placed[name] = given
            _subtract(left, given)
        elif queue:
            break
    return placed


def _subtract(free: dict[Any, NodeInfo], given: Allocation) -> None:
    assert given.shape is not None  # noqa: S101  # an allocation that is not empty has one
    for name in given:
        left = dict(free[name].resources)
        for kind, amount in given.shape.resources.items():
            left[kind] = left.get(kind, 0) - amount
        free[name] = replace(free[name], resources=left)
