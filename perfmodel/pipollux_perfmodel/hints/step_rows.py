"""Measured step times in hints, which a job passes on to related jobs.

A row is the input of the fit for one configuration. The number of rows is bounded, and each is
passed on a limited number of times, so that errors and times of other hardware disappear.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic.alias_generators import to_camel

from pipollux_perfmodel.timing.params import MAX_LEVELS, ScheduleKind

from .codec import MAX_CHUNKS, STRICT_KEYS, CheckpointsField

MAX_ROWS = 64
MAX_PASSED_ON = 3
"""How often a row is passed on, starting from the job that measured it."""
MAX_RELATIVES = 16
"""Most jobs whose rows a new job starts with: the last completed ones and the latest others."""
RENEWED = 300.0
"""Seconds between reads of the reports of a running predecessor."""
MAX_INHERITED = 256
_MAX_STAGES = 1024

_Count = Annotated[int, Field(ge=1, le=2**31)]
_StepTime = Annotated[float, Field(gt=0, le=1e6)]
_StageTimes = Annotated[
    tuple[Annotated[float, Field(ge=0, le=1e6)], ...], Field(max_length=_MAX_STAGES)
]


class _Row(BaseModel):
    model_config = ConfigDict(
        **STRICT_KEYS, alias_generator=to_camel, populate_by_name=True, frozen=True
    )


class StepRow(_Row):
    """The step times of one configuration in seconds, medians of the measurements.

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
    schedule: ScheduleKind = "gpipe"
    chunks_per_stage: Annotated[int, Field(ge=1, le=MAX_CHUNKS)] = 1
    accum_step_time: _StepTime
    """Seconds of an accumulation step, or of an optimizer step without waiting for peers."""
    optim_step_time: _StepTime
    forward: _StageTimes = ()
    """Seconds of one micro-batch's forward in each stage; empty: not measured."""
    backward: _StageTimes = ()
    """The same for the backward, including recomputation."""
    exchange_time: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Seconds of the optimizer step for adding gradients of shared parameters."""
    scatter: Annotated[float, Field(ge=0, le=1e6)] | None = None
    """Standard deviation of optimizer steps over their median; None: too few steps."""
    level: Annotated[int, Field(ge=1, le=MAX_LEVELS)] = 1
    """Network level at which the nodes meet; 1 on one node."""
    passed_on: Annotated[int, Field(ge=0, le=MAX_PASSED_ON - 1)] = 0
    """How often the row was passed on before; 0: measured by this job."""

    @property
    def configuration(self) -> tuple[Any, ...]:
        """The measured configuration: all fields except the times."""
        replicas = self.num_nodes, self.num_replicas, self.processes
        batch = self.atomic_bsz, self.num_microbatches
        order = self.schedule, self.chunks_per_stage
        return (self.num_stages, *replicas, *batch, *order, self.level)

    @model_serializer(mode="wrap")
    def _leave_out_level(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit level 1, as earlier readers do not know the key."""
        written: dict[str, Any] = write(self)
        if self.level == 1:
            written.pop("level", None)
        return written

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
    """The step profile of a job: its rows, and the properties of its model."""

    checkpoint: CheckpointsField = "never"
    num_layers: _Count
    num_parameters: Annotated[int, Field(ge=0, le=2**62)]
    """Elements of all parameters of the model."""
    rows: Annotated[tuple[StepRow, ...], Field(min_length=1, max_length=MAX_ROWS)]

    @property
    def traits(self) -> dict[str, Any]:
        """Fields that rows of one model have in common."""
        return self.model_dump(include={"checkpoint", "num_layers", "num_parameters"})

    @property
    def max_replicas(self) -> int:
        """Largest measured number of replicas."""
        return max(row.num_replicas for row in self.rows)


class InheritedRows(StepRows):
    """The combined rows of related jobs that a new job starts with."""

    rows: Annotated[tuple[StepRow, ...], Field(min_length=1, max_length=MAX_INHERITED)]
    """One row per configuration, ordered by how often it was passed on."""

    @classmethod
    def of(cls, relatives: Sequence[StepRows]) -> InheritedRows | None:
        """Combine the rows of related jobs, measured ones first; None without jobs.

        If several jobs have a configuration, the row that was passed on least often counts, then
        that of the earlier job in `relatives`. Rows of other models than the first's are omitted.
        """
        if not relatives:
            return None
        traits = relatives[0].traits
        alike = chain.from_iterable(x.rows for x in relatives if x.traits == traits)
        found: dict[tuple[Any, ...], StepRow] = {}
        for row in sorted(alike, key=lambda row: row.passed_on):
            found.setdefault(row.configuration, row)
        return cls(**traits, rows=tuple(found.values())[:MAX_INHERITED])
