"""The location of a job's script."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from .job import JobSpec, SpecError

__all__ = ["ResolvedScript", "resolve_script", "with_script_found"]


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
    script = Path(job.script).expanduser()
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
    """Return a job with the absolute path of its script, which must exist, except in an image."""
    if job.image is not None:
        return job
    found = resolve_script(job, jobs_file, must_exist=True).path
    return job.model_copy(update={"script": str(found)})
