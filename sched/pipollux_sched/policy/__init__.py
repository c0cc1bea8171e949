"""Allocation policies: pure functions from jobs, nodes and allocations to new allocations."""

from __future__ import annotations

from .allocation import Allocation, shape_of
from .feasibility import is_pinned, must_move, usable_nodes, violations
from .fifo import FifoPolicy
from .job_info import (
    DEFAULT_RESTART_SECONDS,
    JobInfo,
    NodeInfo,
    ReplicaShape,
    SpeedupCallable,
)
from .optimus import OptimusPolicy
from .pollux import PolluxPolicy
from .sia import SiaPolicy
from .tiresias import TiresiasPolicy

__all__ = [
    "DEFAULT_RESTART_SECONDS",
    "Allocation",
    "FifoPolicy",
    "JobInfo",
    "NodeInfo",
    "OptimusPolicy",
    "PolluxPolicy",
    "ReplicaShape",
    "SiaPolicy",
    "SpeedupCallable",
    "TiresiasPolicy",
    "is_pinned",
    "must_move",
    "shape_of",
    "usable_nodes",
    "violations",
]
