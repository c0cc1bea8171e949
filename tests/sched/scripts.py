"""Scripts that tests have a scheduler run as jobs."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent
TOY = _HERE / "toy_job.py"
"""Keeps the contract of a job without training anything."""
LAYERED = _HERE / "layered_job.py"
"""Trains a little, and knows what its layers cost."""
RENDEZVOUS = _HERE / "rendezvous_job.py"
"""Meets its replicas as torch's do."""
STAGES = _HERE / "stages_job.py"
"""Trains a little, with a process for each stage."""
ELASTIC = _HERE / "elastic_job.py"
"""Trains a little, while replicas come and go."""
PACED = _HERE / "paced_job.py"
"""Trains, by the clock, as fast as its hints say."""
LIGHT_AGENT = _HERE / "light_agent.py"
"""Starts such a script as torchrun's agent does, without torch."""
TRIAL = _HERE / "trial_job.py"
"""Is a trial of a sweep, and reports a metric."""
PUSH_PULL = _HERE / "push_pull_job.py"
"""Trains a little, by push and pull."""
