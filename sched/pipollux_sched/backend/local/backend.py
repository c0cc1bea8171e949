"""Jobs as processes of this machine, on virtual nodes.

A virtual node is a name and a number of slots. A slot of a CPU node is a CPU device of one thread;
a slot of a GPU node is one GPU, and the GPU nodes share out the machine's GPUs in the order in
which they are listed. Each pipeline replica is one torchrun agent, which sees only its own GPUs.

The processes do not depend on the scheduler that started them: when it is killed they go on, and
the next scheduler of the state directory adopts them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from pipollux_sched.backend.base import BackendError, Node, ReplicaProgram
from pipollux_sched.backend.generations import Generations
from pipollux_sched.spec.job import JobSpec, SpecError
from pipollux_sched.store import StateDir

from . import processes
from .environment import Devices, marks, replica_environment
from .generation_file import GenerationFile, drop_earlier, error_files, status_files
from .replica_group import LocalGroup
from .replica_process import ReplicaProcess
from .starting import free_port, start_replicas

_REPORT_LIMIT = 8 * 2**20
"""Limit on the characters of a report; a thousand points and a time line have far fewer."""
STOP_GRACE = 30.0
"""Seconds that a job has to save a checkpoint when it is asked to stop."""


def check_local(spec: JobSpec) -> None:
    """Refuse a job that cannot run as processes of this machine: one in a container.

    Raises:
        SpecError: it has an image.
    """
    if spec.image is not None:
        raise SpecError(
            f"job '{spec.name}': image: '{spec.image}' cannot be run by the local backend, which "
            "starts processes of this machine and no containers; remove it, and give as script the "
            "path of a Python script"
        )


class LocalBackend(Generations):
    """Runs every pipeline replica as a torchrun agent on this machine.

    Args:
        nodes: the virtual nodes.
        state_dir: where the jobs' logs and checkpoints go.
        grace: seconds that a generation has to save when a newer one takes its place.
        pass_environment: variables of this process passed to jobs, besides those of `.inherited`.
    """

    name = "local"

    def __init__(
        self,
        nodes: Mapping[str, Node],
        state_dir: StateDir,
        *,
        grace: float = STOP_GRACE,
        pass_environment: Collection[str] = (),
    ) -> None:
        super().__init__(nodes, grace)
        self._state_dir = state_dir
        self._pass_on = frozenset(pass_environment)
        self._devices = Devices(nodes)

    def check(self, spec: JobSpec) -> None:
        """Refuse a job with an image: see `Backend`."""
        check_local(spec)

    def check_program(self, program: ReplicaProgram) -> None:
        """Refuse what runs in a container: see `Generations`."""
        if program.image is not None or program.script is None:
            raise BackendError(
                f"job {program.job!r} cannot run in {program.image or 'an image'}: the local "
                "backend starts processes of this machine and no containers"
            )

    def unsent_report(self, job: str, generation: int) -> Mapping[str, Any] | None:
        """Read the report that rank 0 has left beside its checkpoints: see `Backend`."""
        record = GenerationFile.read(self._state_dir.generation(job, generation))
        if record is None:
            return None
        try:
            with (record.checkpoints / "unsent_report.json").open(encoding="utf-8") as file:
                report = json.loads(file.read(_REPORT_LIMIT))
        except (OSError, ValueError, RecursionError):
            return None
        return report if isinstance(report, dict) else None

    def adopt(self, job: str, generation: int, supervisor_url: str) -> str | None:
        """Adopt a generation that an earlier scheduler started: see `Backend`."""
        folder = self._state_dir.generation(job, generation)
        record = GenerationFile.read(folder)
        if record is None or (record.job, record.generation) != (job, generation):
            return "The scheduler before this one died before it had started the job."
        replicas = [ReplicaProcess(path) for path in status_files(folder, len(record.nodes))]
        if not all(replica.pid for replica in replicas):
            return "The scheduler before this one died while it started the job."
        reports_here = record.supervisor_url == supervisor_url
        if not reports_here and any(replica.poll() is None for replica in replicas):
            return (
                f"The scheduler now listens at {supervisor_url}, and the job was told to report to "
                f"{record.supervisor_url}: it is stopped, and goes on from its checkpoint."
            )
        with self._lock:
            if not self._has_same_slots(record):
                return (
                    "The cluster no longer has the slots that the job runs on: it is stopped, and "
                    "goes on from its checkpoint."
                )
            self._groups[job] = self._group(record, replicas)
        return None

    def recover(self, grace: float) -> list[str]:
        """End what an earlier scheduler left running and was not adopted."""
        place = str(self._state_dir.path)
        with self._lock:
            adopted = {(job, str(group.generation)) for job, group in self._groups.items()}

        def left_behind(environment: Mapping[str, str]) -> bool:
            known = environment.get("PIPOLLUX_JOB_ID", ""), environment.get("PIPOLLUX_GENERATION")
            here = environment.get("PIPOLLUX_STATE_DIR") == place
            return here and known[1] is not None and known not in adopted

        found = [_describe(process) for process in processes.marked(left_behind)]
        if found and not processes.end(lambda: processes.marked(left_behind), grace):
            raise BackendError(
                f"processes that an earlier scheduler of {place} left behind cannot be ended: "
                + "; ".join(_describe(process) for process in processes.marked(left_behind))
            )
        return found

    def start(
        self,
        program: ReplicaProgram,
        generation: int,
        nodes: tuple[str, ...],
        slots: Sequence[tuple[int, ...]],
    ) -> LocalGroup:
        """Start a generation; its record is written to disk before its first process starts."""
        first = program.first_generation
        record = GenerationFile(
            job=program.job,
            generation=generation,
            nodes=nodes,
            slots=tuple(slots),
            devices=tuple(map(self._devices.of, nodes, slots)),
            port=free_port(),
            supervisor_url=program.environment.get("PIPOLLUX_SUPERVISOR_URL", ""),
            checkpoints=program.checkpoints or self._state_dir.checkpoints(program.job, first),
        )
        folder = self._state_dir.generation(program.job, generation)
        logs = self._logs(record)
        for needed in (record.checkpoints, logs[0].parent, folder):
            needed.mkdir(mode=0o700, parents=True, exist_ok=True)
        drop_earlier(folder, list(folder.parent.iterdir()))
        record.write(folder)
        errors = error_files(folder, len(nodes))
        replicas = start_replicas(
            program,
            record,
            folder=folder,
            logs=logs,
            environments=[
                replica_environment(
                    program,
                    record,
                    replica,
                    state_dir=str(self._state_dir.path),
                    error_file=error_file,
                    pass_on=self._pass_on,
                )
                for replica, error_file in enumerate(errors)
            ],
        )
        return self._group(record, replicas)

    def _group(self, record: GenerationFile, replicas: Sequence[ReplicaProcess]) -> LocalGroup:
        wanted = marks(str(self._state_dir.path), record.job, record.generation).items()

        def find_marked() -> set[psutil.Process]:
            return processes.marked(lambda environment: wanted <= environment.items())

        folder = self._state_dir.generation(record.job, record.generation)
        return LocalGroup(
            record,
            replicas,
            logs=self._logs(record),
            errors=error_files(folder, len(record.nodes)),
            find_marked=find_marked,
        )

    def _logs(self, record: GenerationFile) -> list[Path]:
        replicas = range(len(record.nodes))
        return [self._state_dir.log(record.job, record.generation, r) for r in replicas]

    def _has_same_slots(self, record: GenerationFile) -> bool:
        """Reserve a generation's slots again, if the cluster still has them on the same devices."""
        if not all(name in self._nodes for name in record.nodes):
            return False
        devices = tuple(map(self._devices.of, record.nodes, record.slots))
        if devices != record.devices:
            return False
        return self._ledger.restore(record.job, record.nodes, record.slots)


def _describe(process: psutil.Process) -> str:
    try:
        job = process.environ().get("PIPOLLUX_JOB_ID", "?")
        return f"process {process.pid} of job {job} ({' '.join(process.cmdline())[:80]})"
    except psutil.Error:
        return f"process {process.pid}"
