"""Find every process of a job, and end it.

torchrun starts its workers in separate sessions, so killing an agent's process group leaves them
behind; and once an agent is dead its workers are no longer its children. So processes are found in
two ways: as descendants of the agents, and by variables in the environment that children inherit.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

import psutil

from pipollux_sched.backend.base import POLL_INTERVAL


def descendants(pids: Iterable[int]) -> set[psutil.Process]:
    """Return the live processes with these ids, and all their descendants."""
    found: set[psutil.Process] = set()
    for pid in pids:
        with suppress(psutil.Error):
            root = psutil.Process(pid)
            found.update((root, *root.children(recursive=True)))
    return {process for process in found if is_alive(process)}


def marked(wanted: Callable[[Mapping[str, str]], bool]) -> set[psutil.Process]:
    """Return the live processes whose environment is `wanted`, except this one and its parents."""
    spared = {os.getpid()}
    with suppress(psutil.Error):
        spared.update(parent.pid for parent in psutil.Process().parents())
    found = set()
    for process in psutil.process_iter():
        if process.pid in spared:
            continue
        with suppress(psutil.Error, OSError):
            if wanted(process.environ()) and is_alive(process):
                found.add(process)
    return found


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process is alive and not a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def kill(processes: Iterable[psutil.Process]) -> None:
    """Kill processes; psutil spares those that merely reuse an id."""
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)


def end(find: Callable[[], set[psutil.Process]], grace: float, limit: float = 10.0) -> bool:
    """Ask processes to end, and kill those that still run after `grace` seconds.

    Only the roots among them get the signal: an agent passes it on, and a worker that gets a second
    one exits at once. Return whether all have ended within `limit` seconds more.
    """
    first = find()
    ids = {process.pid for process in first}
    for process in first:
        with suppress(psutil.Error):
            if process.ppid() not in ids:
                process.terminate()
    deadline = time.monotonic() + grace
    left = first
    while left and time.monotonic() < deadline + limit:
        if time.monotonic() >= deadline:
            kill(left)
        time.sleep(POLL_INTERVAL)
        left = find()
    return not left
