"""Specifications of jobs: `jobs.yaml`, and jobs sent as JSON.

Everything is validated before use: see `model`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, field_serializer, model_validator

from pipollux_perfmodel import SchedHints
from pipollux_sched.utils.yaml_file import SpecError, parse_yaml, read_yaml_file
from pipollux_utils.units import parse_duration
from pipollux_utils.validation import problem_at

from .dependencies import Dependency, check_dependencies, find_cycle, spelled_out
from .hints import HintsField
from .model import Bytes, Count, GpuType, List, Spec, check_names, load_model, parse_model
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
LEAST_MEMORY_LIMIT = 16 * 2**20
"""Bytes: a Python interpreter that imports nothing takes about 10 MiB."""
DEFAULT_MAX_REPLICAS = 64
DEFAULT_MAX_RESTARTS = 3
DEFAULT_START_TIMEOUT = 3600.0
"""Seconds: loading a large model and compiling it take minutes, and a script that never reports
should not hold its slots for days."""


__all__ = ["JobBatch", "JobSpec", "ResourceSpec", "SpecError", "load_jobs", "parse_job"]


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


def _check_memory_limit(size: int) -> int:
    if size < LEAST_MEMORY_LIMIT:
        raise ValueError(
            f"{size} is not allowed; it must be a size of at least 16MiB, such as 12GiB: no script "
            "starts in less"
        )
    return size


Duration = Annotated[
    float | None, BeforeValidator(parse_duration, json_schema_input_type=float | str | None)
]
FilePath = Annotated[str, AfterValidator(check_path), schema_bounds(MOST_PATH)]
ImageReference = Annotated[str, AfterValidator(check_image), schema_bounds(MOST_OF_IMAGE)]
ModuleName = Annotated[str, AfterValidator(check_module), schema_bounds(MOST_PATH)]
Command = Annotated[str, AfterValidator(check_command), schema_bounds(MOST_BYTES)]
ExitCode = Annotated[int, Field(ge=1, le=255)]
MemoryLimit = Annotated[Bytes, AfterValidator(_check_memory_limit)]
ExitRule = Literal["retry", "fail", "ignore"]
Argument = Annotated[str, Field(json_schema_extra={"maxLength": MOST_BYTES})]


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
    requested_replicas: Count | None = Field(
        default=None, description="a whole number of at least 1"
    )
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
    memory_limit: MemoryLimit | None = Field(
        default=None, description="a size of at least 16MiB, such as 12GiB"
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
        default=DEFAULT_MAX_RESTARTS,
        ge=0,
        le=10**9,
        description="a whole number from 0 to 1000000000",
    )
    """Restarts after failures. Restarts for a new allocation do not count."""
    deadline: Duration = Field(default=None, description="a duration such as 36h")
    """Time after submission at which the scheduler ends the job, complete or not; none: never."""
    max_run_time: Duration = Field(default=None, description="a duration such as 12h")
    """Time that the processes of the job may run, summed over its attempts since its submission,
    without time in the queue; then the job saves and fails. None: no limit."""
    exit_codes: ExitCodesSpec = Field(
        default=ExitCodesSpec(), description="a mapping such as {fail: [2], ignore: [99]}"
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
                    "is missing; give the path of a Python script, or instead a module such as "
                    "package.train, a command or an image",
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
        check_names("jobs", [job.name for job in self.jobs])
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


def load_jobs(path: str | Path) -> list[JobSpec]:
    """Return the jobs in a `jobs.yaml`; raise `SpecError` if it is invalid."""
    return list(load_model(read_yaml_file(path, "jobs:"), JobBatch).jobs)


def parse_jobs(text: str, source: str) -> list[JobSpec]:
    """Return the jobs in the text of a `jobs.yaml`; `source` names it in errors."""
    return list(load_model(parse_yaml(text, Path(source), "jobs:"), JobBatch).jobs)


def parse_job(data: Any, source: str = "job") -> JobSpec:
    """Return the job in decoded JSON; raise `SpecError` with its `source` if it is invalid."""
    return parse_model(data, JobSpec, source)
