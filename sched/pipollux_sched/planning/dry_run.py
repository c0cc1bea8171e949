"""What the scheduler would change now, job by job, and why: a plan of its live state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pipollux_sched.allocator.decide import Decision, place_new, reallocate
from pipollux_sched.allocator.reasons import explain
from pipollux_sched.allocator.snapshot import Snapshot
from pipollux_sched.allocator.strategy import Candidate, Strategy, free_of
from pipollux_sched.policy import POLICIES, Allocation, NodeInfo, Policy


@dataclass(frozen=True)
class PlannedChange:
    """What one job has, and what it would have."""

    job: str
    previous: tuple[str, ...]
    """Node of each replica now."""
    previous_num_stages: int | None
    """K now; None where it holds nothing."""
    previous_speedup: float | None
    """Predicted by the job's model; None: nothing is known."""
    nodes: tuple[str, ...]
    """Node of each replica then."""
    num_stages: int | None
    speedup: float | None
    batch_size: int | None
    changes: bool
    """Whether anything of it is other than now."""
    why: str

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {**asdict(self), "previous": list(self.previous), "nodes": list(self.nodes)}


def plan_live(state: Snapshot, strategy: Strategy) -> list[PlannedChange]:
    """Return what every job that can be decided on would have; change nothing.

    Raises:
        ValueError: what the strategy came to is impossible; the text says why.
    """
    decided = {decision.job: decision for decision in preview(state, strategy)}
    after = [_given(job, decided.get(job.name), state.nodes) for job in state.candidates]
    free = free_of(state.nodes, after)
    return [
        _change(old, new, decided.get(old.name), state.nodes, free)
        for old, new in zip(state.candidates, after, strict=True)
    ]


def preview(state: Snapshot, strategy: Strategy) -> list[Decision]:
    """Return what the allocator would change now: `Allocator.run_once`, without carrying it out.

    Raises:
        ValueError: what the strategy came to is impossible; the text says why.
    """
    started = place_new(state.candidates, state.nodes, strategy)
    given = {decision.job: decision for decision in started}
    after = [_started(job, given.get(job.name)) for job in state.candidates]
    return [*started, *reallocate(after, state.nodes, strategy)]


def policy_named(class_name: str, make: Callable[[str], Policy]) -> str | None:
    """Return the name of the policy of that class, None if there is none: events tell the class."""
    return next((name for name in POLICIES if type(make(name)).__name__ == class_name), None)


def serving_policy(events: Sequence[Mapping[str, object]]) -> str | None:
    """Return the class of the policy that the last `cluster` event names."""
    return next((str(event["policy"]) for event in reversed(events) if "policy" in event), None)


def _started(job: Candidate, decision: Decision | None) -> Candidate:
    """Return a job as it is when it has just been started: left alone until its first step."""
    if decision is None:
        return job
    return replace(job, allocation=decision.nodes, num_stages=decision.num_stages, pinned=True)


def _given(job: Candidate, decision: Decision | None, nodes: Mapping[str, NodeInfo]) -> Candidate:
    if decision is None:
        return job
    if not decision.nodes:
        return job.given((), nodes)
    told = next((s for s in job.info.all_shapes if s.num_stages == decision.num_stages), None)
    return job.given(Allocation(decision.nodes, told), nodes)


def _change(
    old: Candidate,
    new: Candidate,
    decision: Decision | None,
    nodes: Mapping[str, NodeInfo],
    free: Mapping[str, Mapping[str, int]],
) -> PlannedChange:
    before, after = _prediction(old.held), _prediction(new.held)
    return PlannedChange(
        job=old.name,
        previous=old.allocation,
        previous_num_stages=old.held.num_stages,
        previous_speedup=before[0],
        nodes=new.allocation,
        num_stages=new.held.num_stages,
        speedup=after[0],
        batch_size=after[1],
        changes=decision is not None,
        why=decision.why if decision else _why_unchanged(old, nodes, free),
    )


def _why_unchanged(
    job: Candidate, nodes: Mapping[str, NodeInfo], free: Mapping[str, Mapping[str, int]]
) -> str:
    why = explain(job.info, job.held, job.held, nodes, free)
    return f"{why}; left alone for now" if job.pinned and job.allocation else why


def _prediction(held: Allocation) -> tuple[float | None, int | None]:
    known = held.configuration
    if known is None or not math.isfinite(known.speedup):
        return None, None
    return known.speedup, known.batch_size


def changed(changes: Sequence[PlannedChange]) -> list[PlannedChange]:
    """Return those that change something."""
    return [change for change in changes if change.changes]
