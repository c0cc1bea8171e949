"""The environment variables that every engine gives to the processes of a replica."""

from __future__ import annotations

from pipollux_sched.backend.base import Launch, ReplicaProgram

__all__ = ["cpu_variables", "processes_of_replica", "replica_variables"]


def replica_variables(program: ReplicaProgram, launch: Launch, replica: int) -> dict[str, str]:
    """Return what a replica is told about itself; engines add its devices and result file.

    Args:
        program: what it runs.
        launch: its generation.
        replica: which of its replicas.
    """
    return {
        "PYTHONUNBUFFERED": "1",
        **program.environment,
        # The scheduler limits the time that a replica may take to save, not torchrun.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "86400",
        "PIPOLLUX_JOB_ID": launch.job,
        "PIPOLLUX_GENERATION": str(launch.generation),
        "PIPOLLUX_REPLICA": str(replica),
        "PIPOLLUX_CHECKPOINT_DIR": launch.checkpoints,
        "PIPOLLUX_NUM_NODES": str(len(set(launch.nodes))),
        "PIPOLLUX_NUM_STAGES": str(launch.num_stages),
        "PIPOLLUX_PROCESSES_PER_REPLICA": str(processes_of_replica(program, launch)),
        "PIPOLLUX_LIVE": str(int(launch.live)),
        "PIPOLLUX_JOINS": str(int(launch.joins(replica))),
    }


def processes_of_replica(program: ReplicaProgram, launch: Launch) -> int:
    """Return how often the script of a replica runs."""
    return launch.num_stages if program.process_per_stage else 1


def cpu_variables(num_stages: int) -> dict[str, str]:
    """Return the variables of a replica on CPU devices of one thread each."""
    return {
        "PIPOLLUX_DEVICES": ",".join(["cpu"] * num_stages),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
