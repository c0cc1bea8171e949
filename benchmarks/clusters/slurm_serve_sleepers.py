"""`pipollux serve` whose replicas are those of `slurm_sleeper.py`; everything else is real."""

from __future__ import annotations

import sys
from pathlib import Path

from pipollux_sched.backend.slurm import engine
from pipollux_sched.cli import main

SLEEPER = Path(__file__).with_name("slurm_sleeper.py")

# Nothing else is replaced.
engine.agent_command = lambda *_, **__: [sys.executable, "-I", "-S", str(SLEEPER)]  # type: ignore[attr-defined]  # see above
main()
