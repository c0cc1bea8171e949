"""Start the processes of a generation: a torchrun agent per pipeline replica, below its runner."""

from __future__ import annotations

import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pipollux_sched.backend.base import ReplicaProgram

from . import script_main
from .generation_file import GenerationFile, status_files
from .processes import descendants, kill
from .replica_process import ReplicaProcess

_PORTS = range(20_000, 32_000)
_LOOPBACK = "127.0.0.1"
_AGENT = Path(__file__).with_name("agent.py")
"""Not imported, as it imports torch."""


def start_replicas(
    program: ReplicaProgram,
    record: GenerationFile,
    *,
    folder: Path,
    logs: Sequence[Path],
    environments: Sequence[Mapping[str, str]],
) -> list[ReplicaProcess]:
    """Start the replicas of a generation.

    Args:
        program: what they run.
        record: what the generation is to be.
        folder: for the status files of their runners.
        logs: log file of each replica.
        environments: complete environment of each replica.

    Raises:
        OSError: one could not be started; none is left.
    """
    replicas: list[ReplicaProcess] = []
    try:
        for replica, status in enumerate(status_files(folder, len(record.nodes))):
            process = ReplicaProcess.start(
                _command(program, record, replica),
                status=status,
                log=logs[replica],
                environment=environments[replica],
                directory=program.directory,
            )
            replicas.append(process)
    except OSError:
        kill(descendants(process.pid for process in replicas))
        for process in replicas:
            process.wait(10.0)
        raise
    return replicas


def _command(program: ReplicaProgram, record: GenerationFile, replica: int) -> list[str]:
    return [
        *(sys.executable, "-P", str(_AGENT)),
        f"--nnodes={len(record.nodes)}",
        "--nproc-per-node=1",
        "--rdzv-backend=pipollux",
        f"--rdzv-endpoint={_LOOPBACK}:{record.port}",
        f"--rdzv-conf=rank={replica}",
        "--max-restarts=0",
        # What follows is the script's, even where it looks like an option of the agent.
        "--",
        script_main.__file__,
        str(program.script),
        *program.args,
    ]


def free_port() -> int:
    """Return a port of the loopback interface that is free at the moment.

    It lies below the range of ephemeral ports, so that no outgoing connection can take it before
    torchrun listens.
    """
    for _ in range(100):
        port = secrets.choice(_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind((_LOOPBACK, port))
            return port
    raise OSError(f"no port from {_PORTS.start} to {_PORTS.stop - 1} seems to be free")
