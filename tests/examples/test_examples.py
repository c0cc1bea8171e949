"""The examples run by themselves, as pipeline replicas, and with torchrun on two nodes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.extent import first
from tests.programs import LIMIT, Command, Forked, Replicas, Started

SHORT = {
    "char_lm.py": (
        "--epochs=2 --characters=40000 --layers=2 --width=32 --batch-size=8 --max-batch-size=32"
    ),
    "digits.py": "--epochs=4",
    "digits_plain.py": "--epochs=4",
    "gpt2.py": "--texts=96 --epochs=2",
    "unet.py": "--epochs=2 --pictures=800 --width=8 --batch-size=8",
}
"""Arguments with which a script learns something in seconds."""


def command(script: str) -> list[str]:
    return [f"examples/{script}", *SHORT[script].split()]


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **variables}


def run(repository: Path, *script: str) -> str:
    """Run a script to its end; what it printed."""
    path, *arguments = script
    with Forked(repository / path, arguments, environment(), repository) as job:
        return ended_well(job)


def run_two_nodes(repository: Path, *arguments: str, **variables: str) -> str:
    """Run a script as on two nodes, with a real torchrun agent on each."""
    launcher = [sys.executable, "examples/two_nodes.py", *arguments]
    with Command(launcher, environment(**variables), repository) as job:
        return ended_well(job)


def ended_well(job: Started | Replicas) -> str:
    assert job.wait() == 0, job.errors
    assert "Warning" not in job.errors
    return job.output


def by_epoch(output: str) -> list[float]:
    """The figure that each epoch ended with."""
    lines = re.findall(r"^epoch (\d+): \D*(\d\.\d+)", output, re.MULTILINE)
    assert [int(epoch) for epoch, _ in lines] == list(range(len(lines)))
    return [float(figure) for _, figure in lines]


@pytest.mark.exhaustive
def test_the_language_model_learns(repository: Path) -> None:
    first, last = by_epoch(run(repository, *command("char_lm.py")))
    assert last < first < 4.85, "ln 128 is what a model says that knows nothing"
    assert last < 3.0


@pytest.mark.parametrize("script", first(1, ["digits.py", "digits_plain.py"]))
def test_the_classifier_learns_with_and_without_pollux(repository: Path, script: str) -> None:
    figures = by_epoch(run(repository, *command(script)))
    assert len(figures) == 4
    assert figures[-1] > 0.85


@pytest.mark.exhaustive
def test_the_u_net_learns_across_its_stages(repository: Path) -> None:
    output = run(repository, *command("unet.py"))
    balance = re.search(r"layers of each stage: \[(\d+), (\d+), (\d+)\]", output)
    assert balance is not None
    assert sum(map(int, balance.groups())) == 6
    first, last = by_epoch(output)
    assert first < last
    assert last > 0.3, "one in ten is chance"


@pytest.mark.exhaustive
def test_two_replicas_on_one_machine(repository: Path) -> None:
    path, *arguments = command("unet.py")
    with Replicas(repository / path, 2, arguments, environment(), repository) as job:
        assert by_epoch(ended_well(job))[-1] > 0.2, "and only one replica prints"


@pytest.mark.exhaustive
def test_the_language_model_with_a_process_for_each_stage(repository: Path) -> None:
    path, *arguments = command("char_lm.py")
    arguments.append("--processes-per-replica=2")
    with Replicas(repository / path, 2, arguments, environment(), repository) as job:
        assert by_epoch(ended_well(job))[-1] < 3.0, "and only one process prints"


@pytest.mark.exhaustive
def test_gpt2_is_fine_tuned_by_two_replicas_of_two_stages(repository: Path, tmp_path: Path) -> None:
    path, *arguments = command("gpt2.py")
    begun, further = tmp_path / "begun", tmp_path / "further"
    arguments.append("--processes-per-replica=2")
    saves = [*arguments, f"--save={begun}"]
    with Replicas(repository / path, 4, saves, environment(), repository) as job:
        first, last = by_epoch(ended_well(job))
    assert last < first < 5.6, "ln 256 is what a model says that knows nothing"
    again = [*arguments, f"--model={begun}", f"--save={further}"]
    with Replicas(repository / path, 4, again, environment(), repository) as job:
        assert by_epoch(ended_well(job))[-1] < last
    assert (further / "model.safetensors").exists()


@pytest.mark.exhaustive
def test_the_language_model_on_two_nodes(repository: Path, tmp_path: Path) -> None:
    output = run_two_nodes(
        repository, f"--checkpoints={tmp_path / 'checkpoints'}", *command("char_lm.py")
    )
    assert by_epoch(output)[-1] < 3.0
    assert list((tmp_path / "checkpoints").glob("checkpoint-*/model.pt"))


@pytest.mark.exhaustive
def test_two_nodes_stop_together_and_go_on(repository: Path, tmp_path: Path) -> None:
    checkpoints, traces = tmp_path / "checkpoints", tmp_path / "traces"
    told = {"PIPOLLUX_TRACE_DIR": str(traces), "PIPOLLUX_CHECKPOINT_DIR": str(checkpoints)}
    launcher = ["examples/two_nodes.py", f"--checkpoints={checkpoints}", "examples/digits.py"]
    with subprocess.Popen(
        [sys.executable, *launcher, "--epochs=1000"],
        cwd=repository,
        env=environment(**told),
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
    assert json.loads((checkpoints / "stopped.json").read_text())["reason"] == "signal"
    # Each replica writes the time line of a step, so the files tell who took part.
    assert {path.name.split("-step-")[0] for path in traces.iterdir()} == {"replica-0", "replica-1"}
    done = 3 + len(re.findall(r"^epoch \d+:", rest, re.MULTILINE))
    script, arguments = repository / "examples/digits.py", [f"--epochs={done + 1}"]
    with Replicas(script, 2, arguments, environment(**told), repository) as again:
        output = ended_well(again)
    assert re.findall(r"^epoch (\d+):", output, re.MULTILINE) == [str(done)]


@pytest.mark.exhaustive
def test_a_node_that_fails_ends_both(repository: Path, tmp_path: Path) -> None:
    """The script needs no torch, as it never comes so far."""
    script = tmp_path / "script.py"
    script.write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    launcher = [sys.executable, "examples/two_nodes.py", f"--checkpoints={tmp_path}", str(script)]
    with Command([*launcher, "--no-such-option"], environment(), repository) as job:
        assert job.wait() == 1
        assert "unrecognized arguments: --no-such-option" in job.errors
