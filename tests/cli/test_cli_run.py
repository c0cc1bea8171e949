"""`pipollux run`, `submit -` and `submit --wait`, also while the scheduler is restarted."""

from __future__ import annotations

import json
import signal

import pytest

from pipollux_sched.cli import main
from tests.programs import Forked

from .runner import LIGHT, TOY, Cli, one_sentence, wait_until


@pytest.fixture
def light(cli: Cli) -> Cli:
    cli.program = LIGHT
    return cli


def started(cli: Cli, *args: str) -> Forked:
    return Forked(cli.program, args, cli.environment, cli.folder)


def test_a_script_without_a_job_file(light: Cli) -> None:
    light.environment["COLOUR"] = "blue"
    light.serve()
    options = ("--stages", "2", "--env", "COLOUR", "--env", "SIZE=9=3", "--max-replicas", "1")
    done = light("run", *options, "--", "python3", str(TOY), "--steps", "3", "--prints")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-3:] == ["step 1", "step 2", "step 3"]
    assert done.stderr.splitlines()[0] == "toy-job-1: The job was submitted."
    assert done.stderr.splitlines()[-1] == "toy-job-1: Every replica ended with exit status 0."
    job = light.jobs()["toy-job-1"]["spec"]
    assert (job["args"], job["environment"]) == (["--steps", "3", "--prints"], ["COLOUR", "SIZE"])
    assert (job["num_stages"], job["max_replicas"], job["max_restarts"]) == (2, 1, 0)
    assert job["working_dir"] == str(light.folder)

    broken = light("run", str(TOY), "--", "--fail-at", "2")
    assert broken.returncode == 1
    assert "RuntimeError: step 2 went wrong on replica 0" in broken.stdout
    assert broken.stderr.splitlines()[-1].startswith(
        "Error: toy-job-2 failed: Failed once, max_restarts is 0: Replica 0 on node-a ended with"
    )
    assert light.jobs()["toy-job-2"]["attempt"] == 1


@pytest.mark.exhaustive
def test_a_job_that_nobody_waits_for_any_longer(light: Cli) -> None:
    light.serve()
    assert light("run", "--", str(TOY), "--steps", "3").returncode == 0
    named = light("run", "--name", "mine", "--detach", "--after", "toy-job-1", str(TOY))
    assert named.stdout == "mine\n", named.stderr
    assert "a job named 'mine' already exists" in one_sentence(
        light("run", "--name", "mine", str(TOY)), 1
    )
    with started(light, "run", "--", str(TOY), "--prints") as running:
        wait_until(lambda: "step 3\n" in running.output)
        running.send_signal(signal.SIGINT)
        assert running.wait() == 130
        assert running.errors.splitlines()[-1] == (
            "Detached: toy-job-2 goes on. Follow it with: pipollux logs toy-job-2 --follow; "
            "end it with: pipollux cancel toy-job-2"
        )
    assert light.jobs()["toy-job-2"]["phase"] == "Running"
    assert light("cancel", "toy-job-2", "mine").returncode == 0
    jobs = [f"  - {{name: {name}, script: {TOY}}}\n" for name in ("two", "one")]
    (light.folder / "jobs.yaml").write_text("jobs:\n" + "".join(jobs))
    with started(light, "submit", "jobs.yaml", "--wait") as waiting:
        wait_until(lambda: "two: starts on " in waiting.output)
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait() == 130
        assert waiting.errors.splitlines()[-1] == (
            "Detached: one and two go on. Follow them with: pipollux jobs; "
            "end them with: pipollux cancel one two"
        )
    assert light("cancel", "one", "two").returncode == 0


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        (["torchrun", "train.py"], "the scheduler starts the replicas itself; give 'python SCRIPT"),
        (["/usr/bin/python3.12"], "'/usr/bin/python3.12' has no script; give: "),
        (["python", "-u", "train.py"], "'python -u': options of Python but -m are not possible"),
        (["python", "-m"], "'python -m': options of Python but -m are not possible"),
        (["python", "-m", "a-b"], "run: module: 'a-b' is not the name of a module"),
        (["python", "nowhere.py"], "job 'run': script: there is no file"),
        (["sh", "train.sh"], "'sh' is no Python script; give one, or run other programs with"),
    ],
)
def test_what_is_no_script(
    command: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "--", *command])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"Error: {complaint}")


def test_options_of_the_script_without_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "python", "train.py", "--lr", "0.1"])
    assert ended.value.code == 2
    assert (
        "; put '--' before the script if the option is the script's; see 'pipollux run --help'"
        in (capsys.readouterr().err)
    )


def test_a_variable_that_is_not_set(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "--env", "NO_SUCH_NAME", "train.py"])
    assert ended.value.code == 2
    assert "--env: 'NO_SUCH_NAME' is not set here; give NO_SUCH_NAME=VALUE" in (
        capsys.readouterr().err
    )


@pytest.mark.exhaustive
def test_waiting_across_a_restart_of_the_scheduler(light: Cli) -> None:
    """The next scheduler listens on another port; both commands end with their jobs."""
    server = light.serve()
    file = f"jobs:\n- {{name: waited, script: {TOY}, args: [--steps, '60']}}\n"
    bad = one_sentence(light("submit", "-", stdin=file.replace("script", "skript")), 2)
    assert "standard input:2: jobs[0].skript: unknown field" in bad
    assert "standard input: the file is empty" in one_sentence(light("submit", "-"), 2)
    waiting = Forked(
        light.program, ["submit", "-", "--wait"], light.environment, light.folder, file
    )
    following = started(light, "run", "--name", "followed", "--", str(TOY), "--steps", "60")
    with waiting, following:
        for name in ("waited", "followed"):
            wait_until(lambda name=name: light.jobs().get(name, {}).get("reason") == "Training")
        server.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        wait_until(lambda: "No scheduler answers; waiting for the next one" in waiting.errors)
        assert [each.poll() for each in (waiting, following)] == [None, None]
        light.serve()
        assert waiting.wait() == 0, waiting.errors
        assert following.wait() == 0, following.errors
        told = waiting.output.splitlines()
        assert told[0] == "waited: The job was submitted."
        assert any("stopped and saved at step" in line for line in told)
        assert told[-1].endswith("waited: complete at step 60, epochs done: 1")
        assert "A scheduler answers again." in waiting.errors
        assert "replica 0 of attempt 2 goes on from step" in following.output
        assert json.loads(following.output.splitlines()[0])["PIPOLLUX_ATTEMPT"] == "1"
