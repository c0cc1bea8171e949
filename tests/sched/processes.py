"""Finding the processes that a scheduler started."""

from __future__ import annotations

from pathlib import Path

import psutil


def processes_of(state_dir: Path) -> list[psutil.Process]:
    """Everything alive that was started for this state directory, wherever it hangs."""
    found = []
    for process in psutil.process_iter():
        try:
            ours = process.environ().get("PIPOLLUX_STATE_DIR") == str(state_dir)
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found
