"""Logs of replicas, copied from the cluster into the state directory.

The time of the last line is stored beside each log, so that later calls copy only newer lines. A
kubelet removes the log of a deleted pod as soon as its containers have ended; so the log of a pod
that is being deleted, or soon will be, is followed to its end.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from math import ceil
from pathlib import Path

import httpx2
from lightkube import AsyncClient

from pipollux_sched.backend.base import ReplicaKey
from pipollux_sched.store.log_files import rename_full

from .api import Api
from .pod_state import PodView

__all__ = ["LogFollower", "PodLog"]

_LOG = logging.getLogger(__name__)
LOG_LIMIT = 64 * 2**20
"""Bytes at which a log is rotated: see `store.log_files`."""
LAST_LINES = 5.0
"""Seconds for which the log of a container that has ended is still followed."""
FIRST_LINE = 0.3
"""Seconds to wait before a deletion for the first line of a pod."""
FOLLOWED = 5.0
"""Seconds to wait before a deletion for the follower, if the pod has printed something."""
_STAMP = re.compile(
    r"(?P<stamp>(?P<whole>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(?P<fraction>\d+))?"
    r"(?P<zone>Z|[+-]\d\d:\d\d))(?: (?P<line>.*))?$",
    re.DOTALL,
)
_MARGIN = 5
"""Largest expected difference in seconds between the clocks of the nodes and ours."""


class PodLog:
    """The log of one replica; several threads may write to it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mark = path.with_name(f".{path.name}.time")
        self._lock = threading.Lock()
        self._last = _time(self._read_mark())

    def since(self) -> int | None:
        """Return how many seconds of the log to request; None: all of it."""
        seconds = self._last[0]
        return max(ceil(time.time() - seconds) + _MARGIN, 1) if seconds else None

    def add(self, lines: Iterable[str]) -> None:
        """Append the new ones of these lines; each begins with its time."""
        with self._lock:
            known, newest, new = self._last, "", []
            for stamp, line in _stamped(lines):
                if _time(stamp) > known:
                    new.append(f"{line}\n")
                    newest = stamp
            if new:
                self._append("".join(new).encode())
                self._last = _time(newest)
                self._mark.write_text(newest, encoding="ascii")

    def fetch(self, api: Api, pod: str, container: str) -> None:
        """Append new lines from the cluster; raise `ClusterUnavailableError`, or `BackendError`."""
        self.add(api.log(pod, container, self.since()))

    def _append(self, data: bytes) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._path.exists() and self._path.stat().st_size >= LOG_LIMIT:
            rename_full(self._path)
        with self._path.open("ab") as file:
            file.write(data)

    def _read_mark(self) -> str:
        try:
            return self._mark.read_text(encoding="ascii")
        except (OSError, ValueError):
            return ""


class _Following:
    def __init__(self) -> None:
        self.begun = threading.Event()
        self.ended = threading.Event()


class LogFollower:
    """Follows the logs of pods that are being deleted, in the thread of the watches."""

    def __init__(self, namespace: str, log_of: Callable[[ReplicaKey], PodLog]) -> None:
        self._namespace, self._log_of = namespace, log_of
        self._woken = asyncio.Event()
        self._news: dict[str, PodView] = {}
        """Changed pods, by name, that `run` has not processed yet."""
        self._followed: dict[ReplicaKey, _Following] = {}
        self._wanted: dict[ReplicaKey, _Following] = {}

    def look(self, changed: Iterable[PodView], gone: Iterable[PodView] = ()) -> None:
        """Queue changed pods; called in the thread of the watches."""
        for pod in gone:
            self._news.pop(pod.name, None)
            self._followed.pop(pod.key, None)
        self._news.update((pod.name, pod) for pod in changed)
        self._woken.set()

    def expect_end(self, key: ReplicaKey, look: Callable[[], None]) -> None:
        """Follow the log of a replica that will be deleted; wait until that has begun.

        That is when the last copied line arrives again; an empty log is waited for only briefly.
        `look` is called in the thread of the watches.
        """
        if key in self._followed:
            return
        following = self._wanted.setdefault(key, _Following())
        look()
        following.begun.wait(FIRST_LINE if self._log_of(key).since() is None else FOLLOWED)

    def drop(self, key: ReplicaKey) -> None:
        """Stop expecting the end of a replica."""
        self._wanted.pop(key, None)

    def await_end(self, key: ReplicaKey) -> None:
        """Wait for the last lines of a replica that has ended, if its log is followed."""
        following = self._followed.get(key)
        if following is not None and not following.ended.wait(LAST_LINES):
            _LOG.warning("the last lines of replica %s are late", key)

    async def run(self, client: AsyncClient) -> None:
        """Follow until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._woken.wait()
                self._woken.clear()
                news, self._news = self._news, {}
                for pod in news.values():
                    ending = pod.deletion_grace or pod.key in self._wanted
                    if ending and pod.is_running and pod.key not in self._followed:
                        following = self._wanted.pop(pod.key, None) or _Following()
                        self._followed[pod.key] = following
                        tasks.create_task(self._follow(client, pod, following))

    async def _follow(self, client: AsyncClient, pod: PodView, following: _Following) -> None:
        log = self._log_of(pod.key)
        try:
            lines = client.log(
                pod.name,
                namespace=self._namespace,
                container=pod.main,
                follow=True,
                since=log.since(),
                timestamps=True,
                newlines=False,
            )
            async for line in lines:
                log.add([line])
                following.begun.set()
        except (httpx2.HTTPError, OSError, RuntimeError) as error:
            _LOG.debug("the log of pod %s is not followed: %s", pod.name, error)
        finally:
            following.begun.set()
            following.ended.set()


def _stamped(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Split off the time of each line; the rest of a line after a carriage return has none."""
    stamp = ""
    for line in lines:
        match = _STAMP.match(line)
        if match:
            stamp = match["stamp"]
        if stamp:
            yield stamp, (match["line"] or "") if match else line


def _time(stamp: str) -> tuple[float, str]:
    match = _STAMP.match(stamp)
    if match is None:
        return 0.0, ""
    zone = "+00:00" if match["zone"] == "Z" else match["zone"]
    seconds = datetime.fromisoformat(match["whole"] + zone).timestamp()
    return seconds, (match["fraction"] or "").ljust(9, "0")
