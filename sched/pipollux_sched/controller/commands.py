"""Commands of users and jobs, each stored first, and carried out by other components."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pipollux_policies import NodeInfo
from pipollux_protocol.messages import ElasticStatus
from pipollux_sched.backend import ReplicaGroupManager
from pipollux_sched.backend.run_as import check_access, with_home_checkpoints
from pipollux_sched.errors import SchedulerError
from pipollux_sched.lifecycle import (
    Allocate,
    Cancel,
    ChangeRefused,
    ElasticReady,
    Event,
    JoiningReplicaLost,
    NodeLost,
    Phase,
    Resume,
    Survived,
    Suspend,
    Switched,
    WaitingToJoin,
)
from pipollux_sched.notifications.service import NotificationService
from pipollux_sched.spec.checkpoint_folder import check_checkpoint_folder, check_empty
from pipollux_sched.spec.job import JobSpec, SpecError, cycle_of, parse_job, spell_cycle
from pipollux_sched.spec.sweep import trial_name
from pipollux_sched.spec.teams import TeamsSpec
from pipollux_sched.spec.tokens import NewToken
from pipollux_sched.store import (
    JobEndedError,
    JobRecord,
    NodeCondition,
    NodeRecord,
    ReceivedHeartbeat,
    Store,
    Submission,
    TrialRecord,
    UnknownJobError,
)
from pipollux_sched.views.teams import stored_teams

from .admission import admitted, check_run_as, check_team
from .deletion import DeletedJob, JobDeletion
from .event_loop_monitor import EventLoopMonitor
from .executor import Executor
from .heartbeats import Heartbeats
from .network_levels import NetworkLevels
from .resize_board import ReplicaAnswer, ResizeBoard
from .search import why_no_optuna

_LOG = logging.getLogger(__name__)


class UnavailableError(SchedulerError):
    """The scheduler accepts no new jobs, because it is stopping."""


class JobService:
    """Carries out the commands of users; every method may be called from any thread.

    Args:
        nodes: returns the nodes of the cluster, whatever their condition.
        reconsider: called when the allocator has something new to decide on.
        stopping: returns whether the scheduler is stopping.
        notifications: checks destinations and manages channels.
    """

    def __init__(
        self,
        store: Store,
        executor: Executor,
        backend: ReplicaGroupManager,
        nodes: Callable[[], Mapping[str, NodeInfo]],
        *,
        reconsider: Callable[[], None],
        stopping: Callable[[], bool],
        state_dir: Path,
        deletion: JobDeletion,
        notifications: NotificationService | None = None,
    ) -> None:
        self._store = store
        self._executor = executor
        self._backend = backend
        self._nodes = nodes
        self._reconsider = reconsider
        self._stopping = stopping
        self._state_dir = state_dir
        self._deletion = deletion
        self.notifications = notifications or NotificationService(store)
        self.listening = EventLoopMonitor()
        self.heartbeats = Heartbeats(self.listening)
        self._board = ResizeBoard()
        self.levels = NetworkLevels()

    def submit(self, spec: JobSpec) -> JobRecord:
        """Accept a job; it starts as soon as slots are free.

        Raises:
            SpecError: the job cannot run here: script missing, no node fits it, or an image where
                the backend starts no containers.
            JobExistsError: a job of this name is running, queued or complete.
            TeamFullError: its team has reached its limit of unfinished jobs.
            DependencyError: it waits for an unknown job, or can never start.
        """
        return self.submit_all([spec])[0]

    def submit_all(self, specs: Sequence[JobSpec]) -> list[JobRecord]:
        """Accept many jobs: all or, if one is rejected, none, with the errors of `submit`."""
        return self._take_in(self.check(specs), [None] * len(specs))

    def submit_trials(self, sweep: JobRecord, trials: Sequence[TrialRecord]) -> list[JobRecord]:
        """Submit jobs for trials of a sweep: all or none, with the errors of `submit`."""
        template = parse_job(sweep.spec)
        specs = [template.of_trial(trial.number, trial.parameters) for trial in trials]
        return self._take_in(self._all_fitting(specs), trials)

    def check(self, specs: Sequence[JobSpec]) -> list[JobSpec]:
        """Return jobs as they would be stored; raise the `SpecError` of one that cannot run."""
        self._check_running()
        if cycle := cycle_of(specs):
            raise SpecError(f"job '{cycle[0]}': after: {spell_cycle(cycle)}")
        self._check_names(specs)
        return self._all_fitting(specs)

    def _all_fitting(self, specs: Sequence[JobSpec]) -> list[JobSpec]:
        teams, nodes = stored_teams(self._store), self._nodes()
        fitting = [self._fitting(spec, teams, nodes) for spec in specs]
        self._check_checkpoints(fitting)
        return fitting

    def _take_in(
        self, fitting: Sequence[JobSpec], trials: Sequence[TrialRecord | None]
    ) -> list[JobRecord]:
        changes = self._store.submit_all(
            [
                Submission(
                    spec.name,
                    spec.model_dump(mode="json"),
                    secrets.token_urlsafe(32),
                    spec.max_restarts,
                    spec.deadline,
                    trial,
                    [entry.revealed() for entry in spec.notify],
                )
                for spec, trial in zip(fitting, trials, strict=True)
            ]
        )
        self._reconsider()
        return [change.job for change in changes]

    def _fitting(
        self, spec: JobSpec, teams: TeamsSpec | None, nodes: Mapping[str, NodeInfo]
    ) -> JobSpec:
        """Return a job as it is stored, or raise `SpecError`."""
        check_team(spec, teams)
        self.notifications.check_job(spec.name, spec.notify, spec.user)
        found = admitted(spec, nodes)
        check_access(found)
        if spec.sweep is None:
            self._backend.check(spec)
            return with_home_checkpoints(found, self._home_of(spec))
        reason = why_no_optuna(spec.sweep)
        if reason is not None:
            raise SpecError(f"job '{spec.name}': sweep: {reason}")
        last = dict.fromkeys(spec.sweep.names, "")
        self._backend.check(spec.of_trial(spec.sweep.num_trials - 1, last))
        return found

    def _home_of(self, spec: JobSpec) -> str | None:
        """Return the checkpoint folder of the earlier job that a job continues."""
        if spec.run_as is None:
            return None
        try:
            before = self._store.job(spec.name).spec
        except UnknownJobError:
            return None
        same = before.get("run_as") == spec.run_as
        return before.get("checkpoint_dir") if same else None

    def check_token(self, token: NewToken) -> str:
        """Return a warning about the rights of a token's holder; empty: none.

        `SpecError`: its team is not known, or no job can run as its user of the machine.
        """
        if token.team is not None:
            teams = stored_teams(self._store)
            if teams is None:
                raise SpecError(
                    f"team: '{token.team}' is not known, as no teams are set; leave it out, or set "
                    "teams first, with: pipollux teams --set FILE"
                )
            teams.check_team_name(token.team)
        return check_run_as(token, self._backend.name)

    def set_teams(self, spec: TeamsSpec | None) -> None:
        """Set the teams of the cluster; None: no teams."""
        self._check_running()
        if spec is not None:
            self.notifications.check_teams(spec)
        self._store.teams.set_spec(None if spec is None else spec.revealed())
        self._reconsider()

    def move(self, name: str, team: str) -> JobRecord:
        """Move a job to another team, from the next decision on.

        Raises:
            SpecError: the team is not known, is not its user's, or can never run it.
            TeamFullError: it has not ended, and the team has reached its limit of unfinished jobs.
        """
        self._check_running()
        # Check the team alone: a priority class that is gone must not prevent the move.
        changes = {"team": team, "priority": None}
        spec = parse_job(self._store.job(name).spec).model_copy(update=changes)
        check_team(spec, stored_teams(self._store))
        job = self._store.teams.move(name, team)
        if job.is_sweep:
            for trial in self._store.sweeps.unfinished(name):
                self._store.teams.move(trial.name, team)
        self._reconsider()
        return job

    def cancel(self, name: str) -> JobRecord:
        """End a job and its processes; raise `UnknownJobError` or `JobEndedError`."""
        self._check_running()
        return self._handle_with_trials(name, Cancel())

    def suspend(self, name: str) -> JobRecord:
        """Suspend a job: it saves and frees slots; raise `UnknownJobError` or `JobEndedError`."""
        self._check_running()
        return self._handle_with_trials(name, Suspend())

    def resume(self, name: str) -> JobRecord:
        """Resume a suspended job; raise `UnknownJobError` or `JobEndedError`."""
        self._check_running()
        record = self._handle_with_trials(name, Resume())
        self._reconsider()
        return record

    def _handle_with_trials(self, name: str, event: Cancel | Suspend | Resume) -> JobRecord:
        """Apply a user's request to a job and, if it is a sweep, to its unfinished trials."""
        record = self._executor.handle(name, event)
        if record.is_sweep:
            for trial in self._store.sweeps.unfinished(name):
                with suppress(JobEndedError, UnknownJobError):  # it has ended meanwhile
                    self._executor.handle(trial.name, event)
        return record

    def rerun(self, name: str, *, from_scratch: bool) -> JobRecord:
        """Rerun a job that has ended, as it was submitted, from scratch or its last checkpoint.

        Raises:
            JobUnfinishedError: it has not ended.
            JobEndedError: it is complete, and `from_scratch` is False.
            SpecError: it can no longer run here (see `submit`), its team or priority is not its
                user's any more, or from scratch its user's own `checkpoint_dir` contains
                checkpoints.
        """
        self._check_running()
        job = self._store.job(name)
        if job.phase.ended:
            spec = parse_job(job.spec)
            if (teams := stored_teams(self._store)) is not None:
                check_team(spec, teams)
            self._backend.check(spec)
            check_access(admitted(spec, self._nodes()))
            if from_scratch:
                check_empty(spec)
        change = self._store.rerun(name, from_scratch=from_scratch)
        self._reconsider()
        return change.job

    def delete(self, name: str) -> DeletedJob:
        """Delete a job that has ended: see `JobDeletion.delete`."""
        self._check_running()
        job = self._store.job(name)
        if job.is_sweep and job.phase.ended:
            for trial in self._store.sweeps.jobs(name).values():
                self.delete(trial.name)
        deleted = self._deletion.delete(name)
        # Another job of this name starts again at attempt 1.
        self.heartbeats.forget(name, deleted.job.state.attempt)
        return deleted

    def set_node(self, name: str, condition: NodeCondition, reason: str = "") -> NodeRecord:
        """Set a node's condition; jobs on a dead node restart elsewhere."""
        self._check_running()
        node = self._store.set_node_condition(name, condition, reason)
        if condition is NodeCondition.DEAD:
            why = f"Node {name} is dead" + (f": {reason}." if reason else ".")
            for job in self._store.jobs(unfinished=True):
                state = job.state
                if name in state.running_on:
                    self._executor.handle(job.name, NodeLost(state.attempt, why, name))
                    continue
                for replica, place in state.membership.joining:
                    if place == name:
                        lost = JoiningReplicaLost(state.attempt, replica, why)
                        self._executor.handle(job.name, lost)
        self._reconsider()
        return node

    def heard(
        self,
        name: str,
        attempt: int,
        replica: int,
        step: int | None,
        hang_timeout: float | None = None,
        *,
        finished: bool = False,
    ) -> ReceivedHeartbeat | None:
        """Record a heartbeat of a replica; `finished`: it is the last one.

        Return the first and the last one, to be stored before the response.
        """
        first = self.heartbeats.note(name, attempt, replica, step, hang_timeout, finished=finished)
        if first or finished:
            return ReceivedHeartbeat(name, attempt, replica, step, finished)
        return None

    def hear_word(self, job: JobRecord, replica: int, word: ElasticStatus) -> list[Event]:
        """Record a replica's report about elastic resizes; return the events for `follow_word`."""
        return self._board.note(job.name, job.state, replica, word)

    def follow_word(self, job: JobRecord, events: Sequence[Event]) -> JobRecord:
        """Apply the events of a replica's report to its job; return the updated job."""
        for event in events:
            job = self._executor.handle(job.name, event)
            if isinstance(event, Survived):
                job = self._check_survivors(job)
            if isinstance(event, Switched | Survived | ChangeRefused):
                self._reconsider()
            if not job.state.running_on:
                self._board.forget(job.name)
                return job
        return job

    def note_words(
        self, words: Sequence[tuple[str, ElasticReady | WaitingToJoin]]
    ) -> list[JobRecord | UnknownJobError]:
        """Record whether jobs can be resized, and waiting joining replicas; return the jobs."""
        events = _together(words)
        jobs: dict[str, JobRecord | None] = {}
        for (name, _), job in zip(events, self._executor.handle_all(events), strict=True):
            if job is not None and not job.state.running_on:
                self._board.forget(name)
            jobs[name] = job
        return [jobs[name] or UnknownJobError(f"no job is named {name!r}") for name, _ in words]

    def answer(self, job: JobRecord, replica: int) -> ReplicaAnswer:
        """Return the response to a replica's heartbeat."""
        if not job.state.running_on:
            return ReplicaAnswer(None, False, None, None)
        return self._board.answer(job.name, job.state, replica)

    def _check_survivors(self, job: JobRecord) -> JobRecord:
        """Stop a job with fewer remaining replicas than its user allows."""
        least, left = int(job.spec.get("min_replicas", 1)), len(job.state.running_on)
        if not 0 < left < least:
            return job
        why = f"Only {left} of its replicas are left, and min_replicas is {least}."
        return self._executor.handle(job.name, Allocate((), why))

    def expect_replicas(self) -> None:
        """Expect heartbeats of the running replicas that an earlier scheduler knew."""
        for job in (job for job in self._store.jobs(unfinished=True) if job.state.running_on):
            attempt = job.state.attempt
            for replica, kept in self._store.heartbeats.of(job.name, attempt).items():
                self.heartbeats.expect(job.name, attempt, replica, kept)

    def fetch_logs(self, name: str) -> None:
        """Copy the output of a job's replicas so far into their logs."""
        state = self._store.job(name).state
        joining = (replica for replica, _ in state.membership.joining)
        for replica in (*state.membership.replicas, *joining):
            self._backend.fetch_log(name, state.attempt, replica)

    def decide(self) -> None:
        """Run the allocator now instead of at the next interval."""
        self._check_running()
        self._reconsider()

    def note_training(self, names: Sequence[str]) -> list[None]:
        """Record that jobs have taken their first steps: they may be moved if others wait."""
        # Counted by the database: thousands of jobs may wait, or begin, at a time.
        if self._store.overview.jobs_by_phase().keys() & {Phase.QUEUED, Phase.SUSPENDED}:
            _LOG.debug("%s train while others wait", ", ".join(names))
            self._reconsider()
        return [None] * len(names)

    def _check_checkpoints(self, specs: Sequence[JobSpec]) -> None:
        asking = [spec for spec in specs if spec.checkpoint_dir is not None]
        if not asking:
            return
        saved = ((job.name, job.spec.get("checkpoint_dir")) for job in self._store.jobs())
        others = [(name, folder) for name, folder in saved if folder]
        for spec in asking:
            check_checkpoint_folder(spec, self._state_dir, others)
            others.append((spec.name, str(spec.checkpoint_dir)))

    def _check_names(self, specs: Sequence[JobSpec]) -> None:
        """Reject a new job that would continue from checkpoints of one that the store has lost.

        An older copy of the store, brought back, lacks the jobs submitted after it.
        """
        for spec in specs:
            names = [spec.name]
            if spec.sweep is not None:
                names = [trial_name(spec.name, n) for n in range(spec.sweep.num_trials)]
            folders = (self._state_dir / "jobs" / name for name in names)
            left = next((folder for folder in folders if any(folder.glob("checkpoints*/*"))), None)
            if left is not None and not self._is_known(spec.name):
                raise SpecError(
                    f"job '{spec.name}': name: {left} holds checkpoints of a job that is not in "
                    "the store, from which this one would go on; move that folder away, or give "
                    "the job another name"
                )

    def _is_known(self, name: str) -> bool:
        if any(pending.name == name for pending in self._store.deletions.pending()):
            return True  # the store refuses the name until the files are gone
        try:
            self._store.job(name)
        except UnknownJobError:
            return False
        return True

    def _check_running(self) -> None:
        if self._stopping():
            raise UnavailableError("the scheduler is being stopped and accepts nothing new")


def _together(words: Sequence[tuple[str, ElasticReady | WaitingToJoin]]) -> list[tuple[str, Event]]:
    """Merge the events of a job's joining replicas, because each event writes the whole state."""
    waiting: dict[tuple[str, int], list[int]] = {}
    events: list[tuple[str, Event]] = []
    for name, event in words:
        if isinstance(event, WaitingToJoin):
            waiting.setdefault((name, event.attempt), []).extend(event.replicas)
        else:
            events.append((name, event))
    return events + [
        (name, WaitingToJoin(number, (*those,))) for (name, number), those in waiting.items()
    ]
