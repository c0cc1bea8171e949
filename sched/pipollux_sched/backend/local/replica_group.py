"""The processes of one generation: one torchrun agent per pipeline replica, ended as one.

torchrun's elastic mode is not used: a change of membership restarts every worker anyway, so each
generation gets agents of its own, a port of its own, and no restarts. Agents always exit with
status 1 when asked to stop, so a clean stop is recognised by the marker that rank 0 writes beside
its checkpoint: ``stopped.json``, with the number of the generation.

A group is the same whether this scheduler started its processes (`start`) or found them running.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from pipollux_sched.lifecycle import Exited, Outcome, Started

from .generation_file import GenerationFile
from .processes import descendants, kill
from .replica_log import last_words
from .replica_process import ReplicaProcess
from .script_error import read_error

FAILURE_GRACE = 5.0
"""Seconds that the other replicas have to end when one has failed; they can no longer save."""
LINGER = 1.0
"""Seconds that processes left behind by an agent have to end before they are killed."""


class LocalGroup:
    """The running processes of one generation.

    Args:
        record: the record of its start.
        replicas: its processes, in the order of replicas.
        logs: log file of each replica.
        errors: file with the exception that ended each replica's script, if any.
        find_marked: finds the live processes of this generation by their environment.
    """

    def __init__(
        self,
        record: GenerationFile,
        replicas: Sequence[ReplicaProcess],
        *,
        logs: Sequence[Path],
        errors: Sequence[Path],
        find_marked: Callable[[], set[psutil.Process]],
    ) -> None:
        self.generation = record.generation
        self.nodes = record.nodes
        self.port = record.port
        self._logs = list(logs)
        self._errors = list(errors)
        self._checkpoints = record.checkpoints
        self._find_marked = find_marked
        self._replicas = list(replicas)
        self._deadline: float | None = None
        self._grace = 0.0
        self._asked = False
        self._failed: int | None = None
        self._killed = ""

    @property
    def started(self) -> Started:
        """The generation, and the process ids of its agents' parents."""
        pids = tuple(replica.pid for replica in self._replicas)
        return Started(self.generation, pids, self.port)

    def stop(self, grace: float) -> None:
        """Ask all replicas to save and end; `poll` kills what still runs after `grace` seconds."""
        if not self._asked:
            self._asked = True
            self._grace = grace
            self._signal(signal.SIGTERM)
        self._end_within(grace)

    def poll(self) -> Exited | None:
        """Continue; return how the generation ended, None while a process of it is left."""
        codes = [replica.poll() for replica in self._replicas]
        self._notice_failure(codes)
        over = all(code is not None for code in codes)
        if over:
            self._end_within(LINGER)
        late = self._deadline is not None and time.monotonic() >= self._deadline
        if not over and not late:
            return None
        left = self._processes()
        if late:
            kill(left)
        if left or not over:
            return None
        return self._exited([code for code in codes if code is not None])

    def kill(self, why: str = "") -> None:
        """Kill all processes of this generation; the report gives `why` as the reason."""
        self._asked, self._killed = True, why
        self._end_within(0.0)
        kill(self._processes())
        self._signal(signal.SIGKILL)

    def wait(self, timeout: float) -> None:
        """Wait for killed processes to end, `timeout` seconds for each."""
        for replica in self._replicas:
            replica.wait(timeout)

    def _signal(self, number: signal.Signals) -> None:
        for replica in self._replicas:
            replica.signal(number)

    def _end_within(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)

    def _notice_failure(self, codes: Sequence[int | None]) -> None:
        """End the other replicas when one has failed: a generation lives and dies as a whole."""
        if self._asked or self._failed is not None:
            return
        self._failed = next((replica for replica, code in enumerate(codes) if code), None)
        if self._failed is not None:
            self._signal(signal.SIGTERM)
            self._end_within(FAILURE_GRACE)

    def _processes(self) -> set[psutil.Process]:
        alive = [replica.pid for replica in self._replicas if replica.poll() is None]
        return descendants(alive) | self._find_marked()

    def _exited(self, codes: Sequence[int]) -> Exited:
        step = self._marked_step()
        if step is not None and not self._broke() and not self._killed:
            return Exited(self.generation, Outcome.STOPPED, step)
        if not any(codes):
            return Exited(self.generation, Outcome.COMPLETE)
        message, cannot_start = self._why()
        return Exited(self.generation, Outcome.FAILED, message=message, cannot_start=cannot_start)

    def _broke(self) -> bool:
        """Return whether a replica failed by itself, so that the others' checkpoints are invalid.

        The first to end may also have been stopped from outside, as may the others.
        """
        if self._failed is None:
            return False
        return not last_words(self._logs[self._failed]).asked_to_stop

    def _why(self) -> tuple[str, bool]:
        """Return why the generation failed, and whether its script cannot start."""
        if self._killed:
            return self._killed, False
        if self._asked:
            return f"The replicas left no agreed checkpoint within {self._grace:g} s.", False
        replica = self._failed or 0
        error = read_error(self._errors[replica])
        words = last_words(self._logs[replica])
        head = f"Replica {replica} on {self.nodes[replica]} {words.describe()}"
        log = self._logs[replica].name
        said = error.text if error else words.lines[-1].strip() if words.lines else ""
        head += f": {said}" if said else f" and printed nothing ({log})."
        end = [f"The end of {log}:", *words.lines] if words.lines else []
        return "\n".join([head, *end]), error is not None and error.cannot_start

    def _marked_step(self) -> int | None:
        """Return the step at which the replicas agreed to stop, None if they did not."""
        try:
            content = (self._checkpoints / "stopped.json").read_text(encoding="utf-8")
            marker = json.loads(content)
            return int(marker["step"]) if marker["generation"] == self.generation else None
        except (OSError, ValueError, KeyError, TypeError):
            return None
