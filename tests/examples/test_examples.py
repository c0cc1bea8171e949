"""The examples run by themselves, as pipeline replicas with torchrun, and on two nodes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import free_port

LIMIT = 120.0
SHORT = {
    "char_lm.py": (
        "--epochs=2 --characters=40000 --layers=2 --width=32 --batch-size=8 --max-batch-size=32"
    ),
    "digits.py": "--epochs=4",
    "digits_plain.py": "--epochs=4",
    "unet.py": "--epochs=2 --pictures=800 --width=8 --batch-size=8",
}
"""Arguments with which a script learns something in seconds."""


def command(script: str) -> list[str]:
    return [f"examples/{script}", *SHORT[script].split()]


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **variables}


def run(repository: Path, arguments: list[str], **variables: str) -> str:
    with subprocess.Popen(
        [sys.executable, *arguments],
        cwd=repository,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        try:
            output, errors = job.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            job.terminate()  # so that agents and replicas end, too, and their output can be read
            pytest.fail(f"did not end within {LIMIT:.0f} s: {job.communicate(timeout=LIMIT)}")
    assert job.returncode == 0, errors
    assert "Warning" not in errors
    return output


def by_epoch(output: str) -> list[float]:
    """The figure that each epoch ended with."""
    lines = re.findall(r"^epoch (\d+): \D*(\d\.\d+)", output, re.MULTILINE)
    assert [int(epoch) for epoch, _ in lines] == list(range(len(lines)))
    return [float(figure) for _, figure in lines]


def test_the_language_model_learns(repository: Path) -> None:
    first, last = by_epoch(run(repository, command("char_lm.py")))
    assert last < first < 4.85, "ln 128 is what a model says that knows nothing"
    assert last < 3.0


@pytest.mark.parametrize("script", ["digits.py", "digits_plain.py"])
def test_the_classifier_learns_with_and_without_pollux(repository: Path, script: str) -> None:
    figures = by_epoch(run(repository, command(script)))
    assert len(figures) == 4
    assert figures[-1] > 0.85


def test_the_u_net_learns_across_its_stages(repository: Path) -> None:
    output = run(repository, command("unet.py"))
    balance = re.search(r"layers of each stage: \[(\d+), (\d+), (\d+)\]", output)
    assert balance is not None
    assert sum(map(int, balance.groups())) == 6
    first, last = by_epoch(output)
    assert first < last
    assert last > 0.3, "one in ten is chance"


def test_two_replicas_on_one_machine(repository: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2"]
    address = ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    output = run(repository, [*launcher, *address, *command("unet.py")])
    assert by_epoch(output)[-1] > 0.2, "and one replica speaks for all"


def test_two_nodes(repository: Path, tmp_path: Path) -> None:
    launcher = ["examples/two_nodes.py", f"--checkpoints={tmp_path / 'checkpoints'}"]
    # Each replica writes the time line of a step, so the files tell who took part.
    traces = tmp_path / "traces"
    output = run(repository, [*launcher, *command("char_lm.py")], PIPOLLUX_TRACE_DIR=str(traces))
    assert by_epoch(output)[-1] < 3.0
    assert {path.name.split("-step-")[0] for path in traces.iterdir()} == {"replica-0", "replica-1"}
    assert list((tmp_path / "checkpoints").glob("checkpoint-*/model.pt"))


def test_two_nodes_stop_together_and_go_on(repository: Path, tmp_path: Path) -> None:
    launcher = ["examples/two_nodes.py", f"--checkpoints={tmp_path}", "examples/digits.py"]
    with subprocess.Popen(
        [sys.executable, *launcher, "--epochs=1000"],
        cwd=repository,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as job:
        assert job.stdout is not None
        for line in job.stdout:
            if line.startswith("epoch 2:"):
                job.send_signal(signal.SIGTERM)
                break
        rest = job.stdout.read()
        assert job.wait(LIMIT) == 128 + signal.SIGTERM
    assert json.loads((tmp_path / "stopped.json").read_text())["reason"] == "signal"
    done = 3 + len(re.findall(r"^epoch \d+:", rest, re.MULTILINE))
    output = run(repository, [*launcher, f"--epochs={done + 1}"])
    assert re.findall(r"^epoch (\d+):", output, re.MULTILINE) == [str(done)]


def test_a_node_that_fails_ends_both(repository: Path, tmp_path: Path) -> None:
    launcher = ["examples/two_nodes.py", f"--checkpoints={tmp_path}", "examples/digits.py"]
    done = subprocess.run(
        [sys.executable, *launcher, "--no-such-option"],
        cwd=repository,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 1
    assert "unrecognized arguments: --no-such-option" in done.stderr
