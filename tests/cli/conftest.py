"""What tests of commands share."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from .runner import Cli


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    cli = Cli(tmp_path)
    yield cli
    cli.close()
    for server in cli.servers:
        with server:
            server.send_signal(signal.SIGTERM)
            server.wait()
    assert cli.alive() == []
