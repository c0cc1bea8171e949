"""The engine of a Ray cluster.

A replica is an actor in a placement group of one bundle, on the node that the scheduler has chosen.
Both are detached: they do not depend on the scheduler that started them. The actor only holds the
resources, and starts the same programs on its node as other engines do; state, requests and output
are files in the state directory, which all nodes share.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

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
from pipollux_sched.backend.node_checks import NodeChecks
from pipollux_sched.backend.process_engine import ProcessEngine
from pipollux_sched.backend.registry import EngineOptions
from pipollux_sched.backend.replica.step_files import read_step_name, step_name
from pipollux_sched.backend.replica.step_replica import find_records
from pipollux_sched.backend.run_as import refuse_user
from pipollux_sched.backend.snapshot_watch import SnapshotWatch
from pipollux_sched.spec.job import JobSpec
from pipollux_sched.store import StateDir

from .connection import CONNECT_TIMEOUT, RayClient, Snapshot
from .nodes import NodeTable
from .replica import RayRecord, RayReplica

HURRIED_INTERVAL = 0.05
"""Seconds between two snapshots after a message."""


@dataclass(frozen=True)
class RayOptions:
    """Options of the Ray backend."""

    address: str = "auto"
    """HOST:PORT of the cluster's head; `auto`: the cluster that this machine is a node of."""
    interval: float = 0.5
    """Seconds between two snapshots of the cluster."""


def make(options: EngineOptions) -> Engine:
    """Return the engine; `BackendError`: no cluster can be used."""
    own = options.own if isinstance(options.own, RayOptions) else RayOptions()
    if "://" in own.address:
        raise BackendError(
            f"--address {own.address}: the scheduler must run on a node of the Ray cluster, not "
            "connect through its client server; give HOST:PORT of the head, or auto"
        )
    return RayEngine(
        options.state_dir, own, grace=options.grace, pass_environment=options.pass_environment
    )


class RayEngine(ProcessEngine[RayReplica]):
    """Runs every replica below an actor.

    Args:
        state_dir: on storage that all nodes share.
        grace: seconds to save for a replica whose actor is lost.
        pass_environment: see `ProcessEngine`.

    Raises:
        BackendError: no cluster can be used, or no node with devices sees the state directory.
    """

    name = "ray"

    def __init__(
        self,
        state_dir: StateDir,
        options: RayOptions,
        *,
        grace: float = 30.0,
        pass_environment: Collection[str] = (),
    ) -> None:
        super().__init__(state_dir, pass_environment)
        self._grace = grace
        state_dir.create()
        namespace = f"pipollux-{state_dir.identity(self.name)}"
        self._client = RayClient(options.address, namespace, state_dir.path / "ray.log")
        self._watch = SnapshotWatch(
            self._client.read,
            Snapshot(),
            self._on_snapshot,
            interval=options.interval,
            hurried=HURRIED_INTERVAL,
        )
        self._checks = NodeChecks[str](state_dir, self._check_node, lost_after=CONNECT_TIMEOUT)
        records = dict(find_records(state_dir, RayRecord))
        self._replicas = {key: self._replica(key, record) for key, record in records.items()}
        self._table = NodeTable({record.node_id: record.node for record in records.values()})
        try:
            self._watch.start()
            self._checks.wait()
            found = self.nodes()
            if found and not any(node.ready for node in found.values()):
                raise BackendError(next(iter(found.values())).reason)
        except BaseException as error:  # whatever it is, leave no process behind
            self.close()
            if not isinstance(error, ClusterUnavailableError):
                raise
            raise BackendError(
                f"no Ray cluster can be used at '{options.address}': {self._client.refusal}"
            ) from error

    def check(self, spec: JobSpec) -> None:
        """Reject a job that runs in a container, or as another user: see `Engine`."""
        refuse_user(spec, self.name, "whose jobs run as the user who runs Ray")
        super().check(spec)

    def nodes(self) -> Mapping[str, Node]:
        """Return the checked nodes that have devices: see `Engine`."""
        return self._table.look(self._watch.check(), self._checks.results())

    def start(self, program: ReplicaProgram, launch: Launch, replica: int) -> None:
        """Start the actor of a replica: see `Engine`."""
        key = launch.key(replica)
        if key in self._replicas:
            return
        name = launch.assignments[replica].node
        node, node_id = self.nodes().get(name), self._table.id_of(name)
        if node is None or node_id is None:
            raise ClusterUnavailableError(f"the Ray cluster has no node {name} any more")
        on_gpus = node.spec.kind == "gpu"
        step = self._step(program, launch, replica, on_gpus=on_gpus)
        record = RayRecord(
            node=name,
            node_id=node_id,
            bundle=_bundle(program, launch.num_stages, on_gpus=on_gpus),
            **vars(step),
        )
        made = self._replica(key, record)
        made.prepare()
        self._replicas[key] = made
        made.start()
        self._watch.hurry()

    def signal(self, key: ReplicaKey, signal: Signal) -> None:
        """Write a signal, and make its supervisor read it: see `Engine`."""
        replica = self._replicas.get(key)
        if replica is not None and replica.ended is None:
            replica.signal(signal)
            self._watch.hurry()
            self._watch.check()

    def listing(self) -> Listing:
        """Return all replicas: see `Engine`."""
        snapshot = self._watch.check()
        return self._listing_of({key: one.look(snapshot) for key, one in self._replicas.items()})

    def close(self) -> None:
        """End the client: see `Engine`."""
        self._watch.stop()
        self._client.close()
        self._checks.close()

    def _replica(self, key: ReplicaKey, record: RayRecord) -> RayReplica:
        return RayReplica(key, record, self._state_dir, self._client.send, self._grace)

    def _check_node(self, node: str) -> None:
        self._client.send("check", node, str(self._state_dir.path), self._checks.paths)

    def _on_snapshot(self, snapshot: Snapshot) -> None:
        """Note results, check new nodes, and end actors without a record; called by the watch."""
        for task, name, value, error in snapshot.results:
            key = read_step_name(name)
            if task == "check":
                node = snapshot.nodes[name].name if name in snapshot.nodes else name
                failed = f"node {node} cannot be checked: {error}"
                self._checks.note(name, failed if error else self._checks.describe(node, value))
            elif key in self._replicas:
                self._replicas[key].note_fence(value)
        self._checks.look(snapshot.nodes)
        for name in snapshot.actors.keys() - set(map(step_name, list(self._replicas))):
            self._client.send("end", name)


def _bundle(program: ReplicaProgram, num_stages: int, *, on_gpus: bool) -> dict[str, float]:
    """Return the resources of a replica; on a node without GPUs, its CPUs are the devices."""
    memory, cpus = program.memory_of(num_stages), program.cpus_of(num_stages)
    wanted = {"GPU": num_stages, "CPU": cpus} if on_gpus else {"CPU": num_stages}
    return {name: amount for name, amount in {**wanted, "memory": memory}.items() if amount}
