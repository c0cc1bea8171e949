"""The files that a job's processes and their agent leave for the scheduler.

The job writes the first two beside its checkpoints. The agent that runs the script adds them to its
result, which the execution backend delivers to the scheduler, also after a scheduler restart.

The step of a stop reaches the scheduler on three paths, as each of them can fail: in
``POST /jobs/NAME/stops``, unless the scheduler is down; in the agent's result, unless a cluster
kills the agent after the grace period; from the :class:`StopMarker`, if the scheduler can read the
checkpoint directory. Exit status 143 alone is the stop of a script without Pipollux.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

STOP_MARKER = "stopped.json"
"""Name of the file of a :class:`StopMarker`."""
UNSENT_REPORT = "unsent_report.json"
"""Name of the file of an undelivered :class:`~pipollux_protocol.messages.TrainingReport`."""


class _File(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class StopMarker(_File):
    """A coordinated stop, recorded once its checkpoint is complete."""

    attempt: Annotated[int, Field(title="attempt of the job")]
    step: Annotated[int, Field(title="optimizer step of the checkpoint")]
    reason: Annotated[str, Field(title="reason of the stop")] = "signal"


class ResultError(_File):
    """The exception that ended a script."""

    message: Annotated[str, Field(title="message, as Python prints it")]
    types: Annotated[
        tuple[str, ...], Field(title="class of the exception and its base classes")
    ] = ()
    loaded: Annotated[
        bool, Field(title="whether the script had been loaded and compiled before the error")
    ] = True


class AgentResult(_File):
    """The outcome of a replica: the file that ``PIPOLLUX_RESULT_FILE`` names."""

    asked: Annotated[bool, Field(title="whether a stop of the replica was requested")] = False
    error: Annotated[ResultError | None, Field(title="exception that ended the script")] = None
    step: Annotated[int | None, Field(title="step of the stop marker of this attempt")] = None
    report: Annotated[
        dict[str, Any] | None, Field(title="undelivered report of this attempt, not validated")
    ] = None
