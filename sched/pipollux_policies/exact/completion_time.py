"""The default objective of the exact policy: short completion times, few restarts, no starvation.

The sum over jobs of

    gain_j = w_j · speedup_j · H_j / (H_j + D_j)     without the fraction for an unchanged job

is the rate at which the total remaining time of all jobs in the cluster falls. Symbols:

    J, R    number of jobs, replicas
    share   largest share of any cluster resource that one replica of job j holds
    u_j     min over R of (1 + J · share · R) / speedup_j(R)
            the cost of one second of one-replica work in the cheapest configuration: the job's own
            time plus the share of the cluster that it takes from others
    T_j     u_j · remaining work of job j, in the same unit
    rank_j  number of jobs with at least as much left as job j, itself included; rank_j^a of long
            jobs (more than `LONG` times the mean left) is the mean over all long jobs (`ranks`)
    w_j     u_j · E[rank_j^a]     0 <= a <= 1, `rank_power`
    D_j     measured seconds of a start or restart of job j, or of an elastic resize
    H_j     seconds for which the job will use an allocation: its remaining time on it, or the
            expected life of an allocation if that is shorter: the average so far, age /
            (changes + 1), as in Pollux's restart penalty, and at least `horizon`

If shorter jobs go first, rank_j is the number of jobs that wait for each second of job j's work.
With a = 1 and linear speedups, the greatest sum is shortest remaining processing time first, which
is optimal. With concave speedups the optimum (Berg, Vesilo & Harchol-Balter, *heSRPT*, 2020) also
depends on rank alone and shares the cluster more evenly, as this sum does, the more so for a < 1.
The smaller a, the sooner the last job ends, because more jobs train side by side on few GPUs each,
where they scale best; the other jobs end later.

If the remaining work is a distribution (`JobInfo.work_left`), each of its values has a rank: the
expected number of other jobs with at least as much left, plus one. w_j and H_j / (H_j + D_j) are
means over the values. Of the jobs of a family, which have the same length, the one that has done
more gets more of the cluster: all of it from a = 0.5 on, if the jobs scale well. A job of unknown
length and without a distribution counts as the shortest, because most jobs are short.

With a `tail` q > 0, late jobs count more (`ranks`). By default q is 0, or `SCARCE_TAIL` while jobs
with a choice of GPU types share a type with jobs that have none: the longest of the latter would
wait for all shorter ones while other GPUs stand idle. A job with a choice pays for slots of a type
that other jobs depend on: `scarcity` · E[rank_j^a] times the charge of `scarcity.waiting_charges`.

No job starves. A job is behind if it has held less than its part of the fewest slots it needs:

    attained service < part · slots · (age − patience)

It gets its least configuration before other jobs get more, and keeps at least that until it is
`quantum` seconds ahead. While the least configurations of all jobs that are behind fit the cluster
together, every job holds slots for `part` of its life after the first `patience` seconds, up to one
interval between decisions. Otherwise jobs take turns, the furthest behind first, whatever their
width (`promise`). A turn lasts at most (quantum + part · (age − patience)) / (1 − part), so a job
that arrives when the least configurations of x clusters are behind waits at most

    patience + quantum / part · ((1 − part)^−x − 1)

seconds, x rounded up: 1270 s for x = 1, 4760 s for x = 5. One cluster here is the number of
replicas that fit however badly they are packed: C − w + 1 slots of a node with C slots, for
replicas of at most w slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field

from pipollux_policies.jobs.job_info import JobInfo
from pipollux_policies.options import options_of
from pipollux_policies.placement.node_choice import Floats, Ints

from .configurations import Instance
from .fair_share import claims
from .objective import Held, ObjectiveValue
from .ranks import mean_powers, unit_costs
from .reservation import Behind, Floor, Reservations, grant, keep, least_slots
from .scarcity import charged, waiting_charges

MOST_TAIL = 10.0
"""The greatest `CompletionTime.tail`: above it, only the oldest jobs would count."""
SCARCE_TAIL = 0.6
"""Default of `CompletionTime.tail` while a type of GPU is scarce (`scarcity`)."""


@dataclass(frozen=True, kw_only=True)
class CompletionTime:
    """The objective of short completion times; the module docstring defines the symbols."""

    rank_power: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="a, the weight of short jobs. Higher: shorter average completion time. "
            "Lower: jobs share the cluster more evenly, and the last one ends sooner.",
        ),
    ] = 0.28
    horizon: Annotated[
        float, Field(ge=0, description="Least expected life of an allocation, in seconds.")
    ] = 300.0
    part: Annotated[
        float, Field(ge=0, le=1, description="Share of its life for which every job holds slots.")
    ] = 0.1
    patience: Annotated[
        float, Field(ge=0, description="Seconds after submission from which `part` is promised.")
    ] = 600.0
    quantum: Annotated[
        float,
        Field(
            ge=0,
            description="Seconds for which a job that had to wait keeps its least configuration.",
        ),
    ] = 600.0
    fairness: Annotated[
        float | None,
        Field(
            ge=1,
            description="F: no job may end later than F times its completion time on an equal "
            "share of the cluster, where possible; F² for lengths known only as distributions. "
            "none: only `part` is promised.",
            examples=[1.25],
        ),
    ] = None
    scarcity: Annotated[
        float,
        Field(
            ge=0,
            description="Share of the charge that jobs with several types of GPU pay for making "
            "others wait; 0: none. Higher: long captive jobs end sooner, others later.",
        ),
    ] = 0.7
    tail: Annotated[
        float | None,
        Field(
            ge=0,
            le=MOST_TAIL,
            description="q, the weight of late jobs. 0: minimize the average completion time; 1: "
            "the average of its square. Higher: the last jobs end sooner, most others later. "
            f"none: 0, or {SCARCE_TAIL} while any job pays a charge (`scarcity`).",
            examples=[1.0],
        ),
    ] = None

    def __post_init__(self) -> None:
        for name, option in options_of(CompletionTime).items():
            object.__setattr__(self, name, option.check(getattr(self, name)))

    @property
    def options(self) -> dict[str, Any]:
        """The options that differ from the default."""
        values = {name: getattr(self, name) for name in options_of(CompletionTime)}
        return {
            name: value
            for name, value in values.items()
            if value != options_of(CompletionTime)[name].default
        }

    def promise(self, instance: Instance) -> Reservations:
        """Return the promises to jobs, and the places where they fit."""
        if self.fairness is not None:
            # At least 1/F of each equal share, which is more than `part` of the least
            # configuration.
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
        table = instance.table
        best = np.maximum.reduceat(table.speedup, table.first[:-1])
        self._everything = 1.0 + float(weights @ np.maximum(best, 0.0))

    def gains(self) -> Floats:
        table = self._instance.table
        kept = self._kept_of(np.arange(len(table.job)), table.speedup)
        kept[table.stay] = 1.0
        gains = self._charged(slice(None), table.speedup, kept)
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

    def moved(self, job: int, speedup: float, held: Held, *, elastic: bool = False) -> float:
        info = self._instance.jobs[job].job
        work = np.array(info.likely_work or (np.inf,))[:, None]
        seconds = info.change_seconds(elastic=elastic)
        kept = _kept(work, np.array([speedup]), self._lasts(info), seconds)
        shape = self._instance.table.first_shape[job] + held.shape
        charge = self._charges[shape] * held.replicas
        gain = charged(self._weights[job] * speedup * kept, charge)[0]
        broken = speedup < self._promises.floors.get(job, Floor()).moved
        return float(gain) - broken * self._everything

    def moved_all(self, configs: Ints, speedups: Floats) -> Floats:
        gains = self._charged(configs, speedups, self._kept_of(configs, speedups))
        if not self._promises.floors:
            return gains
        job = self._instance.table.job[configs].tolist()
        least = [self._promises.floors.get(one, Floor()).moved for one in job]
        return gains - (speedups < np.array(least)) * self._everything

    def _charged(self, configs: Ints | slice, speedups: Floats, kept: Floats) -> Floats:
        """Return the gains of configurations with these speedups, without promises."""
        table = self._instance.table
        charge = self._charges[table.shape[configs]] * table.replicas[configs]
        return charged(self._weights[table.job[configs]] * speedups * kept, charge)

    def _kept_of(self, configs: Ints, speedups: Floats) -> Floats:
        """Return `_kept` of changes to configurations with these speedups."""
        table, of_jobs = self._instance.table, self._of_jobs
        jobs = table.job[configs]
        seconds = np.where(table.elastic[configs], of_jobs.resized[jobs], of_jobs.restarted[jobs])
        kept = np.empty(len(jobs))
        for count, values in of_jobs.work.items():
            mine = np.flatnonzero(of_jobs.counts[jobs] == count)
            for some in np.array_split(mine, len(mine) * count // _AT_ONCE + 1):
                job = jobs[some]
                kept[some] = _kept(
                    np.ascontiguousarray(values[:, of_jobs.row[job]]),
                    speedups[some],
                    of_jobs.lasts[job],
                    seconds[some],
                )
        return kept

    @cached_property
    def _of_jobs(self) -> _OfJobs:
        infos = [configs.job for configs in self._instance.jobs]
        work = [job.likely_work or (np.inf,) for job in infos]
        counts = np.array([len(values) for values in work], np.int64)
        row = np.zeros(len(infos), np.int64)
        by_count = {}
        for count in np.unique(counts).tolist():
            by_count[count] = np.array([one for one in work if len(one) == count]).T
            row[counts == count] = np.arange(by_count[count].shape[1])
        resized, restarted = (
            np.array([job.change_seconds(elastic=elastic) for job in infos])
            for elastic in (True, False)
        )
        lasts = np.array([self._lasts(job) for job in infos])
        return _OfJobs(lasts, resized, restarted, counts, row, by_count)

    def _lasts(self, info: JobInfo) -> float:
        return max(self._objective.horizon, info.age / (info.num_changes + 1))


_AT_ONCE = 2**18


class _OfJobs(NamedTuple):
    """Numbers of the jobs that decide how long an allocation trains."""

    lasts: Floats
    """(J,): expected life of an allocation."""
    resized: Floats
    """(J,): seconds of an elastic resize."""
    restarted: Floats
    """(J,): seconds of a start or restart."""
    counts: Ints
    """(J,): W, the number of values of the remaining work."""
    row: Ints
    """(J,): index of each job into the columns of `work[W]`."""
    work: dict[int, Floats]
    """(W, number of jobs with W values): remaining work."""


def _kept(work: Floats, speedups: Floats, lasts: Floats | float, seconds: Floats | float) -> Floats:
    """Return the share of its time that an allocation trains, if it starts with a change.

    Rows are equally likely values of the remaining work, columns allocations, each with its
    expected life and the cost of the change, in seconds.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        left = np.where(speedups > 0, work / speedups, np.inf)
    used = np.minimum(left, lasts)
    total = used + seconds
    shares: Floats = np.divide(used, total, out=np.ones_like(used), where=used > 0)
    kept: Floats = shares.mean(axis=0)
    return kept
