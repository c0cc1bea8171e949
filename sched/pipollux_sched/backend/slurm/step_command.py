"""The command and environment of a step."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from pipollux_agent import supervisor
from pipollux_sched.backend.base import Launch, ReplicaProgram
from pipollux_sched.backend.replica.replica_process import LOG_LIMIT, memory_option
from pipollux_sched.backend.replica.variables import step_variables

from .commands import controller_variables
from .output import Share

_MIB = 2**20


def srun_command(
    command: Sequence[str],
    *,
    pool: int,
    node: str,
    name: str,
    share: Share,
    program: ReplicaProgram,
    num_stages: int,
    base: Path,
    log: Path,
) -> list[str]:
    """Return the command that runs a replica as a separate step on a node.

    It must contain no secrets, because every user of the machine can read it. `command` is that of
    the agent, `pool` the allocation with this `share` of the node, `base` the prefix of its files,
    `log` the file of its output.
    """
    slots = share.gpus or max(share.cpus, 1)
    cpus = program.cpus + program.cpus_per_stage * num_stages
    cpus = cpus or max(share.cpus * num_stages // slots, 1)
    memory = program.memory + program.memory_per_stage * num_stages
    memory = memory or share.memory * num_stages // slots
    # Another user's folder is entered as that user: see `as_user`.
    directory = Path("/") if program.run_as else program.directory or Path.cwd()
    return [
        "srun",
        f"--jobid={pool}",
        "--exact",
        f"--job-name={name}",
        f"--nodelist={node}",
        *("--nodes=1", "--ntasks=1"),
        f"--cpus-per-task={cpus}",
        f"--gres=gpu:{num_stages}" if share.gpus else "--gres=none",
        # 0 means all memory: correct if Slurm does not count memory, too much if it does.
        f"--mem={-(-memory // _MIB)}M" if share.memory else "--mem=0",
        *("--kill-on-bad-exit=0", "--mpi=none", "--input=none", "--export=ALL"),
        f"--chdir={directory}",
        *(sys.executable, "-I", "-S", str(supervisor.__file__)),
        *memory_option(program.memory_limit),
        "--step",
        *(str(base), str(log), str(LOG_LIMIT)),
        *command,
    ]


def step_environment(
    program: ReplicaProgram,
    launch: Launch,
    replica: int,
    *,
    on_gpus: bool,
    result: Path,
    pass_on: Collection[str] = (),
) -> dict[str, str]:
    """Return the environment of srun, which passes all of it on to the replica: see
    `step_variables`.
    """
    own = step_variables(program, launch, replica, on_gpus=on_gpus, result=result, pass_on=pass_on)
    return {**controller_variables(os.environ), **own}
