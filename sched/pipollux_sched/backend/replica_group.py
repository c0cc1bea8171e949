"""One attempt: replicas that start and end together, on any engine.

Either all of its replicas run or none. A replica that fails ends the others; a stop is requested
and, after a grace period, enforced; the outcome is reported once, when no replica is left. A
replica that the cluster took away is no failure of the job.

While its replicas train, further ones may be started (`join`), and take part once the job reports
it (`admit`). Until then their end is reported, and does not affect the others. Others may `part`.
"""

from __future__ import annotations

import errno
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pipollux_protocol.exit_statuses import STOPPED
from pipollux_sched.lifecycle import Exited, JoiningReplicaLost, Outcome, Started
from pipollux_utils.text import count

from .base import (
    SIGNAL_INTERVAL,
    BackendError,
    ClusterUnavailableError,
    Ended,
    Engine,
    Launch,
    ReplicaKey,
    ReplicaProgram,
    ReplicaState,
    Signal,
    SlotAssignment,
)
from .replica.last_words import last_words

_LOG = logging.getLogger(__name__)

START_TIMEOUT = 600.0
"""Seconds in which all replicas of an attempt must run; otherwise it ends."""
FAILURE_GRACE = 5.0
"""Seconds that the other replicas have to end after a failure; they can no longer save."""
SURVIVAL_PATIENCE = 60.0
"""Seconds in which a job that can continue without a failed replica must report that it does."""
NOBODY_LEFT = "All of its replicas were lost."
_UNSEEN = ReplicaState("", waiting="It is being started.")


class ReplicaGroup:
    """One attempt that is started, runs, or ends.

    Nothing here blocks. One thread calls `step` repeatedly, with the newest listing of the engine.

    Args:
        stopped_step: returns the step at which the job reported that it has saved and stops; None
            if it did not.
        program: the program of its replicas; None: they were started by an earlier scheduler.
        grace: seconds to save for the replicas when one was stopped from outside.
        start_timeout: seconds in which all replicas must run.
    """

    def __init__(
        self,
        engine: Engine,
        launch: Launch,
        log: Callable[[ReplicaKey], Path],
        *,
        stopped_step: Callable[[], int | None],
        program: ReplicaProgram | None,
        grace: float,
        start_timeout: float = START_TIMEOUT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.launch = launch
        self._engine = engine
        self._log = log
        self._stopped_step = stopped_step
        self._program = program
        self._clock = clock
        self._to_start = set() if program is None else set(launch.keys)
        self._states = dict.fromkeys(launch.keys, _UNSEEN)
        self._started = program is None
        self._start_by = clock() + start_timeout
        self._start_timeout = start_timeout
        self._outside_grace = grace
        self._grace = 0.0
        self._asked = False
        self._deadline: float | None = None
        self._failed: ReplicaKey | None = None
        self._stops_agreed = False
        """Whether its replicas end by themselves because they have agreed to stop."""
        self._why = ""
        self._sent: dict[ReplicaKey, tuple[Signal, float]] = {}
        self._joining: set[ReplicaKey] = set()
        self._parting: dict[ReplicaKey, float] = {}
        """Replicas that no longer take part, and when they are killed."""
        self._lost: list[JoiningReplicaLost] = []
        self.can_survive = False
        self._survive_by: float | None = None

    def join(
        self,
        program: ReplicaProgram,
        launch: Launch,
        assignments: Mapping[int, SlotAssignment],
    ) -> None:
        """Start joining replicas on these slots, by id; `launch` contains them."""
        self._program = program
        self.launch = launch
        keys = set(map(self.launch.key, assignments))
        self._joining |= keys
        self._to_start |= keys
        self._states |= dict.fromkeys(keys, _UNSEEN)
        self._start_rest()

    def admit(self, replicas: Collection[int]) -> None:
        """Record that replicas take part."""
        self._joining -= set(map(self.launch.key, replicas))

    def expect(self, joining: Collection[int], parting: Collection[int]) -> None:
        """Record which replicas of an adopted attempt do not take part."""
        for replica in joining:
            if replica in self.launch.assignments:
                self._joining.add(self.launch.key(replica))
            else:
                why = f"The previous scheduler ended before it had started replica {replica}."
                self._lost.append(JoiningReplicaLost(self.launch.attempt, replica, why))
        self.part(parting, self._outside_grace)

    def part(self, replicas: Collection[int], seconds: float) -> None:
        """Expect replicas to end by themselves; kill them if they still run after `seconds`."""
        for key in map(self.launch.key, replicas):
            if key not in self._states or (key == self._failed and self.ending):
                continue  # the replica that the others survived has already ended
            self._joining.discard(key)
            self._to_start.discard(key)
            if key == self._failed:
                self._failed = self._survive_by = None
            self._parting.setdefault(key, self._clock() + seconds)

    def take_parted(self) -> list[int]:
        """Return the replicas, once each, that have left and ended."""
        gone = [key for key in self._parting if self._states[key].ended]
        for key in gone:
            self._fetch_log(key)
            del self._parting[key], self._states[key]
        if gone:
            self.launch = self.launch.without([key.replica for key in gone])
        return [key.replica for key in gone]

    @property
    def nodes(self) -> tuple[str, ...]:
        """Node of each replica that takes part, in the order of their ids."""
        if not (self._joining or self._parting):
            return self.launch.nodes
        return tuple(self.launch.assignments[key.replica].node for key in sorted(self._members))

    @property
    def joining(self) -> dict[int, str]:
        """Node of each joining replica, by its id."""
        return {key.replica: self.launch.assignments[key.replica].node for key in self._joining}

    def take_lost(self) -> list[JoiningReplicaLost]:
        """Return the joining replicas, once each, that have ended before they took part."""
        lost, self._lost = self._lost, []
        return lost

    def stop(self, grace: float) -> None:
        """Ask all replicas to save and end; kill those that still run after `grace` seconds."""
        if not self._asked:
            self._asked, self._grace = True, grace
        self._end_within(grace)

    def kill(self, why: str) -> None:
        """Kill all replicas; the report has `why` as the reason."""
        self._asked = True
        self._why = self._why or why
        self._end_within(0.0)

    def begin(self) -> None:
        """Start the replicas that the cluster accepts; `step` starts the rest."""
        self._start_rest()

    def step(self, listed: Mapping[ReplicaKey, ReplicaState]) -> Exited | None:
        """Process a newer listing; return the outcome, None while any replica is left."""
        if self._goes_on_as_before(listed):
            return None
        self._note(listed)
        self._start_rest()
        self._watch_start()
        self._notice_failure()
        self._notice_joining()
        if not self._to_start and all(state.ended for state in self._all_states):
            return self._exited()
        self._send_signals()
        return None

    def take_started(self) -> Started | None:
        """Return, once, that all replicas run."""
        if self._started or self._why or any(s.waiting or not s.handle for s in self._all_states):
            return None
        self._started = True
        return Started(self.launch.attempt, tuple(state.handle for state in self._all_states))

    def unsent_report(self) -> Mapping[str, Any] | None:
        """Return the training report that a replica left because it could not be sent."""
        results = (state.ended.result for state in self._all_states if state.ended)
        return next((result.report for result in results if result.report), None)

    def _goes_on_as_before(self, listed: Mapping[ReplicaKey, ReplicaState]) -> bool:
        """Return whether all replicas run and none joins, leaves or ends: the common case."""
        changing = self._to_start or self._joining or self._parting or self._failed
        if changing or self.ending or not self._started:
            return False
        return all(
            state.ended is None and listed.get(key) == state for key, state in self._states.items()
        )

    def _note(self, listed: Mapping[ReplicaKey, ReplicaState]) -> None:
        for key, before in self._states.items():
            if before.ended or (key in self._to_start and key not in listed):
                continue
            if key in listed:
                self._to_start.discard(key)  # its start has arrived, whatever the response was
                self._states[key] = listed[key]
            else:
                lost = Ended(lost=f"{before.handle or 'It'} is gone without an exit status.")
                self._states[key] = before._replace(waiting="", ended=lost)

    def _start_rest(self) -> None:
        if self._program is None or self.ending:
            self._to_start.clear()
            return
        for key in sorted(self._to_start):
            try:
                self._engine.start(self._program, self.launch, key.replica)
            except ClusterUnavailableError as error:
                _LOG.debug("replica %d of job %s: %s", key.replica, key.job, error)
                return
            except (BackendError, OSError, ValueError) as error:  # ValueError: NUL in an argument
                if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                    self._states[key] = _UNSEEN._replace(waiting=f"It cannot be started: {error}.")
                    return
                self._states[key] = ReplicaState("", ended=Ended())
                self._to_start.discard(key)
                if key in self._joining:
                    self._lose(key, f"It could not be started: {error}")
                    continue
                self._why = f"The processes could not be started: {error}"
                self._end_within(0.0)
                return
            self._to_start.discard(key)

    def _watch_start(self) -> None:
        if self._started or self.ending or self._clock() < self._start_by:
            return
        waiting = [(key, state.waiting) for key, state in self._states.items() if state.waiting]
        if not waiting:
            return
        key, reason = waiting[0]
        where = self.launch.assignments[key.replica].node
        self._why = (
            f"{len(waiting)} of {count(len(self._states), 'replica')} did not run within "
            f"{self._start_timeout:g} s, so the attempt was ended. Replica "
            f"{key.replica} on {where}: {reason}"
        )
        self._end_within(0.0)

    def _notice_failure(self) -> None:
        if self.ending:
            return
        for key, state in self._members.items():
            if state.ended and (state.ended.status != 0 or state.ended.lost):
                self._failed = self._failed or key
                if self._may_survive():
                    return
                stopped = has_stopped(state.ended)
                # The agents' stop signals below would hide whether anybody else had stopped one.
                self._stops_agreed = (
                    stopped
                    and not was_asked(state.ended)
                    and self._agreed_step([state.ended]) is not None
                )
                self._end_within(self._outside_grace if stopped else FAILURE_GRACE)
                return

    def _may_survive(self) -> bool:
        """Return whether the remaining replicas may still continue, which the job reports."""
        left = any(state.ended is None for state in self._members.values())
        failed = math.inf if self._failed is None else self._failed.replica
        if not (self.can_survive and left and failed >= self.launch.num_servers):
            return False
        if self._survive_by is None:
            self._survive_by = self._clock() + SURVIVAL_PATIENCE
        return self._clock() < self._survive_by

    def _notice_joining(self) -> None:
        """Report joining replicas that are gone; kill the others if no replica is left to join."""
        for key in sorted(self._joining):
            ended = self._states[key].ended
            if ended is not None:
                self._lose(key, describe_loss(ended, self._log(key)))
        if self._joining and all(state.ended for state in self._members.values()):
            self.part([key.replica for key in self._joining], self._outside_grace)

    def _lose(self, key: ReplicaKey, why: str) -> None:
        self.part([key.replica], 0.0)
        where = self.launch.assignments[key.replica].node
        said = f"Joining replica {key.replica} on {where} is gone. {why}"
        self._lost.append(JoiningReplicaLost(self.launch.attempt, key.replica, said))

    @property
    def _members(self) -> dict[ReplicaKey, ReplicaState]:
        apart = self._joining | self._parting.keys()
        return {key: state for key, state in self._states.items() if key not in apart}

    @property
    def _all_states(self) -> Collection[ReplicaState]:
        return self._states.values()

    @property
    def ending(self) -> bool:
        """Whether its replicas have to end."""
        return self._deadline is not None

    def _end_within(self, seconds: float) -> None:
        deadline = self._clock() + seconds
        self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)

    def _send_signals(self) -> None:
        now = self._clock()
        for key, state in self._states.items():
            signal = self._due_signal(key, now)
            last, at = self._sent.get(key, (None, 0.0))
            if state.ended or signal is None or (last is signal and now < at + SIGNAL_INTERVAL):
                continue
            try:
                self._engine.signal(key, signal)
            except ClusterUnavailableError as error:
                _LOG.debug("%s for replica %d of %s: %s", signal, key.replica, key.job, error)
                return
            self._sent[key] = signal, now

    def _due_signal(self, key: ReplicaKey, now: float) -> Signal | None:
        deadline = math.inf if self._deadline is None else self._deadline
        if now >= min(self._parting.get(key, math.inf), deadline):
            return Signal.KILL
        if key in self._parting and self.launch.num_servers:
            return Signal.STOP  # it does not learn from the others that it leaves
        left_alone = self._stops_agreed and not self._asked and key not in self._joining
        return Signal.STOP if self.ending and not left_alone else None

    def _exited(self) -> Exited:
        attempt = self.launch.attempt
        for key in self._states:
            self._fetch_log(key)
        ends = {key: state.ended for key, state in self._members.items() if state.ended}
        if not ends:  # each has left for the others to continue, and none has
            return Exited(attempt, Outcome.FAILED, message=self._why or NOBODY_LEFT)
        step = self._agreed_step(ends.values())
        if not self._why:
            if all(end.status == 0 and not end.lost for end in ends.values()):
                return Exited(attempt, Outcome.COMPLETE)
            # An image's own entry point, without our agent, has only its exit status.
            alone = all(has_stopped(end) and not end.result.left for end in ends.values())
            asked = self._asked or any(map(was_asked, ends.values()))
            if asked and (alone or step is not None) and not self._broke(ends, step):
                return Exited(attempt, Outcome.STOPPED, step)
            lost = next((end.lost for end in ends.values() if end.lost), "")
            if lost and not self._asked:
                return Exited(attempt, Outcome.STOPPED, step, message=lost)
        found = self._describe(ends)
        # A replica killed because of its node may have saved before.
        return Exited(
            attempt,
            Outcome.FAILED,
            step,
            message=found.message,
            cannot_start=found.cannot_start,
            status=found.status,
        )

    def _fetch_log(self, key: ReplicaKey) -> None:
        with suppress(BackendError):  # the outcome is known without its last lines
            self._engine.fetch_log(key)

    def _agreed_step(self, ends: Collection[Ended]) -> int | None:
        """Return the step of the agreed stop; agents' results may be lost, the job's earlier report
        not.
        """
        steps = (end.result.stopped_step for end in ends)
        left = next((step for step in steps if step is not None), None)
        return self._stopped_step() if left is None else left

    def _broke(self, ends: Mapping[ReplicaKey, Ended], step: int | None) -> bool:
        """Return whether a replica failed by itself, so that the others' checkpoints are invalid.

        The first replica to end may also have been stopped from outside, as may the others. A
        script may also end with the status of a stopped one, or send itself SIGTERM.
        """
        end = None if self._failed is None else ends[self._failed]
        if end is None or was_asked(end):
            return False
        return not has_stopped(end) or (end.result.left and step is None)

    def _describe(self, ends: Mapping[ReplicaKey, Ended]) -> Failure:
        """Return why the attempt failed."""
        if self._why:
            return Failure(self._why)
        if self._asked:
            return Failure(f"The replicas left no agreed checkpoint within {self._grace:g} s.")
        key = self._failed or min(ends)
        node = self.launch.assignments[key.replica].node
        return describe_failure(key.replica, node, ends[key], self._log(key))


def has_stopped(end: Ended) -> bool:
    """Return whether a replica ended like one that was asked to stop."""
    return end.status in (STOPPED, -15)


def was_asked(end: Ended) -> bool:
    """Return whether a replica was ended from outside, or its agent received a stop signal."""
    return end.result.asked or bool(end.lost)


class Failure(NamedTuple):
    """Why an attempt failed."""

    message: str
    cannot_start: bool = False
    """Whether its script cannot start."""
    status: int | None = None
    """Exit status of the script, as a shell has it; None: unknown."""


def describe_failure(replica: int, node: str, ended: Ended, log: Path) -> Failure:
    """Return why a replica failed, with the end of its log."""
    error = ended.result.error
    words = last_words(log, ended.status)
    head = f"Replica {replica} on {node} {words.describe()}"
    if has_stopped(ended) and not was_asked(ended):
        head += ", but was not asked to stop"
    said = error.text if error else words.lines[-1].strip() if words.lines else ""
    head += f": {said}" if said else f" and printed nothing ({log.name})."
    end = [f"The end of {log.name}:", *words.lines] if words.lines else []
    status = words.status
    if status is not None and status < 0:
        status = 128 - status
    cannot_start = error is not None and error.cannot_start
    return Failure("\n".join([head, *end]), cannot_start, status)


def describe_loss(ended: Ended, log: Path) -> str:
    """Return why a replica ended before it took part, in a sentence or two."""
    words = last_words(log, ended.status)
    said = ended.lost or f"It {words.describe()}."
    return f"{said} {words.lines[-1].strip() if words.lines else ''}".strip()
