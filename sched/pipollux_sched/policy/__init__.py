"""Allocation policies: pure functions from jobs, nodes and allocations to new allocations."""

from __future__ import annotations

from .allocation import Allocation, shape_of
from .autoscaling import (
    AutoscalingRules,
    AutoscalingState,
    NodePlan,
    autoscale,
    best_size,
    plan_nodes,
    release_order,
)
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
from .utility import UtilityBand, utility

__all__ = [
    "DEFAULT_RESTART_SECONDS",
    "Allocation",
    "AutoscalingRules",
    "AutoscalingState",
    "FifoPolicy",
    "JobInfo",
    "NodeInfo",
    "NodePlan",
    "OptimusPolicy",
    "PolluxPolicy",
    "ReplicaShape",
    "SiaPolicy",
    "SpeedupCallable",
    "TiresiasPolicy",
    "UtilityBand",
    "autoscale",
    "best_size",
    "is_pinned",
    "must_move",
    "plan_nodes",
    "release_order",
    "shape_of",
    "usable_nodes",
    "utility",
    "violations",
]
