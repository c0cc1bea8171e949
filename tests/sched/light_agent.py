"""The agent of a replica without torch, which takes seconds to import: the same but for torchrun.

    python -P light_agent.py OPTIONS -- SCRIPT ARGS...

It is `pipollux_agent.agent` (its signals, its files, its exit statuses) around one
process of the script that knows its rank. For tests of what a scheduler makes of toy jobs; that
torchrun does as well is left to those of engines, of `tests/sched/backend` and of whole schedulers.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

REPLICA = Path(__file__).parents[2] / "hybrid" / "pipollux_agent"


class Agent(Protocol):
    """What is used of the agent's module, which is loaded as a file, as where it runs."""

    STOPPED: int
    _asked: bool
    _run: Callable[[], int]
    main: Callable[[], int]


def run(agent: Agent) -> int:
    """Run the script to its end; return the agent's exit status."""
    end = sys.argv.index("--")
    options = dict(option.partition("=")[::2] for option in sys.argv[1:end])
    ranks = {
        "RANK": options["--rdzv-conf"].removeprefix("rank="),
        "WORLD_SIZE": options["--nnodes"],
        "LOCAL_RANK": "0",
    }
    child: subprocess.Popen[bytes] | None = None

    def stop(number: int, _frame: Any) -> None:
        signal.signal(number, signal.SIG_IGN)
        agent._asked = True
        if child is not None:
            child.send_signal(number)

    signal.signal(signal.SIGTERM, stop)
    command = [sys.executable, "-u", *sys.argv[end + 1 :]]
    child = subprocess.Popen(command, env={**os.environ, **ranks})
    if agent._asked:
        child.send_signal(signal.SIGTERM)
    code = child.wait()
    if agent._asked:
        return agent.STOPPED
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.path.insert(0, str(REPLICA))
    loaded: Any = import_module("agent")
    loaded._run = lambda: run(loaded)
    sys.exit(loaded.main())
