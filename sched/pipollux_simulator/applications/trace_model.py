"""Models of jobs of a traced application.

`TraceJobModel` works as Pollux's agent: each configuration that ran adds a row to its profile, the
step time model is fitted to the profile, and the batch size maximizes goodput. With Pipollux's fit,
residuals correct speedups and batch sizes (`StepCorrections`, `SizeCorrections`), as in real jobs.
`FixedBatchModel` knows the true step times, like the oracle for Optimus in Pollux's comparison.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from pipollux_perfmodel import (
    GoodputFunction,
    GradParams,
    PerfParams,
    SpeedupFunction,
    fit_perf_params,
)
from pipollux_perfmodel.goodput.corrections import StepCorrections, step_ratios
from pipollux_perfmodel.goodput.size_corrections import size_corrections
from pipollux_perfmodel.hints.step_rows import MAX_INHERITED, MAX_PASSED_ON, MAX_ROWS
from pipollux_policies import ReplicaShape

from .base import JobModel, RunningJob, TrueStepTimes

_SLOT = {"slots": 1}
_Row: TypeAlias = tuple[int, int, int, int]
"""Nodes, replicas and atomic batch size."""


Fit: TypeAlias = Callable[..., PerfParams]
"""`fit_perf_params`, or a function with its first five arguments, such as `fit_like_adaptdl`."""


class BatchSizes(Protocol):
    """The application, as its models use it."""

    init_batch_size: int
    max_batch_size: int
    min_local_bsz: int
    max_local_bsz: int
    fits: dict[frozenset[tuple[int, int, int, int]], PerfParams]
    """Fits by observed configurations: their times are the same for every job."""
    fit: Fit

    def step_times(self, running: RunningJob) -> TrueStepTimes:
        """Return the true step times."""


def linear_speedup(num_nodes: Any, num_replicas: Any) -> Any:  # noqa: ARG001  # as every speedup function
    """Return the speedup of a job without measurements."""
    return np.asarray(num_replicas, dtype=float)


def split_batch(app: BatchSizes, batch_size: int, num_replicas: int) -> tuple[int, int]:
    """Split a batch among replicas; return the atomic batch size and the accumulation steps."""
    local_bsz = math.ceil(batch_size / num_replicas)
    accum_steps = math.ceil(local_bsz / app.max_local_bsz) - 1
    if num_replicas == 1 and batch_size > app.init_batch_size:
        accum_steps = max(1, accum_steps)  # one replica needs two batches to measure their noise
    atomic_bsz = math.ceil(local_bsz / (accum_steps + 1))
    # Rounding up must not exceed the maximum batch of the application.
    return min(atomic_bsz, app.max_batch_size // (num_replicas * (accum_steps + 1))), accum_steps


class TraceJobModel:
    """Estimates step times online, and chooses batch sizes by goodput."""

    def __init__(self, app: BatchSizes) -> None:
        self._app = app
        self._profile: dict[_Row, TrueStepTimes] = {}
        self._passed_on: dict[_Row, int] = {}
        """How often each row was passed on; in order of the last observation."""
        self._gradients: GradParams | None = None
        self._first_gradients: GradParams | None = None
        self._goodput: GoodputFunction | None = None
        self._speedup: SpeedupFunction | None = None
        self._fitted = 0
        self._last: _Row | None = None
        self._chosen: dict[tuple[int, int, int], tuple[int, int]] = {}
        self._base: float | None = None
        self.max_profiled_replicas = 0

    def observe(self, running: RunningJob, times: TrueStepTimes, gradients: GradParams) -> None:
        """Record the times of an iteration; a known configuration adds nothing."""
        key = running.num_nodes, running.num_replicas, running.atomic_bsz, running.level
        if key not in self._profile:
            self._profile[key] = times
            self._speedup = None
        if key != self._last:
            self._last = key
            self._passed_on.pop(key, None)
            self._passed_on[key] = 0
        self.max_profiled_replicas = max(self.max_profiled_replicas, running.num_replicas)
        if gradients != self._gradients:
            self._gradients = gradients
            self._first_gradients = self._first_gradients or gradients
            self._speedup = None

    def inherit(self, relatives: Sequence[JobModel], *, latest: bool = False) -> None:
        """Start with the jobs' profiles, and with the gradients of the first one. Limits the
        number of rows, and how often each is passed on, as in jobs (`InheritedRows`).
        """
        alike = [model for model in relatives if isinstance(model, TraceJobModel)]
        rows = [entry for model in alike for entry in model._handed_down()]
        found: dict[_Row, int] = {}
        for key, times in sorted(rows, key=lambda entry: entry[1]):
            found.setdefault(key, times + 1)
        profiles = ChainMap(*(model._profile for model in alike))
        self._passed_on = dict(reversed([*found.items()][:MAX_INHERITED]))
        profile = {key: profiles[key] for key in self._passed_on}
        gradients = _gradients_of(alike[0], latest=latest) if alike else None
        if (profile, gradients) != (self._profile, self._gradients):
            self._profile, self._goodput = profile, None
            self.max_profiled_replicas = max((replicas for _, replicas, *_ in profile), default=0)
            self._gradients = self._first_gradients = gradients

    def _handed_down(self) -> list[tuple[_Row, int]]:
        """Return the rows to pass on, and how often each was passed on before: own ones first."""
        latest = [entry for entry in reversed(self._passed_on.items()) if entry[1] < MAX_PASSED_ON]
        return sorted(latest, key=lambda entry: entry[1])[:MAX_ROWS]

    def shapes(self) -> tuple[ReplicaShape, ...]:
        """Return the single shape of a model that fits on one GPU."""
        speedup = self._speedup_function()
        return (ReplicaShape(1, _SLOT, speedup or linear_speedup),)

    def configure(
        self,
        shape: ReplicaShape,  # noqa: ARG002  # the protocol's; there is one only
        placement: Sequence[int],
        gpu_type: str = "",
        level: int = 1,
    ) -> RunningJob:
        """Choose the batch size with the highest goodput; the initial one without measurements."""
        speedup = self._speedup_function()
        placement = tuple(placement)
        replicas = sum(placement)
        if speedup is None:
            batch_size = max(self._app.init_batch_size, self._app.min_local_bsz * replicas)
            atomic_bsz, accum_steps = split_batch(self._app, batch_size, replicas)
        else:
            atomic_bsz, accum_steps = self._choose(speedup, len(placement), replicas, level)
        return RunningJob(placement, 1, 1, atomic_bsz, accum_steps, gpu_type, level)

    def goodput(self, running: RunningJob) -> float:
        """Predict the goodput of a configuration, in samples per second."""
        if self._speedup_function() is None or self._goodput is None:
            return 0.0
        sizes = running.num_replicas, running.atomic_bsz, running.accum_steps
        goodput = _at_level(self._goodput, running.level)
        return float(goodput.evaluate(running.num_nodes, *sizes))

    def base_goodput(self) -> float:
        """Predict the goodput of one replica."""
        speedup = self._speedup_function()
        if speedup is None:
            return 0.0
        if self._base is None:
            self._base = speedup.configuration(1, 1).goodput
        return self._base

    def _choose(
        self, speedup: SpeedupFunction, nodes: int, replicas: int, level: int
    ) -> tuple[int, int]:
        key = nodes, replicas, level
        known = self._chosen.get(key)
        if known is None:
            known = self._choose_by_measurements(*key)
            if known is None:
                best = speedup.at_level(level).configuration(nodes, replicas)
                known = best.atomic_bsz, best.accum_steps
            self._chosen[key] = known
        return known

    def _choose_by_measurements(
        self, nodes: int, replicas: int, level: int
    ) -> tuple[int, int] | None:
        """Return the same with corrections by measurements there; None: no measurements there."""
        goodput, app = self._goodput, self._app
        here = nodes, replicas, level
        rows = [(a, row) for (n, r, a, x), row in self._profile.items() if (n, r, x) == here]
        if goodput is None or app.fit is not fit_perf_params or not rows:
            return None
        sizes, optim = [a for a, _ in rows], [row.optim_step for _, row in rows]
        goodput = _at_level(goodput, level)
        best = goodput.optimize(
            nodes,
            replicas,
            app.max_batch_size,
            (app.min_local_bsz, app.max_local_bsz),
            accumulation=True,
            corrections=size_corrections(goodput.perf_params, nodes, replicas, sizes, optim),
        )
        return int(best.atomic_bsz), int(best.accum_steps)

    def _speedup_function(self) -> SpeedupFunction | None:
        if self._gradients is None:
            return None
        if self._goodput is None or self._surprised(self._goodput):
            self._goodput = self._fit(self._gradients)
            self._speedup = None
        if self._speedup is None:
            app = self._app
            self._chosen, self._base = {}, None
            self._goodput = GoodputFunction(
                self._goodput.perf_params, self._gradients, app.init_batch_size
            )
            bounds = app.min_local_bsz, app.max_local_bsz
            self._speedup = SpeedupFunction(
                *(self._goodput, app.max_batch_size, bounds),
                accumulation=True,
                corrections=self._corrections(self._goodput.perf_params),
            )
        return self._speedup

    def _corrections(self, params: PerfParams) -> StepCorrections | None:
        """Return the residuals of Pipollux's fit, as jobs report them; AdaptDL has none."""
        if self._app.fit is not fit_perf_params:
            return None
        nodes, replicas, sizes, levels = map(np.array, zip(*self._profile, strict=True))
        optim = np.array([times.optim_step for times in self._profile.values()])
        return StepCorrections(step_ratios(params, nodes, replicas, sizes, optim, level=levels))

    def _surprised(self, goodput: GoodputFunction) -> bool:
        """Whether observations since the last fit require a new one.

        Fits dominate the time of a simulation, and a row that agrees with the prediction changes
        little. The costs of more nodes or replicas than before were assumed.
        """
        rows = list(self._profile.items())
        old, new = rows[: self._fitted], rows[self._fitted :]
        self._fitted = len(rows)
        most_nodes, most_replicas = (max(row[0][i] for row in old) for i in (0, 1))
        levels = {row[0][3] for row in old if row[0][0] > 1}
        return any(
            sizes[0] > most_nodes
            or sizes[1] > most_replicas
            or (sizes[0] > 1 and sizes[3] not in levels)
            or times.differ(_at_level(goodput, sizes[3]).step_time(*sizes[:3], accum_steps=0))
            for sizes, times in new
        )

    def _fit(self, gradients: GradParams) -> GoodputFunction:
        self._fitted = len(self._profile)
        # Sorted, so that the shared fit does not depend on which job fits first.
        rows = sorted(self._profile.items())
        nodes, replicas, sizes, levels = (
            np.array(column) for column in zip(*(r[0] for r in rows), strict=True)
        )
        optim, accum = (np.array(column) for column in zip(*(r[1] for r in rows), strict=True))
        key = frozenset(self._profile)
        params = self._app.fits.get(key)
        if params is None:
            # AdaptDL's fit has one level.
            more = {"level": levels} if self._app.fit is fit_perf_params else {}
            params = self._app.fit(nodes, replicas, sizes, accum, optim, **more)
            self._app.fits[key] = params
        return GoodputFunction(params, gradients, self._app.init_batch_size)


def _at_level(goodput: GoodputFunction, level: int) -> GoodputFunction:
    params = goodput.perf_params.at_level(level)
    return goodput if params is goodput.perf_params else goodput.with_params(params)


def _gradients_of(model: TraceJobModel | FixedBatchModel, *, latest: bool) -> GradParams | None:
    return model._gradients if latest else model._first_gradients


class FixedBatchModel:
    """Keeps its user's batch size, of the whole job, and knows the true step times."""

    def __init__(self, app: BatchSizes, batch_size: int) -> None:
        self._app = app
        self._batch_size = batch_size
        self._gradients: GradParams | None = None
        self._first_gradients: GradParams | None = None
        self.max_profiled_replicas = 0

    def observe(self, running: RunningJob, times: TrueStepTimes, gradients: GradParams) -> None:  # noqa: ARG002  # it knows the times
        """Record the gradients; times are known."""
        self.max_profiled_replicas = max(self.max_profiled_replicas, running.num_replicas)
        self._gradients = gradients
        self._first_gradients = self._first_gradients or gradients

    def inherit(self, relatives: Sequence[JobModel], *, latest: bool = False) -> None:
        """Start with the gradients of the first job; times are known."""
        alike = [model for model in relatives if isinstance(model, FixedBatchModel)]
        if alike:
            gradients = _gradients_of(alike[0], latest=latest)
            self._gradients = self._first_gradients = gradients

    def shapes(self) -> tuple[ReplicaShape, ...]:
        """Return the single shape of a model that fits on one GPU."""
        return (ReplicaShape(1, _SLOT, self._speedup),)

    def configure(
        self,
        shape: ReplicaShape,  # noqa: ARG002  # the protocol's; there is one only
        placement: Sequence[int],
        gpu_type: str = "",
        level: int = 1,
    ) -> RunningJob:
        """Split the batch among the replicas."""
        placement = tuple(placement)
        atomic_bsz, accum_steps = split_batch(self._app, self._batch_size, sum(placement))
        return RunningJob(placement, 1, 1, atomic_bsz, accum_steps, gpu_type, level)

    def goodput(self, running: RunningJob) -> float:
        """Return the true goodput, in samples per second."""
        if self._gradients is None:
            return 0.0
        optim, accum = self._app.step_times(running)
        sqr, var = self._gradients
        scale = running.batch_size / self._app.init_batch_size
        gain = (var + sqr) / (var / scale + sqr)
        return self._app.init_batch_size * gain / (optim + running.accum_steps * accum)

    def base_goodput(self) -> float:
        """Return the true goodput of one replica; 0.0 before gradients were observed."""
        return self.goodput(self._running(1, 1))

    def _speedup(self, num_nodes: Any, num_replicas: Any) -> Any:
        nodes, replicas = np.broadcast_arrays(num_nodes, num_replicas)
        values = [
            self._ratio(int(n), int(r)) for n, r in zip(nodes.flat, replicas.flat, strict=True)
        ]
        return np.array(values).reshape(nodes.shape)

    def _ratio(self, num_nodes: int, num_replicas: int) -> float:
        least = self._app.min_local_bsz
        if num_replicas == 0 or self._batch_size / num_replicas < least:
            return 0.0
        one, many = (self._iteration(1, 1), self._iteration(num_nodes, num_replicas))
        return one / many

    def _iteration(self, num_nodes: int, num_replicas: int) -> float:
        running = self._running(num_nodes, num_replicas)
        optim, accum = self._app.step_times(running)
        return optim + running.accum_steps * accum

    def _running(self, num_nodes: int, num_replicas: int) -> RunningJob:
        per_node, more = divmod(num_replicas, num_nodes)
        placement = tuple(per_node + (i < more) for i in range(num_nodes))
        return self.configure(self.shapes()[0], placement)
