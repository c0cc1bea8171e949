"""Commands whose output cannot be written, or not as it is, end in a sentence or do without."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests import programs
from tests.extent import first

from .kept import Clock, kept

TABLE, DATA = "jobs", "describe wide --output json"
"""Commands whose output is a table for people, and data for programs."""
PIPOLLUX = f"{shlex.quote(sys.executable)} {shlex.quote(str(programs.PIPOLLUX))}"


def shell(command: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a shell's command line, beside a state directory with jobs in it."""
    if not (folder / "state").exists():
        with kept(folder / "state", Clock()):
            pass
    environment = {**os.environ, "PIPOLLUX_STATE_DIR": str(folder / "state"), **variables}
    return subprocess.run(
        ["/bin/sh", "-c", command.replace("pipollux", PIPOLLUX)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        timeout=300.0,
        check=False,
    )


def without_note(text: str) -> str:
    """Without the remark that no scheduler serves the directory."""
    return "".join(line for line in text.splitlines(True) if not line.startswith("No scheduler "))


@pytest.mark.parametrize("command", first(1, ["jobs", "nodes --output json", "events"]))
def test_a_full_device(command: str, tmp_path: Path) -> None:
    ended = shell(f"pipollux {command} > /dev/full", tmp_path)
    assert ended.returncode == 1
    said = without_note(ended.stderr)
    assert said == "Error: the output cannot be written (No space left on device)\n"


@pytest.mark.parametrize(
    "command", first(1, [f"{TABLE} >&-", f"{DATA} 2>&-", f"{DATA} >&-", f"{TABLE} 2>&-"])
)
@pytest.mark.exhaustive
def test_a_closed_output(command: str, tmp_path: Path) -> None:
    """As with other programs: nothing is printed, and what is asked for is done."""
    ended = shell(f"pipollux {command}", tmp_path)
    assert (ended.returncode, without_note(ended.stderr)) == (0, "")
    if "2>" in command:
        assert "wide" in ended.stdout
    else:
        assert ended.stdout == ""


@pytest.mark.parametrize("command", first(1, [TABLE, DATA]))
@pytest.mark.exhaustive
def test_a_locale_without_the_characters(command: str, tmp_path: Path) -> None:
    ended = shell(f"pipollux {command}", tmp_path, PYTHONIOENCODING="latin-1")
    assert (ended.returncode, without_note(ended.stderr)) == (0, "")
    assert "wide" in ended.stdout
    if "json" in command:
        json.loads(ended.stdout)


def test_a_deleted_working_directory(tmp_path: Path) -> None:
    ended = shell('mkdir gone && cd gone && rmdir "$PWD" && pipollux jobs', tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith(
        "Error: the working directory has been deleted; change to another one"
    )
    assert "Traceback" not in ended.stderr
