"""What tests of commands share."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from .runner import Cli


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    cli = Cli(tmp_path)
    yield cli
    for server in cli.servers:
        if server.poll() is None:
            server.terminate()
            try:
                server.wait(240)
            except subprocess.TimeoutExpired:
                server.kill()
        if server.stdout is not None:
            server.stdout.close()
    assert cli.alive() == []
