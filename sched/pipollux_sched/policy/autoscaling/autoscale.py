"""How many nodes a cluster should have: a decision apart from any policy (Pollux, OSDI'21, §4.2.2).

The utility of the cluster (`utility`) is looked at after every round of the policy. When its mean
over a window of rounds lies outside a band, the number of nodes is sought, by binary search, at
which the policy itself would reach the middle of the band. Everything is a pure function of what is
passed in: what was seen so far is a state that goes in and comes out, and nothing here rents or
gives back a node (`pipollux_sched.allocator.expander` does).

Example:
    >>> from pipollux_sched.policy import NodeInfo, PolluxPolicy
    >>> rules, state = AutoscalingRules(max_nodes=4, window=1), AutoscalingState()
    >>> job = JobInfo({"slots": 4}, lambda nodes, replicas: replicas, 0.0, 1, 2)
    >>> one = {"n": NodeInfo({"slots": 4})}
    >>> autoscale(rules, state, PolluxPolicy(), {"j": job}, one, {"j": ["n"]}, one["n"])[1]
    4
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol

from pipollux_sched.policy.job_info import JobInfo, NodeInfo
from pipollux_sched.policy.pollux.arrays import by_safety
from pipollux_sched.policy.rules import is_pinned, usable_nodes

from .utility import UtilityBand, utility

Jobs = Mapping[Any, JobInfo]
Nodes = Mapping[Any, NodeInfo]
Allocations = Mapping[Any, Sequence[Any]]


class _Policy(Protocol):
    """Any policy."""

    def optimize(
        self, jobs: Any, nodes: Any, base_allocations: Any, node_template: NodeInfo
    ) -> tuple[Allocations, int]:
        """Allocate all jobs anew."""


@dataclass(frozen=True)
class AutoscalingRules:
    """What the operator wants.

    Raises:
        ValueError: a number is out of range; the message names it.
    """

    min_nodes: int = 0
    """Never fewer nodes than this."""
    max_nodes: int = 16
    """Never more nodes than this."""
    band: UtilityBand = field(default_factory=UtilityBand)
    """Within it, the number of nodes stays."""
    window: int = 15
    """Number of rounds over which the utility is averaged, and between two changes at least."""

    def __post_init__(self) -> None:
        if not 0 <= self.min_nodes <= self.max_nodes:
            raise ValueError(
                f"min_nodes: {self.min_nodes} must be between 0 and max_nodes = {self.max_nodes}"
            )
        if self.window < 1:
            raise ValueError(f"window: {self.window} must be at least 1 round")


@dataclass(frozen=True)
class AutoscalingState:
    """What was seen since the number of nodes last changed, or was last asked to."""

    utilities: tuple[float, ...] = ()
    """Of the latest rounds, the oldest first; never more than the window."""
    num_nodes: int = 0
    """The number of nodes that they were seen on."""
    desired_nodes: int | None = None
    """What was last decided; None: nothing yet."""


def autoscale(
    rules: AutoscalingRules,
    state: AutoscalingState,
    policy: _Policy,
    jobs: Jobs,
    nodes: Nodes,
    allocations: Allocations,
    node_template: NodeInfo,
) -> tuple[AutoscalingState, int]:
    """Note one round, and say how many nodes there should be.

    Args:
        rules: what the operator wants.
        state: from the round before; `AutoscalingState()` at first.
        policy: tells, by `optimize`, what it would make of other numbers of nodes. It is asked on
            a copy (`copy.copy`), and only when the number is to change.
        jobs: all jobs that are not done.
        nodes: all nodes; those that drain or are not healthy do not count.
        allocations: what the jobs hold after this round.
        node_template: what one more node would be like.

    Returns:
        The new state, and the desired number of nodes that take new replicas.
    """
    usable = usable_nodes(nodes)
    now = len(usable)
    floor = _least_nodes(rules, jobs, nodes, allocations, node_template)
    bounded = min(max(now, floor), rules.max_nodes)
    if bounded != now:
        # Too few for some job to run at all, or not what the operator allows: no need to wait.
        return AutoscalingState((), now, bounded), bounded

    state = _observed(rules, state, now, utility(jobs, usable, allocations))
    mean = sum(state.utilities) / len(state.utilities)
    if len(state.utilities) < rules.window or rules.band.low <= mean <= rules.band.high:
        return state, now if state.desired_nodes is None else state.desired_nodes

    @cache
    def utility_of(size: int) -> float:
        return _utility_at(size, policy, jobs, nodes, allocations, node_template)

    low, high = (now, rules.max_nodes) if mean > rules.band.high else (floor, now)
    desired = best_size(utility_of, low, high, rules.band.target)
    return AutoscalingState((), now, desired), desired


def best_size(utility_of: Callable[[int], float], low: int, high: int, target: float) -> int:
    """Find the number of nodes, from `low` to `high`, whose utility is nearest the target.

    By binary search, as utility falls with the number of nodes. Of two that are as near, the
    smaller.
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
        # What was seen on another number of nodes says nothing about this one. What was asked for
        # still holds, unless somebody else has added nodes.
        asked = state.desired_nodes
        added = asked is None or num_nodes > max(asked, state.num_nodes)
        state = AutoscalingState((), num_nodes, num_nodes if added else asked)
    return replace(state, utilities=(*state.utilities, value)[-rules.window :])


def _least_nodes(
    rules: AutoscalingRules, jobs: Jobs, nodes: Nodes, allocations: Allocations, template: NodeInfo
) -> int:
    """Return the fewest nodes on which every job could run alone and pinned jobs may stay."""
    usable = usable_nodes(nodes)
    least = max(rules.min_nodes, len(_pinned_nodes(jobs, nodes, allocations) & usable.keys()))
    for job in jobs.values():
        needed = _nodes_to_run(job, template)
        if needed is not None and needed <= rules.max_nodes:
            least = max(least, needed)
    return least


def _nodes_to_run(job: JobInfo, template: NodeInfo) -> int | None:
    """Return the fewest nodes that hold `min_replicas` of any shape; None: no number does."""
    replicas = max(job.min_replicas, 1)
    needed = []
    for shape in job.all_shapes:
        counts = [template.resources.get(k, 0) // n for k, n in shape.resources.items() if n]
        if min(counts) and shape.runs_on(template) and replicas <= job.most_replicas(shape):
            needed.append(-(-replicas // min(counts)))
    return min(needed, default=None)


def _utility_at(
    size: int,
    policy: _Policy,
    jobs: Jobs,
    nodes: Nodes,
    allocations: Allocations,
    template: NodeInfo,
) -> float:
    """Return the utility that the policy would reach on so many nodes in the long run.

    So jobs start from nothing, as what it costs to get there is paid once; pinned jobs stay.
    """
    usable = usable_nodes(nodes)
    order = release_order(jobs, nodes, allocations)
    gone = set(order[: max(len(usable) - size, 0)])
    rented = {_Rented(number): template for number in range(size - len(usable))}
    others = {name: node for name, node in nodes.items() if name not in gone}
    kept = {
        name: held
        for name, held in allocations.items()
        if name in jobs and is_pinned(jobs[name], held, nodes)
    }
    answer, _ = copy.copy(policy).optimize(jobs, {**others, **rented}, kept, template)
    return utility(jobs, usable_nodes({**others, **rented}), answer)


@dataclass(frozen=True)
class _Rented:
    """The name of a node that is not there yet; no real node's name is equal to it."""

    number: int


def _pinned_nodes(jobs: Jobs, nodes: Nodes, allocations: Allocations) -> set[Any]:
    held = ((jobs[name], nodes_of) for name, nodes_of in allocations.items() if name in jobs)
    return {node for job, names in held if is_pinned(job, names, nodes) for node in names}


def release_order(jobs: Jobs, nodes: Nodes, allocations: Allocations) -> list[Any]:
    """Return the nodes that could be given back, those that are missed least first.

    That is: the fewest jobs to be moved, then nodes that may be taken away anyway. Nodes that carry
    pinned jobs are never among them, nor are nodes that drain or are not healthy.
    """
    usable = usable_nodes(nodes)
    pinned = _pinned_nodes(jobs, nodes, allocations)
    count = {name: sum(name in held for held in allocations.values()) for name in usable}
    last_first = reversed(by_safety(usable))
    return sorted((n for n in last_first if n not in pinned), key=lambda n: count[n])


@dataclass(frozen=True)
class NodePlan:
    """Which nodes to do without, and how many to ask for."""

    drain: tuple[Any, ...]
    """To be marked as draining, so that the next round of the policy takes the jobs off them; those
    marked for this reason before and not named any more are needed again."""
    release: tuple[Any, ...]
    """Those of them that carry nothing any more: they can be given back."""
    num_nodes: int
    """How many there should be once these are gone, with those that still drain or are ill."""


def plan_nodes(
    desired_nodes: int,
    drained_before: Sequence[Any],
    jobs: Jobs,
    nodes: Nodes,
    allocations: Allocations,
) -> NodePlan:
    """Choose the nodes to be given back, drained first; nodes with pinned jobs never are.

    Args:
        desired_nodes: from `autoscale`.
        drained_before: the plan's `drain` of the round before, without nodes that drain for another
            reason by now: these stay chosen if any are.
        jobs: all jobs that are not done.
        nodes: all nodes.
        allocations: what the jobs hold.
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
