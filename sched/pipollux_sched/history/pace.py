"""The actual speed of a job, relative to its own model.

    pace = trained samples / Σ (goodput of its model on the allocation · seconds of training)

It contains what a model of step times does not: validation, waiting for data, the end of the
processes, repeated work, other load on the machine.
"""

from __future__ import annotations

from collections import Counter

from .application import HistoryApplication
from .records import PastJob


def pace_of(job: PastJob, app: HistoryApplication) -> float:
    """Return the pace of a job; 1 if it ran in configurations that its model does not cover."""
    predicted = 0.0
    for one in job.attempts:
        if one.first_step_at is None or not one.nodes:
            continue
        ends = (one.stopping_at, one.ended_at, job.until)
        seconds = min(end for end in ends if end is not None) - one.first_step_at
        if one.num_stages not in app.speedups:
            return 1.0
        placement = tuple(Counter(one.nodes).values())
        predicted += app.goodput(app.configure(one.num_stages, placement)) * max(seconds, 0.0)
    return job.samples / predicted if predicted > 0 else 1.0
