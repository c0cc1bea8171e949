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
from .completion_time import CompletionTime
from .exact import Certificate, ExactPolicy
from .feasibility import is_pinned, must_move, usable_nodes, violations
from .fifo import FifoPolicy
from .interface import Policy
from .job_info import (
    DEFAULT_RESTART_SECONDS,
    JobInfo,
    NodeInfo,
    ReplicaShape,
    SpeedupCallable,
)
from .objective import FairSpeedup, Objective, Worth
from .optimus import OptimusPolicy
from .pollux import PolluxPolicy
from .registry import DEFAULT_POLICY, POLICIES, make_policy
from .sia import SiaPolicy
from .tiresias import TiresiasPolicy
from .utility import UtilityBand, utility

__all__ = [
    "DEFAULT_POLICY",
    "DEFAULT_RESTART_SECONDS",
    "POLICIES",
    "Allocation",
    "AutoscalingRules",
    "AutoscalingState",
    "Certificate",
    "CompletionTime",
    "ExactPolicy",
    "FairSpeedup",
    "FifoPolicy",
    "JobInfo",
    "NodeInfo",
    "NodePlan",
    "Objective",
    "OptimusPolicy",
    "Policy",
    "PolluxPolicy",
    "ReplicaShape",
    "SiaPolicy",
    "SpeedupCallable",
    "TiresiasPolicy",
    "UtilityBand",
    "Worth",
    "autoscale",
    "best_size",
    "is_pinned",
    "make_policy",
    "must_move",
    "plan_nodes",
    "release_order",
    "shape_of",
    "usable_nodes",
    "utility",
    "violations",
]
