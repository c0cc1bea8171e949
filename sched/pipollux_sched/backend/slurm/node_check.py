"""Checks of the nodes of allocations, each by a small step: see `NodeChecks`."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from pipollux_sched.backend.base import BackendError
from pipollux_sched.backend.node_checks import CHECK_TIMEOUT, NodeChecks
from pipollux_sched.store import StateDir

from .commands import call, is_away, last_line
from .snapshot import SlurmSnapshot

CHECK_NAME = "pipollux-check"
"""Name of its step."""
_NOT_YET = ("completing", "Memory required by task is not available")
"""Messages of Slurm for a node that it does not know yet, or no longer."""
_AT_ONCE = 8
_MISSING = 3
_SCRIPT = f'for path; do test -e "$path" || {{ echo "$path"; exit {_MISSING}; }}; done'


class StepChecks:
    """Checks every node of each allocation with a small step without resources.

    It overlaps all others, so no replica has to wait for it, and Slurm itself ends one that hangs.
    """

    def __init__(self, state_dir: StateDir) -> None:
        self._nodes: NodeChecks[tuple[int, str]] = NodeChecks(state_dir, self._submit)
        self._workers = ThreadPoolExecutor(_AT_ONCE, "pipollux-node-check")

    def look(self, snapshot: SlurmSnapshot) -> None:
        """Start checks of new nodes."""
        self._nodes.look(
            (allocation.job.job, name)
            for allocation in snapshot.allocations.values()
            for name in allocation.shares
        )

    def wait(self) -> None:
        """Wait for the running checks; raise `BackendError` if a node does not see the folder."""
        self._nodes.wait()
        missing = [why for why in self._nodes.results().values() if "does not see" in why]
        if missing:
            raise BackendError(missing[0])

    def broken(self) -> Mapping[str, str]:
        """Return the nodes that nothing can run on, and why."""
        return {node: why for (_, node), why in self._nodes.results().items() if why}

    def unchecked(self) -> set[str]:
        """Return the nodes without a result."""
        return {node for _, node in self._nodes.unchecked()}

    def close(self) -> None:
        """End."""
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._nodes.close()

    def _submit(self, key: tuple[int, str]) -> None:
        with suppress(RuntimeError):  # it is being closed
            self._workers.submit(self._check, *key)

    def _check(self, pool: int, node: str) -> None:
        why: str | None = ""
        try:
            done = call(
                [
                    *("srun", f"--jobid={pool}", "--overlap", "--exact", f"--nodelist={node}"),
                    *("--nodes=1", "--ntasks=1", "--cpus-per-task=1", "--gres=none", "--mem=0"),
                    # In minutes: nothing else would end it on a node whose file system hangs.
                    *("--time=2", f"--job-name={CHECK_NAME}", "--chdir=/"),
                    *("--mpi=none", "--input=none"),
                    *("sh", "-c", _SCRIPT, "sh", *self._nodes.paths),
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
        self._nodes.note((pool, node), why)

    def _judge(self, node: str, printed: str, words: str) -> str | None:
        """Return why a check failed; None: it has to be repeated."""
        missing = last_line(printed)
        if missing:
            return self._nodes.describe(node, missing)
        if is_away(words) or any(said in words for said in _NOT_YET):
            return None
        return f"its check failed: {last_line(words)}"
