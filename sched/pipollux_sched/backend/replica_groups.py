"""The backend: attempts of jobs on the nodes of an engine; `replica_group` has one attempt."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from pipollux_sched.lifecycle import Exited, Membership, Outcome
from pipollux_sched.spec.job import JobSpec
from pipollux_sched.store import StateDir

from .base import (
    POLL_INTERVAL,
    BackendError,
    ClusterUnavailableError,
    Engine,
    JobActions,
    Launch,
    Listing,
    Node,
    NodesGoneError,
    ReplicaKey,
    ReplicaProgram,
    ReplicaState,
    Signal,
    SlotDevice,
)
from .cluster_watch import ClusterWatch
from .replica_group import START_TIMEOUT, ReplicaGroup
from .report import Joiners, LaunchStore, Report, Running, Waiting
from .saved import marked_step, newest_checkpoint
from .slots import SlotLedger

NO_SLOTS = (
    "The cluster no longer has the slots that the job runs on: it is stopped, and goes on from its "
    "checkpoint."
)
STOP_GRACE = 30.0
"""Seconds that a job has to save a checkpoint after a stop request."""
SHUTDOWN_PATIENCE = 10.0
"""Seconds after the grace period for which `shutdown` waits for processes to end."""


def why_not_adopted(
    launch: Launch | None,
    members: Collection[int],
    listed: Mapping[ReplicaKey, ReplicaState],
    scheduler_url: str,
) -> str | None:
    """Return why an attempt cannot be adopted, in one sentence; None: it can.

    The earlier scheduler stored the `launch`, or None; `members` take part; `listed` are all.
    """
    if launch is None or not launch.assignments.keys() >= set(members):
        return "The previous scheduler ended before it had started the job."
    keys = list(map(launch.key, members))
    if any(key not in listed for key in keys):
        return "The previous scheduler ended while it started the job."
    runs = any(listed[key].ended is None for key in keys)
    if runs and launch.scheduler_url != scheduler_url:
        return (
            f"The scheduler now listens at {scheduler_url}, and the job reports to "
            f"{launch.scheduler_url}: it is stopped, and continues from its checkpoint."
        )
    return None


def _with_kept(node: Node, held: Collection[tuple[str, int]]) -> Node:
    """Return a node with those of its left-out slots that are held: jobs may stay on them."""
    if not node.left_out:
        return node
    kept = frozenset(slot for slot in node.left_out if (node.spec.name, slot) in held)
    return replace(node, kept=kept)


class ReplicaGroupManager:
    """Runs attempts of jobs on an engine.

    One thread calls `poll` repeatedly, which does all the work. Any thread may call the other
    methods, which only record requests or return state. An attempt has `grace` seconds to save when
    a newer one replaces it, and `start_timeout` seconds until all of its replicas run.
    """

    def __init__(
        self,
        engine: Engine,
        launches: LaunchStore,
        state_dir: StateDir,
        *,
        grace: float = STOP_GRACE,
        start_timeout: float = START_TIMEOUT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._launches = launches
        self._state_dir = state_dir
        self._grace = grace
        self._start_timeout = start_timeout
        self._cluster = ClusterWatch(engine, clock)
        self._ledger = SlotLedger(self._cluster.nodes)
        self._seen = set(self._cluster.nodes)
        """All present and past nodes."""
        self._running: dict[str, ReplicaGroup] = {}
        self._pending: dict[str, Waiting] = {}
        self._joining: dict[str, Joiners] = {}
        self._reports: list[Report] = []
        self._lock = threading.RLock()

    @property
    def name(self) -> str:
        """The name of the engine."""
        return self._engine.name

    @property
    def lost(self) -> str | None:
        """Why nothing can ever be started again: see `Engine.lost`."""
        return self._engine.lost

    def check(self, spec: JobSpec) -> None:
        """Reject a job that the engine can never run: see `Engine.check`."""
        self._engine.check(spec)

    def nodes(self) -> Mapping[str, Node]:
        """Return the last known nodes."""
        nodes = self._cluster.nodes
        if not any(node.left_out for node in nodes.values()):
            return nodes
        with self._lock:
            held = self._ledger.held().keys()
        return {name: _with_kept(node, held) for name, node in nodes.items()}

    def devices(self) -> dict[str, list[tuple[SlotDevice, str | None]]]:
        """Return the devices of nodes whose state is known, each with the job that holds it."""
        devices = self._engine.devices()
        if not devices:
            return {}
        with self._lock:
            held = self._ledger.held()
        return {
            name: [(device, held.get((name, device.slot))) for device in row]
            for name, row in devices.items()
        }

    def free(self) -> dict[str, int]:
        """Return the number of free slots of each node."""
        with self._lock:
            return self._ledger.free()

    def running(self) -> Mapping[str, Running]:
        """Return the attempts that run or are starting, by job."""
        with self._lock:
            waiting = {
                job: Running(entry.attempt, entry.nodes) for job, entry in self._pending.items()
            }
            there = {
                job: Running(running.launch.attempt, running.nodes)
                for job, running in self._running.items()
            }
            return waiting | there

    def joining(self) -> Mapping[str, tuple[int, Mapping[int, str]]]:
        """Return attempt, and nodes by id, of the joining replicas of each job."""
        with self._lock:
            return {
                job: (running.launch.attempt, running.joining)
                for job, running in self._running.items()
                if running.joining
            }

    def apply(self, program: ReplicaProgram, attempt: int, nodes: Sequence[str]) -> None:
        """Run a job as `attempt`, with one replica for each entry of `nodes`.

        A running earlier attempt of the job is stopped gracefully first, and the new one waits for
        its slots. `poll` reports `Started`, or `Exited` if nothing could be started.

        Raises:
            NodesGoneError: `nodes` contains a node that has left the cluster.
            BackendError: `nodes` contains a node that never existed, or is too small.
        """
        with self._lock:
            gone = sorted((set(nodes) & self._seen) - self._cluster.nodes.keys())
            if gone:
                raise NodesGoneError(
                    f"the cluster no longer has {', '.join(gone)}, on which it should run"
                )
            if not nodes or not self._ledger.fits(nodes, program.num_stages):
                raise BackendError(
                    f"job {program.job!r} cannot run on {', '.join(nodes) or 'no node'}: each "
                    f"replica needs {program.num_stages} slots of its node, and the nodes have "
                    + ", ".join(
                        f"{name}: {max(node.spec.slots - node.taken, 0)}"
                        for name, node in self._cluster.nodes.items()
                    )
                )
            self._pending[program.job] = Waiting(program, attempt, tuple(nodes))
            if program.job in self._running:
                self._running[program.job].stop(self._grace)

    def stop(self, job: str, grace: float) -> bool:
        """Ask a job's processes to save and end; kill them after `grace` seconds.

        `poll` reports `Exited`; False: nothing runs, so nothing will be reported. A repeated call
        can only shorten the grace period.
        """
        with self._lock:
            pending = self._pending.pop(job, None)
            if job in self._running:
                self._running[job].stop(grace)
                return True
            if pending is not None:
                message = "It was stopped before it had started."
                exited = Exited(pending.attempt, Outcome.FAILED, message=message)
                self._reports.append(Report(job, exited))
            return pending is not None

    def kill(self, job: str, why: str) -> bool:
        """Kill processes that do not respond; False: none run, so `poll` reports nothing."""
        with self._lock:
            if job in self._running:
                self._running[job].kill(why)
                return True
        return self.stop(job, 0.0)

    def poll(self) -> list[Report]:
        """Continue pending work; return the reports since the last call."""
        looked = self._cluster.look()
        listing = self._cluster.listing()
        with self._lock:
            if looked:
                self._ledger.resize(self._cluster.nodes)
                self._seen |= self._cluster.nodes.keys()
            if listing is not None:
                self._step_all(listing)
                self._end_strays(listing)
            for job in list(self._joining):
                self._start_joining(job)
            for job in list(self._pending):
                self._start_pending(job)
            reports, self._reports = self._reports, []
            return reports

    def forget(self, job: str, attempt: int) -> None:
        """Remove everything of an attempt whose end has been stored, except its logs."""
        self._engine.forget(job, attempt)

    def fetch_log(self, job: str, attempt: int, replica: int) -> None:
        """Copy a replica's output so far into its log, if its attempt runs."""
        running = self._running.get(job)
        if running is not None and running.launch.attempt == attempt:
            with suppress(BackendError):  # earlier output remains available
                self._engine.fetch_log(ReplicaKey(job, attempt, replica))

    def adopt(
        self, job: str, attempt: int, scheduler_url: str, membership: Membership
    ) -> str | None:
        """Adopt an attempt that an earlier scheduler of the same store started.

        Whether it still runs or has already ended, `poll` reports its `Exited` like any other.
        Return None if it was adopted; else the reason why not, in one sentence.
        """
        launch = self._read_launch(job, attempt)
        listed = self._cluster.first_listing().replicas
        refusal = why_not_adopted(launch, membership.replicas, listed, scheduler_url)
        if refusal is not None or launch is None:
            return refusal
        # The slots of an attempt that has ended may be gone, or another attempt's: the earlier
        # scheduler gave them away before it stored the end.
        runs = any(key in listed and listed[key].ended is None for key in launch.keys)
        with self._lock:
            if runs and not (
                self._engine.holds(launch) and self._ledger.restore(job, launch.assignments)
            ):
                return NO_SLOTS
            running = self._running[job] = self._attempt(launch, None)
            joining = [replica for replica, _ in membership.joining]
            running.expect(joining, launch.assignments.keys() - {*membership.replicas, *joining})
            running.can_survive = membership.why_not is None
        return None

    def start_replicas(
        self, program: ReplicaProgram, attempt: int, replicas: Mapping[int, str]
    ) -> None:
        """Start joining replicas in free slots; `poll` may report `JoiningReplicaLost`."""
        with self._lock:
            running = self._running.get(program.job)
            if running is not None and running.launch.attempt == attempt:
                self._joining[program.job] = Joiners(program, dict(replicas))

    def end_replicas(
        self, job: str, attempt: int, replicas: Collection[int], *, at_once: bool
    ) -> None:
        """End replicas that do not take part; not `at_once`: they will end by themselves."""
        with self._lock:
            joining = self._joining.get(job)
            if joining is not None and not joining.replicas.keys().isdisjoint(replicas):
                del self._joining[job]
            running = self._running.get(job)
            if running is not None and running.launch.attempt == attempt:
                running.part(replicas, 0.0 if at_once else self._grace)

    def admit(
        self, job: str, attempt: int, replicas: Collection[int], *, can_survive: bool
    ) -> None:
        """Record which replicas take part, and whether the attempt can survive the loss of some."""
        with self._lock:
            running = self._running.get(job)
            if running is not None and running.launch.attempt == attempt:
                running.admit(replicas)
                running.can_survive = can_survive

    def recover(self, grace: float) -> list[str]:
        """End what an earlier scheduler left running and was not adopted: see `Engine.recover`."""
        with self._lock:
            adopted = {(job, entry.launch.attempt) for job, entry in self._running.items()}
        return self._engine.recover(adopted, grace)

    def saved_step(self, job: str, attempt: int) -> int | None:
        """Return the step at which the replicas of an attempt have saved and stopped, if known.

        They report it to their scheduler, which may be gone; a marker beside the checkpoint has it.
        """
        launch = self._read_launch(job, attempt)
        return None if launch is None else self._saved_step(launch)

    def newest_checkpoint(self, job: str, attempt: int) -> int | None:
        """Return the step of the newest checkpoint in an attempt's folder, if visible."""
        launch = self._read_launch(job, attempt)
        return None if launch is None else newest_checkpoint(launch)

    def shutdown(self, grace: float = 0.0) -> None:
        """End everything; return when nothing runs, or 10 s after `grace` at the latest."""
        with self._lock:
            for job in list(self.running()):
                self.stop(job, grace)
        deadline = self._clock() + grace + SHUTDOWN_PATIENCE
        while self._running and self._clock() < deadline:
            reports = self.poll()
            with self._lock:
                self._reports = reports + self._reports
            time.sleep(POLL_INTERVAL)

    def keep_records(self, jobs: JobActions, ending: threading.Event) -> None:
        """Keep the cluster's own records of jobs in step until the end: see `Engine`."""
        self._engine.keep_records(jobs, ending)

    def close(self) -> None:
        """Close the engine's connections; replicas keep running."""
        self._engine.close()

    def _end_strays(self, listing: Listing) -> None:
        """Kill replicas of no attempt here: a delayed start may succeed after it was given up."""
        expected = {key for entry in self._running.values() for key in entry.launch.keys}
        for key, state in listing.replicas.items():
            if state.ended is None and key not in expected:
                with suppress(ClusterUnavailableError):  # the next listing contains it again
                    self._engine.signal(key, Signal.KILL)

    def _step_all(self, listing: Listing) -> None:
        for job, running in list(self._running.items()):
            exited = running.step(listing.replicas)
            started = running.take_started()
            if started is not None:
                self._reports.append(Report(job, started))
            self._reports.extend(Report(job, lost) for lost in running.take_lost())
            self._release(job, running)
            if exited is None:
                continue
            if exited.outcome is not Outcome.COMPLETE and exited.step is None:
                exited = replace(exited, checkpoint=newest_checkpoint(running.launch))
            del self._running[job]
            self._ledger.release(job)
            self._reports.append(Report(job, exited, running.unsent_report()))
            if exited.outcome is Outcome.COMPLETE:
                self._pending.pop(job, None)

    def _release(self, job: str, running: ReplicaGroup) -> None:
        parted = running.take_parted()
        if parted:
            launch = running.launch
            self._launches.note_launch(job, launch.attempt, launch.to_json_object())
            self._ledger.release(job, parted)
            for replica in parted:
                self._engine.forget_replica(launch.key(replica))

    def _start_joining(self, job: str) -> None:
        running = self._running.get(job)
        if running is None or running.ending:
            del self._joining[job]
            return
        program, replicas = self._joining[job]
        assignments = self._ledger.take(job, replicas, program.num_stages)
        if assignments is None:
            return
        try:
            launch = running.launch.having(assignments).at_level(self._cluster.nodes)
            self._launches.note_launch(job, launch.attempt, launch.to_json_object())
        except BaseException:  # whatever the error, release the slots
            self._ledger.release(job, replicas)
            raise
        del self._joining[job]
        running.join(program, launch, assignments)

    def _start_pending(self, job: str) -> None:
        if job in self._running:
            return
        program, attempt, nodes = self._pending[job]
        assignments = self._ledger.take(job, dict(enumerate(nodes)), program.num_stages)
        if assignments is None:
            return
        try:
            launch = Launch(
                job=job,
                attempt=attempt,
                assignments=assignments,
                num_first=len(assignments),
                scheduler_url=program.scheduler_url,
                checkpoints=self._engine.checkpoints(program),
                elastic=self._engine.grows and program.can_grow,
                num_servers=min(program.servers, len(assignments)),
            ).at_level(self._cluster.nodes)
            self._launches.note_launch(job, attempt, launch.to_json_object())
        except BackendError as error:
            self._ledger.release(job)
            del self._pending[job]
            exited = Exited(attempt, Outcome.FAILED, message=str(error))
            self._reports.append(Report(job, exited))
            return
        except BaseException:  # whatever the error, release the slots
            self._ledger.release(job)
            raise
        del self._pending[job]
        self._running[job] = self._attempt(launch, program)
        self._running[job].begin()

    def _attempt(self, launch: Launch, program: ReplicaProgram | None) -> ReplicaGroup:
        return ReplicaGroup(
            self._engine,
            launch,
            lambda key: self._state_dir.log(*key),
            stopped_step=lambda: self._saved_step(launch),
            program=program,
            grace=self._grace,
            start_timeout=self._start_timeout,
            clock=self._clock,
        )

    def _saved_step(self, launch: Launch) -> int | None:
        told = self._launches.stopped_step(launch.job, launch.attempt)
        return marked_step(launch) if told is None else told

    def _read_launch(self, job: str, attempt: int) -> Launch | None:
        data = self._launches.launch(job, attempt)
        try:
            return Launch.from_json_object(job, attempt, data) if data else None
        except (KeyError, TypeError, ValueError):  # of another version
            return None
