"""Measured steps as input of the fit: one row per configuration."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from pipollux_hybrid.job.pipeline_spec import PipelineSchedule
from pipollux_perfmodel import even_shares
from pipollux_perfmodel.timing.params import (
    SCHEDULES,
    Checkpoints,
    ScheduleKind,
    modes_of_cut,
    stage_modes,
)

MicrobatchTimes: TypeAlias = tuple[tuple[float, ...], tuple[float, ...]]


class StepConfiguration(NamedTuple):
    """The properties that determine the time of a step."""

    num_stages: int
    num_nodes: int
    num_replicas: int
    atomic_bsz: int
    num_microbatches: int
    processes: int = 1
    """Processes per replica: one per stage, or one for all."""
    schedule: ScheduleKind = "gpipe"
    chunks_per_stage: int = 1
    """V; 1 unless interleaved."""
    level: int = 1
    """Network level at which the nodes meet; 1 on one node."""

    @property
    def order(self) -> PipelineSchedule:
        """The schedule with its chunks."""
        return PipelineSchedule(self.schedule, self.chunks_per_stage)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> StepConfiguration:
        """Return the configuration of a checkpoint's row, by default GPipe. Raises a KeyError,
        TypeError or ValueError if the row is invalid.
        """
        numbers = {
            name: int(row[name]) for name in cls._fields if name in row and name != "schedule"
        }
        usual = "1f1b" if numbers.get("processes", 1) > 1 else "gpipe"
        named = row.get("schedule", usual)
        schedule = next(kind for kind in SCHEDULES if kind == named)
        return cls(**numbers, schedule=schedule)


class StepSummary(NamedTuple):
    """Input of the fit for one configuration, in seconds."""

    accum: float
    optim: float
    forward: tuple[float, ...] = ()
    """Per stage, the forward of one micro-batch; empty: not measured."""
    backward: tuple[float, ...] = ()
    """Per stage, its backward, including recomputation."""
    passed_on: int = 0
    """How often it was passed on; 0: measured by this job."""
    exchange: float = 0.0
    """Part of an optimizer step that adds gradients of shared parameters."""
    scatter: float | None = None
    """Standard deviation of optimizer steps over their median; None: too few steps."""

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> StepSummary:
        """Return the summary of a row; a KeyError, TypeError or ValueError if invalid."""
        forward, backward = (tuple(map(float, row[name])) for name in ("forward", "backward"))
        times = (float(row["accum"]), float(row["optim"]))
        exchange = float(row.get("exchange", 0.0))
        scatter = row.get("scatter")
        scatter = None if scatter is None else float(scatter)
        return cls(*times, forward, backward, int(row["passed_on"]), exchange, scatter)


class FitData(NamedTuple):
    """The arguments of :func:`pipollux_perfmodel.fit_perf_params`, one entry per configuration.
    Optimizer steps exclude the exchange of shared parameters' gradients, which the network cannot
    explain: it costs nothing on one replica.
    """

    num_nodes: list[int]
    num_replicas: list[int]
    atomic_bsz: list[int]
    num_microbatches: list[int]
    accum_step_time: list[float]
    optim_step_time: list[float]
    compute_time: list[float]
    forward_shares: tuple[float, ...]
    backward_shares: tuple[float, ...]
    checkpoint: Checkpoints
    level: list[int]
    exchange: float
    """Seconds of that exchange, independent of the configuration."""


def fit_data(
    rows: Mapping[StepConfiguration, StepSummary], num_stages: int, checkpoint: Checkpoints
) -> FitData:
    """Return the input of the fit for rows with the same stages, processes and schedule."""
    checkpoint = modes_of_cut(checkpoint, num_stages)
    stages = [_stage_times(c, s, checkpoint) for c, s in rows.items()]
    forward, backward = _shares(num_stages, stages)
    return FitData(
        num_nodes=[c.num_nodes for c in rows],
        num_replicas=[c.num_replicas for c in rows],
        atomic_bsz=[c.atomic_bsz for c in rows],
        num_microbatches=[c.num_microbatches for c in rows],
        accum_step_time=[s.accum for s in rows.values()],
        optim_step_time=[max(s.optim - s.exchange, 1e-9) for s in rows.values()],
        compute_time=[sum(f) + sum(g) if f else math.nan for f, g in stages],
        forward_shares=forward,
        backward_shares=backward,
        checkpoint=checkpoint,
        level=[c.level for c in rows],
        exchange=statistics.median(s.exchange for s in rows.values()),
    )


def _stage_times(
    configuration: StepConfiguration, summary: StepSummary, checkpoint: Checkpoints
) -> MicrobatchTimes:
    """Return forward and backward times of one micro-batch in each stage; empty if unknown.

    The mean backward is over all micro-batches. Under ``except_last`` the last of M is not
    recomputed, so a recomputed one takes 1/M of a forward more than the mean.
    """
    forward, backward = summary.forward, summary.backward
    if not forward:
        return (), ()
    modes = stage_modes(checkpoint, len(forward))
    lacking = [(mode == "except_last") / configuration.num_microbatches for mode in modes]
    times = zip(forward, backward, lacking, strict=True)
    return forward, tuple(g + share * f for f, g, share in times)


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
        # Equal stages until stages have been timed.
        return even_shares(num_stages)
    return tuple(t / whole for t in forward), tuple(t / whole for t in backward)
