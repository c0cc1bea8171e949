"""Estimation of step time parameters of a pipeline job from observed step times, for any cut.

T_pipe of every cut is predicted from the known layers and corrected by one ratio per cut, the mean
of log(observed / predicted); cuts that never ran use the mean of those that ran on the same type of
GPU. The network is fitted as in Pollux (`fit_perf_params`), over all cuts together: the observed
T_pipe of each point is passed to the fit as the size of the point, so that only network and γ
remain to be found. Unobserved regimes stay free, so that more replicas are tried. A fit is repeated
if later times deviate by over 4 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pipollux_perfmodel import PerfParams, StagePlan, StepTime, fit_perf_params
from pipollux_perfmodel.timing.params import Checkpoints
from pipollux_perfmodel.timing.step_time import step_time

from .base import RunningJob, TrueStepTimes
from .pipeline_job import UNKNOWN, PipelineJob, price

_UNIT = 1e6  # of the sizes that represent seconds in the network's fit: well above the minimum, 1
_MAX_POINTS = 48  # latest points; a fit of more takes longer without a different result


@dataclass
class _Seen:
    """Step times on one type of GPU, by configuration, in order of their first observation."""

    points: dict[RunningJob, TrueStepTimes] = field(default_factory=dict)
    network: PerfParams | None = None
    """Of the last fit; None: needs a new fit."""


class StepTimeLearner:
    """Step time parameters of a job's cuts, from its layers and observed step times."""

    def __init__(self, job: PipelineJob) -> None:
        self._job = job
        self._seen: dict[str, _Seen] = {}
        self._known: dict[tuple[int, str, Checkpoints], PerfParams] = {}

    def inherit(self, others: Sequence[StepTimeLearner]) -> bool:
        """Add the observations of others; return whether any of them is new."""
        new = False
        for other in others:
            for name, theirs in other._seen.items():
                seen = self._seen.setdefault(name, _Seen())
                more = {x: times for x, times in theirs.points.items() if x not in seen.points}
                if more:
                    seen.points |= more
                    seen.network, new = None, True
        if new:
            self._known.clear()
        return new

    def observe(self, running: RunningJob, times: TrueStepTimes) -> bool:
        """Record step times, above 0; return whether parameters returned before deviate."""
        if not (times.accum_step > 0 and times.optim_step > 0):
            raise ValueError(f"times: {times} must be above 0 s")
        device = self._job.device(running.gpu_type)
        # Neither accumulation nor the order of nodes changes the time of a step.
        running = replace(running, placement=tuple(sorted(running.placement)), accum_steps=0)
        seen = self._seen.setdefault(device.name, _Seen())
        if seen.points.get(running) == times:
            return False
        params = self.params(self._job.way(running), device.name)
        missed = times.differ(_step_time(params, running))
        seen.points[running] = times
        if missed:
            seen.network = None
            self._known.clear()
        return missed

    def params(self, plan: StagePlan, gpu_type: str) -> PerfParams:
        """Return the parameters of a cut, one of `PipelineJob.ways`, on a type of GPU."""
        device = self._job.device(gpu_type)
        num_stages, checkpoint = len(plan.balance), plan.perf_params.checkpoint
        key = num_stages, device.name, checkpoint
        if key not in self._known:
            network = self._network(device.name)
            priced = price(plan.profile, plan.balance, device, network, checkpoint)
            ratio = self._ratio(num_stages, device.name)
            self._known[key] = priced._replace(
                alpha_c=priced.alpha_c * ratio, beta_c=priced.beta_c * ratio
            )
        return self._known[key]

    def _ratio(self, num_stages: int, gpu_type: str) -> float:
        """Return the slowdown of a cut over its prediction; of other cuts if it never ran."""
        logs: dict[int, list[float]] = {}
        seen = self._seen.get(gpu_type, _Seen())
        for running, times in seen.points.items():
            priced = self._job.way(running).perf_params
            seconds = _step_time(priced, running).accum_time
            logs.setdefault(running.num_stages, []).append(math.log(times.accum_step / seconds))
        means = {k: math.fsum(values) / len(values) for k, values in logs.items()}
        if num_stages in means:
            return math.exp(means[num_stages])
        return math.exp(math.fsum(means.values()) / len(means)) if means else 1.0

    def _network(self, gpu_type: str) -> PerfParams:
        """Return network and γ on a type of GPU; of another type without observations on it."""
        seen = self._seen.get(gpu_type, _Seen())
        if not _several(seen):
            seen = next(filter(_several, self._seen.values()), _Seen())
        if not _several(seen):
            return UNKNOWN
        if seen.network is None:
            seen.network = fit_network(seen.points)
        return seen.network


def fit_network(points: dict[RunningJob, TrueStepTimes]) -> PerfParams:
    """Return network and γ that explain the latest optimizer steps, given the accumulation steps.
    Compute, overlap and contention are neutral.
    """
    latest = list(points.items())[-_MAX_POINTS:]
    accum = np.array([times.accum_step for _, times in latest])
    found = fit_perf_params(
        [running.num_nodes for running, _ in latest],
        [running.num_replicas for running, _ in latest],
        np.maximum(accum * _UNIT, 1.0),
        accum,
        # Never below the accumulation step: noise must not result in a negative network time.
        np.maximum([times.optim_step for _, times in latest], accum),
        level=[running.level for running, _ in latest],
    )
    return UNKNOWN._replace(
        alpha_n=found.alpha_n,
        beta_n=found.beta_n,
        alpha_r=found.alpha_r,
        beta_r=found.beta_r,
        gamma=found.gamma,
        growth_n=found.growth_n,
        two_node_penalty=found.two_node_penalty,
        alpha_levels=found.alpha_levels,
        beta_levels=found.beta_levels,
    )


def _several(seen: _Seen) -> bool:
    return any(running.num_replicas > 1 for running in seen.points)


def _step_time(params: PerfParams, running: RunningJob) -> StepTime:
    return step_time(
        params,
        np.float64(running.num_nodes),
        np.float64(running.num_replicas),
        np.float64(running.atomic_bsz),
        np.float64(running.accum_steps),
        np.float64(running.num_microbatches),
        running.level,
    )
