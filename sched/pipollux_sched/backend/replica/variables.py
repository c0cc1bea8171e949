"""The environment variables that every engine sets for the processes of a replica."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from pipollux_protocol import environment as variables
from pipollux_sched.backend.base import Launch, ReplicaProgram

from .inherited import inherited

_SET_ON_NODES = frozenset(
    ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
)
"""Variables that clusters set on a node, and that may be set on the scheduler's own machine."""


def replica_variables(program: ReplicaProgram, launch: Launch, replica: int) -> dict[str, str]:
    """Return the variables about a replica; engines add its devices and result file."""
    servers: dict[str, str] = {}
    if launch.num_servers:
        servers |= variables.NUM_SERVERS.write(launch.num_servers)
        servers |= variables.EXPECTED_REPLICAS.write(len(launch.assignments))
    return {
        "PYTHONUNBUFFERED": "1",
        **program.environment,
        # The scheduler, not torchrun, limits the time to save.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "86400",
        **variables.JOB_ID.write(launch.job),
        **variables.ATTEMPT.write(launch.attempt),
        **variables.REPLICA.write(replica),
        **variables.CHECKPOINT_DIR.write(Path(launch.checkpoints)),
        **servers,
        **variables.NODE.write(launch.assignments[replica].node),
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
    """Return the variables of a replica on the first GPUs that it sees.

    Slurm, NVIDIA's tools and the scheduler count GPUs by PCI bus id; CUDA does so if asked to.
    """
    return {
        **variables.DEVICES.write(tuple(f"cuda:{stage}" for stage in range(num_stages))),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }


def step_variables(
    program: ReplicaProgram,
    launch: Launch,
    replica: int,
    *,
    on_gpus: bool,
    result: Path,
    pass_on: Collection[str] = (),
) -> dict[str, str]:
    """Return the environment of a replica on a node of a cluster, which assigns its GPUs.

    Its slots are GPUs, or CPUs. The agent writes its `result`. `pass_on` names variables of the
    scheduler besides those of `inherited`.
    """
    passed = inherited(os.environ, pass_on)
    return {
        **{name: value for name, value in passed.items() if name not in _SET_ON_NODES},
        **replica_variables(program, launch, replica),
        **(gpu_variables if on_gpus else cpu_variables)(launch.num_stages),
        **result_variables(program, result, result.with_suffix(".agent")),
    }


def result_variables(program: ReplicaProgram, result: Path, agent: Path) -> dict[str, str]:
    """Return the variables of the result file, and of the folder of the agent.

    An agent of another user may not enter that folder.
    """
    folder = {} if program.run_as else variables.AGENT_FOLDER.write(agent)
    return {**variables.RESULT_FILE.write(result), **folder}
