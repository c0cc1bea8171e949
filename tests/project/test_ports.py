"""Ports of tests: two runs on one machine, each with a first worker of its own, share none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.programs import free_port

ALL = "from tests.programs import free_port; print(*{free_port() for _ in range(500)})"


def test_no_other_run_gets_the_same_ports(repository: Path) -> None:
    mine = {free_port() for _ in range(500)}
    other = subprocess.run(
        [sys.executable, "-c", ALL], cwd=repository, env=os.environ, capture_output=True, text=True
    )
    theirs = {int(port) for port in other.stdout.split()}
    assert theirs, other.stderr
    assert not mine & theirs
