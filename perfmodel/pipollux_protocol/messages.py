"""The messages between a job and the scheduler, as JSON over HTTP.

Requests refuse keys that they do not know, so that a mistake is seen; answers ignore them, so that
a newer scheduler may say more. Keys of reports are in camelCase, as those of hints are; all others
are in snake_case.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

__all__ = [
    "MOST_ATTEMPTS",
    "Heartbeat",
    "HeartbeatAnswer",
    "InheritanceAnswer",
    "JobAnnouncement",
    "LiveStatus",
    "MembershipProposal",
    "Point",
    "ReplicaAddress",
    "ReplicaAddresses",
    "ReplicaRegistration",
    "ReportAnswer",
    "StageTimeline",
    "Stop",
    "StoreAddress",
    "TrainingReport",
]

MOST_ATTEMPTS = 2**62
MAX_POINTS = 1000
"""Points in one report; jobs send at most four a second."""
MAX_TIMELINE = 20_000
"""Entries of one timeline."""

ScheduleName: TypeAlias = Literal["gpipe", "1f1b", "interleaved"]
Count: TypeAlias = Annotated[int, Field(ge=0, le=2**62, description="a whole number of at least 0")]
Positive: TypeAlias = Annotated[
    int, Field(ge=1, le=2**62, description="a whole number of at least 1")
]
Replica: TypeAlias = Annotated[
    int, Field(ge=0, le=2**31, description="a whole number of at least 0")
]
Sentence: TypeAlias = Annotated[str, Field(max_length=1000, description="a sentence")]
Moment: TypeAlias = Annotated[
    float, Field(ge=0, le=32_503_680_000, description="seconds since 1970, before the year 3000")
]
Seconds: TypeAlias = Annotated[
    float, Field(ge=0, le=1e9, description="a number of seconds from 0 to 1e9")
]
Offset: TypeAlias = Annotated[float, Field(ge=-1e9, le=1e9, description="a number of seconds")]
Amount: TypeAlias = Annotated[float, Field(ge=0, description="a number of at least 0, or null")]
Number: TypeAlias = Annotated[float, Field(description="a finite number, or null")]
StageEntry: TypeAlias = tuple[Count, Count, Literal["forward", "backward"], Offset, Offset]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True, strict=True)

    def to_json_object(self) -> dict[str, Any]:
        """Return it as JSON can hold it, without keys that have their default."""
        return self.model_dump(mode="json", exclude_defaults=True)


class _Answer(BaseModel):
    # Described as this scheduler sends it; a newer one may add keys.
    model_config = ConfigDict(
        extra="ignore", frozen=True, json_schema_extra={"additionalProperties": False}
    )


# --- heartbeats --------------------------------------------------------------------------------


class StoreAddress(_Request):
    """The address at which the replicas of a membership find each other."""

    number: Count
    host: Annotated[str, Field(max_length=255, description="a name or an address")]
    port: Annotated[int, Field(ge=1, le=65535, description="a port")]


class LiveStatus(_Request):
    """The status of a replica in elastic resizes."""

    membership: Annotated[
        Count, Field(title="number of the membership that it takes part in; 0: it is to join")
    ] = 0
    replicas: Annotated[
        tuple[Count, ...],
        Field(max_length=65536, title="ids of its replicas, by rank", strict=False),
    ] = ()
    waiting_to_join: Annotated[bool, Field(title="whether it waits to join")] = False
    epoch: Annotated[Count, Field(title="epoch that the script is in")] = 0
    loop: Annotated[Count, Field(title="loops over loaders that were done in it")] = 0
    balance: Annotated[
        tuple[Count, ...],
        Field(max_length=4096, title="layers of each stage, of replica 0", strict=False),
    ] = ()
    schedule: Annotated[str, Field(max_length=100, title="pipeline schedule, of replica 0")] = ""
    cannot: Annotated[
        str | None,
        Field(max_length=1000, title="why replicas can neither join nor leave, of replica 0"),
    ] = None
    step: Annotated[
        Count | None, Field(title="optimizer step at which it entered the membership")
    ] = None
    seconds: Annotated[
        float | None, Field(ge=0, title="seconds that no replica trained for then")
    ] = None
    refused: Annotated[Count, Field(title="number of a membership that failed; 0: none")] = 0
    why: Annotated[Sentence, Field(title="why it failed")] = ""
    for_good: Annotated[bool, Field(title="whether another attempt would fail, too")] = False
    store: Annotated[StoreAddress | None, Field(title="where the others find it, of replica 0")] = (
        None
    )


class Heartbeat(_Request):
    """A sign of life of one replica: ``POST /jobs/NAME/heartbeats``."""

    attempt: Positive
    replica: Replica
    step: Annotated[Count | None, Field(title="optimizer step; null: there has been none")] = None
    finished: Annotated[
        bool, Field(title="true if the replica's script has ended and no more are sent")
    ] = False
    live: LiveStatus | None = None


class MembershipProposal(_Answer):
    """The replicas that are to train together."""

    number: Annotated[int, Field(title="grows from one to the next")]
    replicas: Annotated[tuple[str, ...], Field(title="ids in the order of ranks")]
    num_nodes: Annotated[int, Field(title="nodes that they are on; 0: as many as hosts")] = 0


class JobAnnouncement(MembershipProposal):
    """A running job, for a replica that is to join it."""

    place: Annotated[
        tuple[int, int], Field(title="epoch, and loops over loaders that were done in it")
    ]
    balance: Annotated[tuple[int, ...], Field(title="layers of each stage")] = ()
    schedule: Annotated[str, Field(title="pipeline schedule")] = ""
    processes: Annotated[int, Field(title="processes of each replica")] = 1


class HeartbeatAnswer(_Answer):
    """The answer to a heartbeat."""

    again: Annotated[
        float | None, Field(title="seconds until the next one; null: the usual interval")
    ] = None
    proposal: Annotated[
        MembershipProposal | None, Field(title="a membership that is to be formed")
    ] = None
    announcement: Annotated[
        JobAnnouncement | None, Field(title="for a replica that is to join: the others")
    ] = None
    store: Annotated[
        StoreAddress | None, Field(title="where the replicas of the proposal meet")
    ] = None


class Stop(_Request):
    """An agreed stop, once its checkpoint is written: ``POST /jobs/NAME/stops``."""

    attempt: Positive
    step: Annotated[Count, Field(title="optimizer step of the checkpoint")]


# --- addresses of replicas ---------------------------------------------------------------------


class ReplicaRegistration(_Request):
    """The address of one replica: ``POST /jobs/NAME/replicas``."""

    attempt: Positive
    replica: Replica
    address: Annotated[
        str,
        Field(
            max_length=255,
            pattern=r"^[A-Za-z0-9._:\[\]-]+:[0-9]{1,5}$",
            description="a text such as 10.0.0.7:29500",
        ),
    ]


class ReplicaAddress(_Answer):
    """The address of one replica."""

    replica: int
    address: str


class ReplicaAddresses(_Answer):
    """The replicas that have registered, in order: ``GET /jobs/NAME/replicas``."""

    attempt: int
    num_replicas: Annotated[int, Field(title="replicas that the run has in all")]
    complete: Annotated[bool, Field(title="whether all have registered")]
    replicas: list[ReplicaAddress]


# --- reports -----------------------------------------------------------------------------------


class _CamelRequest(_Request):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, strict=False)

    def to_json_object(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        # Jobs make reports without validation, so that an odd number does not end the training.
        return self.model_dump(mode="json", by_alias=True, warnings="none")


class Point(_CamelRequest):
    """Progress at one optimizer step."""

    time: Moment
    step: Count
    epoch: Count
    samples: Count
    loss: Number | None = None
    batch_size: Positive
    atomic_bsz: Positive
    accum_steps: Count
    num_replicas: Positive
    step_time: Seconds
    predicted_step_time: Amount | None = None
    goodput: Amount | None = None
    efficiency: Amount | None = None


class StageTimeline(_CamelRequest):
    """When each stage worked on each micro-batch during one optimizer step."""

    step: Count
    num_stages: Positive
    num_microbatches: Positive
    schedule: Annotated[ScheduleName, Field(description='"gpipe", "1f1b" or "interleaved"')] = (
        "gpipe"
    )
    events: Annotated[
        list[StageEntry],
        Field(
            max_length=MAX_TIMELINE,
            description='a list of [stage, micro-batch, "forward" or "backward", start, end]',
        ),
    ]


class TrainingReport(_CamelRequest):
    """Progress since the last report, and occasionally a timeline: ``POST /jobs/NAME/reports``."""

    attempt: Positive
    num_epochs: Positive | None = None
    points: Annotated[list[Point], Field(max_length=MAX_POINTS)] = []
    timeline: StageTimeline | None = None


class ReportAnswer(_Answer):
    """The answer to a report."""

    again: Annotated[float, Field(title="seconds until the next one")]


class InheritanceAnswer(_Answer):
    """Step times that a job begins with, of its family: ``GET /jobs/NAME/inheritance``."""

    predecessor: Annotated[str | None, Field(title="the latest job of the family")] = None
    relatives: Annotated[
        tuple[str, ...], Field(title="the jobs that measured them, the latest first")
    ] = ()
    step_profile: Annotated[
        dict[str, Any] | None,
        Field(title="rows as in the hints' `stepProfile`; null: there are none"),
    ] = None
