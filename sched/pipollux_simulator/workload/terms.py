"""What is known of a job besides its row of a workload: bounds, family, and what changes cost it.

A row of a CSV file has none of it; a job of a scheduler's history has it from its specification and
from what was measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class JobTerms:
    """Terms that a job runs on; the defaults leave everything to the simulation's options.

    Example:
        >>> JobTerms(min_replicas=2, preemptible=False).max_replicas is None
        True
    """

    min_replicas: int = 0
    """It runs on at least so many, or not at all."""
    max_replicas: int | None = None
    """None: as many as its application can use."""
    unmeasured_replicas: int = 1
    """So many it may have before any were measured."""
    preemptible: bool = True
    """False: once it runs, its allocation stays as it is."""
    family: str | None = None
    """Jobs that are about as long as it; None: by its name."""
    lineage: Any = None
    """Jobs of which each begins with what the last one measured; None: by its name."""
    declares_length: bool = False
    """Whether it says how much it still trains."""
    start_seconds: float | None = None
    """Seconds without training when it starts from nothing; None: as for a restart."""
    restart_seconds: float | None = None
    """Seconds without training when it is moved; None: as the options say."""
    assumed_restart_seconds: float | None = None
    """What the policy takes a restart to cost before the job has had one; None: it knows."""
    assumed_rescale_seconds: float | None = None
    """What it takes an elastic resize to cost before the job has had one; None: it knows."""
    rescale_seconds: float | None = None
    """Seconds for which surviving replicas pause in an elastic resize; None: as the options say."""
