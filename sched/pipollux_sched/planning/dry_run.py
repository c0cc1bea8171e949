"""A dry run of a scheduler's next decision: the changes by job, and their reasons."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pipollux_policies import (
    DEFAULT_POLICY,
    POLICIES,
    Allocation,
    NodeInfo,
    make_policy,
    parse_policy,
    policy_text,
)
from pipollux_sched.allocator.decide import Decision, others_of, place_new, reallocate
from pipollux_sched.allocator.reasons import Others, explain
from pipollux_sched.allocator.snapshot import Snapshot
from pipollux_sched.allocator.strategy import (
    EvenStrategy,
    PolicyStrategy,
    SchedulableJob,
    Strategy,
    free_of,
)
from pipollux_sched.allocator.team_strategy import team_reasons, within_teams
from pipollux_sched.errors import SchedulerError
from pipollux_sched.store import Store
from pipollux_sched.views.cluster import serves_evenly, serving_options, serving_policy
from pipollux_sched.views.forecasts import job_forecast
from pipollux_sched.views.models import PlannedChange, PlanView


class PolicyFailedError(SchedulerError):
    """A policy failed; the message gives the reason."""


def live_plan(store: Store, policy: str | None = None, seed: int = 0) -> PlanView:
    """Return what the scheduler of a store would decide now; change nothing.

    `policy` is as of `parse_policy`. None: that of the present or last scheduler, whose options
    also apply if it is named without any.

    Raises:
        PolicyFailedError: the policy raised an error.
        ValueError: there is no such policy, or an option is invalid.
    """
    serving = serving_policy(store)
    name, chosen = parse_policy(policy or (serving if serving in POLICIES else DEFAULT_POLICY))
    if name == serving and not chosen:
        chosen = serving_options(store)
    strategy: Strategy = PolicyStrategy(make_policy(name, seed=seed, **chosen))
    if serves_evenly(store):
        strategy = EvenStrategy(strategy)
    state = Snapshot.read(store)
    try:
        planned = plan_live(state, strategy)
    except Exception as error:  # policies are user code
        logging.getLogger(__name__).debug("the policy failed", exc_info=True)
        raise PolicyFailedError(f"the policy {name} failed: {error}") from error
    if name == serving and chosen == serving_options(store):
        planned = _with_forecasts(planned, store)
    return PlanView(policy=policy_text(name, chosen), jobs=planned)


def _with_forecasts(planned: Sequence[PlannedChange], store: Store) -> list[PlannedChange]:
    """Add the forecasts, which are made under the scheduler's own policy."""
    latest = store.forecasts.latest()
    jobs = {job.name: job for job in store.jobs(unfinished=True)}
    return [
        replace(one, forecast=job_forecast(latest, jobs[one.job])) if one.job in jobs else one
        for one in planned
    ]


def plan_live(state: Snapshot, strategy: Strategy) -> list[PlannedChange]:
    """Return the planned allocation of every candidate; raise ValueError for an invalid result."""
    decided = {decision.job: decision for decision in preview(state, strategy)}
    after = [_given(job, decided.get(job.name), state.nodes) for job in state.candidates]
    free, others = free_of(state.nodes, after), others_of(after)
    waits = team_reasons(replace(state, candidates=tuple(after)))
    return [
        _change(old, new, decided.get(old.name), state.nodes, free, others, waits.get(old.name))
        for old, new in zip(state.candidates, after, strict=True)
    ]


def preview(state: Snapshot, strategy: Strategy) -> list[Decision]:
    """Return the decisions of `Allocator.run_once`, without applying them."""
    strategy, _ = within_teams(strategy, state)
    started = place_new(state.candidates, state.nodes, strategy)
    given = {decision.job: decision for decision in started}
    after = [_started(job, given.get(job.name)) for job in state.candidates]
    return [*started, *reallocate(after, state.nodes, strategy)]


def _started(job: SchedulableJob, decision: Decision | None) -> SchedulableJob:
    if decision is None:
        return job
    return replace(job, allocation=decision.nodes, num_stages=decision.num_stages, pinned=True)


def _given(
    job: SchedulableJob, decision: Decision | None, nodes: Mapping[str, NodeInfo]
) -> SchedulableJob:
    if decision is None:
        return job
    if not decision.nodes:
        return job.given((), nodes)
    told = next((s for s in job.info.all_shapes if s.num_stages == decision.num_stages), None)
    return job.given(Allocation(decision.nodes, told), nodes)


def _change(
    old: SchedulableJob,
    new: SchedulableJob,
    decision: Decision | None,
    nodes: Mapping[str, NodeInfo],
    free: Mapping[str, Mapping[str, int]],
    others: Others,
    team: str | None,
) -> PlannedChange:
    before, after = _prediction(old.held), _prediction(new.held)
    why = decision.why if decision else _why_unchanged(old, nodes, free, others)
    if team is not None:
        why = f"{'is suspended' if old.allocation else 'waits'}: {team}"
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
        why=why,
    )


def _why_unchanged(
    job: SchedulableJob,
    nodes: Mapping[str, NodeInfo],
    free: Mapping[str, Mapping[str, int]],
    others: Others,
) -> str:
    why = explain(job.info, job.held, job.held, nodes, free, others)
    return f"{why}; left alone for now" if job.pinned and job.allocation else why


def _prediction(held: Allocation) -> tuple[float | None, int | None]:
    known = held.configuration
    if known is None or not math.isfinite(known.speedup):
        return None, None
    return known.speedup, known.batch_size
