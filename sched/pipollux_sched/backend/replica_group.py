"""The processes of one generation: one torchrun agent per pipeline replica, ended as one.

torchrun's elastic mode is not used: a change of membership restarts every worker anyway, so each
generation gets agents of its own, a port of its own, and no restarts. As the agents end with
status 1 whenever they were asked to stop, a clean stop is told by the marker that rank 0 writes
beside its checkpoint: ``stopped.json``, with the number of the generation.
"""

from __future__ import annotations

import json
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from pipollux_sched.lifecycle import Exited, Outcome

from .base import Workload
from .processes import descendants, kill
from .replica_log import last_words

FAILURE_GRACE = 5.0
"""Seconds that the other replicas have to end when one has failed; they cannot save any more."""
_PORTS = range(20_000, 32_000)
LINGER = 1.0
"""Seconds that what an agent left behind has to end before it is killed."""


class ReplicaGroup:
    """The running processes of one generation.

    Args:
        workload: what they run.
        generation: number of this launch.
        nodes: node of each replica.
        environments: complete environment of each replica.
        logs: file that takes what each replica prints.
        checkpoints: where the job saves, and rank 0 leaves its marker.
        find_marked: finds the living processes of this generation by their environment.

    Raises:
        OSError: a process could not be started; none is left.
    """

    def __init__(
        self,
        workload: Workload,
        generation: int,
        nodes: Sequence[str],
        *,
        environments: Sequence[Mapping[str, str]],
        logs: Sequence[Path],
        checkpoints: Path,
        find_marked: Callable[[], set[psutil.Process]],
    ) -> None:
        self.generation = generation
        self.nodes = tuple(nodes)
        self.port = free_port()
        self._logs = list(logs)
        self._checkpoints = checkpoints
        self._find_marked = find_marked
        self._agents: list[subprocess.Popen[bytes]] = []
        self._deadline: float | None = None
        self._grace = 0.0
        self._asked = False
        self._failed: int | None = None
        self._killed = ""
        try:
            for replica, environment in enumerate(environments):
                self._agents.append(self._start(workload, replica, environment))
        except OSError:
            self.kill()
            for agent in self._agents:
                agent.wait(timeout=10)
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the agents, in the order of replicas."""
        return tuple(agent.pid for agent in self._agents)

    def stop(self, grace: float) -> None:
        """Ask all replicas to save and end; `poll` kills what is left after `grace` seconds."""
        if not self._asked:
            self._asked = True
            self._grace = grace
            self._signal(signal.SIGTERM)
        self._end_within(grace)

    def poll(self) -> Exited | None:
        """Carry on; return how the generation ended, None as long as something of it is left."""
        codes = [agent.poll() for agent in self._agents]
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
        """Kill whatever of this generation is alive; `why` is what is then reported."""
        self._asked, self._killed = True, why
        self._end_within(0.0)
        kill(self._processes())
        self._signal(signal.SIGKILL)

    def _start(
        self, workload: Workload, replica: int, environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        command = [
            *(sys.executable, "-m", "torch.distributed.run"),
            f"--nnodes={len(self.nodes)}",
            f"--node-rank={replica}",
            "--nproc-per-node=1",
            "--master-addr=127.0.0.1",
            f"--master-port={self.port}",
            "--max-restarts=0",
            str(workload.script),
            *workload.args,
        ]
        with self._logs[replica].open("ab") as log:
            return subprocess.Popen(
                command,
                env=dict(environment),
                cwd=workload.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _signal(self, number: signal.Signals) -> None:
        for agent in self._agents:
            with suppress(ProcessLookupError):
                agent.send_signal(number)

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
        alive = [agent.pid for agent in self._agents if agent.poll() is None]
        return descendants(alive) | self._find_marked()

    def _exited(self, codes: Sequence[int]) -> Exited:
        step = self._marked_step()
        if step is not None and not self._broke() and not self._killed:
            return Exited(self.generation, Outcome.STOPPED, step)
        if not any(codes):
            return Exited(self.generation, Outcome.COMPLETE)
        return Exited(self.generation, Outcome.FAILED, message=self._why())

    def _broke(self) -> bool:
        """Say whether a replica failed by itself, so that what the others then saved means nothing.

        The first to end may also have been asked to stop by somebody else, and so have the others.
        """
        if self._failed is None:
            return False
        return not last_words(self._logs[self._failed]).asked_to_stop

    def _why(self) -> str:
        if self._killed:
            return self._killed
        if self._asked:
            return f"The replicas left no agreed checkpoint within {self._grace:g} s."
        replica = self._failed or 0
        words = last_words(self._logs[replica])
        head = f"Replica {replica} on {self.nodes[replica]} {words.describe()}"
        log = self._logs[replica].name
        if not words.lines:
            return f"{head} and printed nothing ({log})."
        return "\n".join([f"{head}: {words.lines[-1].strip()}", f"The end of {log}:", *words.lines])

    def _marked_step(self) -> int | None:
        """Step at which the replicas of this generation agreed to stop, None if they did not."""
        try:
            content = (self._checkpoints / "stopped.json").read_text(encoding="utf-8")
            marker = json.loads(content)
            return int(marker["step"]) if marker["generation"] == self.generation else None
        except (OSError, ValueError, KeyError, TypeError):
            return None


def free_port() -> int:
    """Return a port of the loopback interface that nobody uses at the moment.

    It lies below the range that outgoing connections get theirs from, so that none of them can take
    it in the second until torchrun listens.
    """
    for _ in range(100):
        port = secrets.choice(_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no port from {_PORTS.start} to {_PORTS.stop - 1} seems to be free")
