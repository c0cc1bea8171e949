"""`pipollux serve`, `submit`, `jobs`, `cancel`, `logs` and `apply` as a user runs them."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from pathlib import Path

import pytest
import yaml

from pipollux_sched.backend.local.hardware import count_cpus, node_name
from pipollux_sched.cli import main
from pipollux_sched.store import Store
from tests.small_disk import fill, small_disk

from .runner import LIGHT, PIPOLLUX, TOY, Cli, one_sentence, wait_until

ADD = ["notify", "add", "ops"]
HOOK = ["--webhook", "https://example.org/hook"]
SERVE = ("serve", "--cluster", "cluster.yaml")


def test_from_submission_to_the_end_of_the_scheduler(cli: Cli) -> None:
    cli.program = LIGHT
    server = cli.serve()
    assert "another scheduler already serves" in one_sentence(
        cli("serve", "--cluster", "cluster.yaml"), 1
    )
    submitted = cli("submit", "jobs.yaml")
    assert submitted.returncode == 0, submitted.stderr
    assert submitted.stdout.splitlines() == [
        "short: The job was submitted.",
        "long: The job was submitted.",
    ]
    wait_until(lambda: cli.jobs()["short"]["phase"] == "Complete")
    wait_until(lambda: cli.jobs()["long"]["reason"] == "Training")
    table = cli("jobs")
    assert table.stdout.splitlines()[0].split() == [
        *("Job", "Phase", "Stages", "Replicas", "Nodes", "Epoch", "Step", "Loss", "Samples/s"),
        *("Restarts", "Age", "Message"),
    ]
    assert table.stdout.splitlines()[2].split()[:4] == ["long", "Running", "2", "1"]
    shown = json.loads(cli("jobs", "--output", "json").stdout)[1]
    assert shown["name"] == "long"
    assert shown["progress"]["num_replicas"] == 1
    assert len(shown["running_on"]) == 1
    assert "token" not in shown

    assert "2 of the jobs already exist: 'short' (Complete)" in cli("submit", "jobs.yaml").stderr
    logs = cli("logs", "short")
    assert "replica 0 of attempt 1 goes on from step 0" in logs.stdout
    cancelled = cli("cancel", "long")
    assert cancelled.stdout == "long: The job was cancelled and is being stopped.\n"
    wait_until(lambda: cli.jobs()["long"]["phase"] == "Failed")
    assert cli("submit", "jobs.yaml").returncode == 1  # short is complete: neither is taken
    assert cli.jobs()["long"]["phase"] == "Failed"
    alone = {"jobs": [yaml.safe_load((cli.folder / "jobs.yaml").read_text())["jobs"][1]]}
    (cli.folder / "alone.yaml").write_text(yaml.safe_dump(alone))
    assert cli("submit", "alone.yaml").returncode == 0  # it goes on again
    wait_until(lambda: cli.jobs()["long"]["reason"] == "Training")
    assert "no job is named 'nobody'; there are short and long" in one_sentence(
        cli("cancel", "nobody"), 1
    )

    server.send_signal(signal.SIGTERM)
    assert server.wait(240) == 0
    assert cli.alive() == []
    said = server.output
    assert "short: complete at step 5, epochs done: 1" in said
    assert "Stopping: jobs save" in said
    assert cli.jobs()["long"]["reason"] == "SchedulerStopped"
    assert "this is the last recorded state" in cli("jobs").stderr
    assert "no scheduler serves" in one_sentence(cli("cancel", "long"), 1)


@pytest.mark.exhaustive
def test_a_scheduler_that_was_killed(cli: Cli) -> None:
    """What it left running runs on, and the next one looks after it as if nothing had happened."""
    cli.serve()
    assert cli("submit", "jobs.yaml").returncode == 0
    wait_until(lambda: cli.jobs()["long"]["reason"] == "Training")
    wait_until(lambda: cli.jobs()["short"]["phase"] == "Complete")
    before = cli.jobs()["long"]
    cli.servers[0].send_signal(signal.SIGKILL)
    cli.servers[0].wait(240)
    alive = {process.pid for process in cli.alive()}
    assert alive
    assert "no scheduler serves" in one_sentence(cli("submit", "jobs.yaml"), 1)
    cli.serve()
    assert {process.pid for process in cli.alive()} == alive
    with Store(cli.state_dir / "pipollux.db") as store:
        last = store.last_event()
        kinds = [event["type"] for event in store.events(job="long")]
        assert kinds.count("adopted") == kinds.count("started") == 1
        wait_until(lambda: bool(store.events(last, job="long", types=["progress"])))
    job = cli.jobs()["long"]
    assert (job["attempt"], job["failures"]) == (before["attempt"], 0)
    cancelled = cli("cancel", "long")
    assert cancelled.returncode == 0
    wait_until(lambda: cli.jobs()["long"]["reason"] == "Cancelled")
    assert cli.alive() == []


@pytest.mark.exhaustive
def test_a_scheduler_that_listens_elsewhere_than_the_one_that_was_killed(cli: Cli) -> None:
    """Jobs that could not tell it anything are ended, and go on from what they saved."""
    cli.serve()
    assert cli("submit", "jobs.yaml").returncode == 0
    wait_until(lambda: cli.jobs()["long"]["reason"] == "Training")
    before = {process.pid for process in cli.alive()}
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
    cli.servers[0].send_signal(signal.SIGKILL)
    cli.servers[0].wait(240)
    cli.serve("--port", str(port))
    assert any("ended a process of an earlier scheduler" in line for line in cli.said)
    why = "job long cannot be adopted: The scheduler now listens at "
    assert any(why in line for line in cli.said)
    assert not before & {process.pid for process in cli.alive()}
    wait_until(lambda: cli.jobs()["long"]["reason"] == "Training")
    job = cli.jobs()["long"]
    assert (job["attempt"], job["failures"]) == (2, 0)
    assert "goes on from step" in cli("logs", "long", "--attempt", "2").stdout


@pytest.mark.exhaustive
def test_waiting_and_following(cli: Cli) -> None:
    """`submit --wait` tells what happens and how it ended, `logs -f` goes on until it has."""
    cli.program = LIGHT
    (cli.folder / "jobs.yaml").write_text(f"""
jobs:
  - {{name: good, script: {TOY}, args: [--steps, "20"]}}
  - {{name: bad, script: {TOY}, args: [--fail-at, "2"], max_restarts: 0}}
  - {{name: odd, script: {TOY}, args: [--fail-at, "2", --fail-status, "143"], max_restarts: 0}}
""")
    cli.serve()
    waiting = subprocess.Popen(
        [PIPOLLUX, "submit", "jobs.yaml", "--wait"],
        cwd=cli.folder,
        env=cli.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: cli.state_dir.joinpath("jobs", "good", "logs").exists())
    followed = cli("logs", "good", "--follow")
    out, err = waiting.communicate(timeout=240)
    assert waiting.returncode == 1
    assert "good: complete at step 20" in out
    assert "bad: failed: Failed once, max_restarts is 0: Replica 0 on " in out
    assert "odd: failed: Failed once, max_restarts is 0: Replica 0 on " in out
    assert "143, but was not asked to stop" in out
    assert err == "Error: bad, odd failed; see: pipollux logs bad\n"
    assert followed.returncode == 0
    assert "goes on from step 0" in followed.stdout
    failed = cli("logs", "bad", "--follow")
    assert "RuntimeError: step 2 went wrong" in failed.stdout
    assert one_sentence(failed, 1) == "Error: bad failed; see: pipollux describe bad\n"
    assert "there is no log of attempt 9" in one_sentence(cli("logs", "good", "--attempt", "9"), 1)


@pytest.mark.exhaustive
def test_a_disk_that_is_full_for_a_while(cli: Cli, tmp_path: Path) -> None:
    """Jobs that end meanwhile are complete, and the scheduler says once what is wrong."""
    cli.program = LIGHT
    cli.state_dir.mkdir()
    with small_disk(cli.state_dir, "8m"):
        server = cli.serve()
        go = tmp_path / "go"
        waits = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.05)\n"
        (cli.folder / "waits.py").write_text(waits)
        (cli.folder / "jobs.yaml").write_text("""
jobs:
  - {name: first, script: waits.py, num_stages: 2, max_replicas: 1, max_restarts: 0}
  - {name: second, script: waits.py, num_stages: 2, max_replicas: 1, max_restarts: 0}
""")
        cli("submit", "jobs.yaml")
        wait_until(lambda: len(cli.alive()) >= 6)
        fill(cli.state_dir / "others")
        go.touch()
        wait_until(lambda: cli.alive() == [])
        wait_until(lambda: "the executor failed" in server.errors)
        (cli.state_dir / "others").unlink()
        wait_until(lambda: all(job["phase"] == "Complete" for job in cli.jobs().values()))
        wait_until(lambda: "the executor works again" in server.errors)
        assert "Traceback" not in server.errors
        told = [line for line in server.errors.splitlines() if "the executor failed" in line]
        assert len(told) == 1
        assert told[0].endswith("cannot be used now: database or disk is full")
        server.send_signal(signal.SIGTERM)
        server.wait()
        assert not cli("jobs").returncode


def test_apply(cli: Cli) -> None:
    """A plan is shown, asked about, carried out, and left alone once it is done."""
    cli.program = LIGHT
    (cli.folder / "jobs.yaml").write_text(f"""
jobs:
  - {{name: one, script: {TOY}, args: [--steps, "5"], num_stages: 2}}
  - {{name: two, script: {TOY}, args: [--steps, "5"], min_replicas: 2, max_replicas: 2}}
""")
    files = ("--cluster", "cluster.yaml", "--jobs", "jobs.yaml")
    asked = cli("apply", *files, stdin="n\n")
    assert asked.returncode == 1
    assert "Carry this out?" in asked.stdout
    assert "nothing was started" in asked.stderr
    assert not cli.state_dir.joinpath("jobs").exists()
    done = cli("apply", *files, "--yes", "--policy", "exact")
    assert done.returncode == 0, done.stderr
    assert "one: complete at step 5" in done.stdout
    jobs = cli.jobs()
    assert {job["phase"] for job in jobs.values()} == {"Complete"}
    assert len(cli("logs", "two").stdout.split("[1.1] ")) > 1
    again = cli("apply", *files, "--yes")
    assert again.returncode == 0
    assert again.stdout.splitlines() == [
        "one is already complete; skipped.",
        "two is already complete; skipped.",
    ]

    told = cli("apply", *files, "--yes", "--output", "json")
    assert (told.returncode, told.stderr) == (0, again.stdout)
    assert [job["phase"] for job in json.loads(told.stdout)] == ["Complete", "Complete"]
    assert "--output json needs --yes" in one_sentence(cli("apply", *files, "-o", "json"), 2)


@pytest.mark.exhaustive
def test_apply_with_a_job_that_fails(cli: Cli) -> None:
    (cli.folder / "jobs.yaml").write_text(f"""
jobs:
  - {{name: bad, script: {TOY}, args: [--fail-at, "2"], max_restarts: 0}}
  - {{name: long, script: {TOY}, num_stages: 2}}
""")
    files = ("--cluster", "cluster.yaml", "--jobs", "jobs.yaml")
    failed = cli("apply", *files, "--yes", "--output", "json")
    assert failed.returncode == 1
    ended = {job["name"]: job["phase"] for job in json.loads(failed.stdout)}
    assert ended == {"bad": "Failed", "long": "Suspended"}
    assert "bad: failed: Failed once" in failed.stderr
    assert "Error: bad failed; all jobs were stopped\n" in failed.stderr
    assert failed.stderr.endswith("RuntimeError: step 2 went wrong on replica 0\n")
    assert cli.jobs()["long"]["phase"] == "Suspended"


def test_without_a_cluster_file_this_machine_is_the_cluster(cli: Cli) -> None:
    cli.environment["CUDA_VISIBLE_DEVICES"] = "-1"
    cli.serve(cluster=None)
    (node,) = json.loads(cli("nodes", "--output", "json").stdout)
    assert (node["kind"], node["slots"]) == ("cpu", count_cpus())
    assert node["name"] == node_name(socket.gethostname())


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        (["jobs"], 1, "no scheduler has kept a store there yet"),
        (["logs", "toy"], 1, "no scheduler has kept a store there yet"),
        (["cancel", "toy"], 1, "start one with: pipollux serve --state-dir"),
        (["submit", "jobs.yaml"], 1, "no scheduler serves"),
        (["submit", "jobs.yaml", "--wait"], 1, "no scheduler serves"),
        (["submit", "nothing.yaml"], 2, "nothing.yaml: there is no such file"),
        (["submit", "bad.yaml"], 2, "bad.yaml:2: jobs[0].num_stages: 0 is not allowed"),
        (["submit", "lost.yaml"], 2, "job 'lost': script: there is no file"),
        (["serve", "--cluster", "nothing.yaml"], 2, "nothing.yaml: there is no such file"),
        (["serve", "--cluster", "cluster.yaml", "--port", "99999"], 2, "--port"),
        ([*SERVE, "--policy", "none"], 2, "'none' is not known"),
        ([*SERVE, "--cpu-slots", "2"], 2, "is for this machine without a cluster file"),
        (["serve", "--cpu-slots", "2"], 1, "2 CPU slots cannot lie beside GPUs: this machine has"),
        (["run", "--device", "tpu", "--", "x.py"], 2, "'gpu' or 'cpu'"),
        ([*SERVE, "--autoscale", "1:4"], 2, "'--autoscale': needs --expander-command, too"),
        ([*SERVE, "--expander-command", "true"], 2, "needs --autoscale, too"),
        ([*SERVE, "--autoscale", "4", "--expander-command", "true"], 2, "'4' is not MIN:MAX"),
        ([*SERVE, "--autoscale", "4:1", "--expander-command", "true"], 2, "min_nodes: 4"),
        ([*SERVE, "--autoscale", "1:4", "--expander-command", "true"], 2, "{desired}"),
        (["serve", "--cluster", "cluster.yaml", "--state-dir", "jobs.yaml"], 1, "--state-dir"),
        (["apply", "--cluster", "cluster.yaml", "--jobs", "wide.yaml"], 1, "fits no node"),
        ([*ADD], 2, "has no destination; give one of --webhook URL and --apprise URL"),
        ([*ADD, "--webhook", "-", "--apprise", "-"], 2, "has two destinations; give one of"),
        ([*ADD, *HOOK, "--on", "done"], 2, "--on: 'done' is not an event; give one of completed,"),
        ([*ADD, *HOOK, "--on", "completed,failed"], 2, "and none, and --on again for each further"),
        ([*ADD, "--webhook", "ftp://a/b"], 2, "--webhook: is not a URL for POST requests: its sch"),
        ([*ADD, *HOOK, "--waiting-after", "x"], 2, "--waiting-after: 'x' is not a duration"),
        (["notify", "add", "A", *HOOK], 2, "NAME: 'A' is not a name"),
        (["cancel"], 2, "NAME"),
        (["jobs", "--output", "xml"], 2, "xml"),
    ],
)
def test_mistakes(
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    code: int,
    says: str,
) -> None:
    """Run within this process, as starting another takes longer than making a mistake."""
    (cli.folder / "bad.yaml").write_text(f"jobs:\n- {{name: x, script: {TOY}, num_stages: 0}}\n")
    (cli.folder / "lost.yaml").write_text("jobs:\n- {name: lost, script: lost.py}\n")
    (cli.folder / "wide.yaml").write_text(f"jobs:\n- {{name: x, script: {TOY}, num_stages: 9}}\n")
    monkeypatch.chdir(cli.folder)
    monkeypatch.setenv("PIPOLLUX_STATE_DIR", str(cli.state_dir))
    with pytest.raises(SystemExit) as ended:
        main(command)
    said = capsys.readouterr()
    result = subprocess.CompletedProcess(command, int(ended.value.code or 0), said.out, said.err)
    assert says in one_sentence(result, code)
