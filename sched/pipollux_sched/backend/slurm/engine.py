"""The Slurm engine: replicas as steps of Slurm allocations.

A replica is a separate step (`srun --jobid --exact`) on the node that the scheduler has chosen,
with K GPUs that Slurm assigns exclusively. `squeue -s` shows job, attempt and replica. The steps do
not depend on the scheduler that started them: if it is killed they continue, and the next scheduler
of the state directory finds them by their names.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress

from pipollux_sched.backend.base import (
    ClusterUnavailableError,
    Engine,
    Launch,
    Listing,
    Node,
    ReplicaKey,
    ReplicaProgram,
    Signal,
)
from pipollux_sched.backend.process_engine import ProcessEngine
from pipollux_sched.backend.registry import EngineOptions
from pipollux_sched.backend.replica.step_files import read_step_name, step_name
from pipollux_sched.backend.replica.step_replica import find_records
from pipollux_sched.backend.snapshot_watch import SnapshotWatch
from pipollux_sched.spec.cluster import NodeSpec
from pipollux_sched.store import StateDir

from .commands import SignalSender, controller_variables
from .node_check import StepChecks
from .nodes import NodeStates, is_silent, is_unknown
from .orphans import Orphans
from .output import StepLine
from .pools import Pools, own_allocation
from .record import ReplicaRecord
from .replica_step import ReplicaStep, why_gone
from .snapshot import (
    HURRIED_INTERVAL,
    REFRESH_INTERVAL,
    SlurmAllocation,
    SlurmReader,
    SlurmSnapshot,
)
from .step_command import srun_command

RECOVERY_INTERVAL = 0.5
"""Seconds between two snapshots while steps of an earlier scheduler are ended."""


def make(options: EngineOptions) -> Engine:
    """Return the engine for a state directory; its own options are its `Pools`.

    Raises:
        BackendError: the scheduler is not in an allocation, Slurm does not answer, or a node does
            not see the state directory.
    """
    pools = options.own if isinstance(options.own, Pools) else own_allocation(os.environ)
    return SlurmEngine(options.state_dir, pools, pass_environment=options.pass_environment)


class SlurmEngine(ProcessEngine[ReplicaStep]):
    """Runs every replica as a step of an allocation.

    Args:
        state_dir: on storage that all nodes share.
        pass_environment: see `ProcessEngine`.
        interval: seconds between two snapshots of Slurm.

    Raises:
        BackendError: Slurm does not answer, or a node does not see the state directory.
    """

    name = "slurm"

    def __init__(
        self,
        state_dir: StateDir,
        pools: Pools,
        *,
        pass_environment: Collection[str] = (),
        interval: float = REFRESH_INTERVAL,
    ) -> None:
        super().__init__(state_dir, pass_environment)
        self._pools = pools
        self._view = NodeStates()
        self._specs: dict[str, NodeSpec] = {}
        """Specs of the last listed nodes."""
        self._orphans_seen = 0
        self._recovered = False
        self._signals = SignalSender()
        self._orphans = Orphans(self._signals)
        self._checks = StepChecks(state_dir)
        self._replicas = {
            key: ReplicaStep.find(key, record, state_dir)
            for key, record in find_records(state_dir, ReplicaRecord)
        }
        self._slurm = SnapshotWatch(
            SlurmReader(pools.choose).read,
            SlurmSnapshot(),
            self._on_snapshot,
            interval=interval,
            hurried=HURRIED_INTERVAL,
        )
        try:
            self._slurm.start()
            self._checks.wait()
        except BaseException:  # whatever the error, leave no thread behind
            self.close()
            raise

    @property
    def lost(self) -> str | None:
        """Why there are no nodes any more: see `Engine`."""
        return self._pools.lost

    def nodes(self) -> Mapping[str, Node]:
        """Return the checked nodes of the running allocations: see `Engine`."""
        snapshot = self._slurm.latest
        there = [step for step in self._orphans.stuck if step.pool in snapshot.allocations]
        leaving = {step.node: step.why for step in there}
        leaving.update(self._pools.leaving(snapshot))
        found = self._view.nodes(snapshot, leaving, self._checks.broken())
        unchecked = self._checks.unchecked()
        shown = {name: node for name, node in found.items() if name not in unchecked}
        shown |= {name: node for name, node in self._ending(snapshot) if name not in shown}
        self._specs = {name: node.spec for name, node in shown.items()}
        return shown

    def _ending(self, snapshot: SlurmSnapshot) -> Iterator[tuple[str, Node]]:
        """Return the nodes of allocations that Slurm ends, while replicas there may still save.

        Slurm gives them some time (`KillWait`). Replicas on a node that is not listed are killed.
        """
        for replica in list(self._replicas.values()):
            record = replica.record
            job, spec = snapshot.jobs.get(record.pool), self._specs.get(record.node)
            if spec is None or job is None or replica.ended is not None:
                continue
            if job.state != "RUNNING" and replica.step(snapshot) is not None:
                why = f"its allocation {job.job} ends: {job.state}"
                yield record.node, Node(spec, draining=True, reason=why)

    def start(self, program: ReplicaProgram, launch: Launch, replica: int) -> None:
        """Start a step: see `Engine`."""
        key = launch.key(replica)
        if key in self._replicas:
            return
        node = launch.assignments[replica].node
        if is_unknown(self._slurm.check().nodes.get(node)):
            raise ClusterUnavailableError(f"Slurm does not know the state of node {node} yet")
        allocation = self._allocation_with(node)
        share = allocation.shares[node]
        step = self._step(program, launch, replica, on_gpus=share.gpus > 0)
        command = srun_command(
            step,
            pool=allocation.job.job,
            node=node,
            name=step_name(key),
            share=share,
            program=program,
            num_stages=launch.num_stages,
        )
        self._replicas[key] = ReplicaStep.start(
            key,
            ReplicaRecord(pool=allocation.job.job, node=node),
            self._state_dir,
            command=command,
            # srun passes all of its environment on to the replica.
            environment={**controller_variables(os.environ), **step.environment},
        )
        self._slurm.hurry()

    def signal(self, key: ReplicaKey, signal: Signal) -> None:
        """Signal a step: see `Engine`."""
        step = self._replicas.get(key)
        if step is None or step.ended is not None:
            return
        command = step.tell(signal, self._slurm.latest)
        self._slurm.hurry()
        self._slurm.check()
        if command is not None:
            self._signals.send((key, signal), command)

    def listing(self) -> Listing:
        """Return all replicas: see `Engine`."""
        snapshot = self._slurm.check()
        states = {key: step.look(snapshot) for key, step in self._replicas.items()}
        if any(step.unsettled for step in self._replicas.values()):
            self._slurm.hurry()
        self._signals.look()
        if self._recovered and snapshot.number != self._orphans_seen:
            self._kill_strays(snapshot)
        return self._listing_of(states)

    def left_behind(self, adopted: Collection[tuple[str, int]]) -> Mapping[ReplicaKey, str]:
        """Return the replicas that have not ended, and steps without a record: see `Engine`."""
        snapshot = self._slurm.latest
        if time.monotonic() >= snapshot.begun + RECOVERY_INTERVAL:
            snapshot = self._slurm.refresh()
        found = {key: step.step for key, step in self._listed(snapshot, adopted).items()}
        for key, replica in self._replicas.items():
            state = replica.look(snapshot)
            if state.ended is not None:
                if state.ended.status is not None:  # its step is over, even if Slurm lists it
                    found.pop(key, None)
            elif key[:2] not in adopted:
                found.setdefault(key, state.handle)
        return {
            key: f"step {handle} of job {key.job} ({step_name(key)})"
            for key, handle in sorted(found.items())
        }

    def end_left(self, left: Collection[ReplicaKey], signal: Signal) -> None:
        """Signal replicas; kill steps without a record, which cannot save: see `Engine`."""
        super().end_left(left, signal)
        if signal is Signal.KILL or not self._replicas.keys() >= set(left):
            with suppress(ClusterUnavailableError):
                self._kill_strays(self._slurm.latest)

    def why_not_ended(self, left: Mapping[ReplicaKey, str]) -> str:
        """Return that nodes do not answer, if so: steps that Slurm lists for ever do not matter."""
        snapshot = self._slurm.latest
        nodes: dict[str, set[str]] = {}
        for (_, name), step in snapshot.steps.items():
            nodes.setdefault(name, set()).add(step.node)
        for key, replica in self._replicas.items():
            nodes.setdefault(step_name(key), set()).add(replica.record.node)
        silent = [
            line
            for key, line in left.items()
            if any(is_silent(snapshot.nodes.get(node)) for node in nodes.get(step_name(key), ()))
        ]
        if not silent:
            return ""
        return (
            f"steps that an earlier scheduler of {self._state_dir.path} left behind cannot be "
            f"ended, as their nodes do not answer: {'; '.join(silent)}; start the scheduler again "
            "when the nodes are back or declared down"
        )

    def recover(self, adopted: Collection[tuple[str, int]], grace: float) -> list[str]:
        """End steps of attempts that were not adopted, and strays from now on: see `Engine`."""
        can_save = any(key in self._replicas for key in self.left_behind(adopted))
        found = super().recover(adopted, grace if can_save else 0.0)
        self._recovered = True
        return found

    def close(self) -> None:
        """End the threads: see `Engine`."""
        self._pools.settle()
        self._slurm.stop()
        self._checks.close()
        self._pools.close(self._busy())
        self._signals.close()

    def _on_snapshot(self, snapshot: SlurmSnapshot) -> None:
        self._checks.look(snapshot)
        self._pools.look(snapshot)
        self._pools.give_back(self._busy())

    def _busy(self) -> set[int]:
        """Return the allocations with replicas."""
        replicas = list(self._replicas.values())  # called by any thread
        return {replica.record.pool for replica in replicas if replica.ended is None}

    def _allocation_with(self, node: str) -> SlurmAllocation:
        for allocation in self._slurm.latest.allocations.values():
            if node in allocation.shares:
                return allocation
        raise ClusterUnavailableError(f"no allocation of Slurm's has node {node} any more")

    def _listed(
        self,
        snapshot: SlurmSnapshot,
        kept: Collection[tuple[str, int]],
        named: Collection[str] = (),
    ) -> dict[ReplicaKey, StepLine]:
        """Return the steps on nodes that are up, except those of attempts `kept`, or `named`."""
        found = {}
        for (pool, name), step in snapshot.steps.items():
            if name in named:
                continue
            key = read_step_name(name)
            if key is None or pool not in snapshot.allocations or key[:2] in kept:
                continue
            if not why_gone(ReplicaRecord(pool=pool, node=step.node), snapshot):
                found[key] = step
        return found

    def _kill_strays(self, snapshot: SlurmSnapshot) -> None:
        """Kill steps that counted as lost and reappear with their node."""
        self._orphans_seen = snapshot.number
        unfinished = [replica for replica in self._replicas.values() if replica.ended is None]
        # Exclude by name first, as that covers nearly all of them.
        found = self._listed(snapshot, (), {replica.name for replica in unfinished})
        others = found.keys() - {replica.key for replica in unfinished}
        self._orphans.look({key: found[key] for key in others}, snapshot)
        self._pools.replace({step.pool: step.why for step in self._orphans.stuck})
