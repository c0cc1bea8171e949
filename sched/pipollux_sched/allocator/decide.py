"""Decisions from the results of a strategy, validated against nodes, slots and bounds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipollux_policies import Allocation, violations
from pipollux_policies.placement.new_jobs import place_in_order

from .reasons import Others, explain
from .strategy import FixedStrategy, Nodes, SchedulableJob, Strategy, free_of, jobs_of


@dataclass(frozen=True)
class Decision:
    """The new allocation of one job, and the reason."""

    job: str
    nodes: tuple[str, ...]
    previous: tuple[str, ...] = ()
    why: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Data for the event: num_stages; if they can be predicted, num_microbatches, atomic_bsz,
    accum_steps, batch_size and speedup; and previous_speedup, of the previous allocation."""
    num_stages: int | None = None
    """K of each replica; None without an allocation."""


def place_new(
    candidates: Sequence[SchedulableJob], nodes: Nodes, strategy: Strategy
) -> list[Decision]:
    """Place jobs that hold nothing on free slots, by order of submission (`placement.new_jobs`).

    Then the strategy decides on all jobs (`reallocate`). A fixed allocation never waits for another
    job. ValueError: the result of the strategy is invalid.
    """
    by_name = {job.name: job for job in candidates}
    queue, free = not isinstance(strategy, FixedStrategy), free_of(nodes, candidates)
    placed = place_in_order(
        [job.name for job in candidates if not job.allocation and not job.pinned],
        {name: replace(nodes[name], resources=left) for name, left in free.items()},
        lambda name, left: by_name[name].given(strategy.place(by_name[name], left), nodes).held,
        {
            x.name
            for x in candidates
            if x.suspended or (queue and x.is_new and x.warm_start is not None)
        },
        queue=queue,
    )
    after = [
        job.given(placed[job.name], nodes) if job.name in placed else job for job in candidates
    ]
    return _decisions(candidates, after, nodes, strategy)


def reallocate(
    candidates: Sequence[SchedulableJob], nodes: Nodes, strategy: Strategy
) -> list[Decision]:
    """Return the decisions that change something; raise ValueError for an invalid result."""
    if not candidates:
        return []
    result = strategy.optimize(candidates, nodes)
    after = [job.given(result.get(job.name, ()), nodes) for job in candidates]
    return _decisions(candidates, after, nodes, strategy)


def why_waiting(
    waiting: Sequence[SchedulableJob], candidates: Sequence[SchedulableJob], nodes: Nodes
) -> list[str]:
    """Explain why some of the jobs, which hold no slots, are queued."""
    free, others = free_of(nodes, candidates), others_of(candidates)
    return [explain(job.info, (), (), nodes, free, others) for job in waiting]


def _decisions(
    before: Sequence[SchedulableJob],
    after: Sequence[SchedulableJob],
    nodes: Nodes,
    strategy: Strategy,
) -> list[Decision]:
    pairs = [(old, new) for old, new in zip(before, after, strict=True) if _differ(old, new)]
    if not pairs:
        return []
    if isinstance(strategy, FixedStrategy):
        # A fixed allocation is not limited by later measurements, and a job that may stay on a
        # draining node is started there.
        before, after = ([_uncapped(job) for job in jobs] for jobs in (before, after))
        _check(before, after, {name: replace(n, draining=False) for name, n in nodes.items()})
    else:
        _check(before, after, nodes)
    free, others = free_of(nodes, after), others_of(after)
    return [_decision(old, new, nodes, free, others) for old, new in pairs]


def others_of(candidates: Iterable[SchedulableJob]) -> Others:
    """Return the jobs of a cluster, for reasons that name them."""
    holders: dict[str, list[str]] = {}
    waiting = []
    for job in candidates:
        for node in dict.fromkeys(job.allocation):
            holders.setdefault(node, []).append(job.name)
        if not job.allocation:
            waiting.append((job.name, job.info))
    return Others(holders, sorted(waiting, key=lambda entry: entry[1].created))


def _differ(old: SchedulableJob, new: SchedulableJob) -> bool:
    if sorted(old.allocation) != sorted(new.allocation):
        return True
    return bool(new.allocation) and old.held.num_stages != new.held.num_stages


def _check(before: Sequence[SchedulableJob], after: Sequence[SchedulableJob], nodes: Nodes) -> None:
    """Reject new violations of a rule; a cap may have shrunk in the meantime."""
    jobs = jobs_of(after)  # with every shape that any of them is given
    base = {job.name: job.held for job in before}
    broken = violations(jobs, nodes, base, base)
    new = violations(jobs, nodes, base, {job.name: job.held for job in after})
    found = [sentence for sentence in new if sentence not in broken]
    if found:
        raise ValueError("; ".join(found))


def _uncapped(job: SchedulableJob) -> SchedulableJob:
    most = max(job.info.max_replicas, len(job.allocation))
    return replace(job, info=replace(job.info, max_replicas=most))


def _decision(
    old: SchedulableJob,
    new: SchedulableJob,
    nodes: Nodes,
    free: Mapping[str, Mapping[str, int]],
    others: Others,
) -> Decision:
    given = new.held
    known = given.configuration
    details = {
        "num_stages": given.num_stages or new.info.num_stages,
        "num_microbatches": known.num_microbatches if known else None,
        "atomic_bsz": known.atomic_bsz if known else None,
        "accum_steps": known.accum_steps if known else None,
        "batch_size": known.batch_size if known else None,
        "speedup": _predicted_speedup(given),
        "previous_speedup": _predicted_speedup(old.held),
    }
    why = explain(new.info, old.held, given, nodes, free, others)
    return Decision(new.name, new.allocation, old.allocation, why, details, given.num_stages)


def _predicted_speedup(held: Allocation) -> float | None:
    known = held.configuration
    return known.speedup if known and math.isfinite(known.speedup) else None
