"""Workloads: which jobs arrive when, and what their users ask for; read and written as CSV.

The columns are those of the public Pollux workloads (`name,time,application,num_replicas,
batch_size`), so that those are read as they are.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class JobArrival:
    """One job of a workload.

    Example:
        >>> JobArrival("bert-1", 110.0, "bert", 6, 320).num_replicas
        6

    Raises:
        ValueError: when a number is out of range; it names the field.
    """

    name: str
    """Different from the names of all other jobs of the workload."""
    time: float
    """Seconds after the workload's start."""
    application: str
    """Name of the `Application`."""
    num_replicas: int
    """What the user would ask for where sizes are fixed."""
    batch_size: int
    """What the user would train with where it is fixed."""

    def __post_init__(self) -> None:
        for field in ("name", "application"):
            if not getattr(self, field):
                raise ValueError(f"{field}: '' must not be empty")
        if not (math.isfinite(self.time) and self.time >= 0):
            raise ValueError(f"time: {self.time} must be finite seconds >= 0")
        for field in ("num_replicas", "batch_size"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}: {getattr(self, field)} must be at least 1")


COLUMNS = tuple(field.name for field in fields(JobArrival))


def read_workload(path: Path | str) -> tuple[JobArrival, ...]:
    """Return the jobs of a CSV file in order of arrival; jobs of one time in the file's order.

    Raises:
        ValueError: when a column is missing, a value is wrong or a name comes twice; it names file,
            row (the header is row 1) and column.
        OSError: when the file cannot be read.
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
                        f"row {rows[job.name]}, too; give each job one of its own"
                    )
                rows[job.name] = reader.line_num
                jobs.append(job)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not a CSV file in UTF-8: {error}; save it as one") from error
    return tuple(sorted(jobs, key=lambda job: job.time))


def write_workload(path: Path | str, jobs: Iterable[JobArrival]) -> None:
    """Write jobs as a CSV file that `read_workload` reads to the same.

    Raises:
        OSError: when the file cannot be written.
    """
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for job in jobs:
            time = int(job.time) if job.time == int(job.time) else repr(job.time)
            writer.writerow((job.name, time, job.application, job.num_replicas, job.batch_size))


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
    try:
        return JobArrival(text["name"], time, text["application"], *counts)
    except ValueError as error:
        # The message begins with the field, which is the column.
        raise ValueError(f"{path}, row {row}, column {error}") from None
