"""A replica that waits in vain says for whom: one that has ended, or one that hangs."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from pipollux_hybrid import (
    ConfigurationError,
    SynchronizationError,
    destroy_process_group,
    init_process_group,
)
from pipollux_hybrid.job import peers
from pipollux_hybrid.job.context import context
from pipollux_hybrid.job.env import JobEnvironment
from pipollux_hybrid.job.peers import Standstill, needing_all
from tests.extent import first
from tests.hybrid.replicas import run_replicas


def meet() -> str:
    """Wait for all replicas; what is said if they do not come."""
    try:
        context().control.barrier()
    except SynchronizationError as error:
        return str(error)
    return "all came"


def one_ends() -> str:
    init_process_group("gloo")
    assert meet() == "all came"
    if context().env.rank == 1:
        os._exit(3)
    return meet()


@pytest.mark.parametrize("watched", first(1, ["60", "0"]))
def test_a_replica_that_ended_is_named(watched: str) -> None:
    environment = {"PIPOLLUX_HOST_TIMEOUT": watched}
    message, _ = run_replicas(one_ends, 2, environment=environment, exit_codes=(3,))
    assert "replica 0 of 2 lost its peers at a step boundary" in message
    if watched == "0":
        assert "another replica has ended or hangs; its log says why" in message
    else:
        where = f"replica 1 on {socket.gethostname()}"
        assert message.endswith(f"{where} has ended: its log says why."), "and no library's text"


def test_a_process_that_stood_still_knows_it() -> None:
    """Shortly afterwards; what happens much later has nothing to do with it."""
    times = [0.0]
    standstill = Standstill(lambda: times[-1])
    for moment in (1.0, 2.0, 6.5):
        times.append(moment)
        standstill.tick()
    assert standstill.seconds() == 0.0, "a machine may be busy"
    times.append(90.0)
    assert standstill.seconds() == 83.5, "before its thread has ticked"
    for moment in range(91, 125):
        times.append(float(moment))
        standstill.tick()
    assert standstill.seconds() == 0.0


def who_is_not_waited_for(needed: bool) -> list[list[int]]:
    """The ranks that waiting on a GPU ends for, once with one gone and once again later."""
    told: list[list[int]] = []
    peers.abort_device_groups = lambda gone, **_: told.append(sorted(gone))  # in this process alone
    init_process_group("gloo")
    assert meet() == "all came"
    if context().env.rank == 1:
        os._exit(3)
    with needing_all() if needed else nullcontext():
        assert "replica 1" in meet()
    with needing_all():
        pass
    return told


@pytest.mark.parametrize("needed", [False, True])
def test_in_a_step_nobody_waits_on_a_gpu_once_one_is_gone(needed: bool) -> None:
    """Those that live wait for it, too; outside of a step only it is waited for in vain."""
    told, _ = run_replicas(who_is_not_waited_for, 2, needed, exit_codes=(3,))
    assert told == [[0, 1] if needed else [1], [0, 1]]


def one_hangs(folder: Path) -> str:
    """The environment's timeout holds, whatever the script says."""
    init_process_group("gloo", timeout=1000)
    if context().env.rank == 1:
        while not (folder / "said").exists():
            time.sleep(0.01)
        return ""
    said = meet()
    (folder / "said").touch()
    return said


def test_a_replica_that_hangs_is_told_from_one_that_is_gone(tmp_path: Path) -> None:
    environment = {"PIPOLLUX_TIMEOUT": "1", "PIPOLLUX_HOST_TIMEOUT": "1"}
    message, _ = run_replicas(one_hangs, 2, tmp_path, environment=environment)
    assert "all hosts answer and no replica has ended, so one hangs, or does something" in message
    assert "longer than the 1 s of PIPOLLUX_TIMEOUT" in message


def threads() -> list[list[str]]:
    """Names of threads while a job runs, and when it has ended."""
    init_process_group("gloo")
    found = [[x.name for x in threading.enumerate()]]
    destroy_process_group()
    return [*found, [x.name for x in threading.enumerate()]]


def test_the_watch_ends_with_the_job() -> None:
    for during, after in run_replicas(threads, 2):
        assert "pipollux-peers" in during
        assert "pipollux-peers" not in after


def test_seconds_to_wait() -> None:
    assert JobEnvironment.read({}).timeout is None
    assert JobEnvironment.read({}).host_timeout == 60
    env = JobEnvironment.read({"PIPOLLUX_TIMEOUT": "300", "PIPOLLUX_HOST_TIMEOUT": "0"})
    assert (env.timeout, env.host_timeout) == (300, 0)
    for name in ("PIPOLLUX_TIMEOUT", "PIPOLLUX_HOST_TIMEOUT", "PIPOLLUX_FROZEN_TIMEOUT"):
        with pytest.raises(ConfigurationError, match=re.escape(f"{name}='soon': a positive")):
            JobEnvironment.read({name: "soon"})
    with pytest.raises(ConfigurationError, match="PIPOLLUX_TIMEOUT='0'"):
        JobEnvironment.read({"PIPOLLUX_TIMEOUT": "0"})
