"""Commands reach a scheduler on every interface, whatever the environment says of proxies."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import programs
from tests.services import service_missing
from tests.waiting import until

CLUSTER = "nodes: [{name: node-a, kind: cpu, slots: 1}]\n"
NO_NAME = "no-such-host-of-anybody.invalid"
"""A name of this machine that nobody resolves."""
RENAMED = ["unshare", "--uts", "sh", "-c", f'hostname {NO_NAME} && exec "$@"', "sh"]
NOBODY = "http://127.0.0.1:9"
"""A proxy that does not answer."""
PROXIES = {
    "none": {},
    "a proxy": {"HTTP_PROXY": NOBODY, "HTTPS_PROXY": NOBODY, "http_proxy": NOBODY},
    "a SOCKS proxy": {"ALL_PROXY": "socks5://127.0.0.1:9"},
}


def environment(folder: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "PIPOLLUX_STATE_DIR": str(folder / "state"), **more}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Path]:
    """The folder of a scheduler that listens everywhere, on a machine whose name is unknown."""
    if subprocess.run([*RENAMED, "true"], capture_output=True, check=False).returncode:
        service_missing("a process cannot have a host name of its own", "run pytest as root")
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    command = [*RENAMED, str(programs.PIPOLLUX), "serve", "--cluster", "cluster.yaml"]
    command += ["--host", "0.0.0.0", "--port", "0"]  # noqa: S104  # what the test is about
    with programs.Command(command, environment(tmp_path), tmp_path) as server:
        until(lambda: "Ctrl-C ends it" in server.output, "the scheduler serves")
        yield tmp_path
        server.send_signal(signal.SIGTERM)
        server.wait()


def ask(folder: Path, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*RENAMED, str(programs.PIPOLLUX), *command],
        env=environment(folder, **more),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_commands_reach_it_past_proxies_and_names(served: Path) -> None:
    (served / "train.py").write_text("print('done')\n")
    for number, (name, proxies) in enumerate(PROXIES.items()):
        job = f"jobs: [{{name: job-{number}, script: train.py}}]\n"
        (served / "jobs.yaml").write_text(job)
        submitted = ask(served, "submit", "jobs.yaml", **proxies)
        assert submitted.returncode == 0, f"{name}: {submitted.stderr}"
        listed = ask(served, "jobs", **proxies)
        assert f"job-{number}" in listed.stdout, f"{name}: {listed.stderr}"


def test_a_proxy_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    if subprocess.run([*RENAMED, "true"], capture_output=True, check=False).returncode:
        service_missing("a process cannot have a host name of its own", "run pytest as root")
    asked = ask(
        tmp_path,
        *("--server", "http://scheduler.invalid:1", "jobs"),
        ALL_PROXY="socks5://127.0.0.1:9",
        PIPOLLUX_TOKEN="token",
    )
    assert asked.returncode == 2
    assert "the proxy in HTTP_PROXY, HTTPS_PROXY or ALL_PROXY cannot be used" in asked.stderr
    assert "put scheduler.invalid into NO_PROXY" in asked.stderr
    assert "Traceback" not in asked.stderr
