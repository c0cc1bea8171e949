"""Training progress that a running job reports: the body of ``POST /jobs/{name}/reports``.

The JSON has camelCase keys, like the hints; unknown keys and numbers that are not finite are
refused by name.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from pipollux_perfmodel.timing.params import ScheduleKind
from pipollux_sched.store import Point, Timeline

MAX_POINTS = 1000
"""Points in one report; jobs send at most four a second."""
MAX_TIMELINE = 20_000
"""Entries of one timeline."""

_Count = Annotated[int, Field(ge=0, le=2**62, description="a whole number of at least 0")]
_Positive = Annotated[int, Field(ge=1, le=2**62, description="a whole number of at least 1")]
_Moment = Annotated[
    float, Field(ge=0, le=32_503_680_000, description="seconds since 1970, before the year 3000")
]
_Seconds = Annotated[float, Field(ge=0, le=1e9, description="a number of seconds from 0 to 1e9")]
_Offset = Annotated[float, Field(ge=-1e9, le=1e9, description="a number of seconds")]
_Amount = Annotated[float, Field(ge=0, description="a number of at least 0, or null")]
_Number = Annotated[float, Field(description="a finite number, or null")]

StageEntry = tuple[_Count, _Count, Literal["forward", "backward"], _Offset, _Offset]


class _Wire(BaseModel):
    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        allow_inf_nan=False,
        frozen=True,
    )


class PointReport(_Wire):
    """Progress at one optimizer step."""

    time: _Moment
    step: _Count
    epoch: _Count
    samples: _Count
    loss: _Number | None = None
    batch_size: _Positive
    atomic_bsz: _Positive
    accum_steps: _Count
    num_replicas: _Positive
    step_time: _Seconds
    predicted_step_time: _Amount | None = None
    goodput: _Amount | None = None
    efficiency: _Amount | None = None


class TimelineReport(_Wire):
    """When each stage worked on each micro-batch during one optimizer step."""

    step: _Count
    num_stages: _Positive
    num_microbatches: _Positive
    schedule: Annotated[ScheduleKind, Field(description='"gpipe", "1f1b" or "interleaved"')] = (
        "gpipe"
    )
    events: Annotated[
        list[StageEntry],
        Field(
            max_length=MAX_TIMELINE,
            description='a list of [stage, micro-batch, "forward" or "backward", start, end]',
        ),
    ]


class TrainingReport(_Wire):
    """Progress since the last report, and occasionally a timeline."""

    generation: _Positive
    num_epochs: _Positive | None = None
    points: Annotated[list[PointReport], Field(max_length=MAX_POINTS)] = []
    timeline: TimelineReport | None = None

    def stored_points(self) -> list[Point]:
        """Return the points as the store keeps them."""
        return [Point(**point.__dict__, num_epochs=self.num_epochs) for point in self.points]

    def stored_timeline(self) -> Timeline | None:
        """Return the timeline as the store keeps it."""
        if self.timeline is None:
            return None
        return Timeline(
            step=self.timeline.step,
            num_stages=self.timeline.num_stages,
            num_microbatches=self.timeline.num_microbatches,
            events=tuple(self.timeline.events),
            schedule=self.timeline.schedule,
        )
