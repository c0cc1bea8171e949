"""The number of nodes a cluster should have, for any policy (Pollux, OSDI'21, §4.2.2).

When the mean `utility` of the cluster over a window of rounds lies outside a band, a binary search
finds the number of nodes at which the policy itself would reach the middle of the band. All
functions are pure; `pipollux_sched.allocator.expander` rents and releases nodes.

>>> from pipollux_policies import NodeInfo, PolluxPolicy
>>> rules, state = AutoscalingRules(max_nodes=4, window=1), AutoscalingState()
>>> job = JobInfo({"slots": 4}, lambda nodes, replicas: replicas, 0.0, 1, 2)
>>> one = {"n": NodeInfo({"slots": 4})}
>>> autoscale(rules, state, PolluxPolicy(), {"j": job}, one, {"j": ["n"]}, one["n"])[1]
2
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from typing import Any

from pipollux_policies.allocations.order import by_safety
from pipollux_policies.allocations.rules import Allocations, Jobs, Nodes, is_pinned, usable_nodes
from pipollux_policies.base import Policy
from pipollux_policies.jobs.job_info import JobInfo, NodeInfo, ReplicaShape, TemplateNode

from .utility import UtilityBand, utility


@dataclass(frozen=True)
class AutoscalingRules:
    """The operator's rules for the number of nodes; ValueError if a number is out of range."""

    min_nodes: int = 0
    max_nodes: int = 16
    band: UtilityBand = field(default_factory=UtilityBand)
    window: int = 15
    """Rounds over which the utility is averaged, and the fewest between two changes."""

    def __post_init__(self) -> None:
        if not 0 <= self.min_nodes <= self.max_nodes:
            raise ValueError(
                f"min_nodes: {self.min_nodes} must be between 0 and max_nodes = {self.max_nodes}"
            )
        if self.window < 1:
            raise ValueError(f"window: {self.window} must be at least 1 round")


@dataclass(frozen=True)
class AutoscalingState:
    """Observations since the last change, or requested change, of the number of nodes."""

    utilities: tuple[float, ...] = ()
    """Utilities of the latest rounds, oldest first, at most one window."""
    num_nodes: int = 0
    desired_nodes: int | None = None


def autoscale(
    rules: AutoscalingRules,
    state: AutoscalingState,
    policy: Policy,
    jobs: Jobs,
    nodes: Nodes,
    allocations: Allocations,
    node_template: NodeInfo,
) -> tuple[AutoscalingState, int]:
    """Add the observation of one round, and return the desired number of nodes.

    Args:
        rules: the operator's rules.
        state: the state after the previous round; initially `AutoscalingState()`.
        policy: a copy (`copy.copy`) of it allocates other numbers of nodes, only when the number is
            to change.
        jobs: all jobs that are not done.
        nodes: all nodes; draining and unhealthy ones do not count.
        allocations: the allocations after this round.
        node_template: the resources of a further node.

    Returns:
        The new state, and the desired number of nodes that accept new replicas.
    """
    usable = usable_nodes(nodes)
    now = len(usable)
    floor = _least_nodes(rules, jobs, nodes, allocations, node_template)
    bounded = min(max(now, floor), rules.max_nodes)
    if bounded != now:
        # Decide at once if a job cannot run at all or the operator's rules are broken.
        return AutoscalingState((), now, bounded), bounded

    state = _observed(rules, state, now, utility(jobs, usable, allocations))
    mean = sum(state.utilities) / len(state.utilities)
    if len(state.utilities) < rules.window or rules.band.low <= mean <= rules.band.high:
        return state, now if state.desired_nodes is None else state.desired_nodes

    @cache
    def utility_of(size: int) -> float:
        return _utility_at(size, policy, jobs, nodes, allocations, node_template)

    low, high = floor, now
    if mean > rules.band.high:
        more = max(missing_nodes(jobs, nodes, node_template), 0)
        low, high = now, min(now + more, rules.max_nodes)
    desired = best_size(utility_of, low, high, rules.band.target)
    return AutoscalingState((), now, desired), desired


def best_size(utility_of: Callable[[int], float], low: int, high: int, target: float) -> int:
    """Return the number of nodes, from `low` to `high`, whose utility is nearest the target. By
    binary search, as utility falls with it. Of two equally near, the smaller.
    """
    while high - low > 1:
        middle = (low + high) // 2
        if utility_of(middle) < target:
            high = middle
        else:
            low = middle
    if low == high:
        return low
    above, below = utility_of(low) - target, target - utility_of(high)
    return low if above <= 0 or 0 < above <= below else high


def _observed(
    rules: AutoscalingRules, state: AutoscalingState, num_nodes: int, value: float
) -> AutoscalingState:
    if num_nodes != state.num_nodes:
        # Observations on another number of nodes do not count for this one. The last request stays
        # valid, unless nodes were added by other means.
        asked = state.desired_nodes
        added = asked is None or num_nodes > max(asked, state.num_nodes)
        state = AutoscalingState((), num_nodes, num_nodes if added else asked)
    return replace(state, utilities=(*state.utilities, value)[-rules.window :])


def _least_nodes(
    rules: AutoscalingRules, jobs: Jobs, nodes: Nodes, allocations: Allocations, template: NodeInfo
) -> int:
    """Return the fewest nodes on which every job could run alone and pinned jobs can stay."""
    usable = usable_nodes(nodes)
    least = max(rules.min_nodes, len(_pinned_nodes(jobs, nodes, allocations) & usable.keys()))
    for job in jobs.values():
        needed = _nodes_to_run(job, template)
        if needed is not None and needed <= rules.max_nodes:
            least = max(least, needed)
    return least


def missing_nodes(jobs: Jobs, nodes: Nodes, template: NodeInfo) -> int:
    """Return how many nodes could be added until all jobs have their most replicas.

    Negative: so many are left over even then. The utility alone does not say so: it also falls with
    nodes that no job can use. A node counts by the shape that fits it worst, so that nodes which
    differ from the template never hide that one is missing.
    """
    shapes: list[tuple[ReplicaShape, int]] = []
    needed = Fraction()
    for job in jobs.values():
        fitting = [(shape, n) for shape in job.all_shapes if (n := template.num_fitting(shape))]
        shapes += fitting
        needed += max((Fraction(job.most_replicas(shape), n) for shape, n in fitting), default=0)
    alike: dict[object, list[NodeInfo]] = defaultdict(list)
    for node in usable_nodes(nodes).values():
        alike[node.gpu_type, frozenset(node.resources.items())].append(node)
    there = Fraction()
    for node, *others in alike.values():
        each = min((Fraction(node.num_fitting(shape), n) for shape, n in shapes), default=0)
        there += each * (1 + len(others))
    return math.ceil(needed - there)


def _nodes_to_run(job: JobInfo, template: NodeInfo) -> int | None:
    """Return the fewest nodes that hold `min_replicas` of any shape; None: no number does."""
    replicas = job.least_replicas
    shapes = (shape for shape in job.all_shapes if replicas <= job.most_replicas(shape))
    per_node = max(map(template.num_fitting, shapes), default=0)
    return -(-replicas // per_node) if per_node else None


def _utility_at(
    size: int,
    policy: Policy,
    jobs: Jobs,
    nodes: Nodes,
    allocations: Allocations,
    template: NodeInfo,
) -> float:
    """Return the utility that the policy would reach on `size` nodes in the long run. Only pinned
    jobs keep their allocations, because the cost of restarts is paid once.
    """
    usable = usable_nodes(nodes)
    order = release_order(jobs, nodes, allocations)
    gone = set(order[: max(len(usable) - size, 0)])
    rented = {TemplateNode(number): template for number in range(size - len(usable))}
    others = {name: node for name, node in nodes.items() if name not in gone}
    kept = {
        name: held
        for name, held in allocations.items()
        if name in jobs and is_pinned(jobs[name], held, nodes)
    }
    answer, _ = copy.copy(policy).optimize(jobs, {**others, **rented}, kept, template)
    return utility(jobs, usable_nodes({**others, **rented}), answer)


def _pinned_nodes(jobs: Jobs, nodes: Nodes, allocations: Allocations) -> set[Any]:
    held = ((jobs[name], nodes_of) for name, nodes_of in allocations.items() if name in jobs)
    return {node for job, names in held if is_pinned(job, names, nodes) for node in names}


def release_order(jobs: Jobs, nodes: Nodes, allocations: Allocations) -> list[Any]:
    """Return the nodes that could be released, without pinned jobs, draining and unhealthy nodes.
    In the order of the number of jobs to move, then preemptible nodes first.
    """
    usable = usable_nodes(nodes)
    pinned = _pinned_nodes(jobs, nodes, allocations)
    count = {name: sum(name in held for held in allocations.values()) for name in usable}
    last_first = reversed(by_safety(usable))
    return sorted((n for n in last_first if n not in pinned), key=lambda n: count[n])


@dataclass(frozen=True)
class NodePlan:
    """Which nodes to release, and how many to request."""

    drain: tuple[Any, ...]
    """Nodes to mark as draining, so that the next round moves the jobs off them. Nodes of the
    previous plan that are not listed any more are needed again."""
    release: tuple[Any, ...]
    """Nodes of `drain` that are empty and can be released."""
    num_nodes: int
    """Desired number of nodes without `drain`, but with nodes that still drain or are unhealthy."""


def plan_nodes(
    desired_nodes: int,
    drained_before: Sequence[Any],
    jobs: Jobs,
    nodes: Nodes,
    allocations: Allocations,
) -> NodePlan:
    """Choose the nodes to release, drained ones first, never those with pinned jobs.

    Args:
        desired_nodes: from `autoscale`.
        drained_before: `drain` of the previous plan, without nodes that now drain for another
            reason; these are chosen first.
        jobs: all jobs that are not done.
        nodes: all nodes.
        allocations: the current allocations.
    """
    before = {name for name in drained_before if name in nodes}
    ours = {
        name: replace(node, draining=False) if name in before else node
        for name, node in nodes.items()
    }
    available = usable_nodes(ours)
    order = sorted(release_order(jobs, ours, allocations), key=lambda name: name not in before)
    drain = tuple(order[: max(len(available) - desired_nodes, 0)])
    busy = {node for held in allocations.values() for node in held}
    release = tuple(name for name in drain if name not in busy)
    staying = max(len(available) - len(drain), desired_nodes)
    unusable = len(nodes) - len(available) + len(drain) - len(release)
    return NodePlan(drain, release, staying + unusable)
