"""`pipollux` whose replicas have a light agent: see `tests/sched/light_agent.py`."""

from __future__ import annotations

import sys
import warnings

from pipollux_sched.backend.replica import command
from pipollux_sched.cli import main
from tests.sched.scripts import LIGHT_AGENT

if __name__ == "__main__":
    warnings.simplefilter("error")
    command._AGENT = LIGHT_AGENT
    sys.argv[0] = "pipollux"
    sys.exit(main())
