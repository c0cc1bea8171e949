"""Random workloads: arrival times, applications, and requests of jobs.

Arrivals and applications follow the Philly trace (Jeon et al., ATC'19), sampled as in the Pollux
artifact: jobs that ran for a minute or more and used less than 1000 GPU-hours, within some hours of
the day. The hour and the GPU time of a job are sampled from the trace if given, else from shares
counted in it: `HOURLY` and `CATEGORIES`. The category of its GPU time determines the application.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .arrivals import JobArrival

Mix = Literal["pollux", "pipelines", "mixed"]

Request: TypeAlias = Callable[[np.random.Generator], tuple[int, int]]
"""Draws the request (num_replicas, batch_size) of a user of an application."""

HOURLY = (
    *(1.32, 1.03, 1.14, 1.09, 0.72, 1.20, 1.67, 2.12, 1.13, 1.02, 0.95, 0.84),
    *(0.66, 0.70, 0.66, 0.68, 0.93, 0.68, 0.82, 0.71, 0.96, 0.85, 1.15, 0.98),
)
"""Arrivals by hour of the day, in UTC, relative to the mean; counted in 74 428 jobs of Philly."""

_HOUR = 3600.0
_LEAST_DURATION, _MOST_GPU_TIME = 60.0, 1000 * _HOUR
_PHILLY_COLUMNS = ("timestamp", "duration", "gpu_time")


class Category(NamedTuple):
    """Jobs of similar GPU time."""

    below: float
    """Upper bound of the GPU-seconds of its jobs."""
    share: float
    applications: Mapping[Mix, Sequence[str]]
    """Applications by mix, with equal probabilities; absent: the mix has no such jobs."""


CATEGORIES = (
    Category(1 * _HOUR, 0.746, {"pollux": ("cifar10", "ncf")}),
    Category(10 * _HOUR, 0.186, {"pollux": ("deepspeech2", "bert"), "pipelines": ("gpt-1.3b",)}),
    Category(100 * _HOUR, 0.048, {"pollux": ("yolov3",), "pipelines": ("gpt-2.7b", "gpt-6.7b")}),
    Category(math.inf, 0.021, {"pollux": ("imagenet",), "pipelines": ("gpt-13b",)}),
)
"""The Pollux artifact's categories and applications; pipelines are in those of their GPU time.
"mixed" uses either mix's applications with equal probability if both have some."""


class _Sample(NamedTuple):
    time: float
    category: int


@dataclass(frozen=True)
class _Philly:
    """The trace: hour of the day in seconds and category of each job, arrays of shape (jobs,)."""

    time_of_day: NDArray[np.float64]
    category: NDArray[np.int64]


def generate(
    num_jobs: int,
    hours: float,
    seed: int,
    mix: Mix,
    requests: Mapping[str, Request],
    *,
    load: float = 1.0,
    start_hour: float = 2.0,
    philly: Path | str | None = None,
) -> tuple[JobArrival, ...]:
    """Draw a workload; deterministic for given arguments. Jobs are named by application and index.

    Args:
        num_jobs: jobs at load 1; Pollux has 160.
        hours: duration of the arrivals; Pollux has 8.
        seed: of the generator.
        mix: "pollux" (its six applications), "pipelines" (GPT-like models) or "mixed".
        requests: requests of users by application, of which the mix must have one.
        load: factor of the number of jobs in the same time.
        start_hour: hour of the day in UTC at which the workload starts; Pollux has 2.
        philly: CSV file with the columns timestamp, duration and gpu_time, in seconds, to sample
        hours and GPU times from, each job at most once while there are enough.

    Example:
        >>> jobs = generate(4, 1.0, 0, "pipelines", {"gpt-1.3b": lambda rng: (2, 64)})
        >>> [job.name for job in jobs]
        ['gpt-1.3b-0', 'gpt-1.3b-1', 'gpt-1.3b-2', 'gpt-1.3b-3']
    """
    _check(num_jobs, hours, load, start_hour)
    choices = _choices(mix, requests)
    count = max(1, round(num_jobs * load))
    rng = np.random.default_rng(seed)
    if philly is None:
        samples = _drawn(rng, count, hours, start_hour, sorted(choices))
    else:
        samples = _sampled(rng, count, hours, start_hour, sorted(choices), _read_philly(philly))
    jobs = []
    for index, sample in enumerate(sorted(samples)):
        groups = choices[sample.category]
        group = groups[int(rng.integers(len(groups)))]
        application = group[int(rng.integers(len(group)))]
        num_replicas, batch_size = requests[application](rng)
        name = f"{application}-{index}"
        jobs.append(JobArrival(name, sample.time, application, num_replicas, batch_size))
    return tuple(jobs)


def _read_philly(path: Path | str) -> _Philly:
    path = Path(path)
    times, categories = [], []
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        missing = [name for name in _PHILLY_COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(
                f"{path}, row 1: there is no column {missing[0]}; "
                f"give the columns {','.join(_PHILLY_COLUMNS)}"
            )
        for entry in reader:
            where = f"{path}, row {reader.line_num}"
            duration, gpu_time = (_number(where, entry, name) for name in _PHILLY_COLUMNS[1:])
            if duration < _LEAST_DURATION or gpu_time >= _MOST_GPU_TIME:
                continue
            times.append(_time_of_day(where, entry))
            categories.append(next(i for i, kind in enumerate(CATEGORIES) if gpu_time < kind.below))
    if not times:
        raise ValueError(f"{path} has no job of a minute or more and less than 1000 GPU-hours")
    return _Philly(np.array(times), np.array(categories))


def _drawn(
    rng: np.random.Generator,
    count: int,
    hours: float,
    start_hour: float,
    categories: Sequence[int],
) -> list[_Sample]:
    """Draw from the counted shares, with times in whole seconds."""
    edges = _hour_edges(hours, start_hour)
    weights = np.array([HOURLY[math.floor(start_hour + edge) % 24] for edge in edges[:-1]])
    weights *= np.diff(edges)
    pieces = rng.choice(len(weights), size=count, p=weights / weights.sum())
    within = rng.random(count)
    shares = np.array([CATEGORIES[index].share for index in categories])
    kinds = rng.choice(categories, size=count, p=shares / shares.sum())
    times = edges[pieces] + within * np.diff(edges)[pieces]
    return [
        _Sample(float(math.floor(time * _HOUR)), int(kind))
        for time, kind in zip(times, kinds, strict=True)
    ]


def _hour_edges(hours: float, start_hour: float) -> NDArray[np.float64]:
    """Return the edges, in hours, of the pieces of the workload within each hour of the day."""
    first = math.floor(start_hour) + 1 - start_hour
    whole = np.arange(first, hours, 1.0)
    return np.concatenate(([0.0], whole, [hours]))


def _sampled(
    rng: np.random.Generator,
    count: int,
    hours: float,
    start_hour: float,
    categories: Sequence[int],
    philly: _Philly,
) -> list[_Sample]:
    if hours > 24:
        raise ValueError(
            f"hours: {hours} must be at most 24 with a Philly trace, of which only the time of day "
            "is used; leave philly out"
        )
    since = (philly.time_of_day - start_hour * _HOUR) % (24 * _HOUR)
    fits = np.flatnonzero((since < hours * _HOUR) & np.isin(philly.category, categories))
    if not fits.size:
        raise ValueError(
            f"philly: no job of the mix arrives in {hours:g} hours from hour {start_hour:g} on; "
            "give more hours"
        )
    chosen = rng.choice(fits, size=count, replace=count > fits.size)
    return [_Sample(float(since[index]), int(philly.category[index])) for index in chosen]


def _choices(mix: Mix, requests: Mapping[str, Request]) -> dict[int, list[list[str]]]:
    groups_of: dict[str, tuple[Mix, ...]] = {
        "pollux": ("pollux",),
        "pipelines": ("pipelines",),
        "mixed": ("pollux", "pipelines"),
    }
    if mix not in groups_of:
        raise ValueError(f"mix: {mix!r} must be one of {', '.join(groups_of)}")
    choices = {}
    for index, category in enumerate(CATEGORIES):
        groups = [
            [name for name in category.applications.get(group, ()) if name in requests]
            for group in groups_of[mix]
        ]
        groups = [group for group in groups if group]
        if groups:
            choices[index] = groups
    if not choices:
        known = [
            name
            for category in CATEGORIES
            for group in groups_of[mix]
            for name in category.applications.get(group, ())
        ]
        raise ValueError(
            f"requests: {sorted(requests)} has no application of the mix {mix!r}; "
            f"give at least one of {', '.join(known)}"
        )
    return choices


def _check(num_jobs: int, hours: float, load: float, start_hour: float) -> None:
    if num_jobs < 1:
        raise ValueError(f"num_jobs: {num_jobs} must be at least 1")
    for name, value in (("hours", hours), ("load", load)):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name}: {value} must be a finite number > 0")
    if not 0 <= start_hour < 24:
        raise ValueError(f"start_hour: {start_hour} must be from 0 to below 24")


def _number(where: str, entry: Mapping[str, str | None], column: str) -> float:
    try:
        value = float(entry[column] or "")
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{where}, column {column}: {entry[column]!r} must be seconds >= 0")
    return value


def _time_of_day(where: str, entry: Mapping[str, str | None]) -> float:
    try:
        stamp = datetime.fromisoformat(entry["timestamp"] or "")
    except ValueError:
        raise ValueError(
            f"{where}, column timestamp: {entry['timestamp']!r} must be a date and time as in "
            "2017-10-09 07:01:55"
        ) from None
    return stamp.hour * _HOUR + stamp.minute * 60.0 + stamp.second
