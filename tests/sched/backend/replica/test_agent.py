"""What an agent prepares for its script."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipollux_agent import agent
from pipollux_sched.backend import Launch, ReplicaProgram
from pipollux_sched.backend.replica.command import agent_in_container
from tests.sched.backends import assignments


def test_the_folder_for_checkpoints_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else can make it where the scheduler sees no disk of the job's; twice is no harm."""
    folder = tmp_path / "job" / "checkpoints"
    monkeypatch.setenv("PIPOLLUX_CHECKPOINT_DIR", str(folder))
    for _ in range(2):
        agent._make_folder()
        assert folder.is_dir()
    monkeypatch.setenv("PIPOLLUX_CHECKPOINT_DIR", "/proc/nowhere")
    agent._make_folder()  # the script says so when it saves


def test_the_first_process_of_a_container_ends_while_it_loads(tmp_path: Path) -> None:
    """The kernel keeps SIGTERM from it unless it handles that, as if it ignored it."""
    package = tmp_path / "pipollux_agent"
    package.mkdir()
    (package / "__init__.py").write_text(
        # Not one long call, which a signal just before it would wait for.
        "import time\nprint('loading', flush=True)\nwhile True:\n    time.sleep(0.01)\n"
    )
    program = ReplicaProgram(job="job", script=Path("train.py"))
    launch = Launch(
        job="job",
        attempt=1,
        assignments=assignments(["n1"]),
        num_first=1,
        scheduler_url="http://127.0.0.1:1",
        checkpoints=tmp_path,
    )
    command = agent_in_container(program, launch, 0, python=sys.executable)
    first = subprocess.Popen(
        ["sh", "-c", "trap '' TERM; exec \"$@\"", "sh", *command],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert first.stdout is not None
    with first, first.stdout as printed:
        try:
            assert printed.readline() == "loading\n"
            first.send_signal(signal.SIGTERM)
            assert first.wait(240) == agent.STOPPED
        finally:
            first.kill()


UNLUCKY = """
import os, runpy, signal, sys, time
from pathlib import Path
from torch.distributed.elastic.metrics import api

began = Path(sys.argv.pop(1))

class Clock:
    def time(self):
        if began.exists():
            os.kill(os.getpid(), signal.SIGTERM)
        return time.time()

api.time = Clock()
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs the agent, which is told to stop at the very moment at which torch begins to time a call."""
SAVES = """
import signal, sys
from pathlib import Path

def stop(number, frame):
    Path(sys.argv[1]).with_name("saved").touch()
    sys.exit(143)

signal.signal(signal.SIGTERM, stop)
Path(sys.argv[1]).touch()
signal.pause()
"""


@pytest.mark.exhaustive
def test_a_stop_that_torch_hides_is_a_stop(tmp_path: Path) -> None:
    """Its calls are timed, and one that is interrupted before that raises another error."""
    script, began, result = (tmp_path / name for name in ("saves.py", "began", "result.json"))
    script.write_text(SAVES)
    rendezvous = ("--rdzv-endpoint=127.0.0.1:0", "--rdzv-backend=pipollux", "--rdzv-conf=rank=0")
    sizes = ("--nnodes=1", "--nproc-per-node=1", "--max-restarts=0")
    told = (*rendezvous, *sizes, "--", str(script), str(began))
    ended = subprocess.run(
        [sys.executable, "-c", UNLUCKY, str(began), str(agent.__file__), *told],
        env={**os.environ, "PIPOLLUX_RESULT_FILE": str(result)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == agent.STOPPED, ended.stderr
    assert json.loads(result.read_text())["asked"]
    assert (tmp_path / "saved").exists(), "the script was told"
