"""The cost of a change of allocation: none, that of an elastic resize, or that of a restart.

In an elastic resize the surviving replicas pause while others leave or join. At least one replica
must survive, in the same shape: a change of the number of stages or of the type of GPU is a
restart, and so is a move of all replicas. Replicas are identified by node only, so the number of
survivors on a node is the smaller of its replica counts before and after.

    cost = 0                                        same nodes and shape
           min(rescale_seconds, restart_seconds)    same shape, and a survivor
           restart_seconds                          otherwise, or if the job is not resizable
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from pipollux_policies.jobs.job_info import JobInfo, NodeInfo

from .allocation import Allocation, runs_as, shape_of
from .rules import usable_nodes

DEFAULT_RESCALE_SECONDS = 1.0
"""Assumed cost of an elastic resize until the job's own has been measured."""


class ChangeKind(Enum):
    """How a job gets from one allocation to another."""

    NONE = "none"
    RESIZE = "resize"
    RESTART = "restart"


def num_survivors(old: Sequence[Any], new: Sequence[Any]) -> int:
    """Return how many replicas stay on their nodes.

    >>> num_survivors(["a", "a", "b"], ["a", "c"])
    1
    """
    return (Counter(old) & Counter(new)).total()


def change_kind(job: JobInfo, old: Allocation, new: Allocation) -> ChangeKind:
    """Return the kind of a change.

    Args:
        job: the job; without `rescale_seconds` it is never resized.
        old: the current allocation; empty if the job is queued.
        new: the next allocation; empty if the job will be queued.

    Example:
        >>> job = JobInfo({"slots": 1}, lambda n, r: r, 0.0, 1, 4, rescale_seconds=1.0)
        >>> one, two = (Allocation(nodes, job.all_shapes[0]) for nodes in (["a"], ["a", "b"]))
        >>> change_kind(job, one, two), change_kind(job, one, Allocation())
        (<ChangeKind.RESIZE: 'resize'>, <ChangeKind.RESTART: 'restart'>)
    """
    same = _shape_key(old) == _shape_key(new)
    if same and Counter(old) == Counter(new):
        return ChangeKind.NONE
    if same and job.rescale_seconds is not None and num_survivors(old, new):
        return ChangeKind.RESIZE
    return ChangeKind.RESTART


def change_seconds(job: JobInfo, old: Allocation, new: Allocation) -> float:
    """Return the cost of a change in seconds without training; see `change_kind`.

    >>> job = JobInfo({"slots": 1}, lambda n, r: r, 0.0, 1, 4, rescale_seconds=1.0)
    >>> one, two = (Allocation(nodes, job.all_shapes[0]) for nodes in (["a"], ["a", "b"]))
    >>> change_seconds(job, one, two), change_seconds(job, Allocation(), one)
    (1.0, 30.0)
    """
    kind = change_kind(job, old, new)
    if kind is ChangeKind.NONE:
        return 0.0
    return job.change_seconds(elastic=kind is ChangeKind.RESIZE)


def possible_survivors(
    job: JobInfo, held: Sequence[Any], nodes: Mapping[Any, NodeInfo]
) -> Counter[Any]:
    """Return how many replicas of a job could survive a change, by node that accepts replicas.
    Empty if the job is not resizable, has lost a node, or runs in a shape that it no longer has.
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
