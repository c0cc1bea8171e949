"""The exact policy's own objective: short completion times, few moves, nobody left waiting.

The sum over jobs of

    gain_j = w_j · speedup_j · H_j / (H_j + D_j)     a job that stays as it is has no fraction

is how fast the time that jobs have still to spend in the cluster goes down. Symbols:

    J       number of jobs
    share   largest share of any resource of the cluster that one replica of job j holds
    R       replicas
    u_j     min over R of (1 + J · share · R) / speedup_j(R)
            what one second of one-replica work costs, in the job's own time and in the share of
            the cluster that it takes from others, in the configuration where that is least
    T_j     u_j · remaining work: what is left of the job, in the same unit
    rank_j  number of jobs with at least as much left as job j has, itself included
    w_j     u_j · rank_j^a        0 <= a <= 1
    D_j     seconds that a start or restart of job j takes, measured
    H_j     seconds for which the job is going to use what it gets: what it has left on that
            allocation, or what an allocation lasts if that is less, as allocations change. It is
            taken to last as long as the job's have until now on average, age / (restarts + 1), as
            Pollux's own restart penalty has it, and at least `horizon`

rank_j is the number of jobs that wait for a second of job j's work if the shorter are served first:
with a = 1 and speedups that are straight lines the greatest sum is the shortest remaining
processing time first, which is optimal; where speedups bend, the optimum (Berg, Vesilo &
Harchol-Balter, *heSRPT*, 2020) also goes by rank alone and shares the cluster more evenly, as this
sum does by itself and more so for a < 1. A job that does not say what it has left counts as the
shortest: most are, and those that are not tell as soon as they have measured themselves.

Nobody starves: a job that has held less than its part of the slots it needs at least,

    attained service < part · slots · (age − patience)

is behind. It gets something before anybody gets more, and is then left at least that until it is
`quantum` seconds ahead. So as long as what such jobs need at least fits the cluster at once, every
job holds slots for `part` of its life after the first `patience` seconds, up to one interval
between decisions. Where it does not fit, they take turns, whoever is the most seconds behind first,
however wide it is (`promise`): one that came when the least of x clusters was behind waits

    patience + quantum / part · ((1 − part)^−x − 1)

seconds at most, x rounded up, as every turn lasts (quantum + part · (age − patience)) / (1 − part)
at most: 1270 s for x = 1, 4760 s for x = 5. A cluster is what holds replicas however badly they
are packed: of a node with C slots C − w + 1 for replicas of at most w.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .configurations import NOTHING, Floats, Instance, JobOptions
from .objective import Worth
from .promise import Behind, Promises, keep, least_options


@dataclass(frozen=True, kw_only=True)
class CompletionTime:
    """The objective of short completion times; see the module's text for every symbol.

    Raises:
        ValueError: a knob is out of range; the message names it.
    """

    rank_power: float = 0.75
    """a."""
    horizon: float = 300.0
    """The least seconds for which an allocation is taken to last."""
    part: float = 0.1
    """Share of its life for which every job holds something."""
    patience: float = 600.0
    """Seconds after submission from when on that is promised."""
    quantum: float = 600.0
    """Seconds that a job which had to wait is left what it needs at least."""

    def __post_init__(self) -> None:
        for name in ("rank_power", "part"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: {getattr(self, name)} must be between 0 and 1")
        for name in ("horizon", "patience", "quantum"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: {getattr(self, name)} must be at least 0")

    def promise(self, instance: Instance) -> Promises:
        """Say which jobs are behind, and where there is room for the least that they need."""
        found = (self._behind(instance, job) for job in range(len(instance.jobs)))
        return keep(instance, [entry for entry in found if entry is not None], self.part)

    def judge(self, instance: Instance, promises: Promises) -> Worth:
        """Weigh all jobs against each other."""
        unit = np.array([_unit_cost(instance, options) for options in instance.jobs])
        known = [options.job.remaining_work for options in instance.jobs]
        left = unit * np.array([0.0 if work is None else work for work in known])
        # Of jobs that have as much left the younger has the higher rank: most jobs are short.
        order = np.argsort(-left, kind="stable")
        rank = np.empty(len(order))
        rank[order] = np.arange(1, len(order) + 1)
        weights = unit * rank**self.rank_power
        return _Worth(self, instance.jobs, weights, frozenset(promises.places))

    def _behind(self, instance: Instance, number: int) -> Behind | None:
        """Return a job that is to be given something, or left something, before others get more."""
        options = instance.jobs[number]
        due = self.part * (options.job.age - self.patience)
        if due <= 0:
            return None
        leasts = least_options(instance, number)
        if not leasts:
            return None
        held = options.job.attained_service / leasts[0].slots
        quantum = self.quantum if options.runs else 0.0
        return Behind(number, due - held) if held < due + quantum else None


class _Worth:
    def __init__(
        self,
        knobs: CompletionTime,
        jobs: Sequence[JobOptions],
        weights: Floats,
        promised: frozenset[int],
    ) -> None:
        self._knobs, self._jobs, self._weights = knobs, jobs, weights
        self._promised = promised
        best = [options.speedup.max(initial=0.0) for options in jobs]
        self._everything = 1.0 + float(weights @ np.array(best))

    def gains(self, job: int) -> Floats:
        options = self._jobs[job]
        gains: Floats = self._weights[job] * options.speedup
        kept = self._kept(job, options.speedup)
        if options.stay is not None:
            kept[options.stay] = 1.0
        gains = gains * kept
        if job in self._promised:
            gains[NOTHING] = -self._everything
        return gains

    def moved(self, job: int, speedup: float) -> float:
        kept = self._kept(job, np.array([speedup]))[0]
        return float(self._weights[job] * speedup * kept)

    def _kept(self, job: int, speedups: Floats) -> Floats:
        """Return what part of its time an allocation trains, if it starts with a restart."""
        info = self._jobs[job].job
        work = np.inf if info.remaining_work is None else info.remaining_work
        with np.errstate(divide="ignore", invalid="ignore"):
            left = np.where(speedups > 0, work / speedups, np.inf)
        lasts = max(self._knobs.horizon, info.age / (info.num_restarts + 1))
        used = np.minimum(left, lasts)
        return np.divide(used, used + info.restart_seconds, out=np.ones_like(used), where=used > 0)


def _unit_cost(instance: Instance, options: JobOptions) -> float:
    """Return u of a job; 0.0 if nothing that it could get makes it faster than standing still."""
    shares = np.array([instance.nodes.share(shape) for shape in options.shapes])
    fast = options.speedup > 0
    taken = instance.num_jobs * shares[options.shape[fast]] * options.replicas[fast]
    return float(((1.0 + taken) / options.speedup[fast]).min(initial=np.inf)) if fast.any() else 0.0
