"""The environment variables of a job's processes.

Example::

    NUM_STAGES.write(4)                          # {"PIPOLLUX_NUM_STAGES": "4"}, the scheduler
    NUM_STAGES.read({"PIPOLLUX_NUM_STAGES": "4"})   # 4, the job
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

T = TypeVar("T")
SetBy = Literal["scheduler", "user", "scheduler or user", "agent", "agent or user", "torchrun"]


class Kind(Protocol[T]):
    """Conversion between values of a type and the text of a variable."""

    @property
    def allowed(self) -> str:
        """The allowed values, as the end of an error message."""

    def parse(self, text: str) -> T:
        """Return the value of a non-empty text.

        Raises:
            ValueError: The text is not an allowed value.
        """

    def format(self, value: T) -> str:
        """Return the text of a value."""


class Text:
    """Any text."""

    allowed = "a text is needed"

    def parse(self, text: str) -> str:
        """Return the text."""
        return text

    def format(self, value: str) -> str:
        """Return the text."""
        return value


class PathKind:
    """A path."""

    allowed = "a path is needed"

    def parse(self, text: str) -> Path:
        """Return the path."""
        return Path(text)

    def format(self, value: Path) -> str:
        """Return the path as text."""
        return str(value)


@dataclass(frozen=True)
class Whole:
    """A whole number of at least a minimum."""

    minimum: int

    @property
    def allowed(self) -> str:
        """What is allowed."""
        return f"a whole number of at least {self.minimum} is needed"

    def parse(self, text: str) -> int:
        """Return the number."""
        value = int(text)
        if value < self.minimum:
            raise ValueError
        return value

    def format(self, value: int) -> str:
        """Return its digits."""
        return str(int(value))


@dataclass(frozen=True)
class Seconds:
    """A positive number of seconds, or 0 where it may switch something off."""

    zero: bool = False

    @property
    def allowed(self) -> str:
        """What is allowed."""
        none = ", or 0 for none," if self.zero else ""
        return f"a positive number of seconds{none} is needed"

    def parse(self, text: str) -> float:
        """Return the seconds."""
        value = float(text)
        if not 0.0 < value < float("inf") and not (self.zero and value == 0.0):
            raise ValueError
        return value

    def format(self, value: float) -> str:
        """Return the seconds with all their digits."""
        return repr(float(value))


class Switch:
    """0 or 1."""

    allowed = "0 and 1 are allowed"

    def parse(self, text: str) -> bool:
        """Return whether it is 1."""
        if text.strip() not in ("0", "1"):
            raise ValueError
        return text.strip() == "1"

    def format(self, value: bool) -> str:
        """Return 0 or 1."""
        return str(int(value))


class Names:
    """Names separated by commas."""

    allowed = "names separated by commas are needed"

    def parse(self, text: str) -> tuple[str, ...]:
        """Return the names."""
        return tuple(name.strip() for name in text.split(",") if name.strip())

    def format(self, value: tuple[str, ...]) -> str:
        """Return the names, separated by commas."""
        return ",".join(value)


class Addresses:
    """Hosts with ports, separated by commas."""

    allowed = "addresses such as 10.0.0.1:7700,10.0.0.2:7700 are needed"

    def parse(self, text: str) -> tuple[str, ...]:
        """Return the addresses."""
        addresses = Names().parse(text)
        for address in addresses:
            host, _, port = address.rpartition(":")
            if not host or not 0 < int(port) < 1 << 16:
                raise ValueError
        return addresses

    def format(self, value: tuple[str, ...]) -> str:
        """Return the addresses, separated by commas."""
        return ",".join(value)


@dataclass(frozen=True)
class Variable(Generic[T]):
    """An environment variable.

    Attributes:
        name: Name of the variable.
        kind: Text format of its values.
        set_by: The component that sets it.
        meaning: Description for the reference page.
        default: Description of the default.
    """

    name: str
    kind: Kind[T]
    set_by: SetBy
    meaning: str
    default: str

    def read(self, environ: Mapping[str, str]) -> T | None:
        """Return the value; None if the variable is unset or empty.

        Raises:
            ValueError: The message names the variable, its value and the allowed values.
        """
        text = environ.get(self.name, "")
        if not text.strip():
            return None
        try:
            return self.kind.parse(text)
        except ValueError:
            raise ValueError(
                f"environment variable {self.name}={text!r}: {self.kind.allowed}"
            ) from None

    def write(self, value: T) -> dict[str, str]:
        """Return the variable and its text, for the environment of a new process."""
        return {self.name: self.kind.format(value)}


JOB_ID = Variable("PIPOLLUX_JOB_ID", Text(), "scheduler", "name of the job", "no scheduler")
ATTEMPT = Variable(
    "PIPOLLUX_ATTEMPT",
    Whole(0),
    "scheduler",
    "number of this attempt of the job, from 1",
    "0: no scheduler",
)
REPLICA = Variable(
    "PIPOLLUX_REPLICA",
    Whole(0),
    "scheduler or user",
    "id of this replica, unique within the attempt; its rank may change",
    "the rank",
)
SWEEP = Variable(
    "PIPOLLUX_SWEEP", Text(), "scheduler", "name of the sweep that this job is a trial of", "none"
)
TRIAL = Variable(
    "PIPOLLUX_TRIAL", Whole(0), "scheduler", "number of this trial of the sweep, from 0", "none"
)
TRIAL_PARAMETERS = Variable(
    "PIPOLLUX_TRIAL_PARAMETERS",
    Text(),
    "scheduler",
    "parameters of this trial, as a JSON object; each is also in a variable by its name, as in "
    "`PIPOLLUX_TRIAL_PARAMETER_LR`",
    "none",
)
NUM_STAGES = Variable(
    "PIPOLLUX_NUM_STAGES",
    Whole(1),
    "scheduler or user",
    "number of pipeline stages K; overrides the script's `num_stages`",
    "the script's",
)
PROCESSES_PER_REPLICA = Variable(
    "PIPOLLUX_PROCESSES_PER_REPLICA",
    Whole(1),
    "scheduler or user",
    "processes per replica: 1, or one per stage; overrides the script's `processes_per_replica`",
    "the script's, or 1",
)
NUM_NODES = Variable(
    "PIPOLLUX_NUM_NODES",
    Whole(1),
    "scheduler",
    "number of nodes that run the job's replicas",
    "from torchrun's local world size",
)
NETWORK_LEVEL = Variable(
    "PIPOLLUX_NETWORK_LEVEL",
    Whole(1),
    "scheduler",
    "level of the network at which the job's nodes meet: 1 the lowest above the node, such as a "
    "rack; step times are fitted by level",
    "1",
)
DEVICES = Variable(
    "PIPOLLUX_DEVICES",
    Names(),
    "scheduler or user",
    "device of each stage, separated by commas",
    "this replica's share of the node's GPUs, else the CPU",
)
CHECKPOINT_DIR = Variable(
    "PIPOLLUX_CHECKPOINT_DIR",
    PathKind(),
    "scheduler or user",
    "checkpoint directory, on storage that all nodes share",
    "nothing is saved",
)
CHECKPOINT_INTERVAL = Variable(
    "PIPOLLUX_CHECKPOINT_INTERVAL",
    Seconds(),
    "scheduler or user",
    "seconds between periodic checkpoints",
    "60",
)
CHECKPOINT_BACKGROUND = Variable(
    "PIPOLLUX_CHECKPOINT_BACKGROUND",
    Switch(),
    "user",
    "1: write periodic checkpoints in a background thread",
    "0",
)
SCHEDULER_URL = Variable(
    "PIPOLLUX_SCHEDULER_URL",
    Text(),
    "scheduler",
    "URL of the scheduler, for heartbeats, reports and hints",
    "none: progress is shown in the terminal",
)
TOKEN = Variable(
    "PIPOLLUX_TOKEN",
    Text(),
    "scheduler or user",
    "secret token of the job for requests to the scheduler, or to the servers of "
    "`PIPOLLUX_SERVERS`",
    "none",
)
CA_FILE = Variable(
    "PIPOLLUX_CA_FILE",
    PathKind(),
    "scheduler or user",
    "CA certificates in PEM format, for a scheduler URL with https",
    "the system's",
)
HEARTBEAT_INTERVAL = Variable(
    "PIPOLLUX_HEARTBEAT_INTERVAL",
    Seconds(zero=True),
    "scheduler or user",
    "seconds between heartbeats of each replica; 0: no heartbeats",
    "10",
)
HINTS_INTERVAL = Variable(
    "PIPOLLUX_HINTS_INTERVAL",
    Seconds(),
    "scheduler or user",
    "seconds between fits of the performance model",
    "30",
)
ELASTIC = Variable(
    "PIPOLLUX_ELASTIC",
    Switch(),
    "scheduler",
    "1: replicas join and leave without a restart; a script may set 0 to "
    "[turn this off](../concepts/elastic-resize.md#turn-it-off)",
    "0",
)
ELASTIC_NCCL = Variable(
    "PIPOLLUX_ELASTIC_NCCL",
    Switch(),
    "user",
    "1: elastic resizes also over NCCL (experimental: not yet measured on several GPUs)",
    "0",
)
JOINS = Variable(
    "PIPOLLUX_JOINS",
    Switch(),
    "scheduler",
    "1: this replica joins a running job",
    "0",
)
ADDRESS = Variable(
    "PIPOLLUX_ADDRESS",
    Text(),
    "agent",
    "address of this host for the other replicas",
    "127.0.0.1",
)
RENDEZVOUS = Variable(
    "PIPOLLUX_RENDEZVOUS",
    PathKind(),
    "user",
    "rendezvous folder for elastic resizes without a scheduler, on storage that all nodes share",
    "no elastic resizes",
)
NODE = Variable("PIPOLLUX_NODE", Text(), "scheduler", "node of this replica", "the host's name")
NUM_SERVERS = Variable(
    "PIPOLLUX_NUM_SERVERS",
    Whole(0),
    "scheduler",
    "servers for training by push and pull, which agents run beside replicas 0, 1, …",
    "0",
)
EXPECTED_REPLICAS = Variable(
    "PIPOLLUX_EXPECTED_REPLICAS",
    Whole(1),
    "scheduler",
    "replicas that push and pull when this one is started",
    "torchrun's replicas",
)
SERVERS = Variable(
    "PIPOLLUX_SERVERS",
    Addresses(),
    "agent or user",
    "addresses of the servers for training by push and pull, separated by commas",
    "replicas average gradients in every step",
)
TIMEOUT = Variable(
    "PIPOLLUX_TIMEOUT",
    Seconds(),
    "user",
    "seconds that replicas wait for a slow replica; overrides the script's `timeout`",
    "the script's, or 1800",
)
HOST_TIMEOUT = Variable(
    "PIPOLLUX_HOST_TIMEOUT",
    Seconds(zero=True),
    "user",
    "seconds until an unreachable host counts as lost; 0: `PIPOLLUX_TIMEOUT` applies",
    "60",
)
FROZEN_TIMEOUT = Variable(
    "PIPOLLUX_FROZEN_TIMEOUT",
    Seconds(zero=True),
    "scheduler or user",
    "seconds until an unresponsive process, and its replica, counts as lost; applies with "
    "`PIPOLLUX_RENDEZVOUS` and between the processes of a replica; 0: `PIPOLLUX_TIMEOUT` applies",
    "60",
)
CHECK_REPLICAS = Variable(
    "PIPOLLUX_CHECK_REPLICAS",
    Whole(0),
    "user",
    "optimizer steps between comparisons of parameters and buffers across replicas; 0: none",
    "0",
)
PROGRESS = Variable(
    "PIPOLLUX_PROGRESS",
    Switch(),
    "user",
    "0: no progress bar; a scheduler also disables it",
    "1",
)
TENSORBOARD_DIR = Variable(
    "PIPOLLUX_TENSORBOARD_DIR",
    PathKind(),
    "user",
    "directory for TensorBoard scalars",
    "no scalars",
)
TRACE_DIR = Variable(
    "PIPOLLUX_TRACE_DIR", PathKind(), "user", "directory for step traces", "no traces"
)
RESULT_FILE = Variable(
    "PIPOLLUX_RESULT_FILE",
    PathKind(),
    "scheduler",
    "file to which the agent writes the replica's result",
    "no result file",
)
RESULT_LIMIT = Variable(
    "PIPOLLUX_RESULT_LIMIT",
    Whole(1),
    "scheduler",
    "maximum size of the result file in bytes",
    str(2**23),
)
AGENT_FOLDER = Variable(
    "PIPOLLUX_AGENT_FOLDER",
    PathKind(),
    "scheduler",
    "directory for files of the agent and of torch",
    "a temporary directory",
)


def trial_variables(sweep: str, number: int, parameters: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables of a trial of a sweep.

    Example:
        >>> trial_variables("rates", 3, {"lr": 0.1})["PIPOLLUX_TRIAL_PARAMETER_LR"]
        '0.1'
    """
    return {
        **SWEEP.write(sweep),
        **TRIAL.write(number),
        **TRIAL_PARAMETERS.write(json.dumps(dict(parameters))),
        **{
            f"PIPOLLUX_TRIAL_PARAMETER_{name.upper()}": parameter_text(value)
            for name, value in parameters.items()
        },
    }


def parameter_text(value: Any) -> str:
    """Return the text of a parameter's value in an argument or variable.

    Example:
        >>> [parameter_text(value) for value in (True, 64, 1e-05, "adam")]
        ['true', '64', '1e-05', 'adam']
    """
    return str(value).lower() if isinstance(value, bool) else str(value)


VARIABLES: tuple[Variable[Any], ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Variable)
)
"""All variables, in the order of the reference page."""
