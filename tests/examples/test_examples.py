"""The examples run by themselves: with python, and as pipeline replicas with torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hybrid.replicas import free_port

LIMIT = 120.0
SHORT = {
    "char_lm.py": ["--characters", "20000", "--layers", "2", "--width", "32"],
    "digits.py": ["--epochs", "2"],
    "digits_plain.py": ["--epochs", "1"],
}


def run(repository: Path, command: list[str]) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=repository,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return done.stdout


@pytest.mark.parametrize("script", sorted(SHORT))
def test_by_itself(repository: Path, script: str) -> None:
    output = run(repository, [f"examples/{script}", *SHORT[script]])
    assert re.search(r"epoch 0: (loss|accuracy on held-out images) \d\.\d+", output)


def test_two_replicas_on_one_machine(repository: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2"]
    address = ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    script = ["examples/char_lm.py", *SHORT["char_lm.py"]]
    output = run(repository, [*launcher, *address, *script])
    assert output.count("epoch 0: loss") == 1, "one replica speaks for all"


def test_two_agents_as_on_two_nodes(repository: Path) -> None:
    """Two torchrun agents with a node rank each, as the README launches them on two nodes."""
    port = free_port()
    agents = []
    for rank in (0, 1):
        launcher = ["-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={rank}"]
        address = ["--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}"]
        agents.append(
            subprocess.Popen(
                [sys.executable, *launcher, *address, "examples/digits.py", "--epochs", "2"],
                cwd=repository,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    outputs = [agent.communicate(timeout=LIMIT) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert "epoch 1: accuracy" in outputs[0][0]
    assert outputs[1][0] == ""
