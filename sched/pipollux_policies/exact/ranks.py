"""The ranks of jobs: what a second of a job's work costs all jobs that wait for it.

Symbols are those of `completion_time`:

    T_j     what is left of job j, in seconds of the job's time and of its share of the cluster
    L_j     what is left of it in its own time alone, in the same configuration
    c_j     (age_j + L_j)^q      over the mean of all jobs
    rank_j  the sum of c over job j and all with T / c of at least its own

With q = 0 all c are 1, and the rank is the number of jobs with at least as much left: if shorter
jobs go first, they are who waits for a second of job j's work. With q > 0 the sum is that of
seconds weighted by what they add to the sum of JCT^(1 + q), where age_j + L_j stands for the time
at which job j will complete: late jobs count more, and go before others that have as much left. The
order by T / c is Smith's rule, with q = 1 that of the highest response ratio next.

*Long* jobs are those with T / c above `LONG` times its mean over all jobs. In which order they are
trained matters little for the average, as each of them takes long, but much for when the last of
them ends: one after the other on many GPUs each they scale worst. So all have the same rank^a, the
mean of theirs, and are trained side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from pipollux_policies.placement.node_choice import Floats, Ints

from .configurations import Instance, JobConfigurations

LONG = 2.0
"""From how many times the mean of what jobs have left on a job is long. Jobs of a like length, as
those of a sweep, are none."""


class Units(NamedTuple):
    """What a second of one-replica work costs, by job; 0.0 if no configuration has a speedup."""

    total: Floats
    """u: in the job's own time and in the share of the cluster that it takes from others."""
    own: Floats
    """In its own time, in the same configuration."""


def unit_costs(instance: Instance) -> Units:
    """Return u of every job, and its part that is the job's own time."""
    table = instance.table
    fast = table.speedup > 0
    taken = instance.num_jobs * instance.share[table.shape] * table.replicas
    costs = np.divide(1.0 + taken, table.speedup, out=np.full(len(fast), np.inf), where=fast)
    first = table.first[:-1]
    least = np.minimum.reduceat(costs, first)
    some = np.logical_or.reduceat(fast, first)
    own = np.where(costs == least[table.job], 1.0 / np.where(fast, table.speedup, np.inf), 0.0)
    found = np.maximum.reduceat(own, first)
    return Units(np.where(some, least, 0.0), np.where(some, found, 0.0))


def mean_powers(instance: Instance, unit: Units, power: float, tail: float) -> Floats:
    """Return E[rank^a] of each job, where long ones have the mean of theirs.

    Args:
        instance: the jobs.
        unit: from `unit_costs`.
        power: a.
        tail: q.
    """
    jobs = instance.jobs
    work = [configs.job.likely_work or (0.0,) for configs in jobs]
    counts = np.array([len(values) for values in work], np.int64)
    values = np.array([*chain.from_iterable(work)])
    age = np.repeat([configs.job.age for configs in jobs], counts)
    costs = _costs(age + np.repeat(unit.own, counts) * values, counts, tail)
    left = np.repeat(unit.total, counts) * values / costs
    powers = _ranks(jobs, left, costs, counts) ** power
    return _job_means(_level(powers, left, counts), counts)


def _level(powers: Floats, left: Floats, counts: Ints) -> Floats:
    """Return rank^a of each value, that of long ones levelled: each its mean over all of them."""
    if not len(left):
        return powers
    likely = 1.0 / np.repeat(counts, counts)
    is_long = left > LONG * np.average(left, weights=likely)
    if is_long.any():
        powers = np.where(is_long, np.average(powers, weights=likely * is_long), powers)
    return powers


def _costs(ends: Floats, counts: Ints, tail: float) -> Floats:
    """Return c of each value: the ages at which jobs will complete to the power q, scaled."""
    if not tail or not len(ends):
        return np.ones(len(ends))
    # A job that is about to end at once still counts.
    ends = np.maximum(ends, 1.0)
    costs: Floats = (ends / ends.max()) ** tail
    costs /= _job_means(costs, counts).mean()
    return costs


def _job_means(values: Floats, counts: Ints) -> Floats:
    """Return the mean over each job's values."""
    first = np.cumsum(counts) - counts
    means = np.empty(len(counts))
    for count in np.unique(counts).tolist():
        mine = np.flatnonzero(counts == count)
        means[mine] = values[first[mine, None] + np.arange(count)].mean(axis=1)
    return means


def _ranks(jobs: Sequence[JobConfigurations], left: Floats, costs: Floats, counts: Ints) -> Floats:
    """Return the expected rank of each value of what each job has left, one job after the other.

    Args:
        jobs: the oldest first.
        left: T / c of each of their values.
        costs: c likewise.
        counts: how many values each job has.
    """
    means = _job_means(costs, counts)
    turns = _turns(jobs)
    ranks = _others_with_more(left, costs, counts, turns)
    values = np.split(np.arange(len(left)), np.cumsum(counts)[:-1])
    for members in _families(jobs):
        oldest_first = sorted(members)  # as in `left`: ties count for the same jobs
        mine = np.concatenate([values[job] for job in oldest_first])
        # As long as each other: the one that has done most has least left.
        behind = np.cumsum(means[members][::-1])[::-1] - means[members]
        places = dict(zip(members, behind.tolist(), strict=True))
        more = np.array([places[job] for job in oldest_first])
        own = counts[oldest_first]
        among = _others_with_more(left[mine], costs[mine], own, turns[oldest_first])
        ranks[mine] += np.repeat(more, own) - among
    return costs + np.maximum(ranks, 0.0)  # sums of costs that cancel may end below 0


def _families(jobs: Sequence[JobConfigurations]) -> list[list[int]]:
    """Return the members of each family of two and more, those that have done most first."""
    found: dict[str, list[int]] = {}
    # Of those that have done as much, those that have held least first, and of those the oldest.
    infos = [configs.job for configs in jobs]
    for job in sorted(
        range(len(jobs)),
        key=lambda job: (-infos[job].work_done, infos[job].attained_service, job),
    ):
        if jobs[job].job.family and jobs[job].job.work_left:
            found.setdefault(jobs[job].job.family, []).append(job)
    return [members for members in found.values() if len(members) > 1]


def _turns(jobs: Sequence[JobConfigurations]) -> Ints:
    """Return in which order jobs with equal work left come: the last one has the highest rank.

    That is the one that has done and held least, as most jobs are short, and of those the oldest.
    """
    infos = [configs.job for configs in jobs]
    order = sorted(
        range(len(jobs)),
        key=lambda job: (-infos[job].work_done, -infos[job].attained_service, -job),
    )
    turns = np.empty(len(jobs), np.int64)
    turns[order] = np.arange(len(jobs))
    return turns


def _others_with_more(left: Floats, costs: Floats, counts: Ints, turns: Ints) -> Floats:
    """Return the expected costs of other jobs with at least as much left, for each value.

    Args:
        left: by job, the oldest first, equally likely values.
        costs: of each value.
        counts: how many values each job has.
        turns: by job, which of those with equal work left comes first.
    """
    owner = np.repeat(np.arange(len(counts)), counts)
    share = costs / counts[owner]
    index = np.arange(left.size)
    order = np.lexsort((-index, turns[owner], -left))
    more = np.empty(left.size)
    more[order] = np.cumsum(share[order])
    # Without the job itself: its values so far, in that very order.
    mine = order[np.argsort(owner[order], kind="stable")]
    own = np.concatenate([[0.0], np.cumsum(share[mine])])
    begin = np.repeat(np.cumsum(counts) - counts, counts)
    more[mine] -= own[1:] - own[begin]
    return more
