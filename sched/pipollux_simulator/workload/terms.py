"""Terms of a job beyond its row of a workload: bounds, family, and costs of changes.

For jobs of a scheduler's history they come from the specification and from measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class JobTerms:
    """Terms of a job; the defaults select the simulation's options. Costs are in seconds.

    >>> JobTerms(min_replicas=2, preemptible=False).max_replicas is None
    True
    """

    min_replicas: int = 0
    max_replicas: int | None = None
    """Maximum replicas; None: as many as its application can use."""
    unmeasured_replicas: int = 1
    """Maximum replicas before any measurement."""
    preemptible: bool = True
    family: str | None = None
    """Family of jobs with similar lengths; None: by its name."""
    lineage: Any = None
    """Key of jobs that start with each other's measurements; None: by its name."""
    declares_length: bool = False
    """Whether it declares its remaining length."""
    start_seconds: float | None = None
    """Of a start from nothing; None: as for a restart."""
    restart_seconds: float | None = None
    """None: from the options."""
    assumed_restart_seconds: float | None = None
    """What the policy assumes before the first one; None: the true cost."""
    assumed_rescale_seconds: float | None = None
    """Likewise of an elastic resize."""
    rescale_seconds: float | None = None
    """None: from the options."""
