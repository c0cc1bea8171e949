"""Check that a node sees the shared storage: state directory, Python and this package."""

from __future__ import annotations

import logging
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from pipollux_agent import supervisor
from pipollux_sched.backend.base import BackendError
from pipollux_sched.store import StateDir

from .commands import call, is_away, last_line
from .snapshot import SlurmSnapshot

_LOG = logging.getLogger(__name__)
CHECK_TIMEOUT = 60.0
"""Timeout of the check of a node in seconds."""
CHECK_NAME = "pipollux-check"
"""Name of its step."""
REPEAT_INTERVAL = 15.0
"""Seconds until a failed node is checked again: an admin may have repaired it."""
_NOT_YET = ("completing", "Memory required by task is not available")
"""Messages of Slurm for a node that it does not know yet, or no longer."""
_AT_ONCE = 8
_MARK = ".shared-"
_MISSING = 3
_SCRIPT = f'for path; do test -e "$path" || {{ echo "$path"; exit {_MISSING}; }}; done'


class NodeChecks:
    """Checks every node of each allocation, with a small step without resources.

    It overlaps all others, so no replica has to wait for it, and Slurm itself ends one that hangs.
    Failed nodes are checked again from time to time.
    """

    def __init__(self, state_dir: StateDir) -> None:
        self._state_dir = state_dir
        for left in state_dir.path.glob(f"{_MARK}*"):  # left by a scheduler that was killed
            left.unlink(missing_ok=True)
        self._mark = state_dir.path / f"{_MARK}{secrets.token_hex(8)}"
        self._lock = threading.Lock()
        self._broken: dict[tuple[int, str], str] = {}
        """Results by allocation and node: why nothing can run there; empty: passed."""
        self._not_before: dict[tuple[int, str], float] = {}
        """When failed nodes are checked again, by the monotonic clock."""
        self._under_way: set[tuple[int, str]] = set()
        self._there: set[tuple[int, str]] = set()
        self._workers = ThreadPoolExecutor(_AT_ONCE, "pipollux-node-check")
        self._mark.touch(0o600)

    def look(self, snapshot: SlurmSnapshot) -> None:
        """Start checks of new nodes."""
        there = {
            (allocation.job.job, name)
            for allocation in snapshot.allocations.values()
            for name in allocation.shares
        }
        with self._lock:
            self._there = there
            self._broken = {key: why for key, why in self._broken.items() if key in there}
            now = time.monotonic()
            due = {key for key, at in self._not_before.items() if key in there and at <= now}
            new = (there - self._broken.keys() | due) - self._under_way
            self._under_way |= new
        for pool, node in sorted(new):
            with suppress(RuntimeError):  # it is being closed
                self._workers.submit(self._check, pool, node)

    def wait(self) -> None:
        """Wait for the running checks; raise `BackendError` if a node does not see the folder."""
        deadline = time.monotonic() + CHECK_TIMEOUT + 10.0
        while self._unjudged() and time.monotonic() < deadline:
            time.sleep(0.05)
        with self._lock:
            missing = [why for why in self._broken.values() if "does not see" in why]
        if missing:
            raise BackendError(missing[0])

    def broken(self) -> Mapping[str, str]:
        """Return the nodes that nothing can run on, and why."""
        with self._lock:
            return {node: why for (_, node), why in self._broken.items() if why}

    def unchecked(self) -> set[str]:
        """Return the nodes without a result."""
        return {node for _, node in self._unjudged()}

    def close(self) -> None:
        """End."""
        self._workers.shutdown(wait=False, cancel_futures=True)
        with suppress(OSError):
            self._mark.unlink(missing_ok=True)

    def _unjudged(self) -> set[tuple[int, str]]:
        with self._lock:
            return self._there - self._broken.keys()

    def _check(self, pool: int, node: str) -> None:
        paths = (str(self._mark), sys.executable, str(supervisor.__file__))
        why: str | None = ""
        try:
            done = call(
                [
                    *("srun", f"--jobid={pool}", "--overlap", "--exact", f"--nodelist={node}"),
                    *("--nodes=1", "--ntasks=1", "--cpus-per-task=1", "--gres=none", "--mem=0"),
                    # In minutes: nothing else would end it on a node whose file system hangs.
                    *("--time=2", f"--job-name={CHECK_NAME}", "--chdir=/"),
                    *("--mpi=none", "--input=none"),
                    *("sh", "-c", _SCRIPT, "sh", *paths),
                ],
                CHECK_TIMEOUT,
            )
        except subprocess.TimeoutExpired:
            why = f"its check did not end within {CHECK_TIMEOUT:g} s"
        except OSError as error:
            why = f"its check failed: {error}"
        else:
            if done.returncode:
                why = self._judge(node, done.stdout, done.stderr)
        with self._lock:
            self._under_way.discard((pool, node))
            known = self._broken.get((pool, node))
            self._not_before.pop((pool, node), None)
            if why is not None:
                self._broken[pool, node] = why
            if self._broken.get((pool, node)):
                self._not_before[pool, node] = time.monotonic() + REPEAT_INTERVAL
        if why and why != known:
            _LOG.warning("node %s: %s", node, why)

    def _judge(self, node: str, printed: str, words: str) -> str | None:
        """Return why a check failed; None: it has to be repeated."""
        missing = last_line(printed)
        if missing == str(self._mark):
            return (
                f"node {node} does not see {self._state_dir.path}; keep the state in a folder that "
                "all nodes share, and name it with --state-dir"
            )
        if missing:
            return (
                f"node {node} does not see {missing}; install Python and Pipollux in folders that "
                "all nodes share, at the same paths"
            )
        if is_away(words) or any(said in words for said in _NOT_YET):
            return None
        return f"its check failed: {last_line(words)}"
