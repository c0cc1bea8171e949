"""The scheduler as the place where replicas that join and leave find each other.

The scheduler decides who takes part. Each replica's heartbeats tell it what they would write into a
folder, and the answers what they would read there; whatever is lost is said again by the next one.
So a scheduler that is killed learns from the next heartbeats how things are, and a job does not
need one to go on.
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
from pipollux_protocol.messages import HeartbeatAnswer, LiveStatus, StoreAddress

from .arbiter import FolderArbiter

__all__ = ["SchedulerRendezvous"]

FOLDER = ".live-"
"""Of an attempt, beside its checkpoints; its number follows."""
ALIVE = "alive-"
"""Begins the name of a process's sign of life there."""
WAITS = 5.0
"""Seconds between two looks whether the scheduler still takes heartbeats."""


class SchedulerRendezvous:
    """What one replica tells the scheduler, and has learnt from it: see `Rendezvous`.

    Args:
        env: The environment of this replica, which a scheduler has started.
    """

    self_governed = False

    def __init__(self, env: JobEnvironment) -> None:
        self._env = env
        self.folder = _folder(env)
        """Of this attempt, beside its checkpoints."""
        self.arbiter = None if self.folder is None else FolderArbiter(self.folder)
        """Where those that are left when others die find each other, scheduler or not; None: where
        no checkpoints are saved there is no folder that all see."""
        self._lock = threading.Lock()
        self._says: dict[str, Any] = {"membership": 0 if env.joins else 1}
        self._heard = HeartbeatAnswer()
        several = env.processes_per_replica > 1 and self.folder is not None
        self._relay = self.folder / f"heard-{env.replica}" if several and self.folder else None
        """Where the first process of a replica, whose heartbeats the answers are, tells the others
        what it has heard."""
        self._relayed: HeartbeatAnswer | None = None
        self._beat = 0
        self._answered = threading.Event()
        self._heartbeat: Heartbeat | None = None

    def ride(self, heartbeat: Heartbeat | None) -> None:
        """Tell and learn with these heartbeats from now on."""
        self._heartbeat = heartbeat
        if heartbeat is not None:
            heartbeat.rider = self
            heartbeat.wake()

    def find_job(self) -> Announcement | None:
        """Return what the job tells that this replica joins; None: it begins one with others.

        Raises:
            ConfigurationError: The scheduler does not take this replica's heartbeats.
        """
        if not self._env.joins or self._env.stage > 0:
            return None
        heartbeat = Heartbeat.start(self._env, lambda: None, self)
        if heartbeat is None:
            raise ConfigurationError(
                "PIPOLLUX_JOINS is 1, and there is no scheduler to tell which job: it needs "
                "PIPOLLUX_ATTEMPT, PIPOLLUX_SCHEDULER_URL, PIPOLLUX_JOB_ID and a "
                "PIPOLLUX_HEARTBEAT_INTERVAL that is not 0"
            )
        while (announcement := self.announcement()) is None or not announcement.balance:
            if not heartbeat.alive:
                raise ConfigurationError(
                    "the scheduler at PIPOLLUX_SCHEDULER_URL does not take this replica's "
                    "heartbeats: PIPOLLUX_TOKEN must be the token that it gave to this job"
                )
            self._answered.wait(WAITS)
            self._answered.clear()
        heartbeat.close(goodbye=False)
        return announcement

    @property
    def is_deaf(self) -> bool:
        """Whether not all processes of this replica can hear what the scheduler says."""
        return self._env.processes_per_replica > 1 and self._relay is None

    # What rides with heartbeats

    def told(self) -> LiveStatus:
        """Return what the scheduler is told."""
        with self._lock:
            return LiveStatus(**self._says)

    def take(self, answer: HeartbeatAnswer) -> float | None:
        """Take its answer; return the seconds until it wants to hear more."""
        self._heard = answer
        if self._relay is not None and answer != self._relayed:
            with suppress(OSError):  # the next one may go better
                _write(self._relay, answer.model_dump_json())
                self._relayed = answer
        self._answered.set()
        return answer.again

    @property
    def _answer(self) -> HeartbeatAnswer:
        """What the scheduler has said last."""
        if self._relay is not None and self._env.stage > 0:
            with suppress(OSError, ValueError):
                self._heard = HeartbeatAnswer.model_validate_json(self._relay.read_text())
        return self._heard

    # What a folder would hold

    def post(self, announcement: Announcement) -> None:
        """Tell where the job is."""
        epoch, loop = announcement.place
        cannot, balance = announcement.cannot, list(announcement.balance)
        told = {"balance": balance, "cannot": cannot, "schedule": announcement.schedule}
        self._say(epoch=epoch, loop=loop, **told)

    def retract(self) -> None:
        """Remove what nobody needs any more; the last heartbeat says that the script has ended."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def announcement(self) -> Announcement | None:
        """Return what the job told last."""
        told = self._answer.announcement
        return None if told is None else Announcement.from_json_object(told.model_dump())

    def job_is_silent(self) -> bool:
        """Return False: the answer to a heartbeat ends whoever has nobody to join."""
        return False

    def apply(self, joining_replica: JoiningReplica) -> None:
        """Tell whether and where this joining replica waits."""
        epoch, loop = joining_replica.place
        self._say(waiting_to_join=joining_replica.waiting_to_join, epoch=epoch, loop=loop)

    def withdraw(self, replica: str) -> None:
        """Do nothing: `entered` says it."""

    def withdraw_application(self, replica: str) -> None:
        """Do nothing: `entered` says it."""

    def wanted(self, current: Membership, *, joining: bool) -> tuple[str, ...]:
        """Return those who take part already: the scheduler decides."""
        del joining
        return current.replicas

    def leave_sign(self, process: str) -> None:
        """Leave a sign of life for the other processes of this replica.

        Heartbeats come from the first one alone; the scheduler ends a replica that sends none.

        Raises:
            OSError: It cannot be written.
        """
        if self._relay is not None and self.folder is not None:
            self._beat += 1
            _write(self.folder / f"{ALIVE}{process}", str(self._beat))

    def signs(self, processes: Iterable[str]) -> Mapping[str, object]:
        """Return the last signs of those of this replica; of others nothing is known."""
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
        """Return the membership that the scheduler wants."""
        told = self._answer.proposal
        return None if told is None else Membership.from_json_object(told.model_dump())

    def refresh(self) -> None:
        """Send a heartbeat now."""
        if self._heartbeat is not None:
            self._heartbeat.wake()

    def refuse(self, number: int, why: str, *, for_good: bool) -> None:
        """Tell that a membership does not come about."""
        self._say(refused=number, why=why[:500], for_good=for_good)

    def entered(self, membership: Membership, step: int, seconds: float) -> None:
        """Tell that this replica takes part."""
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
        """Tell where the replicas of a membership find each other."""
        place = StoreAddress(number=number, host=host, port=port)
        self._say(store=place)
        if self.folder is not None:
            _write(self.folder / f"store-{number}", place.model_dump_json())

    def find_store(self, number: int) -> tuple[str, int] | None:
        """Return where the replicas of a membership find each other."""
        told = self._answer.store
        if told is None and self.folder is not None:
            with suppress(OSError, ValueError):
                text = (self.folder / f"store-{number}").read_text()
                told = StoreAddress.model_validate_json(text)
        return None if told is None or told.number != number else (told.host, told.port)

    def remove_store(self, number: int) -> None:
        """Take it back; `entered` says no more of it."""
        if self.folder is not None:
            with suppress(OSError):
                (self.folder / f"store-{number}").unlink(missing_ok=True)

    def _say(self, **what: Any) -> None:
        """Tell something from the next heartbeat on, which is sent now if that is new."""
        with self._lock:
            new = any(self._says.get(name) != value for name, value in what.items())
            self._says.update(what)
        if new:
            self.refresh()


def _write(path: Path, text: str) -> None:
    """Write a file, whole or not at all."""
    aside = path.with_name(f".{path.name}")
    aside.write_text(text)
    aside.replace(path)


def _folder(env: JobEnvironment) -> Path | None:
    """Return a folder of this attempt that all replicas see; None: there is none."""
    if env.checkpoint_dir is None:
        return None
    folder = env.checkpoint_dir / f"{FOLDER}{env.attempt}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if env.leads and not env.joins:
            for stale in env.checkpoint_dir.glob(f"{FOLDER}*"):
                if stale != folder:
                    shutil.rmtree(stale, ignore_errors=True)
    except OSError:  # who saves there says so
        return None
    return folder
