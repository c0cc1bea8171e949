"""`light_pipollux.py` in a process whose host has a name that nobody resolves."""

from __future__ import annotations

import ctypes
import os
import runpy
import socket
from pathlib import Path

NAME = "no-such-host-of-anybody.invalid"
CLONE_NEWUTS = 0x04000000


def rename_host() -> None:
    """Name the host, as this process and those that it starts see it."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUTS):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    socket.sethostname(NAME)


if __name__ == "__main__":
    rename_host()
    runpy.run_path(str(Path(__file__).with_name("light_pipollux.py")), run_name="__main__")
