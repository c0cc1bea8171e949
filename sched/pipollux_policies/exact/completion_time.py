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
    rank_j  number of jobs with at least as much left as job j has, itself included; of long jobs,
            with more than `LONG` times the mean left, rank_j^a is the mean of theirs (`ranks`)
    w_j     u_j · E[rank_j^a]     0 <= a <= 1, `rank_power`
    D_j     seconds that a start or a restart of job j takes, or an elastic resize, measured
    H_j     seconds for which the job will use an allocation: what it has left on it, or how long
            an allocation lasts if that is less. That is taken to be the average so far,
            age / (changes + 1), as in Pollux's restart penalty, and at least `horizon`

rank_j is the number of jobs that wait for a second of job j's work if shorter jobs go first. With
a = 1 and linear speedups the greatest sum is shortest remaining processing time first, which is
optimal. With concave speedups the optimum (Berg, Vesilo & Harchol-Balter, *heSRPT*, 2020) also
depends on rank alone and shares the cluster more evenly, as this sum does, more so for a < 1. The
smaller a, the sooner the last of all jobs ends, as more of them train side by side on few GPUs
each, where they scale best; the others end later.

What is left of a job may be a distribution (`JobInfo.work_left`). Then rank_j is that of each of
its values: the number of other jobs that are expected to have at least as much left, and itself.
Jobs of a family are as long as each other, so that of two of them the one that has done more has
less left, however long both are: it gets more of the cluster, from a = 0.5 on all of it if they
scale well. w_j and the fraction H_j / (H_j + D_j) are means over the values. A job of which not
even that is known counts as the shortest: most are short.

With a `tail` q above 0, late jobs count more: those that wait are counted by what a second adds to
the sum of JCT^(1 + q), instead of all as one, and go before others of their length (`ranks`). It is
0 but where jobs with a choice of GPU share a type with jobs that have none: the longest of these
wait for all shorter ones, while other GPUs stand idle, and q is `SCARCE_TAIL`.

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
from dataclasses import dataclass

import numpy as np

from pipollux_policies.job_info import JobInfo
from pipollux_policies.placement.node_choice import Floats

from .configurations import Instance
from .fair_share import claims
from .objective import Held, ObjectiveValue
from .ranks import mean_powers, unit_costs
from .reservation import Behind, Floor, Reservations, grant, keep, least_slots
from .scarcity import charged, waiting_charges

MOST_TAIL = 10.0
"""The greatest `CompletionTime.tail`: beyond, only the oldest jobs would count."""
SCARCE_TAIL = 0.6
"""That where a type of GPU is scarce (`scarcity`), if nothing is said of it."""


@dataclass(frozen=True, kw_only=True)
class CompletionTime:
    """The objective of short completion times; see the module's text for every symbol.

    Raises:
        ValueError: a number is out of range; the message names it.
    """

    rank_power: float = 0.28
    """a: how much more short jobs count, 0 to 1. More: the average is shorter. Less: jobs share the
    cluster more evenly, and the last of them ends sooner."""
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
    that can be, or F² where lengths are only likely; None: no such promise, and only `part` is
    promised."""
    scarcity: float = 0.7
    """Share of what jobs that run on several types of GPU are charged for making those wait that
    run on one only; 0: nothing. More: long captive jobs end sooner, others later."""
    tail: float | None = None
    """q: how much more late jobs count, at most `MOST_TAIL`. 0: the average completion time is to
    be short; 1: that of their squares. More: the last jobs end sooner, most others later. None: 0,
    but `SCARCE_TAIL` while there are jobs that are charged for making others wait (`scarcity`)."""

    def __post_init__(self) -> None:
        for name in ("rank_power", "part"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: {getattr(self, name)} must be between 0 and 1")
        for name in ("horizon", "patience", "quantum", "scarcity"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: {getattr(self, name)} must be at least 0")
        if self.tail is not None and not 0 <= self.tail <= MOST_TAIL:
            raise ValueError(f"tail: {self.tail} must be between 0 and {MOST_TAIL:g}, or None")
        if self.fairness is not None and not 1 <= self.fairness < math.inf:
            raise ValueError(
                f"fairness: {self.fairness} must be a finite factor of at least 1, as in 1.25 for "
                "jobs that end at most a quarter later than on an equal share; or None"
            )

    def promise(self, instance: Instance) -> Reservations:
        """Return the jobs that are promised something, and where that fits."""
        if self.fairness is not None:
            # Of each equal share a part of at least 1/F: that is more than `part` of the least.
            return grant(instance, claims(instance, self.fairness, self.quantum), self.part)
        return keep(instance, self._behind(instance), self.part)

    def judge(self, instance: Instance, promises: Reservations) -> ObjectiveValue:
        """Return the gains of all jobs, weighted by rank."""
        unit = unit_costs(instance)
        charges = waiting_charges(instance)
        tail = self.tail
        if tail is None:
            tail = SCARCE_TAIL if charges.any() else 0.0
        powers = mean_powers(instance, unit, self.rank_power, tail)
        charges *= (self.scarcity * powers)[instance.table.shape_job]
        return _Worth(self, instance, unit.total * powers, promises, charges)

    def _behind(self, instance: Instance) -> list[Behind]:
        """Return the jobs that are to get or keep their least before others get more."""
        infos = [configs.job for configs in instance.jobs]
        due = self.part * (np.array([job.age for job in infos]) - self.patience)
        slots = least_slots(instance)
        held = np.array([job.attained_service for job in infos]) / np.maximum(slots, 1)
        turn = np.where([configs.runs for configs in instance.jobs], self.quantum, 0.0)
        behind = np.flatnonzero((due > 0) & (slots > 0) & (held < due + turn))
        late = (due - held)[behind]
        return [Behind(*entry) for entry in zip(behind.tolist(), late.tolist(), strict=True)]


class _Worth:
    def __init__(
        self,
        objective: CompletionTime,
        instance: Instance,
        weights: Floats,
        promises: Reservations,
        charges: Floats,
    ) -> None:
        self._objective, self._instance, self._weights = objective, instance, weights
        self._promises = promises
        self._charges = charges
        """What a replica of every shape is charged."""
        table = instance.table
        best = np.maximum.reduceat(table.speedup, table.first[:-1])
        self._everything = 1.0 + float(weights @ np.maximum(best, 0.0))

    def gains(self) -> Floats:
        table = self._instance.table
        gains: Floats = self._weights[table.job] * table.speedup
        charge = self._charges[table.shape] * table.replicas
        gains = charged(gains * self._all_kept(), charge)
        promised = np.array([*self._promises.places], dtype=np.int64)
        floors = [self._promises.floors.get(job, Floor()) for job in promised.tolist()]
        moved, stays = np.array(floors).reshape(-1, 2).T[::-1]
        least = np.full(len(self._instance.jobs), -np.inf)
        least[promised] = moved
        floor = least[table.job]
        least[promised] = stays
        floor[table.stay] = least[table.job[table.stay]]
        gains[table.speedup < floor] -= self._everything
        gains[table.first[promised]] = -self._everything
        return gains

    def moved(self, job: int, speedup: float, held: Held, *, live: bool = False) -> float:
        info = self._instance.jobs[job].job
        work = np.array(info.likely_work or (np.inf,))[:, None]
        seconds = info.change_seconds(live=live)
        kept = _kept(work, np.array([speedup]), self._lasts(info), seconds)
        shape = self._instance.table.first_shape[job] + held.shape
        charge = self._charges[shape] * held.replicas
        gain = charged(self._weights[job] * speedup * kept, charge)[0]
        broken = speedup < self._promises.floors.get(job, Floor()).moved
        return float(gain) - broken * self._everything

    def _all_kept(self) -> Floats:
        """Return `_kept` of every configuration."""
        table = self._instance.table
        infos = [configs.job for configs in self._instance.jobs]
        lasts = np.array([self._lasts(job) for job in infos])
        live, restarted = (
            np.array([job.change_seconds(live=live) for job in infos]) for live in (True, False)
        )
        seconds = np.where(table.live, live[table.job], restarted[table.job])
        work = [job.likely_work or (np.inf,) for job in infos]
        kept = np.empty(len(table.job))
        counts = np.array([len(values) for values in work], np.int64)
        for count in np.unique(counts).tolist():
            values = np.array([one for one in work if len(one) == count]).T
            row = np.cumsum(counts == count) - 1
            mine = np.flatnonzero(counts[table.job] == count)
            for some in np.array_split(mine, len(mine) * count // _AT_ONCE + 1):
                job = table.job[some]
                kept[some] = _kept(
                    np.ascontiguousarray(values[:, row[job]]),
                    table.speedup[some],
                    lasts[job],
                    seconds[some],
                )
        kept[table.stay] = 1.0
        return kept

    def _lasts(self, info: JobInfo) -> float:
        """Return for how long an allocation of a job is taken to last."""
        return max(self._objective.horizon, info.age / (info.num_changes + 1))


_AT_ONCE = 2**18
"""Numbers that are looked at together at most."""


def _kept(work: Floats, speedups: Floats, lasts: Floats | float, seconds: Floats | float) -> Floats:
    """Return the share of its time that an allocation trains, if it starts with a change.

    Args:
        work: equally likely values of what is left, in the rows.
        speedups: of allocations, in the columns.
        lasts: for how long each is taken to last.
        seconds: what the change costs.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        left = np.where(speedups > 0, work / speedups, np.inf)
    used = np.minimum(left, lasts)
    total = used + seconds
    shares: Floats = np.divide(used, total, out=np.ones_like(used), where=used > 0)
    kept: Floats = shares.mean(axis=0)
    return kept
