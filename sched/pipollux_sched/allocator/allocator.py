"""Who gets what: when to ask the policy, and what of its answer is carried out.

* A job that has just come starts at once where something is free (`Strategy.place`).
* All jobs are weighed against each other at every interval, and when one has come or ended
  (`Strategy.optimize`).
* A job whose present generation has not taken its first step, or is being stopped, is left where
  it is: it would be moved on the strength of nothing, and moved again soon.
* A job gets at most twice the replicas that its step time was measured on, so that a model that is
  optimistic about what it has not seen is never trusted far (`inventory.replica_cap`).
* Whatever the policy says is checked against nodes, slots and bounds before anything happens.

`place_new` and `reallocate` are pure: they turn what is known into decisions. `Allocator` reads
what is known from the store, and lets what was decided happen.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipollux_perfmodel import HintsError, SchedHints
from pipollux_sched.lifecycle import Allocate, JobState, Phase
from pipollux_sched.metrics import Metrics
from pipollux_sched.policy import Allocation, violations
from pipollux_sched.spec.job import JobSpec, parse_job
from pipollux_sched.store import JobRecord, Store

from .autoscaler import Autoscaler
from .job_infos import hints_worth, job_info
from .reasons import explain
from .strategy import (
    Candidate,
    FixedStrategy,
    Nodes,
    PolicyStrategy,
    Strategy,
    free_of,
    jobs_of,
)

__all__ = [
    "Allocator",
    "Candidate",
    "Decision",
    "FixedStrategy",
    "PolicyStrategy",
    "Strategy",
    "is_pinned",
    "place_new",
    "reallocate",
    "why_waiting",
]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decision:
    """What one job is to get, and why."""

    job: str
    nodes: tuple[str, ...]
    previous: tuple[str, ...] = ()
    why: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    """num_stages; where they can be predicted, num_microbatches, atomic_bsz, accum_steps,
    batch_size and speedup, and previous_speedup: by the same model, of what it had until now."""
    num_stages: int | None = None
    """K of each replica; None where it gets nothing."""


def place_new(candidates: Sequence[Candidate], nodes: Nodes, strategy: Strategy) -> list[Decision]:
    """Start jobs that hold nothing on what is free, those that came first before the others.

    Where one that came before waits, those after it do too: were they put where something is free
    for a moment, there would never be room enough for one that needs more. Who goes first then is
    for the strategy to weigh (`reallocate`). What was decided beforehand waits for nobody.

    Raises:
        ValueError: what the strategy came to is impossible; the text says why.
    """
    placed = {job.name: job for job in candidates}
    free = _with_resources(nodes, free_of(nodes, candidates))
    queues = not isinstance(strategy, FixedStrategy)
    for job in candidates:
        if job.allocation or job.pinned:
            continue
        given = job if job.suspended else job.given(strategy.place(job, free), nodes)
        if given.allocation:
            placed[job.name] = given
            free = _with_resources(nodes, free_of(nodes, list(placed.values())))
        elif queues:
            break
    return _decisions(candidates, list(placed.values()), nodes, strategy)


def reallocate(candidates: Sequence[Candidate], nodes: Nodes, strategy: Strategy) -> list[Decision]:
    """Decide anew on all jobs; the decisions are those that change something.

    Raises:
        ValueError: what the strategy came to is impossible; the text says why.
    """
    if not candidates:
        return []
    result = strategy.optimize(candidates, nodes)
    after = [job.given(result.get(job.name, ()), nodes) for job in candidates]
    return _decisions(candidates, after, nodes, strategy)


def why_waiting(job: Candidate, candidates: Sequence[Candidate], nodes: Nodes) -> str:
    """Say why a job that holds nothing gets nothing at the moment."""
    return explain(job.info, (), (), nodes, free_of(nodes, candidates))


def is_pinned(state: JobState) -> bool:
    """Say whether a job is to be left where it is: it starts, stops, or waits after a failure."""
    if state.phase is Phase.RESTARTING or state.intent is not None:
        return True
    return bool(state.running_on) and not state.training


def _decisions(
    before: Sequence[Candidate], after: Sequence[Candidate], nodes: Nodes, strategy: Strategy
) -> list[Decision]:
    """Return what changes, with reasons, once it is known to be possible."""
    pairs = [(old, new) for old, new in zip(before, after, strict=True) if _differ(old, new)]
    if not pairs:
        return []
    if isinstance(strategy, FixedStrategy):
        # What was decided beforehand is not held to what has been measured since, and a job that
        # may stay on a node that drains is started there.
        before, after = ([_uncapped(job) for job in jobs] for jobs in (before, after))
        _check(before, after, {name: replace(n, draining=False) for name, n in nodes.items()})
    else:
        _check(before, after, nodes)
    free = free_of(nodes, after)
    return [_decision(old, new, nodes, free) for old, new in pairs]


def _differ(old: Candidate, new: Candidate) -> bool:
    if sorted(old.allocation) != sorted(new.allocation):
        return True
    return bool(new.allocation) and old.held.num_stages != new.held.num_stages


def _check(before: Sequence[Candidate], after: Sequence[Candidate], nodes: Nodes) -> None:
    """Refuse what breaks a rule that was not broken already: a cap may have shrunk meanwhile."""
    jobs = jobs_of(after)  # with every shape that one of them is given
    base = {job.name: job.held for job in before}
    broken = violations(jobs, nodes, base, base)
    new = violations(jobs, nodes, base, {job.name: job.held for job in after})
    found = [sentence for sentence in new if sentence not in broken]
    if found:
        raise ValueError("; ".join(found))


def _uncapped(job: Candidate) -> Candidate:
    most = max(job.info.max_replicas, len(job.allocation))
    return replace(job, info=replace(job.info, max_replicas=most))


def _decision(
    old: Candidate, new: Candidate, nodes: Nodes, free: Mapping[str, Mapping[str, int]]
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
    why = explain(new.info, old.held, given, nodes, free)
    return Decision(new.name, new.allocation, old.allocation, why, details, given.num_stages)


def _predicted_speedup(held: Allocation) -> float | None:
    known = held.configuration
    return known.speedup if known and math.isfinite(known.speedup) else None


def _with_resources(nodes: Nodes, resources: Mapping[str, Mapping[str, int]]) -> Nodes:
    return {name: replace(node, resources=resources[name]) for name, node in nodes.items()}


def _believed(job: str, hints: Mapping[str, Any] | None) -> SchedHints | None:
    """Read hints; those that an older version left and this one cannot read are as good as none."""
    try:
        return SchedHints.from_json_object(hints) if hints else None
    except HintsError as error:
        _LOG.warning("the hints of job %s are left aside: %s", job, error)
        return None


class _Read:
    """Specs and hints, read once as long as they stay the same."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Any, Any, JobSpec, SchedHints | None]] = {}

    def of(
        self, job: str, spec: Mapping[str, Any], hints: Mapping[str, Any] | None
    ) -> tuple[JobSpec, SchedHints | None]:
        """Return what a job's spec and hints say, given as JSON."""
        known = self._known.get(job)
        if known is None or known[0] != spec or known[1] != hints:
            same = known is not None and known[0] == spec
            parsed = known[2] if known is not None and same else parse_job(spec)
            known = self._known[job] = (spec, hints, parsed, _believed(job, hints))
        return known[2], known[3]

    def forget_all_but(self, jobs: Collection[str]) -> None:
        """Forget jobs that have ended."""
        for gone in self._known.keys() - set(jobs):
            del self._known[gone]


class Allocator:
    """Reads what is known from the store, decides, and lets it happen.

    Args:
        store: knows the jobs.
        nodes: the nodes and what jobs may use of them.
        strategy: how decisions are come by.
        carry_out: lets jobs be allocated, all at once.
        restart_seconds: what a restart is taken to cost before a job's own was measured.
        clock: tells the time, in seconds since the epoch.
        metrics: where decisions are counted and timed; None: nowhere that anybody sees.
    """

    def __init__(
        self,
        store: Store,
        nodes: Nodes,
        strategy: Strategy,
        *,
        carry_out: Callable[[Sequence[tuple[str, Allocate]]], object],
        restart_seconds: float,
        clock: Callable[[], float] = time.time,
        metrics: Metrics | None = None,
    ) -> None:
        self._store = store
        self._stated = dict(nodes)
        self._nodes = dict(nodes)
        self._leaving: Collection[str] = ()
        self._strategy = strategy
        self._carry_out = carry_out
        self._restart_seconds = restart_seconds
        self._clock = clock
        self._metrics = metrics or Metrics()
        self._doubted: dict[str, str] = {}
        self._read = _Read()

    def run_once(self) -> list[Decision]:
        """Start what can be started, then weigh all jobs against each other.

        A policy that fails, or wants what is impossible, changes nothing; the log says so.

        Returns:
            The decisions that were carried out.
        """
        candidates = self.candidates()
        decisions: list[Decision] = []
        for decide in (place_new, reallocate):
            made = self._attempt(decide, candidates)
            candidates = self.candidates() if made else candidates
            decisions += made
        self._queue_the_rest(candidates)
        return decisions

    def candidates(self) -> list[Candidate]:
        """Return the jobs that can be decided on, as they stand now, in the order they came."""
        store = self._store
        hints, generations = store.hints(live=True), store.num_generations(live=True)
        service, costs = store.attained_service(live=True), store.restart_costs()
        found = [
            self._candidate(
                job,
                hints.get(job.name),
                generations=generations.get(job.name, 0),
                service=service.get(job.name, 0.0),
                restart=costs.get(job.name, self._restart_seconds),
            )
            for job in store.jobs(live=True)
            if not job.state.suspended
        ]
        self._read.forget_all_but([job.name for job in found])
        # Pinned to nothing: it is being stopped, and can be weighed again when it has.
        return [job for job in found if job.allocation or not job.pinned]

    def set_nodes(self, nodes: Nodes) -> None:
        """Decide from now on with these nodes; those that are dead are not among them."""
        self._stated = dict(nodes)
        self._nodes = {
            name: replace(node, draining=node.draining or name in self._leaving)
            for name, node in nodes.items()
        }

    def adjust(self, autoscaler: Autoscaler) -> bool:
        """Let the number of nodes be looked after, with what was decided last.

        Returns:
            Whether other nodes drain now than before, so that jobs have to be weighed again.
        """
        candidates = self.candidates()
        allocations = {job.name: job.held for job in candidates if job.allocation}
        busy = {node for job in self._store.jobs(live=True) for node in job.state.running_on}
        self._leaving = autoscaler.round(jobs_of(candidates), self._nodes, allocations, busy)
        before = self._nodes
        self.set_nodes(self._stated)
        return self._nodes != before

    def _candidate(
        self,
        job: JobRecord,
        hints: Mapping[str, Any] | None,
        *,
        generations: int,
        service: float,
        restart: float,
    ) -> Candidate:
        spec, believed = self._read.of(job.name, job.spec, hints)
        told = believed or spec.hints
        self._note_doubt(job.name, hints_worth(spec, told).doubt)
        info = job_info(
            spec,
            told,
            age=max(self._clock() - job.submitted_at, 0.0),
            created=job.submitted_at,
            num_restarts=max(generations - 1, 0),
            restart_seconds=restart,
            attained_service=service,
            num_stages=job.state.num_stages if job.state.assigned else None,
        )
        return Candidate(
            job.name,
            info,
            job.state.assigned,
            pinned=is_pinned(job.state),
            suspended=job.phase is Phase.SUSPENDED,
            num_stages=job.state.num_stages,
            is_new=job.phase is Phase.CREATED,
        )

    def _note_doubt(self, job: str, doubt: str | None) -> None:
        """Say that a job's hints are left aside, once for every reason."""
        if doubt is None:
            self._doubted.pop(job, None)
        elif self._doubted.get(job) != doubt:
            self._doubted[job] = doubt
            _LOG.warning(
                "the hints of job %s %s; they are left aside, and it is planned for as if it had "
                "sent none",
                job,
                doubt,
            )

    def _attempt(
        self,
        decide: Callable[[Sequence[Candidate], Nodes, Strategy], list[Decision]],
        candidates: Sequence[Candidate],
    ) -> list[Decision]:
        try:
            with self._metrics.deciding():
                decisions = decide(candidates, self._nodes, self._strategy)
        except Exception:  # policies are other people's code
            self._metrics.policy_failures.inc()
            _LOG.exception("the policy failed, so all allocations stay as they are")
            return []
        self._metrics.decisions.inc(len(decisions))
        self._let(
            [
                (each.job, Allocate(each.nodes, each.why, each.details, each.num_stages))
                for each in decisions
            ]
        )
        return decisions

    def _queue_the_rest(self, candidates: Sequence[Candidate]) -> None:
        """Say of the jobs that have just come and got nothing why they wait."""
        waiting = [job for job in candidates if job.is_new and not job.allocation]
        if waiting:
            free = free_of(self._nodes, candidates)
            self._let(
                [
                    (job.name, Allocate((), explain(job.info, (), (), self._nodes, free)))
                    for job in waiting
                ]
            )

    def _let(self, events: Sequence[tuple[str, Allocate]]) -> None:
        if events:
            self._carry_out(events)
