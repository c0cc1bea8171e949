"""Allocation policies: pure functions from jobs, nodes and allocations to new allocations."""

from __future__ import annotations

from pipollux_policies.autoscaling.autoscale import (
    AutoscalingRules,
    AutoscalingState,
    NodePlan,
    autoscale,
    best_size,
    missing_nodes,
    plan_nodes,
    release_order,
)
from pipollux_policies.autoscaling.utility import UtilityBand, utility
from pipollux_policies.baselines.fifo import FifoPolicy
from pipollux_policies.baselines.optimus import OptimusPolicy
from pipollux_policies.baselines.tiresias import TiresiasPolicy
from pipollux_policies.exact.completion_time import MOST_TAIL, CompletionTime
from pipollux_policies.exact.fair_share import FairStanding, fair_standings
from pipollux_policies.exact.objective import FairSpeedup, Objective, ObjectiveValue
from pipollux_policies.exact.policy import Certificate, ExactPolicy
from pipollux_policies.pollux.policy import PolluxPolicy
from pipollux_policies.sia.policy import SiaPolicy

from .allocations.allocation import Allocation, shape_of
from .allocations.change_cost import (
    DEFAULT_RESCALE_SECONDS,
    ChangeKind,
    change_kind,
    change_seconds,
    num_survivors,
)
from .allocations.rules import is_pinned, must_move, usable_nodes, violations
from .base import Policy
from .jobs.contention import Contention
from .jobs.job_info import MEASURED_REACH, JobInfo, NodeInfo, ReplicaShape, SpeedupCallable
from .jobs.lengths import CompletedJob, LengthHistory, family_of
from .jobs.restart_cost import DEFAULT_RESTART_SECONDS
from .options import Option
from .registry import (
    DEFAULT_POLICY,
    POLICIES,
    PolicyEntry,
    make_policy,
    parse_policy,
    policy_help,
    policy_text,
    split_policies,
)

__all__ = [
    "DEFAULT_POLICY",
    "DEFAULT_RESCALE_SECONDS",
    "DEFAULT_RESTART_SECONDS",
    "MEASURED_REACH",
    "MOST_TAIL",
    "POLICIES",
    "Allocation",
    "AutoscalingRules",
    "AutoscalingState",
    "Certificate",
    "ChangeKind",
    "CompletedJob",
    "CompletionTime",
    "Contention",
    "ExactPolicy",
    "FairSpeedup",
    "FairStanding",
    "FifoPolicy",
    "JobInfo",
    "LengthHistory",
    "NodeInfo",
    "NodePlan",
    "Objective",
    "ObjectiveValue",
    "OptimusPolicy",
    "Option",
    "Policy",
    "PolicyEntry",
    "PolluxPolicy",
    "ReplicaShape",
    "SiaPolicy",
    "SpeedupCallable",
    "TiresiasPolicy",
    "UtilityBand",
    "autoscale",
    "best_size",
    "change_kind",
    "change_seconds",
    "fair_standings",
    "family_of",
    "is_pinned",
    "make_policy",
    "missing_nodes",
    "must_move",
    "num_survivors",
    "parse_policy",
    "plan_nodes",
    "policy_help",
    "policy_text",
    "release_order",
    "shape_of",
    "split_policies",
    "usable_nodes",
    "utility",
    "violations",
]
