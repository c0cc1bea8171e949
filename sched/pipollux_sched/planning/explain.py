"""Explanations of allocations: the speedup of one replica more or fewer, and a job's limits.

A job is explained as the allocator sees it, so the predictions are those of the policy.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeAlias

import numpy as np

from pipollux_policies import (
    MEASURED_REACH,
    FairStanding,
    JobInfo,
    NodeInfo,
    ReplicaShape,
    SpeedupCallable,
    fair_standings,
    shape_of,
)
from pipollux_policies.allocations.allocation import network_level
from pipollux_policies.teams.ledger import why_no_more
from pipollux_sched.allocator.decide import others_of
from pipollux_sched.allocator.inherited_hints import WarmStart
from pipollux_sched.allocator.job_infos import count_fitting, linear_speedup, node_template
from pipollux_sched.allocator.reasons import NOBODY, Others, why_nothing
from pipollux_sched.allocator.snapshot import Snapshot
from pipollux_sched.allocator.strategy import SchedulableJob, free_of
from pipollux_sched.allocator.team_strategy import team_reasons, uses_of
from pipollux_sched.lifecycle import SCHEDULER_STOPPED, Intent, JobState, Phase, why_restart
from pipollux_sched.spec.job import JobSpec, parse_job
from pipollux_sched.spec.synchronization import synchronization
from pipollux_sched.store import JobRecord, Store
from pipollux_sched.views.changes import change_under_way
from pipollux_sched.views.cluster import node_levels, serving_options
from pipollux_sched.views.devices import problems
from pipollux_sched.views.explanation import (
    Alternative,
    ExplanationView,
    Limit,
    LimitKind,
    NetworkCost,
    NextChange,
)
from pipollux_sched.views.forecasts import job_forecast
from pipollux_sched.views.models import JobView
from pipollux_sched.views.network import level_between
from pipollux_sched.views.sweeps import with_progress
from pipollux_utils.text import count, seconds, spell_moment

MOST_DEVICES = 8
"""Number of GPUs that are named."""
Room: TypeAlias = Mapping[str, Mapping[str, int]]
"""The free resources of every node, by kind."""


@dataclass(frozen=True)
class ReplicaBounds:
    """The replicas that a job's user allows, and those it was measured on."""

    max_replicas: int
    """The user's limit; the policy may see a lower one."""
    max_profiled_replicas: int
    """Largest number of replicas that its step time was measured on; 0: never measured."""
    predecessor: str | None = None
    """The job that measured this; None: the job itself."""


@dataclass(frozen=True)
class Standing:
    """The explanation of a job's allocation."""

    speedup: float | None
    """Predicted speedup of its allocation; None: unknown."""
    batch_size: int | None
    more: Alternative | None
    """With one more replica; None if it has none."""
    fewer: Alternative | None
    """With one replica fewer; None if it would have none."""
    limits: tuple[Limit, ...]
    waits_for: str | None
    """What a job without slots waits for; None for a job with slots."""
    planned_by: str | None = None
    """The job whose hints it inherits; None: it has its own, or none."""
    network: tuple[NetworkCost, ...] = ()


def explanation(store: Store, job: JobRecord) -> ExplanationView:
    """Explain a job's allocation, or why it is queued; may raise `SpecError`."""
    found = _find_standing(store, job)
    decisions = store.latest_events(1, job=job.name, types=["allocated"])
    nodes, num_stages = JobView.of(job).holds
    (told,) = with_progress(store, [job])
    return ExplanationView(
        name=job.name,
        phase=job.phase,
        reason=job.state.reason,
        message=told.state.message,
        nodes=nodes,
        num_stages=num_stages,
        assigned=list(job.state.assigned),
        intent=job.state.intent if job.state.running_on else None,
        speedup=found.speedup,
        batch_size=found.batch_size,
        last_decision=decisions[-1] if decisions else None,
        changing=change_under_way(job.state),
        next_change=next_change(job.state),
        more=found.more,
        fewer=found.fewer,
        limits=list(found.limits),
        waits_for=found.waits_for,
        planned_by=found.planned_by,
        forecast=job_forecast(store.forecasts.latest(), job),
        synchronization=synchronization(
            store.hints().get(job.name), nodes, lambda: level_between(store, nodes)
        ),
        network=list(found.network),
    )


def next_change(state: JobState) -> NextChange | None:
    """Return whether the next change of a running job can be a resize; None: nothing runs.

    That requires a replica that stays in place, with the same number of stages.
    """
    if not state.running_on or state.intent is not None:
        return None
    why = why_restart(state, state.running_on, state.running_stages)
    return NextChange(why is None, why)


def _find_standing(store: Store, job: JobRecord) -> Standing:
    if job.phase.ended:
        return Standing(None, None, None, None, (), None)
    if job.phase is Phase.SUSPENDED and job.state.reason == SCHEDULER_STOPPED:
        return Standing(None, None, None, None, (), "the next scheduler: pipollux serve")
    found = _standing_of(store, job)
    lacks = found.waits_for is not None or any(
        limit.kind is LimitKind.NO_ROOM for limit in found.limits
    )
    left_out = _left_out(store, job.name, others=lacks)
    return replace(found, limits=(*found.limits, *islice(left_out, MOST_DEVICES)))


def _left_out(store: Store, job: str, *, others: bool) -> Iterator[Limit]:
    """Yield the GPUs with a problem that a job stays on, and then those that it lacks."""
    for node, device in sorted(problems(store), key=lambda one: one[1].job != job):
        text = f"{device.title} of {node}: {device.problem}."
        if device.job == job:
            yield Limit(LimitKind.LEFT_OUT, f"It stays on {text}")
        elif others:
            yield Limit(LimitKind.LEFT_OUT, f"No job may start on {text}")


def _standing_of(store: Store, job: JobRecord) -> Standing:
    pin = pinned_because(job.state)
    state = Snapshot.read(store)
    candidate = state.candidate(job.name)
    if candidate is None:
        if pin is not None and pin.kind is LimitKind.SUSPENDED:
            waits = f"its user: pipollux resume {job.name}"
        elif job.is_sweep:
            waits = f"its trials: pipollux sweeps {job.name}"
        elif job.state.waits_for:
            waits = "; ".join(str(entry) for entry in job.state.waits_for)
        else:
            waits = "its processes to end"
        limits: tuple[Limit, ...] = () if pin is None else (pin,)
        return Standing(None, None, None, None, limits, waits)
    spec = parse_job(job.spec)
    before = candidate.warm_start.predecessor if candidate.warm_start else None
    measured = _measured(store.hints().get(job.name), spec, candidate.warm_start)
    free = free_of(state.nodes, state.candidates)
    bounds = ReplicaBounds(spec.max_replicas, measured, before)
    found = standing(candidate, state.nodes, free, bounds, pin, others_of(state.candidates))
    promise = fair_limit(candidate, state, serving_options(store).get("fairness"))
    limits = found.limits if promise is None else (*found.limits, promise)
    network = tuple(network_costs(candidate, state.nodes, node_levels(store.nodes().values())))
    found = replace(found, limits=limits, planned_by=before, network=network)
    return _within_team(found, state, job.name)


def _within_team(found: Standing, state: Snapshot, job: str) -> Standing:
    waits = team_reasons(state).get(job)
    if waits is not None:
        return replace(found, waits_for=waits)
    told = list(found.limits)
    candidate = state.candidate(job)
    if candidate is not None and candidate.allocation:
        use = uses_of(state).get(candidate.info.team)
        more = shape_of(candidate.info, candidate.held, state.nodes).slots
        held = len(candidate.allocation) * more
        why = None if use is None else why_no_more(use, held, more)
        if why is not None:
            # The team's limits, not the value of replicas, keep the job from the free room.
            told = [limit for limit in told if limit.kind is not LimitKind.NOT_WORTH_IT]
            told.append(Limit(LimitKind.TEAM, why))
    due = state.notices.get(job)
    if due is not None:
        text = "Other teams want back what its team borrows; it has notice until "
        told.append(Limit(LimitKind.TEAM, f"{text}{spell_moment(due)}."))
    return replace(found, limits=tuple(told))


def standing(
    job: SchedulableJob,
    nodes: Mapping[str, NodeInfo],
    free: Room,
    bounds: ReplicaBounds,
    pin: Limit | None,
    others: Others = NOBODY,
) -> Standing:
    """Explain a job's allocation.

    `free` are the resources that all jobs together leave; `pin` is why the job is pinned, if so.
    """
    held = job.held
    if not job.allocation or held.shape is None:
        waits = why_nothing(job.info, nodes, free, others)
        return Standing(None, None, None, None, tuple(_told(pin)), waits)
    shape = held.shape
    more = _more(job.allocation, shape, nodes, free)
    fewer = _fewer(job.allocation, shape, nodes)
    limits = _limits(job, nodes, bounds, more, fewer, pin)
    speedup, batch_size = _worth(shape, job.allocation, nodes)
    return Standing(speedup, batch_size, more, fewer, tuple(limits), None)


def pinned_because(state: JobState) -> Limit | None:
    """Return why the allocator pins a job: see `snapshot.is_pinned`; None if it does not."""
    if state.suspended:
        return Limit(
            LimitKind.SUSPENDED, "Its user suspended it; it gets nothing until it is resumed."
        )
    if state.intent is not None and state.intent is not Intent.MOVE:
        return Limit(
            LimitKind.STOPPING, "It is being stopped, and keeps its allocation until then."
        )
    if state.running_on and state.intent is Intent.MOVE:
        return Limit(LimitKind.STOPPING, "It is being moved, and keeps its allocation until then.")
    if state.running_on and not state.training:
        text = "It is starting, and keeps its allocation until its first step or start_timeout."
        return Limit(LimitKind.STARTING, text)
    if state.phase is Phase.RESTARTING:
        text = "It waits after a failure, and is started again where it was."
        return Limit(LimitKind.WAITS_TO_RETRY, text)
    return None


def _told(pin: Limit | None) -> Iterator[Limit]:
    if pin is not None:
        yield pin


def _limits(
    job: SchedulableJob,
    nodes: Mapping[str, NodeInfo],
    bounds: ReplicaBounds,
    more: Alternative,
    fewer: Alternative | None,
    pin: Limit | None,
) -> Iterator[Limit]:
    yield from _told(pin)
    has = len(job.allocation)
    if not job.info.preemptible:
        yield Limit(
            LimitKind.NOT_PREEMPTIBLE, "It is not preemptible: what it runs on stays as it is."
        )
    draining = sorted({name for name in job.allocation if name in nodes and nodes[name].draining})
    if draining:
        stays = "; it ends there, as it is not preemptible" if not job.info.preemptible else ""
        yield Limit(LimitKind.DRAINING, f"{', '.join(draining)} drains{stays}.")
    yield from _upward(job.info, bounds, has, more, _worth_of(job, nodes), pin)
    if fewer is not None and has <= job.info.min_replicas:
        yield Limit(
            LimitKind.MIN_REPLICAS,
            f"With fewer than min_replicas ({job.info.min_replicas}) it would not run.",
        )


def _upward(
    info: JobInfo,
    bounds: ReplicaBounds,
    has: int,
    more: Alternative,
    now: float | None,
    pin: Limit | None,
) -> Iterator[Limit]:
    """Yield the first limit that keeps a job from one more replica."""
    if has >= bounds.max_replicas:
        yield Limit(LimitKind.MAX_REPLICAS, f"It has max_replicas ({bounds.max_replicas}).")
    elif has >= info.max_replicas:
        yield Limit(LimitKind.PROFILED, _profiled(info, bounds))
    elif more.speedup is not None and now is not None and more.speedup <= now * (1 + 1e-9):
        yield Limit(LimitKind.HARMFUL, f"{has + 1} replicas are predicted to be no faster.")
    elif not more.fits:
        yield Limit(LimitKind.NO_ROOM, "There is no room for one replica more.")
    elif pin is None and info.preemptible:
        # Its replicas stay in place, in the same shape.
        elastic = info.rescale_seconds is not None
        kind = "an elastic resize" if elastic else "a restart"
        cost = f"{kind}, which costs it {_cost(info.change_seconds(elastic=elastic))}"
        yield Limit(
            LimitKind.NOT_WORTH_IT,
            f"There is room for one replica more; the last decision held it not worth {cost}.",
        )


def _cost(value: float) -> str:
    return f"{value:.0f} s" if value >= 1 else seconds(value)


def _profiled(info: JobInfo, bounds: ReplicaBounds) -> str:
    if not bounds.max_profiled_replicas:
        return (
            f"Its step time was not measured yet, so it gets no more than {info.max_replicas} "
            "for now."
        )
    measured = bounds.max_profiled_replicas
    subject = f"Job {bounds.predecessor}'s" if bounds.predecessor else "Its"
    return (
        f"{subject} step time was measured on up to {measured} replica"
        f"{'' if measured == 1 else 's'}, and it gets at most {MEASURED_REACH} times as many "
        f"({info.max_replicas}) until it is on more."
    )


def _more(
    nodes_now: Sequence[str], shape: ReplicaShape, nodes: Mapping[str, NodeInfo], free: Room
) -> Alternative:
    """Return the job with one more replica, if there is room, preferably on its own nodes."""
    suited = {
        name: node for name, node in nodes.items() if shape.runs_on(node) and not node.draining
    }
    roomy = [name for name in suited if count_fitting(shape.resources, free.get(name, {})) > 0]
    # Without free slots, choose the nodes that would hold it if they were empty.
    able = [
        name
        for name, node in suited.items()
        if count_fitting(shape.resources, node.resources) > nodes_now.count(name)
    ]
    for places, fits in ((roomy, True), (able, False)):
        if places:
            node = max(places, key=lambda name: (nodes_now.count(name), name))
            return _alternative((*nodes_now, node), shape, nodes, fits=fits)
    return Alternative((), len(nodes_now) + 1, None, None, fits=False)


def _fewer(
    nodes_now: Sequence[str], shape: ReplicaShape, infos: Mapping[str, NodeInfo]
) -> Alternative | None:
    """Return the job without one replica, on the node with the fewest of them."""
    if len(nodes_now) <= 1:
        return None
    counts = Counter(nodes_now)
    left = list(nodes_now)
    left.remove(min(counts, key=lambda name: (counts[name], name)))
    return _alternative(tuple(left), shape, infos, fits=True)


def _alternative(
    nodes: tuple[str, ...], shape: ReplicaShape, infos: Mapping[str, NodeInfo], *, fits: bool
) -> Alternative:
    speedup, batch_size = _worth(shape, nodes, infos)
    return Alternative(nodes, len(nodes), speedup, batch_size, fits)


def _worth_of(job: SchedulableJob, infos: Mapping[str, NodeInfo]) -> float | None:
    shape = job.held.shape
    return None if shape is None else _worth(shape, job.allocation, infos)[0]


def _worth(
    shape: ReplicaShape, nodes: Sequence[str], infos: Mapping[str, NodeInfo]
) -> tuple[float | None, int | None]:
    """Return the speedup and batch size that the job's model predicts; None without a model."""
    speedup_fn = shape.speedup_at(network_level(nodes, infos))
    if speedup_fn is linear_speedup:
        return None, None
    speedup = _speedup(speedup_fn, len(set(nodes)), len(nodes))
    choose = getattr(speedup_fn, "configuration", None)
    size = choose(len(set(nodes)), len(nodes)).batch_size if choose else None
    return (speedup if math.isfinite(speedup) else None), size or None


def _speedup(speedup_fn: SpeedupCallable, num_nodes: int, num_replicas: int) -> float:
    value = speedup_fn(np.array([num_nodes]), np.array([num_replicas]))
    return float(np.asarray(value).reshape(-1)[0])


def network_costs(
    job: SchedulableJob, nodes: Mapping[str, NodeInfo], levels: Sequence[str]
) -> Iterator[NetworkCost]:
    """Yield what each level of the network costs a job in its present size, the narrowest first, on
    at least two nodes. `levels` are their names, the widest first.
    """
    held = job.held
    if held.shape is None or len(held) < 2 or held.shape.speedup_fn is linear_speedup:
        return
    there, num_nodes = set(held), max(len(set(held)), 2)
    names = [*reversed(levels), "cluster"]
    for level, name in enumerate(names, start=1):
        found = _speedup(held.shape.speedup_at(level), num_nodes, len(held))
        if math.isfinite(found):
            here = len(there) > 1 and network_level(held, nodes) == level
            yield NetworkCost(level, name, num_nodes, len(held), found, here)


def _measured(hints: Mapping[str, Any] | None, spec: JobSpec, warm_start: WarmStart | None) -> int:
    if warm_start is not None:
        return warm_start.hints.max_profiled_replicas
    if hints:
        return int(hints.get("maxProfiledReplicas", 0))
    return spec.hints.max_profiled_replicas if spec.hints else 0


def fair_limit(job: SchedulableJob, state: Snapshot, fairness: float | None) -> Limit | None:
    """Return the effect of a fairness promise (`CompletionTime.fairness`); None: it has none."""
    if fairness is None or not state.nodes:
        return None
    jobs = {one.name: one.info for one in state.candidates}
    held = {one.name: one.held for one in state.candidates if one.allocation}
    template = node_template(state.nodes)
    stands = fair_standings(jobs, state.nodes, held, template, fairness).get(job.name)
    return None if stands is None else Limit(LimitKind.FAIRNESS, spell_standing(stands))


def spell_standing(stands: FairStanding) -> str:
    """Describe a job compared with its equal share, as a sentence."""
    share = f"its equal share of {_slots(stands.share.slots)}"
    if stands.knows_length:
        late = f"with it from now on it ends {stands.fairness:.2f} times as late as on it alone"
    else:
        late = f"what it has done by now took {stands.fairness:.2f} times as long as on it alone"
    late += f", of {stands.promised:.4g} times that are promised"
    if stands.comes_first:
        return f"It gets {share} first: {late}."
    spare = seconds(stands.slack - stands.margin)
    return f"Others may come before {share} for {spare} yet: {late}."


def _slots(number: float) -> str:
    whole = round(number)
    return count(whole, "slot") if abs(number - whole) < 0.05 else f"{number:.1f} slots"
