"""The location of a job's script."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from pipollux_utils.paths import expanded

from .job import JobSpec, SpecError


class ResolvedScript(NamedTuple):
    """The file of a job's script, and the folder in which it was found."""

    path: Path
    """Absolute."""
    found_in: str
    """The folder that its relative path was resolved in, for messages."""


def resolve_script(
    job: JobSpec, jobs_file: str | Path | None = None, *, must_exist: bool = False
) -> ResolvedScript:
    """Return a job's script: relative to the file of the job, else to the current folder.

    `SpecError`: the job has no script, or `must_exist` and the file does not exist.
    """
    if job.script is None:
        raise SpecError(f"job '{job.name}': script: is missing; give the path of a Python script")
    script = expanded(job.script)
    places = [(Path.cwd() / script, "the current folder")]
    if script.is_absolute():
        places = [(script, "an absolute path")]
    elif jobs_file is not None:
        places.insert(0, (Path(jobs_file).resolve().parent / script, f"the folder of {jobs_file}"))
    for path, folder in places:
        if path.is_file():
            return ResolvedScript(path.resolve(), folder)
    if must_exist:
        for path, _ in places:
            if path.is_dir():
                raise SpecError(
                    f"job '{job.name}': script: {path} is a folder; give the path of a Python file"
                )
        tried = ", nor ".join(dict.fromkeys(str(path) for path, _ in places))
        raise SpecError(f"job '{job.name}': script: there is no file {tried}; check the path")
    return ResolvedScript(*places[-1])


def with_script_found(job: JobSpec, jobs_file: str | Path | None = None) -> JobSpec:
    """Return a job with the absolute paths of its script and interpreter, except in an image.

    `SpecError`: one of them does not exist.
    """
    if job.image is not None:
        return job
    found: dict[str, str] = {}
    if job.script is not None or not job.has_program:
        found["script"] = str(resolve_script(job, jobs_file, must_exist=True).path)
    if job.python is not None:
        found["python"] = str(_find_python(job, job.python, jobs_file))
    return job.model_copy(update=found)


def _find_python(job: JobSpec, python: str, jobs_file: str | Path | None) -> Path:
    """Return the interpreter of a job, which may be given as its virtual environment."""
    path = expanded(python)
    places = [Path.cwd() / path]
    if jobs_file is not None and not path.is_absolute():
        places.insert(0, Path(jobs_file).resolve().parent / path)
    for place in places:
        found = place / "bin" / "python" if place.is_dir() else place
        if found.is_file() and os.access(found, os.X_OK):
            # Links are kept: that of a virtual environment leads out of it.
            return Path(os.path.abspath(found))
    tried = ", nor ".join(map(str, dict.fromkeys(places)))
    raise SpecError(
        f"job '{job.name}': python: there is no interpreter {tried}; give the path of one, or of a "
        "virtual environment"
    )
