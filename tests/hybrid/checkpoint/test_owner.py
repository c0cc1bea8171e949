"""A directory of checkpoints has one job at a time."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.extent import first
from tests.programs import Forked, Replicas
from tests.waiting import until

SCRIPT = """
import sys
import time
from pathlib import Path
import pipollux

pipollux.init_process_group("gloo")
print("it has begun", flush=True)
while not Path(sys.argv[1]).exists():
    time.sleep(0.01)
pipollux.save_all_states()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def environment(folder: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "PIPOLLUX_CHECKPOINT_DIR": str(folder / "checkpoints"), **more}


@contextmanager
def running(
    script: Path, num_replicas: int = 1, end: str = "end", **more: str
) -> Iterator[list[Forked]]:
    """A job that has begun, and ends when a file is there."""
    folder = script.parent
    with ExitStack() as stack:
        settings = environment(folder, **more)
        args = [str(folder / end)]
        job = stack.enter_context(Replicas(script, num_replicas, args, settings))
        until(lambda: job.output.count("begun") == num_replicas or job.poll() is not None, "it")
        yield job.programs


@pytest.mark.parametrize("killed", first(1, [None, 0]))
def test_a_second_job_is_refused_as_long_as_a_process_of_the_first_lives(
    script: Path, killed: int | None
) -> None:
    """It is told which job that is; the first one does not notice."""
    end = script.parent / "end"
    with running(script, 1 if killed is None else 2) as begun:
        if killed is not None:
            begun[killed].send_signal(signal.SIGKILL)
            begun[killed].wait()
        with Forked(script, [str(end)], environment(script.parent)) as second:
            assert second.wait() == 1
            assert f"{script.parent}/checkpoints belongs to another job that is" in second.errors
            assert f"process {begun[0].pid} on " in second.errors
            assert "give each job a folder of its own, or stop that job first" in second.errors
        end.touch()
        if killed is None:
            assert begun[0].wait() == 0
            assert (script.parent / "checkpoints" / "checkpoint-00000001").is_dir()


def test_a_job_may_begin_where_the_one_before_has_ended(script: Path) -> None:
    """By itself or by SIGKILL, in whose place it is run again by hand."""
    with running(script) as (first,):
        first.send_signal(signal.SIGKILL)
        first.wait()
        with running(script) as (second,):
            (script.parent / "end").touch()
            assert second.wait() == 0, second.errors
    with running(script) as (third,):
        assert third.wait() == 0, third.errors
    names = sorted(path.name for path in (script.parent / "checkpoints").glob("checkpoint-*"))
    assert names == ["checkpoint-00000001", "checkpoint-00000002"]


@pytest.mark.parametrize(
    "scheduler",
    first(
        1,
        [
            ({"PIPOLLUX_JOB_ID": "lm-7"}, ("PIPOLLUX_ATTEMPT", "1", "2")),
            ({"SLURM_JOB_ID": "99"}, ("SLURM_RESTART_COUNT", "0", "1")),
        ],
    ),
)
def test_a_scheduler_may_start_a_job_again_while_its_last_attempt_is_left(
    script: Path, scheduler: tuple[dict[str, str], tuple[str, str, str]]
) -> None:
    """On a host that was cut off, say; a job of another name is refused even so."""
    job, (variable, before, after) = scheduler
    with (
        running(script, end="never", **job, **{variable: before}),
        running(script, **job, **{variable: after}) as (new,),
    ):
        other = {name: f"{value}-other" for name, value in job.items()}
        settings = environment(script.parent, **other, **{variable: after})
        with Forked(script, ["never"], settings) as stranger:
            assert stranger.wait() == 1
            assert f"running (job {next(iter(job.values()))}" in stranger.errors
        (script.parent / "end").touch()
        assert new.wait() == 0, new.errors
