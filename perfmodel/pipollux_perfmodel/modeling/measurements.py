"""Measured step times of a user, in seconds: a file of JSON lines, one measurement per line.

    {"num_nodes": 1, "num_replicas": 2, "atomic_bsz": 16, "num_microbatches": 4, "num_stages": 2,
     "accum_step_time": 0.081, "optim_step_time": 0.115,
     "forward": [0.0051, 0.0053], "backward": [0.0083, 0.0084]}          (on one line)

Each invalid line is reported: a fit to fewer rows than the user expects is misleading.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from pipollux_utils.validation import problem_at, problems, spell_value

from .errors import ModelingError
from .files import decode

_LARGEST_COUNT = 10**9
_LONGEST = 10**8  # seconds, three years


def _count(value: Any) -> int:
    whole = isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
    if not whole or not 1 <= value <= _LARGEST_COUNT:
        raise ValueError(f"{_spell(value)} is not allowed; it must be a whole number from 1 on")
    return int(value)


def _seconds(value: Any, *, least: str = "above 0") -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    # Compared without conversion: a whole number may be too large for a float.
    if not number or not 0 <= value <= _LONGEST or (least == "above 0" and value == 0):
        raise ValueError(
            f"{_spell(value)} is not allowed; it must be a finite time {least}, in seconds"
        )
    return float(value)


def _stage_seconds(value: Any) -> tuple[float, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError(
            f"{_spell(value)} is not allowed; it must be a list of seconds, one for each stage"
        )
    times = []
    for index, seconds in enumerate(value):
        try:
            times.append(_seconds(seconds, least="from 0 on"))
        except ValueError as error:
            raise problem_at((index,), str(error)) from None
    return tuple(times)


def _spell(value: Any) -> str:
    return "null" if value is None else spell_value(value)


_Count = Annotated[int, BeforeValidator(_count)]
_Seconds = Annotated[float, BeforeValidator(_seconds)]
_StageSeconds = Annotated[tuple[float, ...], BeforeValidator(_stage_seconds)]


class Measurement(BaseModel):
    """One measured configuration, or one step of it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_nodes: _Count = Field(description="the nodes that the replicas lay on, a whole number")
    num_replicas: _Count = Field(description="the pipeline replicas, a whole number")
    atomic_bsz: _Count = Field(
        description="the samples per replica in one forward and backward, a whole number"
    )
    accum_step_time: _Seconds = Field(description="the seconds of an accumulation step")
    optim_step_time: _Seconds = Field(description="the seconds of an optimizer step")
    num_microbatches: _Count = 1
    num_stages: _Count = 1
    forward: _StageSeconds | None = None
    """Seconds of one micro-batch's forward, one per stage; None: not measured."""
    backward: _StageSeconds | None = None
    """The same for the backward, including recomputation."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_nodes > self.num_replicas:
            raise problem_at(
                ("num_nodes",),
                f"{self.num_nodes} is above num_replicas, {self.num_replicas}; a replica lies on "
                f"one node, so give at most {self.num_replicas}",
            )
        if self.num_microbatches > self.atomic_bsz:
            raise problem_at(
                ("num_microbatches",),
                f"{self.num_microbatches} is above atomic_bsz, {self.atomic_bsz}; a micro-batch "
                "has at least one sample",
            )
        self._check_stages()
        return self

    def _check_stages(self) -> None:
        for name, other in (("forward", "backward"), ("backward", "forward")):
            times = getattr(self, name)
            if times is None:
                continue
            if len(times) != self.num_stages:
                raise problem_at(
                    (name,),
                    f"has length {len(times)}, but num_stages is {self.num_stages}; "
                    "give one time for each stage",
                )
            if getattr(self, other) is None:
                raise problem_at((name,), f"is here without {other}; give both or none")
        if self.forward and self.backward and sum(self.forward) + sum(self.backward) == 0:
            raise problem_at(("forward",), "is 0 everywhere, as backward is; leave both out")

    @property
    def micro_bsz(self) -> float:
        """B, samples per micro-batch."""
        return self.atomic_bsz / self.num_microbatches


class MeasurementRow(NamedTuple):
    """A measurement and the location of its line."""

    place: str
    measurement: Measurement


class MeasurementRows(NamedTuple):
    """The measurements of a file."""

    rows: tuple[MeasurementRow, ...]
    bad: tuple[str, ...]
    num_bad: int


def parse_rows(text: str, name: str) -> MeasurementRows:
    """Read measurements, one JSON object per line; empty lines are skipped. Raises ModelingError
    without any line; `name` is that of the file, for messages.

    >>> parse_rows('{"num_nodes": 0}', "a.jsonl").bad[0]
    'a.jsonl:1: num_nodes: 0 is not allowed; it must be a whole number from 1 on'
    """
    rows: list[MeasurementRow] = []
    bad: list[str] = []
    num_bad = 0
    # Not splitlines, which also splits at characters that JSON allows within strings.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{name}:{number}"
        try:
            rows.append(MeasurementRow(place, _parse(line)))
        except ModelingError as error:
            num_bad += 1
            bad += [f"{place}: {problem}" for problem in error.problems]
    if not rows and not bad:
        raise ModelingError(
            f"{name}: no measurement found; give one JSON object a line, such as "
            '{"num_nodes": 1, "num_replicas": 1, "atomic_bsz": 32, "accum_step_time": 0.12, '
            '"optim_step_time": 0.12}'
        )
    return MeasurementRows(tuple(rows), tuple(bad), num_bad)


def _parse(line: str) -> Measurement:
    try:
        data = decode(line)
    except ValueError as error:
        raise ModelingError(str(error)) from None
    if not isinstance(data, dict):
        raise ModelingError(
            f"{_spell(data)} is not a measurement; it must be an object that begins with "
            '{"num_nodes": '
        )
    try:
        return Measurement.model_validate(data)
    except ValidationError as error:
        found = problems(error.errors(include_url=False), Measurement)
        raise ModelingError(*(problem.sentence() for problem in found)) from None
