"""The command of a step."""

from __future__ import annotations

from pipollux_sched.backend.base import ReplicaProgram
from pipollux_sched.backend.replica.command import Step

from .output import Share

_MIB = 2**20


def srun_command(
    step: Step,
    *,
    pool: int,
    node: str,
    name: str,
    share: Share,
    program: ReplicaProgram,
    num_stages: int,
) -> list[str]:
    """Return the command that runs a replica as a separate step on a node.

    It must contain no secrets, because every user of the machine can read it. `pool` is the
    allocation with this `share` of the node.
    """
    slots = share.gpus or max(share.cpus, 1)
    cpus = program.cpus_of(num_stages) or max(share.cpus * num_stages // slots, 1)
    memory = program.memory_of(num_stages) or share.memory * num_stages // slots
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
        f"--chdir={step.directory}",
        *step.command,
    ]
