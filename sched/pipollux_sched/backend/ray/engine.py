"""The engine of a Ray cluster.

A replica is an actor in a placement group of one bundle, on the node that the scheduler has chosen.
Both are detached: they do not depend on the scheduler that started them. The actor only holds the
resources, and starts the same programs on its node as other engines do; state, requests and output
are files in the state directory, which all nodes share.
"""

from __future__ import annotations

import importlib.util
import secrets
import shutil
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipollux_agent import supervisor
from pipollux_sched.backend.base import (
    BackendError,
    ClusterUnavailableError,
    Engine,
    Launch,
    Listing,
    Node,
    ReplicaKey,
    ReplicaProgram,
    Signal,
)
from pipollux_sched.backend.registry import EngineOptions
from pipollux_sched.backend.replica.command import agent_command
from pipollux_sched.backend.replica.replica_process import LOG_LIMIT, memory_option
from pipollux_sched.backend.replica.step_files import StepFiles, step_name
from pipollux_sched.backend.replica.variables import step_variables
from pipollux_sched.spec.job import JobSpec, SpecError
from pipollux_sched.store import StateDir
from pipollux_utils.atomic_write import PRIVATE, write_aside

from .connection import CONNECT_TIMEOUT, RayConnection, Snapshot
from .nodes import NodeTable
from .replica import RayRecord, RayReplica, find_records

KILL_PATIENCE = 30.0
"""Seconds that replicas without a scheduler have to end after a kill."""
CHECK_INTERVAL = 15.0
"""Seconds until a node that does not see the shared folders is checked again."""
IDENTITY = "ray.id"
"""File of the state directory with the namespace of its actors."""


@dataclass(frozen=True)
class RayOptions:
    """Options of the Ray backend."""

    address: str = "auto"
    """HOST:PORT of the cluster's head; `auto`: the cluster that this machine is a node of."""
    interval: float = 0.5
    """Seconds between two snapshots of the cluster."""


def make(options: EngineOptions) -> Engine:
    """Return the engine; `BackendError`: Ray is not installed, or no cluster can be used."""
    own = options.own if isinstance(options.own, RayOptions) else RayOptions()
    if options.cluster is not None:
        raise BackendError("the ray backend finds its nodes itself; leave the cluster file out")
    if importlib.util.find_spec("ray") is None:
        raise BackendError(
            "the ray backend needs the package ray; install it with pip install 'pipollux[ray]'"
        )
    if "://" in own.address:
        raise BackendError(
            f"--address {own.address}: the scheduler must run on a node of the Ray cluster, not "
            "connect through its client server; give HOST:PORT of the head, or auto"
        )
    return RayEngine(
        options.state_dir, own, grace=options.grace, pass_environment=options.pass_environment
    )


class RayEngine(Engine):
    """Runs every replica below an actor.

    Args:
        state_dir: on storage that all nodes share.
        grace: seconds to save for a replica whose actor is lost.
        pass_environment: variables of this process passed to jobs, besides those of `inherited`.

    Raises:
        BackendError: no cluster can be used, or no node with devices sees the state directory.
    """

    name = "ray"
    grows = True

    def __init__(
        self,
        state_dir: StateDir,
        options: RayOptions,
        *,
        grace: float = 30.0,
        pass_environment: Collection[str] = (),
    ) -> None:
        self._state_dir, self._grace = state_dir, grace
        self._pass_on = frozenset(pass_environment)
        self._version = self._looked = 0
        self._recovered = False
        self._checked: dict[str, str] = {}
        """What nodes do not see; empty: nothing."""
        self._check_at: dict[str, float] = {}
        state_dir.create()
        identity = _identity(state_dir)
        self._mark = state_dir.path / f".shared-{identity}"
        self._mark.touch(0o600)  # no folder of another scheduler has it
        self._ray = RayConnection(
            options.address,
            f"pipollux-{identity}",
            state_dir.path / "ray.log",
            options.interval,
        )
        self._replicas = {
            key: self._replica(key, record) for key, record in find_records(state_dir)
        }
        records = [replica.record for replica in self._replicas.values()]
        self._table = NodeTable({record.node_id: record.node for record in records})
        try:
            self._ray.connect()
            self._await_checks()
        except BaseException:  # whatever the error, leave no process behind
            self.close()
            raise

    def check(self, spec: JobSpec) -> None:
        """Reject a job that runs in a container, or as another user: see `Engine`."""
        if spec.image is not None:
            raise SpecError(
                f"job '{spec.name}': image: '{spec.image}' cannot be run by the ray backend, which "
                "starts processes of the nodes and no containers; remove it, and give as script "
                "the path of a Python script"
            )
        if spec.run_as is not None:
            raise SpecError(
                f"job '{spec.name}': run_as: '{spec.run_as}' is of no use with the ray backend, "
                "whose jobs run as the user who runs Ray; leave it out"
            )

    def nodes(self) -> Mapping[str, Node]:
        """Return the checked nodes that have devices: see `Engine`."""
        return self._table.look(self._latest(), self._checked)

    def checkpoints(self, program: ReplicaProgram) -> str:
        """Return the folder that all nodes share: see `Engine`."""
        return program.checkpoints_in(self._state_dir)

    def start(self, program: ReplicaProgram, launch: Launch, replica: int) -> None:
        """Start the actor of a replica: see `Engine`."""
        key = launch.key(replica)
        if key in self._replicas:
            return
        nodes = self.nodes()
        node = launch.assignments[replica].node
        node_id = self._table.id_of(node)
        if node not in nodes or node_id is None:
            raise ClusterUnavailableError(f"the Ray cluster has no node {node} any more")
        on_gpus = nodes[node].spec.kind == "gpu"
        files, log = StepFiles.of(self._state_dir, key), self._state_dir.log(*key)
        own = [sys.executable, "-I", "-S", supervisor.__file__]
        own += [*memory_option(program.memory_limit), "--step", str(files.base), str(log)]
        record = RayRecord(
            node=node,
            node_id=node_id,
            bundle=_bundle(program, launch.num_stages, on_gpus=on_gpus),
            gpus=launch.num_stages if on_gpus else 0,
            command=[*own, str(LOG_LIMIT), *agent_command(program, launch, replica)],
            environment=step_variables(
                program,
                launch,
                replica,
                on_gpus=on_gpus,
                result=files.result,
                pass_on=self._pass_on,
            ),
            directory=str(program.directory or Path.cwd()),
        )
        made = self._replica(key, record)
        made.prepare()
        self._replicas[key] = made
        made.start()

    def signal(self, key: ReplicaKey, signal: Signal) -> None:
        """Write a signal, and make its supervisor read it: see `Engine`."""
        replica = self._replicas.get(key)
        if replica is not None and replica.ended is None:
            replica.signal(signal)
            self._latest()

    def listing(self) -> Listing:
        """Return all replicas: see `Engine`."""
        self._latest()
        self._version += 1
        return Listing(self._version, {key: entry.state for key, entry in self._replicas.items()})

    def forget(self, job: str, attempt: int) -> None:
        """Remove the folder of an attempt: see `Engine`."""
        forgotten = [key for key in self._replicas if key[:2] == (job, attempt)]
        if all(self._replicas[key].ended is not None for key in forgotten):
            for key in forgotten:
                del self._replicas[key]
            shutil.rmtree(self._state_dir.attempt(job, attempt), ignore_errors=True)

    def recover(self, adopted: Collection[tuple[str, int]], grace: float) -> list[str]:
        """End replicas of attempts that were not adopted: see `Engine`."""
        left = {key: entry for key, entry in self._replicas.items() if key[:2] not in adopted}
        found = [
            f"actor {entry.name} on {entry.record.node}"
            for entry in left.values()
            if entry.ended is None
        ]
        for signal, patience in ((Signal.STOP, grace), (Signal.KILL, KILL_PATIENCE)):
            deadline = time.monotonic() + patience
            for entry in left.values():
                if entry.ended is None:
                    entry.signal(signal)
            while self._running(left) and time.monotonic() < deadline:
                with suppress(ClusterUnavailableError):
                    self._latest()
                time.sleep(0.05)
        if running := self._running(left):
            raise BackendError(
                f"actors that an earlier scheduler of {self._state_dir.path} left behind cannot be "
                f"ended: {', '.join(running)}"
            )
        for job, attempt in {key[:2] for key in left}:
            self.forget(job, attempt)
        self._recovered = True
        return found

    def close(self) -> None:
        """End the client: see `Engine`."""
        self._ray.close()

    def _running(self, replicas: Mapping[ReplicaKey, RayReplica]) -> list[str]:
        return [entry.name for entry in replicas.values() if entry.ended is None]

    def _replica(self, key: ReplicaKey, record: RayRecord) -> RayReplica:
        return RayReplica(key, record, self._state_dir, self._ray.send, self._grace)

    def _latest(self) -> Snapshot:
        """Return the latest snapshot; the first time, note it and send what replicas need."""
        snapshot = self._ray.latest()
        if snapshot.number != self._looked:
            self._looked = snapshot.number
            self._check_nodes(snapshot)
            for replica in self._replicas.values():
                replica.look(snapshot)
            if self._recovered:
                known = set(map(step_name, self._replicas))
                for name in {*snapshot.actors, *snapshot.groups} - known:
                    with suppress(OSError):
                        self._ray.send("end", name)
        return snapshot

    def _check_nodes(self, snapshot: Snapshot) -> None:
        """Note the results of checks, and start those of new nodes."""
        now = time.monotonic()
        for known in self._checked.keys() - snapshot.nodes.keys():
            del self._checked[known], self._check_at[known]
        for node, lost in snapshot.checked.items():
            if lost is not None:
                self._checked[node] = lost
                self._check_at[node] = now + CHECK_INTERVAL
        for node in snapshot.nodes:
            if self._checked.get(node) != "" and now >= self._check_at.get(node, 0.0):
                self._check_at[node] = now + CONNECT_TIMEOUT
                needed = [str(self._mark), sys.executable, supervisor.__file__]
                with suppress(OSError):
                    self._ray.send("check", node, str(self._state_dir.path), needed)

    def _await_checks(self) -> None:
        deadline = time.monotonic() + CONNECT_TIMEOUT
        while time.monotonic() < deadline:
            with suppress(ClusterUnavailableError):
                snapshot = self._latest()
                if snapshot.nodes.keys() <= self._checked.keys():
                    break
            time.sleep(0.05)
        nodes = self.nodes()
        if nodes and not any(node.ready for node in nodes.values()):
            name, node = next(iter(nodes.items()))
            raise BackendError(f"node {name} of the Ray cluster: {node.reason}")


def _bundle(program: ReplicaProgram, num_stages: int, *, on_gpus: bool) -> dict[str, float]:
    """Return the resources of a replica; on a node without GPUs, its CPUs are the devices."""
    cpus = program.cpus + program.cpus_per_stage * num_stages
    memory = program.memory + program.memory_per_stage * num_stages
    wanted = {"GPU": num_stages, "CPU": cpus} if on_gpus else {"CPU": num_stages}
    return {name: amount for name, amount in {**wanted, "memory": memory}.items() if amount}


def _identity(state_dir: StateDir) -> str:
    """Return the id of this scheduler's actors, which lasts as long as its state."""
    path = state_dir.path / IDENTITY
    if not path.exists():
        write_aside(path, secrets.token_hex(8).encode("ascii"), PRIVATE)
    return path.read_text(encoding="ascii")
