"""`pipollux serve --backend ray` on real raylets, by the commands of its page."""

from __future__ import annotations

import re
import runpy
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.programs import Forked
from tests.ray.cluster import RayCluster
from tests.sched.scripts import TOY, TRIAL

from .runner import LIGHT, Cli, wait_until
from .test_cli_jobs_page import block_of, commands_of

SCRIPT = TRIAL.read_text().replace('os.environ["PIPOLLUX_SWEEP"]', '"none"')
"""Reports its loss, and is not in a sweep of Pipollux."""


@pytest.fixture
def served(cli: Cli, ray_cluster: RayCluster) -> Cli:
    """A scheduler of the two nodes, which finds them as one on a host with one cluster does."""
    cli.program = LIGHT
    cli.environment["RAY_ADDRESS"] = ray_cluster.address
    serve(cli)
    return cli


def serve(cli: Cli) -> Forked:
    command = ["serve", "--backend", "ray", "--interval", "1"]
    server = Forked(cli.program, command, cli.environment, cli.folder)
    cli.servers.append(server)

    def serves() -> bool:
        assert server.poll() is None, server.errors
        return "Serving 2 nodes with 8 slots at http://127.0.0.1:" in server.output

    wait_until(serves)
    return server


def actors(cluster: RayCluster, cli: Cli) -> list[str]:
    """Return the names of the scheduler's actors."""
    namespace = "pipollux-" + (cli.state_dir / "ray.id").read_text().strip()
    return [x["name"] for x in cluster.call("actors") if x["namespace"] == namespace]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("ray_cluster")
def test_the_page(served: Cli, ray_cluster: RayCluster, repository: Path) -> None:
    """With a scheduler that is killed in between; the next one has the same attempt."""
    cli = served
    text = block_of(repository, "ray.md", "job")
    (cli.folder / "jobs.yaml").write_text(text)
    (job,) = yaml.safe_load(text)["jobs"]
    script = cli.folder / job["script"]
    script.parent.mkdir()
    script.write_text(TOY.read_text())
    submit, jobs, nodes, logs, cancel = commands_of(block_of(repository, "ray.md", "commands"))
    assert cli(*submit).stdout == "digits: The job was submitted.\n"
    wait_until(lambda: cli.jobs()["digits"]["training"])
    assert set(actors(ray_cluster, cli)) >= {"digits.a1.r0"}
    assert " Running " in cli(*jobs).stdout
    assert re.search(r"^n1 .*\n(.*\n)*n2 ", cli(*nodes).stdout, re.MULTILINE)
    assert "goes on from step 0" in cli(*logs).stdout
    before = cli.jobs()["digits"]["attempt"]

    killed = cli.servers[-1]
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    running = actors(ray_cluster, cli)
    assert running, "they do not depend on it"
    serve(cli)
    assert cli.jobs()["digits"]["attempt"] == before
    assert actors(ray_cluster, cli) == running
    assert cli(*cancel).stdout.startswith("digits: The job was cancelled")
    wait_until(lambda: cli.jobs()["digits"]["phase"] == "Failed")
    wait_until(lambda: actors(ray_cluster, cli) == [])


@pytest.mark.exhaustive
@pytest.mark.usefixtures("ray_cluster")
def test_trials_of_the_page(served: Cli, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a job; the epochs of one that is not stopped are all reported."""
    cli = served
    monkeypatch.chdir(cli.folder)
    monkeypatch.setenv("PIPOLLUX_STATE_DIR", str(cli.state_dir))
    (cli.folder / "train.py").write_text(SCRIPT)
    search = cli.folder / "search.py"
    search.write_text(block_of_file(repository))
    kind: Any = runpy.run_path(str(search))["JobTrial"]
    trial = kind()
    trial.trial_id = "ab12_00000"
    trial.setup({"lr": 0.01})
    again = kind()
    again.trial_id = trial.trial_id
    again.setup({"lr": 0.01})  # Tune has moved the trial: it has its job already
    again.client.close()
    assert list(cli.jobs()) == ["tune-ab12-00000"]
    results = [trial.step()]
    while not results[-1]["done"]:
        results.append(trial.step())
    assert results[-1]["loss"] is not None
    epochs = [result["epoch"] for result in results]
    assert epochs == sorted(epochs)
    assert len(set(epochs)) >= len(epochs) - 1, "only the end repeats one"
    trial.cleanup()
    assert cli.jobs()["tune-ab12-00000"]["phase"] == "Complete"

    stopped = kind()
    stopped.trial_id = "ab12_00001"
    (cli.folder / "train.py").write_text(TOY.read_text().replace("parse_args()", "parse_args([])"))
    stopped.setup({"lr": 0.1})  # it never ends by itself
    wait_until(lambda: bool(cli.jobs()["tune-ab12-00001"]["training"]))
    stopped.cleanup()
    wait_until(lambda: cli.jobs()["tune-ab12-00001"]["phase"] == "Failed")


@pytest.mark.exhaustive
@pytest.mark.usefixtures("ray_cluster")
def test_a_search_of_the_page(served: Cli, ray_cluster: RayCluster, repository: Path) -> None:
    """Ray Tune itself, in the cluster of the jobs."""
    cli = served
    (cli.folder / "train.py").write_text(SCRIPT)
    search = cli.folder / "search.py"
    search.write_text(block_of_file(repository).replace("num_samples=8", "num_samples=3"))
    environment = {**cli.environment, "RAY_AIR_NEW_OUTPUT": "0", "HOME": str(cli.folder)}
    with Forked(search, environment=environment, folder=cli.folder) as running:
        assert running.wait() == 0, running.errors
        assert "'lr':" in running.output
    phases = [job["phase"] for job in cli.jobs().values()]
    assert len(phases) == 3
    assert set(phases) <= {"Complete", "Failed"}  # a trial that Tune stops is cancelled


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_it_connects(cli: Cli, number: signal.Signals) -> None:
    """Nothing listens at the address; without the signal it would say so in the end."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        command = ["serve", "--backend", "ray", "--address", address]
        server = Forked(cli.program, command, cli.environment, cli.folder)
        cli.servers.append(server)
        log = cli.state_dir / "ray.log"
        wait_until(lambda: log.exists() and "Failed to connect" in log.read_text())
        (client,) = clients(cli)
        server.send_signal(number)
        assert server.wait() == 0, server.errors
    assert server.output == "Stopped before a connection to the cluster was made.\n"
    assert server.errors == ""
    assert not client.is_running()


def clients(cli: Cli) -> list[psutil.Process]:
    """Return the processes that are connected to Ray, or connect, for the scheduler."""
    namespace = "pipollux-" + (cli.state_dir / "ray.id").read_text().strip()
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended meanwhile
            found += [process] if namespace in process.cmdline() else []
    return found


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--address", "head:6379"], "needs --backend ray"),
        (["--backend", "ray", "--address", "ray://head:10001"], "must run on a node of the Ray"),
    ],
)
def test_addresses_that_are_refused(cli: Cli, options: list[str], words: str) -> None:
    done = cli("serve", *options)
    assert done.returncode != 0
    assert words in " ".join(re.sub(r"[│╭╰─╮╯]", " ", done.stderr).split())


def block_of_file(repository: Path) -> str:
    text = (repository / "docs/howto/ray.md").read_text()
    found = re.search(r"<!-- file: search.py -->\n```python\n(.*?)```", text, re.DOTALL)
    assert found is not None
    return found[1]
