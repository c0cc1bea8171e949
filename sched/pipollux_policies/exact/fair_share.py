"""Finish-time fairness: how far each job is from its result on an equal share of the cluster.

Finish-time fairness (Themis, NSDI'20) is rho = completion time / completion time alone on an equal
share. A promise of F >= 1 means rho <= F for every job. Symbols, in seconds, of one job:

    a    its age
    N    number of unfinished jobs, averaged over its life, with the present number for the future
    s    its speedup on 1/N of the nodes that it can run on, in its best shape
    W    work that it has done, in seconds of one replica; L: work left
    c    cost of a start
    T    c + (W + L) / s           its completion time alone on an equal share
    E    a + c' + L / s            its age at completion with its equal share from now on; c' is c,
                                   or 0 if it runs
    slack    how long it can go without an allocation before the promise breaks

A job is served only when necessary, and then gets at most its equal share: if late jobs caught up
faster, they would delay each other. So for a known L

    slack = F · T − E − reserve

For an unknown L, L counts as 0, and the promise is on progress: the job has done at least what it
would have done on its equal share in 1/F of its age. If that holds at its end, rho <= F for any
length. If only a distribution is known (`JobInfo.work_left`), the slack uses its shortest value,
and F^`GUARD`, as that is too short for most jobs and would make all of them urgent. The claim of a
job uses the quantile `LIKELY`.

A share between two numbers of replicas is the larger number for part of the time and the smaller
for the rest; below the least that a job runs on, it is that least for part of the time. So s is
continuous in N.

`claims` returns the jobs without slack. Each claims the speedup that completes it in time, at most
that of its equal share, or its equal share if none does. The job with the greatest expected rho at
the next decision comes first. A running job counts as one turn later than it is, so that it keeps
its place for about one turn before another job that does not fit beside it is served.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pipollux_policies.jobs.job_info import JobInfo, NodeInfo, ReplicaShape

from .configurations import Instance, JobConfigurations, build_instance

RESERVE = 60.0
"""Seconds that a promise keeps in reserve for the next decision and for model errors."""
LIKELY = 0.5
"""Quantile of the likely values of the work left that represents them."""
GUARD = 2
"""Power of F that is promised for lengths known only as distributions."""
TURN = 0.2
"""Longest turn of a job, as a share of its completion time alone."""
WORTH = 2.0
"""A job is changed only if that saves at least this many times the cost of the change."""
_TOLERANCE = 1e-9


class EqualShare(NamedTuple):
    """The equal share of one of N jobs."""

    speedup: float
    replicas: int
    """The most replicas at a time."""
    slots: float


@dataclass(frozen=True)
class FairStanding:
    """A job compared with its equal share; the module docstring defines the symbols."""

    share: EqualShare
    alone: float
    """T; `finish` is E."""
    finish: float
    time_left: float
    """F · T − now, less a start that the job may need and the reserve."""
    slack: float
    promised: float
    """The bound on rho: F, or its power if L is only a distribution."""
    margin: float
    """The slack at or below which the job comes first."""
    left: float
    knows_length: bool

    @property
    def comes_first(self) -> bool:
        """Whether it is served before completion times count."""
        return self.slack <= self.margin

    @property
    def fairness(self) -> float:
        """rho, if it has its equal share from now on."""
        return self.finish / self.alone


class FairClaim(NamedTuple):
    """A job without slack, and the speedups that keep its promise."""

    job: int
    wanted: float
    """The claimed speedup, which is in time with the reserve."""
    stays: float
    """The speedup with which it is in time on its current allocation."""
    moved: float
    """The speedup with which it is in time, or no later, after a change."""
    urgency: float
    """The greatest is served first."""
    left: float
    """Remaining work that a change would speed up."""
    least_saved: float
    """Seconds that a change of a running job must save."""

    def is_worth(self, before: float, after: float) -> bool:
        """Return whether a change between these speedups saves enough."""
        saved = self.left / max(before, _TOLERANCE) - self.left / max(after, _TOLERANCE)
        return saved >= self.least_saved


def standing(
    instance: Instance, number: int, fairness: float, quantum: float
) -> FairStanding | None:
    """Return a job compared with its equal share; None if it has no speedup anywhere. `fairness` is
    F, `quantum` the longest turn of a job in seconds.
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
    job, now = configs.job, max(instance.num_jobs, 1)
    share = equal_share(instance, configs, now)
    if job.mean_jobs is None or not share.speedup > 0:
        return share
    to_come = left / share.speedup
    life = job.age + to_come
    mean = (job.mean_jobs * job.age + now * to_come) / life if life > 0 else now
    return equal_share(instance, configs, mean)


def _margin(configs: JobConfigurations, share: EqualShare, turn: float) -> float:
    job = configs.job
    later = RESERVE + job.restart_seconds
    # It may have to grow towards its equal share, in doublings of the measured size.
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
    """Return jobs compared with their equal shares; pinned jobs are left out.

    Args:
        jobs: all jobs that are not done, by name.
        nodes: all nodes, by name.
        base_allocations: the current allocations.
        node_template: a node that could be rented.
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
    """Return the share of the cluster of one among a number of jobs, in its best shape."""
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
    # The tolerance makes a third of 48 slots 16.
    above = max(math.ceil(equal - _TOLERANCE), job.least_replicas)
    below = above - 1 if above > job.least_replicas else 0
    above_for = (equal - below) / (above - below)
    speedup = above_for * nodes.lone_speedup(shape, above)
    if below:
        speedup += (1.0 - above_for) * nodes.lone_speedup(shape, below)
    return EqualShare(speedup, above, equal * shape.slots)


def claims(instance: Instance, fairness: float, quantum: float) -> list[FairClaim]:
    """Return the jobs without slack, the most urgent first; arguments as of `standing`."""
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
    fastest = max(float(configs.speedup.max()), _TOLERANCE)
    return stands.knows_length and stands.time_left + RESERVE < stands.left / fastest


def _change_seconds(configs: JobConfigurations) -> float:
    return configs.job.change_seconds(elastic=configs.elastic_shape is not None)


def _to_speed_up(stands: FairStanding, configs: JobConfigurations) -> float:
    """Return the remaining work; if unknown, at least the work done so far."""
    return stands.left if stands.knows_length else max(stands.left, configs.job.work_done)


def _claimed(stands: FairStanding, fairness: float) -> tuple[float, float]:
    """Return the speedup that a job claims, and the least sufficient one."""
    share, late = stands.share.speedup, stands.time_left + RESERVE
    if not stands.knows_length:
        return share, share / fairness if late > 0 else share
    wanted, enough = (_in_time(stands.left, time, share) for time in (stands.time_left, late))
    return wanted, enough


def _moved(stands: FairStanding, configs: JobConfigurations) -> float:
    """Return the least speedup with which a job is in time, or no later, after a change. A job that
    has more than its share may be changed in favour of jobs that have less.
    """
    # A restart even for resizable jobs, because the whole job may have to move.
    change, share = configs.job.restart_seconds, stands.share.speedup
    has = 0.0 if configs.stay is None else float(configs.speedup[configs.stay])
    most = math.inf if 0 < has <= share else share
    in_time = _in_time(stands.left, stands.time_left + RESERVE - change * configs.runs, most)
    if not has:
        return in_time
    left = _to_speed_up(stands, configs)
    return min(in_time, _in_time(left, left / has - change, most))


def _in_time(left: float, seconds: float, most: float) -> float:
    """Return the speedup that completes the work in time, at most `most`."""
    return min(left / seconds, most) if seconds > 0 else most
