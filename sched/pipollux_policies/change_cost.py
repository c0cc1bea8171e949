"""What a change of a job's allocation costs: nothing, an elastic resize's price, or a restart's.

A job that can be resized keeps the surviving replicas where they are: they pause while others
leave or join. At least one replica must survive so, in the same shape: another number of stages or
type of GPU is a restart, and so is a move of all replicas. A replica is known by its node only, so
as many survive on a node as are there both before and after.

    price = 0                                        the same nodes and shape
            min(rescale_seconds, restart_seconds)    the same shape, and a survivor
            restart_seconds                          else, or if the job cannot be resized
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from .allocation import Allocation, runs_as, shape_of
from .job_info import JobInfo, NodeInfo
from .rules import usable_nodes

DEFAULT_RESCALE_SECONDS = 1.0
"""What an elastic resize is taken to cost before a job's own was measured."""


class ChangeKind(Enum):
    """What takes a job from one allocation to another."""

    NONE = "none"
    """It has what it had."""
    LIVE = "live"
    """Some of its replicas stay and go on, others come or go."""
    RESTART = "restart"
    """All of its replicas stop, are started, or both."""


def num_survivors(old: Sequence[Any], new: Sequence[Any]) -> int:
    """Return how many replicas stay where they are.

    Example:
        >>> num_survivors(["a", "a", "b"], ["a", "c"])
        1
    """
    return (Counter(old) & Counter(new)).total()


def change_kind(job: JobInfo, old: Allocation, new: Allocation) -> ChangeKind:
    """Return the kind of a change.

    Args:
        job: the job; without `rescale_seconds` it is never resized.
        old: what it holds; empty if it is queued.
        new: what it is to hold; empty if it is to be queued.

    Example:
        >>> job = JobInfo({"slots": 1}, lambda n, r: r, 0.0, 1, 4, rescale_seconds=1.0)
        >>> one, two = (Allocation(nodes, job.all_shapes[0]) for nodes in (["a"], ["a", "b"]))
        >>> change_kind(job, one, two), change_kind(job, one, Allocation())
        (<ChangeKind.LIVE: 'live'>, <ChangeKind.RESTART: 'restart'>)
    """
    same = _shape_key(old) == _shape_key(new)
    if same and Counter(old) == Counter(new):
        return ChangeKind.NONE
    if same and job.rescale_seconds is not None and num_survivors(old, new):
        return ChangeKind.LIVE
    return ChangeKind.RESTART


def change_seconds(job: JobInfo, old: Allocation, new: Allocation) -> float:
    """Return the price of a change in seconds without training; see `change_kind`.

    Example:
        >>> job = JobInfo({"slots": 1}, lambda n, r: r, 0.0, 1, 4, rescale_seconds=1.0)
        >>> one, two = (Allocation(nodes, job.all_shapes[0]) for nodes in (["a"], ["a", "b"]))
        >>> change_seconds(job, one, two), change_seconds(job, Allocation(), one)
        (1.0, 30.0)
    """
    kind = change_kind(job, old, new)
    if kind is ChangeKind.NONE:
        return 0.0
    return job.change_seconds(live=kind is ChangeKind.LIVE)


def possible_survivors(
    job: JobInfo, held: Sequence[Any], nodes: Mapping[Any, NodeInfo]
) -> Counter[Any]:
    """Return how many replicas of a job could survive a change on each node.

    Those on nodes that take replicas can. None can if the job cannot be resized, if it lost a
    node, or if it runs in a shape that is not one of its own any more.
    """
    if job.rescale_seconds is None or not held:
        return Counter()
    shape = shape_of(job, held, nodes)
    there = all(n in nodes and nodes[n].healthy and shape.runs_on(nodes[n]) for n in held)
    if not there or not runs_as(held, shape):
        return Counter()
    usable = usable_nodes({name: nodes[name] for name in held})
    return Counter(name for name in held if name in usable)


def _shape_key(allocation: Allocation) -> tuple[int, str | None] | None:
    shape = allocation.shape if allocation else None
    return None if shape is None else (shape.num_stages, shape.gpu_type)
