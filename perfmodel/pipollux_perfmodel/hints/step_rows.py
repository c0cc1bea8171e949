"""Measured step times in hints: what a job hands down to others of its family.

A row is what the fit takes of one configuration. Rows are few, and each is handed down a few times
only, so that what was wrong once, or on other hardware, is forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from pipollux_perfmodel.timing.params import ScheduleKind

from .codec import MAX_CHUNKS, STRICT_KEYS, CheckpointsField

__all__ = [
    "MAX_INHERITED",
    "MAX_PASSED_ON",
    "MAX_RELATIVES",
    "MAX_ROWS",
    "RENEWED",
    "InheritedRows",
    "StepRow",
    "StepRows",
]

MAX_ROWS = 64
"""The most rows that a job hands down."""
MAX_PASSED_ON = 3
"""How many times a row is handed down at most, from the job that measured it on."""
MAX_RELATIVES = 16
"""The most jobs whose rows one job begins with: the last that completed, and the latest others."""
RENEWED = 300.0
"""Seconds between two looks at what a predecessor at work has reported."""
MAX_INHERITED = 256
"""The most rows that one job begins with."""
_MAX_STAGES = 1024

_Count = Annotated[int, Field(ge=1, le=2**31)]
_StepTime = Annotated[float, Field(gt=0, le=1e6)]
_StageTimes = Annotated[
    tuple[Annotated[float, Field(ge=0, le=1e6)], ...], Field(max_length=_MAX_STAGES)
]


class _Row(BaseModel):
    """Base: strict keys, camelCase in JSON, immutable."""

    model_config = ConfigDict(
        **STRICT_KEYS, alias_generator=to_camel, populate_by_name=True, frozen=True
    )


class StepRow(_Row):
    """The step times of one configuration, in seconds: medians of what was measured.

    Example:
        >>> row = StepRow(num_stages=1, num_nodes=1, num_replicas=2, atomic_bsz=32,
        ...               num_microbatches=1, accum_step_time=0.2, optim_step_time=0.25)
        >>> row.model_dump(by_alias=True)["optimStepTime"]
        0.25
    """

    num_stages: Annotated[int, Field(ge=1, le=_MAX_STAGES)]
    num_nodes: _Count
    num_replicas: _Count
    atomic_bsz: _Count
    num_microbatches: _Count
    processes: _Count = 1
    """Of a replica."""
    schedule: ScheduleKind = "gpipe"
    chunks_per_stage: Annotated[int, Field(ge=1, le=MAX_CHUNKS)] = 1
    """V; 1 unless interleaved."""
    accum_step_time: _StepTime
    """Of an accumulation step, or an optimizer step without waiting for peers."""
    optim_step_time: _StepTime
    """Of an optimizer step."""
    forward: _StageTimes = ()
    """Of one micro-batch in each stage; empty: not measured."""
    backward: _StageTimes = ()
    """The same, recomputation included."""
    exchange_time: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Of the optimizer step: adding up gradients of what stages share."""
    scatter: Annotated[float, Field(ge=0, le=1e6)] | None = None
    """Standard deviation of optimizer steps over their median; None: too few steps to tell."""
    passed_on: Annotated[int, Field(ge=0, le=MAX_PASSED_ON - 1)] = 0
    """How many times it was handed down before; 0: this job measured it itself."""

    @property
    def configuration(self) -> tuple[Any, ...]:
        """What was measured: all but the times."""
        replicas = self.num_nodes, self.num_replicas, self.processes
        batch = self.atomic_bsz, self.num_microbatches
        return (self.num_stages, *replicas, *batch, self.schedule, self.chunks_per_stage)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_nodes > self.num_replicas:
            raise ValueError(
                f"numNodes {self.num_nodes} is more than numReplicas {self.num_replicas}; a "
                "replica lies on one node"
            )
        for name, times in (("forward", self.forward), ("backward", self.backward)):
            if len(times) not in (0, self.num_stages) or len(times) != len(self.forward):
                raise ValueError(
                    f"{name} has {len(times)} entries but numStages is {self.num_stages}; give one "
                    "for each stage in forward and in backward, or none"
                )
        return self


class StepRows(_Row):
    """The step profile of a job: its rows, and of what model they are."""

    checkpoint: CheckpointsField = "never"
    """Which micro-batches are recomputed."""
    num_layers: _Count
    """Of the model."""
    num_parameters: Annotated[int, Field(ge=0, le=2**62)]
    """Elements of all parameters of the model."""
    rows: Annotated[tuple[StepRow, ...], Field(min_length=1, max_length=MAX_ROWS)]
    """One for each configuration."""

    @property
    def traits(self) -> dict[str, Any]:
        """What rows of one model have in common, as fields."""
        return self.model_dump(include={"checkpoint", "num_layers", "num_parameters"})

    @property
    def max_replicas(self) -> int:
        """Largest number of replicas that was measured."""
        return max(row.num_replicas for row in self.rows)


class InheritedRows(StepRows):
    """The rows that a job begins with: those of its relatives, together."""

    rows: Annotated[tuple[StepRow, ...], Field(min_length=1, max_length=MAX_INHERITED)]
    """One for each configuration, those that were handed down least first."""

    @classmethod
    def of(cls, relatives: Sequence[StepRows]) -> InheritedRows | None:
        """Return what jobs hand down to another one.

        Of a configuration that several have, the row that was handed down least counts, and of
        equals the earlier job's. Rows of another model than the first job's are left out.

        Args:
            relatives: the rows of one job each, in order.

        Returns:
            What they measured themselves first; None: there are no jobs.
        """
        if not relatives:
            return None
        traits = relatives[0].traits
        alike = chain.from_iterable(x.rows for x in relatives if x.traits == traits)
        found: dict[tuple[Any, ...], StepRow] = {}
        for row in sorted(alike, key=lambda row: row.passed_on):
            found.setdefault(row.configuration, row)
        return cls(**traits, rows=tuple(found.values())[:MAX_INHERITED])
