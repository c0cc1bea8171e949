"""The ranks of jobs: the cost of a second of a job's work to all jobs that wait for it.

Symbols are those of `completion_time`:

    T_j     remaining work of job j, as its time plus its share of the cluster
    L_j     its remaining time alone, in the same configuration
    c_j     (age_j + L_j)^q      divided by the mean over all jobs
    rank_j  the sum of c over job j and all jobs with T / c of at least its own

With q = 0 every c is 1: a rank is the number of jobs that wait if shorter jobs go first. With q > 0
each waiting second is weighted by what it adds to the sum of JCT^(1 + q), where age_j + L_j stands
for the JCT: late jobs count more, and go before others with as much left. The order by T / c is
Smith's rule; with q = 1 it is highest response ratio next.

*Long* jobs are those with T / c above `LONG` times its mean over all jobs. Their order matters
little for the average, but much for the end of the last one: one after the other on many GPUs each
they scale worst. So all of them get the mean of their rank^a, and are trained side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from pipollux_policies.placement.node_choice import Floats, Ints

from .configurations import Instance, JobConfigurations

LONG = 2.0
"""A job is long from this multiple of the mean work left; jobs of similar lengths are not."""


class Units(NamedTuple):
    """The cost of a second of one-replica work, by job; 0.0 if no configuration has a speedup."""

    total: Floats
    """u: the job's own time plus the share of the cluster that it takes from others."""
    own: Floats


def unit_costs(instance: Instance) -> Units:
    """Return u of every job, and the part of it that is the job's own time."""
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
    """Return E[rank^a] of each job, with the power a and the tail q; long jobs get their mean."""
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
    """Return rank^a of each value, with that of long jobs replaced by their mean."""
    if not len(left):
        return powers
    likely = 1.0 / np.repeat(counts, counts)
    is_long = left > LONG * np.average(left, weights=likely)
    if is_long.any():
        powers = np.where(is_long, np.average(powers, weights=likely * is_long), powers)
    return powers


def _costs(ends: Floats, counts: Ints, tail: float) -> Floats:
    """Return c of each value: estimated age at completion to the power q, scaled."""
    if not tail or not len(ends):
        return np.ones(len(ends))
    # A job that is about to end still counts.
    ends = np.maximum(ends, 1.0)
    costs: Floats = (ends / ends.max()) ** tail
    costs /= _job_means(costs, counts).mean()
    return costs


def _job_means(values: Floats, counts: Ints) -> Floats:
    first = np.cumsum(counts) - counts
    means = np.empty(len(counts))
    for count in np.unique(counts).tolist():
        mine = np.flatnonzero(counts == count)
        means[mine] = values[first[mine, None] + np.arange(count)].mean(axis=1)
    return means


def _ranks(jobs: Sequence[JobConfigurations], left: Floats, costs: Floats, counts: Ints) -> Floats:
    """Return the expected rank of each value of the remaining work, in order of jobs. `left` is T /
    c and `costs` c of each value; `counts` the number of values of each job.
    """
    means = _job_means(costs, counts)
    turns = _turns(jobs)
    ranks = _others_with_more(left, costs, counts, turns)
    values = np.split(np.arange(len(left)), np.cumsum(counts)[:-1])
    for members in _families(jobs):
        oldest_first = sorted(members)  # as in `left`: ties count for the same jobs
        mine = np.concatenate([values[job] for job in oldest_first])
        # Members of a family have the same length: the one that has done most has least left.
        behind = np.cumsum(means[members][::-1])[::-1] - means[members]
        places = dict(zip(members, behind.tolist(), strict=True))
        more = np.array([places[job] for job in oldest_first])
        own = counts[oldest_first]
        among = _others_with_more(left[mine], costs[mine], own, turns[oldest_first])
        ranks[mine] += np.repeat(more, own) - among
    return costs + np.maximum(ranks, 0.0)  # cancellation may make sums of costs negative


def _families(jobs: Sequence[JobConfigurations]) -> list[list[int]]:
    """Return the members of each family of at least two, those that have done most first."""
    found: dict[str, list[int]] = {}
    # Ties: those that have held least come first, then the oldest.
    infos = [configs.job for configs in jobs]
    for job in sorted(
        range(len(jobs)),
        key=lambda job: (-infos[job].work_done, infos[job].attained_service, job),
    ):
        if jobs[job].job.family and jobs[job].job.work_left:
            found.setdefault(jobs[job].job.family, []).append(job)
    return [members for members in found.values() if len(members) > 1]


def _turns(jobs: Sequence[JobConfigurations]) -> Ints:
    """Return the order of jobs with equal work left; the last one has the highest rank. The last is
    the one that has done and held least, as most jobs are short, then the oldest.
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
    """Return, for each value, the expected costs of the other jobs with at least as much left.
    `turns` is the order of jobs with equal work left.
    """
    owner = np.repeat(np.arange(len(counts)), counts)
    share = costs / counts[owner]
    index = np.arange(left.size)
    order = np.lexsort((-index, turns[owner], -left))
    more = np.empty(left.size)
    more[order] = np.cumsum(share[order])
    # Leave out the job itself, by summing its own values in the same order.
    mine = order[np.argsort(owner[order], kind="stable")]
    own = np.concatenate([[0.0], np.cumsum(share[mine])])
    begin = np.repeat(np.cumsum(counts) - counts, counts)
    more[mine] -= own[1:] - own[begin]
    return more
