"""The files by which a job's processes and their agent leave word for the scheduler.

The job writes the first two beside its checkpoints. The agent that runs the script adds them to the
result, which its engine brings to the scheduler, also one that starts later.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["STOP_MARKER", "UNSENT_REPORT", "AgentResult", "ResultError", "StopMarker"]

STOP_MARKER = "stopped.json"
"""Name of the file of a :class:`StopMarker`."""
UNSENT_REPORT = "unsent_report.json"
"""Name of the file of the :class:`~pipollux_protocol.messages.TrainingReport` that no scheduler
took."""


class _File(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class StopMarker(_File):
    """An agreed stop, written when its checkpoint is complete."""

    attempt: int
    step: Annotated[int, Field(title="optimizer step of the checkpoint")]
    reason: str = "signal"


class ResultError(_File):
    """The exception that ended a script."""

    message: Annotated[str, Field(title="as Python prints it")]
    types: Annotated[tuple[str, ...], Field(title="its class and the bases of that")] = ()
    loaded: Annotated[
        bool, Field(title="whether the script had been read and compiled before it")
    ] = True


class AgentResult(_File):
    """How a replica has ended: the file that ``PIPOLLUX_RESULT_FILE`` names."""

    asked: Annotated[bool, Field(title="whether the agent was asked to stop")] = False
    error: ResultError | None = None
    step: Annotated[int | None, Field(title="of the stop marker of this run")] = None
    report: Annotated[
        dict[str, Any] | None, Field(title="the unsent report of this run, not validated")
    ] = None
