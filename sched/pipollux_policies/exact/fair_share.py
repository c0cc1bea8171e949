"""How far each job is from what its equal share of the cluster would have come to.

Finish-time fairness (Themis, NSDI'20) is rho = completion time / completion time alone on an equal
share. A promise of F >= 1 is that rho <= F for every job. Symbols, in seconds, of one job:

    a    its age
    N    jobs that are unfinished, averaged over its life: so far as it was, from now on as now
    s    its speedup on 1/N of the nodes that it can run on, in its best shape
    W    work that it has done, in seconds of one replica; L: work left
    c    what a start takes
    T    c + (W + L) / s           its whole time alone on an equal share
    E    a + c' + L / s            its age when it ends if it has its equal share from now on; c' is
                                   c, or 0 if it runs
    slack    how long it may go without before the promise breaks

A job is served only when it has to be, and then may have its share, as all can at once: jobs that
caught up faster would make each other late. So where L is known

    slack = F · T − E − reserve

Where nothing is known of L it is 0, and the promise is on progress: by now the job has done at
least what it would have done on its equal share in a life 1/F as long. If that holds at its end it
implies rho <= F, whatever the length was. Where only likely values are known (`JobInfo.work_left`)
the slack is by the shortest of them, and by F^`GUARD`: the shortest is too short for most jobs, so
that it hurries them all. What a job claims is by the quantile `LIKELY`.

A share between two numbers of replicas is the greater for a part of the time, and the smaller for
the rest; below the least that a job runs on it is that for a part of the time. So a little more or
less of N makes s a little less or more.

`claims` tells which jobs have no slack left. Each claims a speedup that brings it home in time, at
most that of its equal share; the one whose rho is to be the greatest at the next decision comes
first. One that runs counts as a turn later than it is, and so keeps its place for about as long
before the next one that does not fit beside it has its turn. One that no allocation brings home in
time claims its share.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pipollux_policies.job_info import JobInfo, NodeInfo, ReplicaShape

from .configurations import Instance, JobConfigurations, build_instance

RESERVE = 60.0
"""Seconds that a promise keeps back: the next decision is as late, and models are not exact."""
LIKELY = 0.5
"""Quantile of the likely values of the work left that stands for it."""
GUARD = 2
"""Power of F that is promised where lengths are only likely."""
TURN = 0.2
"""A job's turn is no longer than this share of its time alone."""
WORTH = 2.0
"""A job is made to change if that saves it so many times what the change costs."""
_TOLERANCE = 1e-9


class EqualShare(NamedTuple):
    """What one of N jobs gets of a cluster."""

    speedup: float
    replicas: int
    """The most that it has at a time."""
    slots: float
    """On average over time."""


@dataclass(frozen=True)
class FairStanding:
    """A job beside its equal share; the module's text has the symbols."""

    share: EqualShare
    alone: float
    """T."""
    finish: float
    """E."""
    time_left: float
    """From now to F · T, less the start that the job may need, and less the reserve."""
    slack: float
    promised: float
    """What rho is kept within: F, or its power where L is only likely."""
    margin: float
    """With so little slack the job comes first."""
    left: float
    """L."""
    knows_length: bool
    """Whether anything is known of L."""

    @property
    def comes_first(self) -> bool:
        """Whether it is served before completion times count."""
        return self.slack <= self.margin

    @property
    def fairness(self) -> float:
        """rho, if it has its equal share from now on."""
        return self.finish / self.alone


class FairClaim(NamedTuple):
    """A job that has no slack left, and the speedups that keep its promise."""

    job: int
    """Index into the instance's jobs."""
    wanted: float
    """That it is to have, in time for the reserve."""
    stays: float
    """With so much it is in time if it stays as it is."""
    moved: float
    """With so much it is in time, or no later, if its allocation changes."""
    urgency: float
    """The greatest comes first."""
    left: float
    """Work to come that a change would speed up."""
    least_saved: float
    """Seconds that a change of a running job is to save at least."""

    def is_worth(self, before: float, after: float) -> bool:
        """Tell whether a change from one speedup to another saves what it costs, and more."""
        saved = self.left / max(before, _TOLERANCE) - self.left / max(after, _TOLERANCE)
        return saved >= self.least_saved


def standing(
    instance: Instance, number: int, fairness: float, quantum: float
) -> FairStanding | None:
    """Return how far a job is from its equal share; None: it has no speedup anywhere.

    Args:
        instance: jobs and nodes.
        number: index of the job.
        fairness: F.
        quantum: the longest turn of a job, in seconds.
    """
    configs = instance.jobs[number]
    job, likely = configs.job, sorted(configs.job.likely_work) or [0.0]
    left = likely[int(LIKELY * len(likely))]
    share = _lifetime_share(instance, configs, left)
    if not share.speedup > 0:
        return None
    start = 0.0 if configs.runs else job.restart_seconds
    to_come, at_least = left / share.speedup, likely[0] / share.speedup
    so_far = job.restart_seconds + job.work_done / share.speedup
    alone, finish = max(so_far + to_come, 1.0), job.age + start + to_come
    deadline = fairness * alone - RESERVE
    promised = fairness**GUARD if len(likely) > 1 else fairness
    slack = promised * (so_far + at_least) - RESERVE - job.age - start - at_least
    return FairStanding(
        share=share,
        alone=alone,
        finish=finish,
        time_left=deadline - job.age - start,
        slack=slack,
        promised=promised,
        margin=_margin(configs, share, min(quantum, TURN * alone)),
        left=left,
        knows_length=bool(job.likely_work),
    )


def _lifetime_share(instance: Instance, configs: JobConfigurations, left: float) -> EqualShare:
    """Return the equal share by the jobs over a job's life, so far and to come."""
    job, now = configs.job, max(instance.num_jobs, 1)
    share = equal_share(instance, configs, now)
    if job.mean_jobs is None or not share.speedup > 0:
        return share
    to_come = left / share.speedup
    life = job.age + to_come
    mean = (job.mean_jobs * job.age + now * to_come) / life if life > 0 else now
    return equal_share(instance, configs, mean)


def _margin(configs: JobConfigurations, share: EqualShare, turn: float) -> float:
    """Return the slack with which a job comes first."""
    job = configs.job
    later = RESERVE + job.restart_seconds
    # It may have to grow towards its equal share, as it was measured on less.
    doublings = max(math.ceil(math.log2(share.replicas / job.max_replicas)), 0)
    return later * (1 + doublings) + (turn if configs.runs else 0.0)


def fair_standings(
    jobs: Mapping[Any, JobInfo],
    nodes: Mapping[Any, NodeInfo],
    base_allocations: Mapping[Any, Sequence[Any]],
    node_template: NodeInfo,
    fairness: float,
    quantum: float = 600.0,
) -> dict[Any, FairStanding]:
    """Return how far jobs are from their equal shares; those that are pinned have no standing.

    Args:
        jobs: all jobs that are not done, by name.
        nodes: all nodes, by name.
        base_allocations: what runs now.
        node_template: a node as could be rented.
        fairness: F.
        quantum: the longest turn of a job, in seconds.
    """
    instance = build_instance(jobs, nodes, base_allocations, node_template)
    found = (
        (configs.name, standing(instance, number, fairness, quantum))
        for number, configs in enumerate(instance.jobs)
    )
    return {name: stands for name, stands in found if stands is not None}


def equal_share(instance: Instance, configs: JobConfigurations, num_jobs: float) -> EqualShare:
    """Return what a job gets of the cluster as one of a number of jobs, in its best shape."""
    found = [EqualShare(0.0, 1, 0.0)]
    found += [_share(instance, configs, shape, num_jobs) for shape in configs.shapes]
    return max(found, key=lambda share: share.speedup)


def _share(
    instance: Instance, configs: JobConfigurations, shape: ReplicaShape, num_jobs: float
) -> EqualShare:
    nodes, job = instance.nodes, configs.job
    per_node, part = nodes.per_node(shape), nodes.share(shape)
    if not per_node or not part:
        return EqualShare(0.0, 1, 0.0)
    most = job.allowed_replicas or job.max_replicas
    most = most if shape.max_replicas is None else min(most, shape.max_replicas)
    equal = min(1.0 / (part * num_jobs), float(most))
    # Slightly less, so that a third of 48 slots is 16.
    above = max(math.ceil(equal - _TOLERANCE), job.least_replicas)
    below = above - 1 if above > job.least_replicas else 0
    above_for = (equal - below) / (above - below)
    speedup = above_for * _speedup(shape, above, per_node)
    if below:
        speedup += (1.0 - above_for) * _speedup(shape, below, per_node)
    return EqualShare(speedup, above, equal * shape.slots)


def _speedup(shape: ReplicaShape, replicas: int, per_node: int) -> float:
    return float(shape.speedup_fn(-(-replicas // per_node), replicas))


def claims(instance: Instance, fairness: float, quantum: float) -> list[FairClaim]:
    """Return the jobs that have no slack left, the most urgent first.

    Args:
        instance: jobs and nodes.
        fairness: F.
        quantum: the longest turn of a job, in seconds.
    """
    found = list(_claims(instance, fairness, quantum))
    return sorted(found, key=lambda claim: (-claim.urgency, claim.job))


def _claims(instance: Instance, fairness: float, quantum: float) -> Iterator[FairClaim]:
    for number, configs in enumerate(instance.jobs):
        stands = standing(instance, number, fairness, quantum)
        if stands is not None and stands.comes_first:
            turn = min(quantum, TURN * stands.alone) if configs.runs else 0.0
            later = RESERVE + configs.job.restart_seconds + turn
            share = stands.share.speedup
            if _is_lost(stands, configs):
                wanted, enough, later = share, share / fairness, 0.0
            else:
                wanted, enough = _claimed(stands, fairness)
            urgency = (stands.finish + later) / stands.alone
            price = WORTH * _change_seconds(configs)
            yield FairClaim(
                *(number, wanted, enough, max(enough, _moved(stands, configs)), urgency),
                *(_to_speed_up(stands, configs), price),
            )


def _is_lost(stands: FairStanding, configs: JobConfigurations) -> bool:
    """Tell whether a job is late whatever it gets from now on."""
    fastest = max(float(configs.speedup.max()), _TOLERANCE)
    return stands.knows_length and stands.time_left + RESERVE < stands.left / fastest


def _change_seconds(configs: JobConfigurations) -> float:
    return configs.job.change_seconds(live=configs.live_shape is not None)


def _to_speed_up(stands: FairStanding, configs: JobConfigurations) -> float:
    """Return the work to come; where it is not known, at least as much as was done."""
    return stands.left if stands.knows_length else max(stands.left, configs.job.work_done)


def _claimed(stands: FairStanding, fairness: float) -> tuple[float, float]:
    """Return the speedup that a job claims, and the least that is enough."""
    share, late = stands.share.speedup, stands.time_left + RESERVE
    if not stands.knows_length:
        return share, share / fairness if late > 0 else share
    wanted, enough = (_in_time(stands.left, time, share) for time in (stands.time_left, late))
    return wanted, enough


def _moved(stands: FairStanding, configs: JobConfigurations) -> float:
    """Return the least speedup with which a job that changes is in time, or no later for it.

    One that has more than its share may be made to change for those that have less.
    """
    # Also where it can be resized: to be moved as a whole it has to start again.
    change, share = configs.job.restart_seconds, stands.share.speedup
    has = 0.0 if configs.stay is None else float(configs.speedup[configs.stay])
    most = math.inf if 0 < has <= share else share
    in_time = _in_time(stands.left, stands.time_left + RESERVE - change * configs.runs, most)
    if not has:
        return in_time
    left = _to_speed_up(stands, configs)
    return min(in_time, _in_time(left, left / has - change, most))


def _in_time(left: float, seconds: float, most: float) -> float:
    """Return the speedup at which work is done in time, or the most."""
    return min(left / seconds, most) if seconds > 0 else most
