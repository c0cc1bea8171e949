"""The agent of a replica without torch, for containers of the cluster in memory.

It takes the same command line as `pipollux_sched.backend.replica.agent`, meets the others through
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

_REPLICA = Path(__file__).parents[2] / "sched/pipollux_sched/backend/replica"


def main() -> int:
    """Run the agent; return its exit status."""
    sys.path.insert(0, str(_REPLICA))  # the package around these modules takes long to load
    import agent
    import meeting

    child: subprocess.Popen[bytes] | None = None

    def stop(_number: int, _frame: FrameType | None) -> None:
        if not agent._asked and child is not None:
            child.terminate()
        agent._asked = True
        if child is None:
            sys.exit(agent.STOPPED)

    signal.signal(signal.SIGTERM, stop)
    agent._make_folder()
    at = sys.argv.index("--")
    options = dict(word.split("=", 1) for word in sys.argv[1:at] if "=" in word)
    world, rank = options["--nnodes"], options["--rdzv-conf"].removeprefix("rank=")
    if int(world) > 1:
        own = meeting.own_address()
        with meeting.listen(own, 0) as listener:
            meeting.meet(int(rank), own, listener.getsockname()[1], 240.0)
    with tempfile.TemporaryDirectory() as folder:
        error = Path(folder) / "error.json"
        told = {"RANK": rank, "WORLD_SIZE": world, "TORCHELASTIC_ERROR_FILE": str(error)}
        script = str(_REPLICA / "script_main.py")
        child = subprocess.Popen(
            [sys.executable, "-u", script, *sys.argv[at + 1 :]], env={**os.environ, **told}
        )
        code = child.wait()
        agent._leave_result(agent.result_of(error, os.environ))
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
