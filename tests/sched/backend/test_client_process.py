"""A program that answers requests, hangs, ends, or reads nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pipollux_sched.backend import client_process
from pipollux_sched.backend.client_process import ClientProcess
from tests.waiting import until

PROGRAM = """
import json, os, sys, time
print(sys.argv[1], file=sys.stderr, flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request == "end":
        sys.exit(7)
    if request == "hang":
        time.sleep(600)
    print(json.dumps([os.getpid(), request]), flush=True)
with open(sys.argv[1], "w") as file:
    file.write("its input has ended")
"""


@pytest.fixture
def client(tmp_path: Path) -> Iterator[ClientProcess]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    made = ClientProcess(program, str(tmp_path / "ended"), log=tmp_path / "log")
    yield made
    assert made.close() is None
    assert not made.runs


def ask(client: ClientProcess, request: object) -> int:
    """Return the process that has answered."""
    client.send(request, 60.0)
    process, answer = client.receive(60.0)
    assert answer == request
    return int(process)


def test_requests_are_answered_by_one_process(client: ClientProcess, tmp_path: Path) -> None:
    """However long they are; at the end it has time for what it does last."""
    assert not client.runs
    first = ask(client, ["a", {"b": 1}])
    assert ask(client, "long" * 2**18) == first
    client.send(1, 60.0)
    client.send(2, 60.0)
    assert [client.receive(60.0)[1] for _ in range(2)] == [1, 2]
    assert client.close(60.0) is None
    assert (tmp_path / "ended").read_text() == "its input has ended"
    assert not psutil.pid_exists(first)


def test_one_that_has_ended_is_started_again(
    client: ClientProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its output is kept, unless there is too much of it."""
    first = ask(client, 1)
    client.send("end", 60.0)
    with pytest.raises(OSError, match="ended with status 7"):
        client.receive(60.0)
    assert ask(client, 2) != first
    line = f"{tmp_path / 'ended'}\n"
    assert (tmp_path / "log").read_text() == 2 * line
    monkeypatch.setattr(client_process, "LOG_LIMIT", len(line))
    client.close()
    ask(client, 3)
    assert (tmp_path / "log").read_text() == line


def test_one_that_hangs_is_killed(client: ClientProcess) -> None:
    """No call waits for it: neither for its answer, nor until it reads a request."""
    process = psutil.Process(ask(client, 1))
    client.send("hang", 60.0)
    with pytest.raises(TimeoutError, match=r"has not answered for 0\.1 s"):
        client.receive(0.1)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"has read nothing for 0\.1 s"):
        client.send("long" * 2**18, 0.1)
    assert time.monotonic() < began + 30.0
    client.close()
    until(lambda: not process.is_running(), "it is killed")
