"""One sample of a forecast: the simulator, from the present state, with everything drawn.

The first decisions are made at every change, as in the scheduler. Later ones are made in steps that
grow with the distance from now: what happens hours ahead is not known to the minute, and a sample
then takes about as many decisions for a day as for an hour. Within such a step, a trial of a sweep
hands its slots over to the next one: a sweep of many short trials would otherwise run only as many
of them in a step as fit side by side.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from pipollux_perfmodel import GradParams
from pipollux_policies import MEASURED_REACH, Allocation, JobInfo, Policy, ReplicaShape
from pipollux_simulator.applications.base import JobModel, RunningJob, TrueStepTimes
from pipollux_simulator.engine.cluster import Cluster, Options
from pipollux_simulator.engine.job import SimulatedJob
from pipollux_simulator.workload.arrivals import JobArrival
from pipollux_simulator.workload.terms import JobTerms

from .draws import SampledJob
from .errors import HORIZON
from .holding import Holding
from .state import ForecastJob, ForecastState

_MOMENT = 1e-6
_LEAST_SPEED = 1e-9
"""Speed of an allocation that is predicted to be worth nothing, so that time ends."""
_ENDLESS = 1e15
"""Work of a job of unknown length."""
_SETTLED_AFTER = 3600.0
"""Seconds in which the policy may still start such a job in place of another one."""


class Times(NamedTuple):
    """When a job starts and ends in a sample, by the clock of the state; infinite: beyond it."""

    start: float
    end: float
    factor: float = 1.0
    """On its running time, by the errors of past ones."""


NEVER = Times(math.inf, math.inf)


@dataclass(frozen=True)
class Effort:
    """How much work a forecast is."""

    samples: int = 9
    exact_changes: int = 20
    """Number of decisions of a sample that are made exactly when something changes."""
    stretch: float = 0.1
    """Length of later steps, relative to the time since the start of the sample."""
    horizon: float = HORIZON
    """Seconds that a sample covers."""

    def __post_init__(self) -> None:
        if self.samples < 1 or self.exact_changes < 0:
            raise ValueError(f"{self}: samples must be at least 1, exact_changes at least 0")
        if not (self.stretch >= 0 and self.horizon > 0):
            raise ValueError(f"{self}: stretch must be at least 0, horizon above 0")


class SampledApplication:
    """The training of a job in a sample, in units of its work; an `Application`.

    Args:
        job: that is trained.
        speeds: known step times, which jobs with the same true speedups share.
    """

    init_batch_size = 1
    max_batch_size = 1
    max_epochs = 1

    def __init__(
        self, job: SampledJob, speeds: dict[RunningJob, TrueStepTimes] | None = None
    ) -> None:
        self.name = job.name
        self.job = job
        self._speeds = {} if speeds is None else speeds
        self._work = min(job.work, _ENDLESS)

    def step_times(self, running: RunningJob) -> TrueStepTimes:
        """Return the time of a second of one replica's work on an allocation."""
        if running not in self._speeds:
            shape = self._shape(running)
            speedup_fn = shape.speedup_at(running.level)
            speed = float(speedup_fn(running.num_nodes, running.num_replicas))
            seconds = 1 / max(speed, _LEAST_SPEED)
            self._speeds[running] = TrueStepTimes(seconds, seconds)
        return self._speeds[running]

    def gradients(self, batch_size: int, epoch: int) -> GradParams:  # noqa: ARG002  # the protocol's: speedups contain the gain
        """Return gradients without noise: a step is worth one unit at any batch size."""
        return GradParams(1.0, 0.0)

    def progress(self, epoch: int) -> float:
        """Return the work in some epochs; one is the whole job."""
        return epoch * self._work

    def completion_epoch(self, batch_size: int) -> int:  # noqa: ARG002  # the protocol's
        """Return the last epoch."""
        return 0

    def max_replicas(self, batch_size: int | None = None) -> int:  # noqa: ARG002  # the protocol's
        """Return the user's limit."""
        info = self.job.info
        return info.max_replicas if info.allowed_replicas is None else info.allowed_replicas

    def new_model(self, batch_size: int | None = None) -> JobModel:  # noqa: ARG002  # the protocol's
        """Return the model of a job that has not trained in this sample."""
        return SampledModel(self.job)

    def _shape(self, running: RunningJob) -> ReplicaShape:
        shapes = self.job.truth.all_shapes
        same = [shape for shape in shapes if shape.num_stages == running.num_stages]
        suited = [shape for shape in same if shape.gpu_type in (None, running.gpu_type)]
        # A job that borrows speedups may run in a shape that their owner does not have.
        return next(iter([*suited, *same, *shapes]))


class SampledModel:
    """A job's knowledge of itself in a sample; a `JobModel`."""

    def __init__(self, job: SampledJob) -> None:
        self._job = job
        self.is_measured = job.is_measured
        self.max_profiled_replicas = 0

    def observe(self, running: RunningJob, times: TrueStepTimes, gradients: GradParams) -> None:  # noqa: ARG002  # the protocol's: the truth is known
        """Record that the job has trained on this number of replicas."""
        self.is_measured = True
        self.max_profiled_replicas = max(self.max_profiled_replicas, running.num_replicas)

    def inherit(self, relatives: Sequence[JobModel], *, latest: bool = False) -> None:
        """Inherit nothing: inherited measurements are part of the state."""

    def shapes(self) -> tuple[ReplicaShape, ...]:
        """Return the shapes known by now."""
        return self._job.truth.all_shapes if self.is_measured else self._job.info.all_shapes

    def configure(
        self, shape: ReplicaShape, placement: Sequence[int], gpu_type: str = "", level: int = 1
    ) -> RunningJob:
        """Return the allocation; its batch size does not matter."""
        return RunningJob(tuple(placement), shape.num_stages, 1, 1, 0, gpu_type, level)

    def goodput(self, running: RunningJob) -> float:  # noqa: ARG002  # the protocol's
        """Return 1: work is measured in seconds of one replica."""
        return 1.0

    def base_goodput(self) -> float:
        """Return 1, or 0 as long as nothing is measured."""
        return float(self.is_measured)


@dataclass
class SampledCluster(Cluster):
    """The cluster of one sample, which begins with the jobs and allocations of a state."""

    effort: Effort = field(default_factory=Effort)
    sampled: Mapping[str, SampledJob] = field(default_factory=dict)
    state: ForecastState = field(default_factory=lambda: ForecastState(0.0, {}, ()))
    holding: Holding = field(default_factory=lambda: Holding(ForecastState(0.0, {}, ()), {}))

    def __post_init__(self) -> None:
        super().__post_init__()
        self._teams, self._notices = self.state.teams, dict(self.state.notices)
        self._warm_starts = {name for name, job in self.sampled.items() if job.inherits}
        self._area = 0.0
        """Integral of the number of unfinished jobs since the start of the sample."""
        self._num_changes = 0
        """Number of decisions at a change so far."""
        self._released: list[str] = []
        """Jobs that waited for others, and arrive with the next decision."""

    def run_until_done(self, wanted: Collection[str], until: float) -> None:
        """Simulate until some jobs are done, or until a time."""
        left, self._due = set(wanted), self.begin + self.state.decides_in
        num_seen = 0
        if self._due <= self._now:
            self._round()
        while left and self._now < until and not self._is_settled():
            self._advance_to_round()
            self._due = self._now
            self._round()
            left.difference_update(job.name for job in self._done[num_seen:])
            num_seen = len(self._done)

    def _is_settled(self) -> bool:
        """Return whether nothing will end any more: only jobs of unknown length are left."""
        if (
            self._waiting
            or self._released
            or any(self.sampled[name].work < _ENDLESS for name in self._active)
        ):
            return False
        longest = self.begin + _SETTLED_AFTER
        return self._now >= longest or all(job.nodes for job in self._active.values())

    def _interval(self) -> float:
        if self._due > self._now:
            return self._due - self._now
        return max(self.options.interval, self.effort.stretch * (self._now - self.begin))

    def _advance_to_round(self) -> None:
        if self._num_changes > self.effort.exact_changes:
            self._advance_to(self._now + self._interval())
            return
        before = len(self._done)
        super()._advance_to_round()
        arrived = bool(self._waiting) and self._waiting[0].time <= self._now
        self._num_changes += arrived or len(self._done) > before

    def _train(self, until: float) -> None:
        self._area += (until - self._now) * len(self._active)
        number = len(self._done)
        super()._train(until)
        coarse = self._num_changes > self.effort.exact_changes
        heirs = self._heirs() if coarse and self.state.sweeps else None
        while number < len(self._done):  # which grows by the heirs that end, too
            self._note_end(self._done[number], until, heirs)
            number += 1
        for queue in (heirs or {}).values():
            self._released += [name for name in queue if name not in self._active]

    def _note_end(
        self, ended: SimulatedJob, until: float, heirs: dict[str, deque[str]] | None
    ) -> None:
        """Let jobs arrive that waited for a job; in a coarse step, hand its slots over."""
        free, sweep = self.holding.end(ended.name), self.holding.sweep_of.get(ended.name)
        if heirs is None or sweep is None:
            self._released += free
            return
        for name in free:
            own = self.holding.sweep_of.get(name) == sweep
            (heirs.setdefault(sweep, deque()) if own else self._released).append(name)
        queue = heirs.get(sweep)
        if queue and ended.history:
            self._hand_over(ended, queue.popleft(), until)

    def _heirs(self) -> dict[str, deque[str]] | None:
        """Return the trials that wait for slots, by sweep; None: other jobs wait for them, too."""
        found: dict[str, deque[str]] = {}
        for name, job in self._active.items():
            if not job.nodes:
                sweep = self.holding.sweep_of.get(name)
                if sweep is None:
                    return None
                found.setdefault(sweep, deque()).append(name)
        return found

    def _hand_over(self, ended: SimulatedJob, name: str, until: float) -> None:
        """Start a trial in the slots of one that has ended, at that time; train it until then."""
        last, moment = ended.history[-1], ended.completed or self._now
        job = self._active.pop(name, None)
        if job is None:
            row, app = _arrival(self.sampled[name], moment), self.applications[name]
            job = self._job(row, app, app.new_model())
        job.clock = moment
        info = self.sampled[name].info
        same = [shape for shape in info.all_shapes if shape.num_stages == last.num_stages]
        nodes = last.nodes[: max(info.max_replicas, info.least_replicas)]
        job.reallocate(moment, nodes, (same or info.all_shapes)[0], info)
        job.advance(until, 1.0, self._all_nodes[nodes[0]].gpu_type)
        if job.completed is None:
            self._active[name] = job
        else:
            self._done.append(job)

    def _arrive(self) -> None:
        new = [_arrival(self.sampled[name], self._now) for name in self._released]
        self._released, self._waiting = [], [*new, *self._waiting]
        super()._arrive()

    def _mean_jobs(self) -> dict[str, float]:
        """Return averages over the jobs' lives, of which a part was before the sample."""
        passed, found = self._now - self.begin, {}
        for name, job in self._active.items():
            age, before = self._now - job.arrival.time, self.sampled[name].info.mean_jobs
            old = age - passed
            if old <= 0 < age:  # it arrived in the sample
                found[name] = max(self._area / passed, 1.0)
            elif before is not None and age > 0:
                found[name] = max((before * old + self._area) / age, 1.0)
        return found

    def _broken_rules(
        self,
        infos: Mapping[str, JobInfo],
        base: Mapping[str, Allocation],
        answer: Mapping[str, Sequence[str]],
    ) -> list[str]:
        """Return what the policy broke; in a real state, something may have been broken before."""
        found = super()._broken_rules(infos, base, answer)
        if not found:
            return []
        held = {n: given for n, given in base.items() if self._active[n].started != self._now}
        before = super()._broken_rules(infos, held, held)
        return [sentence for sentence in found if sentence not in before]

    def _info(self, job: SimulatedJob, mean_jobs: float | None) -> JobInfo:
        sampled, model, most = self.sampled[job.name], job.model, job.app.max_replicas()
        info = sampled.info
        known = sampled.truth if model.base_goodput() else info
        measured = max(info.max_replicas, MEASURED_REACH * model.max_profiled_replicas)
        return replace(
            known,
            max_replicas=max(min(measured, most), info.min_replicas, 1),
            preemptible=info.preemptible and not job.starting,
            creation_timestamp=job.arrival.time,
            age=max(self._now - job.arrival.time, 0.0),
            num_restarts=job.num_restarts,
            num_rescales=job.num_rescales,
            attained_service=job.attained_service,
            mean_jobs=mean_jobs,
            work_done=info.work_done + job.progress,
            **_work_left(sampled, job.progress),
        )


def _work_left(sampled: SampledJob, trained: float) -> dict[str, Any]:
    """Return the remaining work as the policy sees it: by now, the job is longer than `trained`."""
    info = sampled.info
    if info.remaining_work is not None:
        return {"remaining_work": max(sampled.work - trained, 0.0)}
    left = tuple(work - trained for work in info.work_left if work > trained)
    return {"work_left": left or info.work_left[-1:]}


def run_sample(
    state: ForecastState,
    policy: Policy,
    jobs: Sequence[SampledJob],
    arrivals: Sequence[SampledJob],
    effort: Effort,
    planned: Mapping[str, Sequence[SampledJob]] | None = None,
) -> dict[str, Times]:
    """Simulate one sample; return the times of the jobs and sweeps of the state.

    `planned`: the trials to come, by sweep.
    """
    planned = planned or {sweep.name: () for sweep in state.sweeps}
    to_come = [trial for trials in planned.values() for trial in trials]
    sampled = {job.name: job for job in (*jobs, *to_come, *arrivals)}
    origin = min([state.now, *(job.arrives for job in jobs)])
    moved = [replace(job, arrives=job.arrives - origin) for job in jobs]
    begin = state.now - origin
    before = {job.name: job for job in state.jobs}
    holding = Holding(state, {name: [t.name for t in trials] for name, trials in planned.items()})
    begun = [_begun(j, before[j.name], state, begin) for j in moved if not before[j.name].after]
    at_once = [_arrival(sampled[name], begin) for name in holding.begin()]
    ends = _never(state)
    if not (begun or at_once):  # all wait for jobs that never end
        return ends
    speeds: dict[int, dict[RunningJob, TrueStepTimes]] = {id(j.truth): {} for j in sampled.values()}
    cluster = SampledCluster(
        workload=[*at_once, *(_arrival(job, job.arrives - origin) for job in arrivals)],
        applications={
            job.name: SampledApplication(job, speeds[id(job.truth)]) for job in sampled.values()
        },
        nodes=dict(state.nodes),
        policy=policy,
        options=Options(interval=state.interval, decides_at="changes"),
        begun=begun,
        begin=begin,
        effort=effort,
        sampled=sampled,
        state=replace(state, notices={name: due - origin for name, due in state.notices.items()}),
        holding=holding,
    )
    wanted = [job.name for job in (*jobs, *to_come)]
    cluster.run_until_done(wanted, begin + effort.horizon)
    times = {
        job.name: _times(job, origin, sampled[job.name].factor) for job in cluster.known_jobs()
    }
    ends |= {name: found for name, found in times.items() if name in before}
    for sweep in state.sweeps:
        trials = [*sweep.trials, *(trial.name for trial in planned[sweep.name])]
        ends[sweep.name] = _span([times.get(name, NEVER) for name in trials], state.now)
    return ends


def _never(state: ForecastState) -> dict[str, Times]:
    return {entry.name: NEVER for entry in state.jobs_and_sweeps}


def _span(trials: Sequence[Times], now: float) -> Times:
    """Return when the first trial starts and the last one ends."""
    if not trials:
        return Times(now, now)
    return Times(min(trial.start for trial in trials), max(trial.end for trial in trials))


def _times(job: SimulatedJob, origin: float, factor: float) -> Times:
    started, completed = (
        math.inf if moment is None else origin + moment for moment in (job.started, job.completed)
    )
    return Times(started, completed, factor)


def _arrival(job: SampledJob, time: float) -> JobArrival:
    info = job.info
    terms = JobTerms(
        min_replicas=info.min_replicas,
        preemptible=info.preemptible,
        restart_seconds=info.restart_seconds,
        rescale_seconds=info.rescale_seconds,
    )
    replicas = info.requested_replicas or info.least_replicas
    return JobArrival(job.name, time, job.name, replicas, 1, terms=terms)


def _begun(
    job: SampledJob, before: ForecastJob, state: ForecastState, begin: float
) -> SimulatedJob:
    """Return a job of the state in the form of the simulator; without nodes that are gone."""
    app, info, held = SampledApplication(job), job.info, before.allocation
    if any(node not in state.nodes for node in held):
        held = type(held)()
    arrival = _arrival(job, job.arrives)
    started = None if before.is_new and not held else arrival.time
    begun = SimulatedJob(
        arrival,
        app,
        app.new_model(),
        info.restart_seconds,
        info.rescale_seconds,
        clock=begin,
        started=started,
        num_starts=0 if started is None else info.num_restarts + 1,
        num_rescales=info.num_rescales,
        attained_service=info.attained_service,
    )
    if held and held.shape is not None:
        begun.hold(tuple(sorted(held)), held.shape, before.starts_in)
    return begun
