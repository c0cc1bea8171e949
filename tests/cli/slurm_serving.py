"""A scheduler of a real Slurm's nodes, by the command line, and what becomes of its jobs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from pipollux_sched.client.client import Client
from pipollux_sched.client.connection import ClientError
from pipollux_sched.store import StateDir
from tests.hosts.harness.slurm import SlurmCluster
from tests.waiting import PATIENCE, until

PIPOLLUX = Path(sys.executable).with_name("pipollux")


@contextmanager
def serving(
    state_dir: StateDir,
    *options: str,
    log: Path | None = None,
    program: Sequence[str] = (str(PIPOLLUX),),
) -> Iterator[subprocess.Popen[str]]:
    """A scheduler that is told to stop in the end, unless it was killed.

    Args:
        state_dir: where it keeps everything.
        options: of the command.
        log: file for what it prints; None: where the test itself prints.
        program: `pipollux`.
    """
    command = [*program, "serve", "--backend", "slurm", "--state-dir", str(state_dir.path)]
    intervals = ("--interval=1", "--hints-interval=1", "--checkpoint-interval=1")
    with ExitStack() as files:
        output = None if log is None else files.enter_context(log.open("w"))
        process = files.enter_context(
            subprocess.Popen(
                [*command, *intervals, *options], text=True, stdout=output, stderr=output
            )
        )
        try:
            until(lambda: is_ready(state_dir, process))
            yield process
        finally:
            with suppress(ProcessLookupError):
                process.terminate()
            process.wait(PATIENCE)


def is_ready(state_dir: StateDir, process: subprocess.Popen[str]) -> bool:
    assert process.poll() is None, "the scheduler has ended"
    known = state_dir.read_server()
    if known is None or known.pid != process.pid:
        return False
    with suppress(ClientError), Client.of(state_dir) as client:
        client.jobs()
        return True
    return False


def step_of(state_dir: StateDir, job: str) -> int:
    with Client.of(state_dir) as client:
        (found,) = [listed for listed in client.jobs() if listed.name == job]
    return found.progress.step if found.progress else 0


def steps(cluster: SlurmCluster) -> list[str]:
    """Return the names of all steps, each with its node."""
    return cluster.call("squeue", "-h", "--steps", "-o", "%j %N").splitlines()
