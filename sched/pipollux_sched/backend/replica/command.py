"""The command of a replica: torchrun's agent, which runs the job's script."""

from __future__ import annotations

import sys
from pathlib import Path

import pipollux_agent
from pipollux_protocol.exit_statuses import STOPPED
from pipollux_sched.backend.base import Launch, ReplicaProgram

from .variables import processes_of_replica

_AGENT = Path(pipollux_agent.__file__).with_name("agent.py")
"""Not imported, because it imports torch."""
_FIRST_PROCESS = (
    "import os, runpy, signal; "
    "signal.signal(signal.SIGTERM, lambda *_: os._exit({status})); "
    "runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
)
"""The program of a container's first process, to which signals must not be lost until the agent is
loaded: the kernel drops them unless they are handled."""


def agent_command(
    program: ReplicaProgram, launch: Launch, replica: int, *, endpoint: str | None = None
) -> list[str]:
    """Return the command of a replica on a machine with this Python and package at the same paths.

    Without `endpoint` (HOST:PORT), the agents find each other through the scheduler.
    """
    endpoint = "127.0.0.1:0" if launch.alone(replica) else endpoint
    at = [f"--rdzv-endpoint={endpoint}"] if endpoint else []
    return [
        program.python or sys.executable,
        "-P",
        str(_AGENT),
        *at,
        *_options(program, launch, replica),
    ]


def agent_in_container(
    program: ReplicaProgram, launch: Launch, replica: int, *, python: str = "python3"
) -> list[str]:
    """Return the command of a replica in a container that has this package installed."""
    code = _FIRST_PROCESS.format(status=STOPPED, module="pipollux_agent.agent")
    return [program.python or python, "-P", "-c", code, *_options(program, launch, replica)]


def _options(program: ReplicaProgram, launch: Launch, replica: int) -> list[str]:
    # A joining replica meets the others only when its script has reached their position, and
    # replicas that push and pull never do.
    alone = launch.alone(replica)
    return [
        f"--nnodes={1 if alone else launch.num_first}",
        f"--nproc-per-node={processes_of_replica(program, launch)}",
        "--rdzv-backend=pipollux",
        f"--rdzv-conf=rank={0 if alone else replica}",
        "--max-restarts=0",
        # The rest belongs to the script, even if it looks like an option of the agent.
        "--",
        *program.words,
        *program.args,
    ]
