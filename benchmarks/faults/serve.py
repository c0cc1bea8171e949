"""`pipollux serve` on a clock that can be set: the real time plus an offset in a file."""

from __future__ import annotations

import sys
import time
from pathlib import Path

FOLDER = Path(sys.argv[1])
_real_time = time.time


def _shown_time() -> float:
    return _real_time() + float((FOLDER / "clock").read_text() or 0)


# Before anything is imported that remembers the function.
time.time = _shown_time

from pipollux_policies import make_policy  # after the change of the clock
from pipollux_sched.cli.serving import run  # the same
from pipollux_sched.scheduler import Scheduler  # the same
from pipollux_sched.spec.cluster import load_cluster  # the same

scheduler = Scheduler(
    FOLDER / "state",
    load_cluster(FOLDER / "cluster.yaml"),
    make_policy("exact"),
    interval=2.0,
    hints_interval=5.0,
    checkpoint_interval=3.0,
    grace=20.0,
    heartbeat_timeout=12.0,
)
run(scheduler)
