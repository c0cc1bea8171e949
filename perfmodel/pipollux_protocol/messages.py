"""The messages between a job and the scheduler, as JSON over HTTP.

Unknown keys are errors in requests, which catches typing mistakes, and are ignored in answers, so
that newer schedulers may add keys. Reports have keys in camelCase, like hints; all other messages
have keys in snake_case.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

MOST_ATTEMPTS = 2**62
MAX_POINTS = 1000
"""Most points per report; jobs send at most four per second."""
MAX_TIMELINE = 20_000
"""Most entries per timeline."""

MAX_METRICS = 1000
"""Most metrics per report."""
MAX_METRIC_NAME = 100

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
        """Return a JSON-serializable dict without keys that have their default."""
        return self.model_dump(mode="json", exclude_defaults=True)


class _Answer(BaseModel):
    # The schema describes this version; newer schedulers may add keys.
    model_config = ConfigDict(
        extra="ignore", frozen=True, json_schema_extra={"additionalProperties": False}
    )


# --- heartbeats --------------------------------------------------------------------------------


class StoreAddress(_Request):
    """The address of the store at which the replicas of a membership connect."""

    number: Annotated[Count, Field(title="number of the membership")]
    host: Annotated[str, Field(max_length=255, description="a name or an address")]
    port: Annotated[int, Field(ge=1, le=65535, description="a port")]


class ElasticStatus(_Request):
    """The state of a replica of a job with elastic resizes."""

    membership: Annotated[
        Count, Field(title="number of the current membership; 0: not joined yet")
    ] = 0
    replicas: Annotated[
        tuple[Count, ...],
        Field(max_length=65536, title="replica ids of the membership, by rank", strict=False),
    ] = ()
    waiting_to_join: Annotated[bool, Field(title="whether the replica is waiting to join")] = False
    epoch: Annotated[Count, Field(title="current epoch")] = 0
    loop: Annotated[Count, Field(title="completed data loader loops in the epoch")] = 0
    balance: Annotated[
        tuple[Count, ...],
        Field(max_length=4096, title="layers of each stage; sent by replica 0", strict=False),
    ] = ()
    schedule: Annotated[
        str, Field(max_length=100, title="pipeline schedule; sent by replica 0")
    ] = ""
    cannot: Annotated[
        str | None,
        Field(max_length=1000, title="why the job cannot be resized; sent by replica 0"),
    ] = None
    fixed: Annotated[
        Count,
        Field(title="replicas, from id 0 on, without which the others end; sent by replica 0"),
    ] = 0
    step: Annotated[
        Count | None, Field(title="optimizer step at which the replica entered the membership")
    ] = None
    seconds: Annotated[
        float | None, Field(ge=0, title="seconds for which the resize paused training")
    ] = None
    refused: Annotated[Count, Field(title="number of a failed membership; 0: none")] = 0
    why: Annotated[Sentence, Field(title="reason of the failure")] = ""
    for_good: Annotated[bool, Field(title="whether a retry would fail as well")] = False
    store: Annotated[
        StoreAddress | None, Field(title="address of the store; sent by replica 0")
    ] = None


class Heartbeat(_Request):
    """A periodic status message of one replica: ``POST /jobs/NAME/heartbeats``."""

    attempt: Annotated[Positive, Field(title="attempt of the job")]
    replica: Annotated[Replica, Field(title="id of the replica")]
    step: Annotated[Count | None, Field(title="last optimizer step; null: no step yet")] = None
    finished: Annotated[
        bool, Field(title="whether the script has ended and this is the last heartbeat")
    ] = False
    elastic: Annotated[ElasticStatus | None, Field(title="state for elastic resizes")] = None


class MembershipProposal(_Answer):
    """The replicas of a new membership."""

    number: Annotated[int, Field(title="number of the membership; increasing")]
    replicas: Annotated[tuple[str, ...], Field(title="replica ids, by rank")]
    num_nodes: Annotated[int, Field(title="number of nodes; 0: the number of hosts")] = 0
    network_level: Annotated[
        int, Field(title="level of the network at which the nodes meet; 0: as before")
    ] = 0


class JobAnnouncement(MembershipProposal):
    """The state of a running job, for a joining replica."""

    place: Annotated[
        tuple[int, int], Field(title="epoch, and completed data loader loops in the epoch")
    ]
    balance: Annotated[tuple[int, ...], Field(title="layers of each stage")] = ()
    schedule: Annotated[str, Field(title="pipeline schedule")] = ""
    processes: Annotated[int, Field(title="processes per replica")] = 1


class HeartbeatAnswer(_Answer):
    """The answer to a heartbeat."""

    again: Annotated[
        float | None, Field(title="seconds until the next heartbeat; null: the default interval")
    ] = None
    proposal: Annotated[MembershipProposal | None, Field(title="membership to form")] = None
    announcement: Annotated[
        JobAnnouncement | None,
        Field(title="job announcement, for a replica that is waiting to join"),
    ] = None
    store: Annotated[
        StoreAddress | None, Field(title="store at which the replicas of the proposal connect")
    ] = None
    network_level: Annotated[
        int | None,
        Field(title="level of the network at which the job's nodes meet now; null: no levels"),
    ] = None


class Stop(_Request):
    """A coordinated stop, reported once its checkpoint is written: ``POST /jobs/NAME/stops``."""

    attempt: Annotated[Positive, Field(title="attempt of the job")]
    step: Annotated[Count, Field(title="optimizer step of the checkpoint")]


# --- addresses of replicas ---------------------------------------------------------------------


class ReplicaRegistration(_Request):
    """The address of one replica: ``POST /jobs/NAME/replicas``."""

    attempt: Annotated[Positive, Field(title="attempt of the job")]
    replica: Annotated[Replica, Field(title="id of the replica")]
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

    replica: Annotated[int, Field(title="id of the replica")]
    address: Annotated[str, Field(title="host and port")]


class ReplicaAddresses(_Answer):
    """The registered replicas, by rank: ``GET /jobs/NAME/replicas``."""

    attempt: Annotated[int, Field(title="attempt of the job")]
    num_replicas: Annotated[int, Field(title="number of replicas of the attempt")]
    complete: Annotated[bool, Field(title="whether all replicas have registered")]
    replicas: Annotated[list[ReplicaAddress], Field(title="addresses of registered replicas")]


# --- reports -----------------------------------------------------------------------------------


class _CamelRequest(_Request):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, strict=False)

    def to_json_object(self) -> dict[str, Any]:
        """Return a JSON-serializable dict."""
        # Jobs build reports without validation: an invalid number must not end the training.
        return self.model_dump(mode="json", by_alias=True, warnings="none")


class Point(_CamelRequest):
    """Progress at one optimizer step."""

    time: Annotated[Moment, Field(title="time of the step")]
    step: Annotated[Count, Field(title="optimizer step")]
    epoch: Annotated[Count, Field(title="epoch")]
    samples: Annotated[Count, Field(title="samples processed by the job")]
    loss: Annotated[Number | None, Field(title="mean loss")] = None
    batch_size: Annotated[Positive, Field(title="global batch size")]
    atomic_bsz: Annotated[Positive, Field(title="samples per replica in one forward and backward")]
    accum_steps: Annotated[Count, Field(title="accumulation steps per optimizer step")]
    num_replicas: Annotated[Positive, Field(title="number of replicas")]
    step_time: Annotated[Seconds, Field(title="duration of the step")]
    predicted_step_time: Annotated[
        Amount | None, Field(title="predicted duration of the step, in seconds")
    ] = None
    goodput: Annotated[Amount | None, Field(title="goodput in samples per second")] = None
    efficiency: Annotated[Amount | None, Field(title="statistical efficiency")] = None


class StageTimeline(_CamelRequest):
    """Start and end times of each micro-batch in each stage during one optimizer step."""

    step: Annotated[Count, Field(title="optimizer step")]
    num_stages: Annotated[Positive, Field(title="number of stages K")]
    num_microbatches: Annotated[Positive, Field(title="number of micro-batches M")]
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


class Metric(_CamelRequest):
    """A value that the script measured, by which the trials of a sweep are compared."""

    name: Annotated[
        str,
        Field(
            max_length=MAX_METRIC_NAME,
            pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
            description="a name such as accuracy",
        ),
    ]
    step: Annotated[Count, Field(title="when it was measured: by default, epochs begun")]
    value: Annotated[Number | None, Field(title="the value; null: it is not finite")] = None


class TrainingReport(_CamelRequest):
    """Progress since the last report, occasionally with a timeline: ``POST /jobs/NAME/reports``."""

    attempt: Annotated[Positive, Field(title="attempt of the job")]
    num_epochs: Annotated[Positive | None, Field(title="number of epochs, if known")] = None
    points: Annotated[
        list[Point], Field(max_length=MAX_POINTS, title="progress since the last report")
    ] = []
    timeline: Annotated[StageTimeline | None, Field(title="timeline of a timed step")] = None
    metrics: Annotated[
        list[Metric], Field(max_length=MAX_METRICS, title="metrics since the last report")
    ] = []


class ReportAnswer(_Answer):
    """The answer to a report."""

    again: Annotated[float, Field(title="seconds until the next report")]


class InheritanceAnswer(_Answer):
    """Step times of related jobs, for a new job: ``GET /jobs/NAME/inheritance``."""

    predecessor: Annotated[str | None, Field(title="latest related job")] = None
    relatives: Annotated[
        tuple[str, ...], Field(title="jobs that measured the step times, latest first")
    ] = ()
    step_profile: Annotated[
        dict[str, Any] | None,
        Field(title="rows in the format of `stepProfile` in hints; null: no rows"),
    ] = None
