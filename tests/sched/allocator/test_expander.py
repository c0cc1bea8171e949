"""Asking for nodes by a command of the operator's: real processes."""

from __future__ import annotations

import shlex
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from pipollux_sched.allocator.expander import CommandExpander, Expander, ExpanderError
from tests.cli.runner import wait_until


def command(script: str, *arguments: str) -> str:
    return shlex.join([sys.executable, "-c", script, *arguments])


def test_the_command_gets_the_numbers_and_the_names(tmp_path: Path) -> None:
    out = tmp_path / "a file; echo 'not a shell'"
    script = "import json, sys; open(sys.argv[1], 'a').write(json.dumps(sys.argv[2:]) + '\\n')"
    arguments = (str(out), "--size={desired}", "{current}", "{release}", "{{kept}}")
    expander: Expander = CommandExpander(command(script, *arguments), count=lambda: 7)
    expander.request(5, ["b", "c d"])
    expander.request(9)
    assert out.read_text().splitlines() == [
        '["--size=5", "7", "b,c d", "{kept}"]',
        '["--size=9", "7", "", "{kept}"]',
    ]
    assert expander.num_nodes() == 7


def test_a_command_that_fails_is_quoted_with_its_last_words() -> None:
    script = "import sys; print('trying'); print('quota exceeded', file=sys.stderr); sys.exit(3)"
    expander = CommandExpander(command(script, "{desired}"), count=lambda: 1)
    with pytest.raises(
        ExpanderError, match=r"' 4'? exited with 3.*: quota exceeded$|exited with 3"
    ):
        expander.request(4)
    with pytest.raises(ExpanderError, match=r"last line of output: quota exceeded$"):
        expander.request(4)


def test_a_command_that_a_signal_ends_is_told() -> None:
    script = "import os; os.kill(os.getpid(), 9)"
    with pytest.raises(ExpanderError, match="was ended by signal 9, so the number of nodes stays"):
        CommandExpander(command(script, "{desired}"), count=lambda: 1).request(2)


def test_a_command_that_is_not_there_is_named() -> None:
    with pytest.raises(ExpanderError, match=r"'no-such-program \{desired\}' cannot be started"):
        CommandExpander("no-such-program {desired}", count=lambda: 1).request(2)


@pytest.mark.exhaustive
def test_a_command_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    """The child ignores SIGTERM and holds the pipe; neither may keep the scheduler."""
    pid_file = tmp_path / "pid"
    child = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    script = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', sys.argv[1]])\n"
        "open(sys.argv[2], 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    text = command(script, child, str(pid_file), "{desired}")
    with pytest.raises(ExpanderError, match=r"did not end within 3 s and was killed"):
        CommandExpander(text, count=lambda: 1, timeout=3.0).request(2)
    pid = int(pid_file.read_text())
    # It was sent a SIGKILL, and is somebody else's child: it goes when it is next to run.
    with suppress(psutil.NoSuchProcess):
        child_process = psutil.Process(pid)
        wait_until(
            lambda: not child_process.is_running() or child_process.status() == psutil.STATUS_ZOMBIE
        )


@pytest.mark.parametrize(
    "text", ["", "grow", "grow {wanted}", "grow {desired} {", "grow '{desired}", "{desired} {0}"]
)
def test_a_command_that_cannot_be_meant_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expander command"):
        CommandExpander(text, count=lambda: 1)


def test_a_timeout_must_be_more_than_nothing() -> None:
    with pytest.raises(ValueError, match="timeout: 0 must be more than 0 seconds"):
        CommandExpander("grow {desired}", count=lambda: 1, timeout=0)
