"""Starts the supervisor of a replica on its node, once, for an actor of Ray.

    python -I -S launcher.py BASE LOG ACTOR GPUS

It runs the command of the record BASE.json: `pipollux_agent.supervisor --step`. Its parent is the
actor with process id ACTOR. Ray kills the children of an actor with it; then this process is
killed, and the supervisor gets SIGTERM from the kernel, so that the job saves. The module must
import only the standard library.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1
"""Option of Linux's `prctl`: the signal that a process gets when its parent ends."""
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables by which Ray shows an actor its GPUs, depending on their maker."""
NOT_STARTED = 74
"""Exit status if nothing was started."""


def end_with(parent: int, number: signal.Signals) -> None:
    """Send this process a signal when its parent ends, or end it if it has ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:
        os._exit(NOT_STARTED)


def main(base: str, log: str, actor: str, gpus: str) -> int:
    """Run the supervisor to its end; return the exit status of a shell."""
    end_with(int(actor), signal.SIGKILL)
    try:
        record = json.loads(Path(f"{base}.json").read_text(encoding="utf-8"))
        begun = os.open(f"{base}.begun", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except (OSError, ValueError):  # forgotten, or begun before by an actor whose start was repeated
        return NOT_STARTED
    os.close(begun)
    environment = record["environment"]
    if gpus:
        shown = {name: os.environ[name] for name in VISIBLE if os.environ.get(name)}
        environment |= shown or {VISIBLE[0]: gpus}
    own = os.getpid()
    try:
        if len(gpus.split(",")) * bool(gpus) != record["gpus"]:
            raise OSError(f"Ray assigned the GPUs '{gpus}' to a replica of {record['gpus']}")
        child = subprocess.Popen(
            record["command"],
            env=environment,
            cwd=record["directory"],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: end_with(own, signal.SIGTERM),  # this process has one thread
        )
    except (OSError, ValueError) as error:
        with open(log, "a", encoding="utf-8") as file:
            file.write(f"{socket.gethostname()}: {error}\n")
        return NOT_STARTED
    signal.signal(signal.SIGCONT, lambda *_: child.send_signal(signal.SIGCONT))
    code = child.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
