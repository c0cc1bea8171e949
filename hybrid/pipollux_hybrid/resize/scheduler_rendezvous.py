"""The scheduler as a rendezvous for replicas that join and leave.

The scheduler decides on memberships. Each replica's heartbeats carry the content of its files in a
rendezvous folder, and the answers the content of others' files; the next heartbeat repeats lost
information. So a restarted scheduler learns the state, and a job continues without one.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipollux_hybrid.errors import ConfigurationError
from pipollux_hybrid.job.env import JobEnvironment
from pipollux_hybrid.job.heartbeat import Heartbeat
from pipollux_hybrid.job.membership import Announcement, JoiningReplica, Membership
from pipollux_protocol.messages import ElasticStatus, HeartbeatAnswer, StoreAddress

from .arbiter import FolderArbiter

FOLDER = ".elastic-"
"""Prefix of an attempt's folder beside its checkpoints; its number follows."""
ALIVE = "alive-"
"""Prefix of the files with signs of life there."""
WAITS = 5.0
"""Seconds between two checks that the scheduler still accepts heartbeats."""


class SchedulerRendezvous:
    """One replica's exchange with the scheduler: see `Rendezvous`."""

    self_governed = False

    def __init__(self, env: JobEnvironment) -> None:
        self._env = env
        self.folder = _folder(env)
        self.arbiter = None if self.folder is None else FolderArbiter(self.folder)
        """Arbiter of the surviving replicas; None without checkpoints, hence without a folder."""
        self._lock = threading.Lock()
        self._says: dict[str, Any] = {"membership": 0 if env.joins else 1}
        self._heard = HeartbeatAnswer()
        several = env.processes_per_replica > 1 and self.folder is not None
        self._relay = self.folder / f"heard-{env.replica}" if several and self.folder else None
        """File through which a replica's first process, with heartbeats, passes on the answers."""
        self._relayed: HeartbeatAnswer | None = None
        self._beat = 0
        self._answered = threading.Event()
        self._heartbeat: Heartbeat | None = None

    def ride(self, heartbeat: Heartbeat | None) -> None:
        """Use these heartbeats from now on."""
        self._heartbeat = heartbeat
        if heartbeat is not None:
            heartbeat.rider = self
            heartbeat.wake()

    def find_job(self) -> Announcement | None:
        """Return the announcement of the job to join; None: this replica begins one with others.
        Raises a ConfigurationError if the scheduler does not accept this replica's heartbeats.
        """
        if not self._env.joins or self._env.stage > 0:
            return None
        heartbeat = Heartbeat.start(self._env, lambda: None, self)
        if heartbeat is None:
            raise ConfigurationError(
                "PIPOLLUX_JOINS is 1, but the job to join is unknown: set PIPOLLUX_ATTEMPT, "
                "PIPOLLUX_SCHEDULER_URL, PIPOLLUX_JOB_ID and a PIPOLLUX_HEARTBEAT_INTERVAL that "
                "is not 0"
            )
        while (announcement := self.announcement()) is None or not announcement.balance:
            if not heartbeat.alive:
                raise ConfigurationError(
                    "the scheduler at PIPOLLUX_SCHEDULER_URL does not accept this replica's "
                    "heartbeats: PIPOLLUX_TOKEN must be the token that it gave to this job"
                )
            self._answered.wait(WAITS)
            self._answered.clear()
        heartbeat.close(goodbye=False)
        return announcement

    @property
    def is_deaf(self) -> bool:
        """Whether some process of this replica cannot receive the scheduler's answers."""
        return self._env.processes_per_replica > 1 and self._relay is None

    # HeartbeatPayload

    def told(self) -> ElasticStatus:
        """Return the status for the scheduler."""
        with self._lock:
            return ElasticStatus(**self._says)

    def take(self, answer: HeartbeatAnswer) -> float | None:
        """Store an answer; return the seconds until the next heartbeat."""
        self._heard = answer
        if self._relay is not None and answer != self._relayed:
            with suppress(OSError):  # the next answer is a retry
                _write(self._relay, answer.model_dump_json())
                self._relayed = answer
        self._answered.set()
        return answer.again

    @property
    def _answer(self) -> HeartbeatAnswer:
        if self._relay is not None and self._env.stage > 0:
            with suppress(OSError, ValueError):
                self._heard = HeartbeatAnswer.model_validate_json(self._relay.read_text())
        return self._heard

    # Rendezvous

    def post(self, announcement: Announcement) -> None:
        """Send the job announcement."""
        epoch, loop = announcement.place
        cannot, balance = announcement.cannot, list(announcement.balance)
        fields = {"balance": balance, "cannot": cannot, "schedule": announcement.schedule}
        self._say(epoch=epoch, loop=loop, **fields)

    def follow(self) -> None:
        """Do nothing: the scheduler knows."""

    def is_over(self) -> bool:
        """Return False: the scheduler ends the replicas of an attempt, and decides who goes on."""
        return False

    def retract(self) -> None:
        """Remove the folder; the last heartbeat reports the end of the script."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def announcement(self) -> Announcement | None:
        """Return the last job announcement."""
        found = self._answer.announcement
        return None if found is None else Announcement.from_json_object(found.model_dump())

    def job_is_silent(self) -> bool:
        """Return False: if there is no job to join, the answer to a heartbeat ends this replica."""
        return False

    def apply(self, joining_replica: JoiningReplica) -> None:
        """Report whether and where this joining replica waits."""
        epoch, loop = joining_replica.place
        self._say(waiting_to_join=joining_replica.waiting_to_join, epoch=epoch, loop=loop)

    def withdraw(self, replica: str) -> None:
        """Do nothing: `entered` replaces the requests."""

    def withdraw_application(self, replica: str) -> None:
        """Do nothing: `entered` replaces the application."""

    def wanted(self, current: Membership, *, joining: bool) -> tuple[str, ...]:
        """Return the current members: the scheduler decides."""
        del joining
        return current.replicas

    def leave_sign(self, process: str) -> None:
        """Leave a sign of life for the other processes of this replica."""
        if self._relay is not None and self.folder is not None:
            self._beat += 1
            _write(self.folder / f"{ALIVE}{process}", str(self._beat))

    def signs(self, processes: Iterable[str]) -> Mapping[str, object]:
        """Return the last signs of life within this replica; None for processes of others."""
        return {process: self._sign(process) for process in processes}

    def _sign(self, process: str) -> str | None:
        ours = process.partition("-")[0] == str(self._env.replica)
        if self._relay is None or self.folder is None or not ours:
            return None
        try:
            return (self.folder / f"{ALIVE}{process}").read_text()
        except FileNotFoundError:
            return None

    def propose(self, membership: Membership) -> None:
        """Refuse: the scheduler proposes."""
        raise RuntimeError(f"membership {membership.number} is not for this replica to propose")

    def proposal(self) -> Membership | None:
        """Return the membership that the scheduler proposes."""
        found = self._answer.proposal
        return None if found is None else Membership.from_json_object(found.model_dump())

    def refresh(self) -> None:
        """Send a heartbeat now."""
        if self._heartbeat is not None:
            self._heartbeat.wake()

    def refuse(self, number: int, why: str, *, for_good: bool) -> None:
        """Report that a membership is given up."""
        self._say(refused=number, why=why[:500], for_good=for_good)

    def entered(self, membership: Membership, step: int, seconds: float) -> None:
        """Report that this replica has entered a membership."""
        with self._lock:
            self._says = {
                "membership": membership.number,
                "replicas": [int(replica) for replica in membership.replicas],
                "step": step,
                "seconds": seconds,
            }
        self.refresh()

    def host(self) -> tuple[str, bool]:
        """Return the address that the agent of this replica has found."""
        return self._env.address or "127.0.0.1", True

    def announce_store(self, number: int, host: str, port: int) -> None:
        """Publish the address of a membership's store."""
        place = StoreAddress(number=number, host=host, port=port)
        self._say(store=place)
        if self.folder is not None:
            _write(self.folder / f"store-{number}", place.model_dump_json())

    def find_store(self, number: int) -> tuple[str, int] | None:
        """Return the address of a membership's store."""
        found = self._answer.store
        if found is None and self.folder is not None:
            with suppress(OSError, ValueError):
                text = (self.folder / f"store-{number}").read_text()
                found = StoreAddress.model_validate_json(text)
        return None if found is None or found.number != number else (found.host, found.port)

    def remove_store(self, number: int) -> None:
        """Remove the file with the address; `entered` removes it from heartbeats."""
        if self.folder is not None:
            with suppress(OSError):
                (self.folder / f"store-{number}").unlink(missing_ok=True)

    def _say(self, **what: Any) -> None:
        with self._lock:
            new = any(self._says.get(name) != value for name, value in what.items())
            self._says.update(what)
        if new:
            self.refresh()


def _write(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}")
    aside.write_text(text)
    aside.replace(path)


def _folder(env: JobEnvironment) -> Path | None:
    if env.checkpoint_dir is None:
        return None
    folder = env.checkpoint_dir / f"{FOLDER}{env.attempt}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if env.leads and not env.joins:
            for stale in env.checkpoint_dir.glob(f"{FOLDER}*"):
                if stale != folder:
                    shutil.rmtree(stale, ignore_errors=True)
    except OSError:  # reported when the first checkpoint is written
        return None
    return folder
