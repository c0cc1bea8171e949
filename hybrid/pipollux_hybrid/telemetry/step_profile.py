"""Measured times of steps and stages, by configuration.

These measurements are what the performance model is fitted to. Times are kept as the latest few
samples and summed up by their median, so that a straggling step (a page fault, a neighbour's burst)
does not bend the fit. The first steps of a run are left out: they pay for warming up. So are steps
that were slowed down by measuring, as soon as there are others.
"""

from __future__ import annotations

import math
import statistics
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from pipollux_hybrid.job.pipeline_spec import StageOrder
from pipollux_perfmodel import even_shares
from pipollux_perfmodel.timing.params import SCHEDULES, Checkpoint, ScheduleKind

__all__ = ["Measurements", "StepConfiguration", "StepProfile"]

GPIPE = StageOrder("gpipe")
WINDOW = 64
"""Latest samples kept per configuration and kind."""
WARMUP = 2
"""Steps left out at the beginning of a run and after a change of batch size."""
ENOUGH = 3
"""Undisturbed samples from which on disturbed ones are not looked at."""


MicrobatchTimes: TypeAlias = tuple[tuple[float, ...], tuple[float, ...]]


class StepConfiguration(NamedTuple):
    """What the time of a step depends on."""

    num_stages: int
    num_nodes: int
    num_replicas: int
    atomic_bsz: int
    num_microbatches: int
    processes: int = 1
    """Of a replica: one for each stage, or one for all."""
    schedule: ScheduleKind = "gpipe"
    """In which order stages worked on micro-batches."""
    chunks_per_stage: int = 1
    """V; 1 unless interleaved."""

    @property
    def order(self) -> StageOrder:
        """The schedule with its chunks."""
        return StageOrder(self.schedule, self.chunks_per_stage)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> StepConfiguration:
        """Return it of a checkpoint's row; one that names no schedule ran by the usual one.

        Raises:
            KeyError, TypeError, ValueError: It is none.
        """
        numbers = {
            name: int(row[name]) for name in cls._fields if name in row and name != "schedule"
        }
        usual = "1f1b" if numbers.get("processes", 1) > 1 else "gpipe"
        named = row.get("schedule", usual)
        schedule = next(kind for kind in SCHEDULES if kind == named)
        return cls(**numbers, schedule=schedule)


class StepTimes:
    """The latest samples of one kind of step, in seconds."""

    def __init__(self) -> None:
        self._quiet: deque[float] = deque(maxlen=WINDOW)
        self._disturbed: deque[float] = deque(maxlen=WINDOW)

    def __bool__(self) -> bool:
        return bool(self._quiet or self._disturbed)

    def add(self, seconds: float, *, disturbed: bool) -> None:
        """Add a step; a disturbed one also measured the noise or its stages."""
        (self._disturbed if disturbed else self._quiet).append(seconds)

    def median(self) -> float:
        """Return the median of the undisturbed steps, of all where hardly any was undisturbed."""
        quiet = len(self._quiet) >= ENOUGH
        return statistics.median(self._quiet if quiet else [*self._quiet, *self._disturbed])

    def to_json(self) -> list[list[float]]:
        """Return undisturbed and disturbed samples."""
        return [list(self._quiet), list(self._disturbed)]

    def load_json(self, content: Sequence[Any]) -> None:
        """Restore what :meth:`to_json` returned; the first release wrote one list."""
        quiet, disturbed = content if content and isinstance(content[0], list) else (content, [])
        self._quiet.extend(map(float, quiet))
        self._disturbed.extend(map(float, disturbed))


@dataclass
class Measurements:
    """Samples for one configuration, in seconds."""

    accum: StepTimes = field(default_factory=StepTimes)
    """Accumulation steps."""
    alone: StepTimes = field(default_factory=StepTimes)
    """Optimizer steps less the time waited for peers."""
    optim: StepTimes = field(default_factory=StepTimes)
    """Optimizer steps."""
    forward: deque[tuple[float, ...]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Per stage, the forward of one micro-batch."""
    backward: deque[tuple[float, ...]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Per stage, the backward of one micro-batch, recomputation included."""

    def accum_step_time(self) -> float:
        """Return what the fit takes for an accumulation step.

        Without any, an optimizer step that nobody was waited for is the nearest thing; it is a
        little longer, by the optimizer's own work.
        """
        return (self.accum or self.alone).median()


class FitData(NamedTuple):
    """The arguments of :func:`pipollux_perfmodel.fit_perf_params`, one entry per configuration."""

    num_nodes: list[int]
    num_replicas: list[int]
    atomic_bsz: list[int]
    num_microbatches: list[int]
    accum_step_time: list[float]
    optim_step_time: list[float]
    compute_time: list[float]
    forward_shares: tuple[float, ...]
    backward_shares: tuple[float, ...]
    checkpoint: Checkpoint


class StepProfile:
    """Measurements of all configurations that the job has run in.

    Written by the training thread and read by the thread that fits; a lock keeps them apart.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._measurements: dict[StepConfiguration, Measurements] = {}
        self._latest: StepConfiguration | None = None
        self._to_skip = WARMUP

    def add_step(
        self,
        configuration: StepConfiguration,
        step_time: float,
        sync_time: float,
        *,
        optimizer: bool,
        disturbed: bool = False,
    ) -> None:
        """Add one accumulation or optimizer step.

        Args:
            configuration: What the step ran as.
            step_time: Seconds from one step boundary to the next.
            sync_time: Of those, seconds waited for the other replicas' gradients.
            optimizer: Whether it was an optimizer step.
            disturbed: Whether it was slowed down by measuring the noise or its stages.
        """
        with self._lock:
            if configuration != self._latest:
                self._latest, self._to_skip = configuration, WARMUP
            if self._to_skip > 0:
                self._to_skip -= 1
                return
            entry = self._measurements.get(configuration)
            if entry is None:
                entry = self._measurements[configuration] = Measurements()
            if not optimizer:
                entry.accum.add(step_time, disturbed=disturbed)
                return
            entry.alone.add(max(step_time - sync_time, 1e-9), disturbed=disturbed)
            entry.optim.add(step_time, disturbed=disturbed)

    def add_stages(
        self, configuration: StepConfiguration, forward: Sequence[float], backward: Sequence[float]
    ) -> None:
        """Add the mean times of one micro-batch in each stage."""
        with self._lock:
            entry = self._measurements.setdefault(configuration, Measurements())
            entry.forward.append(tuple(forward))
            entry.backward.append(tuple(backward))

    @property
    def max_replicas(self) -> int:
        """Largest number of replicas that was measured, 0 before the first measurement."""
        with self._lock:
            return max(
                (c.num_replicas for c, m in self._measurements.items() if m.optim), default=0
            )

    def orders(self, num_stages: int, processes: int) -> tuple[StageOrder, ...]:
        """Return the schedules that so many stages were measured by, in so many processes."""
        with self._lock:
            found = [
                c.order
                for c, m in self._measurements.items()
                if (c.num_stages, c.processes) == (num_stages, processes) and m.optim
            ]
        return tuple(dict.fromkeys(found))

    def fit_data(
        self,
        num_stages: int,
        checkpoint: Checkpoint = "never",
        processes: int = 1,
        order: StageOrder = GPIPE,
    ) -> FitData | None:
        """Return what there is to fit for pipelines of ``num_stages``; None before the first step.

        Args:
            num_stages: Number K of stages.
            checkpoint: Which micro-batches are recomputed.
            processes: Processes of a replica; what the other engine took says nothing of this one.
            order: The schedule; steps by another one are not fitted by its formula.
        """
        with self._lock:
            rows = [
                (c, m)
                for c, m in self._measurements.items()
                if (c.num_stages, c.processes, c.order) == (num_stages, processes, order)
                and m.optim
            ]
            if not rows:
                return None
            stages = [_stage_times(c, m, checkpoint) for c, m in rows]
            forward, backward = _shares(num_stages, stages)
            return FitData(
                num_nodes=[c.num_nodes for c, _ in rows],
                num_replicas=[c.num_replicas for c, _ in rows],
                atomic_bsz=[c.atomic_bsz for c, _ in rows],
                num_microbatches=[c.num_microbatches for c, _ in rows],
                accum_step_time=[m.accum_step_time() for _, m in rows],
                optim_step_time=[m.optim.median() for _, m in rows],
                compute_time=[sum(f) + sum(g) if f else math.nan for f, g in stages],
                forward_shares=forward,
                backward_shares=backward,
                checkpoint=checkpoint,
            )

    def to_json(self) -> list[dict[str, Any]]:
        """Return all measurements as plain lists, for a checkpoint."""
        with self._lock:
            return [
                {
                    **c._asdict(),
                    "accum": m.accum.to_json(),
                    "alone": m.alone.to_json(),
                    "optim": m.optim.to_json(),
                    "forward": list(m.forward),
                    "backward": list(m.backward),
                }
                for c, m in self._measurements.items()
            ]

    def load_json(self, content: Iterable[Mapping[str, Any]]) -> None:
        """Restore what :meth:`to_json` returned."""
        with self._lock:
            for row in content:
                key = StepConfiguration.from_json(row)
                entry = self._measurements.setdefault(key, Measurements())
                # The first release kept both kinds of steps in the list of accumulation steps.
                entry.alone.load_json(row.get("alone", row["accum"]))
                entry.accum.load_json(row["accum"] if "alone" in row else [])
                entry.optim.load_json(row["optim"])
                entry.forward.extend(tuple(map(float, times)) for times in row["forward"])
                entry.backward.extend(tuple(map(float, times)) for times in row["backward"])


def stage_medians(samples: Iterable[tuple[float, ...]]) -> tuple[float, ...]:
    """Return the median over samples, for each stage."""
    return tuple(statistics.median(times) for times in zip(*samples, strict=True))


def _stage_times(
    configuration: StepConfiguration, entry: Measurements, checkpoint: Checkpoint
) -> MicrobatchTimes:
    """Return forward and backward times of one micro-batch in each stage; empty if unknown.

    The mean backward is over all micro-batches. Under ``except_last`` the last of M is not
    recomputed and lacks a forward, so a recomputed one takes 1/M of a forward more than the mean.
    """
    if not entry.forward:
        return (), ()
    forward, backward = stage_medians(entry.forward), stage_medians(entry.backward)
    if checkpoint == "except_last":
        lacking = 1 / configuration.num_microbatches
        backward = tuple(g + lacking * f for f, g in zip(forward, backward, strict=True))
    return forward, backward


def _shares(
    num_stages: int, measured: Sequence[MicrobatchTimes]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return each stage's shares of C(b), forward and backward, over all configurations."""
    forward = [0.0] * num_stages
    backward = [0.0] * num_stages
    for times in measured:
        for total, part in zip((forward, backward), times, strict=True):
            for k, seconds in enumerate(part):
                total[k] += seconds
    whole = sum(forward) + sum(backward)
    if whole <= 0.0:
        # Equal stages until the timers have spoken.
        return even_shares(num_stages)
    return tuple(t / whole for t in forward), tuple(t / whole for t in backward)
