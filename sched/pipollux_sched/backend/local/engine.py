"""Replicas as processes of this machine, on virtual nodes.

A virtual node is a name and a number of slots. A slot of a CPU node is a CPU device of one thread;
a slot of a GPU node is one GPU or MIG slice, and the GPU nodes divide the machine's GPUs in the
order in which they are listed: see `local_gpus`. Each pipeline replica is one torchrun agent, which
sees only its own GPUs.

If the scheduler is killed they continue, and the next one finds them by their supervisors' files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from pipollux_protocol import environment as variables
from pipollux_sched.backend.base import (
    BackendError,
    Launch,
    Listing,
    Node,
    ReplicaKey,
    ReplicaProgram,
    Signal,
    SlotDevice,
)
from pipollux_sched.backend.process_engine import ProcessEngine, refuse_image
from pipollux_sched.backend.replica.command import agent_command
from pipollux_sched.backend.replica.replica_process import ReplicaProcess, replicas_in
from pipollux_sched.backend.replica.variables import result_variables
from pipollux_sched.backend.result import ReplicaResult
from pipollux_sched.backend.run_as import as_user_command
from pipollux_sched.spec.cluster import ClusterSpec
from pipollux_sched.spec.job import JobSpec
from pipollux_sched.store import StateDir

from . import cgroups, processes
from .attempt_folder import AttemptFolder, LocalPlacement
from .environment import STATE_DIR, marks, replica_environment
from .local_gpus import LocalGpus
from .ports import LOOPBACK, free_port
from .processes import LocalReplica


def check_local(spec: JobSpec) -> None:
    """Reject a job in a container with `SpecError`: jobs run as processes of this machine."""
    refuse_image(spec, LocalEngine.name, LocalEngine.where)


class LocalEngine(ProcessEngine[LocalReplica]):
    """Runs every pipeline replica as a torchrun agent on this machine.

    Args:
        cluster: see `VirtualNodes`, also for errors.
        pass_environment: see `ProcessEngine`.
    """

    name = "local"
    where = "this machine"

    def __init__(
        self,
        cluster: ClusterSpec | Path,
        state_dir: StateDir,
        *,
        pass_environment: Collection[str] = (),
    ) -> None:
        super().__init__(state_dir, pass_environment)
        self._gpus = LocalGpus(cluster, state_dir)
        # By attempt: torchrun starts to listen seconds after it was given a port.
        self._ports: dict[tuple[str, int], int] = {}
        self._looked = False
        self._asked: set[psutil.Process] = set()
        """Processes of an earlier scheduler that were asked to stop, or whose parents were."""

    def nodes(self) -> Mapping[str, Node]:
        """Return the virtual nodes; slots whose GPUs are broken or used by others are left out."""
        return self._gpus.nodes()

    def devices(self) -> Mapping[str, Sequence[SlotDevice]]:
        """Return the GPUs of the slots, with their use."""
        return self._gpus.devices()

    def start(self, program: ReplicaProgram, launch: Launch, replica: int) -> None:
        """Start a replica; its placement is written to disk before its first process starts."""
        key = launch.key(replica)
        if key in self._replicas:
            return
        if program.image is not None or not program.has_program:
            raise BackendError(
                f"job {program.job!r} cannot run in {program.image or 'an image'}: the local "
                "backend starts processes of this machine and no containers"
            )
        folder = AttemptFolder(self._state_dir, launch.job, launch.attempt)
        placement = self._place(folder, launch, program)
        self._gpus.hold(key, placement.devices[replica])
        own = {
            **marks(str(self._state_dir.path), key),
            **result_variables(program, folder.result(replica), folder.agent(replica)),
        }
        endpoint = f"{LOOPBACK}:{placement.port}"
        process = ReplicaProcess.start(
            as_user_command(program, agent_command(program, launch, replica, endpoint=endpoint)),
            status=folder.status(replica),
            log=self._state_dir.log(*key),
            environment=replica_environment(
                program,
                launch,
                replica,
                devices=placement.devices[replica],
                marks=own,
                pass_on=self._pass_on,
            ),
            directory=None if program.run_as else program.directory,
            memory_limit=program.memory_limit,
            group=self._create_group(folder.group(replica), key, program.memory_limit),
        )
        self._replicas[key] = self._replica(key, process)

    def signal(self, key: ReplicaKey, signal: Signal) -> None:
        """Send a signal to a replica's processes."""
        if key in self._replicas:
            self._replicas[key].send(signal)

    def listing(self) -> Listing:
        """Return the replicas; an earlier scheduler's, from their supervisors' status files."""
        if not self._looked:
            self._looked = True
            for key in replicas_in(self._state_dir):
                status = AttemptFolder(self._state_dir, key.job, key.attempt).status
                found = self._replica(key, ReplicaProcess(status(key.replica)))
                if found.known:
                    self._replicas.setdefault(key, found)
                    self._gpus.hold(key, self._placed_on(key))
        states = {key: replica.state() for key, replica in self._replicas.items()}
        self._gpus.keep_held({key for key, state in states.items() if state.ended is None})
        return self._listing_of(states)

    def holds(self, launch: Launch) -> bool:
        """Return whether the slots of an attempt still refer to the devices that it runs on."""
        nodes = self._gpus.nodes()
        for assignment in launch.assignments.values():
            node = nodes.get(assignment.node)
            if node is None or max(assignment.slots) >= node.spec.slots:
                return False
        placement = AttemptFolder(self._state_dir, launch.job, launch.attempt).placement()
        # A replica that was not started yet, or has ended, may be missing.
        now = self._devices_of(launch)
        return placement is not None and all(
            placement.devices.get(replica, found) == found for replica, found in now.items()
        )

    def forget(self, job: str, attempt: int) -> None:
        """Remove the folder and the port of an attempt: see `Engine`."""
        replicas = [found for key, found in self._replicas.items() if key[:2] == (job, attempt)]
        if all(replica.ended is not None for replica in replicas):
            cgroups.remove_recorded(self._state_dir.attempt(job, attempt))
        super().forget(job, attempt)
        self._ports.pop((job, attempt), None)

    def left_behind(self, adopted: Collection[tuple[str, int]]) -> Mapping[psutil.Process, str]:
        """Return processes by their environment, as their supervisors may be dead: see `Engine`.

        Those of a joining replica of an adopted attempt too if its supervisor had no time to write
        its identity: no listing contains it.
        """
        place = str(self._state_dir.path)
        attempts = {(job, str(attempt)) for job, attempt in adopted}
        replicas = {tuple(map(str, key)) for key in self._replicas}

        def is_left(environment: Mapping[str, str]) -> bool:
            names = (variables.JOB_ID, variables.ATTEMPT, variables.REPLICA)
            job, attempt, replica = (environment.get(variable.name) for variable in names)
            if environment.get(STATE_DIR) != place or attempt is None:
                return False
            unknown = replica is not None and (job, attempt, replica) not in replicas
            return (job, attempt) not in attempts or unknown

        return {process: _describe(process) for process in processes.marked(is_left)}

    def end_left(self, left: Collection[psutil.Process], signal: Signal) -> None:
        """Kill processes, or ask each once to stop, except children of others: see `Engine`.

        An agent passes the signal on, and a worker that gets a second one exits at once.
        """
        if signal is Signal.KILL:
            processes.kill(left)
            return
        new = set(left) - self._asked
        self._asked |= new
        ids = {process.pid for process in self._asked}
        for process in new:
            with suppress(psutil.Error):
                if process.ppid() not in ids:
                    process.terminate()

    def close(self) -> None:
        """End the thread that watches the GPUs; replicas keep running."""
        self._gpus.close()

    def _placed_on(self, key: ReplicaKey) -> Mapping[str, str]:
        placement = AttemptFolder(self._state_dir, key.job, key.attempt).placement()
        return {} if placement is None else placement.devices.get(key.replica, {})

    def _replica(self, key: ReplicaKey, process: ReplicaProcess) -> LocalReplica:
        folder = AttemptFolder(self._state_dir, key.job, key.attempt)
        return LocalReplica(
            process,
            lambda: ReplicaResult.read(folder.result(key.replica)),
            marks(str(self._state_dir.path), key),
            cgroups.recorded(folder.group(key.replica)),
        )

    def _create_group(self, record: Path, key: ReplicaKey, limit: int | None) -> Path | None:
        if limit is None:
            return None
        return cgroups.create_recorded("-".join(map(str, key)), limit, record)

    def _place(
        self, folder: AttemptFolder, launch: Launch, program: ReplicaProgram
    ) -> LocalPlacement:
        """Return the placement of an attempt; written to disk the first time."""
        placement = folder.placement()
        if placement is None:
            logs = self._state_dir.log(*launch.keys[0]).parent
            # The agent creates another user's folder, as that user.
            own = () if program.run_as else (Path(launch.checkpoints),)
            for needed in (*own, logs):
                needed.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.create()
            port = free_port(self._ports.values())
            self._ports[launch.job, launch.attempt] = port
            placement = LocalPlacement(devices=self._devices_of(launch), port=port)
            folder.write(placement)
        elif not placement.devices.keys() >= launch.assignments.keys():
            devices = {**self._devices_of(launch), **placement.devices}
            placement = replace(placement, devices=devices)
            folder.write(placement)
        return placement

    def _devices_of(self, launch: Launch) -> dict[int, Mapping[str, str]]:
        assignments = launch.assignments.items()
        return {
            replica: self._gpus.variables(assignment.node, assignment.slots)
            for replica, assignment in assignments
        }


def _describe(process: psutil.Process) -> str:
    try:
        job = process.environ().get(variables.JOB_ID.name, "?")
        return f"process {process.pid} of job {job} ({' '.join(process.cmdline())[:80]})"
    except psutil.Error:
        return f"process {process.pid}"
