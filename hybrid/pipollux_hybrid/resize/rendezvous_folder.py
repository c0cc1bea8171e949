"""A rendezvous in a folder that all hosts share.

    job.json             the job announcement, rewritten by replica 0 all the time
    claim-N              the Nth attempt of a job in this folder
    joining-ID.json      a replica's application to join, rewritten by it all the time
    leave-ID             a request that a replica leaves
    alive-ID.json        sign of life of a replica's first process, rewritten by it all the time;
                         of the process of stage k above 0 alive-ID-k.json
    proposal.json        the proposed membership
    store-N.json         the address of membership N's store
    totals-…             totals that the job has read: see `published_totals`
    lost-…, follows-…, outcome-…   of replicas that have died: see `arbiter`

Every file has one writer, and is replaced atomically. Clocks of hosts differ, so the writer counts
as alive if the file changes (it holds a counter), whatever its time stamp.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipollux_hybrid.errors import ConfigurationError
from pipollux_hybrid.job.membership import Announcement, JobPlace, JoiningReplica, Membership

from .arbiter import Arbiter, FolderArbiter
from .published_totals import TOTALS

SILENCE = 10.0
"""Seconds without a change after which the writer of a file counts as dead."""
_JOB, _PROPOSAL = "job.json", "proposal.json"
_JOINING, _LEAVE, _CLAIM, _ALIVE = "joining-", "leave-", "claim-", "alive-"
_OF_RUN = ("lost-*", "follows-*", "outcome-*", f"{TOTALS}*")


@dataclass
class _Seen:
    beat: object
    since: float


class RendezvousFolder:
    """The folder, on storage that all hosts share, as one replica sees it; created if it is
    missing. Raises a ConfigurationError if it is not writable. ``clock`` is monotonic.
    """

    self_governed = True

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder = folder
        self._clock = clock
        self._beat = 0
        # Containers on several hosts may have the same process ids.
        self._mine = secrets.token_hex(8)
        self._seen: dict[str, _Seen] = {}
        self._run: str | None = None
        """Id of the attempt of this process; None before it knows."""
        self._posts = self._follows = False
        self._asked_at: float | None = None
        """When this process was last asked to post, whether the folder was there or not."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._write(f".probe-{self._mine}", {})
            (folder / f".probe-{self._mine}").unlink()
        except OSError as error:
            raise ConfigurationError(
                f"PIPOLLUX_RENDEZVOUS={str(folder)!r}: a folder is needed that every host of the "
                f"job can write to ({error})"
            ) from error
        self.arbiter: Arbiter | None = FolderArbiter(folder)

    def claim(self, silent_run: str | None) -> bool:
        """Begin an attempt of a job in this folder; return False if another process was faster.

        ``silent_run`` is the claim of the previous attempt, which is dead; None: there was none.
        """
        number = 1 + max(self._claims(), default=0)
        if silent_run != self.last_claim():
            return False
        try:
            os.close(os.open(self.folder / f"{_CLAIM}{number}", os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            return False
        self._run = secrets.token_hex(8)
        before = () if silent_run is None else (silent_run,)
        found = (f"{_JOINING}*", f"{_LEAVE}*", f"{_ALIVE}*", "store-*.json", *_OF_RUN)
        for pattern in (*before, _JOB, _PROPOSAL, *found):
            for stale in self.folder.glob(pattern):
                stale.unlink(missing_ok=True)
        return True

    def last_claim(self) -> str | None:
        """Return the name of the last attempt's claim; None: there was none."""
        numbers = self._claims()
        return f"{_CLAIM}{max(numbers)}" if numbers else None

    def post(self, announcement: Announcement) -> None:
        """Publish the job announcement; replica 0 does so all the time.

        It recreates a folder that has disappeared, or the next replica would begin a job there. A
        ConfigurationError is raised if an older job posts there, too, after its folder had
        disappeared; or if this process stood still, and another one has ended or replaced the job.
        """
        now = self._clock()
        silent = 0.0 if self._asked_at is None else now - self._asked_at
        found = self._read(_JOB) or {}
        run, beat = found.get("run"), int(found.get("beat", 0))
        if self._run is None:
            self._run = run or secrets.token_hex(8)
        if not self._posts and run == self._run:  # it has succeeded another leader
            self._beat = max(beat, self._beat)
        where = f"PIPOLLUX_RENDEZVOUS={str(self.folder)!r}"
        if self._posts and silent > SILENCE and self.is_over():
            raise ConfigurationError(
                f"{where}: this process stood still for {silent:.0f} s, and the job there has "
                "ended or was started again meanwhile: start this replica again"
            )
        self._asked_at = now
        if run not in (None, self._run) and self._posts and beat > self._beat:
            raise ConfigurationError(
                f"{where}: a job runs there already, whose files had disappeared when this one "
                "began: start this replica again, and it joins that job, or choose another folder"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.last_claim() is None:
            (self.folder / f"{_CLAIM}1").touch()
        self._write_alive(_JOB, {**announcement.to_json_object(), "run": self._run})
        self._posts = True

    def follow(self) -> None:
        """Note which attempt of the job this replica trains in."""
        if self._run is None:
            self._run = (self._read(_JOB) or {}).get("run")
            self._follows = self._run is not None

    def is_over(self) -> bool:
        """Return whether that attempt has ended, or another one has begun in this folder. Raises an
        OSError if the folder cannot be read.
        """
        if self._run is None or not (self._posts or self._follows):
            return False  # nothing was posted yet
        found = self._read(_JOB)
        return not (self.folder / _JOB).exists() if found is None else found.get("run") != self._run

    def retract(self) -> None:
        """Publish the end of the job, so that the next attempt need not wait to detect it. Do
        nothing if that attempt has begun while this process stood still.
        """
        run = (self._read(_JOB) or {}).get("run")
        if None not in (run, self._run) and run != self._run:
            return
        claim = self.last_claim()
        found = [path.name for pattern in _OF_RUN for path in self.folder.glob(pattern)]
        for name in (_JOB, claim, *found):
            if name is not None:
                with suppress(OSError):
                    (self.folder / name).unlink(missing_ok=True)

    def announcement(self) -> Announcement | None:
        """Return the job announcement, whether the job is alive or not; None: there is none."""
        data = self._read(_JOB)
        try:
            return None if data is None else Announcement.from_json_object(data)
        except (KeyError, TypeError, ValueError):
            return None

    def job_is_silent(self) -> bool:
        """Return whether nothing was posted for a while; to be polled."""
        data, before = self._read(_JOB), self._seen.get(_JOB)
        if data is None and before is not None and not self.folder.is_dir():
            return self._clock() - before.since > SILENCE  # the job recreates it
        return self._is_silent(_JOB, data)

    def job_speaks(self) -> bool:
        """Return whether something was posted since the first call."""
        data = self._read(_JOB)
        before = self._seen.get(_JOB)
        self._is_silent(_JOB, data)
        return before is not None and self._seen[_JOB].beat != before.beat

    def apply(self, joining_replica: JoiningReplica) -> None:
        """Apply to join; a joining replica does so all the time."""
        data = {
            "host": joining_replica.host,
            "waiting_to_join": joining_replica.waiting_to_join,
            "place": list(joining_replica.place),
        }
        self._write_alive(f"{_JOINING}{joining_replica.replica}.json", data)

    def withdraw(self, replica: str) -> None:
        """Withdraw all requests of a replica."""
        self.withdraw_application(replica)
        signs = (path.name for path in self.folder.glob(f"{_ALIVE}{replica}*.json"))
        for name in (f"{_LEAVE}{replica}", *signs):
            with suppress(OSError):
                (self.folder / name).unlink(missing_ok=True)

    def withdraw_application(self, replica: str) -> None:
        """Withdraw a replica's application to join, and nothing else."""
        with suppress(OSError):
            (self.folder / f"{_JOINING}{replica}.json").unlink(missing_ok=True)

    def joining(self) -> list[JoiningReplica]:
        """Return the applications of living replicas, in the order of their ids."""
        found = []
        for name in self._names(_JOINING):
            data = self._read(name)
            if data is None or self._is_silent(name, data):
                continue
            with suppress(KeyError, TypeError, ValueError):
                replica = name.removeprefix(_JOINING).removesuffix(".json")
                epoch, loop = data["place"]
                place = JobPlace(int(epoch), int(loop))
                found.append(
                    JoiningReplica(replica, str(data["host"]), bool(data["waiting_to_join"]), place)
                )
        return found

    def ask_to_leave(self, replica: str) -> None:
        """Request that a replica leaves."""
        (self.folder / f"{_LEAVE}{replica}").touch()

    def leavers(self) -> set[str]:
        """Return the replicas that were requested to leave."""
        return {name.removeprefix(_LEAVE) for name in self._names(_LEAVE)}

    def wanted(self, current: Membership, *, joining: bool) -> tuple[str, ...]:
        """Return the next members: see `Rendezvous`."""
        leaving = self.leavers()
        staying = [replica for replica in current.replicas if replica not in leaving]
        if not staying:  # the last replicas cannot leave: they are stopped by a signal instead
            return current.replicas
        coming = [x.replica for x in self.joining() if x.waiting_to_join] if joining else []
        return (*staying, *(x for x in coming if x not in current.replicas))

    def leave_sign(self, process: str) -> None:
        """Leave a sign of life of this process."""
        self._write_alive(f"{_ALIVE}{process}.json", {})

    def signs(self, processes: Iterable[str]) -> Mapping[str, object]:
        """Return the last sign of life of each process, None if there is none."""
        return {x: (self._read(f"{_ALIVE}{x}.json") or {}).get("beat") for x in processes}

    def propose(self, membership: Membership) -> None:
        """Propose a membership; replica 0 does so."""
        self._write(_PROPOSAL, membership.to_json_object())

    def proposal(self) -> Membership | None:
        """Return the proposed membership; None: there was none yet."""
        data = self._read(_PROPOSAL)
        try:
            return None if data is None else Membership.from_json_object(data)
        except (KeyError, TypeError, ValueError):
            return None

    def refresh(self) -> None:
        """Do nothing: all replicas poll the folder."""

    def refuse(self, number: int, why: str, *, for_good: bool) -> None:
        """Do nothing: replica 0 detects the failure, and makes another proposal."""

    def entered(self, membership: Membership, step: int, seconds: float) -> None:
        """Do nothing: replica 0's announcement has the membership."""

    def host(self) -> tuple[str, bool]:
        """Return a name of this host that the other hosts can resolve."""
        name = socket.gethostname()
        try:
            socket.getaddrinfo(name, None)
        except OSError:  # as in gloo, a host that cannot resolve its own name is alone
            return "127.0.0.1", True
        return name, False

    def announce_store(self, number: int, host: str, port: int) -> None:
        """Publish the address of a membership's store."""
        self._write(f"store-{number}.json", {"host": host, "port": port})

    def find_store(self, number: int) -> tuple[str, int] | None:
        """Return the address of a membership's store; None: not yet known."""
        data = self._read(f"store-{number}.json")
        try:
            return None if data is None else (str(data["host"]), int(data["port"]))
        except (KeyError, TypeError, ValueError):
            return None

    def remove_store(self, number: int) -> None:
        """Remove the address of a membership's store."""
        with suppress(OSError):
            (self.folder / f"store-{number}.json").unlink(missing_ok=True)

    def _claims(self) -> list[int]:
        ends = [name.removeprefix(_CLAIM) for name in self._names(_CLAIM)]
        return [int(end) for end in ends if end.isdecimal()]

    def _names(self, prefix: str) -> Iterator[str]:
        with suppress(OSError):
            yield from sorted(x for x in os.listdir(self.folder) if x.startswith(prefix))

    def _write_alive(self, name: str, data: dict[str, Any]) -> None:
        self._beat += 1
        self._write(name, {**data, "beat": self._beat})

    def _write(self, name: str, data: dict[str, Any]) -> None:
        aside = self.folder / f".{name}.{self._mine}"
        aside.write_text(json.dumps(data), encoding="utf-8")
        aside.replace(self.folder / name)

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            data = json.loads((self.folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return data if isinstance(data, dict) else None

    def _is_silent(self, name: str, data: dict[str, Any] | None) -> bool:
        beat, now = (data or {}).get("beat"), self._clock()
        seen = self._seen.get(name)
        if seen is None or seen.beat != beat:
            self._seen[name] = _Seen(beat, now)
            return data is None
        return data is None or now - seen.since > SILENCE
