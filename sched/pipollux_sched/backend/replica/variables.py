"""The environment variables that every engine sets for the processes of a replica."""

from __future__ import annotations

from pathlib import Path

from pipollux_protocol import environment as variables
from pipollux_sched.backend.base import Launch, ReplicaProgram


def replica_variables(program: ReplicaProgram, launch: Launch, replica: int) -> dict[str, str]:
    """Return the variables about a replica; engines add its devices and result file."""
    return {
        "PYTHONUNBUFFERED": "1",
        **program.environment,
        # The scheduler, not torchrun, limits the time to save.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "86400",
        **variables.JOB_ID.write(launch.job),
        **variables.ATTEMPT.write(launch.attempt),
        **variables.REPLICA.write(replica),
        **variables.CHECKPOINT_DIR.write(Path(launch.checkpoints)),
        **variables.NUM_NODES.write(len(set(launch.nodes))),
        **variables.NETWORK_LEVEL.write(launch.network_level),
        **variables.NUM_STAGES.write(launch.num_stages),
        **variables.PROCESSES_PER_REPLICA.write(processes_of_replica(program, launch)),
        **variables.ELASTIC.write(launch.elastic),
        **variables.JOINS.write(launch.joins(replica)),
    }


def processes_of_replica(program: ReplicaProgram, launch: Launch) -> int:
    """Return the number of processes that run the script of a replica."""
    return launch.num_stages if program.process_per_stage else 1


def cpu_variables(num_stages: int) -> dict[str, str]:
    """Return the variables of a replica on CPU devices of one thread each."""
    return {
        **variables.DEVICES.write(("cpu",) * num_stages),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


def gpu_variables(num_stages: int) -> dict[str, str]:
    """Return the variables of a replica on the first GPUs that it sees."""
    return variables.DEVICES.write(tuple(f"cuda:{stage}" for stage in range(num_stages)))
