"""Processes on GPUs that belong to no job of this scheduler.

While a job holds a GPU, nothing on it counts as foreign: a job may start containers, whose
processes cannot be told from others. For a while after that, its late processes do not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

import psutil

LATE = 30.0
"""Seconds after its job during which a process that was on the GPU with the job may still end; and
seconds for which a process that cannot be seen here, as it has just ended or is in another PID
namespace, has to be listed before it counts."""
RETURN_AFTER = 20.0
"""Seconds without a foreign process after which a GPU is used again; one may follow another."""
_SHARED = ("nvidia-cuda-mps-server", "nvidia-cuda-mps-control")
"""NVIDIA's service for several processes on a GPU, which jobs may use."""


class ForeignUse:
    """Finds foreign processes; one thread at a time calls it.

    Args:
        is_ours: whether the environment of a process is that of a job of this scheduler.
    """

    def __init__(
        self,
        is_ours: Callable[[Mapping[str, str]], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._is_ours = is_ours
        self._clock = clock
        self._late: dict[str, tuple[set[int], float]] = {}
        """By GPU: the processes that were there with a job, and when it last held the GPU."""
        self._unseen: dict[tuple[str, int], float] = {}
        """When each process that cannot be seen was first listed."""
        self._last: dict[str, tuple[str, float]] = {}

    def look(self, uuid: str, pids: Sequence[int], *, held: bool) -> str:
        """Return which foreign processes are on a GPU, as the end of a sentence; empty: none.

        Args:
            uuid: the GPU or slice.
            pids: the processes that the driver lists there.
            held: whether a job holds it.
        """
        now = self._clock()
        if held:
            known, _ = self._late.get(uuid, (set(), now))
            self._late[uuid] = known | set(pids), now
            self._last.pop(uuid, None)
            return ""
        late, at = self._late.get(uuid, (set(), now))
        if now >= at + LATE:
            self._late.pop(uuid, None)
            late = set()
        self._forget_unseen(uuid, pids)
        found = [self._describe(uuid, pid, now) for pid in pids if pid not in late]
        foreign = [text for text in found if text]
        if foreign:
            more = f" and {len(foreign) - 1} more" if foreign[1:] else ""
            self._last[uuid] = f"{foreign[0]}{more}", now
        said, at = self._last.get(uuid, ("", now))
        if not foreign and now >= at + RETURN_AFTER:
            self._last.pop(uuid, None)
            return ""
        return said

    def _forget_unseen(self, uuid: str, pids: Collection[int]) -> None:
        for key in [key for key in self._unseen if key[0] == uuid and key[1] not in pids]:
            del self._unseen[key]

    def _describe(self, uuid: str, pid: int, now: float) -> str:
        """Describe a process if it is foreign."""
        try:
            process = psutil.Process(pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                raise psutil.NoSuchProcess(pid)
            name = process.name()
            if name in _SHARED or any(map(self._belongs, (process, *process.parents()))):
                return ""
        except psutil.NoSuchProcess:
            first = self._unseen.setdefault((uuid, pid), now)
            return f"process {pid}, which is not visible here" if now >= first + LATE else ""
        except psutil.Error:
            name = "unknown"
        user = ""
        with suppress(psutil.Error, KeyError):
            user = f" of user {process.username()}"
        return f"process {pid} ({name}){user}"

    def _belongs(self, process: psutil.Process) -> bool:
        try:
            return self._is_ours(process.environ())
        except (psutil.Error, OSError):  # another user's
            return False
