"""Every command with nothing but a URL and a token, as from a machine that has no state directory.

The scheduler's state directory is out of sight: another home, another folder, no variable names it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipollux_sched.cli import main
from pipollux_sched.store import StateDir
from tests.programs import run_pipollux

from .kept import Clock, kept
from .runner import PIPOLLUX, TOY, Cli, one_sentence, wait_until


class Elsewhere:
    """Runs `pipollux` where there is no state directory."""

    def __init__(self, cli: Cli, folder: Path) -> None:
        info = StateDir(cli.state_dir).read_server()
        assert info is not None
        vouching = {"PIPOLLUX_CA_FILE": info.ca_file} if info.ca_file else {}
        self.url, self.token = info.url, info.token
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []
        folder.mkdir()
        kept_out = ("PIPOLLUX_STATE_DIR", "XDG_STATE_HOME")
        inherited = {name: value for name, value in os.environ.items() if name not in kept_out}
        self.environment = {
            **inherited,
            "HOME": str(folder),
            "PIPOLLUX_SERVER": self.url,
            "PIPOLLUX_TOKEN": self.token,
            **vouching,
        }

    def __call__(self, *args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return run_pipollux(*args, environment=self.environment, folder=self.folder, stdin=stdin)

    def well(self, *args: str) -> str:
        """What a command prints that ends well and complains of nothing."""
        done = self(*args)
        assert (done.returncode, done.stderr) == (0, ""), (args, done.stdout, done.stderr)
        return done.stdout

    def data(self, *args: str) -> Any:
        return json.loads(self.well(*args, "--output", "json"))

    def start(self, *args: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [PIPOLLUX, *args],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process


@contextmanager
def being_elsewhere(cli: Cli, folder: Path) -> Iterator[Elsewhere]:
    elsewhere = Elsewhere(cli, folder)
    try:
        yield elsewhere
    finally:
        for process in elsewhere.started:
            process.kill()
            process.communicate(timeout=240)
    assert list(folder.glob(".local/**/pipollux*")) == []


@pytest.fixture
def elsewhere(cli: Cli, tmp_path: Path) -> Iterator[Elsewhere]:
    cli.serve("--interval", "1")
    with being_elsewhere(cli, tmp_path / "elsewhere") as elsewhere:
        yield elsewhere


@pytest.mark.exhaustive
def test_the_life_of_two_jobs_from_elsewhere(elsewhere: Elsewhere, cli: Cli) -> None:
    live_two_jobs(elsewhere, cli)


def live_two_jobs(elsewhere: Elsewhere, cli: Cli) -> None:
    """Run every command that a scheduler answers; it has ended afterwards."""
    assert elsewhere.well("jobs") == "No jobs yet; submit some with: pipollux submit FILE\n"
    assert [node["name"] for node in elsewhere.data("nodes")] == ["node-a", "node-b"]
    (elsewhere.folder / "jobs.yaml").write_text("jobs:\n- {name: short, script: toy.py}\n")
    relative = one_sentence(elsewhere("submit", "jobs.yaml"), 2)
    assert "script: toy.py is relative, and --server may be another machine" in relative
    (elsewhere.folder / "jobs.yaml").write_text("jobs:\n- {name: x, script: /nowhere/toy.py}\n")
    missing = one_sentence(elsewhere("submit", "jobs.yaml"), 1)
    assert "script: there is no file /nowhere/toy.py" in missing, "its machine was asked"
    (elsewhere.folder / "jobs.yaml").write_text(f"""
jobs:
  - {{name: short, script: {TOY}, args: [--steps, "5"]}}
  - {{name: long, script: {TOY}, num_stages: 2}}
""")
    following = elsewhere.start("events", "--follow", "--output", "json")
    (elsewhere.folder / "one.yaml").write_text(
        f'jobs:\n- {{name: first, script: {TOY}, args: [--steps, "3"]}}\n'
    )
    waited = elsewhere.well("submit", "one.yaml", "--wait")
    assert "first: complete at step 3" in waited
    assert elsewhere.well("submit", "jobs.yaml").splitlines() == [
        "short: The job was submitted.",
        "long: The job was submitted.",
    ]
    logs = elsewhere.start("logs", "short", "--follow")
    wait_until(lambda: cli.jobs()["short"]["phase"] == "Complete")
    wait_until(lambda: cli.jobs()["long"]["reason"] == "Training")
    written, complaint = logs.communicate(timeout=240)
    if complaint:
        assert "there is no log of job 'short'" in complaint, "it looked before there was any"
    written = written or elsewhere.well("logs", "short")
    assert "replica 0 of attempt 1 goes on from step 0" in written
    assert cli("logs", "short").stdout == elsewhere.well("logs", "short")

    _look_at_all(elsewhere, cli)

    assert elsewhere.well("suspend", "long").startswith("long: The job was suspended")
    wait_until(lambda: cli.jobs()["long"]["phase"] == "Suspended")
    assert elsewhere.well("resume", "long").startswith("long: The job was resumed")
    wait_until(lambda: cli.jobs()["long"]["reason"] == "Training")
    drained = elsewhere("drain", "node-a", "--reason", "new fans", "--wait", "--timeout", "4m")
    assert drained.stdout == "node-a: draining; nothing runs there\n", drained.stderr
    assert elsewhere.data("drain", "node-a", "--undo")["condition"] == "ready"
    assert elsewhere.well("cancel", "long").startswith("long: The job was cancelled")
    wait_until(lambda: cli.jobs()["long"]["phase"] == "Failed")
    refused = one_sentence(elsewhere("cancel", "long"), 1)
    assert "job 'long' has ended (Failed, Cancelled) and cannot be cancelled" in refused
    assert elsewhere.well("rerun", "long").startswith("long: The job is run again")
    elsewhere.well("cancel", "long")
    wait_until(lambda: cli.jobs()["long"]["phase"] == "Failed")
    assert elsewhere.well("delete", "short", "--yes") == "short: The job was deleted.\n"
    assert "short" not in cli.jobs()
    assert "no job is named 'short'" in one_sentence(elsewhere("describe", "short"), 1)

    cli.servers[0].send_signal(signal.SIGTERM)
    told, complaint = following.communicate(timeout=240)
    assert complaint == f"Error: the scheduler at {elsewhere.url} has ended\n"
    kinds = [json.loads(line)["type"] for line in told.splitlines()]
    assert kinds.count("complete") == 2
    assert {"submitted", "first_step", "suspended", "resumed", "cancelled", "node"} <= {*kinds}
    cli.servers[0].wait(240)
    gone = one_sentence(elsewhere("jobs"), 1)
    assert f"no scheduler answers at {elsewhere.url}; check the URL" in gone


def _look_at_all(elsewhere: Elsewhere, cli: Cli) -> None:
    """Whatever can be read is what is read where the scheduler is."""
    for command in (
        ["jobs", "--phase", "Complete"],
        ["describe", "short"],
        ["explain", "short"],
        ["nodes"],
    ):
        here = json.loads(cli(*command, "--output", "json").stdout)
        assert elsewhere.data(*command) == here, command
    assert elsewhere.well("describe", "long").startswith("long\n  Phase       Running\n")
    assert elsewhere.well("explain", "long").startswith("long has 1 replica of 2 stages on node-")
    assert "2 nodes, 2 of 4 slots used." in elsewhere.well("nodes")
    table = elsewhere.well("jobs").splitlines()
    assert [line.split()[0] for line in table] == ["Job", "first", "short", "long"]
    here = cli("events", "--last", "1000", "--job", "short", "--output", "json").stdout
    last = elsewhere.well("events", "--last", "1000", "--job", "short", "--output", "json")
    assert last == here
    since = elsewhere.well("events", "--since", "1h", "--type", "complete").splitlines()
    assert [line.split(" ", 2)[2] for line in since] == [
        "first: complete at step 3, epochs done: 1",
        "short: complete at step 5, epochs done: 1",
    ]
    frame = elsewhere.well("top", "--once")
    assert "Jobs: 1 running, 2 complete\n" in frame
    assert "● " in frame.partition("\n")[0], "a scheduler runs"
    assert elsewhere.data("top")["served"] is True
    assert "by the policy exact, if it decided now." in elsewhere.well("plan")
    assert "by the policy fifo" in elsewhere.well("plan", "--policy", "fifo", "--diff")
    assert elsewhere("apply", "--yes").returncode == 0
    assert elsewhere.well("report", "--job", "short") == "Wrote report.html\n"
    page = (elsewhere.folder / "report.html").read_text()
    assert "<html" in page
    assert "short" in page
    nothing = one_sentence(elsewhere("report", "--job", "nobody"), 1)
    assert "no job is named 'nobody'" in nothing
    completing = {
        **elsewhere.environment,
        "_PIPOLLUX_COMPLETE": "complete_bash",
        "COMP_WORDS": "pipollux describe s",
        "COMP_CWORD": "2",
    }
    offered = run_pipollux(environment=completing, folder=elsewhere.folder)
    assert offered.stdout.split() == ["short"]


@pytest.mark.exhaustive
def test_the_token_is_in_no_process_list_and_no_error(elsewhere: Elsewhere) -> None:
    token, server = elsewhere.token, ("--server", elsewhere.url)
    for name in ("PIPOLLUX_SERVER", "PIPOLLUX_TOKEN"):
        del elsewhere.environment[name]
    file = elsewhere.folder / "token"
    file.write_text(f"{token}\n")
    with_file = (*server, "--token-file", str(file))
    assert elsewhere.well(*with_file, "jobs").startswith("No jobs yet")
    following = elsewhere.start(*with_file, "events", "--follow")
    assert token not in " ".join(psutil.Process(following.pid).cmdline())
    wanting = one_sentence(elsewhere(*server, "jobs"), 2)
    assert "needs a token: the admin's, in admin.token" in wanting
    file.write_text("a-guess\n")
    refused = one_sentence(elsewhere(*with_file, "jobs"), 1)
    assert "refuses the token; give the one in admin.token" in refused
    for bad in (f"{token} {token}", f"{token}\x1b"):
        file.write_text(bad)
        broken = one_sentence(elsewhere(*with_file, "jobs"), 2)
        assert "the token is not one line of printable ASCII" in broken
        assert token not in broken
    unreadable = one_sentence(elsewhere(*server, "--token-file", "nothing", "jobs"), 2)
    assert "--token-file: nothing cannot be read (No such file or directory)" in unreadable
    user = one_sentence(elsewhere("--server", "http://me:secret@localhost:1", "jobs"), 2)
    assert "wants" not in user
    assert "secret" not in user


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        (["--server", "{url}", "serve"], 2, "'pipollux serve' works on this machine alone"),
        (["--server", "{url}", "demo"], 2, "'pipollux demo' works on this machine alone"),
        (["--server", "{url}", "version"], 2, "'pipollux version' works on this machine alone"),
        (["--server", "{url}", "jobs", "--state-dir", "."], 2, "give one of them"),
        (["--server", "localhost:1", "jobs"], 2, "'localhost:1' is not the URL of a scheduler"),
        (["--server", "http://localhost:1?a=b", "jobs"], 2, "has no user, password, query"),
        (["--server", "http://127.0.0.1:{free}", "jobs"], 1, "no scheduler answers at http://127"),
        (["--server", "http://127.0.0.1:{other}", "jobs"], 1, "is not a scheduler; check the URL"),
        (["--server", "http://127.0.0.1:{newer}", "jobs"], 1, "is pipollux 99.0, this is "),
    ],
)
def test_mistakes(
    command: list[str],
    code: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Run within this process, as starting another takes longer than making a mistake."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIPOLLUX_TOKEN", "t" * 32)
    with (
        answering("{}") as other,
        answering('{"status": "ok", "version": "99.0"}') as newer,
        socket.socket() as closed,
    ):
        closed.bind(("127.0.0.1", 0))
        ports = {"free": closed.getsockname()[1], "other": other, "newer": newer}
        line = [word.format(url="http://127.0.0.1:1", **ports) for word in command]
        with pytest.raises(SystemExit) as ended:
            main(line)
    said = capsys.readouterr()
    result = subprocess.CompletedProcess(line, int(ended.value.code or 0), said.out, said.err)
    assert says in one_sentence(result, code)
    assert "tttt" not in said.err


def test_what_stands_on_the_command_line_overrides_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIPOLLUX_SERVER", "http://127.0.0.1:1")
    monkeypatch.setenv("PIPOLLUX_TOKEN", "t" * 32)
    with kept(tmp_path / "state", Clock()):
        for command in (
            ["jobs", "--state-dir", str(tmp_path / "state")],
            ["version"],  # it asks nobody
        ):
            with pytest.raises(SystemExit) as ended:
                main(command)
            said = capsys.readouterr().err
            assert not ended.value.code, said
            # Nobody takes the admin of a folder for the user whose token is in the environment.
            assert ("PIPOLLUX_TOKEN is not used" in said) is (command != ["version"])
            assert "tttt" not in said


def test_the_token_of_a_user_is_not_ignored_beside_a_state_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command would be the admin's, and its job, say, of nobody."""
    for name in ("PIPOLLUX_SERVER", "PIPOLLUX_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    token = tmp_path / "token"
    token.write_text("t" * 32)
    command = ["jobs", "--state-dir", str(tmp_path / "state")]
    with kept(tmp_path / "state", Clock()):
        with pytest.raises(SystemExit) as ended:
            main(["--token-file", str(token), *command])
        said = capsys.readouterr()
        result = subprocess.CompletedProcess([], int(ended.value.code or 0), said.out, said.err)
        assert "--token-file is not used" in one_sentence(result, 2)
        assert "with --server" in said.err
        monkeypatch.setenv("PIPOLLUX_TOKEN_FILE", str(token))
        with pytest.raises(SystemExit) as ended:
            main(command)
        said = capsys.readouterr()
        assert not ended.value.code, said.err
        assert "PIPOLLUX_TOKEN_FILE is not used" in said.err


class answering:  # noqa: N801  # used as a function is
    """Something that answers every request alike, and is no scheduler of this version."""

    def __init__(self, text: str) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *args: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> int:
        self._thread.start()
        return int(self._server.server_address[1])

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._thread.join(240)
        self._server.server_close()
