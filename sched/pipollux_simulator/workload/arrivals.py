"""Workloads: arrival times of jobs, and their users' requests; read and written as CSV.

The columns are those of the public Pollux workloads, which can be read unchanged.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipollux_policies import family_of
from pipollux_utils.atomic_write import write_output

from .terms import JobTerms


@dataclass(frozen=True)
class JobArrival:
    """One job of a workload; ValueError if a number is out of range.

    >>> JobArrival("bert-1", 110.0, "bert", 6, 320).num_replicas
    6
    """

    name: str
    time: float
    application: str
    num_replicas: int
    """Used if sizes are fixed."""
    batch_size: int
    """Used if it is fixed."""
    team: str | None = None
    """The team whose quota applies; None: its user's team, else the default one."""
    user: str | None = None
    priority: str | None = None
    """Name of its priority class; None: priority 0."""
    terms: JobTerms = field(default_factory=JobTerms)

    def __post_init__(self) -> None:
        for key in ("name", "application"):
            if not getattr(self, key):
                raise ValueError(f"{key}: '' must not be empty")
        if not (math.isfinite(self.time) and self.time >= 0):
            raise ValueError(f"time: {self.time} must be finite seconds >= 0")
        for key in ("num_replicas", "batch_size"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}: {getattr(self, key)} must be at least 1")

    @property
    def family(self) -> str:
        """The family of jobs with similar lengths."""
        return self.terms.family or family_of(self.name)

    @property
    def lineage(self) -> Any:
        """The key of jobs that start with each other's measurements."""
        return self.terms.lineage or family_of(self.name)


COLUMNS = ("name", "time", "application", "num_replicas", "batch_size")
"""Required columns of a workload."""
OWNER_COLUMNS = ("team", "user", "priority")


def read_workload(path: Path | str) -> tuple[JobArrival, ...]:
    """Return the jobs of a CSV file in order of arrival; with equal times, in the file's order.
    Raises ValueError with file, row (the header is row 1) and column.
    """
    path = Path(path)
    rows: dict[str, int] = {}
    jobs: list[JobArrival] = []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            _check_header(path, reader.fieldnames or ())
            for entry in reader:
                job = _read_row(path, reader.line_num, entry)
                if job.name in rows:
                    raise ValueError(
                        f"{path}, row {reader.line_num}, column name: {job.name!r} is the name of "
                        f"row {rows[job.name]}, too; give each job another name"
                    )
                rows[job.name] = reader.line_num
                jobs.append(job)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not a CSV file in UTF-8: {error}; save it as one") from error
    return tuple(sorted(jobs, key=lambda job: job.time))


def write_workload(path: Path | str, jobs: Iterable[JobArrival]) -> None:
    """Write jobs as a CSV file for `read_workload`."""
    table = io.StringIO(newline="")
    writer = csv.writer(table, lineterminator="\n")
    jobs = list(jobs)
    owned = [name for name in OWNER_COLUMNS if any(getattr(job, name) for job in jobs)]
    writer.writerow((*COLUMNS, *owned))
    for job in jobs:
        time = int(job.time) if job.time == int(job.time) else repr(job.time)
        row = job.name, time, job.application, job.num_replicas, job.batch_size
        writer.writerow((*row, *(getattr(job, name) or "" for name in owned)))
    write_output(Path(path), table.getvalue().encode())


def _check_header(path: Path, header: Sequence[str]) -> None:
    for column in COLUMNS:
        if column not in header:
            raise ValueError(
                f"{path}, row 1: there is no column {column}; give the columns {','.join(COLUMNS)}"
            )


def _read_row(path: Path, row: int, entry: dict[str, str | None]) -> JobArrival:
    def where(column: str) -> str:
        return f"{path}, row {row}, column {column}"

    for column in COLUMNS:
        if entry[column] is None:
            raise ValueError(f"{where(column)}: nothing is there; give all {len(COLUMNS)} values")
    text = {column: (entry[column] or "").strip() for column in COLUMNS}
    try:
        time = float(text["time"])
    except ValueError:
        raise ValueError(f"{where('time')}: {text['time']!r} must be seconds >= 0") from None
    counts = []
    for column in ("num_replicas", "batch_size"):
        try:
            counts.append(int(text[column]))
        except ValueError:
            raise ValueError(
                f"{where(column)}: {text[column]!r} must be a whole number from 1 on"
            ) from None
    team, user, priority = ((entry.get(name) or "").strip() or None for name in OWNER_COLUMNS)
    try:
        sizes = counts[0], counts[1]
        return JobArrival(text["name"], time, text["application"], *sizes, team, user, priority)
    except ValueError as error:
        # The message begins with the field, which is the column's name.
        raise ValueError(f"{path}, row {row}, column {error}") from None


def scale_load(jobs: Sequence[JobArrival], load: float) -> tuple[JobArrival, ...]:
    """Return `load` times as many jobs in the same time, at least one.

    A fraction keeps jobs at even distances in the order of arrival: 0.5 keeps every second one. A
    whole number makes interleaved copies: copies of a job arrive between it and the next job, so
    that no two arrive at once and bursts do not become sharper.

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
        raise ValueError(f"load: {load:g} leaves none of {len(jobs)} jobs; give a larger one")
    return tuple(found)


def _keeps(index: int, part: float) -> bool:
    """Return whether a job is kept, so that a running count stays at `part` of all jobs."""
    # With a tolerance, so that ten times 0.1 is one.
    return math.floor((index + 1) * part + 1e-9) > math.floor(index * part + 1e-9)


def _free_name(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "~"
    taken.add(name)
    return name
