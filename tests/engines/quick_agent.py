"""The agent of a replica without torch, for containers of the cluster in memory.

It takes the same command line as `pipollux_agent.agent`, meets the others through
the scheduler, hands a stop on once, and leaves the same result; but it is there in no time.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType

_REPLICA = Path(__file__).parents[2] / "hybrid/pipollux_agent"


def main() -> int:
    """Run the agent; return its exit status."""
    sys.path.insert(0, str(_REPLICA))  # the package around these modules takes long to load
    import address_exchange
    import agent

    children: list[subprocess.Popen[bytes]] = []

    def stop(_number: int, _frame: FrameType | None) -> None:
        if not agent._asked:
            for child in children:
                child.terminate()
        agent._asked = True
        if not children:
            sys.exit(agent.STOPPED)

    signal.signal(signal.SIGTERM, stop)
    agent._make_folder()
    at = sys.argv.index("--")
    options = dict(word.split("=", 1) for word in sys.argv[1:at] if "=" in word)
    world, rank = int(options["--nnodes"]), int(options["--rdzv-conf"].removeprefix("rank="))
    if world > 1:
        own = address_exchange.own_address()
        with address_exchange.listen(own, 0) as listener:
            address_exchange.meet(rank, own, listener.getsockname()[1], 240.0)
    with tempfile.TemporaryDirectory() as folder:
        error = Path(folder) / "error.json"
        script, several = str(_REPLICA / "script_main.py"), int(options["--nproc-per-node"])
        for process in range(several):
            told = {
                "RANK": str(rank * several + process),
                "WORLD_SIZE": str(world * several),
                "TORCHELASTIC_ERROR_FILE": str(error),
            }
            command = [sys.executable, "-u", script, *sys.argv[at + 1 :]]
            children.append(subprocess.Popen(command, env={**os.environ, **told}))
        code = _wait(children)
        agent._leave_result(agent.result_of(error, os.environ))
    return code if code >= 0 else 128 - code


def _wait(children: list[subprocess.Popen[bytes]]) -> int:
    """Return the first exit status that is not 0; then the others are ended, too."""
    waiting = list(children)
    while waiting:
        pid, status = os.wait()
        ended = next((child for child in waiting if child.pid == pid), None)
        if ended is None:
            continue
        waiting.remove(ended)
        ended.returncode = os.waitstatus_to_exitcode(status)
        if ended.returncode != 0:
            for child in waiting:
                child.terminate()
                child.wait()
            return ended.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
