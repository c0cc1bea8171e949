"""Measured times of steps and stages, by configuration: the input of the performance model's fit.

The latest samples are summarized by their median, so that slow steps (a page fault, a neighbour's
burst) do not distort the fit. The first steps of an attempt are excluded as warm-up, and steps
slowed down by measurements once there are others.
"""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipollux_hybrid.job.pipeline_spec import PipelineSchedule
from pipollux_perfmodel.timing.params import Checkpoints

from .step_summary import FitData, StepConfiguration, StepSummary, fit_data

__all__ = ["Measurements", "StepConfiguration", "StepProfile"]

GPIPE = PipelineSchedule("gpipe")
WINDOW = 64
"""Latest samples kept per configuration and kind."""
WARMUP = 2
"""Steps excluded at the start of an attempt and after a change of the batch size."""
ENOUGH = 3
"""Undisturbed samples from which on disturbed ones are ignored."""
STEADY = 20
"""Optimizer steps from which on a batch size counts as measured: with fewer, other load would make
batch sizes oscillate."""
NORMAL = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""


class StepTimes:
    """The latest samples of one kind of step, in seconds."""

    def __init__(self) -> None:
        self._quiet: deque[float] = deque(maxlen=WINDOW)
        self._disturbed: deque[float] = deque(maxlen=WINDOW)

    def __len__(self) -> int:
        return len(self._quiet) + len(self._disturbed)

    def add(self, seconds: float, *, disturbed: bool) -> None:
        """Add a step; a disturbed one also measured the noise or its stages."""
        (self._disturbed if disturbed else self._quiet).append(seconds)

    def median(self) -> float:
        """Return the median of the undisturbed steps, or of all if there are too few."""
        return statistics.median(self._counted())

    def scatter(self) -> float:
        """Return the relative deviation from the median: the standard deviation of a normal
        distribution with the same median deviation, which ignores stragglers.
        """
        middle = self.median()
        deviation = statistics.median(abs(x - middle) for x in self._counted())
        return NORMAL * deviation / middle if middle > 0 else 0.0

    def _counted(self) -> Sequence[float]:
        quiet = len(self._quiet) >= ENOUGH
        return self._quiet if quiet else [*self._quiet, *self._disturbed]

    def to_json(self) -> list[list[float]]:
        """Return undisturbed and disturbed samples."""
        return [list(self._quiet), list(self._disturbed)]

    def load_json(self, content: Sequence[Any]) -> None:
        """Restore :meth:`to_json`'s result; the first release wrote one list."""
        quiet, disturbed = content if content and isinstance(content[0], list) else (content, [])
        self._quiet.extend(map(float, quiet))
        self._disturbed.extend(map(float, disturbed))


@dataclass
class Measurements:
    """Samples for one configuration, in seconds."""

    accum: StepTimes = field(default_factory=StepTimes)
    """Accumulation steps."""
    alone: StepTimes = field(default_factory=StepTimes)
    """Optimizer steps without the waiting time for peers and the exchange."""
    optim: StepTimes = field(default_factory=StepTimes)
    exchange: StepTimes = field(default_factory=StepTimes)
    """Part of optimizer steps that adds gradients of shared parameters."""
    forward: deque[tuple[float, ...]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Per stage, the forward of one micro-batch."""
    backward: deque[tuple[float, ...]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Per stage, the backward of one micro-batch, including recomputation."""

    def accum_step_time(self) -> float:
        """Return the accumulation step time for the fit; without such steps an optimizer step
        without waiting is the best approximation, though it includes the optimizer's update.
        """
        return (self.accum or self.alone).median()

    def summary(self) -> StepSummary:
        """Return the input of the fit; requires at least one optimizer step."""
        return StepSummary(
            self.accum_step_time(),
            self.optim.median(),
            stage_medians(self.forward),
            stage_medians(self.backward),
            exchange=self.exchange.median() if self.exchange else 0.0,
            scatter=self.optim.scatter() if len(self.optim) >= STEADY else None,
        )


class StepProfile:
    """Measurements of all configurations of the job, and inherited ones.

    Own measurements of a configuration take precedence. A lock synchronizes the training thread,
    which writes, and the thread that fits.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._measurements: dict[StepConfiguration, Measurements] = {}
        self._inherited: dict[StepConfiguration, StepSummary] = {}
        self._settled: set[StepConfiguration] = set()
        self._latest: StepConfiguration | None = None
        self._to_skip = WARMUP

    def add_step(
        self,
        configuration: StepConfiguration,
        step_time: float,
        sync_time: float,
        exchange_time: float = 0.0,
        *,
        optimizer: bool,
        disturbed: bool = False,
    ) -> None:
        """Add one accumulation or optimizer step, in seconds.

        Args:
            configuration: Configuration of the step.
            step_time: From one step boundary to the next.
            sync_time: Part of it that waits for the other replicas' gradients.
            exchange_time: Part of it that adds gradients of shared parameters.
            optimizer: Whether it was an optimizer step.
            disturbed: Whether measuring the noise or the stages slowed it down.
        """
        with self._lock:
            if configuration != self._latest:
                self._latest, self._to_skip = configuration, WARMUP
                if configuration in self._measurements:  # the latest last
                    known = self._measurements.pop(configuration)
                    self._measurements[configuration] = known
            if self._to_skip > 0:
                self._to_skip -= 1
                return
            entry = self._measurements.get(configuration)
            if entry is None:
                entry = self._measurements[configuration] = Measurements()
            if not optimizer:
                entry.accum.add(step_time, disturbed=disturbed)
                return
            alone = max(step_time - sync_time - exchange_time, 1e-9)
            entry.alone.add(alone, disturbed=disturbed)
            entry.optim.add(step_time, disturbed=disturbed)
            if exchange_time > 0.0:
                entry.exchange.add(exchange_time, disturbed=disturbed)

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
        """Largest measured number of replicas, 0 without measurements."""
        return max((c.num_replicas for c in self.summaries()), default=0)

    @property
    def inherited(self) -> dict[StepConfiguration, StepSummary]:
        """Inherited measurements of all configurations."""
        with self._lock:
            return dict(self._inherited)

    def inherit(self, rows: Mapping[StepConfiguration, StepSummary]) -> None:
        """Replace the inherited measurements."""
        with self._lock:
            self._inherited = dict(rows)

    def settle(self, configurations: Iterable[StepConfiguration]) -> None:
        """Drop inherited measurements of configurations whose own measurements agree with them."""
        with self._lock:
            for configuration in configurations:
                self._inherited.pop(configuration, None)
                self._settled.add(configuration)

    def unsettled(self, least: int) -> dict[StepConfiguration, StepSummary]:
        """Return measurements of :meth:`own` that have not been compared with inherited ones."""
        with self._lock:
            return {c: s for c, s in self._own(least).items() if c not in self._settled}

    def own(self, least: int = 1) -> dict[StepConfiguration, StepSummary]:
        """Return own measurements of at least ``least`` optimizer steps, the latest last."""
        with self._lock:
            return self._own(least)

    def summaries(self) -> dict[StepConfiguration, StepSummary]:
        """Return inherited and own measurements; own ones take precedence."""
        with self._lock:
            return {**self._inherited, **self._own()}

    def _own(self, least: int = 1) -> dict[StepConfiguration, StepSummary]:
        """Return :meth:`own`; the caller holds the lock."""
        return {
            c: m.summary() for c, m in self._measurements.items() if len(m.optim) >= max(least, 1)
        }

    def orders(self, num_stages: int, processes: int) -> tuple[PipelineSchedule, ...]:
        """Return the schedules measured with these numbers of stages and processes."""
        known = (num_stages, processes)
        found = (c.order for c in self.summaries() if (c.num_stages, c.processes) == known)
        return tuple(dict.fromkeys(found))

    def fit_data(
        self,
        num_stages: int,
        checkpoint: Checkpoints = "never",
        processes: int = 1,
        order: PipelineSchedule = GPIPE,
    ) -> FitData | None:
        """Return the input of a fit for pipelines of ``num_stages``; None before the first step.

        The engines' times are not comparable, so steps with other ``processes`` per replica, or
        another schedule, are excluded.
        """
        wanted = (num_stages, processes, order)
        found = {
            c: s
            for c, s in self.summaries().items()
            if (c.num_stages, c.processes, c.order) == wanted
        }
        return fit_data(found, num_stages, checkpoint) if found else None

    def inherited_to_json(self) -> list[dict[str, Any]]:
        """Return the inherited measurements as plain numbers, for a checkpoint."""
        return [{**c._asdict(), **s._asdict()} for c, s in self.inherited.items()]

    def load_inherited(self, content: Iterable[Mapping[str, Any]]) -> None:
        """Restore :meth:`inherited_to_json`'s result."""
        self.inherit(
            {StepConfiguration.from_json(row): StepSummary.from_json(row) for row in content}
        )

    def to_json(self) -> list[dict[str, Any]]:
        """Return all own measurements as plain lists, for a checkpoint."""
        with self._lock:
            return [
                {
                    **c._asdict(),
                    "accum": m.accum.to_json(),
                    "alone": m.alone.to_json(),
                    "optim": m.optim.to_json(),
                    "exchange": m.exchange.to_json(),
                    "forward": list(m.forward),
                    "backward": list(m.backward),
                }
                for c, m in self._measurements.items()
            ]

    def load_json(self, content: Iterable[Mapping[str, Any]]) -> None:
        """Restore :meth:`to_json`'s result."""
        with self._lock:
            for row in content:
                key = StepConfiguration.from_json(row)
                entry = self._measurements.setdefault(key, Measurements())
                # The first release stored both kinds of steps as accumulation steps.
                entry.alone.load_json(row.get("alone", row["accum"]))
                entry.accum.load_json(row["accum"] if "alone" in row else [])
                entry.optim.load_json(row["optim"])
                entry.exchange.load_json(row.get("exchange", []))
                entry.forward.extend(tuple(map(float, times)) for times in row["forward"])
                entry.backward.extend(tuple(map(float, times)) for times in row["backward"])


def stage_medians(samples: Iterable[tuple[float, ...]]) -> tuple[float, ...]:
    """Return the median over samples, for each stage."""
    return tuple(statistics.median(times) for times in zip(*samples, strict=True))
