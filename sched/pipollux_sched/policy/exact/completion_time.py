"""The exact policy's own objective: short completion times, few restarts, no starvation.

The sum over jobs of

    gain_j = w_j · speedup_j · H_j / (H_j + D_j)     a job that stays as it is has no fraction

is the rate at which the jobs' total remaining time in the cluster falls. Symbols:

    J       number of jobs
    share   largest share of any resource of the cluster that one replica of job j holds
    R       replicas
    u_j     min over R of (1 + J · share · R) / speedup_j(R)
            what one second of one-replica work costs, in the job's own time and in the share of
            the cluster that it takes from others, in the cheapest configuration
    T_j     u_j · remaining work: what is left of the job, in the same unit
    rank_j  number of jobs with at least as much left as job j has, itself included
    w_j     u_j · E[rank_j^a]     0 <= a <= 1
    D_j     seconds that a start or a restart of job j takes, or a live change, measured
    H_j     seconds for which the job will use an allocation: what it has left on it, or how long
            an allocation lasts if that is less. That is taken to be the average so far,
            age / (changes + 1), as in Pollux's restart penalty, and at least `horizon`

rank_j is the number of jobs that wait for a second of job j's work if shorter jobs go first. With
a = 1 and linear speedups the greatest sum is shortest remaining processing time first, which is
optimal. With concave speedups the optimum (Berg, Vesilo & Harchol-Balter, *heSRPT*, 2020) also
depends on rank alone and shares the cluster more evenly, as this sum does, more so for a < 1.

What is left of a job may be a distribution (`JobInfo.work_left`). Then rank_j is that of each of
its values: the number of other jobs that are expected to have at least as much left, and itself.
Jobs of a family are as long as each other, so that of two of them the one that has done more has
less left, however long both are: they are trained one after the other, not side by side. w_j and
the fraction H_j / (H_j + D_j) are means over the values. A job of which not even that is known
counts as the shortest: most are short.

A job that runs on several types of GPU pays for slots of a type that others need, which run on no
other: `scarcity` · E[rank_j^a] times what `scarcity.waiting_charges` says. So it leaves them to
those others where it does nearly as well elsewhere.

No job starves: a job that has held less than its part of the fewest slots it needs,

    attained service < part · slots · (age − patience)

is behind. It gets its least configuration before other jobs get more, and keeps at least that until
it is `quantum` seconds ahead. As long as the least configurations of all such jobs fit the cluster
at once, every job holds slots for `part` of its life after the first `patience` seconds, up to one
interval between decisions. Where they do not fit, jobs take turns, the furthest behind first,
whatever their width (`promise`): one that came when the least of x clusters was behind waits

    patience + quantum / part · ((1 − part)^−x − 1)

seconds at most, x rounded up, as every turn lasts (quantum + part · (age − patience)) / (1 − part)
at most: 1270 s for x = 1, 4760 s for x = 5. A cluster is what holds replicas however badly they
are packed: of a node with C slots C − w + 1 for replicas of at most w.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipollux_sched.policy.placement.node_choice import Floats

from .configurations import NOTHING, Instance, JobConfigurations
from .fair_share import claims
from .objective import Held, Worth
from .promise import Behind, Floor, Promises, grant, keep, least_configurations
from .scarcity import charged, waiting_charges


@dataclass(frozen=True, kw_only=True)
class CompletionTime:
    """The objective of short completion times; see the module's text for every symbol.

    Raises:
        ValueError: a number is out of range; the message names it.
    """

    rank_power: float = 0.75
    """a."""
    horizon: float = 300.0
    """The least seconds for which an allocation is taken to last."""
    part: float = 0.1
    """Share of its life for which every job holds slots."""
    patience: float = 600.0
    """Seconds after submission from which on `part` is promised."""
    quantum: float = 600.0
    """Seconds for which a job that had to wait keeps its least configuration."""
    fairness: float | None = None
    """F: no job is to end later than F times as late as on its equal share (`fair_share`), where
    that can be; None: no such promise, and only `part` is promised."""
    scarcity: float = 0.7
    """Share of what jobs that run on several types of GPU are charged for making those wait that
    run on one only; 0: nothing. More: long captive jobs end sooner, others later."""

    def __post_init__(self) -> None:
        for name in ("rank_power", "part"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: {getattr(self, name)} must be between 0 and 1")
        for name in ("horizon", "patience", "quantum", "scarcity"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: {getattr(self, name)} must be at least 0")
        if self.fairness is not None and not 1 <= self.fairness < math.inf:
            raise ValueError(
                f"fairness: {self.fairness} must be a finite factor of at least 1, as in 1.25 for "
                "jobs that end at most a quarter later than on an equal share; or None"
            )

    def promise(self, instance: Instance) -> Promises:
        """Return the jobs that are promised something, and where that fits."""
        if self.fairness is not None:
            # Of each equal share a part of at least 1/F: that is more than `part` of the least.
            return grant(instance, claims(instance, self.fairness, self.quantum), self.part)
        found = (self._behind(instance, job) for job in range(len(instance.jobs)))
        return keep(instance, [entry for entry in found if entry is not None], self.part)

    def judge(self, instance: Instance, promises: Promises) -> Worth:
        """Return the gains of all jobs, weighted by rank."""
        unit = np.array([_unit_cost(instance, configs) for configs in instance.jobs])
        powers = [(rank**self.rank_power).mean() for rank in _ranks(instance.jobs, unit)]
        weights = unit * np.array(powers)
        waiting = waiting_charges(instance)
        charges = [self.scarcity * p * charge for p, charge in zip(powers, waiting, strict=True)]
        return _Worth(self, instance.jobs, weights, promises, charges)

    def _behind(self, instance: Instance, number: int) -> Behind | None:
        """Return the job if it is to get or keep its least configuration before others get more."""
        configs = instance.jobs[number]
        due = self.part * (configs.job.age - self.patience)
        if due <= 0:
            return None
        leasts = least_configurations(instance, number)
        if not leasts:
            return None
        held = configs.job.attained_service / leasts[0].slots
        quantum = self.quantum if configs.runs else 0.0
        return Behind(number, due - held) if held < due + quantum else None


class _Worth:
    def __init__(
        self,
        objective: CompletionTime,
        jobs: Sequence[JobConfigurations],
        weights: Floats,
        promises: Promises,
        charges: Sequence[Floats],
    ) -> None:
        self._objective, self._jobs, self._weights = objective, jobs, weights
        self._promises = promises
        self._charges = charges
        """What a replica of each shape of each job is charged."""
        best = [configs.speedup.max(initial=0.0) for configs in jobs]
        self._everything = 1.0 + float(weights @ np.array(best))

    def gains(self, job: int) -> Floats:
        configs = self._jobs[job]
        gains: Floats = self._weights[job] * configs.speedup
        kept = self._kept(job, configs.speedup, live=False)
        if configs.live_shape is not None:
            kept = np.where(configs.live, self._kept(job, configs.speedup, live=True), kept)
        if configs.stay is not None:
            kept[configs.stay] = 1.0
        gains = charged(gains * kept, self._charges[job][configs.shape] * configs.replicas)
        if job in self._promises.places:
            floor = self._promises.floors.get(job, Floor())
            least = np.full(len(gains), floor.moved)
            if configs.stay is not None:
                least[configs.stay] = floor.stays
            gains[configs.speedup < least] -= self._everything
            gains[NOTHING] = -self._everything
        return gains

    def moved(self, job: int, speedup: float, held: Held, *, live: bool = False) -> float:
        kept = self._kept(job, np.array([speedup]), live=live)
        charge = self._charges[job][held.shape] * held.replicas
        gain = charged(self._weights[job] * speedup * kept, charge)[0]
        broken = speedup < self._promises.floors.get(job, Floor()).moved
        return float(gain) - broken * self._everything

    def _kept(self, job: int, speedups: Floats, *, live: bool) -> Floats:
        """Return the share of its time that an allocation trains, if it starts with a change."""
        info = self._jobs[job].job
        work = np.array(info.likely_work or (np.inf,))[:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            left = np.where(speedups > 0, work / speedups, np.inf)
        lasts = max(self._objective.horizon, info.age / (info.num_changes + 1))
        used = np.minimum(left, lasts)
        total = used + info.change_seconds(live=live)
        shares: Floats = np.divide(used, total, out=np.ones_like(used), where=used > 0)
        kept: Floats = shares.mean(axis=0)
        return kept


def _ranks(jobs: Sequence[JobConfigurations], unit: Floats) -> list[Floats]:
    """Return the expected rank of each value of what each job has left."""
    left = [
        cost * np.array(configs.job.likely_work or (0.0,))
        for cost, configs in zip(unit, jobs, strict=True)
    ]
    ranks = _others_with_more(left)
    for members in _families(jobs):
        oldest_first = sorted(members)  # as in `left`: ties count for the same jobs
        inside = _others_with_more([left[job] for job in oldest_first])
        among = dict(zip(oldest_first, inside, strict=True))
        # As long as each other: the one that has done most has least left.
        for place, job in enumerate(members):
            ranks[job] += len(members) - 1 - place - among[job]
    return [1.0 + rank for rank in ranks]


def _families(jobs: Sequence[JobConfigurations]) -> list[list[int]]:
    """Return the members of each family of two and more, those that have done most first."""
    found: dict[str, list[int]] = {}
    # Of those that have done as much, the youngest first: most jobs are short.
    for job in sorted(range(len(jobs)), key=lambda job: (-jobs[job].job.work_done, -job)):
        if jobs[job].job.family and jobs[job].job.work_left:
            found.setdefault(jobs[job].job.family, []).append(job)
    return [members for members in found.values() if len(members) > 1]


def _others_with_more(left: Sequence[Floats]) -> list[Floats]:
    """Return how many other jobs are expected to have at least as much left, for each value.

    Args:
        left: by job, the oldest first, equally likely values in ascending order.
    """
    if not left:
        return []
    counts = np.array([values.size for values in left])
    owner = np.repeat(np.arange(len(left)), counts)
    share = 1.0 / counts[owner]
    values = np.concatenate(left)
    index = np.arange(values.size)
    # Of jobs with equal work left the younger has the higher rank: most jobs are short.
    order = np.lexsort((-index, owner, -values))
    more = np.empty(values.size)
    more[order] = np.cumsum(share[order])
    ends = np.cumsum(counts)
    more -= (np.repeat(ends, counts) - index) * share  # the job itself
    return np.split(more, ends[:-1])


def _unit_cost(instance: Instance, configs: JobConfigurations) -> float:
    """Return u of a job; 0.0 if none of its configurations has a speedup above 0."""
    shares = np.array([instance.nodes.share(shape) for shape in configs.shapes])
    fast = configs.speedup > 0
    taken = instance.num_jobs * shares[configs.shape[fast]] * configs.replicas[fast]
    return float(((1.0 + taken) / configs.speedup[fast]).min(initial=np.inf)) if fast.any() else 0.0
