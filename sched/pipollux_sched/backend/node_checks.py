"""Checks that nodes see the shared storage: state directory, Python and this package."""

from __future__ import annotations

import logging
import math
import secrets
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from typing import Generic, TypeVar

from pipollux_agent import supervisor
from pipollux_sched.store import StateDir

from .base import POLL_INTERVAL

_LOG = logging.getLogger(__name__)
CHECK_TIMEOUT = 60.0
"""Seconds that the check of a node may take."""
REPEAT_INTERVAL = 15.0
"""Seconds until a failed node is checked again: an admin may have repaired it."""
_MARK = ".shared-"

K = TypeVar("K", bound=Hashable)


class NodeChecks(Generic[K]):
    """Checks every node once, and failed ones from time to time.

    Args:
        start: starts the check of a node, which looks for `paths`; its result is `note`d, from any
            thread.
        lost_after: seconds after which a check without a result is started again.
    """

    def __init__(
        self, state_dir: StateDir, start: Callable[[K], object], *, lost_after: float = math.inf
    ) -> None:
        self._folder = str(state_dir.path)
        self._start, self._lost_after = start, lost_after
        for left in state_dir.path.glob(f"{_MARK}*"):  # left by a scheduler that was killed
            left.unlink(missing_ok=True)
        self._mark = state_dir.path / f"{_MARK}{secrets.token_hex(8)}"
        self._lock = threading.Lock()
        self._results: dict[K, str] = {}
        """Why nothing can run on a node; empty: it has passed."""
        self._due: dict[K, float] = {}
        """When nodes without a result, or with a bad one, are checked, by the monotonic clock."""
        self._mark.touch(0o600)

    @property
    def paths(self) -> tuple[str, ...]:
        """The files that a node must see; no folder of another scheduler has the first one."""
        return (str(self._mark), sys.executable, str(supervisor.__file__))

    def look(self, nodes: Iterable[K]) -> None:
        """Start the checks that are due; nodes that are not given are gone."""
        now = time.monotonic()
        with self._lock:
            self._due = {node: self._due.get(node, now) for node in nodes}
            self._results = {node: why for node, why in self._results.items() if node in self._due}
            due = [
                node
                for node, at in self._due.items()
                if at <= now and self._results.get(node) != ""
            ]
            self._due |= dict.fromkeys(due, now + self._lost_after)
        for node in due:
            self._start(node)

    def note(self, node: K, why: str | None) -> None:
        """Note why nothing can run on a node; empty: it has passed; None: check it again."""
        with self._lock:
            if node not in self._due:
                return
            known = self._results.get(node)
            if why is not None:
                self._results[node] = why
            self._due[node] = time.monotonic() + REPEAT_INTERVAL * bool(self._results.get(node))
        if why and why != known:
            _LOG.warning("a node cannot be used: %s", why)

    def describe(self, name: str, path: str) -> str:
        """Return why nothing can run on a node that lacks one of the `paths`; empty: none."""
        if path in (str(self._mark), self._folder):
            lacks = "cannot write to" if path == self._folder else "does not see"
            return (
                f"node {name} {lacks} {self._folder}; keep the state in a folder that all nodes "
                "share, and name it with --state-dir"
            )
        if not path:
            return ""
        return (
            f"node {name} does not see {path}; install Python and Pipollux in folders that all "
            "nodes share, at the same paths"
        )

    def results(self) -> Mapping[K, str]:
        """Return why nothing can run on a node, for all that have been checked; empty: it can."""
        with self._lock:
            return dict(self._results)

    def unchecked(self) -> set[K]:
        """Return the nodes without a result."""
        with self._lock:
            return self._due.keys() - self._results.keys()

    def wait(self) -> None:
        """Wait until all nodes have a result, or their checks take too long."""
        deadline = time.monotonic() + CHECK_TIMEOUT + 10.0
        while self.unchecked() and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL)

    def close(self) -> None:
        """Remove the mark."""
        with suppress(OSError):
            self._mark.unlink(missing_ok=True)
