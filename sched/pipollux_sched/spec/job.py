"""Specifications of clusters and jobs: `cluster.yaml`, `jobs.yaml`, and jobs sent as JSON.

Everything is validated before use. Each problem is one sentence with the file, line, place and
value, and the allowed values (`SpecError`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_serializer,
    model_validator,
)

from pipollux_perfmodel import SchedHints
from pipollux_perfmodel.timing.params import MAX_LEVELS
from pipollux_sched.utils.yaml_file import SpecError, YamlFile, parse_yaml, read_yaml_file
from pipollux_utils.units import parse_bytes, parse_duration
from pipollux_utils.validation import problem_at, problems

from .dependencies import Dependency, check_dependencies, find_cycle, spelled_out
from .hints import HintsField
from .names import (
    MOST_OF_IMAGE,
    NAME_LENGTH,
    FamilyName,
    Name,
    UserName,
    check_image,
    schema_bounds,
)
from .notify import NotifySpec, check_entries
from .sweep import Parameters, SweepSpec, check_placeholders, fill_in, trial_name
from .variables import check_variables

MOST_BYTES = 100_000
"""Largest size of an argument or variable, below Linux's limit of 131071 bytes."""
MOST_PATH = 4096
"""Largest length of a path: PATH_MAX on Linux."""
DEFAULT_MAX_REPLICAS = 64
DEFAULT_MAX_RESTARTS = 3
DEFAULT_START_TIMEOUT = 3600.0
"""Seconds: loading a large model and compiling it take minutes, and a script that never reports
should not hold its slots for days."""
_NODE_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_NODE_NAME_LENGTH = 253
"""Largest length of a full host name."""
_LABEL_LENGTH = 317
"""Largest length of a key of a label of Kubernetes: a DNS name, a slash and 63 characters."""


def check_args(args: Sequence[str]) -> Sequence[str]:
    """Return the arguments of a script; raise ValueError if one cannot be passed to a process."""
    for index, text in enumerate(args):
        size = len(text.encode(errors="surrogatepass"))
        if size > MOST_BYTES:
            raise ValueError(
                f"entry {index} has {size} bytes; a process is given at most {MOST_BYTES} in one "
                "text, so put it into a file"
            )
        if "\0" in text:
            raise ValueError(f"entry {index} holds a NUL character; leave it out")
    return args


def check_module(name: str) -> str:
    """Return the name of a module; raise ValueError if it cannot be one."""
    if len(name) > MOST_PATH or not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(
            f"'{name[:80]}' is not the name of a module; give one such as package.train, without "
            "'.py' and '-m'"
        )
    return name


def check_command(text: str) -> str:
    """Return a command for the shell; raise ValueError if a process cannot be given it."""
    if not text.strip():
        raise ValueError("is empty; give a command for the shell")
    check_args((text,))
    return text


def check_path(text: str) -> str:
    """Return the path of a file or folder; raise ValueError if it is empty, or no valid path."""
    if not text.strip():
        raise ValueError("is empty; give a path")
    if len(text) > MOST_PATH or "\0" in text:
        raise ValueError(
            f"{text[:20]!a}... is not a path; a path has at most {MOST_PATH} characters, none NUL"
        )
    return text


__all__ = [
    "ClusterSpec",
    "JobBatch",
    "JobSpec",
    "NodeSpec",
    "ResourceSpec",
    "SpecError",
    "load_cluster",
    "load_jobs",
    "parse_job",
    "with_levels",
]


def _check_node_name(name: str) -> str:
    if len(name) > _NODE_NAME_LENGTH or not _NODE_NAME.fullmatch(name):
        raise ValueError(
            f"'{name[:80]}' is not the name of a node; use up to {_NODE_NAME_LENGTH} letters, "
            "digits, '-', '_' and '.', with a letter or digit at both ends"
        )
    return name


def _check_gpu_type(text: str) -> str:
    if not text.strip() or len(text) > NAME_LENGTH:
        raise ValueError(
            f"'{text[:20]}' is not a type of GPU; give 1 to {NAME_LENGTH} characters, as in a100"
        )
    return text


def _check_level(name: str) -> str:
    if not name.strip():
        raise ValueError("an empty text is not the name of a level; give one such as rack")
    return _check_domain(name)


def _check_domain(name: str) -> str:
    if len(name) > _LABEL_LENGTH or not name.isprintable():
        raise ValueError(
            f"'{name[:20]}' is not a name for the network; use up to {_LABEL_LENGTH} printable "
            "characters"
        )
    return name


NodeName = Annotated[str, AfterValidator(_check_node_name)]
LevelName = Annotated[str, AfterValidator(_check_level), schema_bounds(_LABEL_LENGTH)]
DomainName = Annotated[str, AfterValidator(_check_domain), schema_bounds(_LABEL_LENGTH)]
Bytes = Annotated[int, BeforeValidator(parse_bytes, json_schema_input_type=int | str)]
Duration = Annotated[
    float | None, BeforeValidator(parse_duration, json_schema_input_type=float | str | None)
]
Count = Annotated[int, Field(ge=1)]
GpuType = Annotated[str, AfterValidator(_check_gpu_type), schema_bounds(NAME_LENGTH)]
FilePath = Annotated[str, AfterValidator(check_path), schema_bounds(MOST_PATH)]
ImageReference = Annotated[str, AfterValidator(check_image), schema_bounds(MOST_OF_IMAGE)]
ModuleName = Annotated[str, AfterValidator(check_module), schema_bounds(MOST_PATH)]
Command = Annotated[str, AfterValidator(check_command), schema_bounds(MOST_BYTES)]
ExitCode = Annotated[int, Field(ge=1, le=255)]
ExitRule = Literal["retry", "fail", "ignore"]
Argument = Annotated[str, Field(json_schema_extra={"maxLength": MOST_BYTES})]
T = TypeVar("T")
List = Annotated[tuple[T, ...], Field(strict=False)]


class Spec(BaseModel):
    """Base class: refuses unknown fields, converts no types, is immutable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class NodeSpec(Spec):
    """One node of the cluster."""

    name: NodeName = Field(description="a name, as in name: node-a")
    """Unique in the cluster; with Slurm and Kubernetes, the name of the node there."""
    slots: Count
    """Devices: a slot is one GPU, or one CPU thread on a node of kind `cpu`."""
    kind: Literal["gpu", "cpu"] = "gpu"
    """Kind of device."""
    cpus: Count | None = Field(default=None, description="a whole number of at least 1")
    """CPUs that jobs may request in total; none: unlimited."""
    memory: Bytes | None = Field(default=None, description="a size such as 256GiB")
    """Main memory that jobs may request in total; none: unlimited."""
    preemptible: bool = Field(default=False, description="true or false")
    """Whether the node may disappear at any time. The scheduler fills such nodes last."""
    gpu_type: GpuType | None = Field(default=None, description="a text such as a100")
    """GPU type that jobs with a `gpu_type` are matched against; none: unknown."""
    draining: bool = Field(default=False, description="true or false")
    """Whether the node is drained: it gets no new replicas, and preemptible jobs leave it."""
    cpu_slots: int = Field(default=0, ge=0, description="a whole number of at least 0")
    """Of a node with GPUs: CPU slots beside them, which form a further node, NAME-cpu, for jobs
    with `device: cpu`. Its CPUs and its part of the memory are taken from `cpus` and `memory`."""
    beside: NodeName | None = Field(default=None, description="the name of a node with GPUs")
    """Of a node with CPU slots: the node with GPUs on the same machine; `cpu_slots` sets it. Only
    jobs with `device: cpu` run here."""
    single_stage: bool = Field(default=False, description="true or false")
    """Whether replicas with several stages cannot run on the node: its slots are MIG slices, and a
    process sees one of them. The local backend finds this out itself."""
    topology: dict[LevelName, DomainName] = Field(
        default={}, description="a mapping such as {zone: a, rack: r1}"
    )
    """Its domain at each of the cluster's `levels`; a missing one: unknown."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.beside is not None and (self.kind != "cpu" or self.beside == self.name):
            raise problem_at(
                ("beside",),
                f"'{self.beside}' is for a node with kind: cpu, and names another node; leave it "
                "out, or give cpu_slots to the node with GPUs instead",
            )
        if self.cpu_slots and self.kind == "cpu":
            raise problem_at(
                ("cpu_slots",), f"{self.cpu_slots} are for a node with kind: gpu; raise slots"
            )
        if self.cpu_slots and self.cpus is not None and self.cpu_slots >= self.cpus:
            raise problem_at(
                ("cpu_slots",),
                f"{self.cpu_slots} leave none of cpus = {self.cpus} to jobs on the GPUs; lower the "
                "one or raise the other",
            )
        if self.cpu_slots and self.memory is not None and self.cpus is None:
            raise problem_at(
                ("cpus",), "is missing; it says which part of memory belongs to the cpu_slots"
            )
        return self

    def parts(self) -> tuple[Self, ...]:
        """Return the node, and the one of its CPU slots if it has any.

        Example:
            >>> gpus, cpus = NodeSpec(name="a", slots=8, cpus=64, cpu_slots=16).parts()
            >>> gpus.cpus, cpus.name, cpus.slots
            (48, 'a-cpu', 16)
        """
        if not self.cpu_slots:
            return (self,)
        cpus, memory, slots = self.cpus, self.memory, self.cpu_slots
        share = memory and cpus and max(memory * slots // cpus, 1)
        whole = {
            "cpu_slots": 0,
            "cpus": cpus and cpus - slots,
            "memory": share and memory and max(memory - share, 1),
        }
        beside = {
            "name": f"{self.name}-cpu",
            "slots": slots,
            "kind": "cpu",
            "beside": self.name,
            "cpus": slots,
            "memory": share,
            "gpu_type": None,
            "single_stage": False,
            "cpu_slots": 0,
        }
        return self.model_copy(update=whole), self.model_copy(update=beside)


class ClusterSpec(Spec):
    """The nodes of a cluster."""

    nodes: List[NodeSpec] = Field(description="a list of nodes")
    """The nodes; at least one. Those of `cpu_slots` are added."""
    levels: List[LevelName] = Field(
        default=(), max_length=MAX_LEVELS - 1, description="a list of names, as in [zone, rack]"
    )
    """Levels of the network between the nodes, from the widest to the narrowest. Domains of equal
    name in different wider domains differ. None: all nodes are equally close."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [node.name for node in self.nodes]
        _check_names("nodes", names)
        for index, node in enumerate(self.nodes):
            if node.cpu_slots and node.parts()[1].name in names:
                raise problem_at(
                    ("nodes", index, "cpu_slots"),
                    f"they form a node '{node.parts()[1].name}', which there is already; "
                    "rename one of them",
                )
        twice = [level for level, times in Counter(self.levels).items() if times > 1]
        if twice:
            raise problem_at(("levels",), f"names '{twice[0]}' twice; name each level once")
        for number, node in enumerate(self.nodes):
            for level in sorted(node.topology.keys() - set(self.levels)):
                known = f"those are {', '.join(self.levels)}" if self.levels else "there are none"
                raise problem_at(
                    ("nodes", number, "topology", level),
                    f"is not one of the cluster's levels; {known}, so give it in levels, as in "
                    "levels: [zone, rack]",
                )
        parts = tuple(part for node in self.nodes for part in node.parts())
        object.__setattr__(self, "nodes", parts)
        return self

    @property
    def placed_nodes(self) -> tuple[NodeSpec, ...]:
        """The nodes, with an entry in their topology for every level that any node has."""
        return tuple(with_levels(self.nodes, self.levels))


def with_levels(nodes: Sequence[NodeSpec], levels: Iterable[str]) -> list[NodeSpec]:
    """Return all nodes of a cluster with the same levels in their topology, the widest first; empty
    texts where a node has no domain. Levels at which no node has a domain are left out.
    """
    used = [level for level in levels if any(node.topology.get(level) for node in nodes)]
    return [
        node.model_copy(
            update={"topology": {level: node.topology.get(level, "") for level in used}}
        )
        for node in nodes
    ]


class ResourceSpec(Spec):
    """The resources that one pipeline replica holds on its node besides its slots."""

    cpus: int = Field(default=0, ge=0, description="a whole number of at least 0")
    """CPUs."""
    memory: Bytes = Field(default=0, description="a size such as 8GiB")
    """Main memory."""


class ExitCodesSpec(Spec):
    """What exit statuses mean for restarts: that of the first replica that failed counts.

    A process that a signal ends has the status 128 plus the number of the signal.
    """

    retry: List[ExitCode] = Field(default=(), description="a list of numbers from 1 to 255")
    """The only ones after which the job is restarted; none: all."""
    fail: List[ExitCode] = Field(default=(), description="a list of numbers from 1 to 255")
    """After these, the job fails at once."""
    ignore: List[ExitCode] = Field(default=(), description="a list of numbers from 1 to 255")
    """After these, the job is restarted without counting towards `max_restarts`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        lists = {"retry": self.retry, "fail": self.fail, "ignore": self.ignore}
        for name, codes in lists.items():
            for other, others in lists.items():
                both = sorted(set(codes) & set(others))
                if other != name and both:
                    raise problem_at((name,), f"{both[0]} is in {other}, too; name it once")
        return self

    def rule_for(self, status: int) -> ExitRule:
        """Return what an exit status means.

        Example:
            >>> ExitCodesSpec(fail=(2,)).rule_for(2), ExitCodesSpec(fail=(2,)).rule_for(1)
            ('fail', 'retry')
        """
        if status in self.ignore:
            return "ignore"
        refused = status in self.fail or (self.retry and status not in self.retry)
        return "fail" if refused else "retry"


class JobSpec(Spec):
    """One job: a training script or image, and the bounds of its allocation.

    Example:
        >>> JobSpec(name="digits", script="examples/digits.py", max_replicas=4).num_stages
        1
    """

    name: Name = Field(description="a name, as in name: char-lm")
    """Unique among the scheduler's jobs."""
    script: FilePath | None = Field(default=None, description="the path of a Python script")
    """The training script, relative to the job file or to the current folder. With an `image`: a
    path inside the image; none, and no `module` or `command`: the image's entry point runs."""
    module: ModuleName | None = Field(
        default=None, description="the name of a module, as in package.train"
    )
    """A module to run in place of a script, as `python -m` does, found from `working_dir` on."""
    command: Command | None = Field(
        default=None, description="a command for the shell, as in ./train.sh --fast"
    )
    """A command to run in place of a script, by `/bin/sh -c`, with `args` as `$1`, `$2`, …"""
    python: FilePath | None = Field(
        default=None, description="the path of an interpreter or a virtual environment"
    )
    """Interpreter or virtual environment of the processes, relative to the job file or to the
    current folder; it needs this version of Pipollux. None: the scheduler's, with an `image`
    `python3`. With an `image`: the path of an interpreter in it."""
    image: ImageReference | None = Field(
        default=None, description="a reference such as registry.example/train:2.1"
    )
    """Container image of the replicas. The local backend refuses jobs with an image."""
    family: FamilyName | None = Field(default=None, description="a name, as in family: resnet")
    """Family of similar jobs, which share measured step times. None: the name without a trailing
    number, among jobs with the same script and image; an empty text: no family."""
    args: Annotated[List[Argument], AfterValidator(check_args)] = Field(
        default=(), description="a list of texts"
    )
    """Arguments of the script or of the image's entry point."""
    after: Annotated[
        List[Dependency], BeforeValidator(spelled_out), AfterValidator(check_dependencies)
    ] = Field(default=(), description="a list of names of jobs, or of {job: NAME, when: ended}")
    """Jobs that have to end before this one starts. A name waits for success; `when` is
    `succeeded`, `failed` or `ended`."""
    sweep: SweepSpec | None = Field(
        default=None, description="a mapping such as {grid: {lr: [0.1, 0.01]}}"
    )
    """Runs the job many times with different parameters, which replace placeholders such as
    `{lr}` in `args`."""
    num_stages: Count = 1
    """Number K of stages of a replica, one slot each; a replica lies on one node."""
    stage_choices: List[Count] = Field(default=(), description="a list of numbers, as in [1, 2, 4]")
    """Numbers of stages that the scheduler may choose from, `num_stages` among them; none:
    `num_stages` only. It chooses another one once the job has reported a profile of its layers."""
    process_per_stage: bool = Field(default=False, description="true or false")
    """Whether replicas are multi-process pipelines, with one process per stage."""
    servers: int = Field(default=0, ge=0, description="a whole number of at least 0")
    """Servers for training by push and pull (`synchronization=PushPull(…)`), which run beside the
    first replicas, one each; 0: replicas average gradients in every step."""
    num_microbatches: Count = 1
    """Number M of micro-batches of one forward and backward pass."""
    min_replicas: Count = 1
    """Smallest number of replicas; with less room the job waits in the queue."""
    max_replicas: Count = DEFAULT_MAX_REPLICAS
    """Largest number of replicas."""
    requested_replicas: Count | None = Field(default=None, description="a whole number")
    """Number of replicas under policies with fixed sizes, such as FIFO; none: `min_replicas`."""
    gpu_type: GpuType | None = Field(default=None, description="a text such as a100")
    """GPU type that the job requires; none: any."""
    device: Literal["gpu", "cpu"] | None = Field(default=None, description="gpu or cpu")
    """Kind of slot that the job requires. None: any, or GPUs where CPU slots lie beside them
    (`cpu_slots` of a node)."""
    preemptible: bool = Field(default=True, description="true or false")
    """Whether the scheduler may change the allocation of the job while it runs."""
    team: Name | None = Field(default=None, description="the name of a team")
    """Team whose quota the job counts towards; none: the user's first team, else the default."""
    user: UserName | None = Field(default=None, description="the name of a user")
    """Owner of the job. A user's token sets it."""
    run_as: UserName | None = Field(default=None, description="a user of the machine")
    """Unix user that runs the processes, if the scheduler runs as root; none: the scheduler's user.
    A user's token sets it."""
    priority: Name | None = Field(default=None, description="the name of a class of priority")
    """Priority class; none: priority 0."""
    resources: ResourceSpec = Field(
        default=ResourceSpec(), description="a mapping, as in {cpus: 1, memory: 8GiB}"
    )
    """Resources of each replica besides its slots."""
    resources_per_stage: ResourceSpec = Field(
        default=ResourceSpec(), description="a mapping, as in {cpus: 1, memory: 8GiB}"
    )
    """Resources of each stage of a replica, added to `resources`."""
    memory_limit: Annotated[Bytes, Field(ge=1)] | None = Field(
        default=None, description="a size such as 12GiB"
    )
    """Main memory that a replica may use; a replica that uses more is ended, which is a failure.
    None: no limit but that of the cluster."""
    environment: Annotated[dict[str, str], AfterValidator(check_variables)] = Field(
        default={}, description="a mapping of texts to texts", repr=False
    )
    """Environment variables of the processes. Output and error messages do not show the values."""
    working_dir: FilePath | None = Field(default=None, description="the path of a folder")
    """Working directory of the script; none: the current folder at submission, with an `image` the
    one that the image sets."""
    checkpoint_dir: FilePath | None = Field(default=None, description="the path of a folder")
    """Checkpoint directory, used by this job only and visible to every node; none: a folder in the
    scheduler's state directory."""
    max_restarts: int = Field(
        default=DEFAULT_MAX_RESTARTS, ge=0, description="a whole number of at least 0"
    )
    """Restarts after failures. Restarts for a new allocation do not count."""
    deadline: Duration = Field(default=None, description="a duration such as 36h")
    """Time after submission at which the scheduler ends the job, complete or not; none: never."""
    max_run_time: Duration = Field(default=None, description="a duration such as 12h")
    """Time that the processes of the job may run, summed over its attempts since its submission,
    without time in the queue; then the job saves and fails. None: no limit."""
    exit_codes: ExitCodesSpec = Field(
        default=ExitCodesSpec(), description="a mapping such as {fail: [2], ignore: [75]}"
    )
    """What exit statuses of the script mean for restarts."""
    start_timeout: Duration = Field(
        default=DEFAULT_START_TIMEOUT, description="a duration such as 30m, or null"
    )
    """Time from the start of the processes to the first optimizer step, after which the job is
    restarted; null: no limit."""
    hang_timeout: Duration = Field(default=None, description="a duration such as 30m")
    """Time without an optimizer step, after the first one, after which the job is restarted; none:
    no limit."""
    notify: Annotated[List[NotifySpec], AfterValidator(check_entries)] = Field(
        default=(),
        description="a list such as [{channel: ops, events: [completed, failed]}]",
        repr=False,
    )
    """Where to send notifications about the job, and which."""
    hints: HintsField | None = None
    """Hints that the job starts with, such as measured performance parameters."""
    allocation: List[str] = Field(default=(), description="a list of node names, one per replica")
    """Current allocation, one node name per replica. Only `pipollux plan` reads it."""

    @field_serializer("notify")
    def _notify_to_json(self, _notify: Sequence[NotifySpec]) -> List[NotifySpec]:
        # Destinations hold secrets: they are left out everywhere, except by `revealed`.
        return ()

    def revealed(self, *, exclude_defaults: bool = False) -> dict[str, Any]:
        """Return the job as JSON with the destinations of notifications, to be sent."""
        data = self.model_dump(mode="json", exclude_defaults=exclude_defaults)
        return data | (
            {"notify": [entry.revealed() for entry in self.notify]} if self.notify else {}
        )

    @field_serializer("hints")
    def _hints_to_json(self, hints: SchedHints | None) -> dict[str, Any] | None:
        return None if hints is None else hints.to_json_object()

    @model_validator(mode="before")
    @classmethod
    def _hints_know_the_pipeline(cls, data: Any) -> Any:
        """Set the stages and micro-batches of the hints to the job's own."""
        hints = data.get("hints") if isinstance(data, Mapping) else None
        if not isinstance(hints, Mapping):
            return data
        known = {
            "numStages": data.get("num_stages", 1),
            "numMicrobatches": data.get("num_microbatches", 1),
        }
        return {**data, "hints": {**known, **hints}}

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_program()
        if self.min_replicas > self.max_replicas:
            raise problem_at(
                ("min_replicas",),
                f"{self.min_replicas} is more than max_replicas = {self.max_replicas}; "
                "lower the one or raise the other",
            )
        self._check_choices()
        if self.sweep is not None:
            self._check_sweep(self.sweep)
        running = len(self.allocation)
        if running and not self.min_replicas <= running <= self.max_replicas:
            raise problem_at(
                ("allocation",),
                f"names {running} replicas, but min_replicas = {self.min_replicas} and "
                f"max_replicas = {self.max_replicas}; list one node name per running replica",
            )
        if self.hints is not None:
            self._check_hints(self.hints)
        return self

    @property
    def has_program(self) -> bool:
        """Whether it has a script, module or command, and not an image's entry point alone."""
        return any(one is not None for one in (self.script, self.module, self.command))

    def _check_program(self) -> None:
        if self.servers and self.image is not None and not self.has_program:
            raise problem_at(
                ("servers",),
                f"{self.servers} needs a script, as an image's own entry point starts no servers; "
                "give as script a path inside the image",
            )
        given = [name for name in ("script", "module", "command") if getattr(self, name)]
        if len(given) > 1:
            raise problem_at(
                (given[1],), f"is given, and so is {given[0]}; a job has one of them: remove one"
            )
        least = self.resources.memory + self.resources_per_stage.memory * self.num_stages
        if self.memory_limit is not None and self.memory_limit < least:
            raise problem_at(
                ("memory_limit",),
                f"{self.memory_limit} is less than the {least} bytes of resources and "
                "resources_per_stage; raise it, or lower these",
            )
        if self.image is None:
            if not given:
                raise problem_at(
                    ("script",),
                    "is missing; give the path of a Python script, or as image a reference such as "
                    "registry.example/train:2.1",
                )
            return
        if self.python is not None and not self.has_program:
            raise problem_at(("python",), "is of no use for the image's entry point; leave it out")
        if self.script is not None and self.script.startswith("-"):
            raise problem_at(("script",), f"'{self.script}' begins with '-'; give ./{self.script}")
        folders = {
            "python": self.python,
            "working_dir": self.working_dir,
            "checkpoint_dir": self.checkpoint_dir,
        }
        for name, folder in folders.items():
            if folder is not None and not folder.startswith("/"):
                raise problem_at(
                    (name,),
                    f"'{folder}' is relative, but a job with an image begins in no folder of this "
                    "machine; give a path that begins with '/'",
                )

    def _check_sweep(self, sweep: SweepSpec) -> None:
        check_placeholders(self.args, sweep.names)
        last = trial_name(self.name, sweep.num_trials - 1)
        if len(last) > NAME_LENGTH:
            raise problem_at(
                ("name",),
                f"'{self.name}' is too long for a sweep: the name of its last trial, {last}, has "
                f"{len(last)} characters, at most {NAME_LENGTH} are allowed; shorten it",
            )
        for name in ("checkpoint_dir", "allocation"):
            if getattr(self, name):
                raise problem_at((name,), "is for one job; leave it out of a sweep")

    def of_trial(self, number: int, parameters: Parameters) -> Self:
        """Return the job of a trial of this sweep."""
        changes = {
            "name": trial_name(self.name, number),
            "args": tuple(fill_in(text, parameters) for text in self.args),
            "sweep": None,
            "after": (),
            "deadline": None,
            "notify": (),
        }
        return self.model_copy(update=changes)

    def _check_choices(self) -> None:
        requested, choices = self.requested_replicas, self.stage_choices
        if requested is not None and not self.min_replicas <= requested <= self.max_replicas:
            raise problem_at(
                ("requested_replicas",),
                f"{requested} is not between min_replicas = {self.min_replicas} and "
                f"max_replicas = {self.max_replicas}; change one of them",
            )
        if choices and self.num_stages not in choices:
            raise problem_at(
                ("stage_choices",),
                f"{list(choices)} lacks num_stages = {self.num_stages}, which the job starts with; "
                "add it",
            )
        if len(set(choices)) < len(choices):
            raise problem_at(
                ("stage_choices",), f"{list(choices)} names a number twice; name each once"
            )

    def _check_hints(self, hints: SchedHints) -> None:
        pairs = (
            ("numStages", hints.num_stages, "num_stages", self.num_stages),
            ("numMicrobatches", hints.num_microbatches, "num_microbatches", self.num_microbatches),
        )
        for hint, hinted, name, stated in pairs:
            if hinted != stated:
                raise problem_at(
                    ("hints",),
                    f"{hint} is {hinted} but {name} of the job is {stated}; make them equal",
                )


class JobBatch(Spec):
    """The contents of a job file: jobs that are submitted together."""

    jobs: List[JobSpec] = Field(description="a list of jobs")
    """The jobs; at least one."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_names("jobs", [job.name for job in self.jobs])
        cycle = cycle_of(self.jobs)
        if cycle is not None:
            index = [job.name for job in self.jobs].index(cycle[0])
            raise problem_at(("jobs", index, "after"), spell_cycle(cycle))
        return self


def cycle_of(jobs: Sequence[JobSpec]) -> list[str] | None:
    """Return jobs that wait for each other in a circle: see `find_cycle`."""
    return find_cycle({job.name: [entry.job for entry in job.after] for job in jobs})


def spell_cycle(cycle: Sequence[str]) -> str:
    """Explain why jobs that wait for each other in a circle are refused."""
    return (
        f"jobs that wait for each other in a circle never start ({' after '.join(cycle)}); remove "
        "one of the dependencies"
    )


def _check_names(where: str, names: Sequence[str]) -> None:
    if not names:
        raise problem_at((where,), "the list is empty; it must have at least 1 entry")
    first: dict[str, int] = {}
    for index, name in enumerate(names):
        if name in first:
            raise problem_at(
                (where, index, "name"),
                f"'{name}' is also the name of {where}[{first[name]}]; give each its own",
            )
        first[name] = index


def load_cluster(path: str | Path) -> ClusterSpec:
    """Return the cluster in a `cluster.yaml`; raise `SpecError` if it is invalid."""
    return load_model(read_yaml_file(path, "nodes:"), ClusterSpec)


def load_jobs(path: str | Path) -> list[JobSpec]:
    """Return the jobs in a `jobs.yaml`; raise `SpecError` if it is invalid."""
    return list(load_model(read_yaml_file(path, "jobs:"), JobBatch).jobs)


def parse_jobs(text: str, source: str) -> list[JobSpec]:
    """Return the jobs in the text of a `jobs.yaml`; `source` names it in errors."""
    return list(load_model(parse_yaml(text, Path(source), "jobs:"), JobBatch).jobs)


def parse_job(data: Any, source: str = "job") -> JobSpec:
    """Return the job in decoded JSON; raise `SpecError` with its `source` if it is invalid."""
    return parse_model(data, JobSpec, source)


M = TypeVar("M", bound=BaseModel)


def parse_model(data: Any, model: type[M], source: str) -> M:
    """Return the model in decoded JSON; raise `SpecError` with its `source` if it is invalid."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        found = problems(error.errors(include_url=False), model)
        raise SpecError(*(f"{source}: {problem.sentence()}" for problem in found)) from None


def load_model(document: YamlFile, model: type[M]) -> M:
    """Return the model in a file; raise `SpecError` with the lines of problems."""
    try:
        return model.model_validate(document.data)
    except ValidationError as error:
        raise SpecError(
            *(
                f"{document.path}:{document.line(problem.place)}: {problem.sentence()}"
                for problem in problems(error.errors(include_url=False), model, document.written)
            )
        ) from None
