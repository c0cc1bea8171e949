"""Commands reach a scheduler on every interface, whatever the environment says of proxies."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.extent import first
from tests.services import service_missing

from .runner import Cli

NOBODY = "http://127.0.0.1:9"
"""A proxy that does not answer."""
PROXIES = {
    "none": {},
    "a proxy": {"HTTP_PROXY": NOBODY, "HTTPS_PROXY": NOBODY, "http_proxy": NOBODY},
    "a SOCKS proxy": {"ALL_PROXY": "socks5://127.0.0.1:9"},
}


@pytest.fixture
def renamed(cli: Cli) -> Cli:
    """Commands on a machine whose name is unknown."""
    if subprocess.run(["unshare", "--uts", "true"], capture_output=True, check=False).returncode:
        service_missing("a process cannot have a host name of its own", "run pytest as root")
    cli.program = Path(__file__).with_name("renamed_pipollux.py")
    return cli


@pytest.mark.parametrize("proxies", first(1, ["a proxy", "a SOCKS proxy", "none"]))
def test_commands_reach_it_past_proxies_and_names(renamed: Cli, proxies: str) -> None:
    (renamed.folder / "train.py").write_text("print('done')\n")
    everywhere = "0.0.0.0"  # noqa: S104  # what the test is about
    renamed.serve("--host", everywhere, at="http://")
    renamed.environment |= PROXIES[proxies]
    (renamed.folder / "jobs.yaml").write_text("jobs: [{name: one, script: train.py}]\n")
    submitted = renamed("submit", "jobs.yaml")
    assert submitted.returncode == 0, submitted.stderr
    listed = renamed("jobs")
    assert "one" in listed.stdout, listed.stderr


def test_a_proxy_that_cannot_be_used_is_named(renamed: Cli) -> None:
    renamed.environment |= {"ALL_PROXY": "socks5://127.0.0.1:9", "PIPOLLUX_TOKEN": "token"}
    asked = renamed("--server", "http://scheduler.invalid:1", "jobs")
    assert asked.returncode == 2
    assert "the proxy in HTTP_PROXY, HTTPS_PROXY or ALL_PROXY cannot be used" in asked.stderr
    assert "put scheduler.invalid into NO_PROXY" in asked.stderr
    assert "Traceback" not in asked.stderr
