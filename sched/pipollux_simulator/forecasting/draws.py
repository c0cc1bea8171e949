"""Random draws of what a forecast does not know: lengths and future jobs.

Each job has one stratified draw per sample (Latin hypercube sampling): with n samples, one value
lies in each n-th of its distribution, in random order. A few samples then cover the distributions
evenly. Draws depend on the seed and the job's name only, so that successive forecasts of a job
differ by what has changed, and not by chance.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from pipollux_policies import JobInfo

from .state import ForecastJob, ForecastState, ForecastSweep, JobKind

MOST_ARRIVALS = 200
"""Most future jobs of a sample."""
_LENGTH, _KIND, _ARRIVALS, _PLANNED, _STOP = 0, 2, 3, 4, 5


@dataclass(frozen=True)
class SampledJob:
    """One job of a sample, with what the forecast does not know."""

    name: str
    info: JobInfo
    """As its scheduler sees it at the start of the sample."""
    truth: JobInfo
    """Its speedups, which a scheduler knows once they are measured."""
    work: float
    """Its true remaining work; infinite: unknown."""
    is_measured: bool
    inherits: bool
    arrives: float
    factor: float = 1.0
    """On its work, by the errors of past running times."""


class Draws:
    """The draws of all samples of one forecast.

    Args:
        state: of the cluster.
        seed: of the draws.
        samples: number of samples.
    """

    def __init__(self, state: ForecastState, seed: int, samples: int) -> None:
        self._state = state
        self._seed = seed
        self._samples = samples
        self._kinds = [kind for kind in state.kinds if kind.work]
        running: dict[str, list[float]] = {}
        for error in state.errors:
            if error.running is not None:
                running.setdefault(error.family, []).append(error.running)
        self._factors = {family: math.exp(median(errors)) for family, errors in running.items()}
        self._own = {job.name: self._strata(job.name) for job in state.jobs}
        self._stops = self._places(_STOP).tolist()
        self._planned = {sweep.name: self._strata_of_planned(sweep) for sweep in state.sweeps}

    def jobs(self, sample: int) -> list[SampledJob]:
        """Return the unfinished jobs of a sample."""
        return [self._job(job, sample) for job in self._state.jobs]

    def _factor(self, job: ForecastJob) -> float:
        """Return the factor on a job's running time, by the errors of its family; 1: it trains.

        The median: how far lengths differ within a family is in the draws of lengths.
        """
        return self._factors.get(job.family, 1.0) if job.is_new else 1.0

    def planned(self, sample: int) -> dict[str, list[SampledJob]]:
        """Return the trials to come in a sample, by sweep; they share all but name and work."""
        found: dict[str, list[SampledJob]] = {}
        for sweep in self._state.sweeps:
            job, places = sweep.trial, self._planned[sweep.name]
            kind = self._kind(float(places[_KIND][sample]))
            truth = self._truth(job, kind)
            arrives = min(job.info.created, self._state.now)
            factor = self._factor(job)
            found[sweep.name] = [
                SampledJob(
                    f"{sweep.name} trial {number}",
                    job.info,
                    truth,
                    self._work(job.info, length, kind) * factor,
                    job.is_measured,
                    job.inherits,
                    arrives,
                )
                for number, length in enumerate(places[_LENGTH][:, sample].tolist())
            ]
        return found

    def arrivals(self, sample: int, until: float) -> list[SampledJob]:
        """Return the jobs of a sample that arrive later, up to a time.

        The rate is uncertain, too: it has the gamma distribution that follows from the number of
        recent arrivals (with Jeffreys' prior). So is the time when arrivals stop: after a spell of
        t seconds, they go on for x seconds more with probability t / (t + x), which holds if this
        moment is as likely in any part of the whole spell (Gott, 1993).
        """
        state = self._state
        if not state.arrival_seconds or not self._kinds:
            return []
        rng = np.random.default_rng([self._seed, _ARRIVALS, sample])
        rate = rng.gamma(state.num_arrivals + 0.5) / state.arrival_seconds
        found: list[SampledJob] = []
        moment, place = state.now, self._stops[sample]
        until = min(until, state.now + state.spell_seconds * place / (1 - place))
        while rate > 0 and len(found) < MOST_ARRIVALS:
            moment += rng.exponential(1 / rate)
            if moment > until:
                break
            kind = self._kinds[rng.integers(len(self._kinds))]
            work = quantile(kind.work, rng.random())
            name = f"arrival {len(found) + 1}"  # no job has a name with a space
            truth = kind.info
            found.append(SampledJob(name, truth, truth, work, True, kind.inherits, moment))
        return found

    def _strata(self, name: str) -> dict[int, list[float]]:
        found = {}
        for purpose in (_LENGTH, _KIND):
            found[purpose] = self._places(zlib.crc32(name.encode()), purpose).tolist()
        return found

    def _places(self, *purpose: int) -> np.ndarray:
        """Return one draw between 0 and 1 for each sample, stratified."""
        rng = np.random.default_rng([self._seed, *purpose])
        return (rng.permutation(self._samples) + rng.random(self._samples)) / self._samples

    def _strata_of_planned(self, sweep: ForecastSweep) -> dict[int, np.ndarray]:
        """Return the draws of all trials to come, lengths as rows; all are of one kind.

        Lengths are alike as long as nothing is known about the lengths of any: it is the length of
        the script that is not known then, which all trials run.
        """
        shape, known = (sweep.num_planned, self._samples), sweep.trial.info.likely_work
        strata = self._strata(sweep.name)
        if known:
            rng = np.random.default_rng([self._seed, zlib.crc32(sweep.name.encode()), _PLANNED])
            lengths = (rng.random(shape).argsort(axis=1) + rng.random(shape)) / self._samples
        else:
            lengths = np.tile(strata[_LENGTH], (sweep.num_planned, 1))
        return {_LENGTH: lengths, _KIND: np.array(strata[_KIND])}

    def _job(self, job: ForecastJob, sample: int) -> SampledJob:
        length, which = (self._own[job.name][k][sample] for k in (_LENGTH, _KIND))
        kind = self._kind(which)
        work, truth = self._work(job.info, length, kind), self._truth(job, kind)
        arrives, factor = min(job.info.created, self._state.now), self._factor(job)
        return SampledJob(
            *(job.name, job.info, truth, work * factor, job.is_measured, job.inherits, arrives),
            factor=factor,
        )

    def _kind(self, which: float) -> JobKind | None:
        return self._kinds[int(which * len(self._kinds))] if self._kinds else None

    def _work(self, info: JobInfo, length: float, kind: JobKind | None) -> float:
        if info.likely_work:
            return quantile(info.likely_work, length)
        return self._unknown_work(info, length, kind)

    def _truth(self, job: ForecastJob, kind: JobKind | None) -> JobInfo:
        if kind is None or job.is_measured:
            return job.info
        return replace(job.info, speedup_fn=kind.info.speedup_fn)

    def _unknown_work(self, info: JobInfo, place: float, kind: JobKind | None) -> float:
        """Return remaining work as of another job; without any, by how long it has trained.

        Then the remaining work given the work done follows Pareto's law, as in `policy.lengths`.
        """
        if kind is not None:
            left = [work - info.work_done for work in kind.work if work > info.work_done]
            if left:
                return quantile(left, place)
        return info.work_done * (1 / (1 - place) ** 2 - 1) if info.work_done else math.inf


def quantile(values: Sequence[float], place: float) -> float:
    """Return a quantile of equally likely values, between 0 and 1; linear between their centres.

    >>> quantile([1.0, 2.0, 3.0, 4.0], 0.5), quantile([1.0, 2.0, 3.0, 4.0], 0.0)
    (2.5, 1.0)
    """
    ordered = sorted(values)
    position = place * len(ordered) - 0.5
    below = min(max(math.floor(position), 0), len(ordered) - 1)
    above = min(below + 1, len(ordered) - 1)
    weight = min(max(position - below, 0.0), 1.0)
    if not weight or ordered[below] == ordered[above]:
        return ordered[below]
    return ordered[below] * (1 - weight) + ordered[above] * weight
