"""Replicas of the toy job as steps of a real Slurm, and waiting for what becomes of them."""

from __future__ import annotations

import json
from pathlib import Path

from pipollux_sched.backend.base import Ended, Launch, ReplicaKey, ReplicaProgram, ReplicaState
from pipollux_sched.backend.slurm.engine import SlurmEngine
from pipollux_sched.store import StateDir
from tests.hosts.harness.slurm import SlurmCluster
from tests.sched.backends import assignments
from tests.waiting import until

TOY = Path(__file__).parents[2] / "toy_job.py"


def start(
    engine: SlurmEngine, job: str, node: str, *args: str, stages: int = 1, attempt: int = 1
) -> ReplicaKey:
    """Start a job of one replica, which needs no scheduler to be found."""
    program = ReplicaProgram(job=job, script=TOY, args=args, num_stages=stages)
    folder = engine.checkpoints(program)
    Path(folder).mkdir(parents=True, exist_ok=True)
    launch = Launch(
        job=job,
        attempt=attempt,
        assignments=assignments([node], stages),
        num_first=1,
        scheduler_url="",
        checkpoints=folder,
    )
    engine.start(program, launch, 0)
    return launch.keys[0]


def state(engine: SlurmEngine, key: ReplicaKey) -> ReplicaState:
    return engine.listing().replicas[key]


def runs(engine: SlurmEngine, state_dir: StateDir, key: ReplicaKey) -> ReplicaState:
    """Return the state of a replica as soon as its script trains."""
    until(lambda: "goes on from step" in log(state_dir, key))
    until(lambda: not state(engine, key).waiting)
    return state(engine, key)


def ended(engine: SlurmEngine, key: ReplicaKey) -> Ended:
    """Return how a replica ended, as soon as it has."""
    return until(lambda: state(engine, key).ended)


def log(state_dir: StateDir, key: ReplicaKey) -> str:
    path = state_dir.log(*key)
    return path.read_text() if path.exists() else ""


def environment(state_dir: StateDir, key: ReplicaKey) -> dict[str, str]:
    """Return the variables that the toy job has printed."""
    line = next(line for line in log(state_dir, key).splitlines() if line.startswith("{"))
    return dict(json.loads(line))


def step_names(cluster: SlurmCluster) -> dict[str, str]:
    """Return the nodes of the steps that are there, by name."""
    lines = cluster.call("squeue", "--steps", "--noheader", "--format=%j|%N").splitlines()
    return dict(line.split("|") for line in lines)
