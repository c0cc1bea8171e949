"""Allocation policies: pure functions from jobs, nodes and allocations to new allocations."""

from __future__ import annotations

from .allocation import Allocation, shape_of
from .feasibility import is_pinned, must_move, usable_nodes, violations
from .job_info import (
    DEFAULT_RESTART_SECONDS,
    JobInfo,
    NodeInfo,
    ReplicaShape,
    SpeedupCallable,
)
from .pollux import PolluxPolicy

__all__ = [
    "DEFAULT_RESTART_SECONDS",
    "Allocation",
    "JobInfo",
    "NodeInfo",
    "PolluxPolicy",
    "ReplicaShape",
    "SpeedupCallable",
    "is_pinned",
    "must_move",
    "shape_of",
    "usable_nodes",
    "violations",
]
