"""The commands of replicas: each kind of program, and the interpreter of the job."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from pipollux_sched.backend import Launch, ReplicaProgram
from pipollux_sched.backend.replica.command import Step, agent_command, agent_in_container
from pipollux_sched.backend.slurm.output import Share
from pipollux_sched.backend.slurm.step_command import srun_command
from pipollux_sched.store import StateDir
from tests.sched.backends import assignments

LAUNCH = Launch(
    job="job",
    attempt=1,
    assignments=assignments(["n1"]),
    num_first=1,
    scheduler_url="http://127.0.0.1:1",
    checkpoints="/c",
)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"script": Path("/a/train.py")}, ["/a/train.py", "--lr"]),
        ({"module": "a.train"}, ["-m", "a.train", "--lr"]),
        ({"command": "x && y"}, ["-c", "x && y", "--lr"]),
    ],
)
def test_programs(fields: dict[str, Any], words: list[str]) -> None:
    program = ReplicaProgram(job="job", args=("--lr",), **fields)
    assert program.can_grow
    command = agent_command(program, LAUNCH, 0)
    assert command[0] == sys.executable
    assert command[command.index("--") + 1 :] == words
    assert agent_in_container(program, LAUNCH, 0)[0] == "python3"
    own = ReplicaProgram(job="job", python="/env/bin/python", **fields)
    assert agent_command(own, LAUNCH, 0)[0] == "/env/bin/python"
    assert agent_in_container(own, LAUNCH, 0)[0] == "/env/bin/python"


@pytest.mark.parametrize("limit", [None, 2**30])
def test_the_limit_of_memory_in_a_step(limit: int | None, state_dir: StateDir) -> None:
    program = ReplicaProgram(job="job", script=Path("/a/train.py"), memory_limit=limit)
    step = Step.of(program, LAUNCH, 0, state_dir, on_gpus=False, pass_on=())
    command = srun_command(
        step,
        pool=1,
        node="n1",
        name="x",
        share=Share("n1", cpus=4, memory=2**33, gpus=0, gpu_type=None),
        program=program,
        num_stages=1,
    )
    assert command[-len(step.command) :] == step.command
    option = f"--memory={limit}"
    assert (option in command) == (limit is not None)
    if limit is not None:
        assert command.index(option) + 1 == command.index("--step")
