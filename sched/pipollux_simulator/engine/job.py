"""One simulated job: exact progress between events, from the truth of its application.

Progress is measured as in Pollux, in iterations at the initial batch size: per second, gain / step
time, where gain = (var + sqr) / (var / scale + sqr). At the end of an epoch gradients change, and
the job chooses its batch size again. Nothing is rounded to whole seconds.

A change of the allocation is an elastic resize if a replica survives it (`policy.change_cost`) and
the job supports it. Leaving replicas go at once, and the others pause. Joining replicas take the
time of a start, while the others continue to train; then all pause, and train together.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipollux_policies import (
    Allocation,
    ChangeKind,
    JobInfo,
    ReplicaShape,
    change_kind,
)
from pipollux_simulator.applications.base import Application, JobModel, RunningJob
from pipollux_simulator.workload.arrivals import JobArrival

_SLACK = 1e-9
"""Relative tolerance at which progress has reached the end of an epoch."""


@dataclass(frozen=True)
class Interval:
    """A period of a job with the same nodes."""

    start: float
    end: float
    nodes: tuple[Any, ...]
    num_stages: int
    elastic: bool = False
    """Whether it began with an elastic resize: the surviving replicas did not stop."""


@dataclass
class SimulatedJob:
    """One job in the simulated cluster; `app` is the truth, `model` its own knowledge.

    Args:
        restart_seconds: start time of a replica; the job does not train during a restart.
        rescale_seconds: pause of surviving replicas; None: every change is a restart.
        checkpoint_seconds: training time between checkpoints; later progress is lost with a node.
        clock: the time up to which it has been simulated.
        start_seconds: duration of a start from nothing; None: as a restart.
    """

    arrival: JobArrival
    app: Application
    model: JobModel
    restart_seconds: float = 30.0
    rescale_seconds: float | None = None
    checkpoint_seconds: float = math.inf
    clock: float = 0.0
    start_seconds: float | None = None
    level_of: Callable[[Sequence[Any]], int] = lambda _nodes: 1  # a field's default
    """Network level at which nodes meet."""
    progress: float = 0.0
    epoch: int = 0
    nodes: tuple[Any, ...] = ()
    members: tuple[Any, ...] = ()
    """Nodes of the training replicas; the others of `nodes` are starting."""
    shape: ReplicaShape | None = None
    running: RunningJob | None = None
    started: float | None = None
    completed: float | None = None
    num_starts: int = 0
    num_moves: int = 0
    """Restarts directly from one allocation to another, which determine the measured cost."""
    num_rescales: int = 0
    attained_service: float = 0.0
    """Slot-seconds."""
    slots_per_replica: int = 1
    history: list[Interval] = field(default_factory=list)
    lost_progress: float = 0.0
    """Progress lost with nodes, in iterations at the initial batch size."""
    _delay: float = 0.0
    _join_at: float = math.inf
    _since: float = 0.0
    _elastic: bool = False
    _saved: tuple[float, int] = (0.0, 0)
    _unsaved_seconds: float = 0.0

    @property
    def name(self) -> str:
        """Name in the workload."""
        return self.arrival.name

    @property
    def num_restarts(self) -> int:
        """Number of starts after the first."""
        return max(self.num_starts - 1, 0)

    @property
    def starting(self) -> bool:
        """Whether it has slots and does not train yet, or replicas are about to join."""
        return bool(self.nodes) and (self._delay > 0 or self._join_at < math.inf)

    @property
    def _start_seconds(self) -> float:
        return self.restart_seconds if self.start_seconds is None else self.start_seconds

    @property
    def last_epoch(self) -> int:
        """Number of epochs of the whole job."""
        batch_size = self.running.batch_size if self.running else self.app.init_batch_size
        return min(self.app.completion_epoch(batch_size) + 1, self.app.max_epochs)

    @property
    def starts_in(self) -> float:
        """Seconds until its replicas train; 0 if they do, or if it has none."""
        return self._delay if self.nodes else 0.0

    def hold(self, nodes: Sequence[Any], shape: ReplicaShape, starts_in: float) -> None:
        """Begin with an allocation, whose replicas train in `starts_in` seconds."""
        self.nodes = self.members = tuple(nodes)
        self.shape, self.slots_per_replica = shape, shape.slots
        self._delay, self._since = starts_in, self.clock

    def reallocate(
        self, now: float, nodes: Sequence[Any], shape: ReplicaShape | None, info: JobInfo
    ) -> None:
        """Change the allocation, by an elastic resize if a training replica survives."""
        old, new = Allocation(self.members, self.shape), Allocation(nodes, shape)
        if change_kind(info, old, new) is ChangeKind.RESTART:
            self._restart(now, nodes, shape)
        else:
            self._rescale(now, nodes)

    def _restart(self, now: float, nodes: Sequence[Any], shape: ReplicaShape | None) -> None:
        self._close_interval(now)
        self._elastic, moves = False, bool(self.nodes)
        self.nodes, self.shape = tuple(nodes), shape if nodes else None
        self.members, self._join_at = self.nodes, math.inf
        self.running = None
        if self._unsaved_seconds > 0:
            self._save()
        if not nodes or shape is None:
            return
        self.slots_per_replica = shape.slots
        self.num_starts += 1
        self.num_moves += moves
        self.started = now if self.started is None else self.started
        self._delay = self.restart_seconds if moves else self._start_seconds

    def _rescale(self, now: float, nodes: Sequence[Any]) -> None:
        """Remove leaving replicas at once and start joining ones, while the others continue."""
        self._close_interval(now)
        self._elastic = True
        self.num_rescales += 1
        survivors = Counter(self.members) & Counter(nodes)
        if survivors.total() < len(self.members):
            self.members = tuple(sorted(survivors.elements()))
            self._pause()
        starting = Counter(self.nodes) - Counter(self.members)
        coming = Counter(nodes) - survivors
        if not coming:
            self._join_at = math.inf
        elif not coming <= starting or self._join_at == math.inf:
            self._join_at = now + self._start_seconds
        self.nodes = tuple(nodes)

    def _join(self) -> None:
        self.members, self._join_at = self.nodes, math.inf
        self._pause()

    def _pause(self) -> None:
        self._delay += self.rescale_seconds or 0.0

    def lose_node(self, now: float, node: Any) -> None:
        """Drop replicas that were starting on a node; stop if replicas trained there."""
        if node in self.members:
            self._lose_all(now)
        elif node in self.nodes:
            self._close_interval(now)
            self.nodes = tuple(name for name in self.nodes if name != node)
            if len(self.nodes) == len(self.members):
                self._join_at = math.inf

    def _lose_all(self, now: float) -> None:
        """Stop without a checkpoint: progress since the last one is repeated."""
        self.lost_progress += self.progress - self._saved[0]
        self.progress, self.epoch = self._saved
        self._unsaved_seconds = 0.0
        self._restart(now, (), None)

    def next_change(self, pace: float, gpu_type: str) -> float:
        """Return when it starts to train, gains a replica or ends its epoch; as of `advance`."""
        if self.shape is None or self.completed is not None:
            return math.inf
        if self._delay > 0:
            return min(self.clock + self._delay, self._join_at)
        rate = self._rate(self._configure(gpu_type)) * pace
        left = max(self.app.progress(self.epoch + 1) - self.progress, 0.0)
        return min(self.clock + left / rate, self._join_at)

    def advance(self, until: float, pace: float, gpu_type: str) -> None:
        """Train until a given time, or until completion if that comes first. `pace` is 1, or less
        if another distributed job interferes.
        """
        if self.shape is None:
            self.clock = until
            return
        while self._join_at <= until and self.completed is None:
            self._advance_as_is(self._join_at, pace, gpu_type)
            if self.completed is None:
                self._join()
        self._advance_as_is(until, pace, gpu_type)

    def _advance_as_is(self, until: float, pace: float, gpu_type: str) -> None:
        if self.completed is not None:
            return
        self._pass(min(self._delay, until - self.clock), waiting=True)
        # The sum may round to less than `until`: a starting job does not train then.
        while self._delay <= 0 < until - self.clock and self.completed is None:
            self._train(until, pace, gpu_type)
        self.clock = until if self.completed is None else self.clock

    def _configure(self, gpu_type: str) -> RunningJob:
        assert self.shape is not None  # noqa: S101  # callers have looked
        placement, level = tuple(Counter(self.members).values()), self.level_of(self.members)
        if level == 1:
            return self.model.configure(self.shape, placement, gpu_type)
        return self.model.configure(self.shape, placement, gpu_type, level)

    def _train(self, until: float, pace: float, gpu_type: str) -> None:
        running = self._configure(gpu_type)
        self._look(running)
        rate = self._rate(running) * pace
        goal = self.app.progress(self.epoch + 1)
        seconds = max((goal - self.progress) / rate, 0.0)
        save = self.checkpoint_seconds - self._unsaved_seconds
        left = until - self.clock
        if seconds <= min(left, save) * (1 + _SLACK):
            self._pass(min(seconds, left))
            self.progress = goal
            self.epoch += 1
            if self.epoch >= self.last_epoch:
                self._finish()
        else:
            step = min(left, save)
            self.progress += rate * step
            self._pass(step)
        if self._unsaved_seconds >= self.checkpoint_seconds * (1 - _SLACK):
            self._save()

    def _look(self, running: RunningJob) -> None:
        gradients = self.app.gradients(running.batch_size, self.epoch)
        self.model.observe(running, self.app.step_times(running), gradients)
        self.running = running

    def _rate(self, running: RunningJob) -> float:
        optim, accum = self.app.step_times(running)
        sqr, var = self.app.gradients(running.batch_size, self.epoch)
        scale = running.batch_size / self.app.init_batch_size
        gain = (var + sqr) / (var / scale + sqr)
        return gain / (optim + running.accum_steps * accum)

    def _pass(self, seconds: float, *, waiting: bool = False) -> None:
        self.clock += seconds
        self.attained_service += seconds * len(self.nodes) * self.slots_per_replica
        if waiting:
            self._delay -= seconds
        else:
            self._unsaved_seconds += seconds

    def _save(self) -> None:
        self._saved = self.progress, self.epoch
        self._unsaved_seconds = 0.0

    def _finish(self) -> None:
        self.completed = self.clock
        self._close_interval(self.clock)
        self.nodes, self.members, self.shape = (), (), None

    def _close_interval(self, now: float) -> None:
        if self.shape is not None and now > self._since:
            stages = self.shape.num_stages
            self.history.append(Interval(self._since, now, self.nodes, stages, self._elastic))
        self._since = now
