"""Duration of a job alone on its equal share of the cluster, the baseline of fairness.

Finish-time fairness (Themis, NSDI'20) is rho = JCT / that duration. The share is the cluster's
slots over the number of unfinished jobs, averaged over the job's lifetime; a share between two
numbers of replicas is the larger number for part of the time. Alone, a job starts once, at its
arrival, and trains every epoch at the best of its batch sizes, known from the start. The baseline
is the same for all policies, including those with fixed batch sizes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pipollux_policies import NodeInfo, ReplicaShape
from pipollux_simulator.applications.base import Application, RunningJob

_BATCH_STEP = 2.0**0.25


class _Lying(NamedTuple):
    shape: ReplicaShape
    placement: tuple[int, ...]
    gpu_type: str


class _Pace(NamedTuple):
    """Progress per second in an epoch, and its configuration."""

    rate: float
    batch_size: int


class IsolatedTimes:
    """Durations of jobs alone on a share of a cluster, cached per whole number of replicas."""

    def __init__(self, nodes: Mapping[str, NodeInfo], restart_seconds: float) -> None:
        self._nodes = nodes
        self._restart_seconds = restart_seconds
        self._known: dict[tuple[str, int], list[_Pace]] = {}

    @property
    def num_slots(self) -> int:
        """Slots of all nodes."""
        return sum(node.resources.get("slots", 0) for node in self._nodes.values())

    def seconds(self, app: Application, share: float) -> float:
        """Return the duration of a job alone on a number of slots.

        Replicas have the job's own shape, are packed as closely as possible, and are no more than
        it can use. A share of less than one replica is one replica for part of the time.
        """
        seconds = self._restart_seconds
        epoch, last = 0, 0
        paces = self._paces(app, share)
        while epoch <= last:
            rate, batch_size = paces[epoch]
            seconds += (app.progress(epoch + 1) - app.progress(epoch)) / rate
            last = min(app.completion_epoch(batch_size), app.max_epochs - 1)
            epoch += 1
        return seconds

    def rates(self, app: Application, share: float) -> list[float]:
        """Return the progress per second in each epoch, alone on a number of slots."""
        return [pace.rate for pace in self._paces(app, share)]

    def _paces(self, app: Application, share: float) -> list[_Pace]:
        """Return the pace in each epoch; the batch size is that of the smaller number."""
        shape = app.new_model().shapes()[0]
        most = min(app.max_replicas(), sum(self._rooms(shape)[0]), shape.max_replicas or math.inf)
        width = shape.resources.get("slots", shape.num_stages)
        # At least one replica, even if no node has room: then nothing else ran there either.
        replicas = min(share / width, max(most, 1))
        # With a tolerance, so that a third of 48 slots is 16.
        below = math.floor(replicas + 1e-9)
        part = max(replicas - below, 0.0)
        if not below:
            return [pace._replace(rate=part * pace.rate) for pace in self._whole(app, 1)]
        if not part:
            return self._whole(app, below)
        pairs = zip(self._whole(app, below), self._whole(app, below + 1), strict=True)
        return [_Pace((1 - part) * a.rate + part * b.rate, a.batch_size) for a, b in pairs]

    def _whole(self, app: Application, replicas: int) -> list[_Pace]:
        key = app.name, replicas
        if key not in self._known:
            shape = app.new_model().shapes()[0]
            rooms, gpu_type = self._rooms(shape)
            ways = _ways(app, _Lying(shape, _packed(replicas, rooms), gpu_type))
            self._known[key] = [_best(app, ways, epoch) for epoch in range(app.max_epochs)]
        return self._known[key]

    def _rooms(self, shape: ReplicaShape) -> tuple[list[int], str]:
        """Return the replicas that fit each node of the best type of GPU, and that type."""
        rooms: dict[str, list[int]] = defaultdict(list)
        for node in self._nodes.values():
            if shape.runs_on(node):
                rooms[node.gpu_type].append(
                    min(node.resources.get(k, 0) // n for k, n in shape.resources.items() if n)
                )
        gpu_type = max(sorted(rooms), key=lambda name: sum(rooms[name]), default="")
        return sorted(rooms[gpu_type], reverse=True), gpu_type


def _ways(app: Application, lying: _Lying) -> list[RunningJob]:
    shape, placement, gpu_type = lying
    sizes = {app.init_batch_size, app.max_batch_size}
    steps = math.log(app.max_batch_size / app.init_batch_size, _BATCH_STEP)
    sizes |= {round(app.init_batch_size * _BATCH_STEP**step) for step in range(math.ceil(steps))}
    return [
        app.new_model(size).configure(shape, placement, gpu_type)
        for size in sorted(sizes)
        if app.max_replicas(size) >= sum(placement)
    ]


def _best(app: Application, ways: Sequence[RunningJob], epoch: int) -> _Pace:
    return max(_Pace(_rate(app, way, epoch), way.batch_size) for way in ways)


def _rate(app: Application, way: RunningJob, epoch: int) -> float:
    optim, accum = app.step_times(way)
    sqr, var = app.gradients(way.batch_size, epoch)
    gain = (var + sqr) / (var * app.init_batch_size / way.batch_size + sqr)
    return float(gain / (optim + way.accum_steps * accum))


def _packed(replicas: int, rooms: Sequence[int]) -> tuple[int, ...]:
    placement = []
    left = replicas
    for room in rooms:
        placement.append(min(room, left))
        left -= placement[-1]
    # At least one replica, even if no node has room: then nothing else ran there either.
    return tuple(n for n in placement if n) or (replicas,)
