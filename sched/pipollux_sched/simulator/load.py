"""A workload made lighter or heavier, without drawing anything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from pipollux_sched.simulator.workload.arrivals import JobArrival


def scale_load(jobs: Sequence[JobArrival], load: float) -> tuple[JobArrival, ...]:
    """Return `load` times as many jobs in the same time.

    A part keeps jobs at even distances in the order of arrival, so that 0.5 is every second one.
    Whole numbers are as many copies, interleaved: those of a job arrive one after another until the
    next job's arrival, so that no two come at once and bursts do not grow sharper.

    Args:
        jobs: in order of arrival.
        load: above 0.

    Raises:
        ValueError: `load` is out of range, or leaves no job.

    Example:
        >>> jobs = [JobArrival(f"job-{i}", 60.0 * i, "bert", 6, 384) for i in range(3)]
        >>> [(job.name, job.time) for job in scale_load(jobs, 2)][:3]
        [('job-0', 0.0), ('job-0~2', 30.0), ('job-1', 60.0)]
        >>> [job.name for job in scale_load(jobs, 0.5)]
        ['job-1']
    """
    if not (math.isfinite(load) and load > 0):
        raise ValueError(f"load: {load} must be a finite number > 0")
    copies = math.ceil(load)
    part = load - (copies - 1)
    names = {job.name for job in jobs}
    found = []
    for index, job in enumerate(jobs):
        gap = jobs[index + 1].time - job.time if index + 1 < len(jobs) else 0.0
        for copy in range(copies):
            if copy + 1 == copies and not _keeps(index, part):
                continue
            name = job.name if copy == 0 else _free_name(f"{job.name}~{copy + 1}", names)
            found.append(replace(job, name=name, time=job.time + gap * copy / copies))
    if not found:
        raise ValueError(f"load: {load:g} leaves none of {len(jobs)} jobs; give a greater one")
    return tuple(found)


def _keeps(index: int, part: float) -> bool:
    """Tell whether a job is one of those that keep a running count at `part` of all."""
    # A hair more, so that ten times 0.1 is one.
    return math.floor((index + 1) * part + 1e-9) > math.floor(index * part + 1e-9)


def _free_name(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "~"
    taken.add(name)
    return name
