"""The backend: generations of jobs on the nodes of an engine.

What is above single replicas is written once, here and in `generation`: waiting for the slots of a
generation and for the end of the previous one, stopping one within a grace period, adopting what
an earlier scheduler has started. `Generations.poll` does all the work, called repeatedly by one
thread; the other methods only note what is wanted, or tell what is known, and any may call them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from pipollux_sched.lifecycle import Exited, LiveState, Outcome
from pipollux_sched.spec.job import JobSpec
from pipollux_sched.store import StateDir

from .adoption import NO_SLOTS, why_not_adopted
from .base import (
    POLL_INTERVAL,
    BackendError,
    ClusterUnavailableError,
    Engine,
    Launch,
    Listing,
    Node,
    NodesGoneError,
    ReplicaKey,
    ReplicaProgram,
    Signal,
)
from .cluster_watch import ClusterWatch
from .generation import START_TIMEOUT, RunningGeneration
from .job_actions import JobActions
from .report import Joiners, LaunchStore, Report, Running, Waiting
from .saved import marked_step, newest_checkpoint
from .slots import SlotLedger

__all__ = ["STOP_GRACE", "Generations"]

STOP_GRACE = 30.0
"""Seconds that a job has to save a checkpoint when it is asked to stop."""
SHUTDOWN_PATIENCE = 10.0
"""Seconds after the grace period for which `shutdown` waits for processes to end."""


class Generations:
    """Runs generations of jobs on an engine.

    Args:
        engine: starts, signals and lists replicas.
        launches: where launches are kept before they are acted on.
        state_dir: where the logs of replicas are.
        grace: seconds that a generation has to save when a newer one takes its place.
        start_timeout: seconds in which all replicas of a generation must run, or none does.
        clock: returns the time in seconds; must be monotonic.
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
        self._ledger = SlotLedger(self._cluster.slots)
        self._seen = set(self._cluster.slots)
        """Nodes that there are, or were."""
        self._running: dict[str, RunningGeneration] = {}
        self._pending: dict[str, Waiting] = {}
        self._joining: dict[str, Joiners] = {}
        self._reports: list[Report] = []
        self._lock = threading.RLock()

    @property
    def name(self) -> str:
        """The engine's."""
        return self._engine.name

    @property
    def lost(self) -> str | None:
        """Why nothing can ever be started again: see `Engine.lost`."""
        return self._engine.lost

    def check(self, spec: JobSpec) -> None:
        """Refuse a job that the engine can never run: see `Engine.check`."""
        self._engine.check(spec)

    def nodes(self) -> Mapping[str, Node]:
        """Return the nodes as they were seen last."""
        return self._cluster.nodes

    def free(self) -> dict[str, int]:
        """Return the number of free slots of each node."""
        with self._lock:
            return self._ledger.free()

    def running(self) -> Mapping[str, Running]:
        """Return the generations that run or are about to start, by job."""
        with self._lock:
            waiting = {
                job: Running(entry.generation, entry.nodes) for job, entry in self._pending.items()
            }
            there = {
                job: Running(running.launch.generation, running.nodes)
                for job, running in self._running.items()
            }
            return waiting | there

    def newcomers(self) -> Mapping[str, tuple[int, Mapping[int, str]]]:
        """Return generation, and nodes by id, of the replicas that are about to join a job."""
        with self._lock:
            return {
                job: (running.launch.generation, running.newcomers)
                for job, running in self._running.items()
                if running.newcomers
            }

    def apply(self, program: ReplicaProgram, generation: int, nodes: Sequence[str]) -> None:
        """Run a job as `generation`, with one replica for each entry of `nodes`.

        An earlier generation of the job that still runs is stopped gracefully first, and the new
        one waits until its slots are free. `poll` does the work, and reports `Started`, or `Exited`
        where nothing could be started.

        Raises:
            NodesGoneError: `nodes` names a node that was there, and is not any more.
            BackendError: `nodes` names a node that was never there, or is too small.
        """
        with self._lock:
            gone = sorted((set(nodes) & self._seen) - self._cluster.slots.keys())
            if gone:
                raise NodesGoneError(
                    f"{', '.join(gone)}, where it was to run, is not in the cluster any more"
                )
            if not nodes or not self._ledger.fits(nodes, program.num_stages):
                raise BackendError(
                    f"job {program.job!r} cannot run on {', '.join(nodes) or 'no node'}: each "
                    f"replica needs {program.num_stages} slots of its node, and the nodes have "
                    + ", ".join(f"{name}: {slots}" for name, slots in self._cluster.slots.items())
                )
            self._pending[program.job] = Waiting(program, generation, tuple(nodes))
            if program.job in self._running:
                self._running[program.job].stop(self._grace)

    def stop(self, job: str, grace: float) -> bool:
        """Ask a job's processes to save and end; kill them after `grace` seconds.

        `poll` does the work and reports `Exited`. Asked again, only a shorter grace counts.

        Returns:
            False where nothing of the job runs, so that nothing will be reported.
        """
        with self._lock:
            pending = self._pending.pop(job, None)
            if job in self._running:
                self._running[job].stop(grace)
                return True
            if pending is not None:
                message = "It was stopped before it had started."
                exited = Exited(pending.generation, Outcome.FAILED, message=message)
                self._reports.append(Report(job, exited))
            return pending is not None

    def kill(self, job: str, why: str) -> bool:
        """Kill a job's processes, as they no longer respond.

        `poll` does the work and reports `Exited`, with `why` as its message.

        Returns:
            False where nothing of the job runs, so that nothing will be reported.
        """
        with self._lock:
            if job in self._running:
                self._running[job].kill(why)
                return True
        return self.stop(job, 0.0)

    def poll(self) -> list[Report]:
        """Continue what is under way; return what has happened since the last call."""
        looked = self._cluster.look()
        listing = self._cluster.listing()
        with self._lock:
            if looked:
                self._ledger.resize(self._cluster.slots)
                self._seen |= self._cluster.slots.keys()
            if listing is not None:
                self._step_all(listing)
                self._end_strays(listing)
            for job in list(self._joining):
                self._start_joining(job)
            for job in list(self._pending):
                self._start_pending(job)
            reports, self._reports = self._reports, []
            return reports

    def forget(self, job: str, generation: int) -> None:
        """Remove what is left of a generation whose end has been stored, except its logs."""
        self._engine.forget(job, generation)

    def fetch_log(self, job: str, generation: int, replica: int) -> None:
        """Bring a replica's output so far into its log, if its generation runs."""
        running = self._running.get(job)
        if running is not None and running.launch.generation == generation:
            with suppress(BackendError):  # what was fetched before is there
                self._engine.fetch_log(ReplicaKey(job, generation, replica))

    def adopt(self, job: str, generation: int, supervisor_url: str, live: LiveState) -> str | None:
        """Adopt a generation that an earlier scheduler of the same store started.

        Whether it still runs or has already ended, `poll` reports its `Exited` like any other.

        Args:
            job: its name.
            generation: which one.
            supervisor_url: URL that jobs report to.
            live: who takes part in it, and who is about to.

        Returns:
            None if it was adopted; else the reason why not, in one sentence.
        """
        launch = self._read_launch(job, generation)
        listed = self._cluster.first_listing().replicas
        refusal = why_not_adopted(launch, live.replicas, listed, supervisor_url)
        if refusal is not None or launch is None:
            return refusal
        with self._lock:
            if not (self._engine.holds(launch) and self._ledger.restore(job, launch.seats)):
                return NO_SLOTS
            running = self._running[job] = self._generation(launch, None)
            newcomers = [replica for replica, _ in live.newcomers]
            running.expect(newcomers, launch.seats.keys() - {*live.replicas, *newcomers})
            running.can_survive = live.why_not is None
        return None

    def start_replicas(
        self, program: ReplicaProgram, generation: int, replicas: Mapping[int, str]
    ) -> None:
        """Start replicas that join those of a generation which train, when their slots are free.

        `poll` does the work, and reports `NewcomerLost` for one that ends before it was admitted.
        """
        with self._lock:
            running = self._running.get(program.job)
            if running is not None and running.launch.generation == generation:
                self._joining[program.job] = Joiners(program, dict(replicas))

    def end_replicas(
        self, job: str, generation: int, replicas: Collection[int], *, at_once: bool
    ) -> None:
        """See to it that replicas end which do not take part any more, or never will.

        `at_once` is False for those that are about to end by themselves.
        """
        with self._lock:
            joining = self._joining.get(job)
            if joining is not None and not joining.replicas.keys().isdisjoint(replicas):
                del self._joining[job]
            running = self._running.get(job)
            if running is not None and running.launch.generation == generation:
                running.part(replicas, 0.0 if at_once else self._grace)

    def admit(
        self, job: str, generation: int, replicas: Collection[int], *, can_survive: bool
    ) -> None:
        """Note who takes part in a generation, and whether it can go on without some of them."""
        with self._lock:
            running = self._running.get(job)
            if running is not None and running.launch.generation == generation:
                running.admit(replicas)
                running.can_survive = can_survive

    def recover(self, grace: float) -> list[str]:
        """End what an earlier scheduler left running and was not adopted: see `Engine.recover`."""
        with self._lock:
            adopted = {(job, entry.launch.generation) for job, entry in self._running.items()}
        return self._engine.recover(adopted, grace)

    def saved_step(self, job: str, generation: int) -> int | None:
        """Return the step at which the replicas of a generation have saved and stopped, if known.

        They tell the scheduler that started them, which may be gone; beside their checkpoint is a
        marker that says the same.
        """
        launch = self._read_launch(job, generation)
        return None if launch is None else self._saved_step(launch)

    def newest_checkpoint(self, job: str, generation: int) -> int | None:
        """Return the step of the newest checkpoint in a generation's folder, if that is seen."""
        launch = self._read_launch(job, generation)
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
        """Let go of the engine's connections; replicas are left as they are."""
        self._engine.close()

    def _end_strays(self, listing: Listing) -> None:
        """Kill replicas that belong to no generation here.

        The request to start one may arrive when it has been given up already.
        """
        expected = {key for entry in self._running.values() for key in entry.launch.keys}
        for key, state in listing.replicas.items():
            if state.ended is None and key not in expected:
                with suppress(ClusterUnavailableError):  # the next listing shows it again
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

    def _release(self, job: str, running: RunningGeneration) -> None:
        """Free the slots of replicas that have left and ended."""
        parted = running.take_parted()
        if parted:
            launch = running.launch
            self._launches.note_launch(job, launch.generation, launch.to_json_object())
            self._ledger.release(job, parted)
            for replica in parted:
                self._engine.forget_replica(launch.key(replica))

    def _start_joining(self, job: str) -> None:
        """Start the replicas that are to join a job, if their slots are free."""
        running = self._running.get(job)
        if running is None or running.ending:
            del self._joining[job]
            return
        program, replicas = self._joining[job]
        seats = self._ledger.take(job, replicas, program.num_stages)
        if seats is None:
            return
        try:
            launch = running.launch.having(seats)
            self._launches.note_launch(job, launch.generation, launch.to_json_object())
        except BaseException:  # whatever it is, the slots are not left taken
            self._ledger.release(job, replicas)
            raise
        del self._joining[job]
        running.join(program, seats)

    def _start_pending(self, job: str) -> None:
        """Start a job's pending generation, if its slots are free."""
        if job in self._running:
            return
        program, generation, nodes = self._pending[job]
        seats = self._ledger.take(job, dict(enumerate(nodes)), program.num_stages)
        if seats is None:
            return
        try:
            launch = Launch(
                job=job,
                generation=generation,
                seats=seats,
                num_first=len(seats),
                supervisor_url=program.supervisor_url,
                checkpoints=self._engine.checkpoints(program),
                live=self._engine.grows and program.can_grow,
            )
            self._launches.note_launch(job, generation, launch.to_json_object())
        except BackendError as error:
            self._ledger.release(job)
            del self._pending[job]
            exited = Exited(generation, Outcome.FAILED, message=str(error))
            self._reports.append(Report(job, exited))
            return
        except BaseException:  # whatever it is, the slots are not left taken
            self._ledger.release(job)
            raise
        del self._pending[job]
        self._running[job] = self._generation(launch, program)
        self._running[job].begin()

    def _generation(self, launch: Launch, program: ReplicaProgram | None) -> RunningGeneration:
        return RunningGeneration(
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
        told = self._launches.stopped_step(launch.job, launch.generation)
        return marked_step(launch) if told is None else told

    def _read_launch(self, job: str, generation: int) -> Launch | None:
        data = self._launches.launch(job, generation)
        try:
            return Launch.from_json_object(job, generation, data) if data else None
        except (KeyError, TypeError, ValueError):  # of another version
            return None
