"""The command of a replica: torchrun's agent, which runs the job's script."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import pipollux_agent
from pipollux_agent import supervisor
from pipollux_protocol.exit_statuses import STOPPED
from pipollux_sched.backend.base import Launch, ReplicaProgram
from pipollux_sched.backend.run_as import as_user_command
from pipollux_sched.store import StateDir

from .replica_process import LOG_LIMIT, memory_option
from .step_files import StepFiles
from .variables import processes_of_replica, step_variables

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


@dataclass(frozen=True, kw_only=True)
class Step:
    """What starts the supervisor of a replica on a node that has the same paths."""

    command: list[str]
    """The supervisor, with the agent."""
    environment: Mapping[str, str]
    directory: str

    @classmethod
    def of(
        cls,
        program: ReplicaProgram,
        launch: Launch,
        replica: int,
        state_dir: StateDir,
        *,
        on_gpus: bool,
        pass_on: Collection[str],
    ) -> Step:
        """Return that of a replica: see `step_variables`."""
        key = launch.key(replica)
        files, log = StepFiles.of(state_dir, key), state_dir.log(*key)
        own = [sys.executable, "-I", "-S", supervisor.__file__]
        own += [*memory_option(program.memory_limit), "--step", str(files.base), str(log)]
        agent = as_user_command(program, agent_command(program, launch, replica))
        environment = step_variables(
            program, launch, replica, on_gpus=on_gpus, result=files.result, pass_on=pass_on
        )
        # Another user's folder is entered as that user: see `as_user`.
        directory = Path("/") if program.run_as else program.directory or Path.cwd()
        return Step(
            command=[*own, str(LOG_LIMIT), *agent],
            environment=environment,
            directory=str(directory),
        )


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
